"""Processes of a container: started in a group of their own, reaped, and ended to the last one.

The controller is single-threaded and a child subreaper (Linux), so whatever a container leaves behind becomes the
controller's child, and whatever the controller started dies with it. Every process of a job carries `LOCAL_JOB_UID` in
its environment and is found by it; a process that erased its environment is found as a descendant.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import resource
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from pathways_runtime import _contract

if TYPE_CHECKING:
    import psutil

# Which container of the job a process belongs to: POD/CONTAINER.
LOCAL_CONTAINER = "PW_LOCAL_CONTAINER"

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None
# Python ignores SIGPIPE, and a shell's `nohup` or `&` ignores others; a container starts with the defaults.
_RESET = (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM, signal.SIGPIPE)
_FILE_LIMITS = resource.getrlimit(resource.RLIMIT_NOFILE)


def become_controller() -> None:
    """Makes this process the parent of every orphan below it, where the system can (Linux), and lets it hold as many
    pipes as hundreds of hosts need; what it starts has the limit that it had."""
    if _LIBC is not None:
        _LIBC.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    resource.setrlimit(resource.RLIMIT_NOFILE, (_FILE_LIMITS[1], _FILE_LIMITS[1]))


def spawn(
    argv: Sequence[str],
    *,
    env: Mapping[str, str],
    cwd: Path,
    stdout: int,
    stderr: int,
    pass_fds: Sequence[int] = (),
) -> subprocess.Popen[bytes]:
    """A process that leads its own session and dies with this one. Raises OSError when it cannot be started."""
    parent = os.getpid()

    def in_child() -> None:
        for number in _RESET:
            signal.signal(number, signal.SIG_DFL)
        resource.setrlimit(resource.RLIMIT_NOFILE, _FILE_LIMITS)
        if _LIBC is not None:
            _LIBC.prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
            if os.getppid() != parent:
                os._exit(1)

    # preexec_fn is safe here: the controller has one thread.
    return subprocess.Popen(
        argv,
        env=dict(env),
        cwd=cwd,
        stdin=subprocess.DEVNULL,
        stdout=stdout,
        stderr=stderr,
        pass_fds=pass_fds,
        start_new_session=True,
        preexec_fn=in_child,
    )


class Reaper:
    """Collects the exit of every child, adopted ones too. One per event loop."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._running: dict[int, tuple[subprocess.Popen[bytes], asyncio.Future[int]]] = {}
        self._someone_ended = asyncio.Event()
        self._loop.add_signal_handler(signal.SIGCHLD, self._reap)

    def watch(self, process: subprocess.Popen[bytes]) -> asyncio.Future[int]:
        """The exit code to come, 128 + N after signal N. To be called in the same step that started the process."""
        future: asyncio.Future[int] = self._loop.create_future()
        self._running[process.pid] = process, future
        return future

    def signal(self, pid: int, number: signal.Signals) -> None:
        """Sends a signal to the process group that `pid` leads, while it is watched: until then the number is its."""
        if pid in self._running:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(pid, number)

    def may_have_orphans(self) -> bool:
        """Whether there are children that were adopted; True where the system does not tell. To look costs next to
        nothing, where finding processes by their environment takes a look at each of the machine's."""
        try:
            children = Path(f"/proc/self/task/{os.getpid()}/children").read_text(encoding="ascii")
        except OSError:
            return True
        return not self._running.keys() >= set(map(int, children.split()))

    async def someone_ended(self, timeout_s: float) -> None:
        """Returns when any child has been collected, or after `timeout_s`."""
        self._someone_ended.clear()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._someone_ended.wait(), timeout_s)

    def _reap(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            self._someone_ended.set()
            if pid in self._running:
                process, future = self._running.pop(pid)
                code = os.waitstatus_to_exitcode(status)
                process.returncode = code
                if not future.done():
                    future.set_result(code if code >= 0 else 128 - code)


def of_job(uid: str, *, container: str | None = None) -> list[psutil.Process]:
    """Live processes of a job, or of one container of it, except this one.

    Those whose environment names the job, and their descendants unless theirs names another.
    """
    import psutil

    wanted = {_contract.LOCAL_JOB_UID: uid} | ({LOCAL_CONTAINER: container} if container else {})
    found: set[psutil.Process] = set()
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if wanted.items() <= process.environ().items():
                found.update((process, *_descendants(process, uid)))
    return [process for process in found if process.pid != os.getpid()]


def _descendants(process: psutil.Process, uid: str) -> Iterator[psutil.Process]:
    import psutil

    for child in process.children():
        with contextlib.suppress(psutil.Error, OSError):
            if child.environ().get(_contract.LOCAL_JOB_UID, uid) == uid:
                yield child
                yield from _descendants(child, uid)


def end(processes: Iterable[psutil.Process], number: signal.Signals) -> None:
    """Sends a signal to each that is still the process that was found."""
    import psutil

    for process in processes:
        with contextlib.suppress(psutil.Error):
            process.send_signal(number)


def wait_ended(processes: Iterable[psutil.Process], timeout_s: float) -> None:
    """Returns when all have ended, or after `timeout_s`. One that its parent has not collected yet has ended too."""
    import psutil

    if not hasattr(os, "pidfd_open"):
        psutil.wait_procs(list(processes), timeout=timeout_s)
        return
    deadline = time.monotonic() + timeout_s
    for process in processes:
        with contextlib.suppress(ProcessLookupError):
            _wait_for(os.pidfd_open(process.pid), deadline)


def _wait_for(pidfd: int, deadline: float) -> None:
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    poll.poll(max(deadline - time.monotonic(), 0) * 1000)
    os.close(pidfd)


async def kill_all(find: Callable[[], list[psutil.Process]], reaper: Reaper) -> None:
    """Kills what `find` finds until it finds nothing, so that a process that forks meanwhile does not get away."""
    while found := find():
        end(found, signal.SIGKILL)
        await reaper.someone_ended(timeout_s=0.2)
