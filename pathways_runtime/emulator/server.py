"""The service of the IFRT proxy protocol, and the sessions behind it.

It listens before jax is imported: a client's own start overlaps with that of the engine, and its first call waits.
Messages pass as bytes; `session.py` and `wire.py` know what they mean.
"""

from __future__ import annotations

import itertools
import logging
import queue
import sys
import threading
from concurrent.futures import Future
from types import ModuleType
from typing import TYPE_CHECKING, Any, Final

from pathways_runtime.emulator.grpc_calls import Call, Listener, Messages, Unary
from pathways_runtime.emulator.http2_output import Receiver
from pathways_runtime.emulator.slices import Slices, Topology
from pathways_runtime.emulator.status import StatusError

if TYPE_CHECKING:
    from pathways_runtime.emulator.engine import Engine
    from pathways_runtime.emulator.session import Session

_log: Final = logging.getLogger(__name__)

_SERVICE: Final = "/xla.ifrt.proxy.GrpcIfrtService/"
_STORE_METADATA: Final = "ifrt-proxy-grpc-host-buffer-store-metadata-bin"
_CHUNK_BYTES: Final = 1 << 20
_SWITCH_INTERVAL_S: Final = 0.0005
# Answers that nobody waits for wait for one another: so many at most, and so long.
_ANSWER_WITHIN_S: Final = 0.002
_ANSWERS_TOGETHER: Final = 32


def start_server(
    *,
    topology: Topology,
    slices: Slices,
    host: str = "127.0.0.1",
    port: int = 0,
    platform: str = "cpu",
    token: str | None = None,
) -> Server:
    """A server that listens, on `Server.port` where `port` is 0.

    Clients are answered once jax has started and every slice of `topology` has been up.

    `platform` is `device.platform` in the client. With a `token`, each call needs it as `authorization: Bearer TOKEN`.
    OSError where the port is taken. One server in a process, since jax has one set of CPU devices.
    """
    return Server(topology, slices, host, port, platform, token)


class Server:
    """See `start_server`."""

    def __init__(
        self, topology: Topology, slices: Slices, host: str, port: int, platform: str, token: str | None
    ) -> None:
        # A thread that has waited for the network takes its turn soon, while others compute.
        sys.setswitchinterval(_SWITCH_INTERVAL_S)
        self._core: Future[_Core] = Future()
        self._listener = Listener(host, port, _Service(self._core).methods, token)
        self.port = self._listener.port
        starter = threading.Thread(target=self._start_core, args=(topology, slices, platform), daemon=True)
        starter.start()

    def wait(self) -> None:
        """Returns once the server has stopped. Raises what kept the engine from starting."""
        self._core.result()
        self._listener.join()

    def stop(self) -> None:
        """Ends all sessions and stops listening."""
        self._listener.close()

    def _start_core(self, topology: Topology, slices: Slices, platform: str) -> None:
        try:
            core = _Core(topology, slices, platform)
        except BaseException as error:
            _log.critical("the engine did not start", exc_info=error)
            self._core.set_exception(error)
        else:
            _log.info("%d devices on %d slices, platform %s", len(topology.devices), topology.num_slices, platform)
            # The head of a job starts before its workers; a client that came in now would find all slices lost.
            slices.wait_started(range(topology.num_slices), timeout_s=None)
            self._core.set_result(core)


class _Core:
    """What needs jax: the engine, the schema, and the sessions. Importing it takes a second or two."""

    def __init__(self, topology: Topology, slices: Slices, platform: str) -> None:
        from pathways_runtime.emulator import engine, host_buffers, programs, session, transfers, wire

        assert programs and transfers  # their import fills the table of requests
        self.wire: ModuleType = wire
        self.host_buffers: ModuleType = host_buffers
        self.session_module: ModuleType = session
        self.engine: Engine = engine.Engine(topology, slices, platform)
        self.sessions: dict[int, Session] = {}
        self._new_id = itertools.count(1).__next__

    def open(self, call: Call) -> Session:
        """A new session that answers through `call`."""
        session: Session = self.session_module.Session(self.engine, self._new_id(), call.send)
        self.sessions[session.id] = session
        return session

    def close(self, session: Session) -> None:
        """Lets go of a session and all that it holds."""
        self.sessions.pop(session.id, None)
        session.close()

    def session(self, session_id: int) -> Session:
        """The session of this id. StatusError where there is none."""
        session = self.sessions.get(session_id)
        if session is None:
            raise StatusError("NOT_FOUND", f"there is no session {session_id}")
        return session

    def parse(self, message: Any, raw: bytes) -> Any:
        """A message of that class. StatusError for bytes that are none."""
        try:
            return message.FromString(raw)
        except Exception as error:
            raise StatusError("INVALID_ARGUMENT", f"not a {message.DESCRIPTOR.name}: {error}") from error


