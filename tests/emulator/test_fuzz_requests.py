"""Requests of the right form with wrong values: each is answered, its session and the server go on."""

from __future__ import annotations

import queue
from collections.abc import Iterator
from typing import Any, Final

import grpc
import numpy as np
import pytest
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st
from jax.interpreters.mlir import make_ir_context
from jaxlib import xla_client
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import stablehlo

from pathways_runtime.emulator import schema, wire

SERVICE: Final = "/xla.ifrt.proxy.GrpcIfrtService/"
TIMEOUT_S: Final = 30
SCHEMA: Final = schema.load()
StoreRequest: Final = SCHEMA.message("xla.ifrt.proxy.GrpcHostBufferStoreRequest")
OpSharding: Final = SCHEMA.message("xla.OpSharding")
KINDS: Final = [kind for kind in wire.Request.DESCRIPTOR.fields_by_name if kind.endswith("_request")]

# Arrays 1 (float32[4] on device 0) and 2 (float32[4] cut over devices 0 and 1) are there, array 3 is of strings.
HANDLES: Final = st.sampled_from([0, 1, 1, 2, 2, 3, 4, 5, 1 << 62, (1 << 62) + 1, (1 << 63) - 1, (1 << 64) - 1])
NUMBERS: Final = st.sampled_from([0, 1, 1, 2, 3, 4, 4, 7, -1, 99, 1 << 31, 1 << 40, 1 << 62, (1 << 63) - 1, -(1 << 63)])
SMALL: Final = st.sampled_from([0, 1, 1, 2, 3, 4, 7, 99, -1, (1 << 31) - 1, -(1 << 31)])
TEXTS: Final = st.sampled_from(["", "device", "pinned_host", "made_up", "\0", "é" * 40])
SHARDINGS: Final = {
    "SingleDeviceSharding": "xla.ifrt.SingleDeviceShardingProto",
    "HloSharding": "xla.ifrt.HloShardingProto",
    "ConcreteEvenSharding": "xla.ifrt.ConcreteEvenShardingProto",
    "ConcreteSharding": "xla.ifrt.ConcreteShardingProto",
    "OpaqueSharding": "xla.ifrt.OpaqueShardingProto",
}
LIMITS: Final = {
    FieldDescriptor.CPPTYPE_INT32: (-(1 << 31), (1 << 31) - 1),
    FieldDescriptor.CPPTYPE_UINT32: (0, (1 << 32) - 1),
    FieldDescriptor.CPPTYPE_UINT64: (0, (1 << 64) - 1),
}


def program(body: str, result: str = "tensor<4xf32>") -> bytes:
    """A program of one float32[4] `%x`, serialized. `%zero` is there too."""
    zero = "%zero = stablehlo.constant dense<0.0> : tensor<f32>"
    text = f"func.func public @main(%x: tensor<4xf32>) -> {result} {{ {zero} {body} }}"
    with make_ir_context():
        module = ir.Module.parse(f"module @jit_double {{ {text} }}")
        return bytes(stablehlo.serialize_portable_artifact(module, stablehlo.get_minimum_version()))


def broadcast(shape: str) -> bytes:
    body = f"%y = stablehlo.broadcast_in_dim %zero, dims = [] : (tensor<f32>) -> {shape} return %y : {shape}"
    return program(body, shape)


def compile_options(device_id: int) -> Any:
    options = wire.CompileOptions()
    options.compile_options.ParseFromString(xla_client.CompileOptions().SerializeAsString())
    assignment = options.compile_options.executable_build_options.device_assignment
    assignment.replica_count = assignment.computation_count = 1
    assignment.computation_devices.add(replica_device_ids=[device_id])
    return options


PROGRAM: Final = program("%y = stablehlo.add %x, %x : tensor<4xf32> return %y : tensor<4xf32>")
# Each of them ends XLA's process or never ends, where nobody looks first.
TOKEN: Final = "%t = stablehlo.create_token : !stablehlo.token"
FATAL: Final = {
    "a size beyond 64 bits": broadcast(f"tensor<{1 << 62}xf32>"),
    "a product beyond 64 bits": broadcast(f"tensor<{1 << 31}x{1 << 31}x{1 << 31}xf32>"),
    "a call of itself": program("%y = call @main(%x) : (tensor<4xf32>) -> tensor<4xf32> return %y : tensor<4xf32>"),
    "infeed": program(
        f'{TOKEN} %y:2 = "stablehlo.infeed"(%t) {{infeed_config = ""}} : (!stablehlo.token) '
        "-> (tensor<4xf32>, !stablehlo.token) return %y#0 : tensor<4xf32>"
    ),
    "outfeed": program(
        f'{TOKEN} %y = "stablehlo.outfeed"(%x, %t) {{outfeed_config = ""}} : (tensor<4xf32>, !stablehlo.token) '
        "-> !stablehlo.token return %x : tensor<4xf32>"
    ),
}
OPTIONS: Final = compile_options(0).SerializeToString()


