"""The server's HTTP/2 towards peers that break its rules, waste its time, or only use what few clients use."""

from __future__ import annotations

import socket
import struct
import threading
from collections.abc import Callable, Iterator

import hpack
import pytest

from pathways_runtime.emulator.grpc_calls import Call, Listener, Unary
from pathways_runtime.emulator.http2_output import (
    ACK,
    COMPRESSION_ERROR,
    CONTINUATION,
    DATA,
    END_HEADERS,
    END_STREAM,
    ENHANCE_YOUR_CALM,
    FLOW_CONTROL_ERROR,
    FRAME_SIZE_ERROR,
    GOAWAY,
    HEADERS,
    NO_ERROR,
    PADDED,
    PING,
    PRIORITY,
    PROTOCOL_ERROR,
    PUSH_PROMISE,
    RST_STREAM,
    SETTINGS,
    STREAM_CLOSED,
    WINDOW_UPDATE,
    WITH_PRIORITY,
    Receiver,
)

TIMEOUT_S = 30
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"


def frame(kind: int, flags: int, stream_id: int, payload: bytes = b"") -> bytes:
    return struct.pack(">I", len(payload))[1:] + struct.pack(">BBI", kind, flags, stream_id) + payload


def message(data: bytes) -> bytes:
    return struct.pack(">BI", 0, len(data)) + data


def headers(path: str = "/echo", **more: str) -> bytes:
    """A header block that needs no memory of earlier ones."""
    fields = {":method": "POST", ":scheme": "http", ":path": path, "content-type": "application/grpc"} | more
    encoder = hpack.Encoder()
    encoder.header_table_size = 0
    return bytes(encoder.encode([hpack.NeverIndexedHeaderTuple(*field) for field in fields.items()]))


def fields(block: bytes) -> dict[bytes, bytes]:
    return {bytes(name): bytes(value) for name, value in hpack.Decoder().decode(block, raw=True)}


BEGIN = PREFACE + frame(SETTINGS, 0, 0)
OPEN = BEGIN + frame(HEADERS, END_HEADERS, 1, headers())
OPEN_AND_ENDED = BEGIN + frame(HEADERS, END_HEADERS, 1, headers("/hold")) + frame(DATA, END_STREAM, 1)
LARGEST_WINDOW = frame(SETTINGS, 0, 0, struct.pack(">HI", 4, (1 << 31) - 1))
ENTRY_OF_4000_BYTES = b"\x40\x01a\x7f\xa1\x1e" + b"b" * 4000


class Held:
    """A receiver that never answers, and keeps what it gets."""

    keeps_data = True

    def on_data(self, data: memoryview) -> None: ...

    def on_end(self) -> None: ...

    def on_close(self) -> None:
        self.is_closed.set()

    def __init__(self) -> None:
        self.is_closed = threading.Event()


class Server:
    """The methods `/echo`, and `/hold`, whose caller is trusted and never answered."""

    def __init__(self, patience_s: float) -> None:
        self.held: list[Held] = []
        methods = {"/echo": lambda call: Unary(call, lambda raw: raw), "/hold": self._hold}
        self.listener = Listener("127.0.0.1", 0, methods, patience_s=patience_s)

    def _hold(self, call: Call) -> Receiver:
        call.trust()
        self.held.append(Held())
        return self.held[-1]

    def connect(self) -> Peer:
        return Peer(socket.create_connection(("127.0.0.1", self.listener.port), timeout=TIMEOUT_S))


class Peer:
    """One end of a connection, that says whatever a test wants it to."""

    def __init__(self, connection: socket.socket) -> None:
        self.socket = connection
        self._received = bytearray()

    def say(self, *data: bytes) -> None:
        self.socket.sendall(b"".join(data))

    def hear(self) -> tuple[int, int, int, bytes] | None:
        """(type, flags, stream, payload) of the next frame, None at the end."""
        while len(self._received) < 9 or len(self._received) < 9 + int.from_bytes(self._received[:3], "big"):
            try:
                part = self.socket.recv(1 << 20)
            except ConnectionResetError:
                part = b""
            if not part:
                return None
            self._received += part
        size = 9 + int.from_bytes(self._received[:3], "big")
        (kind, flags, stream_id), payload = struct.unpack(">BBI", self._received[3:9]), bytes(self._received[9:size])
        del self._received[:size]
        return kind, flags, stream_id, payload

    def hear_of(self, stream_id: int, *kinds: int) -> list[tuple[int, bytes]]:
        """The frames of a stream of these types until its end, and those of streams that ended before."""
        heard = []
        while (said := self.hear()) is not None:
            if said[0] in kinds and said[2] == stream_id:
                heard.append((said[0], said[3]))
            if said[2] == stream_id and (said[1] & END_STREAM or said[0] == RST_STREAM):
                return heard
        raise AssertionError(f"the connection ended; so far {heard}")

    def hear_goodbye(self) -> int | None:
        """The error code of the GOAWAY that ends the connection, None where there is none."""
        code = None
        while (said := self.hear()) is not None:
            if said[0] == GOAWAY:
                code = int(struct.unpack(">II", said[3])[1])
        return code

    def echo(self, stream_id: int, data: bytes) -> bytes:
        self.say(frame(HEADERS, END_HEADERS, stream_id, headers()), frame(DATA, END_STREAM, stream_id, message(data)))
        return b"".join(payload for _, payload in self.hear_of(stream_id, DATA))


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    server = Server(patience_s=TIMEOUT_S)
    yield server
    server.listener.close()
    server.listener.join()


