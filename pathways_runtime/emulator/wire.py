"""Protocol messages <-> plain values: dtypes, shapes, shardings, statuses, attributes.

Importing it reads the schema of the installed jaxlib.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import ml_dtypes
import numpy as np
from google.protobuf.message import DecodeError

from pathways_runtime import _contract
from pathways_runtime.emulator import schema
from pathways_runtime.emulator.status import StatusError

_SCHEMA: Final = schema.load()
_PROXY: Final = "xla.ifrt.proxy."

Request: Final = _SCHEMA.message(_PROXY + "IfrtRequest")
Response: Final = _SCHEMA.message(_PROXY + "IfrtResponse")
InitResponse: Final = _SCHEMA.message(_PROXY + "InitResponse")
ExecuteOutput: Final = _SCHEMA.message(_PROXY + "LoadedExecutableExecuteResponse.Output")
ExecutableMetadata: Final = _SCHEMA.message(_PROXY + "LoadedExecutableMetadataResponse")
GetVersionRequest: Final = _SCHEMA.message(_PROXY + "GrpcGetVersionRequest")
GetVersionResponse: Final = _SCHEMA.message(_PROXY + "GrpcGetVersionResponse")
SessionMetadata: Final = _SCHEMA.message(_PROXY + "GrpcIfrtSessionMetadata")
StoreMetadata: Final = _SCHEMA.message(_PROXY + "GrpcHostBufferStoreMetadata")
LookupRequest: Final = _SCHEMA.message(_PROXY + "GrpcHostBufferLookupRequest")
DeleteRequest: Final = _SCHEMA.message(_PROXY + "GrpcHostBufferDeleteRequest")
ReadFromDiskRequest: Final = _SCHEMA.message(_PROXY + "GrpcHostBufferReadFromDiskRequest")
CompileOptions: Final = _SCHEMA.message("xla.ifrt.XlaCompileOptionsProto")
CustomCallProgram: Final = _SCHEMA.message("xla.ifrt.CustomCallProgramProto")
_StringContents: Final = _SCHEMA.message("xla.ifrt.proto.StringArrayContents")
_HloSharding: Final = _SCHEMA.message("xla.ifrt.HloShardingProto")
_SingleDeviceSharding: Final = _SCHEMA.message("xla.ifrt.SingleDeviceShardingProto")
_ConcreteEvenSharding: Final = _SCHEMA.message("xla.ifrt.ConcreteEvenShardingProto")
_ConcreteSharding: Final = _SCHEMA.message("xla.ifrt.ConcreteShardingProto")
_OpaqueSharding: Final = _SCHEMA.message("xla.ifrt.OpaqueShardingProto")
# Without these two in its schema (jaxlib < 0.8.1), a client numbers no responses.
NUMBERS_RESPONSES: Final = (
    "seq_num" in Response.DESCRIPTOR.fields_by_name["response_metadata"].message_type.fields_by_name
)

# The protocol of jaxlib 0.7, the first with embedded descriptors.
OLDEST_PROTOCOL: Final = 15
# What a string array has for a dtype. Its values are bytes.
STRING: Final = np.dtype(object)
_KINDS: Final = _SCHEMA.message("xla.ifrt.DTypeProto").DESCRIPTOR.enum_types_by_name["Kind"].values_by_name
# Each dtype as the protocol and as MLIR spell it.
_SPELLINGS: Final = {
    "PRED": ("bool", "i1"),
    "S1": ("int1", "i1s"),
    "S2": ("int2", "i2"),
    "S4": ("int4", "i4"),
    "S8": ("int8", "i8"),
    "S16": ("int16", "i16"),
    "S32": ("int32", "i32"),
    "S64": ("int64", "i64"),
    "U1": ("uint1", "ui1"),
    "U2": ("uint2", "ui2"),
    "U4": ("uint4", "ui4"),
    "U8": ("uint8", "ui8"),
    "U16": ("uint16", "ui16"),
    "U32": ("uint32", "ui32"),
    "U64": ("uint64", "ui64"),
    "F4E2M1FN": ("float4_e2m1fn", "f4E2M1FN"),
    "F8E3M4": ("float8_e3m4", "f8E3M4"),
    "F8E4M3": ("float8_e4m3", "f8E4M3"),
    "F8E4M3FN": ("float8_e4m3fn", "f8E4M3FN"),
    "F8E4M3B11FNUZ": ("float8_e4m3b11fnuz", "f8E4M3B11FNUZ"),
    "F8E4M3FNUZ": ("float8_e4m3fnuz", "f8E4M3FNUZ"),
    "F8E5M2": ("float8_e5m2", "f8E5M2"),
    "F8E5M2FNUZ": ("float8_e5m2fnuz", "f8E5M2FNUZ"),
    "F8E8M0FNU": ("float8_e8m0fnu", "f8E8M0FNU"),
    "BF16": ("bfloat16", "bf16"),
    "F16": ("float16", "f16"),
    "F32": ("float32", "f32"),
    "F64": ("float64", "f64"),
    "C64": ("complex64", "complex<f32>"),
    "C128": ("complex128", "complex<f64>"),
}


def _dtype(name: str) -> np.dtype[Any] | None:
    scalar = getattr(ml_dtypes, name, None) or getattr(np, name, None)
    return None if scalar is None else np.dtype(scalar)


_DTYPES: Final = {
    _KINDS[f"KIND_{kind}"].number: dtype
    for kind, (name, _) in _SPELLINGS.items()
    if f"KIND_{kind}" in _KINDS and (dtype := _dtype(name)) is not None
}
_DTYPES[_KINDS["KIND_STRING"].number] = STRING
_KIND_NUMBERS: Final[dict[np.dtype[Any], int]] = {dtype: number for number, dtype in _DTYPES.items()}
_MLIR_DTYPES: Final = {spelling: dtype for name, spelling in _SPELLINGS.values() if (dtype := _dtype(name)) is not None}


def read_dtype(message: Any) -> np.dtype[Any]:
    """The dtype of a `DTypeProto`, STRING for strings. StatusError for one that this server does not hold."""
    dtype = _DTYPES.get(message.kind)
    if dtype is None:
        raise StatusError("UNIMPLEMENTED", f"dtype kind {message.kind} of the IFRT protocol is not supported")
    return dtype


def dtype_kind(dtype: np.dtype[Any]) -> int:
    """The protocol's number of a dtype. StatusError where it has none."""
    number = _KIND_NUMBERS.get(dtype)
    if number is None:
        raise StatusError("UNIMPLEMENTED", f"dtype {dtype} has no number in the IFRT protocol")
    return number


