"""The service of the IFRT proxy protocol, and the sessions behind it.

It listens before jax is imported: a client's own start overlaps with that of the engine, and its first call waits.
Messages pass as bytes; `session.py` and `wire.py` know what they mean.
"""

from __future__ import annotations

import hmac
import itertools
import logging
import secrets
import sys
import threading
from concurrent.futures import Future
from types import ModuleType
from typing import TYPE_CHECKING, Any, Final

from pathways_runtime import _contract
from pathways_runtime.emulator.grpc_calls import (
    Call,
    Listener,
    Unary,
)
from pathways_runtime.emulator.http2_output import Receiver
from pathways_runtime.emulator.receivers import (
    CHUNK_BYTES,
    RefusedReceiver,
    SessionReceiver,
    StoreReceiver,
    field_header,
    send_data,
)
from pathways_runtime.emulator.slices import Slices, Topology
from pathways_runtime.emulator.status import StatusError

if TYPE_CHECKING:
    from pathways_runtime.emulator.engine import Engine
    from pathways_runtime.emulator.session import Session
    from pathways_runtime.emulator.sidecars import Sidecar

_log: Final = logging.getLogger(__name__)

_SERVICE: Final = "/xla.ifrt.proxy.GrpcIfrtService/"
_SESSION_METADATA: Final = "ifrt-proxy-grpc-ifrt-session-metadata-bin"
_STORE_METADATA: Final = "ifrt-proxy-grpc-host-buffer-store-metadata-bin"
_MAX_SESSIONS: Final = 2048
_SECRET_BITS: Final = 63
# Where this machine reaches what listens on all its addresses.
_LOOPBACKS: Final = {"0.0.0.0": "127.0.0.1", "::": "[::1]", "": "127.0.0.1"}
_SWITCH_INTERVAL_S: Final = 0.0005


def start_server(
    *,
    topology: Topology,
    slices: Slices,
    host: str = "127.0.0.1",
    port: int = 0,
    platform: str = "cpu",
    token: str = "",
) -> Server:
    """A server that listens, on `Server.port` where `port` is 0.

    Clients are answered once jax has started and every slice of `topology` has been up.

    `platform` is `device.platform` in the client. With a `token`, a session needs it in its initialization data, and
    all else needs the id of a session. OSError where the port is taken. One server in a process, since jax has one set
    of CPU devices.
    """
    return Server(topology, slices, host, port, platform, token)


class Server:
    """See `start_server`."""

    def __init__(self, topology: Topology, slices: Slices, host: str, port: int, platform: str, token: str) -> None:
        # A thread that has waited for the network takes its turn soon, while others compute.
        sys.setswitchinterval(_SWITCH_INTERVAL_S)
        self._core: Future[Core] = Future()
        self._listener = Listener(host, port, _Service(self._core, token).methods)
        self.port = self._listener.port
        # Sidecars are on this machine.
        target = f"grpc://{_LOOPBACKS.get(host, host)}:{self.port}"
        starter = threading.Thread(target=self._start_core, args=(topology, slices, platform, target), daemon=True)
        starter.start()

    def wait(self) -> None:
        """Returns once the server has stopped. Raises what kept the engine from starting."""
        self._core.result()
        self._listener.join()

    def stop(self) -> None:
        """Ends all sessions and stops listening."""
        self._listener.close()

    def _start_core(self, topology: Topology, slices: Slices, platform: str, target: str) -> None:
        try:
            core = Core(topology, slices, platform)
            core.engine.target = target
        except BaseException as error:
            _log.critical("the engine did not start", exc_info=error)
            self._core.set_exception(error)
        else:
            _log.info("%d devices on %d slices, platform %s", len(topology.devices), topology.num_slices, platform)
            # The head of a job starts before its workers; a client that came in now would find all slices lost.
            slices.wait_started(range(topology.num_slices), timeout_s=None)
            self._core.set_result(core)


class Core:
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

    def open(self, call: Call, sidecar: Sidecar | None) -> Session:
        """A new session that answers through `call`. `sidecar` is its client, where that runs colocated Python."""
        if len(self.sessions) >= _MAX_SESSIONS:
            raise StatusError("RESOURCE_EXHAUSTED", f"there are {_MAX_SESSIONS} sessions already")
        secret_id = secrets.randbits(_SECRET_BITS)
        session: Session = self.session_module.Session(self.engine, self._new_id(), secret_id, call.send, sidecar)
        self.sessions[secret_id] = session
        return session

    def close(self, session: Session) -> None:
        """Lets go of a session and all that it holds."""
        self.sessions.pop(session.secret_id, None)
        session.close()

    def session(self, secret_id: int) -> Session:
        """The session of this id. StatusError where there is none."""
        session = self.sessions.get(secret_id)
        if session is None:
            raise StatusError("NOT_FOUND", "there is no session with this id")
        return session

    def parse(self, message: Any, raw: bytes) -> Any:
        """A message of that class. StatusError for bytes that are none."""
        try:
            return message.FromString(raw)
        except Exception as error:
            raise StatusError("INVALID_ARGUMENT", f"not a {message.DESCRIPTOR.name}: {error}") from error


class _Service:
    """The protocol's methods. Each waits for the engine."""

    def __init__(self, core: Future[Core], token: str) -> None:
        self._future = core
        self._token = token.encode()
        self.methods = {
            _SERVICE + "GetVersion": lambda call: Unary(call, self._get_version),
            _SERVICE + "IfrtSession": self._session,
            _SERVICE + "HostBufferStore": self._store,
            _SERVICE + "HostBufferLookup": self._lookup,
            _SERVICE + "HostBufferDelete": lambda call: Unary(call, self._delete),
        }

    @property
    def _core(self) -> Core:
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
        core = self._core
        metadata = core.parse(core.wire.SessionMetadata, call.metadata(_SESSION_METADATA) or b"")
        said = core.wire.read_token(metadata)
        sidecar = core.engine.sidecars.get(said)
        if self._token and sidecar is None and not hmac.compare_digest(said, self._token):
            problem = "has the wrong token" if said else "has no token"
            message = f"this server asks for a token, and the client {problem}: set {_contract.PROXY_TOKEN} to it"
            return RefusedReceiver(core, call, StatusError("UNAUTHENTICATED", message))
        receiver = SessionReceiver(core, call, sidecar)
        call.trust()
        receiver.start()
        return receiver

    def _store(self, call: Call) -> Receiver:
        core = self._core
        metadata = core.parse(core.wire.StoreMetadata, call.metadata(_STORE_METADATA) or b"")
        session = core.session(metadata.session_id)
        call.trust()
        return StoreReceiver(core, call, session, metadata.handle, metadata.buffer_size)

    def _lookup(self, call: Call) -> Receiver:
        def respond(raw: bytes) -> bytes:
            core = self._core
            request = core.parse(core.wire.LookupRequest, raw)
            data = memoryview(core.session(request.session_id).host_buffers.get(request.handle))
            call.trust()
            last = max(len(data) - 1, 0) // CHUNK_BYTES * CHUNK_BYTES
            for offset in range(0, last, CHUNK_BYTES):
                send_data(call, data[offset : offset + CHUNK_BYTES])
            # Even an empty buffer is one message.
            return field_header(len(data) - last) + bytes(data[last:])

        return Unary(call, respond)

    def _delete(self, raw: bytes) -> bytes:
        core = self._core
        request = core.parse(core.wire.DeleteRequest, raw)
        core.session(request.session_id).host_buffers.delete(request.handle)
        return b""
