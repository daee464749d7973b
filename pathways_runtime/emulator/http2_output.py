"""What an HTTP/2 connection sends: frames, as far as the peer has room for them."""

from __future__ import annotations

import logging
import socket
import struct
import threading
from collections import deque
from collections.abc import Sequence
from typing import Final, Protocol

_log: Final = logging.getLogger(__name__)

Headers = list[tuple[bytes, bytes]]

DATA, HEADERS, PRIORITY, RST_STREAM, SETTINGS, PUSH_PROMISE, PING, GOAWAY, WINDOW_UPDATE, CONTINUATION = range(10)
END_STREAM, ACK, END_HEADERS, PADDED, WITH_PRIORITY = 0x1, 0x1, 0x4, 0x8, 0x20
PROTOCOL_ERROR, FLOW_CONTROL_ERROR, FRAME_SIZE_ERROR, CANCEL = 1, 3, 6, 8

WINDOW_MAX: Final = (1 << 31) - 1
WINDOW_START: Final = 65535
FRAME_HEADER: Final = struct.Struct(">HBBBI")  # length (24 bits), type, flags, stream
_FRAME_MIN: Final = 16384
_FRAME_MAX: Final = (1 << 24) - 1
_BUFFERS_PER_CALL: Final = 512  # the kernel takes 1024 at most
_JOINED_BYTES: Final = 64 * 1024
_HELD_BYTES: Final = 256 * 1024


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
    """One request and its answer. `send_headers`, `send`, `flush` and `end` may be called from any thread."""

    __slots__ = ("_output", "headers", "id", "pending", "receiver", "trailers", "unacknowledged", "window")

    def __init__(self, output: Output, stream_id: int, headers: Headers) -> None:
        self._output = output
        self.id = stream_id
        self.headers = headers
        self.receiver: Receiver | None = None
        self.unacknowledged = 0
        self.window = 0
        self.pending: deque[memoryview] = deque()
        self.trailers: bytes | None = None

    def send_headers(self, block: bytes) -> None:
        """The head of the answer, as an encoded header block. Leaves with what is flushed next."""
        self._output.add(HEADERS, END_HEADERS, self.id, block)

    def send(self, data: bytes | memoryview, *, flush: bool = True) -> None:
        """Body of the answer, when the peer has room for it. Without `flush` it waits for a later call that flushes."""
        self._output.add_data(self, data)
        if flush:
            self._output.flush()

    def flush(self) -> None:
        """Sends what is waiting."""
        self._output.flush()

    def end(self, trailers: bytes) -> None:
        """Ends the answer, after the rest of its body, with an encoded header block."""
        self._output.end(self, trailers)


