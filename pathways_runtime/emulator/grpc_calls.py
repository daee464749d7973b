"""gRPC calls over `http2`: metadata, messages, statuses. Messages are bytes; methods are found by their path."""

from __future__ import annotations

import base64
import binascii
import contextlib
import logging
import socket
import threading
from collections.abc import Callable, Mapping
from typing import Final, Protocol
from urllib.parse import quote

from pathways_runtime.emulator.http2 import Connection
from pathways_runtime.emulator.http2_output import Headers, Receiver, Stream
from pathways_runtime.emulator.status import StatusError

_log: Final = logging.getLogger(__name__)

_BACKLOG: Final = 1024
_PREFIX_BYTES: Final = 5  # compressed or not, and the length
# Larger messages come in pieces of the protocol's own making (transfers), never as one.
_MAX_MESSAGE_BYTES: Final = 1 << 31
# Header blocks without the peer's memory of earlier ones (RFC 7541): an index, then literals that are not indexed.
_STATUS_200: Final = b"\x88"


def _literal(name: str, value: str) -> bytes:
    return b"\x00" + _text(name.encode()) + _text(value.encode())


def _text(data: bytes) -> bytes:
    if len(data) < 127:
        return bytes([len(data)]) + data
    rest, encoded = len(data) - 127, bytearray([127])
    while rest >= 128:
        encoded.append(rest & 0x7F | 0x80)
        rest >>= 7
    encoded.append(rest)
    return bytes(encoded) + data


_HEAD: Final = _STATUS_200 + _literal("content-type", "application/grpc")
_TRAILERS_OK: Final = _literal("grpc-status", "0")


class Call:
    """One call of a method. Its methods may be called from any thread."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self._has_begun = False

    def metadata(self, name: str) -> bytes | None:
        """The value of a header, decoded where its name ends in `-bin`; None where the client sent none."""
        value = _header(self._stream.headers, name.encode())
        if value is None or not name.endswith("-bin"):
            return value
        if value.startswith(b"\x00"):
            return value[1:]
        try:
            return base64.b64decode(value + b"=" * (-len(value) % 4))
        except binascii.Error as error:
            raise StatusError("INVALID_ARGUMENT", f"header {name} is not base64: {error}") from error

    def begin(self) -> None:
        """Says that an answer will come. Called by the first `send`."""
        if not self._has_begun:
            self._has_begun = True
            self._stream.send_headers(_HEAD)

    def send(self, message: bytes, *, flush: bool = True) -> None:
        """A message to the client. Without `flush` it leaves with a later one, or by `flush`."""
        self.begin()
        self._stream.send(len(message).to_bytes(_PREFIX_BYTES, "big") + message, flush=flush)

    def send_parts(self, head: bytes, body: memoryview) -> None:
        """A message in two parts, the second of which is sent from where it lies: it must not change."""
        self.begin()
        self._stream.send((len(head) + len(body)).to_bytes(_PREFIX_BYTES, "big") + head, flush=False)
        self._stream.send(body)

    def flush(self) -> None:
        """Sends what is waiting."""
        self._stream.flush()

    def finish(self, error: StatusError | None = None) -> None:
        """Ends the call, well or with an error."""
        trailers = _TRAILERS_OK
        if error is not None:
            message = quote(error.message[:_MAX_ERROR_CHARACTERS], safe=" !#$&'()*+,/:;=?@[]~")
            trailers = _literal("grpc-status", str(error.code)) + _literal("grpc-message", message)
        self._stream.end(trailers if self._has_begun else _HEAD + trailers)
        self._has_begun = True


_MAX_ERROR_CHARACTERS: Final = 2000


class Messages:
    """Cuts a stream's data into messages, and hands each to `on_message`."""

    def __init__(self, on_message: Callable[[bytes], None]) -> None:
        self._on_message = on_message
        self._rest = bytearray()

    def feed(self, data: memoryview) -> None:
        """The next bytes of the stream. StatusError for a message that is compressed or too large."""
        if self._rest:
            self._rest += data
            data = memoryview(bytes(self._rest))
            self._rest = bytearray()
        position, size = 0, len(data)
        while size - position >= _PREFIX_BYTES:
            length = message_length(data, position)
            end = position + _PREFIX_BYTES + length
            if end > size:
                break
            self._on_message(bytes(data[position + _PREFIX_BYTES : end]))
            position = end
        if position < size:
            self._rest += data[position:]


