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
from pathways_runtime.emulator.http2_output import ENHANCE_YOUR_CALM, Headers, Receiver, Stream
from pathways_runtime.emulator.status import StatusError

_log: Final = logging.getLogger(__name__)

_BACKLOG: Final = 1024
_MAX_CONNECTIONS: Final = 2048
# Until a connection is trusted it may keep us waiting for so long, and holds a thread and a socket meanwhile.
_PATIENCE_S: Final = 30.0
_RETRY_S: Final = 0.1
PREFIX_BYTES: Final = 5  # compressed or not, and the length
# Larger data come in pieces of the protocol's own making (transfers). It must be below what a stream has room for.
MAX_MESSAGE_BYTES: Final = 1 << 30
# The one message of a unary call names things, and may come from anybody.
MAX_UNARY_BYTES: Final = 1 << 20
# Answers that the client asked for, and then does not take.
_MAX_UNSENT_BYTES: Final = 1 << 28
_MAX_ERROR_BYTES: Final = 4000  # encoded; clients take 8 KiB of metadata, some no more
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


_CONTENT_TYPE: Final = "application/grpc"
_HEAD: Final = _STATUS_200 + _literal("content-type", _CONTENT_TYPE) + _literal("grpc-accept-encoding", "identity")
_NOT_GRPC: Final = _literal(":status", "415")
_TRAILERS_OK: Final = _literal("grpc-status", "0")


class Call:
    """One call of a method. Its methods may be called from any thread."""

    def __init__(self, stream: Stream, trust: Callable[[], None]) -> None:
        self._stream = stream
        self._has_begun = False
        self.trust = trust  # to be called in the thread that opened the call, once the client has shown who it is

    def metadata(self, name: str) -> bytes | None:
        """The value of a header, decoded where its name ends in `-bin`; None where the client sent none."""
        value = _header(self._stream.headers, name.encode())
        if value is None or not name.endswith("-bin"):
            return value
        if value.startswith(b"\x00"):
            return value[1:]
        try:
            return base64.b64decode(value + b"=" * (-len(value) % 4), validate=True)
        except binascii.Error as error:
            raise StatusError("INVALID_ARGUMENT", f"header {name} is not base64: {error}") from error

    def begin(self) -> None:
        """Says that an answer will come. Called by the first `send`."""
        if not self._has_begun:
            self._has_begun = True
            self._stream.send_headers(_HEAD)

    def send(self, message: bytes, *, flush: bool = True) -> None:
        """A message to the client. Without `flush` it leaves with a later one, or by `flush`.

        A client that asks and asks but takes no answers loses the call.
        """
        self.begin()
        self._stream.send(len(message).to_bytes(PREFIX_BYTES, "big") + message, flush=flush)
        if self._stream.unsent_bytes > _MAX_UNSENT_BYTES:
            self._stream.reset(ENHANCE_YOUR_CALM)

    def send_parts(self, head: bytes, body: memoryview) -> None:
        """A message in two parts, the second of which is sent from where it lies: it must not change."""
        self.begin()
        self._stream.send((len(head) + len(body)).to_bytes(PREFIX_BYTES, "big") + head, flush=False)
        self._stream.send(body)

    def flush(self) -> None:
        """Sends what is waiting."""
        self._stream.flush()

    def finish(self, error: StatusError | None = None) -> None:
        """Ends the call, well or with an error."""
        trailers = _TRAILERS_OK
        if error is not None:
            trailers = _literal("grpc-status", str(error.code)) + _literal("grpc-message", _percent(error.message))
        self._stream.end(trailers if self._has_begun else _HEAD + trailers)
        self._has_begun = True

    def give_room(self, size: int) -> None:
        """So many bytes of the call's data are used (`http2_output.Receiver.keeps_data`)."""
        self._stream.give_room(size)


def _percent(message: str) -> str:
    """An error's message as the protocol encodes it, cut to what clients take."""
    encoded = quote(message[:_MAX_ERROR_BYTES], safe=" !#$&'()*+,/:;=?@[]~", errors="replace")[:_MAX_ERROR_BYTES]
    whole = len(encoded) - 2
    return encoded[: encoded.rfind("%")] if "%" in encoded[whole:] else encoded


class Messages:
    """Cuts a stream's data into messages, and hands each to `on_message`."""

    def __init__(self, on_message: Callable[[bytes], None], max_bytes: int = MAX_MESSAGE_BYTES) -> None:
        self._on_message = on_message
        self._max_bytes = max_bytes
        self._rest = bytearray()
        self._wanted = 0  # bytes of `_rest` without which there is nothing to do

    def feed(self, data: memoryview) -> None:
        """The next bytes of the stream. StatusError for a message that is compressed or too large."""
        if self._rest:
            self._rest += data
            if len(self._rest) < self._wanted:
                return
            data, self._rest = memoryview(self._rest), bytearray()
        position, size = 0, len(data)
        while size - position >= PREFIX_BYTES:
            end = position + PREFIX_BYTES + message_length(data, position, self._max_bytes)
            if end > size:
                break
            self._on_message(bytes(data[position + PREFIX_BYTES : end]))
            position = end
        else:
            end = position + PREFIX_BYTES
        self._rest += data[position:]
        self._wanted = end - position

    @property
    def is_between(self) -> bool:
        """True where no message has begun that is not complete."""
        return not self._rest