class Output:
    """The sending half of a connection, for any thread. Streams whose answer has ended leave `streams`."""

    def __init__(self, peer: socket.socket, streams: dict[int, Stream]) -> None:
        self._socket = peer
        self._streams = streams
        self._lock = threading.Lock()
        self._waiting: list[bytes | memoryview] = []
        self._waiting_bytes = 0
        self._holder: int | None = None
        self._window = WINDOW_START
        self._stream_window = WINDOW_START
        self._max_frame = _FRAME_MIN
        self._blocked: dict[int, Stream] = {}  # those with data that the peer has no room for
        self._is_closed = False

    def open(self, stream: Stream) -> None:
        """From now on the stream may send."""
        with self._lock:
            stream.window = self._stream_window
            self._streams[stream.id] = stream

    def drop(self, stream: Stream) -> bool:
        """Forgets a stream and what it still had to send. False where it had ended already."""
        with self._lock:
            self._blocked.pop(stream.id, None)
            stream.pending.clear()
            return self._streams.pop(stream.id, None) is not None

    def close(self) -> None:
        """Sends nothing more."""
        with self._lock:
            self._is_closed = True

    def hold(self) -> None:
        """Until `release`, what this thread flushes waits, unless it is much. One thread at a time may hold."""
        self._holder = threading.get_ident()

    def release(self) -> None:
        """Flushes what waited."""
        self._holder = None
        self.flush()

    def add(self, kind: int, flags: int, stream_id: int, payload: bytes) -> None:
        """A frame other than data, which leaves with what is flushed next."""
        with self._lock:
            self._add(_header(len(payload), kind, flags, stream_id) + payload)

    def add_data(self, stream: Stream, data: bytes | memoryview) -> None:
        """Data, which leaves with what is flushed next, or when the peer has room. After the end it is dropped."""
        size = len(data)
        with self._lock:
            if stream.id not in self._streams:
                return
            if not stream.pending and size <= self._max_frame and size <= self._window and size <= stream.window:
                self._add_frame(stream, data)
            else:
                stream.pending.append(memoryview(data))
                self._blocked[stream.id] = stream
                self._send_blocked()

    def end(self, stream: Stream, trailers: bytes) -> None:
        """Ends a stream once its data has left."""
        with self._lock:
            if stream.pending:
                stream.trailers = trailers
            else:
                self._end(stream, trailers)
        self.flush()

    def flush(self) -> None:
        """Sends what is waiting. A connection that is gone takes it silently: its reader tells."""
        if self._holder == threading.get_ident() and self._waiting_bytes < _HELD_BYTES:
            return
        with self._lock:
            waiting, self._waiting, self._waiting_bytes = self._waiting, [], 0
            if not waiting or self._is_closed:
                return
            try:
                _send_all(self._socket, waiting)
            except OSError as error:
                _log.debug("connection lost: %s", error)
                self._is_closed = True

    def widen(self, stream_id: int, increment: int) -> None:
        """The peer has room for so many bytes more: of a stream, or of the connection (0)."""
        with self._lock:
            if stream_id == 0:
                self._window = _checked_window(self._window + increment)
            elif stream := self._streams.get(stream_id):
                stream.window = _checked_window(stream.window + increment)
            self._send_blocked()
        self.flush()

    def apply_settings(self, stream_window: int | None, max_frame: int | None) -> None:
        """The peer's settings: the room that each stream begins with, and its largest frame; None where it is silent.

        They hold from the acknowledgement on, so nothing that needs them may leave before it.
        """
        with self._lock:
            self._add(_header(0, SETTINGS, ACK, 0))
            if max_frame is not None:
                self._max_frame = _checked_max_frame(max_frame)
            if stream_window is not None:
                for stream in list(self._streams.values()):
                    stream.window += _checked_window(stream_window) - self._stream_window
                self._stream_window = _checked_window(stream_window)
                self._send_blocked()
        self.flush()

    def _add(self, data: bytes | memoryview) -> None:
        self._waiting.append(data)
        self._waiting_bytes += len(data)

    def _add_frame(self, stream: Stream, data: bytes | memoryview) -> None:
        size = len(data)
        self._window -= size
        stream.window -= size
        self._add(_header(size, DATA, 0, stream.id))
        self._add(data)

    def _send_blocked(self) -> None:
        for stream in list(self._blocked.values()):
            while stream.pending and self._window > 0 and stream.window > 0:
                data = stream.pending.popleft()
                size = min(len(data), self._max_frame, self._window, stream.window)
                self._add_frame(stream, data[:size])
                if size < len(data):
                    stream.pending.appendleft(data[size:])
            if not stream.pending:
                del self._blocked[stream.id]
                if stream.trailers is not None:
                    self._end(stream, stream.trailers)

    def _end(self, stream: Stream, trailers: bytes) -> None:
        if self._streams.pop(stream.id, None) is not None:
            self._add(_header(len(trailers), HEADERS, END_HEADERS | END_STREAM, stream.id) + trailers)


def _header(length: int, kind: int, flags: int, stream_id: int) -> bytes:
    return FRAME_HEADER.pack(length >> 8, length & 0xFF, kind, flags, stream_id)


def _checked_window(size: int) -> int:
    if size > WINDOW_MAX:
        raise ProtocolError(FLOW_CONTROL_ERROR, f"a window of {size} bytes")
    return size


def _checked_max_frame(size: int) -> int:
    if not _FRAME_MIN <= size <= _FRAME_MAX:
        raise ProtocolError(PROTOCOL_ERROR, f"a maximum frame size of {size} bytes")
    return size


def _send_all(peer: socket.socket, buffers: Sequence[bytes | memoryview]) -> None:
    if sum(len(buffer) for buffer in buffers) <= _JOINED_BYTES:
        peer.sendall(b"".join(buffers))
        return
    for first in range(0, len(buffers), _BUFFERS_PER_CALL):
        part = buffers[first : first + _BUFFERS_PER_CALL]
        sent = peer.sendmsg(part)
        for buffer in part:
            if sent < len(buffer):
                peer.sendall(memoryview(buffer)[sent:])
            sent = max(sent - len(buffer), 0)
