"""The gRPC service of the IFRT proxy protocol, and the sessions behind it.

It listens before jax is imported: a client's own start overlaps with that of the engine, and its first call waits.
Messages pass as bytes; `session.py` and `wire.py` know what they mean.
"""

from __future__ import annotations

import itertools
import logging
import queue
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from types import ModuleType
from typing import TYPE_CHECKING, Any, Final

import grpc

from pathways_runtime.emulator.slices import Slices, Topology

if TYPE_CHECKING:
    from pathways_runtime.emulator.engine import Engine
    from pathways_runtime.emulator.session import Session

_log: Final = logging.getLogger(__name__)

_SERVICE: Final = "xla.ifrt.proxy.GrpcIfrtService"
_SESSION_METADATA: Final = "ifrt-proxy-grpc-ifrt-session-metadata-bin"
_STORE_METADATA: Final = "ifrt-proxy-grpc-host-buffer-store-metadata-bin"
_AUTHORIZATION: Final = "authorization"
# A session holds a thread, and so does a transfer while it lasts; with fewer, one could wait for another for ever.
_THREADS: Final = 1024
# The client opens a stream for each shard at once, and gives up when one of them is turned away.
_PENDING: Final = 1_000_000
_CHUNK_BYTES: Final = 1 << 20
_GRACE_S: Final = 0.5
_OPTIONS: Final = (
    ("grpc.server.max_pending_requests", _PENDING),
    ("grpc.server.max_pending_requests_hard_limit", _PENDING),
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
    ("grpc.so_reuseport", 0),
)


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
        self._core: Future[_Core] = Future()
        threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="grpc")
        self._grpc = grpc.server(threads, options=_OPTIONS)
        self._grpc.add_generic_rpc_handlers((_Service(self._core, token),))
        address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        try:
            self.port = self._grpc.add_insecure_port(address)
        except RuntimeError as error:
            raise OSError(f"cannot listen on {address}: {error}") from error
        self._grpc.start()
        starter = threading.Thread(target=self._start_core, args=(topology, slices, platform), daemon=True)
        starter.start()

    def wait(self) -> None:
        """Returns once the server has stopped. Raises what kept the engine from starting."""
        self._core.result()
        self._grpc.wait_for_termination()

    def stop(self) -> None:
        """Ends all sessions and stops listening."""
        self._grpc.stop(_GRACE_S).wait()

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
        from pathways_runtime.emulator import engine, session, transfers, wire  # noqa: F401
        from pathways_runtime.emulator import programs as _programs  # noqa: F401  (fills the table of requests)

        self.wire: ModuleType = wire
        self.session_module: ModuleType = session
        self.engine: Engine = engine.Engine(topology, slices, platform)
        self.sessions: dict[int, Session] = {}
        self._new_id = itertools.count(1).__next__

    def open(self, send: Callable[[bytes], None]) -> Session:
        session: Session = self.session_module.Session(self.engine, self._new_id(), send)
        self.sessions[session.id] = session
        return session

    def close(self, session: Session) -> None:
        self.sessions.pop(session.id, None)
        session.close()


