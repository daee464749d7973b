"""HTTP/2 as a gRPC client speaks it (RFC 9113), for many small messages and for large ones.

grpcio's server wakes two threads for each message and each answer, 120 us that a small program's execution does not
have, and copies large messages several times. Here a connection's thread takes whatever has arrived in one read, and
answers leave together. Header compression is the `hpack` library's. No server push, no priorities, no TLS.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import struct
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Final, Protocol

import hpack

_log: Final = logging.getLogger(__name__)

Headers = list[tuple[str, str]]

_PREFACE: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_DATA, _HEADERS, _PRIORITY, _RST_STREAM, _SETTINGS, _PUSH, _PING, _GOAWAY, _WINDOW_UPDATE, _CONTINUATION = range(10)
_END_STREAM, _ACK, _END_HEADERS, _PADDED, _WITH_PRIORITY = 0x1, 0x1, 0x4, 0x8, 0x20
_MAX_CONCURRENT_STREAMS, _INITIAL_WINDOW_SIZE, _MAX_FRAME_SIZE = 3, 4, 5
NO_ERROR, _PROTOCOL_ERROR, _FLOW_CONTROL_ERROR, _FRAME_SIZE_ERROR, _CANCEL = 0, 1, 3, 6, 8

_WINDOW_MAX: Final = (1 << 31) - 1
_WINDOW_START: Final = 65535
_WINDOW_RENEWED_BYTES: Final = 1 << 28
_OUR_MAX_FRAME: Final = 1 << 20
# What is no data must fit into the read buffer as a whole.
_MAX_CONTROL_FRAME: Final = 64 * 1024
_MAX_HEADER_BLOCK: Final = 64 * 1024
_READ_BUFFER_BYTES: Final = 512 * 1024
# A client queues the streams beyond this number on its own side.
_MAX_STREAMS: Final = 4096
_OUR_SETTINGS: Final = (
    (_MAX_CONCURRENT_STREAMS, _MAX_STREAMS),
    (_INITIAL_WINDOW_SIZE, _WINDOW_MAX),
    (_MAX_FRAME_SIZE, _OUR_MAX_FRAME),
)


class ProtocolError(Exception):
    """The peer broke the protocol; the connection ends with this code."""

    def __init__(self, code: int, message: str) -> None:
        super().__init__(message)
        self.code = code


class Receiver(Protocol):
    """What takes a stream's data, on the connection's thread. It must not block."""

    def on_data(self, data: memoryview) -> None:
        """The next bytes; valid during the call alone."""

    def on_end(self) -> None:
        """The peer has sent all."""

    def on_close(self) -> None:
        """The stream was reset, or the connection is gone. Nothing more comes or goes."""


class Stream:
    """One request and its answer. `send`, `flush` and `end` may be called from any thread."""

    __slots__ = ("_connection", "headers", "id", "pending", "receiver", "trailers", "unacknowledged", "window")

    def __init__(self, connection: Connection, stream_id: int, headers: Headers, window: int) -> None:
        self._connection = connection
        self.id = stream_id
        self.headers = headers
        self.window = window
        self.receiver: Receiver | None = None
        self.pending: deque[memoryview] = deque()
        self.trailers: bytes | None = None
        self.unacknowledged = 0

    def send_headers(self, block: bytes) -> None:
        """The head of the answer, as an encoded header block."""
        self._connection.write_headers(self, block)

    def send(self, data: bytes | memoryview, *, flush: bool = True) -> None:
        """Body of the answer, when the peer has room for it. Without `flush` it waits for a later call that flushes."""
        self._connection.write_data(self, data, flush)

    def flush(self) -> None:
        """Sends what is waiting."""
        self._connection.flush()

    def end(self, trailers: bytes) -> None:
        """Ends the answer, after the rest of its body, with an encoded header block."""
        self._connection.write_end(self, trailers)


class Connection:
    """Serves one connection until the peer goes, in the thread that calls `run`.

    `on_stream` is called with each new stream and returns who takes its data, None where it is answered already.
    """

    def __init__(self, peer: socket.socket, on_stream: Callable[[Stream], Receiver | None]) -> None:
        self._socket = peer
        self._on_stream = on_stream
        self._decoder = hpack.Decoder(_MAX_HEADER_BLOCK)
        self._streams: dict[int, Stream] = {}
        self._last_stream = 0
        self._block: tuple[int, int, bytearray] | None = None  # (stream, flags, header block) until it is complete
        self._data: tuple[int, int, int] = (0, 0, 0)  # (stream, flags, bytes to come) of a data frame
        self._unacknowledged = 0
        self._lock = threading.Lock()  # guards all below
        self._out: list[bytes | memoryview] = []
        self._window = _WINDOW_START
        self._stream_window = _WINDOW_START
        self._max_frame = 16384
        self._blocked: dict[int, Stream] = {}  # streams with data that the peer has no room for
        self._closed = False

    def run(self) -> None:
        """Returns when the connection has ended. Its streams are closed then."""
        try:
            self._greet()
            self._read()
        except ProtocolError as error:
            _log.warning("a client broke the protocol: %s", error)
            self._say_goodbye(error.code)
        except OSError as error:
            _log.debug("connection lost: %s", error)
        except Exception:
            _log.exception("a connection ends by an error of the server")
        finally:
            self.close()
            for stream in list(self._streams.values()):
                self._close_stream(stream)

    def close(self) -> None:
        """Ends the connection; `run` returns."""
        with self._lock:
            self._closed = True
        with contextlib.suppress(OSError):  # the peer was faster
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _greet(self) -> None:
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._write(_frame(_SETTINGS, 0, 0, b"".join(struct.pack(">HI", *setting) for setting in _OUR_SETTINGS)))
        self._write(_frame(_WINDOW_UPDATE, 0, 0, struct.pack(">I", _WINDOW_MAX - _WINDOW_START)))
        self.flush()
        received = b""
        while len(received) < len(_PREFACE):
            part = self._socket.recv(len(_PREFACE) - len(received))
            received += part
            if not part or not _PREFACE.startswith(received):
                raise ProtocolError(_PROTOCOL_ERROR, "not an HTTP/2 connection without TLS")

    def _read(self) -> None:
        buffer = memoryview(bytearray(_READ_BUFFER_BYTES))
        start = end = 0
        while count := self._socket.recv_into(buffer[end:]):
            end += count
            start = self._take(buffer, start, end)
            self._renew_window()
            if start == end:
                start = end = 0
            elif len(buffer) - start < _MAX_CONTROL_FRAME + 9:
                rest = bytes(buffer[start:end])
                buffer[: len(rest)] = rest
                start, end = 0, len(rest)

    def _take(self, buffer: memoryview, start: int, end: int) -> int:
        """Takes frames from `buffer[start:end]`: data as far as it has come, others when complete. Where it stopped."""
        while True:
            stream_id, flags, left = self._data
            if left:
                part = min(left, end - start)
                if not part:
                    return start
                self._data = (stream_id, flags, left - part)
                self._on_data(stream_id, buffer[start : start + part])
                start += part
                if part == left and flags & _END_STREAM:
                    self._on_end(stream_id)
                continue
            if end - start < 9:
                return start
            high, low, kind, flags, stream_id = _FRAME_HEADER.unpack_from(buffer, start)
            length = high << 8 | low
            stream_id &= _WINDOW_MAX
            if kind == _DATA and not flags & _PADDED and self._block is None:
                if length > _OUR_MAX_FRAME:
                    raise ProtocolError(_FRAME_SIZE_ERROR, f"a data frame of {length} bytes")
                start += 9
                self._data = (stream_id, flags, length)
                if not length and flags & _END_STREAM:
                    self._on_end(stream_id)
                continue
            if length > _MAX_CONTROL_FRAME:
                raise ProtocolError(_FRAME_SIZE_ERROR, f"a frame of type {kind} of {length} bytes")
            if end - start < 9 + length:
                return start
            self._on_frame(kind, flags, stream_id, buffer[start + 9 : start + 9 + length])
            start += 9 + length

    def _on_frame(self, kind: int, flags: int, stream_id: int, payload: memoryview) -> None:
        if self._block is not None and (kind != _CONTINUATION or stream_id != self._block[0]):
            raise ProtocolError(_PROTOCOL_ERROR, "a header block was interrupted")
        handler = _HANDLERS.get(kind)
        if handler is not None:
            handler(self, flags, stream_id, payload)

    def _on_data(self, stream_id: int, data: memoryview) -> None:
        self._unacknowledged += len(data)
        stream = self._streams.get(stream_id)
        if stream is None:
            if stream_id > self._last_stream or not stream_id & 1:
                raise ProtocolError(_PROTOCOL_ERROR, f"data for stream {stream_id}, which was never opened")
            return  # it has ended on our side
        stream.unacknowledged += len(data)
        if stream.receiver is not None:
            stream.receiver.on_data(data)
        if stream.unacknowledged > _WINDOW_RENEWED_BYTES:
            self._write(_frame(_WINDOW_UPDATE, 0, stream_id, struct.pack(">I", stream.unacknowledged)))
            stream.unacknowledged = 0
            self.flush()

    def _on_padded_data(self, flags: int, stream_id: int, payload: memoryview) -> None:
        self._unacknowledged += len(payload) - len(_without_padding(flags, payload))
        self._on_data(stream_id, _without_padding(flags, payload))
        if flags & _END_STREAM:
            self._on_end(stream_id)

    def _on_end(self, stream_id: int) -> None:
        stream = self._streams.get(stream_id)
        if stream is not None and stream.receiver is not None:
            stream.receiver.on_end()

    def _on_headers(self, flags: int, stream_id: int, payload: memoryview) -> None:
        block = _without_padding(flags, payload)
        if flags & _WITH_PRIORITY:
            block = block[5:]
        self._add_to_block(flags, stream_id, flags, bytearray(block))

    def _on_continuation(self, flags: int, stream_id: int, payload: memoryview) -> None:
        if self._block is None:
            raise ProtocolError(_PROTOCOL_ERROR, "a header block continues that never began")
        _, first_flags, block = self._block
        self._add_to_block(flags, stream_id, first_flags, block + payload)

    def _add_to_block(self, flags: int, stream_id: int, first_flags: int, block: bytearray) -> None:
        if len(block) > _MAX_HEADER_BLOCK:
            raise ProtocolError(_PROTOCOL_ERROR, f"headers of more than {_MAX_HEADER_BLOCK} bytes")
        if not flags & _END_HEADERS:
            self._block = (stream_id, first_flags, block)
            return
        self._block = None
        try:
            headers = [(str(name), str(value)) for name, value in self._decoder.decode(bytes(block))]
        except (hpack.HPACKError, UnicodeDecodeError) as error:
            raise ProtocolError(_PROTOCOL_ERROR, f"headers that cannot be read: {error}") from error
        if stream_id not in self._streams:
            self._open(stream_id, headers)
        if first_flags & _END_STREAM:
            self._on_end(stream_id)

    def _open(self, stream_id: int, headers: Headers) -> None:
        if stream_id <= self._last_stream:
            return  # trailers of a stream that has ended on our side
        if not stream_id & 1:
            raise ProtocolError(_PROTOCOL_ERROR, f"a client cannot open stream {stream_id}")
        self._last_stream = stream_id
        with self._lock:
            stream = Stream(self, stream_id, headers, self._stream_window)
        if len(self._streams) >= _MAX_STREAMS:
            self._write(_frame(_RST_STREAM, 0, stream_id, struct.pack(">I", _CANCEL)))
            self.flush()
            return
        self._streams[stream_id] = stream
        stream.receiver = self._on_stream(stream)

    def _on_reset(self, flags: int, stream_id: int, payload: memoryview) -> None:
        stream = self._streams.get(stream_id)
        if stream is not None:
            self._close_stream(stream)

    def _on_settings(self, flags: int, stream_id: int, payload: memoryview) -> None:
        if flags & _ACK:
            return
        if len(payload) % 6:
            raise ProtocolError(_FRAME_SIZE_ERROR, f"settings of {len(payload)} bytes")
        with self._lock:
            for name, value in struct.iter_unpack(">HI", payload):
                self._apply_setting(name, value)
            self._out.append(_frame(_SETTINGS, _ACK, 0, b""))
            self._send_blocked()
        self.flush()

    def _apply_setting(self, name: int, value: int) -> None:
        if name == _INITIAL_WINDOW_SIZE:
            if value > _WINDOW_MAX:
                raise ProtocolError(_FLOW_CONTROL_ERROR, f"an initial window of {value} bytes")
            for stream in list(self._streams.values()):
                stream.window += value - self._stream_window
            self._stream_window = value
        elif name == _MAX_FRAME_SIZE:
            if not 16384 <= value < 1 << 24:
                raise ProtocolError(_PROTOCOL_ERROR, f"a maximum frame size of {value} bytes")
            self._max_frame = value

    def _on_ping(self, flags: int, stream_id: int, payload: memoryview) -> None:
        if len(payload) != 8:
            raise ProtocolError(_FRAME_SIZE_ERROR, f"a ping of {len(payload)} bytes")
        if not flags & _ACK:
            self._write(_frame(_PING, _ACK, 0, bytes(payload)))
            self.flush()

    def _on_window_update(self, flags: int, stream_id: int, payload: memoryview) -> None:
        if len(payload) != 4:
            raise ProtocolError(_FRAME_SIZE_ERROR, f"a window update of {len(payload)} bytes")
        increment = int.from_bytes(payload, "big") & _WINDOW_MAX
        with self._lock:
            if stream_id == 0:
                self._window += increment
                if self._window > _WINDOW_MAX:
                    raise ProtocolError(_FLOW_CONTROL_ERROR, "the connection's window is too large")
            elif stream := self._streams.get(stream_id):
                stream.window += increment
            self._send_blocked()
        self.flush()

    def _renew_window(self) -> None:
        if self._unacknowledged > _WINDOW_RENEWED_BYTES:
            self._write(_frame(_WINDOW_UPDATE, 0, 0, struct.pack(">I", self._unacknowledged)))
            self._unacknowledged = 0
            self.flush()

    def _close_stream(self, stream: Stream) -> None:
        with self._lock:
            self._blocked.pop(stream.id, None)
            stream.pending.clear()
            stream.trailers = None
        if self._streams.pop(stream.id, None) is not None and stream.receiver is not None:
            stream.receiver.on_close()

    def _say_goodbye(self, code: int) -> None:
        self._write(_frame(_GOAWAY, 0, 0, struct.pack(">II", self._last_stream, code)))
        self.flush()

    def write_headers(self, stream: Stream, block: bytes) -> None:
        """See `Stream.send_headers`."""
        self._write(_frame(_HEADERS, _END_HEADERS, stream.id, block))

    def write_data(self, stream: Stream, data: bytes | memoryview, flush: bool) -> None:
        """See `Stream.send`."""
        size = len(data)
        with self._lock:
            if stream.id not in self._streams:
                return
            if not stream.pending and size <= self._max_frame and size <= self._window and size <= stream.window:
                self._window -= size
                stream.window -= size
                self._out.append(_frame_header(size, _DATA, 0, stream.id))
                self._out.append(data)
            else:
                stream.pending.append(memoryview(data))
                self._blocked[stream.id] = stream
                self._send_blocked()
        if flush:
            self.flush()

    def write_end(self, stream: Stream, trailers: bytes) -> None:
        """See `Stream.end`."""
        with self._lock:
            if stream.pending:
                stream.trailers = trailers
            else:
                self._end(stream, trailers)
        self.flush()

    def flush(self) -> None:
        """Sends what is waiting. A connection that is gone takes it silently: its reader tells."""
        with self._lock:
            out, self._out = self._out, []
            if not out or self._closed:
                return
            try:
                _send_all(self._socket, out)
            except OSError as error:
                _log.debug("connection lost: %s", error)
                self._closed = True

    def _write(self, frame: bytes) -> None:
        with self._lock:
            self._out.append(frame)

    def _end(self, stream: Stream, trailers: bytes) -> None:
        self._out.append(_frame(_HEADERS, _END_HEADERS | _END_STREAM, stream.id, trailers))
        self._streams.pop(stream.id, None)

    def _send_blocked(self) -> None:
        """Gives the peer as much as it has room for. The lock is held."""
        for stream in list(self._blocked.values()):
            while stream.pending and self._window > 0 and stream.window > 0:
                data = stream.pending[0]
                size = min(len(data), self._max_frame, self._window, stream.window)
                self._window -= size
                stream.window -= size
                self._out += (_frame_header(size, _DATA, 0, stream.id), data[:size])
                if size == len(data):
                    stream.pending.popleft()
                else:
                    stream.pending[0] = data[size:]
            if not stream.pending:
                del self._blocked[stream.id]
                if stream.trailers is not None:
                    self._end(stream, stream.trailers)


_HANDLERS: Final[dict[int, Callable[[Any, int, int, memoryview], None]]] = {
    _DATA: Connection._on_padded_data,
    _HEADERS: Connection._on_headers,
    _RST_STREAM: Connection._on_reset,
    _SETTINGS: Connection._on_settings,
    _PING: Connection._on_ping,
    _WINDOW_UPDATE: Connection._on_window_update,
    _CONTINUATION: Connection._on_continuation,
}
_FRAME_HEADER: Final = struct.Struct(">HBBBI")
_BUFFERS_PER_CALL: Final = 512  # the kernel takes 1024 at most


def _frame_header(length: int, kind: int, flags: int, stream_id: int) -> bytes:
    return _FRAME_HEADER.pack(length >> 8, length & 0xFF, kind, flags, stream_id)


def _frame(kind: int, flags: int, stream_id: int, payload: bytes) -> bytes:
    return _frame_header(len(payload), kind, flags, stream_id) + payload


def _without_padding(flags: int, payload: memoryview) -> memoryview:
    if not flags & _PADDED:
        return payload
    if not payload or payload[0] >= len(payload):
        raise ProtocolError(_PROTOCOL_ERROR, "more padding than frame")
    return payload[1 : len(payload) - payload[0]]


def _send_all(peer: socket.socket, buffers: Sequence[bytes | memoryview]) -> None:
    if sum(len(buffer) for buffer in buffers) <= _JOINED_BYTES:
        peer.sendall(b"".join(buffers))
        return
    for first in range(0, len(buffers), _BUFFERS_PER_CALL):
        part = list(buffers[first : first + _BUFFERS_PER_CALL])
        sent = peer.sendmsg(part)
        for buffer in part:
            if sent >= len(buffer):
                sent -= len(buffer)
            else:
                peer.sendall(memoryview(buffer)[sent:])
                sent = 0


_JOINED_BYTES: Final = 64 * 1024