def message_length(data: memoryview, position: int) -> int:
    """The length in a message's prefix. StatusError where the message is compressed or too large."""
    if data[position]:
        raise StatusError("UNIMPLEMENTED", "compressed messages are not supported")
    length = int.from_bytes(data[position + 1 : position + _PREFIX_BYTES], "big")
    if length > _MAX_MESSAGE_BYTES:
        raise StatusError("RESOURCE_EXHAUSTED", f"a message of {length} bytes")
    return length


class Unary:
    """Takes a call's one message, and answers with what `respond` returns or raises."""

    def __init__(self, call: Call, respond: Callable[[bytes], bytes]) -> None:
        self._call = call
        self._respond = respond
        self._message: bytes | None = None
        self._messages = Messages(self._take)
        self._has_failed = False

    def on_data(self, data: memoryview) -> None:
        """Collects the message."""
        try:
            self._messages.feed(data)
        except StatusError as error:
            self._fail(error)

    def on_end(self) -> None:
        """Answers."""
        if self._has_failed:
            return
        try:
            answer = self._respond(self._message or b"")
        except Exception as error:
            self._fail(StatusError.of(error))
        else:
            self._call.send(answer, flush=False)
            self._call.finish()

    def on_close(self) -> None:
        """Nothing is left to do."""

    def _take(self, message: bytes) -> None:
        self._message = message

    def _fail(self, error: StatusError) -> None:
        if not self._has_failed:
            self._has_failed = True
            self._call.finish(error)


class Method(Protocol):
    """What opens calls of one method: who takes the data, None where the call is answered. StatusError refuses it."""

    def __call__(self, call: Call) -> Receiver | None: ...


class Listener:
    """Accepts connections and serves their calls, each connection in a thread."""

    def __init__(self, host: str, port: int, methods: Mapping[str, Method], token: str | None) -> None:
        self._methods = methods
        self._authorization = None if token is None else f"Bearer {token}".encode()
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._socket = socket.create_server((host, port), family=family, backlog=_BACKLOG)
        self.port: int = self._socket.getsockname()[1]
        self._connections: set[Connection] = set()
        self._thread = threading.Thread(target=self._accept, name="accept", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stops listening and ends all connections."""
        with contextlib.suppress(OSError):  # some systems refuse this of a socket that listens
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        for connection in list(self._connections):
            connection.close()

    def join(self) -> None:
        """Returns after `close`."""
        self._thread.join()

    def _accept(self) -> None:
        while True:
            try:
                peer, _ = self._socket.accept()
            except OSError:
                return
            connection = Connection(peer, self._open)
            self._connections.add(connection)
            threading.Thread(target=self._serve, args=(connection,), name="connection", daemon=True).start()

    def _serve(self, connection: Connection) -> None:
        try:
            connection.run()
        finally:
            self._connections.discard(connection)

    def _open(self, stream: Stream) -> Receiver | None:
        call = Call(stream)
        try:
            path = (_header(stream.headers, b":path") or b"").decode(errors="replace")
            method = self._methods.get(path)
            if method is None:
                raise StatusError("UNIMPLEMENTED", f"unknown method {path}")
            if self._authorization is not None and call.metadata("authorization") != self._authorization:
                raise StatusError("UNAUTHENTICATED", "this server needs a token, and the call has not the right one")
            return method(call)
        except Exception as error:
            if not isinstance(error, StatusError):
                _log.exception("a call failed")
            call.finish(StatusError.of(error))
            return None


def _header(headers: Headers, name: bytes) -> bytes | None:
    return next((value for key, value in headers if key == name), None)
