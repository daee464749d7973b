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
from collections.abc import Callable
from typing import Any, Final

import hpack

from pathways_runtime.emulator import http2_output as frames
from pathways_runtime.emulator.http2_output import Headers, Output, ProtocolError, Receiver, Stream

_log: Final = logging.getLogger(__name__)

_PREFACE: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_MAX_CONCURRENT_STREAMS, _INITIAL_WINDOW_SIZE, _MAX_FRAME_SIZE = 3, 4, 5
# gRPC's own setting: metadata named `-bin` may come as it is, behind a zero byte, without base64.
_TRUE_BINARY: Final = 0xFE03
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
    (_INITIAL_WINDOW_SIZE, frames.WINDOW_MAX),
    (_MAX_FRAME_SIZE, _OUR_MAX_FRAME),
    (_TRUE_BINARY, 1),
)


class Connection:
    """Serves one connection until the peer goes, in the thread that calls `run`.

    `on_stream` is called with each new stream and returns who takes its data, None where it is answered already.
    """

    def __init__(self, peer: socket.socket, on_stream: Callable[[Stream], Receiver | None]) -> None:
        self._socket = peer
        self._on_stream = on_stream
        self._decoder = hpack.Decoder(_MAX_HEADER_BLOCK)
        self._streams: dict[int, Stream] = {}
        self._output = Output(peer, self._streams)
        self._last_stream = 0
        self._block: tuple[int, int, bytearray] | None = None  # (stream, flags, header block) until it is complete
        self._data: tuple[int, int, int] = (0, 0, 0)  # (stream, flags, bytes to come) of a data frame
        self._unacknowledged = 0

    def run(self) -> None:
        """Returns when the connection has ended. Its streams are closed then."""
        try:
            self._greet()
            self._read()
        except ProtocolError as error:
            _log.warning("a client broke the protocol: %s", error)
            self._send(frames.GOAWAY, 0, 0, struct.pack(">II", self._last_stream, error.code))
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
        # The socket first: a sender may hold the output's lock until the socket lets it go.
        with contextlib.suppress(OSError):  # the peer was faster
            self._socket.shutdown(socket.SHUT_RDWR)
        self._output.close()
        self._socket.close()

    def _send(self, kind: int, flags: int, stream_id: int, payload: bytes) -> None:
        self._output.add(kind, flags, stream_id, payload)
        self._output.flush()

    def _greet(self) -> None:
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        settings = b"".join(struct.pack(">HI", *setting) for setting in _OUR_SETTINGS)
        self._output.add(frames.SETTINGS, 0, 0, settings)
        self._send(frames.WINDOW_UPDATE, 0, 0, struct.pack(">I", frames.WINDOW_MAX - frames.WINDOW_START))
        received = b""
        while len(received) < len(_PREFACE):
            part = self._socket.recv(len(_PREFACE) - len(received))
            received += part
            if not part or not _PREFACE.startswith(received):
                raise ProtocolError(frames.PROTOCOL_ERROR, "not an HTTP/2 connection without TLS")

    def _read(self) -> None:
        buffer = memoryview(bytearray(_READ_BUFFER_BYTES))
        start = end = 0
        while count := self._socket.recv_into(buffer[end:]):
            end += count
            self._output.hold()
            start = self._take(buffer, start, end)
            self._output.release()
            if self._unacknowledged > _WINDOW_RENEWED_BYTES:
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
            stream_id, flags, left = self._data
            if left:
                part = min(left, end - start)
                if not part:
                    return start
                self._data = (stream_id, flags, left - part)
                self._on_data(stream_id, buffer[start : start + part])
                start += part
                if part == left and flags & frames.END_STREAM:
                    self._on_end(stream_id)
                continue
            if end - start < 9:
                return start
            high, low, kind, flags, stream_id = frames.FRAME_HEADER.unpack_from(buffer, start)
            length = high << 8 | low
            stream_id &= frames.WINDOW_MAX
            if kind == frames.DATA and not flags & frames.PADDED and self._block is None:
                self._begin_data(stream_id, flags, length)
                start += 9
                continue
            if length > _MAX_CONTROL_FRAME:
                raise ProtocolError(frames.FRAME_SIZE_ERROR, f"a frame of type {kind} of {length} bytes")
            if end - start < 9 + length:
                return start
            self._on_frame(kind, flags, stream_id, buffer[start + 9 : start + 9 + length])
            start += 9 + length

    def _begin_data(self, stream_id: int, flags: int, length: int) -> None:
        if length > _OUR_MAX_FRAME:
            raise ProtocolError(frames.FRAME_SIZE_ERROR, f"a data frame of {length} bytes")
        self._data = (stream_id, flags, length)
        if not length and flags & frames.END_STREAM:
            self._on_end(stream_id)

    def _on_frame(self, kind: int, flags: int, stream_id: int, payload: memoryview) -> None:
        if self._block is not None and (kind != frames.CONTINUATION or stream_id != self._block[0]):
            raise ProtocolError(frames.PROTOCOL_ERROR, "a header block was interrupted")
        handler = _HANDLERS.get(kind)
        if handler is not None:
            handler(self, flags, stream_id, payload)

    def _on_data(self, stream_id: int, data: memoryview) -> None:
        self._unacknowledged += len(data)
        stream = self._streams.get(stream_id)
        if stream is None:
            if stream_id > self._last_stream or not stream_id & 1:
                raise ProtocolError(frames.PROTOCOL_ERROR, f"data for stream {stream_id}, which was never opened")
            return  # it has ended on our side
        stream.unacknowledged += len(data)
        if stream.receiver is not None:
            stream.receiver.on_data(data)
        if stream.unacknowledged > _WINDOW_RENEWED_BYTES:
            self._send(frames.WINDOW_UPDATE, 0, stream_id, struct.pack(">I", stream.unacknowledged))
            stream.unacknowledged = 0

    def _on_padded_data(self, flags: int, stream_id: int, payload: memoryview) -> None:
        data = _without_padding(flags, payload)
        self._unacknowledged += len(payload) - len(data)
        self._on_data(stream_id, data)
        if flags & frames.END_STREAM:
            self._on_end(stream_id)

    def _on_end(self, stream_id: int) -> None:
        stream = self._streams.get(stream_id)
        if stream is not None and stream.receiver is not None:
            stream.receiver.on_end()

    def _on_headers(self, flags: int, stream_id: int, payload: memoryview) -> None:
        block = _without_padding(flags, payload)
        if flags & frames.WITH_PRIORITY:
            block = block[5:]
        self._add_to_block(flags, stream_id, flags, bytearray(block))

    def _on_continuation(self, flags: int, stream_id: int, payload: memoryview) -> None:
        if self._block is None:
            raise ProtocolError(frames.PROTOCOL_ERROR, "a header block continues that never began")
        _, first_flags, block = self._block
        self._add_to_block(flags, stream_id, first_flags, block + payload)

    def _add_to_block(self, flags: int, stream_id: int, first_flags: int, block: bytearray) -> None:
        if len(block) > _MAX_HEADER_BLOCK:
            raise ProtocolError(frames.PROTOCOL_ERROR, f"headers of more than {_MAX_HEADER_BLOCK} bytes")
        if not flags & frames.END_HEADERS:
            self._block = (stream_id, first_flags, block)
            return
        self._block = None
        try:
            headers = [(name, value) for name, value in self._decoder.decode(bytes(block), raw=True)]
        except hpack.HPACKError as error:
            raise ProtocolError(frames.PROTOCOL_ERROR, f"headers that cannot be read: {error}") from error
        # Of a stream that is known, or has ended on our side, these are trailers: gRPC clients say nothing in them.
        if stream_id > self._last_stream:
            self._open(stream_id, headers)
        if first_flags & frames.END_STREAM:
            self._on_end(stream_id)

    def _open(self, stream_id: int, headers: Headers) -> None:
        if not stream_id & 1:
            raise ProtocolError(frames.PROTOCOL_ERROR, f"a client cannot open stream {stream_id}")
        self._last_stream = stream_id
        if len(self._streams) >= _MAX_STREAMS:
            self._send(frames.RST_STREAM, 0, stream_id, struct.pack(">I", frames.CANCEL))
            return
        stream = Stream(self._output, stream_id, headers)
        self._output.open(stream)
        stream.receiver = self._on_stream(stream)

    def _on_reset(self, flags: int, stream_id: int, payload: memoryview) -> None:
        stream = self._streams.get(stream_id)
        if stream is not None:
            self._close_stream(stream)

    def _on_settings(self, flags: int, stream_id: int, payload: memoryview) -> None:
        if flags & frames.ACK:
            return
        if len(payload) % 6:
            raise ProtocolError(frames.FRAME_SIZE_ERROR, f"settings of {len(payload)} bytes")
        settings = dict(struct.iter_unpack(">HI", payload))
        self._output.apply_settings(settings.get(_INITIAL_WINDOW_SIZE), settings.get(_MAX_FRAME_SIZE))

    def _on_ping(self, flags: int, stream_id: int, payload: memoryview) -> None:
        if len(payload) != 8:
            raise ProtocolError(frames.FRAME_SIZE_ERROR, f"a ping of {len(payload)} bytes")
        if not flags & frames.ACK:
            self._send(frames.PING, frames.ACK, 0, bytes(payload))

    def _on_window_update(self, flags: int, stream_id: int, payload: memoryview) -> None:
        if len(payload) != 4:
            raise ProtocolError(frames.FRAME_SIZE_ERROR, f"a window update of {len(payload)} bytes")
        self._output.widen(stream_id, int.from_bytes(payload, "big") & frames.WINDOW_MAX)

    def _close_stream(self, stream: Stream) -> None:
        if self._output.drop(stream) and stream.receiver is not None:
            stream.receiver.on_close()


_HANDLERS: Final[dict[int, Callable[[Any, int, int, memoryview], None]]] = {
    frames.DATA: Connection._on_padded_data,
    frames.HEADERS: Connection._on_headers,
    frames.RST_STREAM: Connection._on_reset,
    frames.SETTINGS: Connection._on_settings,
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