class _Service:
    """The protocol's methods. Each waits for the engine."""

    def __init__(self, core: Future[_Core]) -> None:
        self._future = core
        self.methods = {
            _SERVICE + "GetVersion": lambda call: Unary(call, self._get_version),
            _SERVICE + "IfrtSession": self._session,
            _SERVICE + "HostBufferStore": self._store,
            _SERVICE + "HostBufferLookup": self._lookup,
            _SERVICE + "HostBufferDelete": lambda call: Unary(call, self._delete),
        }

    @property
    def _core(self) -> _Core:
        try:
            return self._future.result()
        except BaseException as error:
            message = f"the emulator did not start: {type(error).__name__}: {error}"
            raise StatusError("INTERNAL", message) from error

    def _get_version(self, raw: bytes) -> bytes:
        core = self._core
        answer, problem = core.wire.choose_version(core.parse(core.wire.GetVersionRequest, raw))
        if problem:
            raise StatusError("FAILED_PRECONDITION", problem)
        serialized: bytes = answer.SerializeToString()
        return serialized

    def _session(self, call: Call) -> Receiver:
        return _SessionReceiver(self._core, call)

    def _store(self, call: Call) -> Receiver:
        core = self._core
        metadata = core.parse(core.wire.StoreMetadata, call.metadata(_STORE_METADATA) or b"")
        session = core.session(metadata.session_id)
        return _StoreReceiver(core, call, session, metadata.handle, metadata.buffer_size)

    def _lookup(self, call: Call) -> Receiver:
        def respond(raw: bytes) -> bytes:
            core = self._core
            request = core.parse(core.wire.LookupRequest, raw)
            data = memoryview(core.session(request.session_id).host_buffers.get(request.handle))
            last = max(len(data) - 1, 0) // _CHUNK_BYTES * _CHUNK_BYTES
            for offset in range(0, last, _CHUNK_BYTES):
                _send_data(call, data[offset : offset + _CHUNK_BYTES])
            # Even an empty buffer is one message.
            return _field_header(len(data) - last) + bytes(data[last:])

        return Unary(call, respond)

    def _delete(self, raw: bytes) -> bytes:
        core = self._core
        request = core.parse(core.wire.DeleteRequest, raw)
        core.session(request.session_id).host_buffers.delete(request.handle)
        return b""


class _SessionReceiver:
    """Hands a session's requests to its thread, which takes them in order."""

    def __init__(self, core: _Core, call: Call) -> None:
        self._core = core
        self._call = call
        self._session = core.open(call)
        self._requests: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._messages = Messages(self._requests.put)
        call.begin()
        call.flush()
        threading.Thread(target=self._work, name=f"session-{self._session.id}", daemon=True).start()

    def on_data(self, data: memoryview) -> None:
        """Queues the requests in it."""
        try:
            self._messages.feed(data)
        except StatusError as error:
            self._call.finish(error)
            self._requests.put(None)

    def on_end(self) -> None:
        """The client asks no more."""
        self._requests.put(None)

    def on_close(self) -> None:
        """The client is gone: what waits for it must not."""
        self._session.host_buffers.close()
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
        requests, unsent, awaited = self._requests, 0, False
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
            if unsent >= _ANSWERS_TOGETHER or (awaited and requests.empty()):
                self._call.flush()
                unsent, awaited = 0, False


class _StoreReceiver:
    """Puts the data of a transfer where it will be used, without collecting its messages first."""

    def __init__(self, core: _Core, call: Call, session: Session, handle: int, size_bytes: int) -> None:
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
        self._has_ended = False

    def on_data(self, data: memoryview) -> None:
        """Copies what is data of the buffer."""
        try:
            while len(data) and not self._has_ended:
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
        """gRPC's prefix, then the protocol buffer's: field 1, and how many bytes it has."""
        self._header.append(data[0])
        header = self._header
        if len(header) == _GRPC_PREFIX_BYTES and not any(header):
            header.clear()  # an empty message
        elif len(header) == _GRPC_PREFIX_BYTES + 1 and header[-1] != _FIELD_1_BYTES:
            raise StatusError("INVALID_ARGUMENT", "not a HostBufferStoreRequest")
        elif len(header) > _GRPC_PREFIX_BYTES + 1 and header[-1] < 0x80:
            self._left = _read_varint(header[_GRPC_PREFIX_BYTES + 1 :])
            header.clear()
        elif len(header) > _GRPC_PREFIX_BYTES + 10:
            raise StatusError("INVALID_ARGUMENT", "not a HostBufferStoreRequest")
        return data[1:]

    def _end(self, error: StatusError | None) -> None:
        if self._has_ended:
            return
        self._has_ended = True
        if error is None:
            self._session.host_buffers.store(self._handle, self._buffer)
            self._call.send(b"", flush=False)
        else:
            self._session.host_buffers.fail(self._handle, error)
        self._call.finish(error)


_GRPC_PREFIX_BYTES: Final = 5
_FIELD_1_BYTES: Final = 0x0A


def _read_varint(encoded: bytearray) -> int:
    return sum((byte & 0x7F) << 7 * place for place, byte in enumerate(encoded))


def _send_data(call: Call, data: memoryview) -> None:
    """A message with `bytes data = 1`, without a copy of the data."""
    call.send_parts(_field_header(len(data)), data)


def _field_header(size: int) -> bytes:
    header = bytearray([_FIELD_1_BYTES])
    while size > 0x7F:
        header.append(size & 0x7F | 0x80)
        size >>= 7
    header.append(size)
    return bytes(header)
