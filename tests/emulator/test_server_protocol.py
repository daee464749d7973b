"""The server towards a client that is not jaxlib's: a wrong one, a hostile one, one that vanishes. Client: grpcio."""

from __future__ import annotations

import queue
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any

import grpc
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pathways_runtime.emulator import schema, wire
from pathways_runtime.emulator.status import CODES

SERVICE = "/xla.ifrt.proxy.GrpcIfrtService/"
STORE_METADATA = "ifrt-proxy-grpc-host-buffer-store-metadata-bin"
TIMEOUT_S = 30
StoreRequest = schema.load().message("xla.ifrt.proxy.GrpcHostBufferStoreRequest")
LookupResponse = schema.load().message("xla.ifrt.proxy.GrpcHostBufferLookupResponse")


class Peer:
    """A client that says whatever a test wants it to."""

    def __init__(self, target: str) -> None:
        self._channel = grpc.insecure_channel(
            target.removeprefix("grpc://"), options=[("grpc.use_local_subchannel_pool", 1)]
        )

    def unary(self, method: str, message: bytes) -> bytes:
        answer: bytes = self._channel.unary_unary(SERVICE + method)(message, timeout=TIMEOUT_S)
        return answer

    def store(self, session_id: int, handle: int, size: int, *chunks: bytes) -> None:
        metadata = wire.StoreMetadata(session_id=session_id, handle=handle, buffer_size=size).SerializeToString()
        messages = iter([StoreRequest(data=chunk).SerializeToString() for chunk in chunks])
        call = self._channel.stream_unary(SERVICE + "HostBufferStore")
        call(messages, metadata=((STORE_METADATA, metadata),), timeout=TIMEOUT_S)

    def lookup(self, session_id: int, handle: int) -> list[bytes]:
        request = wire.LookupRequest(session_id=session_id, handle=handle).SerializeToString()
        answers = self._channel.unary_stream(SERVICE + "HostBufferLookup")(request, timeout=TIMEOUT_S)
        return [LookupResponse.FromString(answer).data for answer in answers]

    def open(self) -> RawSession:
        return RawSession(self._channel)

    def close(self) -> None:
        self._channel.close()


class RawSession:
    """A session of raw requests. `ask` sends one and waits for its answer."""

    def __init__(self, channel: grpc.Channel) -> None:
        self._requests: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._answers = channel.stream_stream(SERVICE + "IfrtSession")(
            iter(self._requests.get, None), timeout=TIMEOUT_S
        )
        self._next_op = 0
        self.id = self.ask("init").init_response.session_id

    def send(self, kind: str, **fields: Any) -> int:
        self._next_op += 1
        request = wire.Request()
        request.request_metadata.op_id = self._next_op
        body = getattr(request, f"{kind}_request")
        body.CopyFrom(type(body)(**fields))
        self._requests.put(request.SerializeToString())
        return self._next_op

    def send_raw(self, request: bytes) -> None:
        self._requests.put(request)

    def receive(self) -> Any:
        return wire.Response.FromString(next(self._answers))

    def ask(self, kind: str, **fields: Any) -> Any:
        op_id = self.send(kind, **fields)
        answer = self.receive()
        assert answer.response_metadata.op_id == op_id
        return answer

    def ask_for_error(self, kind: str, **fields: Any) -> tuple[int, str]:
        status = self.ask(kind, **fields).response_metadata.status
        return status.code, status.message

    def end(self) -> None:
        self._requests.put(None)


@pytest.fixture
def peer(emulator: Any) -> Iterator[Peer]:
    """A client of the shared emulator."""
    peer = Peer(emulator.target)
    yield peer
    peer.close()


@pytest.fixture
def session(peer: Peer) -> Iterator[RawSession]:
    session = peer.open()
    yield session
    session.end()


def float32_spec(device_id: int, *shape: int) -> dict[str, Any]:
    """The fields of a message that say: float32 of this shape on one device."""
    spec = schema.load().message("xla.ifrt.ArraySpecProto")()
    spec.dtype.kind = wire.dtype_kind(np.dtype(np.float32))
    spec.shape.dims.extend(shape)
    wire.write_sharding(spec.sharding, wire.Sharding((device_id,)))
    return {"dtype": spec.dtype, "shape": spec.shape, "sharding": spec.sharding}