def scalars(field: FieldDescriptor) -> st.SearchStrategy[Any]:
    """Values of a field that is no message, most of them plausible."""
    if field.name.endswith(("_handle", "_handles")):
        return HANDLES
    if field.type == FieldDescriptor.TYPE_ENUM:
        return st.integers(-1, 40) if field.name == "kind" else st.integers(0, 12)
    if field.type == FieldDescriptor.TYPE_BOOL:
        return st.booleans()
    if field.type == FieldDescriptor.TYPE_STRING:
        return TEXTS
    if field.type == FieldDescriptor.TYPE_BYTES:
        return st.binary(max_size=20)
    if field.type in (FieldDescriptor.TYPE_FLOAT, FieldDescriptor.TYPE_DOUBLE):
        return st.sampled_from([0.0, -1.0, float("nan")])
    if field.cpp_type in LIMITS:
        low, high = LIMITS[field.cpp_type]
        return (SMALL if field.cpp_type == FieldDescriptor.CPPTYPE_INT32 else NUMBERS).filter(
            lambda number: low <= number <= high
        )
    return NUMBERS


@st.composite
def messages(draw: st.DrawFn, descriptor: Descriptor) -> Any:
    """A message with any of its fields set, and inner messages that are often right."""
    special = SPECIAL.get(descriptor.full_name)
    message = SCHEMA.message(descriptor.full_name)()
    if special is not None and draw(st.integers(0, 9)):
        message.MergeFrom(draw(special()))
        return message
    for field in descriptor.fields:
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            continue
        values = messages(field.message_type) if field.message_type is not None else scalars(field)
        if field.is_repeated:
            getattr(message, field.name).extend(draw(st.lists(values, max_size=3)))
        elif draw(st.integers(0, 4)):
            if field.message_type is not None:
                getattr(message, field.name).CopyFrom(draw(values))
            else:
                setattr(message, field.name, draw(values))
    return message


@st.composite
def dtypes(draw: st.DrawFn) -> Any:
    kind = wire.dtype_kind(draw(st.sampled_from([np.dtype(np.float32), np.dtype(np.int8), wire.STRING])))
    return SCHEMA.message("xla.ifrt.DTypeProto")(kind=kind)


@st.composite
def shapes(draw: st.DrawFn) -> Any:
    dims = draw(st.lists(st.sampled_from([4, 4, 2, 1, 0]) | NUMBERS, max_size=3))
    return SCHEMA.message("xla.ifrt.ShapeProto")(dims=dims)


@st.composite
def shardings(draw: st.DrawFn) -> Any:
    name = draw(st.sampled_from([*SHARDINGS]))
    inner = draw(messages(SCHEMA.message(SHARDINGS[name]).DESCRIPTOR)).SerializeToString()
    sharding = SCHEMA.message("xla.ifrt.ShardingProto")()
    sharding.serialized_sharding.type_name = f"xla::ifrt::{name}"
    sharding.serialized_sharding.data = draw(st.sampled_from([inner, inner, inner, inner[:-1], b"\xff"]))
    return sharding


@st.composite
def device_lists(draw: st.DrawFn) -> Any:
    ids = draw(st.lists(st.sampled_from([0, 1, 2, 3]) | SMALL, max_size=4))
    return SCHEMA.message("xla.ifrt.DeviceListProto")(device_ids=ids)


@st.composite
def op_shardings(draw: st.DrawFn) -> Any:
    tiles = draw(st.sampled_from([[2], [4], [1], [2, 2], [1 << 40, 1 << 40], [0], [-1], []]))
    order = draw(st.sampled_from([[0, 1], [1, 0], [0, 0], [0, 1, 2, 3], [99], []]))
    return OpSharding(type=draw(st.integers(0, 6)), tile_assignment_dimensions=tiles, tile_assignment_devices=order)


@st.composite
def compilations(draw: st.DrawFn) -> Any:
    request = SCHEMA.message("xla.ifrt.proxy.CompileRequest")()
    cut = draw(st.integers(0, len(PROGRAM)))
    request.program.type_name = "xla::ifrt::" + draw(
        st.sampled_from(["XlaProgram"] * 4 + ["HloProgram", "PluginProgram", "CustomCallProgram"])
    )
    request.program.data = draw(st.sampled_from([PROGRAM, PROGRAM[:cut], PROGRAM[cut:], b"{}", b"", *FATAL.values()]))
    request.compile_options.type_name = "xla::ifrt::XlaCompileOptions"
    options = compile_options(draw(SMALL))
    assignment = options.compile_options.executable_build_options.device_assignment
    assignment.CopyFrom(draw(messages(assignment.DESCRIPTOR)))
    options.compile_options.executable_build_options.num_replicas = draw(NUMBERS)
    options.compile_options.executable_build_options.num_partitions = draw(NUMBERS)
    other = options.SerializeToString()
    request.compile_options.data = draw(st.sampled_from([OPTIONS, OPTIONS, other, OPTIONS[:-1], b""]))
    return request


