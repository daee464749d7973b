"""What takes the data of the protocol's streams: a session's requests, and the bytes of host buffers."""

from __future__ import annotations

import logging
import queue
import threading
from typing import TYPE_CHECKING, Final

from pathways_runtime.emulator.grpc_calls import MAX_UNARY_BYTES, PREFIX_BYTES, Call, Messages, message_length
from pathways_runtime.emulator.status import StatusError

if TYPE_CHECKING:
    from pathways_runtime.emulator.server import Core
    from pathways_runtime.emulator.session import Session
    from pathways_runtime.emulator.sidecars import Sidecar

_log: Final = logging.getLogger(__name__)

CHUNK_BYTES: Final = 1 << 20
# Answers that nobody waits for wait for one another: so many at most, and so long.
_ANSWER_WITHIN_S: Final = 0.002
_ANSWERS_TOGETHER: Final = 32
_FIELD_1_BYTES: Final = 0x0A


class RefusedReceiver:
    """Answers a session's first request with an error. Of one that ends without, the client tells nobody why."""

    keeps_data = False

    def __init__(self, core: Core, call: Call, error: StatusError) -> None:
        self._core = core
        self._call = call
        self._error = error
        self._messages = Messages(self._refuse, MAX_UNARY_BYTES)

    def on_data(self, data: memoryview) -> None:
        """Refuses, once the request is complete."""
        try:
            self._messages.feed(data)
        except StatusError as error:
            self._call.finish(error)

    def on_end(self) -> None:
        """Refuses."""
        self._call.finish(self._error)

    def on_close(self) -> None:
        """Nothing is left to do."""

    def _refuse(self, raw: bytes) -> None:
        wire = self._core.wire
        answer = wire.Response()
        answer.response_metadata.op_id = self._core.parse(wire.Request, raw).request_metadata.op_id
        wire.write_status(answer.response_metadata.status, self._error)
        self._call.send(answer.SerializeToString(), flush=False)
        self._call.finish(self._error)


class SessionReceiver:
    """Hands a session's requests to its thread, which takes them in order."""

    keeps_data = True

    def __init__(self, core: Core, call: Call, sidecar: Sidecar | None) -> None:
        self._core = core
        self._call = call
        self._session = core.open(call, sidecar)
        self._requests: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._messages = Messages(self._requests.put)

    def start(self) -> None:
        """Begins to answer. RuntimeError where there are no more threads."""
        session = self._session
        try:
            threading.Thread(target=self._work, name=f"session-{session.id}", daemon=True).start()
        except RuntimeError:
            self._core.close(session)
            raise
        self._call.begin()
        self._call.flush()

    def on_data(self, data: memoryview) -> None:
        """Queues the requests in it."""
        try:
            self._messages.feed(data)
        except StatusError as error:
            self._call.finish(error)
            self.on_close()

    def on_end(self) -> None:
        """The client asks no more."""
        self._requests.put(None)

    def on_close(self) -> None:
        """The client is gone: what waits for it must not."""
        self._session.hang_up()
        self._requests.put(None)

    def _work(self) -> None:
        session = self._session
        _log.info("session %d begins", session.id)
        error: StatusError | None = None
        try:
            self._answer_all(session)
        except self._core.session_module.MalformedError as failure:
            error = StatusError("INVALID_ARGUMENT", str(failure))
            _log.warning("session %d: %s", session.id, failure)
        except Exception as failure:
            error = StatusError.of(failure)
            _log.exception("session %d ends by an error of the server", session.id)
        self._core.close(session)
        self._call.finish(error)
        _log.info("session %d ends", session.id)

    def _answer_all(self, session: Session) -> None:
        requests, unsent, awaited, used_bytes = self._requests, 0, False, 0
        while True:
            try:
                request = requests.get(timeout=_ANSWER_WITHIN_S if unsent else None)
            except queue.Empty:
                self._call.flush()
                unsent = 0
                continue
            if request is None:
                return
            awaited |= session.receive(request)
            unsent += 1
            used_bytes += PREFIX_BYTES + len(request)
            if used_bytes > CHUNK_BYTES:
                self._call.give_room(used_bytes)
                used_bytes = 0
            if unsent >= _ANSWERS_TOGETHER or (awaited and requests.empty()):
                self._call.flush()
                unsent, awaited = 0, False