@pytest.fixture
def peer(server: Server) -> Iterator[Peer]:
    peer = server.connect()
    yield peer
    peer.socket.close()


@pytest.fixture
def impatient() -> Iterator[Server]:
    server = Server(patience_s=0.3)
    yield server
    server.listener.close()


@pytest.mark.parametrize(
    ("data", "code"),
    [
        (b"GET / HTTP/1.1\r\n\r\n", PROTOCOL_ERROR),
        (PREFACE + frame(PING, 0, 0, bytes(8)), PROTOCOL_ERROR),
        (PREFACE + frame(SETTINGS, ACK, 0) + frame(PING, 0, 0, bytes(8)), PROTOCOL_ERROR),
        (BEGIN + frame(SETTINGS, ACK, 0, bytes(6)), FRAME_SIZE_ERROR),
        (BEGIN + frame(SETTINGS, 0, 1), PROTOCOL_ERROR),
        (BEGIN + frame(SETTINGS, 0, 0, struct.pack(">HI", 2, 2)), PROTOCOL_ERROR),
        (BEGIN + frame(SETTINGS, 0, 0, struct.pack(">HI", 4, 1 << 31)), FLOW_CONTROL_ERROR),
        (BEGIN + frame(SETTINGS, 0, 0, struct.pack(">HI", 5, 1)), PROTOCOL_ERROR),
        (BEGIN + frame(PING, 0, 0, bytes(7)), FRAME_SIZE_ERROR),
        (BEGIN + frame(PING, 0, 1, bytes(8)), PROTOCOL_ERROR),
        (BEGIN + frame(PUSH_PROMISE, 0, 1, bytes(4)), PROTOCOL_ERROR),
        (BEGIN + frame(HEADERS, END_HEADERS, 0, headers()), PROTOCOL_ERROR),
        (BEGIN + frame(HEADERS, END_HEADERS, 2, headers()), PROTOCOL_ERROR),
        (BEGIN + frame(HEADERS, END_HEADERS | WITH_PRIORITY, 1, b"1234"), FRAME_SIZE_ERROR),
        (BEGIN + frame(HEADERS, END_HEADERS | PADDED, 1, b"\x05"), PROTOCOL_ERROR),
        (BEGIN + frame(HEADERS, 0, 1) + frame(PING, 0, 0, bytes(8)), PROTOCOL_ERROR),
        (BEGIN + frame(HEADERS, 0, 1) + frame(CONTINUATION, 0, 3), PROTOCOL_ERROR),
        (BEGIN + frame(HEADERS, 0, 1) + frame(DATA, 0, 1), PROTOCOL_ERROR),
        (BEGIN + frame(HEADERS, 0, 1) + frame(CONTINUATION, 0, 1) * 100, ENHANCE_YOUR_CALM),
        (BEGIN + frame(HEADERS, 0, 1) + frame(CONTINUATION, 0, 1, bytes(30000)) * 3, ENHANCE_YOUR_CALM),
        (BEGIN + frame(CONTINUATION, 0, 1), PROTOCOL_ERROR),
        (BEGIN + frame(HEADERS, END_HEADERS, 1, b"\xff\xff"), COMPRESSION_ERROR),
        # One entry of the table, again and again: 4 KB for each byte.
        (
            BEGIN + frame(HEADERS, END_HEADERS, 1, ENTRY_OF_4000_BYTES + b"\xbe" * 60000),
            COMPRESSION_ERROR,
        ),
        (BEGIN + frame(DATA, 0, 0, b"x"), PROTOCOL_ERROR),
        (BEGIN + frame(DATA, 0, 1, b"x"), PROTOCOL_ERROR),
        (OPEN + b"\xff\xff\xff\x00\x00\x00\x00\x00\x01", FRAME_SIZE_ERROR),
        (OPEN + frame(DATA, PADDED, 1), PROTOCOL_ERROR),
        (OPEN + frame(DATA, PADDED, 1, b"\x05x"), PROTOCOL_ERROR),
        (OPEN + frame(HEADERS, END_HEADERS, 1, headers()), STREAM_CLOSED),
        (OPEN_AND_ENDED + frame(DATA, 0, 1, b"x"), STREAM_CLOSED),
        (OPEN_AND_ENDED + frame(HEADERS, END_HEADERS | END_STREAM, 1), STREAM_CLOSED),
        (BEGIN + frame(RST_STREAM, 0, 1, bytes(4)), PROTOCOL_ERROR),
        (OPEN + frame(RST_STREAM, 0, 1, bytes(3)), FRAME_SIZE_ERROR),
        (BEGIN + frame(WINDOW_UPDATE, 0, 0, bytes(4)), PROTOCOL_ERROR),
        (OPEN + frame(WINDOW_UPDATE, 0, 1, bytes(4)), PROTOCOL_ERROR),
        (BEGIN + frame(WINDOW_UPDATE, 0, 3, b"\0\0\0\1"), PROTOCOL_ERROR),
        (BEGIN + frame(WINDOW_UPDATE, 0, 0, b"\x7f\xff\xff\xff"), FLOW_CONTROL_ERROR),
        (OPEN + frame(WINDOW_UPDATE, 0, 1, b"\x7f\xff\xff\xff"), FLOW_CONTROL_ERROR),
        # Settings that make the window of an open stream too large.
        (
            OPEN + frame(WINDOW_UPDATE, 0, 1, b"\0\0\0\1") + LARGEST_WINDOW,
            FLOW_CONTROL_ERROR,
        ),
    ],
)
def test_a_peer_that_breaks_the_rules_is_told_and_let_go(server: Server, peer: Peer, data: bytes, code: int) -> None:
    peer.say(data)
    assert peer.hear_goodbye() == code
    other = server.connect()
    other.say(BEGIN)
    assert other.echo(1, b"hello") == message(b"hello")
    other.socket.close()


