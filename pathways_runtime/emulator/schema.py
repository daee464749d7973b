"""Message classes of the IFRT proxy protocol, from the jaxlib that is installed.

jaxlib's shared library carries the serialized descriptors of every protocol buffer it uses. Taken from there, the
messages fit the client and the compiler of that jaxlib by construction. jaxlib 0.7 and newer.
"""

from __future__ import annotations

import functools
import importlib.util
import mmap
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any, Final

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.message import DecodeError

ROOTS: Final = (
    "xla/python/ifrt_proxy/common/ifrt_service.proto",
    "xla/python/ifrt_proxy/common/grpc_ifrt_service.proto",
    "xla/python/ifrt_proxy/common/array_util.proto",
    "xla/python/ifrt/sharding_serdes.proto",
    "xla/python/ifrt/custom_call_program.proto",
    "xla/python/pjrt_ifrt/xla_sharding.proto",
    "xla/python/pjrt_ifrt/xla_compiler.proto",
)
_WELL_KNOWN: Final = "google/protobuf/"
_LIBRARIES: Final = ("libjax_common.so", "libjax_common.dylib", "jax_common.dll")
_FILE_FIELDS: Final = frozenset({*range(1, 13), 14})  # the field numbers of FileDescriptorProto


class SchemaError(Exception):
    """The installed jaxlib does not carry the protocol, or not all of it."""


@functools.cache
def load() -> Schema:
    """The schema of the installed jaxlib, read once in the life of the process (0.3 s). SchemaError without one."""
    return Schema(find_library())


class Schema:
    """Message classes by full name. SchemaError where `library` lacks a descriptor that `ROOTS` need."""

    def __init__(self, library: Path, roots: tuple[str, ...] = ROOTS) -> None:
        self._pool = descriptor_pool.DescriptorPool()
        self._added: set[str] = set()
        with library.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as image:
            for name in roots:
                self._add(name, image, library)

    def message(self, full_name: str) -> Any:
        """The class of a message. SchemaError where this jaxlib has none of that name."""
        try:
            return message_factory.GetMessageClass(self._pool.FindMessageTypeByName(full_name))
        except KeyError:
            raise SchemaError(f"the installed jaxlib knows no message {full_name!r}") from None

    def _add(self, name: str, image: mmap.mmap, library: Path) -> None:
        if name in self._added:
            return
        self._added.add(name)
        if name.startswith(_WELL_KNOWN):
            module = import_module(name.removesuffix(".proto").replace("/", ".") + "_pb2")
            self._pool.AddSerializedFile(module.DESCRIPTOR.serialized_pb)
            return
        found = find_file(image, name)
        if found is None:
            raise SchemaError(f"{library} carries no descriptor of {name}; pathways_runtime needs jaxlib 0.8 or newer")
        for dependency in found.dependency:
            self._add(dependency, image, library)
        self._pool.Add(found)


def find_library() -> Path:
    """The shared library of the installed jaxlib that carries the descriptors. SchemaError where there is none."""
    spec = importlib.util.find_spec("jaxlib")
    folders = [Path(folder) for folder in (spec.submodule_search_locations or ())] if spec else []
    for folder in folders:
        for name in _LIBRARIES:
            if (folder / name).is_file():
                return folder / name
    raise SchemaError(f"no jaxlib with one of {', '.join(_LIBRARIES)} is installed (looked in {folders or 'sys.path'})")


def find_file(image: mmap.mmap | bytes, name: str) -> descriptor_pb2.FileDescriptorProto | None:
    """The descriptor of the .proto file `name` in a shared library's bytes, None where it is not there.

    A descriptor begins with its own name as field 1. Its length is written nowhere, so the fields are walked, and the
    longest run of them that parses is the descriptor.
    """
    encoded = name.encode()
    needle = b"\x0a" + bytes([len(encoded)]) + encoded
    start = image.find(needle)
    while start != -1:
        found = _parse_longest(image, start)
        if found is not None and found.name == name and (found.message_type or found.enum_type or found.dependency):
            return found
        start = image.find(needle, start + 1)
    return None


def _parse_longest(image: mmap.mmap | bytes, start: int) -> descriptor_pb2.FileDescriptorProto | None:
    for end in reversed([*_field_ends(image, start)]):
        try:
            return descriptor_pb2.FileDescriptorProto.FromString(image[start:end])
        except DecodeError:
            continue
    return None


def _field_ends(image: mmap.mmap | bytes, start: int) -> Iterator[int]:
    """Where each top-level field of the message at `start` ends, as far as the bytes look like fields of a file."""
    position = start
    while position < len(image):
        tag, after = _varint(image, position)
        number, wire_type = tag >> 3, tag & 7
        if number not in _FILE_FIELDS or wire_type not in (0, 2) or (number == 1 and position != start):
            return
        size, after = _varint(image, after)
        position = after if wire_type == 0 else after + size
        if position > len(image):
            return
        yield position


def _varint(image: mmap.mmap | bytes, position: int) -> tuple[int, int]:
    """The varint at `position` and where it ends; 0 at the end of the image, which is no tag."""
    value = shift = 0
    while position < len(image) and shift < 64:
        byte = image[position]
        position += 1
        value |= (byte & 0x7F) << shift
        if not byte & 0x80:
            return value, position
        shift += 7
    return 0, position