class StoreReceiver:
    """Puts the data of a transfer where it will be used, without collecting its messages first."""

    keeps_data = False

    def __init__(self, core: Core, call: Call, session: Session, handle: int, size_bytes: int) -> None:
        self._call = call
        self._session = session
        self._handle = handle
        try:
            self._buffer = core.host_buffers.allocate(size_bytes)
        except (MemoryError, ValueError) as error:
            raise StatusError("RESOURCE_EXHAUSTED", f"a host buffer of {size_bytes} bytes: {error}") from error
        self._view = memoryview(self._buffer)
        self._filled = 0
        self._header = bytearray()  # of a message, until it is complete
        self._left = 0  # bytes of the present message that are still to come

    def on_data(self, data: memoryview) -> None:
        """Copies what is data of the buffer."""
        try:
            while len(data):
                data = self._take_data(data) if self._left else self._take_header(data)
        except StatusError as error:
            self._end(error)

    def on_end(self) -> None:
        """The buffer is complete."""
        if self._filled == len(self._view) and not self._left and not self._header:
            self._end(None)
        else:
            message = f"{self._filled} bytes came of the {len(self._view)} announced"
            self._end(StatusError("DATA_LOSS", message))

    def on_close(self) -> None:
        """Whoever waits for the buffer is told."""
        self._session.host_buffers.fail(self._handle, StatusError("CANCELLED", "the transfer was cancelled"))

    def _take_data(self, data: memoryview) -> memoryview:
        count = min(self._left, len(data))
        if self._filled + count > len(self._view):
            raise StatusError("INVALID_ARGUMENT", f"more than the {len(self._view)} bytes announced")
        self._view[self._filled : self._filled + count] = data[:count]
        self._filled += count
        self._left -= count
        return data[count:]

    def _take_header(self, data: memoryview) -> memoryview:
        """gRPC's prefix, then the protocol buffer's: field 1, and how many bytes it has, which is all it may have."""
        self._header.append(data[0])
        header, size = self._header, len(self._header)
        if size < PREFIX_BYTES:
            return data[1:]
        length = message_length(header)
        if size == PREFIX_BYTES and not length:
            header.clear()  # an empty message
        elif size > PREFIX_BYTES + 1 and header[-1] < 0x80:
            self._left = _read_varint(header[PREFIX_BYTES + 1 :])
            if size - PREFIX_BYTES + self._left != length:
                raise StatusError("INVALID_ARGUMENT", "not a HostBufferStoreRequest")
            header.clear()
        elif (size > PREFIX_BYTES and header[PREFIX_BYTES] != _FIELD_1_BYTES) or size > PREFIX_BYTES + 10:
            raise StatusError("INVALID_ARGUMENT", "not a HostBufferStoreRequest")
        return data[1:]

    def _end(self, error: StatusError | None) -> None:
        if error is None:
            self._session.host_buffers.store(self._handle, self._buffer)
            self._call.send(b"", flush=False)
        else:
            self._session.host_buffers.fail(self._handle, error)
        self._call.finish(error)


def _read_varint(encoded: bytearray) -> int:
    return sum((byte & 0x7F) << 7 * place for place, byte in enumerate(encoded))


def send_data(call: Call, data: memoryview) -> None:
    """A message with `bytes data = 1`, without a copy of the data."""
    call.send_parts(field_header(len(data)), data)


def field_header(size: int) -> bytes:
    """What stands before `bytes data = 1` of so many bytes."""
    header = bytearray([_FIELD_1_BYTES])
    while size > 0x7F:
        header.append(size & 0x7F | 0x80)
        size >>= 7
    header.append(size)
    return bytes(header)