SPECIAL: Final[dict[str, Any]] = {
    "xla.ifrt.DTypeProto": dtypes,
    "xla.ifrt.ShapeProto": shapes,
    "xla.ifrt.ShardingProto": shardings,
    "xla.ifrt.DeviceListProto": device_lists,
    "xla.OpSharding": op_shardings,
    "xla.ifrt.proxy.CompileRequest": compilations,
}


@st.composite
def requests(draw: st.DrawFn) -> Any:
    kind = draw(st.sampled_from(KINDS))
    request = wire.Request()
    getattr(request, kind).CopyFrom(draw(messages(wire.Request.DESCRIPTOR.fields_by_name[kind].message_type)))
    return request


class Session:
    """A session that stores what its requests take from the host, and counts their answers."""

    def __init__(self, channel: grpc.Channel) -> None:
        self._channel = channel
        self._requests: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        call = channel.stream_stream(SERVICE + "IfrtSession")
        self._answers = call(iter(self._requests.get, None), timeout=TIMEOUT_S)
        self._next_op = 0
        self._next_buffer = 100
        self.id = self.ask(wire.Request(init_request={})).init_response.session_id

    def send(self, request: Any) -> int:
        self._next_op += 1
        request.request_metadata.op_id = self._next_op
        self._requests.put(request.SerializeToString())
        return self._next_op

    def receive(self) -> Any:
        return wire.Response.FromString(next(self._answers))

    def ask(self, request: Any) -> Any:
        self.send(request)
        return self.receive()

    def store(self, data: bytes) -> int:
        """The handle of a host buffer with this in it."""
        self._next_buffer += 1
        metadata = wire.StoreMetadata(session_id=self.id, handle=self._next_buffer, buffer_size=len(data))
        self._channel.stream_unary(SERVICE + "HostBufferStore")(
            iter([StoreRequest(data=data).SerializeToString()]),
            metadata=(("ifrt-proxy-grpc-host-buffer-store-metadata-bin", metadata.SerializeToString()),),
            timeout=TIMEOUT_S,
        )
        return self._next_buffer

    def supply(self, message: Any, data: bytes) -> None:
        """Gives each host buffer that a request takes something to take: without, it would wait for ever."""
        for field, value in message.ListFields():
            if field.name == "host_buffers":
                for buffer in value:
                    buffer.host_buffer_handle = self.store(data)
            elif field.message_type is not None and field.message_type.full_name.startswith("xla.ifrt.proxy.Make"):
                for inner in value if field.is_repeated else [value]:
                    self.supply(inner, data)
        if message.DESCRIPTOR.name == "MakeArrayFromHostBufferRequest":
            message.host_buffer_handle = self.store(data)

    def make_arrays(self) -> None:
        """Arrays 1, 2 and 3."""
        one, two = wire.Sharding((0,)), wire.Sharding((0, 1), op_sharding=cut_in_two())
        for handle, (dtype, sharding, data) in enumerate(
            [
                (np.dtype(np.float32), one, bytes(16)),
                (np.dtype(np.float32), two, bytes(16)),
                (wire.STRING, one, wire.write_strings([b"a", b"b", b"c", b"d"])),
            ],
            start=1,
        ):
            request = wire.Request()
            body = request.make_array_from_host_buffer_request
            body.dtype.kind = wire.dtype_kind(dtype)
            body.shape.dims.append(4)
            wire.write_sharding(body.sharding, sharding)
            body.host_buffer_handle, body.array_handle = self.store(data), handle
            self.ask(request)

    def compile(self, program: bytes = PROGRAM, options: bytes = OPTIONS) -> Any:
        """The answer to a request to compile; by default a program that doubles a float32[4]."""
        request = wire.Request()
        request.compile_request.program.type_name = "xla::ifrt::XlaProgram"
        request.compile_request.program.data = program
        request.compile_request.compile_options.type_name = "xla::ifrt::XlaCompileOptions"
        request.compile_request.compile_options.data = options
        return self.ask(request)

    def end(self) -> None:
        """Returns when the server has ended it too, and well."""
        self._requests.put(None)
        assert list(self._answers) == []


def cut_in_two() -> bytes:
    sharding = OpSharding(type=3, tile_assignment_dimensions=[2], tile_assignment_devices=[0, 1])
    return bytes(sharding.SerializeToString())