def mlir_dtype(element_type: str) -> np.dtype[Any]:
    """The dtype of an MLIR element type (`bf16`, `ui4`). StatusError for one that is no dtype of an array."""
    try:
        return _MLIR_DTYPES[element_type]
    except KeyError:
        raise StatusError("UNIMPLEMENTED", f"a program with values of type {element_type} is not supported") from None


def named_dtype(primitive_type: str) -> np.dtype[Any]:
    """The dtype of an XLA primitive type by name (`BF16`, `PRED`). StatusError for one that is no dtype of an array."""
    try:
        return _DTYPES[_KINDS[f"KIND_{primitive_type}"].number]
    except KeyError:
        raise StatusError("INVALID_ARGUMENT", f"{primitive_type!r} is no primitive type of XLA") from None


def read_shape(message: Any) -> tuple[int, ...]:
    """The dimensions of a `ShapeProto`. StatusError where one is negative."""
    shape = tuple(message.dims)
    if any(side < 0 for side in shape):
        raise StatusError("INVALID_ARGUMENT", f"shape {shape} has a negative dimension")
    return shape


def read_strides(message: Any) -> tuple[int, ...] | None:
    """The byte strides of a message that may have them; None means the order of C."""
    return tuple(message.byte_strides.strides) if message.HasField("byte_strides") else None


@dataclass(frozen=True, slots=True)
class Sharding:
    """Where the shards of an array are: devices in order, and how it is cut.

    Cut by `op_sharding` (a serialized `xla.OpSharding`), or into even tiles of `shard_shape` in order of the devices.
    With neither it is not cut: one device, or the whole on each.
    """

    devices: tuple[int, ...]
    memory_kind: str | None = None
    op_sharding: bytes | None = None
    shard_shape: tuple[int, ...] | None = None


def read_sharding(message: Any) -> Sharding:
    """The sharding of a `ShardingProto`. StatusError for a kind that JAX does not use, and for bytes that are none."""
    serialized = message.serialized_sharding
    kind = serialized.type_name.rpartition("::")[2]
    reader = _SHARDING_READERS.get(kind)
    if reader is None:
        raise StatusError("UNIMPLEMENTED", f"sharding {serialized.type_name!r} is not supported")
    try:
        return reader(serialized.data)
    except DecodeError as error:
        raise StatusError("INVALID_ARGUMENT", f"not a {serialized.type_name}: {error}") from error


def _read_single_device(data: bytes) -> Sharding:
    message = _SingleDeviceSharding.FromString(data)
    return Sharding((message.device_id,), _memory_kind(message))


def _read_hlo(data: bytes) -> Sharding:
    message = _HloSharding.FromString(data)
    op_sharding = message.xla_op_sharding.SerializeToString()
    return Sharding(tuple(message.devices.device_ids), _memory_kind(message), op_sharding)


