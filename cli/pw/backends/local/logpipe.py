"""From a container's pipes to its log file, in the format of a Kubernetes node (CRI):

    2026-11-29T13:00:00.000000000Z stdout F a whole line
    2026-11-29T13:00:00.000000000Z stderr P the first part of a long line

Bytes are kept as they came. All lines that arrive in one read carry one time.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Callable
from pathlib import Path

_LOG = logging.getLogger(__name__)

# What one `P` part holds at most, as containerd has it.
PART_SIZE_BYTES = 16 * 1024
_READ_SIZE_BYTES = 256 * 1024


def cri_time(ns: int) -> str:
    """The time of a log line, `ns` nanoseconds after the epoch."""
    seconds, fraction = divmod(ns, 1_000_000_000)
    return f"{time.strftime('%Y-%m-%dT%H:%M:%S', time.gmtime(seconds))}.{fraction:09d}Z"


class LogFile:
    """The log of one container, appended to over its restarts. `before` and `after` are called around each write."""

    def __init__(self, path: Path, *, before: Callable[[], None], after: Callable[[], None]) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("ab", buffering=0)
        self._before = before
        self._after = after
        self._lost_bytes = 0
        self._torn = False

    def write(self, data: bytes) -> None:
        """Appends whole lines. On a full disk they are dropped and counted; the job goes on."""
        self._before()
        if self._torn:
            data = b"\n" + data
        try:
            written = self._file.write(data)
        except OSError as exc:
            self._drop(data, exc)
            return
        if written:
            self._torn = data[written - 1 : written] != b"\n"
        if written < len(data):
            self._drop(data[written:], None)
        self._after()

    def _drop(self, data: bytes, exc: OSError | None) -> None:
        if not self._lost_bytes:
            _LOG.error("%s: output is being dropped: %s", self._file.name, exc or "short write")
        self._lost_bytes += len(data)

    def note(self, text: str) -> None:
        """A line of the controller's own, on stderr."""
        self.write(f"{cri_time(time.time_ns())} stderr F {text}\n".encode())

    def close(self) -> None:
        self._file.close()


class Pump:
    """Moves one pipe into a log file while the event loop runs."""

    def __init__(self, log: LogFile, stream: str) -> None:
        self._log = log
        self._stream = stream.encode()
        self._rest = b""
        self._loop = asyncio.get_running_loop()
        self._read_fd, self.write_fd = os.pipe()
        os.set_blocking(self._read_fd, False)
        self._open = True
        self._loop.add_reader(self._read_fd, self._step)

    def finish(self) -> None:
        """Takes what is still in the pipe and closes it. To be called when none of the container's processes lives,
        so that nothing more can come; one that escaped and holds the pipe open is not waited for."""
        while self._open and self._step():
            pass
        self._close()

    def _step(self) -> bool:
        try:
            chunk = os.read(self._read_fd, _READ_SIZE_BYTES)
        except BlockingIOError:
            return False
        if not chunk:
            self._close()
            return False
        self._take(chunk)
        return True

    def _take(self, chunk: bytes) -> None:
        prefix = self._prefix(b"F")
        lines, newline, rest = (self._rest + chunk).rpartition(b"\n")
        self._rest = rest
        out = b""
        if newline:
            out = prefix + lines.replace(b"\n", b"\n" + prefix) + b"\n"
        while len(self._rest) >= PART_SIZE_BYTES:
            out += self._prefix(b"P") + self._rest[:PART_SIZE_BYTES] + b"\n"
            self._rest = self._rest[PART_SIZE_BYTES:]
        if out:
            self._log.write(out)

    def _prefix(self, tag: bytes) -> bytes:
        return b"%s %s %s " % (cri_time(time.time_ns()).encode(), self._stream, tag)

    def _close(self) -> None:
        if self._open:
            self._open = False
            self._loop.remove_reader(self._read_fd)
            os.close(self._read_fd)
            if self._rest:
                self._log.write(self._prefix(b"F") + self._rest + b"\n")
                self._rest = b""
