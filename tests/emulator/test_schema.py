"""The protocol's messages come out of the installed jaxlib."""

from __future__ import annotations

from pathlib import Path

import pytest
from google.protobuf import descriptor_pb2

from pathways_runtime.emulator import schema


def a_file(name: str, message: str, *dependencies: str) -> descriptor_pb2.FileDescriptorProto:
    return descriptor_pb2.FileDescriptorProto(
        name=name,
        package="test",
        syntax="proto3",
        dependency=dependencies,
        message_type=[descriptor_pb2.DescriptorProto(name=message)],
    )


@pytest.fixture
def library(tmp_path: Path) -> Path:
    """Something like a shared library: two descriptors between other bytes, and a name that begins none."""
    leaf, root = a_file("test/leaf.proto", "Leaf"), a_file("test/root.proto", "Root", "test/leaf.proto")
    path = tmp_path / "libjax_common.so"
    path.write_bytes(
        b"\x7fELF\x00\x0a\x0ftest/leaf.proto\x00\xff\xff"
        + leaf.SerializeToString()
        + b"\x00\x01\xfe"
        + root.SerializeToString()
        + b"\x00\xffend"
    )
    return path


def test_the_installed_jaxlib_has_every_message() -> None:
    request = schema.load().message("xla.ifrt.proxy.IfrtRequest")
    message = request()
    message.loaded_executable_execute_request.args_handles.extend([1, 2])
    assert request.FromString(message.SerializeToString()) == message


def test_a_descriptor_is_found_between_other_bytes(library: Path) -> None:
    found = schema.Schema(library, ("test/root.proto",))
    assert found.message("test.Root").DESCRIPTOR.full_name == "test.Root"
    assert found.message("test.Leaf").DESCRIPTOR.full_name == "test.Leaf"


def test_a_missing_descriptor_is_named(library: Path) -> None:
    with pytest.raises(schema.SchemaError, match=r"carries no descriptor of test/other\.proto"):
        schema.Schema(library, ("test/other.proto",))


def test_a_missing_message_is_named(library: Path) -> None:
    with pytest.raises(schema.SchemaError, match=r"no message 'test\.Other'"):
        schema.Schema(library, ("test/leaf.proto",)).message("test.Other")


@pytest.mark.parametrize("cut", [0, 1, 5, 20, 30])
def test_a_descriptor_that_is_cut_off_is_not_found(cut: int) -> None:
    whole = a_file("test/root.proto", "Root", "test/leaf.proto").SerializeToString()
    found = schema.find_file(whole[:cut], "test/root.proto")
    assert found is None or found.name == "test/root.proto"