class _Service(grpc.GenericRpcHandler):
    """Routes calls by method name, once the token is right."""

    def __init__(self, core: Future[_Core], token: str | None) -> None:
        self._core = core
        self._authorization = None if token is None else f"Bearer {token}"
        self._methods = {
            f"/{_SERVICE}/GetVersion": grpc.unary_unary_rpc_method_handler(self._get_version),
            f"/{_SERVICE}/IfrtSession": grpc.stream_stream_rpc_method_handler(self._session),
            f"/{_SERVICE}/HostBufferStore": grpc.stream_unary_rpc_method_handler(self._store),
            f"/{_SERVICE}/HostBufferLookup": grpc.unary_stream_rpc_method_handler(self._lookup),
            f"/{_SERVICE}/HostBufferDelete": grpc.unary_unary_rpc_method_handler(self._delete),
        }
        self._refusal = grpc.unary_unary_rpc_method_handler(_refuse)

    def service(self, call: Any) -> Any:
        """The handler of a call, None for a method that is unknown."""
        if (
            self._authorization is not None
            and dict(call.invocation_metadata).get(_AUTHORIZATION) != self._authorization
        ):
            return self._refusal
        return self._methods.get(call.method)

    def _ready(self, context: grpc.ServicerContext) -> _Core:
        try:
            return self._core.result()
        except BaseException as error:
            context.abort(grpc.StatusCode.INTERNAL, f"the emulator did not start: {type(error).__name__}: {error}")
            raise

    def _get_version(self, raw: bytes, context: grpc.ServicerContext) -> bytes:
        wire = self._ready(context).wire
        request = _parse(wire.GetVersionRequest, raw, context)
        answer, problem = wire.choose_version(request)
        if problem:
            context.abort(grpc.StatusCode.FAILED_PRECONDITION, problem)
        serialized: bytes = answer.SerializeToString()
        return serialized

    def _session(self, requests: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        core = self._ready(context)
        responses: queue.SimpleQueue[bytes | Exception | None] = queue.SimpleQueue()
        session = core.open(responses.put)
        _log.info("session %d begins", session.id)
        reader = threading.Thread(
            target=_read, args=(session, requests, responses), name=f"session-{session.id}", daemon=True
        )
        reader.start()
        try:
            while (response := responses.get()) is not None:
                if isinstance(response, Exception):
                    context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(response))
                yield response
        finally:
            core.close(session)
            _log.info("session %d ends", session.id)

    def _store(self, requests: Iterator[bytes], context: grpc.ServicerContext) -> bytes:
        from pathways_runtime.emulator.host_buffers import allocate

        core = self._ready(context)
        serialized = dict(context.invocation_metadata()).get(_STORE_METADATA, b"")
        metadata = _parse(core.wire.StoreMetadata, serialized, context)
        session = _find(core, metadata.session_id, context)
        buffer = allocate(metadata.buffer_size)
        view, offset = memoryview(buffer), 0
        for request in requests:
            data = _data_of(request)
            view[offset : offset + len(data)] = data
            offset += len(data)
        if offset != metadata.buffer_size:
            context.abort(grpc.StatusCode.DATA_LOSS, f"{offset} bytes came of the {metadata.buffer_size} announced")
        session.host_buffers.store(metadata.handle, buffer)
        return b""

    def _lookup(self, raw: bytes, context: grpc.ServicerContext) -> Iterator[bytes]:
        from pathways_runtime.emulator.status import StatusError

        core = self._ready(context)
        request = _parse(core.wire.LookupRequest, raw, context)
        session = _find(core, request.session_id, context)
        try:
            data = memoryview(session.host_buffers.get(request.handle))
        except StatusError as error:
            context.abort(grpc.StatusCode.NOT_FOUND, error.message)
        # Even an empty buffer is one message.
        for offset in range(0, max(len(data), 1), _CHUNK_BYTES):
            yield _with_data(data[offset : offset + _CHUNK_BYTES])

    def _delete(self, raw: bytes, context: grpc.ServicerContext) -> bytes:
        core = self._ready(context)
        request = _parse(core.wire.DeleteRequest, raw, context)
        _find(core, request.session_id, context).host_buffers.delete(request.handle)
        return b""


def _refuse(raw: bytes, context: grpc.ServicerContext) -> bytes:
    context.abort(grpc.StatusCode.UNAUTHENTICATED, "this server needs a token, and the call has not the right one")
    return b""


def _read(session: Session, requests: Iterator[bytes], responses: queue.SimpleQueue[Any]) -> None:
    """The session's thread: takes its requests in order until the client goes."""
    from pathways_runtime.emulator.session import MalformedError

    end: Exception | None = None
    try:
        for request in requests:
            session.receive(request)
    except MalformedError as error:
        end = error
        _log.warning("session %d: %s", session.id, error)
    except grpc.RpcError:
        _log.info("session %d: the client is gone", session.id)
    except Exception as error:
        end = error
        _log.exception("session %d ends by an error of the server", session.id)
    responses.put(end)


def _find(core: _Core, session_id: int, context: grpc.ServicerContext) -> Session:
    session = core.sessions.get(session_id)
    if session is None:
        context.abort(grpc.StatusCode.NOT_FOUND, f"there is no session {session_id}")
    return session


def _parse(message: Any, raw: bytes, context: grpc.ServicerContext) -> Any:
    try:
        return message.FromString(raw)
    except Exception as error:
        context.abort(grpc.StatusCode.INVALID_ARGUMENT, f"not a {message.DESCRIPTOR.name}: {error}")


def _data_of(request: bytes) -> memoryview:
    """The one field, `bytes data = 1`, of a GrpcHostBufferStoreRequest, without a copy."""
    if not request:
        return memoryview(b"")
    size, position, shift = 0, 1, 0
    while True:
        byte = request[position]
        position += 1
        size |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            break
    return memoryview(request)[position : position + size]


def _with_data(data: memoryview) -> bytes:
    """A GrpcHostBufferLookupResponse, whose one field is `bytes data = 1`, with one copy."""
    size, prefix = len(data), bytearray(b"\x0a")
    while size > 0x7F:
        prefix.append(size & 0x7F | 0x80)
        size >>= 7
    prefix.append(size)
    return b"".join((prefix, data))