@pytest.fixture(scope="module")
def channel(start_emulator: Any) -> Iterator[grpc.Channel]:
    """To an emulator of four devices that nobody else uses."""
    emulator = start_emulator("--instance_type=tpuv6e:2x2", "--instance_count=1")
    with grpc.insecure_channel(emulator.target.removeprefix("grpc://")) as channel:
        yield channel
    assert emulator.process.poll() is None, emulator.log.read_text()[-3000:]


def check_all_are_answered(channel: grpc.Channel, requests: list[Any], data: bytes) -> None:
    session = Session(channel)
    session.make_arrays()
    executable = 0
    for request in requests:
        kind = request.WhichOneof("request")
        if "executable" in kind and not executable:
            executable = session.compile().compile_response.loaded_executable_handle
        if "loaded_executable_handle" in getattr(request, kind).DESCRIPTOR.fields_by_name:
            getattr(request, kind).loaded_executable_handle |= executable
        session.supply(getattr(request, kind), data)
    sent = {session.send(request) for request in requests}
    assert {session.receive().response_metadata.op_id for _ in requests} == sent
    session.end()


@pytest.mark.parametrize("fatal", FATAL)
def test_a_program_that_would_end_the_server_is_refused(channel: grpc.Channel, fatal: str) -> None:
    session = Session(channel)
    assert session.compile(FATAL[fatal]).response_metadata.status.code in (3, 12)
    assert session.compile().compile_response.loaded_executable_handle
    session.end()


@pytest.mark.parametrize(
    ("replicas", "computations", "rows"),
    [
        (0, 1, [[]]),
        (1, 0, []),
        ((1 << 31) - 1, 0, []),
        (-1, 1, [[0]]),
        (2, 1, [[0]]),
        (1, 2, [[0], [0]]),
        (1, 1, [[99]]),
    ],
)
def test_a_device_assignment_at_odds_with_itself_is_refused(
    channel: grpc.Channel, replicas: int, computations: int, rows: list[list[int]]
) -> None:
    options = compile_options(0)
    assignment = options.compile_options.executable_build_options.device_assignment
    assignment.Clear()
    assignment.replica_count, assignment.computation_count = replicas, computations
    for row in rows:
        assignment.computation_devices.add(replica_device_ids=row)
    session = Session(channel)
    answer = session.compile(options=options.SerializeToString())
    assert answer.response_metadata.status.code == (3 if replicas else 0)  # without one, it is the first device
    session.end()


@pytest.mark.parametrize(
    ("in_array", "interval"),
    [
        (0, (0, 1 << 62, 1)),
        (0, (0, 1, 0)),
        (0, (0, 1, -1)),
        (0, (-1, 0, 1)),
        (0, (1, 2, 1)),
        (-1, (0, 1, 1)),
        (7, (0, 1, 1)),
    ],
)
def test_a_plan_that_leads_out_of_its_arrays_is_refused(
    channel: grpc.Channel, in_array: int, interval: tuple[int, int, int]
) -> None:
    request = wire.Request()
    remap = request.remap_arrays_request
    spec = remap.plan.output_specs.add()
    spec.dtype.kind = wire.dtype_kind(np.dtype(np.float32))
    spec.shape.dims.append(4)
    wire.write_sharding(spec.sharding, wire.Sharding((0,)))
    start, end, step = ([number] for number in interval)
    remap.plan.mappings.add(
        in_array=in_array,
        out_array=0,
        from_start=start,
        from_end=end,
        from_step=step,
        to_start=[0],
        to_end=[1],
        to_step=[1],
    )
    remap.array_handles.append(1)
    remap.result_handles.append(9)
    session = Session(channel)
    session.make_arrays()
    assert session.ask(request).response_metadata.status.code == 3
    session.end()


def examples(count: int) -> settings:
    suppressed = [HealthCheck.function_scoped_fixture, HealthCheck.large_base_example, HealthCheck.data_too_large]
    return settings(max_examples=count, suppress_health_check=suppressed, print_blob=True)


@examples(60)
@given(st.lists(requests(), min_size=1, max_size=6), st.sampled_from([b"", bytes(16), bytes(64), b"\xff" * 16]))
def test_requests_with_any_values_are_answered(channel: grpc.Channel, requests: list[Any], data: bytes) -> None:
    check_all_are_answered(channel, requests, data)


@pytest.mark.soak
@pytest.mark.timeout(3600)
@seed(20261129)
@examples(3_000)
@given(st.lists(requests(), min_size=1, max_size=6), st.sampled_from([b"", bytes(16), bytes(64), b"\xff" * 16]))
def test_many_requests_with_any_values_are_answered(channel: grpc.Channel, requests: list[Any], data: bytes) -> None:
    check_all_are_answered(channel, requests, data)