def fetch(peer: Peer, session: RawSession, handle: int, buffer: int) -> bytes:
    answer = session.ask("copy_to_host_buffer", array_handle=handle, host_buffer_handle=buffer)
    assert answer.response_metadata.status.code == 0, answer.response_metadata.status.message
    return b"".join(peer.lookup(session.id, buffer))


def test_data_may_come_after_the_request_that_uses_it(peer: Peer, session: RawSession) -> None:
    values = np.arange(6, dtype=np.float32)
    session.send("make_array_from_host_buffer", host_buffer_handle=1, array_handle=2, **float32_spec(0, 6))
    session.send("check_value_ready", value_handles=[2])
    peer.store(session.id, 1, values.nbytes, values.tobytes()[:10], b"", values.tobytes()[10:])
    assert session.receive().make_array_from_host_buffer_response.array_handle == 2
    assert session.receive().HasField("check_value_ready_response")
    assert fetch(peer, session, 2, 3) == values.tobytes()


def test_a_large_buffer_comes_back_in_pieces(peer: Peer, session: RawSession) -> None:
    values = np.random.default_rng(0).standard_normal(3 << 20).astype(np.float32)
    data = memoryview(values.tobytes())
    peer.store(session.id, 1, len(data), *(bytes(data[i : i + 1_000_003]) for i in range(0, len(data), 1_000_003)))
    session.ask("make_array_from_host_buffer", host_buffer_handle=1, array_handle=2, **float32_spec(0, values.size))
    assert fetch(peer, session, 2, 3) == data


def test_an_empty_buffer_is_one_message(peer: Peer, session: RawSession) -> None:
    peer.store(session.id, 1, 0)
    session.ask("make_array_from_host_buffer", host_buffer_handle=1, array_handle=2, **float32_spec(0, 0))
    session.ask("copy_to_host_buffer", array_handle=2, host_buffer_handle=3)
    assert peer.lookup(session.id, 3) == [b""]


@pytest.mark.parametrize(
    ("size", "chunks"), [(4, [b"123"]), (4, [b"12345"]), (0, [b"1"]), (1 << 62, [b"1"]), (-1, [b""])]
)
def test_a_buffer_of_another_size_than_announced_is_refused(
    peer: Peer, session: RawSession, size: int, chunks: list[bytes]
) -> None:
    with pytest.raises(grpc.RpcError):
        peer.store(session.id, 1, size, *chunks)


def test_a_failed_request_poisons_the_arrays_it_should_have_made(peer: Peer, session: RawSession) -> None:
    peer.store(session.id, 1, 3, b"123")
    make = session.ask_for_error(
        "make_array_from_host_buffer", host_buffer_handle=1, array_handle=2, **float32_spec(0, 6)
    )
    assert make[0] == CODES["INVALID_ARGUMENT"]
    assert session.ask_for_error("check_value_ready", value_handles=[2]) == make
    assert session.ask_for_error("copy_to_host_buffer", array_handle=2, host_buffer_handle=3) == make
    assert session.ask_for_error("disassemble_into_single_device_arrays", array_handle=2, result_handles=[4]) == make
    assert session.ask_for_error("check_value_ready", value_handles=[4]) == make


def test_a_device_that_is_not_there_is_named(peer: Peer, session: RawSession) -> None:
    peer.store(session.id, 1, 4, b"1234")
    fields = {"host_buffer_handle": 1, "array_handle": 2, **float32_spec(999, 1)}
    assert session.ask_for_error("make_array_from_host_buffer", **fields) == (
        CODES["INVALID_ARGUMENT"],
        "there is no device with id 999",
    )


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        ("check_future", {"future_handle": 7}),
        ("check_value_ready", {"value_handles": [7]}),
        ("is_array_deleted", {"array_handle": 7}),
        ("destruct_array", {"array_handle": [7]}),
        ("copy_arrays", {"array_handles": [7], "copy_semantics": 1}),
        ("loaded_executable_execute", {"loaded_executable_handle": 7}),
        ("loaded_executable_metadata", {"loaded_executable_handle": 7}),
        ("loaded_executable_fetch_execute_result", {"result_status_handle": 7}),
    ],
)
def test_an_unknown_handle_is_not_found(session: RawSession, kind: str, fields: dict[str, Any]) -> None:
    assert session.ask_for_error(kind, **fields)[0] == CODES["NOT_FOUND"]


