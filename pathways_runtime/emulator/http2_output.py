"""What an HTTP/2 connection sends: frames, as far as the peer has room for them."""

from __future__ import annotations

import contextlib
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
NO_ERROR, PROTOCOL_ERROR, FLOW_CONTROL_ERROR, STREAM_CLOSED, FRAME_SIZE_ERROR, REFUSED_STREAM = 0, 1, 3, 5, 6, 7
COMPRESSION_ERROR, ENHANCE_YOUR_CALM = 9, 11

WINDOW_MAX: Final = (1 << 31) - 1
WINDOW_START: Final = 65535
# How much we take of a stream before it is used (`Stream.give_room`), and after how much the peer is told of more room.
RECEIVE_WINDOW: Final = WINDOW_MAX
RENEWED_BYTES: Final = 1 << 28
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
    """What takes a stream's data, on the connection's thread. It must not block.

    One that keeps its data says so: it calls `Stream.give_room` once they are used, and until then the peer has as
    much less to send. After the stream's own `end` it is not called again.
    """

    keeps_data: bool

    def on_data(self, data: memoryview) -> None:
        """The next bytes; valid during the call alone."""

    def on_end(self) -> None:
        """The peer has sent all."""

    def on_close(self) -> None:
        """The stream was reset, or the connection is gone. Nothing more comes or goes."""


class Stream:
    """One request and its answer. Its methods may be called from any thread; what it has received is the reader's."""

    __slots__ = (
        "_output",
        "granted_bytes",
        "has_ended",
        "headers",
        "id",
        "is_answered",
        "pending",
        "received_bytes",
        "receiver",
        "trailers",
        "unsent_bytes",
        "used_bytes",
        "window",
    )

    def __init__(self, output: Output, stream_id: int, headers: Headers) -> None:
        self._output = output
        self.id = stream_id
        self.headers = headers
        self.receiver: Receiver | None = None
        self.has_ended = False  # the peer has sent all
        self.is_answered = False  # `end` was called
        self.received_bytes = 0
        self.granted_bytes = RECEIVE_WINDOW
        self.used_bytes = 0  # of those received; not yet told to the peer
        self.window = 0
        self.pending: deque[memoryview] = deque()
        self.unsent_bytes = 0  # in `pending`
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
        """Ends the answer, after the rest of its body, with an encoded header block. A second call does nothing."""
        self._output.end(self, trailers)

    def reset(self, code: int) -> None:
        """Ends the stream at once, with an error code of HTTP/2."""
        if self._output.drop(self):
            self._output.add(RST_STREAM, 0, self.id, code.to_bytes(4, "big"))
            self._output.flush()
            self.close()

    def close(self) -> None:
        """Tells the receiver that the stream is gone."""
        if self.receiver is not None and not self.is_answered:
            self.receiver.on_close()

    def give_room(self, size: int) -> None:
        """So many bytes of those received are used: the peer may send as many more."""
        self._output.give_room(self, size)


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
            stream.unsent_bytes = 0
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
            if stream.is_answered or stream.id not in self._streams:
                return
            if not stream.pending and size <= self._max_frame and size <= self._window and size <= stream.window:
                self._add_frame(stream, data)
            else:
                stream.pending.append(memoryview(data))
                stream.unsent_bytes += size
                self._blocked[stream.id] = stream
                self._send_pending(stream)

    def end(self, stream: Stream, trailers: bytes) -> None:
        """Ends a stream once its data has left."""
        with self._lock:
            if stream.is_answered:
                return
            stream.is_answered = True
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
                with contextlib.suppress(OSError):  # the peer was faster
                    self._socket.shutdown(socket.SHUT_RDWR)

    def give_room(self, stream: Stream, size: int) -> None:
        """See `Stream.give_room`."""
        with self._lock:
            stream.used_bytes += size
            if stream.used_bytes < RENEWED_BYTES:
                return
            used, stream.used_bytes = stream.used_bytes, 0
            stream.granted_bytes += used
            self._add(_header(4, WINDOW_UPDATE, 0, stream.id) + used.to_bytes(4, "big"))
        self.flush()

    def widen(self, stream_id: int, increment: int) -> None:
        """The peer has room for so many bytes more: of a stream, or of the connection (0)."""
        with self._lock:
            if stream_id == 0:
                self._window = _checked_window(self._window + increment)
                self._send_blocked()
            elif stream := self._streams.get(stream_id):
                stream.window = _checked_window(stream.window + increment)
                self._send_pending(stream)
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
                change = _checked_window(stream_window) - self._stream_window
                self._stream_window = stream_window
                for stream in self._streams.values():
                    stream.window = _checked_window(stream.window + change)
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
            if self._window <= 0:
                return
            self._send_pending(stream)

    def _send_pending(self, stream: Stream) -> None:
        while stream.pending and self._window > 0 and stream.window > 0:
            data = stream.pending.popleft()
            size = min(len(data), self._max_frame, self._window, stream.window)
            self._add_frame(stream, data[:size])
            stream.unsent_bytes -= size
            if size < len(data):
                stream.pending.appendleft(data[size:])
        if not stream.pending:
            self._blocked.pop(stream.id, None)
            if stream.trailers is not None:
                self._end(stream, stream.trailers)

    def _end(self, stream: Stream, trailers: bytes) -> None:
        if self._streams.pop(stream.id, None) is None:
            return
        self._add(_header(len(trailers), HEADERS, END_HEADERS | END_STREAM, stream.id) + trailers)
        if not stream.has_ended:  # the peer need not send the rest
            self._add(_header(4, RST_STREAM, 0, stream.id) + NO_ERROR.to_bytes(4, "big"))


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
