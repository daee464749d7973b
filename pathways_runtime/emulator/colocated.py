"""Colocated Python: programs that are the client's own code, run beside the CPU devices of the hosts they name.

The code runs in a sidecar (`sidecars.py`), which takes a call's arguments and gives its results by programs of its own.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from google.protobuf.message import DecodeError

from pathways_runtime import _compat
from pathways_runtime.emulator import wire
from pathways_runtime.emulator.arrays import Array
from pathways_runtime.emulator.plugin_programs import PluginProgram
from pathways_runtime.emulator.sidecars import Sidecar
from pathways_runtime.emulator.status import StatusError

if TYPE_CHECKING:
    from pathways_runtime.emulator.engine import Engine, Placement
    from pathways_runtime.emulator.session import Session
    from pathways_runtime.emulator.slices import Stamp

_TYPE: Final = "jax_colocated_python_v0.0.1"
_new_number: Final = itertools.count(1).__next__


def compile_colocated(session: Session, program: bytes, options: bytes) -> Any:
    """A client's program, or an exchange of a sidecar. StatusError for other types, and for unreadable code."""
    try:
        message = wire.CustomCallProgram.FromString(program)
    except DecodeError as error:
        raise StatusError("INVALID_ARGUMENT", f"not a custom call program: {error}") from error
    if message.type != _TYPE:
        raise StatusError("UNIMPLEMENTED", f"custom call programs of type {message.type!r} are not supported: {_TYPE}")
    if session.sidecar is not None:
        return Exchange(session.engine, session.sidecar, message)
    return Colocated(session, message)


class CustomCall(PluginProgram):
    """What a `CustomCallProgramProto` says about its devices and outputs."""

    def __init__(self, engine: Engine, message: Any) -> None:
        devices = tuple(message.devices.device_ids)
        engine.jax_devices(devices)  # StatusError where there is no such device
        if not devices:
            raise StatusError("INVALID_ARGUMENT", "colocated Python on no devices")
        outputs = [
            (wire.read_dtype(spec.dtype), wire.read_shape(spec.shape), wire.read_sharding(spec.sharding))
            for spec in message.output_specs
        ]
        super().__init__(engine, message.name, devices, outputs)
        self._messages = list(message.output_specs)

    @property
    def outputs(self) -> list[Any]:
        """The outputs as the client described them."""
        return [wire.ExecuteOutput(dtype=it.dtype, shape=it.shape, sharding=it.sharding) for it in self._messages]


class Colocated(CustomCall):
    """A function of the client."""

    def __init__(self, session: Session, message: Any) -> None:
        super().__init__(session.engine, message)
        self._session = session
        self._number = _new_number()
        self._payload = bytes(message.serialized_program_text)
        self._slices = tuple(sorted({session.engine.slice_of[device] for device in self.devices}))
        self._sidecar()

    def _sidecar(self) -> Sidecar:
        """Where it runs: another process than before, where that has ended."""
        sidecar = self._session.sidecars.of(self.devices)
        if sidecar.load(self._number, self._payload):
            weakref.finalize(self, sidecar.unload, self._number).atexit = False
        return sidecar

    def launch(self, arguments: Sequence[Array], kept: Sequence[int], wants_token: bool) -> tuple[list[Array], Any]:
        """Starts a call, after those that the same thread of the client has made: (outputs to come, a token of it)."""
        stamp = self._engine.health.stamp(self._slices)
        for argument in arguments:
            argument.check()
        sidecar = self._sidecar()
        results = [
            Promised(dtype, shape, self._engine.placement(sharding, shape), stamp)
            for dtype, shape, sharding in self._outputs
        ]
        call = Call(self, arguments, results)
        ticket = sidecar.new_ticket()
        sidecar.calls[ticket] = call

        def finish(error: StatusError | None) -> None:
            call.finish(error)
            if error is not None or not results:
                sidecar.calls.pop(ticket, None)

        request = {"verb": "call", "program": self._number, "stream": self._session.stream}
        sidecar.ask(request, finish, ticket=ticket)
        return list(results), call


