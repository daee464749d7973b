"""Arrays go to the emulator's devices and come back as they were."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

Devices = list[jax.Device]
Cut = Callable[[np.ndarray], np.ndarray]

DTYPES = [
    np.bool_,
    *(np.int8, np.int16, np.int32, np.int64, np.uint8, np.uint16, np.uint32, np.uint64),
    *(np.float16, np.float32, np.float64, np.complex64, np.complex128, ml_dtypes.bfloat16),
    *(ml_dtypes.int2, ml_dtypes.int4, ml_dtypes.uint2, ml_dtypes.uint4, ml_dtypes.float4_e2m1fn),
    *(ml_dtypes.float8_e3m4, ml_dtypes.float8_e4m3, ml_dtypes.float8_e4m3b11fnuz, ml_dtypes.float8_e4m3fn),
    *(ml_dtypes.float8_e4m3fnuz, ml_dtypes.float8_e5m2, ml_dtypes.float8_e5m2fnuz, ml_dtypes.float8_e8m0fnu),
]


def some_values(dtype: type, shape: tuple[int, ...]) -> np.ndarray:
    """0 and 1 in turn: every dtype but e8m0 (which has no 0) holds them."""
    values = np.arange(np.prod(shape, dtype=int)) % 2
    return (values + (dtype is ml_dtypes.float8_e8m0fnu)).reshape(shape).astype(dtype)


def identical(array: jax.Array, expected: np.ndarray) -> bool:
    fetched = np.asarray(array)
    same_type = (fetched.dtype, fetched.shape) == (expected.dtype, expected.shape)
    return same_type and fetched.tobytes() == expected.tobytes()


@pytest.fixture
def mesh(devices: Devices) -> Mesh:
    return Mesh(np.array(devices).reshape(2, 4), ("slice", "chip"))


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: np.dtype(dtype).name)
def test_every_dtype_comes_back(devices: Devices, mesh: Mesh, dtype: type) -> None:
    values = some_values(dtype, (8, 3))
    with jax.enable_x64(True):
        for place in (devices[5], NamedSharding(mesh, P(("slice", "chip"))), NamedSharding(mesh, P())):
            assert identical(jax.device_put(values, place), values)


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: np.dtype(dtype).name)
def test_every_dtype_passes_through_a_program(devices: Devices, dtype: type) -> None:
    values = some_values(dtype, (4, 6))
    with jax.enable_x64(True):
        assert identical(jax.jit(lambda x: x.T)(jax.device_put(values, devices[0])), values.T)


@pytest.mark.parametrize("shape", [(), (0,), (0, 3), (3, 0, 2), (1,), (1, 1, 1), (7,), (2, 3, 5, 7)])
def test_every_shape_comes_back(devices: Devices, shape: tuple[int, ...]) -> None:
    values = np.arange(np.prod(shape, dtype=int), dtype=np.float32).reshape(shape)
    assert identical(jax.device_put(values, devices[1]), values)


@pytest.mark.parametrize(
    "cut",
    [lambda a: a.T, lambda a: a.transpose(1, 2, 0), lambda a: a[::2, 1:, ::3], lambda a: a[:, 0], np.asfortranarray],
    ids=["transposed", "permuted", "strided", "column", "fortran"],
)
def test_host_arrays_that_are_not_contiguous_come_back(devices: Devices, cut: Cut) -> None:
    values = cut(np.arange(4 * 6 * 9, dtype=np.int32).reshape(4, 6, 9))
    assert identical(jax.device_put(values, devices[0]), values)


@pytest.mark.parametrize("cut", [lambda a: a[::-1], lambda a: np.broadcast_to(a, (4, 3))], ids=["negative", "zero"])
def test_strides_that_the_client_cannot_send_are_an_error(devices: Devices, cut: Cut) -> None:
    with pytest.raises(jax.errors.JaxRuntimeError, match="strides"):
        jax.device_put(cut(np.arange(3, dtype=np.int32)), devices[0])


def test_special_floats_come_back_bit_for_bit(devices: Devices) -> None:
    values = np.array([np.nan, -np.nan, np.inf, -np.inf, -0.0, 1e-45], np.float32)
    assert identical(jax.device_put(values, devices[0]), values)


def test_a_big_array_comes_back(devices: Devices) -> None:
    values = np.random.default_rng(0).integers(0, 256, 32 << 20, dtype=np.uint8)
    assert identical(jax.device_put(values, devices[0]), values)


def test_the_host_array_may_change_once_the_transfer_is_done(devices: Devices) -> None:
    values = np.zeros(1 << 20, np.float32)
    array = jax.device_put(values, devices[0]).block_until_ready()
    values[:] = 1
    assert not np.asarray(array).any()


def test_each_shard_is_on_its_device(devices: Devices, mesh: Mesh) -> None:
    values = np.arange(64, dtype=np.int32).reshape(8, 8)
    array = jax.device_put(values, NamedSharding(mesh, P("chip", "slice")))
    assert {shard.device for shard in array.addressable_shards} == set(devices)
    for shard in array.addressable_shards:
        assert shard.data.devices() == {shard.device}
        np.testing.assert_array_equal(np.asarray(shard.data), values[shard.index])


def test_a_partly_replicated_array_has_the_same_shard_on_several_devices(mesh: Mesh) -> None:
    values = np.arange(12, dtype=np.int32).reshape(4, 3)
    array = jax.device_put(values, NamedSharding(mesh, P("chip")))
    assert sorted(shard.replica_id for shard in array.addressable_shards) == [0] * 4 + [1] * 4
    assert identical(array, values)


def test_many_arrays_travel_at_once(devices: Devices, mesh: Mesh) -> None:
    values = [np.full((8,), number, np.int32) for number in range(200)]
    arrays = jax.device_put(values, NamedSharding(mesh, P(("slice", "chip"))))
    for array, expected in zip(jax.device_get(arrays), values, strict=True):
        np.testing.assert_array_equal(array, expected)


def test_an_array_from_single_device_pieces(devices: Devices, mesh: Mesh) -> None:
    pieces = [jax.device_put(np.full((1, 2), number, np.int32), device) for number, device in enumerate(devices)]
    sharding = NamedSharding(mesh, P(("slice", "chip")))
    array = jax.make_array_from_single_device_arrays((8, 2), sharding, pieces)
    np.testing.assert_array_equal(np.asarray(array), np.repeat(np.arange(8), 2).reshape(8, 2))


def test_an_array_from_a_callback(mesh: Mesh) -> None:
    values = np.arange(16, dtype=np.float32)
    sharding = NamedSharding(mesh, P(("slice", "chip")))
    assert identical(jax.make_array_from_callback((16,), sharding, lambda index: values[index]), values)


def test_an_array_moves_between_devices_and_slices(devices: Devices) -> None:
    values = np.arange(5, dtype=np.float32)
    array = jax.device_put(values, devices[0])
    for device in (devices[1], devices[7], devices[4], devices[0]):
        array = jax.device_put(array, device)
        assert array.devices() == {device}
        assert identical(array, values)


@pytest.mark.parametrize(
    "before", [P(), P("chip"), P(None, "slice"), P(("slice", "chip")), P("slice", "chip")], ids=str
)
@pytest.mark.parametrize("after", [P(), P("slice"), P("chip", "slice"), P(("chip", "slice"))], ids=str)
def test_an_array_is_resharded(mesh: Mesh, before: P, after: P) -> None:
    values = np.arange(8 * 8, dtype=np.float32).reshape(8, 8)
    array = jax.device_put(values, NamedSharding(mesh, before))
    moved = jax.device_put(array, NamedSharding(mesh, after))
    assert moved.sharding.spec == after
    for shard in moved.addressable_shards:
        np.testing.assert_array_equal(np.asarray(shard.data), values[shard.index])


def test_an_array_is_resharded_onto_other_devices(devices: Devices) -> None:
    values = np.arange(8, dtype=np.float32)
    first, second = (Mesh(np.array(part), "x") for part in (devices[:4], devices[6:3:-2]))
    array = jax.device_put(jax.device_put(values, NamedSharding(first, P("x"))), NamedSharding(second, P("x")))
    assert [shard.device for shard in array.addressable_shards] == devices[6:3:-2]
    assert identical(array, values)


def test_an_array_comes_to_plain_cpu_and_goes_back(devices: Devices, cpu_devices: Devices) -> None:
    values = np.arange(6, dtype=np.float32)
    here = jax.device_put(jax.device_put(values, devices[0]), cpu_devices[0])
    assert here.devices() == {cpu_devices[0]}
    assert identical(jax.device_put(here, devices[7]), values)


def test_a_copy_outlives_its_original(devices: Devices) -> None:
    original = jax.device_put(np.arange(3), devices[0])
    copy = jnp.array(original, copy=True)
    original.delete()
    np.testing.assert_array_equal(np.asarray(copy), np.arange(3))


def test_an_array_of_another_memory_kind(devices: Devices) -> None:
    values = np.arange(4, dtype=np.float32)
    on_host = jax.device_put(values, SingleDeviceSharding(devices[0], memory_kind="pinned_host"))
    assert on_host.sharding.memory_kind == "pinned_host"
    assert identical(jax.device_put(on_host, SingleDeviceSharding(devices[0], memory_kind="device")), values)


def test_random_keys_travel(devices: Devices) -> None:
    keys = jax.device_put(jax.random.split(jax.random.key(3), 4), devices[2])
    assert jax.random.key_data(keys).tolist() == jax.random.key_data(jax.random.split(jax.random.key(3), 4)).tolist()


def test_a_fetch_in_the_background_gives_the_same(devices: Devices) -> None:
    array = jax.jit(lambda: jnp.arange(1000.0))()
    array.copy_to_host_async()
    np.testing.assert_array_equal(np.asarray(array), np.arange(1000, dtype=np.float32))