def test_a_request_without_a_body_is_an_error_and_the_session_goes_on(session: RawSession) -> None:
    request = wire.Request()
    request.request_metadata.op_id = 77
    session.send_raw(request.SerializeToString())
    assert session.receive().response_metadata.status.code == CODES["UNIMPLEMENTED"]
    assert session.ask("init").response_metadata.status.code == 0


def test_bytes_that_are_no_request_end_their_session_alone(peer: Peer, session: RawSession) -> None:
    other = peer.open()
    other.send_raw(b"\xff\xff\xff\xff")
    with pytest.raises(grpc.RpcError) as ended:
        other.receive()
    assert ended.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert session.ask("init").response_metadata.status.code == 0


def test_a_program_that_does_not_parse_is_an_error(session: RawSession) -> None:
    program = {"type_name": "xla::ifrt::XlaProgram", "data": b"ML\xefR broken"}
    options = {"type_name": "xla::ifrt::XlaCompileOptions", "data": b""}
    code, message = session.ask_for_error("compile", program=program, compile_options=options)
    assert code == CODES["INVALID_ARGUMENT"]
    assert "not a StableHLO program" in message


def test_a_program_of_an_unknown_kind_is_named(session: RawSession) -> None:
    program = {"type_name": "xla::ifrt::MadeUp", "data": b""}
    assert "'xla::ifrt::MadeUp'" in session.ask_for_error("compile", program=program)[1]


def test_responses_are_numbered_without_gaps_and_release_the_user_contexts(session: RawSession) -> None:
    released: list[int] = []
    numbers: list[int] = []
    for context, kind, fields in (
        (11, "get_default_device_assignment", {"num_replicas": 1, "num_partitions": 1}),
        (12, "check_future", {"future_handle": 9}),  # fails, so that its context leaves with a later answer
        (13, "get_default_device_assignment", {"num_replicas": 1, "num_partitions": 1}),
        (14, "make_error_arrays", {"error": {"code": 3}, "array_handles": [1], "array_specs": [{}]}),
    ):
        request = wire.Request()
        request.request_metadata.op_id = context
        request.request_metadata.user_context_id = context
        body = getattr(request, f"{kind}_request")
        body.CopyFrom(type(body)(**fields))
        session.send_raw(request.SerializeToString())
        metadata = session.receive().response_metadata
        if metadata.status.code == 0:
            numbers.append(metadata.seq_num)
            released += metadata.destroyed_user_context_ids
    assert sorted(released) == [11, 12, 13, 14]
    assert numbers == [0, 1, 2]  # the fixture's own init had none: the client holds its response for ever


def test_handles_of_another_session_are_unknown(peer: Peer, session: RawSession) -> None:
    peer.store(session.id, 1, 4, b"1234")
    session.ask("make_array_from_host_buffer", host_buffer_handle=1, array_handle=2, **float32_spec(0, 1))
    other = peer.open()
    assert other.ask_for_error("check_value_ready", value_handles=[2])[0] == CODES["NOT_FOUND"]
    other.end()


def test_a_client_that_vanishes_in_the_middle_of_a_wait_leaves_the_others_alone(
    emulator: Any, session: RawSession
) -> None:
    gone = Peer(emulator.target)
    waiting = gone.open()
    waiting.send("make_array_from_host_buffer", host_buffer_handle=1, array_handle=2, **float32_spec(0, 6))
    gone.close()
    assert session.ask("init").response_metadata.status.code == 0


