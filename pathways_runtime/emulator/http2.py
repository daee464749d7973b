"""HTTP/2 as a gRPC client speaks it (RFC 9113), for many small messages and for large ones.

grpcio's server wakes two threads for each message and each answer, 120 us that a small program's execution does not
have, and copies large messages several times. Here a connection's thread takes whatever has arrived in one read, and
answers leave together. Header compression is the `hpack` library's. No server push, no priorities, no TLS.

What a peer can make us keep is bounded: by `_MAX_STREAMS`, by the size of a header block, by the room that a stream
gets back only as its data are used (`Stream.give_room`), and by the socket, for which answers to settings wait.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import struct
import time
from collections.abc import Callable
from typing import Any, Final

import hpack

from pathways_runtime.emulator import http2_output as frames
from pathways_runtime.emulator.http2_output import Headers, Output, ProtocolError, Receiver, Stream

_log: Final = logging.getLogger(__name__)

_PREFACE: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_ENABLE_PUSH, _MAX_CONCURRENT_STREAMS, _INITIAL_WINDOW_SIZE, _MAX_FRAME_SIZE, _MAX_HEADER_LIST_SIZE = 2, 3, 4, 5, 6
# gRPC's own setting: metadata named `-bin` may come as it is, behind a zero byte, without base64.
_TRUE_BINARY: Final = 0xFE03
_OUR_MAX_FRAME: Final = 1 << 20
# What is no data must fit into the read buffer as a whole.
_MAX_CONTROL_FRAME: Final = 64 * 1024
_MAX_HEADER_BYTES: Final = 64 * 1024  # as they come, and decoded as RFC 7541 counts them
_MAX_CONTINUATIONS: Final = 64
_READ_BUFFER_BYTES: Final = 512 * 1024
# A client queues the streams beyond this number on its own side.
_MAX_STREAMS: Final = 4096
_OUR_SETTINGS: Final = (
    (_MAX_CONCURRENT_STREAMS, _MAX_STREAMS),
    (_INITIAL_WINDOW_SIZE, frames.RECEIVE_WINDOW),
    (_MAX_FRAME_SIZE, _OUR_MAX_FRAME),
    (_MAX_HEADER_LIST_SIZE, _MAX_HEADER_BYTES),
    (_TRUE_BINARY, 1),
)
_SIZES: Final = {frames.PRIORITY: 5, frames.RST_STREAM: 4, frames.PING: 8, frames.WINDOW_UPDATE: 4}
_OF_THE_CONNECTION: Final = frozenset({frames.SETTINGS, frames.PING, frames.GOAWAY})
# A time-out of 0 would mean: do not wait.
_LEAST_PATIENCE_S: Final = 0.001
_LINGER_S: Final = 1.0


class Connection:
    """Serves one connection until the peer goes, in the thread that calls `run`.

    `on_stream` is called with this connection and each new stream, and returns who takes the stream's data, None where
    it is answered already. Until `trust` is called, a peer that keeps us waiting for `patience_s` in all is let go.
    """

    def __init__(
        self, peer: socket.socket, on_stream: Callable[[Connection, Stream], Receiver | None], patience_s: float
    ) -> None:
        self.is_trusted = False
        self._socket = peer
        self._on_stream = on_stream
        self._patience_s = patience_s
        self._decoder = hpack.Decoder(_MAX_HEADER_BYTES)
        self._streams: dict[int, Stream] = {}
        self._output = Output(peer, self._streams)
        self._has_settings = False
        self._last_stream = 0
        self._block: _Block | None = None  # a header block until it is complete
        self._data: tuple[Stream | None, int, int] = (None, 0, 0)  # (stream, flags, bytes to come) of a data frame
        self._padding = 0  # bytes to come that mean nothing
        self._unacknowledged = 0

    def run(self) -> None:
        """Returns when the connection has ended. Its streams are closed then."""
        try:
            self._greet()
            self._read()
        except ProtocolError as error:
            _log.warning("a client broke the protocol: %s", error)
            self._say_goodbye(error.code)
        except TimeoutError:
            _log.info("a client that opened no session is let go")
            self._say_goodbye(frames.NO_ERROR)
        except OSError as error:
            _log.debug("connection lost: %s", error)
        except Exception:
            _log.exception("a connection ends by an error of the server")
        finally:
            self.close()
            for stream in list(self._streams.values()):
                self._close_stream(stream)

    def trust(self) -> None:
        """Lets the peer take its time from now on. For the thread that calls `on_stream`."""
        self.is_trusted = True
        self._socket.settimeout(None)

    def close(self) -> None:
        """Ends the connection; `run` returns."""
        # The socket first: a sender may hold the output's lock until the socket lets it go.
        with contextlib.suppress(OSError):  # the peer was faster
            self._socket.shutdown(socket.SHUT_RDWR)
        self._output.close()
        self._socket.close()

    def _send(self, kind: int, flags: int, stream_id: int, payload: bytes) -> None:
        self._output.add(kind, flags, stream_id, payload)
        self._output.flush()

    def _say_goodbye(self, code: int) -> None:
        self._output.release()
        self._send(frames.GOAWAY, 0, 0, struct.pack(">II", self._last_stream, code))
        # A socket that is closed with bytes unread resets the connection, and the peer would not hear why.
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_WR)
            deadline = time.monotonic() + _LINGER_S
            while (left := deadline - time.monotonic()) > 0:
                self._socket.settimeout(left)
                if not self._socket.recv(_MAX_CONTROL_FRAME):
                    return

    def _greet(self) -> None:
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)  # the peer's machine may vanish
        settings = b"".join(struct.pack(">HI", *setting) for setting in _OUR_SETTINGS)
        self._output.add(frames.SETTINGS, 0, 0, settings)
        self._send(frames.WINDOW_UPDATE, 0, 0, struct.pack(">I", frames.WINDOW_MAX - frames.WINDOW_START))
        preface = memoryview(bytearray(len(_PREFACE)))
        end = 0
        while end < len(_PREFACE):
            count = self._receive(preface[end:])
            end += count
            if not count or preface[:end] != _PREFACE[:end]:
                raise ProtocolError(frames.PROTOCOL_ERROR, "not an HTTP/2 connection without TLS")

    def _receive(self, room: memoryview) -> int:
        """Waits for bytes, puts them there, and returns how many; 0 at the end. TimeoutError when patience is over."""
        if self.is_trusted:
            return self._socket.recv_into(room)
        self._socket.settimeout(max(self._patience_s, _LEAST_PATIENCE_S))
        began = time.monotonic()
        count = self._socket.recv_into(room)
        self._patience_s -= time.monotonic() - began
        return count

    def _read(self) -> None:
        buffer = memoryview(bytearray(_READ_BUFFER_BYTES))
        start = end = 0
        while count := self._receive(buffer[end:]):
            end += count
            self._output.hold()
            start = self._take(buffer, start, end)
            self._output.release()
            if self._unacknowledged > frames.RENEWED_BYTES:
                self._send(frames.WINDOW_UPDATE, 0, 0, struct.pack(">I", self._unacknowledged))
                self._unacknowledged = 0
            if start == end:
                start = end = 0
            elif len(buffer) - start < _MAX_CONTROL_FRAME + frames.FRAME_HEADER.size:
                rest = bytes(buffer[start:end])
                buffer[: len(rest)] = rest
                start, end = 0, len(rest)

    def _take(self, buffer: memoryview, start: int, end: int) -> int:
        """Takes frames from `buffer[start:end]`: data as far as it has come, others when complete. Where it stopped."""
        while True:
            stream, flags, left = self._data
            if left:
                part = min(left, end - start)
                if not part:
                    return start
                self._data = (stream, flags, left - part)
                self._on_data(stream, buffer[start : start + part])
                start += part
                if part == left and flags & frames.END_STREAM:
                    self._on_end(stream)
                continue
            if self._padding:
                part = min(self._padding, end - start)
                if not part:
                    return start
                self._padding -= part
                start += part
                continue
            if end - start < _HEADER_BYTES:
                return start
            high, low, kind, flags, stream_id = frames.FRAME_HEADER.unpack_from(buffer, start)
            length = high << 8 | low
            stream_id &= frames.WINDOW_MAX
            self._check_order(kind, stream_id)
            if kind == frames.DATA:
                is_padded = bool(flags & frames.PADDED and length)
                if end - start < _HEADER_BYTES + is_padded:
                    return start
                self._begin_data(stream_id, flags, length, buffer[start + _HEADER_BYTES] if is_padded else None)
                start += _HEADER_BYTES + is_padded
                continue
            if length > _MAX_CONTROL_FRAME:
                raise ProtocolError(frames.FRAME_SIZE_ERROR, f"a frame of type {kind} of {length} bytes")
            if end - start < _HEADER_BYTES + length:
                return start
            self._on_frame(kind, flags, stream_id, buffer[start + _HEADER_BYTES : start + _HEADER_BYTES + length])
            start += _HEADER_BYTES + length

    def _check_order(self, kind: int, stream_id: int) -> None:
        if self._block is not None:
            if kind != frames.CONTINUATION or stream_id != self._block.stream_id:
                raise ProtocolError(frames.PROTOCOL_ERROR, "a header block was interrupted")
        elif not self._has_settings and kind != frames.SETTINGS:
            raise ProtocolError(frames.PROTOCOL_ERROR, f"a frame of type {kind} before the settings")

    def _known(self, stream_id: int) -> Stream | None:
        """None for a stream that has ended. ProtocolError for one that never was."""
        stream = self._streams.get(stream_id)
        if stream is None and (stream_id > self._last_stream or not stream_id & 1):
            raise ProtocolError(frames.PROTOCOL_ERROR, f"a frame for stream {stream_id}, which was never opened")
        return stream

    def _begin_data(self, stream_id: int, flags: int, length: int, padding: int | None) -> None:
        if length > _OUR_MAX_FRAME:
            raise ProtocolError(frames.FRAME_SIZE_ERROR, f"a data frame of {length} bytes")
        stream = self._known(stream_id)
        if stream is not None:
            if stream.has_ended:
                raise ProtocolError(frames.STREAM_CLOSED, f"data behind the end of stream {stream_id}")
            stream.received_bytes += length
            if stream.received_bytes > stream.granted_bytes:
                raise ProtocolError(frames.FLOW_CONTROL_ERROR, f"more data than stream {stream_id} has room for")
        self._unacknowledged += length
        size = length
        if flags & frames.PADDED:
            if padding is None or padding >= length:
                raise ProtocolError(frames.PROTOCOL_ERROR, "more padding than frame")
            size, self._padding = length - 1 - padding, padding
            if stream is not None:
                stream.give_room(1 + padding)
        self._data = (stream, flags, size)
        if not size and flags & frames.END_STREAM:
            self._on_end(stream)

    def _on_data(self, stream: Stream | None, data: memoryview) -> None:
        if stream is None or stream.receiver is None or stream.is_answered:
            return  # it has ended on our side
        stream.receiver.on_data(data)
        if not stream.receiver.keeps_data:
            stream.give_room(len(data))

    def _on_end(self, stream: Stream | None) -> None:
        if stream is not None:
            stream.has_ended = True
            if stream.receiver is not None and not stream.is_answered:
                stream.receiver.on_end()

    def _on_frame(self, kind: int, flags: int, stream_id: int, payload: memoryview) -> None:
        if len(payload) != _SIZES.get(kind, len(payload)):
            raise ProtocolError(frames.FRAME_SIZE_ERROR, f"a frame of type {kind} of {len(payload)} bytes")
        if kind in _OF_THE_CONNECTION and stream_id:
            raise ProtocolError(frames.PROTOCOL_ERROR, f"a frame of type {kind} for stream {stream_id}")
        handler = _HANDLERS.get(kind)
        if handler is not None:
            handler(self, flags, stream_id, payload)

    def _on_headers(self, flags: int, stream_id: int, payload: memoryview) -> None:
        if not stream_id & 1:
            raise ProtocolError(frames.PROTOCOL_ERROR, f"a client cannot open stream {stream_id}")
        fragment = _without_padding(flags, payload)
        if flags & frames.WITH_PRIORITY:
            if len(fragment) < _SIZES[frames.PRIORITY]:
                raise ProtocolError(frames.FRAME_SIZE_ERROR, f"headers of {len(fragment)} bytes with a priority")
            fragment = fragment[_SIZES[frames.PRIORITY] :]
        self._block = _Block(stream_id, flags)
        self._add_to_block(flags, fragment)

    def _on_continuation(self, flags: int, stream_id: int, payload: memoryview) -> None:
        self._add_to_block(flags, payload)

    def _add_to_block(self, flags: int, fragment: memoryview) -> None:
        block = self._block
        if block is None:
            raise ProtocolError(frames.PROTOCOL_ERROR, "a header block continues that never began")
        block.fragments.append(bytes(fragment))
        if len(block.fragments) > _MAX_CONTINUATIONS or sum(map(len, block.fragments)) > _MAX_HEADER_BYTES:
            raise ProtocolError(frames.ENHANCE_YOUR_CALM, "headers of too many bytes or frames")
        if flags & frames.END_HEADERS:
            self._block = None
            self._on_block(block)

    def _on_block(self, block: _Block) -> None:
        try:
            headers = [(name, value) for name, value in self._decoder.decode(b"".join(block.fragments), raw=True)]
        except hpack.HPACKError as error:
            raise ProtocolError(frames.COMPRESSION_ERROR, f"headers that cannot be read: {error}") from error
        if block.stream_id > self._last_stream:
            stream = self._open(block.stream_id, headers)
        else:
            # The trailers of a request, in which gRPC clients say nothing; also of one that has ended on our side.
            stream = self._streams.get(block.stream_id)
            if stream is not None and (stream.has_ended or not block.flags & frames.END_STREAM):
                raise ProtocolError(frames.STREAM_CLOSED, f"more than one request in stream {stream.id}")
        if block.flags & frames.END_STREAM:
            self._on_end(stream)

    def _open(self, stream_id: int, headers: Headers) -> Stream | None:
        self._last_stream = stream_id
        if len(self._streams) >= _MAX_STREAMS:
            self._send(frames.RST_STREAM, 0, stream_id, struct.pack(">I", frames.REFUSED_STREAM))
            return None
        stream = Stream(self._output, stream_id, headers)
        self._output.open(stream)
        stream.receiver = self._on_stream(self, stream)
        return stream

    def _on_reset(self, flags: int, stream_id: int, payload: memoryview) -> None:
        stream = self._known(stream_id)
        if stream is not None:
            self._close_stream(stream)

    def _on_settings(self, flags: int, stream_id: int, payload: memoryview) -> None:
        is_acknowledgement = flags & frames.ACK
        if payload if is_acknowledgement else len(payload) % 6:
            raise ProtocolError(frames.FRAME_SIZE_ERROR, f"settings of {len(payload)} bytes")
        if is_acknowledgement:
            return
        self._has_settings = True
        settings = dict(struct.iter_unpack(">HI", payload))
        if settings.get(_ENABLE_PUSH, 0) > 1:
            raise ProtocolError(frames.PROTOCOL_ERROR, f"a push setting of {settings[_ENABLE_PUSH]}")
        self._output.apply_settings(settings.get(_INITIAL_WINDOW_SIZE), settings.get(_MAX_FRAME_SIZE))

    def _on_ping(self, flags: int, stream_id: int, payload: memoryview) -> None:
        if not flags & frames.ACK:
            self._send(frames.PING, frames.ACK, 0, bytes(payload))

    def _on_window_update(self, flags: int, stream_id: int, payload: memoryview) -> None:
        increment = int.from_bytes(payload, "big") & frames.WINDOW_MAX
        if not increment:
            raise ProtocolError(frames.PROTOCOL_ERROR, "a window update of nothing")
        if stream_id:
            self._known(stream_id)
        self._output.widen(stream_id, increment)

    def _on_push(self, flags: int, stream_id: int, payload: memoryview) -> None:
        raise ProtocolError(frames.PROTOCOL_ERROR, "a client cannot push")

    def _close_stream(self, stream: Stream) -> None:
        if self._output.drop(stream):
            stream.close()


class _Block:
    """A header block that comes in pieces."""

    def __init__(self, stream_id: int, flags: int) -> None:
        self.stream_id = stream_id
        self.flags = flags  # of its first frame
        self.fragments: list[bytes] = []


_HEADER_BYTES: Final = frames.FRAME_HEADER.size
_HANDLERS: Final[dict[int, Callable[[Any, int, int, memoryview], None]]] = {
    frames.HEADERS: Connection._on_headers,
    frames.RST_STREAM: Connection._on_reset,
    frames.SETTINGS: Connection._on_settings,
    frames.PUSH_PROMISE: Connection._on_push,
    frames.PING: Connection._on_ping,
    frames.WINDOW_UPDATE: Connection._on_window_update,
    frames.CONTINUATION: Connection._on_continuation,
}


def _without_padding(flags: int, payload: memoryview) -> memoryview:
    if not flags & frames.PADDED:
        return payload
    if not payload or payload[0] >= len(payload):
        raise ProtocolError(frames.PROTOCOL_ERROR, "more padding than frame")
    return payload[1 : len(payload) - payload[0]]