def test_headers_and_data_may_come_in_any_pieces(peer: Peer) -> None:
    block = headers()
    peer.say(BEGIN, frame(0xBE, 0xFF, 0, b"unknown"), frame(PRIORITY, 0, 1, bytes(5)))
    padded = frame(HEADERS, PADDED | WITH_PRIORITY, 1, b"\x03" + bytes(5) + block[:10] + bytes(3))
    peer.say(padded, frame(CONTINUATION, 0, 1, block[10:11]), frame(CONTINUATION, END_HEADERS, 1, block[11:]))
    data = message(b"hello")
    pieces = frame(DATA, PADDED, 1, b"\x02" + data[:3] + bytes(2)) + frame(DATA, 0, 1) + frame(DATA, PADDED, 1, b"\0")
    for byte in pieces + frame(DATA, PADDED | END_STREAM, 1, b"\x04" + data[3:] + bytes(4)):
        peer.say(bytes([byte]))
    assert b"".join(payload for _, payload in peer.hear_of(1, DATA)) == data


def test_a_request_may_end_with_trailers(peer: Peer) -> None:
    peer.say(OPEN, frame(DATA, 0, 1, message(b"hello")), frame(HEADERS, END_HEADERS | END_STREAM, 1))
    assert peer.hear_of(1, DATA) == [(DATA, message(b"hello"))]


def test_a_ping_is_answered_while_a_stream_is_open(peer: Peer) -> None:
    peer.say(OPEN, frame(PING, 0, 0, b"12345678"))
    while (said := peer.hear()) is not None and said[0] != PING:
        pass
    assert said == (PING, ACK, 0, b"12345678")


def test_what_comes_for_streams_that_have_ended_is_ignored(peer: Peer) -> None:
    peer.say(OPEN, frame(DATA, 0, 1, b"\x01" + bytes(4)))  # a compressed message: the call ends before the request does
    assert [kind for kind, _ in peer.hear_of(1, HEADERS, RST_STREAM)] == [HEADERS]
    peer.say(frame(DATA, 0, 1, b"more"), frame(WINDOW_UPDATE, 0, 1, b"\0\0\0\1"), frame(RST_STREAM, 0, 1, bytes(4)))
    assert peer.echo(3, b"hello") == message(b"hello")


def test_many_resets_cost_nothing(peer: Peer) -> None:
    peer.say(BEGIN)
    ids = range(1, 20001, 2)
    peer.say(*(frame(HEADERS, END_HEADERS, i, headers()) + frame(RST_STREAM, 0, i, bytes(4)) for i in ids))
    assert peer.echo(20001, b"hello") == message(b"hello")


def test_a_stream_that_is_reset_closes_its_receiver(server: Server, peer: Peer) -> None:
    peer.say(BEGIN, frame(HEADERS, END_HEADERS, 1, headers("/hold")), frame(RST_STREAM, 0, 1, bytes(4)))
    assert peer.echo(3, b"hello") == message(b"hello")
    assert server.held[-1].is_closed.is_set()