def _read_concrete_even(data: bytes) -> Sharding:
    message = _ConcreteEvenSharding.FromString(data)
    shard_shape = None if message.is_fully_replicated else read_shape(message.shard_shape)
    return Sharding(tuple(message.devices.device_ids), _memory_kind(message), shard_shape=shard_shape)


def _read_concrete(data: bytes) -> Sharding:
    message = _ConcreteSharding.FromString(data)
    shapes = {tuple(shape.dims) for shape in message.shard_shapes}
    if len(shapes) != 1:
        raise StatusError("UNIMPLEMENTED", f"shards of several shapes ({sorted(shapes)}) are not supported")
    return Sharding(tuple(message.devices.device_ids), _memory_kind(message), shard_shape=shapes.pop())


def _read_opaque(data: bytes) -> Sharding:
    message = _OpaqueSharding.FromString(data)
    return Sharding(tuple(message.devices.device_ids), _memory_kind(message))


_SHARDING_READERS: Final = {
    "SingleDeviceSharding": _read_single_device,
    "HloSharding": _read_hlo,
    "ConcreteEvenSharding": _read_concrete_even,
    "ConcreteSharding": _read_concrete,
    "OpaqueSharding": _read_opaque,
}


def _memory_kind(message: Any) -> str | None:
    return (message.memory_kind or None) if message.HasField("memory_kind") else None


def write_sharding(message: Any, sharding: Sharding) -> None:
    """Fills a `ShardingProto`; a sharding over several devices needs its `op_sharding`."""
    serialized = message.serialized_sharding
    if len(sharding.devices) == 1 and sharding.op_sharding is None:
        inner = _SingleDeviceSharding(device_id=sharding.devices[0])
        serialized.type_name = "xla::ifrt::SingleDeviceSharding"
    else:
        inner = _HloSharding()
        inner.devices.device_ids.extend(sharding.devices)
        inner.xla_op_sharding.ParseFromString(sharding.op_sharding or b"")
        serialized.type_name = "xla::ifrt::HloSharding"
    if sharding.memory_kind is not None:
        inner.memory_kind = sharding.memory_kind
    serialized.data = inner.SerializeToString()


def write_output(dtype: np.dtype[Any], shape: Sequence[int], sharding: Sharding) -> Any:
    """An output of an execution, without its handle."""
    output = ExecuteOutput()
    output.dtype.kind = dtype_kind(dtype)
    output.shape.SetInParent()
    output.shape.dims.extend(shape)
    write_sharding(output.sharding, sharding)
    return output


def read_token(metadata: Any) -> bytes:
    """The token in the metadata of a session, where `pathways_runtime.initialize()` puts it; b"" for none."""
    if "initialization_data" not in metadata.DESCRIPTOR.fields_by_name:
        return b""
    token: bytes = metadata.initialization_data.attributes[_contract.TOKEN_ATTRIBUTE].string_value
    return token


def write_status(message: Any, error: StatusError) -> None:
    """Fills a `StatusProto`."""
    message.code = error.code
    message.message = error.message


AttributeValue = bool | int | float | str | Sequence[int]


def write_attributes(message: Any, attributes: Mapping[str, AttributeValue]) -> None:
    """Fills an `AttributeMapProto`."""
    message.SetInParent()
    for name, value in attributes.items():
        entry = message.attributes[name]
        if isinstance(value, bool):
            entry.bool_value = value
        elif isinstance(value, int):
            entry.int64_value = value
        elif isinstance(value, float):
            entry.float_value = value
        elif isinstance(value, str):
            entry.string_value = value.encode()
        else:
            entry.int64_list_value.elements.extend(value)


def read_strings(contents: bytes | memoryview) -> tuple[bytes, ...]:
    """The strings of one shard of a string array, in C order. StatusError for bytes that are none."""
    try:
        return tuple(_StringContents.FromString(bytes(contents)).strings)
    except DecodeError as error:
        raise StatusError("INVALID_ARGUMENT", f"not the contents of a string array: {error}") from error


def write_strings(strings: Sequence[bytes]) -> bytes:
    """The reverse of `read_strings`."""
    contents: bytes = _StringContents(strings=strings).SerializeToString()
    return contents


def choose_version(request: Any) -> tuple[Any, str]:
    """(a `GrpcGetVersionResponse`, why there is no version that both sides speak or "").

    It is the client's newest. From 15 on, the versions of the protocol have only added to it, so that a newer client is
    served as it is.
    """
    newest = request.max_version.protocol_version
    answer = GetVersionResponse()
    answer.version.CopyFrom(request.max_version)
    if newest >= OLDEST_PROTOCOL:
        return answer, ""
    client = f"{request.min_version.protocol_version} to {newest}"
    server = f"{OLDEST_PROTOCOL} or newer (jaxlib {importlib.metadata.version('jaxlib')})"
    return answer, f"no common protocol version: the client speaks {client}, this server {server}"
