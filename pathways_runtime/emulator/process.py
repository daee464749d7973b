"""What every process of the emulator does alike: say what happens, tell that it listens, end on a signal."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from contextlib import suppress
from types import FrameType, TracebackType
from typing import Final, Self

from pathways_runtime import _contract

# How `logging` writes the same lines, in the processes that load it.
LOG_TIME: Final = "%Y-%m-%dT%H:%M:%S"
LOG_FORMAT: Final = "%(asctime)s.%(msecs)03d %(message)s"
_STOP_SIGNALS: Final = (signal.SIGTERM, signal.SIGINT)


def say(message: str) -> None:
    """Writes one line with the time to stderr, where Pathways' containers write their logs."""
    now = time.time()
    # One write for each line: several threads and processes share this stream. What reads it may have gone.
    with suppress(OSError):
        sys.stderr.write(f"{time.strftime(LOG_TIME, time.localtime(now))}.{int(now % 1 * 1000):03d} {message}\n")
        sys.stderr.flush()


def report_ready(port: int) -> None:
    """Tells who started this process, if they asked (`_contract.READY_FD`), that it listens on `port`."""
    descriptor = os.environ.pop(_contract.READY_FD, "")
    if not descriptor:
        return
    try:
        with open(int(descriptor), "w", encoding="utf-8") as pipe:
            pipe.write(json.dumps({"port": port}) + "\n")
    except (OSError, ValueError) as error:
        say(f"{_contract.READY_FD}={descriptor!r} cannot be written to ({error}); going on")


class StopSignals:
    """SIGTERM and SIGINT as something to wait on. Only in the main thread, one at a time.

    Its file descriptor becomes readable with each of them, so that `poll` sees a signal as it sees a peer; with
    `and_children` also when a child process ends.
    """

    def __init__(self, *, and_children: bool = False) -> None:
        self._numbers = (*_STOP_SIGNALS, signal.SIGCHLD) if and_children else _STOP_SIGNALS
        self._reader, self._writer = os.pipe()
        os.set_blocking(self._writer, False)

    def __enter__(self) -> Self:
        for number in self._numbers:
            signal.signal(number, _leave_it_to_the_pipe)
        signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Goes back to what Python does with signals; also in a child that was forked meanwhile."""
        signal.set_wakeup_fd(-1)
        for number in self._numbers:
            signal.signal(number, signal.SIG_DFL)
        os.close(self._reader)
        os.close(self._writer)

    def fileno(self) -> int:
        """What `poll` watches."""
        return self._reader

    def read(self) -> signal.Signals | None:
        """Blocks until a signal comes, and returns it if it is one to stop."""
        number = os.read(self._reader, 1)[0]
        return signal.Signals(number) if number in _STOP_SIGNALS else None

    def wait(self) -> signal.Signals:
        """Blocks until a signal to stop comes, and returns it."""
        while not (received := self.read()):
            pass
        return received


def exit_code(received: signal.Signals) -> int:
    """128 + signal, never 0: Kubernetes takes a worker or head that ends with 0 for one that has finished its job."""
    return 128 + received


def _leave_it_to_the_pipe(number: int, frame: FrameType | None) -> None:
    """A handler must exist for the wake-up descriptor to be written to."""
