"""What becomes of arrays: donated, deleted, refused, or the result of something that failed."""

from __future__ import annotations

import gc
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

Devices = list[jax.Device]


def test_a_donated_array_is_gone(devices: Devices) -> None:
    step = jax.jit(lambda x: x + 1, donate_argnums=0)
    x = jax.device_put(np.ones((4, 4), np.float32), devices[0])
    y = step(x)
    assert x.is_deleted()
    with pytest.raises(RuntimeError, match=r"deleted|donated"):
        np.asarray(x)
    with pytest.raises((RuntimeError, ValueError), match=r"deleted|donated"):
        step(x)
    assert float(y.sum()) == 32


def test_a_donated_sharded_array_is_gone(devices: Devices) -> None:
    mesh = Mesh(np.array(devices), "x")
    x = jax.device_put(np.arange(16, dtype=np.float32), NamedSharding(mesh, P("x")))
    y = jax.jit(lambda x: x * 2, donate_argnums=0)(x)
    assert x.is_deleted()
    np.testing.assert_array_equal(np.asarray(y), np.arange(16, dtype=np.float32) * 2)


def test_only_what_is_donated_is_gone(devices: Devices) -> None:
    kept, donated = jnp.ones(5), jnp.full(5, 2.0)
    result = jax.jit(lambda a, b: (a + b, a * b), donate_argnums=1)(kept, donated)
    assert (kept.is_deleted(), donated.is_deleted()) == (False, True)
    assert [x.tolist() for x in result] == [[3.0] * 5, [2.0] * 5]


def test_what_cannot_be_reused_is_donated_with_a_warning(devices: Devices) -> None:
    x = jnp.ones(5)
    with pytest.warns(UserWarning, match="donated buffers were not usable"):
        y = jax.jit(lambda x: x.sum(), donate_argnums=0)(x)
    assert float(y) == 5


def test_a_deleted_array_is_an_error_to_use(devices: Devices) -> None:
    x = jax.device_put(np.ones(3, np.float32), devices[1])
    x.delete()
    assert x.is_deleted()
    with pytest.raises(RuntimeError, match="deleted"):
        np.asarray(x)
    with pytest.raises((RuntimeError, ValueError), match="deleted"):
        jax.jit(lambda x: x + 1)(x).block_until_ready()


def test_deleting_an_input_does_not_hurt_what_was_computed_from_it(devices: Devices) -> None:
    x = jax.device_put(np.arange(1 << 16, dtype=np.float32), devices[0])
    y, z = jax.jit(lambda x: (x, x + 1))(x)
    x.delete()
    np.testing.assert_array_equal(np.asarray(y), np.arange(1 << 16, dtype=np.float32))
    assert float(z[-1]) == 1 << 16


def test_a_shard_outlives_its_array(devices: Devices) -> None:
    mesh = Mesh(np.array(devices), "x")
    x = jax.device_put(np.arange(8, dtype=np.int32), NamedSharding(mesh, P("x")))
    shard = x.addressable_shards[6].data
    del x
    gc.collect()
    assert shard.tolist() == [6]


def test_an_array_that_nobody_holds_is_released(devices: Devices) -> None:
    x = jax.device_put(np.ones(3, np.float32), devices[0])
    reference = weakref.ref(x)
    before = len(jax.live_arrays())
    del x
    gc.collect()
    assert reference() is None
    assert len(jax.live_arrays()) < before


def test_shapes_that_do_not_fit_are_refused(devices: Devices) -> None:
    with pytest.raises(TypeError, match="incompatible shapes"):
        jax.jit(lambda a, b: a + b)(np.ones(3), np.ones(4))


def test_a_sharding_that_does_not_divide_is_refused(devices: Devices) -> None:
    with pytest.raises(ValueError, match="evenly divide"):
        jax.device_put(np.ones(9), NamedSharding(Mesh(np.array(devices), "x"), P("x")))


def test_inputs_on_different_devices_are_refused(devices: Devices) -> None:
    with pytest.raises(ValueError, match="incompatible devices"):
        jax.jit(lambda a, b: a + b)(jax.device_put(1.0, devices[0]), jax.device_put(1.0, devices[1]))


def test_division_by_zero_is_no_error(devices: Devices) -> None:
    assert np.isnan(float(jax.jit(lambda x: x / x)(np.float32(0))))


def test_nan_checks_find_the_nan(devices: Devices) -> None:
    with jax.debug_nans(True), pytest.raises(FloatingPointError, match="nan"):
        jax.jit(jnp.log)(jnp.float32(-1))


def test_a_program_that_does_not_compile_is_an_error_and_the_next_one_works(devices: Devices) -> None:
    unknown = jax.ffi.ffi_call("pw_no_such_function", jax.ShapeDtypeStruct((3,), np.float32))
    with pytest.raises(jax.errors.JaxRuntimeError, match="pw_no_such_function"):
        jax.jit(unknown)(np.ones(3, np.float32)).block_until_ready()
    assert float(jax.jit(lambda x: x.sum())(np.ones(3, np.float32))) == 3


def test_what_is_computed_from_a_failure_fails_with_the_same_error(devices: Devices) -> None:
    too_big = jax.jit(lambda: jnp.ones(1 << 42, np.int8))()
    derived = jax.jit(lambda x: x[:3] + 1)(too_big)
    for array in (too_big, derived, jax.device_put(derived, devices[5])):
        with pytest.raises(jax.errors.JaxRuntimeError, match="RESOURCE_EXHAUSTED"):
            array.block_until_ready()
    assert float(jax.jit(lambda x: x.sum())(np.ones(3, np.float32))) == 3


def test_clearing_caches_keeps_arrays(devices: Devices) -> None:
    x = jax.jit(lambda: jnp.arange(4.0))()
    jax.clear_caches()
    assert jax.jit(lambda x: x.sum())(x) == 6
