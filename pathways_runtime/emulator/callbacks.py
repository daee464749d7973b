"""Host callbacks: programs here call functions in the client's process, over a session that serves nothing else.

`pathways_runtime._callbacks` is the client's side, `_callback_messages` what both say to each other.
"""

from __future__ import annotations

import itertools
import queue
import threading
import weakref
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from pathways_runtime import _callback_messages as messages
from pathways_runtime.emulator import wire
from pathways_runtime.emulator.arrays import Array, Strings
from pathways_runtime.emulator.plugin_programs import KINDS, PluginProgram
from pathways_runtime.emulator.status import StatusError

if TYPE_CHECKING:
    from pathways_runtime.emulator.engine import Engine

# By the name that the client made up, of which no other client knows. Whoever takes messages keeps it alive.
_channels: Final[weakref.WeakValueDictionary[str, Channel]] = weakref.WeakValueDictionary()


# (shape, dtype) of each result of a function; None for a token.
Returns = tuple[tuple[tuple[int, ...], np.dtype[Any]] | None, ...]


class Channel:
    """Calls on their way to one client, and their results on the way back. From any thread."""

    def __init__(self) -> None:
        self._outbox: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self._calls: dict[int, Future[Sequence[Any]]] = {}
        self._new_id = itertools.count(1).__next__
        self._lock = threading.Lock()
        self._has_ended = False

    def call(self, function: int, arguments: Sequence[Any]) -> tuple[Any, ...]:
        """What the client's function returns. RuntimeError with its stack trace, or when the client is gone."""
        result: Future[Sequence[Any]] = Future()
        with self._lock:
            if self._has_ended:
                raise RuntimeError("the client that is to be called back is gone")
            call = self._new_id()
            self._calls[call] = result
        arrays = [None if argument is None else np.asarray(argument) for argument in arguments]
        self._outbox.put(messages.pack({"kind": "call", "call": call, "function": function}, arrays))
        return tuple(result.result())

    def forget(self, function: int) -> None:
        """Tells the client that no program calls the function any more."""
        self._outbox.put(messages.pack({"kind": "forget", "function": function}))

    def take(self) -> bytes:
        """The next message for the client; nothing in it once the channel has ended. Waits for one."""
        return self._outbox.get()

    def give(self, message: bytes) -> None:
        """Takes the result of a call, or that the client wants no more. StatusError where it is neither."""
        try:
            header, arrays = messages.unpack(message)
        except ValueError as error:
            raise StatusError("INVALID_ARGUMENT", str(error)) from error
        if header.get("end"):
            self.close()
            return
        with self._lock:
            result = self._calls.pop(header.get("call", 0), None)
        if result is None:
            raise StatusError("NOT_FOUND", f"there is no call {header.get('call')} of a callback")
        if "error" in header:
            result.set_exception(RuntimeError(header["error"]))
        else:
            result.set_result(arrays)

    def close(self) -> None:
        """Fails all calls, present and to come, and ends the client's wait."""
        with self._lock:
            self._has_ended = True
            calls, self._calls = list(self._calls.values()), {}
        for call in calls:
            call.set_exception(RuntimeError("the client that is to be called back is gone"))
        self._outbox.put(b"")


class Remote:
    """A function of a client, to be called here."""

    def __init__(self, channel: Channel, function: int, returns: Returns) -> None:
        self._channel = channel
        self._function = function
        self._returns = returns
        weakref.finalize(self, channel.forget, function).atexit = False

    def __call__(self, *arguments: Any) -> tuple[Any, ...]:
        """Calls it with these numpy arrays, and waits. RuntimeError where it returns what the program cannot take."""
        results = self._channel.call(self._function, arguments)
        found = tuple(None if result is None else (result.shape, result.dtype) for result in results)
        if found != self._returns:
            raise RuntimeError(f"a callback returned {found}, where the program wants {self._returns}")
        return results


def read_functions(text: str, returns: Mapping[int, Returns]) -> list[Remote]:
    """The functions that a program's attribute names, in order; `returns` says by index what the program wants of each.

    StatusError where the attribute is malformed, names nobody, or not as many as the program calls.
    """
    name, _, functions = text.partition(":")
    channel = _channels.get(name)
    if channel is None:
        raise StatusError("NOT_FOUND", "the client that a program wants to call back is not there")
    try:
        numbers = [int(function) for function in functions.split(",")]
    except ValueError as error:
        raise StatusError("INVALID_ARGUMENT", f"the callbacks of a program are not numbers: {functions!r}") from error
    if not all(0 <= index < len(numbers) for index in returns):
        raise StatusError("INVALID_ARGUMENT", f"a program calls {sorted(returns)} of {len(numbers)} callbacks")
    return [Remote(channel, number, returns.get(index, ())) for index, number in enumerate(numbers)]


class _Message(Strings):
    """A message to a client, as a string array that is computed when there is one."""

    def __init__(self, channel: Channel) -> None:
        super().__init__([])
        self._channel = channel
        self._lock = threading.Lock()

    def part(self, index: int) -> _Message:
        """Itself: there is one device."""
        return self

    def is_ready(self) -> bool:
        """True once the message is there."""
        return bool(self.shards)

    def block_until_ready(self) -> None:
        """Waits for the message."""
        with self._lock:
            if not self.shards:
                self.shards = [(messages.as_text(self._channel.take()).encode(),)]


class Take(PluginProgram):
    """Gives the client the next message. The channel lives as long as it does."""

    def __init__(self, engine: Engine, channel: Any) -> None:
        if not isinstance(channel, str) or channel in _channels:
            raise ValueError("the name of a channel is a string that is not in use")
        where = wire.Sharding((engine.topology.devices[0].id,))
        super().__init__(engine, "callback_take", where.devices, [(wire.STRING, (1,), where)])
        self._placement = engine.placement(where, (1,))
        self._channel = _channels[channel] = Channel()
        weakref.finalize(self, self._channel.close).atexit = False

    def launch(self, arguments: Sequence[Array], kept: Sequence[int], wants_token: bool) -> tuple[list[Array], Any]:
        """([a string array], None)."""
        return [Array(_Message(self._channel), wire.STRING, (1,), self._placement, ())], None


class Give(PluginProgram):
    """Takes the client's answer: one array of bytes."""

    def __init__(self, engine: Engine, channel: Any) -> None:
        super().__init__(engine, "callback_give", (engine.topology.devices[0].id,))
        self._channel = _channels[channel]

    def launch(self, arguments: Sequence[Array], kept: Sequence[int], wants_token: bool) -> tuple[list[Array], Any]:
        """([], None)."""
        [message] = arguments
        self._channel.give(np.asarray(message.check()).tobytes())
        return [], None


KINDS[messages.TAKE] = Take
KINDS[messages.GIVE] = Give