def message_length(data: bytes | bytearray | memoryview, position: int = 0, max_bytes: int = MAX_MESSAGE_BYTES) -> int:
    """The length in a message's prefix. StatusError where the message is compressed or too large."""
    if data[position]:
        raise StatusError("UNIMPLEMENTED", "compressed messages are not supported")
    length = int.from_bytes(data[position + 1 : position + PREFIX_BYTES], "big")
    if length > max_bytes:
        raise StatusError("RESOURCE_EXHAUSTED", f"a message of {length} bytes; {max_bytes} is the most")
    return length


class Unary:
    """Takes a call's one message, and answers with what `respond` returns or raises."""

    keeps_data = False

    def __init__(self, call: Call, respond: Callable[[bytes], bytes]) -> None:
        self._call = call
        self._respond = respond
        self._received: list[bytes] = []
        self._messages = Messages(self._received.append, MAX_UNARY_BYTES)

    def on_data(self, data: memoryview) -> None:
        """Collects the message."""
        try:
            self._messages.feed(data)
            if len(self._received) > 1:
                raise StatusError("UNIMPLEMENTED", "more than one message in a call that takes one")
        except StatusError as error:
            self._call.finish(error)

    def on_end(self) -> None:
        """Answers."""
        try:
            if not self._received or not self._messages.is_between:
                raise StatusError("INVALID_ARGUMENT", "the call ended before its message was complete")
            answer = self._respond(self._received[0])
        except Exception as error:
            if not isinstance(error, StatusError):
                _log.exception("a call failed")
            self._call.finish(StatusError.of(error))
        else:
            self._call.send(answer, flush=False)
            self._call.finish()

    def on_close(self) -> None:
        """Nothing is left to do."""


class Method(Protocol):
    """What opens calls of one method: who takes the data, None where the call is answered. StatusError refuses it."""

    def __call__(self, call: Call) -> Receiver | None: ...


class Listener:
    """Accepts connections and serves their calls, each connection in a thread.

    `patience_s` is how long a connection may keep us waiting before one of its calls is trusted (`Call.trust`).
    """

    def __init__(self, host: str, port: int, methods: Mapping[str, Method], *, patience_s: float = _PATIENCE_S) -> None:
        self._methods = methods
        self._patience_s = patience_s
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._socket = socket.create_server((host, port), family=family, backlog=_BACKLOG)
        self.port: int = self._socket.getsockname()[1]
        self._connections: dict[Connection, None] = {}  # the oldest first
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._accept, name="accept", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stops listening and ends all connections."""
        self._closed.set()
        with contextlib.suppress(OSError):  # some systems refuse this of a socket that listens
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        with self._lock:
            connections = list(self._connections)
        for connection in connections:
            connection.close()

    def join(self) -> None:
        """Returns after `close`."""
        self._thread.join()

    def _accept(self) -> None:
        while not self._closed.is_set():
            try:
                peer, _ = self._socket.accept()
            except ConnectionAbortedError:  # the peer was faster
                continue
            except OSError as error:  # out of descriptors or memory, unless it was `close`
                if not self._closed.is_set():
                    _log.warning("a connection could not be accepted: %s", error)
                    if not self._make_room():
                        self._closed.wait(_RETRY_S)
                continue
            self._serve(peer)

    def _serve(self, peer: socket.socket) -> None:
        if len(self._connections) >= _MAX_CONNECTIONS and not self._make_room():
            _log.warning("a connection is refused: there are %d", len(self._connections))
            peer.close()
            return
        connection = Connection(peer, self._open, self._patience_s)
        with self._lock:
            self._connections[connection] = None
        try:
            threading.Thread(target=self._run, args=(connection,), name="connection", daemon=True).start()
        except RuntimeError as error:  # no more threads
            _log.warning("a connection is refused: %s", error)
            self._forget(connection)

    def _run(self, connection: Connection) -> None:
        try:
            connection.run()
        finally:
            self._forget(connection)

    def _forget(self, connection: Connection) -> None:
        connection.close()
        with self._lock:
            self._connections.pop(connection, None)

    def _make_room(self) -> bool:
        """Ends the oldest connection of those that nobody has vouched for. False where there is none."""
        with self._lock:
            connection = next((each for each in self._connections if not each.is_trusted), None)
        if connection is not None:
            self._forget(connection)
        return connection is not None

    def _open(self, connection: Connection, stream: Stream) -> Receiver | None:
        if _header(stream.headers, b":method") != b"POST" or not _is_grpc(stream.headers):
            stream.end(_NOT_GRPC)
            return None
        call = Call(stream, connection.trust)
        try:
            path = (_header(stream.headers, b":path") or b"").decode(errors="replace")
            method = self._methods.get(path)
            if method is None:
                raise StatusError("UNIMPLEMENTED", f"unknown method {path}")
            return method(call)
        except Exception as error:
            if not isinstance(error, StatusError):
                _log.exception("a call failed")
            call.finish(StatusError.of(error))
            return None


def _is_grpc(headers: Headers) -> bool:
    return (_header(headers, b"content-type") or b"").startswith(_CONTENT_TYPE.encode())


def _header(headers: Headers, name: bytes) -> bytes | None:
    return next((value for key, value in headers if key == name), None)