def test_a_peer_that_vanishes_closes_its_receivers(server: Server, peer: Peer) -> None:
    peer.say(BEGIN, frame(HEADERS, END_HEADERS, 1, headers("/hold")))
    assert peer.echo(3, b"hello") == message(b"hello")
    peer.socket.close()
    assert server.held[-1].is_closed.wait(TIMEOUT_S)


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (b"\x01\x00\x00\x00\x01x", b"12"),  # compressed
        (b"\x00\xff\xff\xff\xff", b"8"),  # too large
        (message(b"a") + message(b"b"), b"12"),  # two where one is wanted
        (message(b"abc")[:-1], b"3"),  # incomplete
        (b"", b"3"),
    ],
)
def test_a_message_that_cannot_be_is_an_error_of_its_call(peer: Peer, data: bytes, status: bytes) -> None:
    peer.say(OPEN, frame(DATA, END_STREAM, 1, data))
    [(_, block)] = peer.hear_of(1, HEADERS)
    assert fields(block)[b"grpc-status"] == status
    assert peer.echo(3, b"hello") == message(b"hello")


@pytest.mark.parametrize("field", [{":method": "GET"}, {"content-type": "text/html"}])
def test_what_is_not_grpc_is_answered_415(peer: Peer, field: dict[str, str]) -> None:
    peer.say(BEGIN, frame(HEADERS, END_HEADERS | END_STREAM, 1, headers(**field)))
    [(_, block)] = peer.hear_of(1, HEADERS)
    assert fields(block) == {b":status": b"415"}


def test_an_error_message_is_cut_to_what_clients_take(peer: Peer) -> None:
    peer.say(BEGIN, frame(HEADERS, END_HEADERS | END_STREAM, 1, headers("/" + "é" * 9000)))
    [(_, block)] = peer.hear_of(1, HEADERS)
    assert len(block) < 8192
    assert fields(block)[b"grpc-message"].endswith(b"%C3%A9")


def test_an_answer_waits_for_a_window_that_is_closed(peer: Peer) -> None:
    peer.say(PREFACE, frame(SETTINGS, 0, 0, struct.pack(">HI", 4, 0)))
    peer.say(frame(HEADERS, END_HEADERS, 1, headers()), frame(DATA, END_STREAM, 1, message(b"hello")))
    peer.say(*(frame(WINDOW_UPDATE, 0, 1, b"\0\0\0\1") for _ in range(10)))
    assert peer.hear_of(1, DATA) == [(DATA, bytes([byte])) for byte in message(b"hello")]


def say_nothing(peer: Peer) -> None:
    pass


def say_half_a_preface(peer: Peer) -> None:
    peer.say(PREFACE[:10])


def say_half_a_frame(peer: Peer) -> None:
    peer.say(BEGIN, frame(HEADERS, END_HEADERS, 1, headers())[:-3])


def say_half_a_request(peer: Peer) -> None:
    peer.say(OPEN, frame(DATA, 0, 1, message(b"hello")[:7]))


def say_all_but_open_no_session(peer: Peer) -> None:
    peer.say(BEGIN)
    assert peer.echo(1, b"hello") == message(b"hello")


@pytest.mark.parametrize(
    "begin", [say_nothing, say_half_a_preface, say_half_a_frame, say_half_a_request, say_all_but_open_no_session]
)
def test_a_peer_that_keeps_the_server_waiting_is_let_go(impatient: Server, begin: Callable[[Peer], None]) -> None:
    peer = impatient.connect()
    begin(peer)
    assert peer.hear_goodbye() == NO_ERROR
    peer.socket.close()


def test_a_peer_that_says_one_byte_at_a_time_is_let_go(impatient: Server) -> None:
    peer = impatient.connect()
    stop = threading.Event()

    def drip() -> None:
        peer.say(BEGIN)
        while not stop.wait(0.05):
            try:
                peer.say(frame(PING, ACK, 0, bytes(8))[:1])
            except OSError:
                return

    dripping = threading.Thread(target=drip)
    dripping.start()
    assert peer.hear_goodbye() in (NO_ERROR, None)  # None: what it said last met a closed socket
    stop.set()
    dripping.join()
    peer.socket.close()


def test_a_trusted_peer_may_be_silent(impatient: Server) -> None:
    trusted, other = impatient.connect(), impatient.connect()
    trusted.say(BEGIN, frame(HEADERS, END_HEADERS, 1, headers("/hold")))
    assert other.hear_goodbye() == NO_ERROR
    assert trusted.echo(3, b"hello") == message(b"hello")
    trusted.socket.close()
    other.socket.close()
