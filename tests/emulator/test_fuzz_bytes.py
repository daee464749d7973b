"""Any bytes, and frames in any order, at the socket of a real emulator: other clients notice nothing."""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterator
from typing import Any, Final

import grpc
import hpack
import pytest
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st

from pathways_runtime.emulator import wire
from pathways_runtime.emulator.http2_output import CONTINUATION, DATA, HEADERS, SETTINGS, WINDOW_UPDATE

SERVICE: Final = "/xla.ifrt.proxy.GrpcIfrtService/"
STORE_METADATA: Final = "ifrt-proxy-grpc-host-buffer-store-metadata-bin"
TIMEOUT_S: Final = 30
PREFACE: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
EMPTY_SETTINGS: Final = b"\0\0\0\x04" + bytes(5)


def frame(kind: int, flags: int, stream_id: int, payload: bytes = b"") -> bytes:
    return struct.pack(">I", len(payload))[1:] + struct.pack(">BBI", kind, flags, stream_id) + payload


def header_block(method: str, metadata: dict[str, bytes]) -> bytes:
    fields: dict[str, Any] = {":method": "POST", ":path": SERVICE + method, "content-type": "application/grpc"}
    encoder = hpack.Encoder()
    encoder.header_table_size = 0
    return bytes(encoder.encode([hpack.NeverIndexedHeaderTuple(*field) for field in (fields | metadata).items()]))


def message(data: bytes) -> bytes:
    return struct.pack(">BI", 0, len(data)) + data


METHODS: Final = ["GetVersion", "IfrtSession", "HostBufferStore", "HostBufferLookup", "HostBufferDelete", "MadeUp"]
BLOCKS: Final = [
    header_block(method, metadata)
    for method in METHODS
    for metadata in ({}, {STORE_METADATA: b"\0" + wire.StoreMetadata(buffer_size=8).SerializeToString()})
]
INIT: Final = message(wire.Request(init_request={}).SerializeToString())
PAYLOADS: Final = st.sampled_from(
    [INIT, INIT[:3], message(b""), message(b"\xff" * 9), b"\0\0\0\0\xff", bytes(4), b"\0\0\0\1", b"\x7f" + b"\xff" * 3]
)
IDS: Final = st.sampled_from([0, 1, 1, 1, 2, 3, 3, 5, 7, 1 << 30, (1 << 31) - 1, (1 << 32) - 1])


@st.composite
def any_frames(draw: st.DrawFn) -> bytes:
    """A frame that is well formed, where and when it may be wrong."""
    kind = draw(st.sampled_from([DATA, HEADERS, HEADERS, CONTINUATION, SETTINGS, WINDOW_UPDATE]) | st.integers(0, 12))
    flags = draw(st.sampled_from([0, 1, 4, 4, 5, 8, 0x20]) | st.integers(0, 255))
    blocks = st.sampled_from(BLOCKS) if kind in (HEADERS, CONTINUATION) else PAYLOADS
    return frame(kind, flags, draw(IDS), draw(blocks | st.binary(max_size=40)))


@pytest.fixture(scope="module")
def emulator(start_emulator: Any) -> Iterator[Any]:
    """One that nobody else uses."""
    emulator = start_emulator("--instance_type=tpuv6e:1x1", "--instance_count=1")
    yield emulator
    assert emulator.process.poll() is None
    log = emulator.log.read_text()
    assert "error of the server" not in log, log[-5000:]
    assert "Traceback" not in log, log[-5000:]


@pytest.fixture(scope="module")
def channel(emulator: Any) -> Iterator[grpc.Channel]:
    with grpc.insecure_channel(emulator.target.removeprefix("grpc://")) as channel:
        yield channel


def check_others_are_served(emulator: Any, channel: grpc.Channel, data: bytes) -> None:
    """Says it, hears the server out, and opens a session of another client meanwhile and after."""
    host, _, port = emulator.target.removeprefix("grpc://").rpartition(":")
    with socket.create_connection((host, int(port)), timeout=TIMEOUT_S) as peer:
        try:
            peer.sendall(data)
            check_session(channel)
            peer.shutdown(socket.SHUT_WR)
            while peer.recv(1 << 16):
                pass
        except (ConnectionResetError, BrokenPipeError):
            pass  # the server had heard enough
        except OSError as error:
            if not isinstance(error, TimeoutError):
                return  # it was gone before we could say that we were
            raise
    check_session(channel)


def check_session(channel: grpc.Channel) -> None:
    requests = [wire.Request(init_request={}).SerializeToString()]
    answers = channel.stream_stream(SERVICE + "IfrtSession")(iter(requests), timeout=TIMEOUT_S)
    [answer] = [wire.Response.FromString(answer) for answer in answers]
    assert len(answer.init_response.primary_device_ids) == 1


def examples(count: int) -> settings:
    return settings(max_examples=count, suppress_health_check=[HealthCheck.function_scoped_fixture], print_blob=True)


ANY_BYTES: Final = st.tuples(st.sampled_from([b"", PREFACE, PREFACE + EMPTY_SETTINGS]), st.binary(max_size=300)).map(
    b"".join
)
ANY_ORDER: Final = st.lists(any_frames(), max_size=12).map(lambda frames: PREFACE + EMPTY_SETTINGS + b"".join(frames))


@examples(100)
@given(ANY_BYTES | ANY_ORDER)
def test_any_bytes_and_frames_leave_others_alone(emulator: Any, channel: grpc.Channel, data: bytes) -> None:
    check_others_are_served(emulator, channel, data)


@pytest.mark.soak
@pytest.mark.timeout(3600)
@seed(20261129)
@examples(3_000)
@given(ANY_BYTES | ANY_ORDER)
def test_many_bytes_and_frames_leave_others_alone(emulator: Any, channel: grpc.Channel, data: bytes) -> None:
    check_others_are_served(emulator, channel, data)
