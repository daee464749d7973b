"""One client's session: requests in, one at a time and in order; responses out."""

from __future__ import annotations

import itertools
import logging
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, Protocol

from google.protobuf.message import DecodeError

from pathways_runtime.emulator import wire
from pathways_runtime.emulator.arrays import Array, ArrayTable
from pathways_runtime.emulator.engine import Engine, describe_cpu_devices
from pathways_runtime.emulator.handlers import TABLE, Entry, Later, handles
from pathways_runtime.emulator.host_buffers import HostBuffers
from pathways_runtime.emulator.sidecars import Sidecar, Sidecars
from pathways_runtime.emulator.status import StatusError
from pathways_runtime.emulator.transfers import DELETION

_log: Final = logging.getLogger(__name__)

# The client numbers its handles from 1 and leaves those from here on to the server.
_FIRST_HANDLE: Final = 1 << 62
_POOL_SIZE: Final = 16
_NO_NUMBER: Final = 1 << 62


class Send(Protocol):
    """Sends a serialized response; without `flush` at the latest with the next that is flushed."""

    def __call__(self, response: bytes, *, flush: bool) -> None: ...


class MalformedError(Exception):
    """Bytes that are no request: nothing can be answered, the session must end."""


class Session:
    """`receive` must be called from one thread. `send` is called from any, with a serialized response.

    What `receive` answers itself is sent with `flush=False`: the caller knows whether more answers follow at once.
    `session_id` is its number in logs. `secret_id` is what the client calls it by, and must not be guessed: who knows
    it can read and write the session's host buffers. `sidecar` is the client, where that runs colocated Python.
    """

    def __init__(
        self, engine: Engine, session_id: int, secret_id: int, send: Send, sidecar: Sidecar | None = None
    ) -> None:
        self.engine = engine
        self.id = session_id
        self.secret_id = secret_id
        self.arrays = ArrayTable(engine.health)
        self.programs: dict[int, Any] = {}
        self.futures: dict[int, Callable[[], None] | None] = {}
        self.results: dict[int, Any] = {}
        self.host_buffers = HostBuffers()
        self.sidecar = sidecar
        self.sidecars = Sidecars(engine)
        # The client's thread that the execution in hand comes from.
        self.stream = 0
        self.new_handle = itertools.count(_FIRST_HANDLE).__next__
        self._send = send
        self._pool = ThreadPoolExecutor(_POOL_SIZE, thread_name_prefix=f"session-{session_id}")
        self._responses = _Responses()

    def receive(self, raw: bytes) -> bool:
        """Answers one serialized request, or has the pool answer it. MalformedError when it is none.

        True where the client may be waiting for an answer that was not flushed.
        """
        try:
            request = wire.Request.FromString(raw)
        except DecodeError as error:
            raise MalformedError(f"not a request of the IFRT protocol: {error}") from error
        metadata = request.request_metadata
        kind = request.WhichOneof("request")
        entry = TABLE.get(kind)
        if entry is None:
            unknown = StatusError("UNIMPLEMENTED", f"request {kind!r} is not supported by this server")
            self._answer_error(metadata.op_id, metadata.user_context_id, unknown)
            return False
        body = getattr(request, kind)
        reply = wire.Response()
        try:
            later = entry.handler(self, body, getattr(reply, entry.reply_field))
        except Exception as error:
            self._fail(entry, body, metadata, error)
            return False
        if later is not None:
            self._pool.submit(self._finish, entry, body, metadata, reply, later)
            return False
        self._answer(entry, body, metadata, reply, flush=False)
        # The first execution of a program is the one whose outputs the server names.
        return entry.awaited and not (entry.name == "loaded_executable_execute" and body.result_array_handle)

    def handles_for(self, given: Sequence[int], count: int) -> Sequence[int]:
        """The client's handles for `count` new arrays, or new ones where it gave none."""
        if not given:
            return [self.new_handle() for _ in range(count)]
        if len(given) != count:
            raise StatusError("INVALID_ARGUMENT", f"{len(given)} handles for {count} arrays")
        return given

    def hang_up(self) -> None:
        """Ends the waits for a client that is gone. From any thread."""
        self.host_buffers.close()
        self.sidecars.close()

    def close(self) -> None:
        """Lets go of all that the session holds, and ends its waits."""
        self.hang_up()
        self._pool.shutdown(wait=False, cancel_futures=True)
        self.arrays.clear()
        self.programs.clear()
        self.futures.clear()
        self.results.clear()

    def _finish(self, entry: Entry, body: Any, metadata: Any, reply: Any, later: Later) -> None:
        try:
            later(getattr(reply, entry.reply_field))
        except Exception as error:
            self._fail(entry, body, metadata, error)
        else:
            self._answer(entry, body, metadata, reply)

    def _fail(self, entry: Entry, body: Any, metadata: Any, error: Exception) -> None:
        status = StatusError.of(error)
        if not isinstance(error, StatusError):
            _log.info("session %d: %s failed", self.id, entry.name, exc_info=error)
        for field in entry.results:
            value = getattr(body, field)
            self.arrays.poison([value] if isinstance(value, int) else value, status)
        self._answer_error(metadata.op_id, metadata.user_context_id, status)

    def _answer(self, entry: Entry, body: Any, metadata: Any, reply: Any, *, flush: bool = True) -> None:
        getattr(reply, entry.reply_field).SetInParent()
        reply.response_metadata.op_id = metadata.op_id
        reply.response_metadata.status.SetInParent()
        numbered = entry.numbered and not (entry.name == "check_future" and body.future_handle & DELETION)
        if wire.NUMBERS_RESPONSES:
            if numbered:
                self._responses.number(reply.response_metadata, metadata.user_context_id)
            else:
                reply.response_metadata.seq_num = _NO_NUMBER
        self._send(reply.SerializeToString(), flush=flush)

    def _answer_error(self, op_id: int, user_context: int, error: StatusError) -> None:
        reply = wire.Response()
        reply.response_metadata.op_id = op_id
        wire.write_status(reply.response_metadata.status, error)
        self._responses.release_later(user_context)
        self._send(reply.SerializeToString(), flush=True)


