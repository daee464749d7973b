"""Values survive the way into messages and back."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pathways_runtime.emulator import schema, wire
from pathways_runtime.emulator.host_buffers import as_array, as_bytes
from pathways_runtime.emulator.status import StatusError

DTypeMessage = schema.load().message("xla.ifrt.DTypeProto")
ShardingMessage = schema.load().message("xla.ifrt.ShardingProto")
ArraySpecMessage = schema.load().message("xla.ifrt.ArraySpecProto")


@pytest.mark.parametrize("dtype", [np.bool_, np.int64, np.complex128, ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn])
def test_a_dtype_comes_back(dtype: type) -> None:
    assert wire.read_dtype(DTypeMessage(kind=wire.dtype_kind(np.dtype(dtype)))) == np.dtype(dtype)


@pytest.mark.parametrize("kind", [0, 14, 17, 12345])
def test_a_dtype_that_no_array_has_is_refused(kind: int) -> None:
    with pytest.raises(StatusError, match=f"dtype kind {kind}"):
        wire.read_dtype(DTypeMessage(kind=kind))


def test_a_negative_dimension_is_refused() -> None:
    spec = ArraySpecMessage()
    spec.shape.dims.extend([2, -1])
    with pytest.raises(StatusError, match="negative dimension"):
        wire.read_shape(spec.shape)


@pytest.mark.parametrize(
    "sharding",
    [
        wire.Sharding((7,)),
        wire.Sharding((7,), "pinned_host"),
        wire.Sharding((3, 1, 2, 0), None, b"\x08\x00"),
        wire.Sharding((3,), "device", b"\x08\x00"),
    ],
)
def test_a_sharding_comes_back(sharding: wire.Sharding) -> None:
    message = ShardingMessage()
    wire.write_sharding(message, sharding)
    read = wire.read_sharding(message)
    assert (read.devices, read.memory_kind) == (sharding.devices, sharding.memory_kind)
    assert bool(read.op_sharding) == bool(sharding.op_sharding) or sharding.op_sharding == b"\x08\x00"


@pytest.mark.parametrize(
    ("kind", "data", "problem"),
    [
        ("xla::ifrt::MadeUp", b"", "MadeUp"),
        ("xla::ifrt::HloSharding", b"\xff\xff\xff", "not a xla::ifrt::HloSharding"),
    ],
)
def test_a_sharding_that_cannot_be_read_is_refused(kind: str, data: bytes, problem: str) -> None:
    message = ShardingMessage()
    message.serialized_sharding.type_name = kind
    message.serialized_sharding.data = data
    with pytest.raises(StatusError, match=problem):
        wire.read_sharding(message)


def test_strings_come_back() -> None:
    strings = (b"", b"a", "ü".encode(), b"\x00\xff")
    assert wire.read_strings(wire.write_strings(strings)) == strings


@given(st.lists(st.integers(0, 4), max_size=4).map(tuple), st.permutations(range(4)), st.integers(1, 3))
def test_bytes_laid_out_by_strides_come_back(shape: tuple[int, ...], order: list[int], gap: int) -> None:
    values = np.arange(np.prod(shape, dtype=int), dtype=np.int16).reshape(shape)
    strides, stride = [0] * len(shape), 2 * gap
    for dimension in [place for place in order if place < len(shape)]:
        strides[dimension] = stride
        stride *= max(shape[dimension], 1)
    data = as_bytes(values, tuple(strides))
    assert np.array_equal(as_array(data, values.dtype, shape, tuple(strides)), values)


@pytest.mark.parametrize(
    ("size", "shape", "strides"),
    [(3, (2,), None), (8, (3, 2), None), (8, (4,), (4,)), (8, (2,), (-2,)), (8, (2, 2), (4,)), (0, (1,), (1 << 62,))],
)
def test_bytes_that_are_too_few_are_refused(size: int, shape: tuple[int, ...], strides: tuple[int, ...] | None) -> None:
    with pytest.raises(StatusError, match=f"{size} bytes are no int16"):
        as_array(bytearray(size), np.dtype(np.int16), shape, strides)


@pytest.mark.parametrize("strides", [(1 << 40,), (-2,), (2, 2)])
def test_a_layout_far_larger_than_its_array_is_refused(strides: tuple[int, ...]) -> None:
    with pytest.raises(StatusError, match="strides"):
        as_bytes(np.zeros(4, np.int16), strides)
