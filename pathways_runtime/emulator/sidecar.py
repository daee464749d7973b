"""Runs a client's colocated Python: `python -m pathways_runtime.emulator.sidecar FD`, by `sidecars.py` only.

It is a JAX client of the proxy server like any other, whose devices are the CPU devices of its hosts. Arguments and
results stay in the server: they change hands by programs that the server knows what to do with (`colocated.py`).
What it is told comes over the socket FD: JSON, then a payload.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import sys
import threading
import traceback
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from multiprocessing.connection import Connection
from typing import Any, Final

from pathways_runtime import _compat, initialize

# Threads of the client that are remembered: calls of each run in order, and beside those of the others.
_MAX_STREAMS: Final = 64


class Sidecar:
    """The programs that it was given, and the threads that run them."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._sending = threading.Lock()
        self._programs: dict[int, Any] = {}
        self._streams: OrderedDict[int, ThreadPoolExecutor] = OrderedDict()
        self._running: set[Future[None]] = set()
        self._unloader = ThreadPoolExecutor(1, thread_name_prefix="unload")

    def serve(self) -> None:
        """Answers until the server is gone. EOFError then."""
        while True:
            request = json.loads(self._connection.recv_bytes())
            payload = self._connection.recv_bytes()
            if request["verb"] == "unload":
                # What was asked before may need what the program keeps alive: an object that another one uses.
                self._unloader.submit(self._unload, request["program"], list(self._running))
                continue
            answer = self._stream(request.get("stream", 0)).submit(self._answer, request, payload)
            self._running.add(answer)
            answer.add_done_callback(self._running.discard)

    def _stream(self, number: int) -> ThreadPoolExecutor:
        stream = self._streams.pop(number, None) or ThreadPoolExecutor(1, thread_name_prefix=f"colocated-{number:x}")
        self._streams[number] = stream
        if len(self._streams) > _MAX_STREAMS:
            _, oldest = self._streams.popitem(last=False)
            oldest.shutdown(wait=False)
        return stream

    def _answer(self, request: dict[str, Any], payload: bytes) -> None:
        error = None
        try:
            getattr(self, f"_{request['verb']}")(request, payload)
        except BaseException as failure:
            error = _describe(failure)
        with self._sending:
            self._connection.send_bytes(json.dumps({"ticket": request["ticket"], "error": error}).encode())

    def _load(self, request: dict[str, Any], payload: bytes) -> None:
        try:
            self._programs[request["program"]] = _compat.ColocatedFunction(payload)
        except Exception as error:
            version = f"Python {platform.python_version()} with jax {_compat.JAX_VERSION}"
            message = (
                f"{version} cannot read the function; the client must have the same: {type(error).__name__}: {error}"
            )
            raise RuntimeError(message) from error

    def _unload(self, program: int, before: Sequence[Future[None]]) -> None:
        wait(before)
        self._programs.pop(program, None)

    def _call(self, request: dict[str, Any], payload: bytes) -> None:
        function = self._programs[request["program"]]
        ticket = str(request["ticket"])
        _compat.give_arrays(ticket, function(_compat.take_arrays(ticket, function)))


def _describe(failure: BaseException) -> str:
    """The error as the client is to read it: what it is first, then where in the client's code."""
    what = "".join(traceback.format_exception_only(failure)).strip()
    own = [frame for frame in traceback.extract_tb(failure.__traceback__) if frame.filename != __file__]
    return f"{what}\n\n{''.join(traceback.format_list(own))}".strip()


def main(arguments: Sequence[str]) -> int:
    """Runs until the server is gone."""
    connection = Connection(int(arguments[0]))
    initialize()
    with contextlib.suppress(EOFError, OSError):
        Sidecar(connection).serve()
    os._exit(0)  # whatever the client's code still does


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