def test_a_version_before_the_oldest_is_refused_with_both_versions(peer: Peer) -> None:
    request = wire.GetVersionRequest()
    request.min_version.protocol_version, request.max_version.protocol_version = 3, 9
    with pytest.raises(grpc.RpcError) as refused:
        peer.unary("GetVersion", request.SerializeToString())
    assert refused.value.code() == grpc.StatusCode.FAILED_PRECONDITION
    assert "the client speaks 3 to 9, this server 15 or newer" in refused.value.details()


def test_an_unknown_method_is_unimplemented(peer: Peer) -> None:
    with pytest.raises(grpc.RpcError) as refused:
        peer.unary("MadeUp", b"")
    assert refused.value.code() == grpc.StatusCode.UNIMPLEMENTED


@pytest.mark.parametrize("method", ["GetVersion", "HostBufferLookup", "HostBufferDelete"])
def test_bytes_that_are_no_message_are_refused(peer: Peer, method: str) -> None:
    with pytest.raises(grpc.RpcError) as refused:
        peer.unary(method, b"\xff\xff\xff")
    assert refused.value.code() == grpc.StatusCode.INVALID_ARGUMENT


def connect(target: str) -> socket.socket:
    host, _, port = target.removeprefix("grpc://").rpartition(":")
    return socket.create_connection((host, int(port)), timeout=TIMEOUT_S)


PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"


@pytest.mark.parametrize(
    "data",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        PREFACE + b"\x00\x00\x03\x04\x00\x00\x00\x00\x00abc",  # settings that are no settings
        PREFACE + b"\xff\xff\xff\x01\x04\x00\x00\x00\x01",  # headers of 16 MiB
        PREFACE + b"\x00\x00\x01\x09\x04\x00\x00\x00\x01x",  # a continuation of nothing
        PREFACE + b"\x00\x00\x02\x01\x04\x00\x00\x00\x01\xff\xff",  # headers that do not decode
        PREFACE + b"\x00\x00\x01\x00\x00\x00\x00\x00\x05x",  # data for a stream that is not open
        PREFACE + b"\x00\x00\x01\x01\x0c\x00\x00\x00\x01\x05",  # more padding than frame
        PREFACE + b"\x00\x00\x04\x08\x00\x00\x00\x00\x00\x7f\xff\xff\xff" * 2,  # a window beyond its limit
    ],
)
def test_a_peer_that_breaks_http2_is_disconnected(emulator: Any, session: RawSession, data: bytes) -> None:
    with connect(emulator.target) as peer:
        peer.sendall(data)
        while peer.recv(65536):
            pass
    assert session.ask("init").response_metadata.status.code == 0


@settings(max_examples=50, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.binary(max_size=200))
def test_any_bytes_leave_the_server_alive(emulator: Any, session: RawSession, data: bytes) -> None:
    with connect(emulator.target) as peer:
        peer.sendall(PREFACE + data)
        peer.shutdown(socket.SHUT_WR)
        while peer.recv(65536):
            pass
    assert session.ask("init").response_metadata.status.code == 0


def test_two_hundred_sessions_at_once(peer: Peer) -> None:
    sessions = [peer.open() for _ in range(200)]
    assert len({session.id for session in sessions}) == 200
    for session in sessions:
        session.end()


def test_sessions_at_once_do_not_mix_their_data(emulator: Any) -> None:
    def work(number: int) -> Callable[[], None]:
        def run() -> None:
            peer = Peer(emulator.target)
            session = peer.open()
            values = np.full(1000, number, np.float32).tobytes()
            for handle in range(1, 40, 2):
                peer.store(session.id, handle, len(values), values)
                fields = float32_spec(handle % 8, 1000)
                session.ask("make_array_from_host_buffer", host_buffer_handle=handle, array_handle=handle, **fields)
                results[number].append(fetch(peer, session, handle, handle + 1) == values)
            peer.close()

        return run

    results: dict[int, list[bool]] = {number: [] for number in range(4)}
    threads = [threading.Thread(target=work(number)) for number in results]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {number: [True] * 20 for number in range(4)}
