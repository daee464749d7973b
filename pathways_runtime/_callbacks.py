"""Host callbacks through the emulator: `jax.debug.print`, `jax.pure_callback`, `io_callback`.

JAX's proxy client refuses programs that call back into its process. So they are sent without their callbacks, and name
them in an attribute instead. The emulator asks for each call over a second session of this process, which does nothing
else: the first may be waiting for the very program that calls.
"""

from __future__ import annotations

import atexit
import itertools
import json
import logging
import secrets
import threading
import traceback
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from pathways_runtime import _callback_messages as messages
from pathways_runtime import _compat

if TYPE_CHECKING:
    from jaxlib import _jax

_logger: Final = logging.getLogger("pathways_runtime")

# How an emulator names itself in `platform_version`. Pathways itself has no such way back.
_EMULATOR: Final = "pathways_runtime emulator"
_END_S: Final = 5


def install(connect: Callable[[], _jax.Client]) -> None:
    """Has every later compile for the emulator offer its callbacks. `connect` makes a further session."""
    callbacks = Callbacks(connect)
    _compat.route_callbacks(_is_emulator, callbacks.offer)
    atexit.register(callbacks.close)


def _is_emulator(client: _jax.Client) -> bool:
    return str(client.platform_version).startswith(_EMULATOR)


class Callbacks:
    """The functions that programs may call, and the session over which they do, made when the first is offered."""

    def __init__(self, connect: Callable[[], _jax.Client]) -> None:
        self._connect = connect
        self._functions: dict[int, Callable[..., Any]] = {}
        self._new_id = itertools.count(1).__next__
        self._lock = threading.Lock()
        self._session: _Session | None = None

    def offer(self, functions: Sequence[Callable[..., Any]]) -> str:
        """Keeps the functions until no program needs them; returns what the program is to say of them."""
        with self._lock:
            if self._session is None or not self._session.is_alive():
                self._session = _Session(self._connect(), self._receive)
            name = self._session.name
        ids = [self._new_id() for _ in functions]
        self._functions.update(zip(ids, functions, strict=True))
        return f"{name}:{','.join(map(str, ids))}"

    def close(self) -> None:
        """Ends the session, if there is one."""
        with self._lock:
            if self._session is not None:
                self._session.close()

    def _receive(self, session: _Session, message: bytes) -> None:
        header, arguments = messages.unpack(message)
        if header["kind"] == "forget":
            self._functions.pop(header["function"], None)
        else:
            # A thread for each: calls from several devices may wait for one another.
            threading.Thread(target=self._answer, args=(session, header, arguments), daemon=True).start()

    def _answer(self, session: _Session, header: dict[str, Any], arguments: Sequence[Any]) -> None:
        try:
            results = self._functions[header["function"]](*arguments)
            answer = messages.pack({"call": header["call"]}, [None if r is None else np.asarray(r) for r in results])
        except BaseException:
            answer = messages.pack({"call": header["call"], "error": traceback.format_exc()})
        session.give(answer)


class _Session:
    """A session with the emulator over which it asks for calls and is given their results."""

    def __init__(self, client: _jax.Client, receive: Callable[[_Session, bytes], None]) -> None:
        self.name = secrets.token_hex(16)
        self._receive = receive
        self._take = _compat.PluginProgram(client, json.dumps({messages.TAKE: self.name}))
        self._give = _compat.PluginProgram(client, json.dumps({messages.GIVE: self.name}))
        self._thread = threading.Thread(target=self._serve, name="pathways-callbacks", daemon=True)
        self._thread.start()

    def is_alive(self) -> bool:
        """Whether calls still come in."""
        return self._thread.is_alive()

    def give(self, message: bytes) -> None:
        """Sends the result of a call."""
        self._give.send(np.frombuffer(message, np.uint8))

    def close(self) -> None:
        """Has the emulator send no more."""
        if self.is_alive():
            self.give(messages.pack({"end": True}))
            self._thread.join(_END_S)

    def _serve(self) -> None:
        try:
            while text := self._take.receive():
                self._receive(self, messages.of_text(text))
        except Exception as error:
            _logger.warning("host callbacks have ended: %s", error)
        finally:
            del self._take  # the emulator then lets go of calls that nobody answers