class _Responses:
    """The sequence of responses, and the user contexts that the client may forget with each.

    The client keeps the stack trace of each request until a numbered response names it, and it and all before it are
    done with. A gap in the numbers makes it keep all for ever, and so does a response that it never lets go of: that to
    Init. Neither that one nor those to background requests have a number.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._next = 0
        self._unreleased: list[int] = []

    def number(self, metadata: Any, user_context: int) -> None:
        """Gives a response its number, with which `user_context` and those of failed requests are released."""
        released = metadata.destroyed_user_context_ids
        if user_context:
            released.append(user_context)
        with self._lock:
            metadata.seq_num = self._next
            self._next += 1
            if self._unreleased:
                released.extend(self._unreleased)
                self._unreleased.clear()

    def release_later(self, user_context: int) -> None:
        """Has the next numbered response release the user context of a request that failed."""
        if user_context:
            with self._lock:
                self._unreleased.append(user_context)


@handles("init", numbered=False)
def _init(session: Session, request: Any, reply: Any) -> None:
    engine, sidecar = session.engine, session.sidecar
    if sidecar is None:
        reply.CopyFrom(engine.init_response)
    else:
        reply.CopyFrom(describe_cpu_devices(engine.topology, sidecar.devices))
    reply.session_id = session.secret_id


@handles("check_future")
def _check_future(session: Session, request: Any, reply: Any) -> Later | None:
    handle = request.future_handle
    if handle & DELETION:
        return None
    if handle not in session.futures:
        raise StatusError("NOT_FOUND", f"there is no future {handle}")
    wait = session.futures.pop(handle)
    return None if wait is None else lambda reply: wait()


@handles("check_value_ready")
def _check_value_ready(session: Session, request: Any, reply: Any) -> Later | None:
    arrays: list[Array] = [session.arrays[handle] for handle in request.value_handles]
    for array in arrays:
        if array.is_ready():
            array.check()
    if all(array.is_ready() for array in arrays):
        return None

    def wait(reply: Any) -> None:
        for array in arrays:
            array.wait()

    return wait


@handles("get_default_device_assignment")
def _get_default_device_assignment(session: Session, request: Any, reply: Any) -> None:
    ids = [device.id for device in session.engine.topology.devices]
    replicas, partitions = request.num_replicas, request.num_partitions
    if not 0 < replicas * partitions <= len(ids):
        raise StatusError("INVALID_ARGUMENT", f"{replicas} replicas x {partitions} partitions on {len(ids)} devices")
    reply.device_assignment.replica_count = replicas
    reply.device_assignment.computation_count = partitions
    for partition in range(partitions):
        of_partition = ids[partition : replicas * partitions : partitions]
        reply.device_assignment.computation_devices.add(replica_device_ids=of_partition)