class Call:
    """One call of a function. It keeps the function alive until it has ended."""

    def __init__(self, program: Colocated, arguments: Sequence[Array], results: Sequence[Promised]) -> None:
        self._program = program
        self.arguments = arguments
        self.results = results
        self._missing = len(results)
        self._error: StatusError | None = None
        self._ended = threading.Event()

    def give(self, indices: Sequence[int], arrays: Sequence[Array]) -> bool:
        """The results of these indices are here; True when all are."""
        for index, array in zip(indices, arrays, strict=True):
            self.results[index].keep(array)
        self._missing -= len(indices)
        return self._missing == 0

    def finish(self, error: StatusError | None) -> None:
        """The function has returned, or `error` was raised."""
        self._error = error
        if error is not None:
            for result in self.results:
                result.poison(error)
        self._ended.set()

    def block_until_ready(self) -> None:
        """Returns when the function has; raises what it raised."""
        self._ended.wait()
        if self._error is not None:
            raise self._error.again()


class Exchange(CustomCall):
    """What a sidecar runs to take the arguments of a call, or to give results of it.

    Its payload is the call's ticket and, in order of its own arguments, which of the results they are.
    """

    def __init__(self, engine: Engine, sidecar: Sidecar, message: Any) -> None:
        super().__init__(engine, message)
        try:
            self._ticket, *self._indices = (int(word) for word in message.serialized_program_text.split())
        except ValueError as error:
            raise StatusError("PERMISSION_DENIED", "colocated Python cannot call colocated Python") from error
        self._sidecar = sidecar

    def launch(self, arguments: Sequence[Array], kept: Sequence[int], wants_token: bool) -> tuple[list[Array], Any]:
        """Takes where there are outputs, gives where there are arguments."""
        call = self._sidecar.calls.get(self._ticket)
        if call is None:
            raise StatusError("NOT_FOUND", f"there is no call {self._ticket}")
        if self._outputs:
            return [_copy(array) for array in call.arguments], None
        try:
            is_complete = call.give(self._indices, arguments)
        except Exception as error:
            call.finish(StatusError.of(error))
            raise
        if is_complete:
            self._sidecar.calls.pop(self._ticket, None)
        return [], None


def _copy(array: Array) -> Array:
    """Another array, which shares nothing with the first: programs on either side may donate theirs."""
    value = array.check()
    if array.dtype is not wire.STRING:
        [value] = _compat.copy_arrays([value], [array.placement.sharding], _compat.ALWAYS_COPY)
    return Array(value, array.dtype, array.shape, array.placement, array.stamp)


class Promised(Array):
    """An output of a call that has not ended."""

    __slots__ = ("_kept",)

    def __init__(self, dtype: np.dtype[Any], shape: tuple[int, ...], placement: Placement, stamp: Stamp) -> None:
        self._kept = threading.Event()
        super().__init__(_Nothing(), dtype, shape, placement, stamp)

    def keep(self, array: Array) -> None:
        """Becomes a copy of `array`. StatusError where it is not what was promised."""
        found, promised = _describe(array), _describe(self)
        if found != promised:
            raise StatusError("INVALID_ARGUMENT", f"a function returned {found}, not {promised} as it was to")
        value = _copy(array).value
        if self.error is None:
            self.value = value
        self._kept.set()

    def poison(self, error: StatusError) -> None:
        """As for any array; ends the wait for the call."""
        super().poison(error)
        self._kept.set()

    def check(self) -> Any:
        """Waits for the call."""
        self._kept.wait()
        return super().check()


class _Nothing:
    """In the place of a value that is still to come."""

    def is_ready(self) -> bool:
        """False, as long as this is the value."""
        return False

    def is_deleted(self) -> bool:
        """False: it can be waited for."""
        return False


def _describe(array: Array) -> str:
    cuts = "" if array.dtype is wire.STRING else f", cut {array.placement.indices(array.shape)}"
    return f"{array.dtype}{list(array.shape)} on devices {list(array.placement.devices)}{cuts}"
