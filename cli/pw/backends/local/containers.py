"""One container: its process, its output, when it is ready, and its end."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any

from pathways_runtime import _contract
from pw.backends.local import images, logfiles, processes
from pw.backends.local.jobs import Backoff
from pw.backends.local.jobset import PodKey
from pw.backends.local.logpipe import LogFile, Pump
from pw.backends.local.ports import Ports
from pw.backends.local.processes import Reaper
from pw.backends.local.state import JobDir, now
from pw.faults import CRASH, HANG

if TYPE_CHECKING:
    import psutil

# What containerd reports for a command that could not be executed.
START_ERROR_CODE = 128
# Why a container or pod ended that the controller told to, and the phase of such a pod: a cluster deletes those.
STOPPED = "Stopped"
# Its reason where it could not be executed.
START_ERROR = "StartError"


@dataclass(frozen=True, slots=True)
class Host:
    """What the containers of a job share.

    `changed` is told of each change of state, and `refused` of an emulated container that ended because of its flags,
    which no restart can mend; `flush` has all of them written, so that nobody reads output of a
    container that has not started; `ring` tells watchers of new output. `turn` lets one start at a time.
    """

    job: JobDir
    machine: images.Machine
    ports: Ports
    reaper: Reaper
    backoff: Backoff
    changed: Callable[[PodKey], None]
    refused: Callable[[PodKey, Container], None]
    flush: Callable[[], None]
    ring: Callable[[], None]
    turn: asyncio.Lock


class Container:
    """A container of one pod over all its restarts. `run` once for each; `ready` is an event while it runs. `fault`
    is the kind that it has now, `last_line` what it said last when it failed, `note` what its log gets next."""

    def __init__(self, spec: Mapping[str, Any], key: PodKey, meta: images.Meta, host: Host) -> None:
        self.name: str = spec["name"]
        self.emulated = images.is_emulated(spec)
        self.state = "waiting"
        self.reason = ""
        self.restarts = 0
        self.exit_code: int | None = None
        self.started: datetime | None = None
        self.finished: datetime | None = None
        self.fault = ""
        self.last_line = ""
        self.note = ""
        self.ready = asyncio.Event()
        self.stopping = asyncio.Event()
        self._spec = spec
        self._key = key
        self._meta = meta
        self._host = host
        self._pid: int | None = None
        self._hangs_until: asyncio.TimerHandle | None = None

    async def run(self) -> int:
        """Runs the command once and returns its exit code when all it started is gone and its output is written."""
        path = self._host.job.log_file(self._meta["name"], self.name)
        log = LogFile(path, before=self._host.flush, after=self._host.ring)
        if self.note:
            log.note(self.note)
            self.note = ""
        out, err = Pump(log, "stdout"), Pump(log, "stderr")
        try:
            code, reason = await self._execute(out, err, log)
        finally:
            out.finish()
            err.finish()
            log.close()
        self.last_line = logfiles.last_line(path) if code else ""
        self.ended(code, reason or (STOPPED if code and self.stopping.is_set() else ""))
        return code

    def ended(self, code: int, reason: str = "") -> None:
        """Records an exit. `reason` defaults to what Kubernetes says of the code."""
        self.state, self.exit_code = "terminated", code
        self.reason = reason or ("Completed" if code == 0 else "Error")
        self._host.changed(self._key)

    def waits(self, reason: str) -> None:
        """Records that it will start again later."""
        self.state, self.reason = "waiting", reason
        self._host.changed(self._key)

    def terminate(self) -> None:
        """Sends SIGTERM to its processes; it does not start again."""
        self.stopping.set()
        self._signal(signal.SIGTERM)
        self.resume()

    def kill(self) -> None:
        """Sends SIGKILL to its processes; it does not start again."""
        self.stopping.set()
        self._signal(signal.SIGKILL)

    def crash(self) -> None:
        """Sends SIGKILL to its processes; what comes then is its pod's policy."""
        self._begin_fault(CRASH, signal.SIGKILL)

    def hang(self, for_s: float | None) -> None:
        """Stops its processes where they are, until `resume`, which comes by itself after `for_s`, or their end."""
        self._begin_fault(HANG, signal.SIGSTOP)
        if for_s is not None and self.fault:
            self._hangs_until = asyncio.get_running_loop().call_later(for_s, self.resume)

    def resume(self) -> None:
        """Lets processes that hang go on."""
        if self.fault == HANG:
            self._end_fault()
            self._signal(signal.SIGCONT)
            self._host.changed(self._key)

    def _begin_fault(self, kind: str, number: signal.Signals) -> None:
        if self._pid is not None and not self.stopping.is_set():
            self._end_fault()
            self.fault = kind
            self._signal(number)
            self._host.changed(self._key)

    def _end_fault(self) -> None:
        self.fault = ""
        if self._hangs_until is not None:
            self._hangs_until.cancel()
            self._hangs_until = None

    def _signal(self, number: signal.Signals) -> None:
        if self._pid is not None:
            self._host.reaper.signal(self._pid, number)

    async def _execute(self, out: Pump, err: Pump, log: LogFile) -> tuple[int, str]:
        port = self._host.ports.to_listen_on(self._key, self.name)
        launch = images.launch(
            self._spec, self._meta, self._host.machine, localise=self._host.ports.localise, port=port
        )
        with _Readiness(self._listens) as readiness:
            try:
                process = self._spawn(launch, out, err, readiness)
            except (OSError, ValueError) as exc:
                log.note(f"cannot start {launch.argv[0]!r}: {exc}")
                self.started = self.finished = now()
                return START_ERROR_CODE, START_ERROR
            finally:
                os.close(out.write_fd)
                os.close(err.write_fd)
                readiness.started()
            return await self._until_gone(process), ""

    def _spawn(self, launch: images.Launch, out: Pump, err: Pump, readiness: _Readiness) -> subprocess.Popen[bytes]:
        marks = {
            _contract.LOCAL_JOB_UID: self._host.machine.uid,
            processes.LOCAL_CONTAINER: f"{self._meta['name']}/{self.name}",
        }
        if self.emulated:
            marks[_contract.READY_FD] = str(readiness.write_fd)
        process = processes.spawn(
            launch.argv,
            env={**launch.env, **marks},
            cwd=launch.cwd,
            stdout=out.write_fd,
            stderr=err.write_fd,
            pass_fds=(readiness.write_fd,) if self.emulated else (),
        )
        if not self.emulated:
            self.ready.set()
        return process

    async def _until_gone(self, process: subprocess.Popen[bytes]) -> int:
        exited = self._host.reaper.watch(process)
        self._pid = process.pid
        self.state, self.reason, self.started, self.finished = "running", "", now(), None
        self._host.changed(self._key)
        code = await exited
        self._pid = None
        self._end_fault()
        if not self.ready.is_set():
            self._host.ports.forget(self._key, self.name)
        self.ready.clear()
        self.finished = now()
        if self._host.reaper.may_have_orphans():
            await processes.kill_all(self._strays, self._host.reaper)
        return code

    def _strays(self) -> list[psutil.Process]:
        return processes.of_job(self._host.machine.uid, container=f"{self._meta['name']}/{self.name}")

    def _listens(self, port: int) -> None:
        self._host.ports.listens(self._key, self.name, port)
        self.ready.set()
        self._host.changed(self._key)


class _Readiness:
    """The pipe on which an emulator process says that it listens; see `READY_FD`."""

    def __init__(self, listens: Callable[[int], None]) -> None:
        self._listens = listens
        self._loop = asyncio.get_running_loop()
        self._line = b""

    def __enter__(self) -> _Readiness:
        self._read_fd, self.write_fd = os.pipe()
        os.set_blocking(self._read_fd, False)
        self._loop.add_reader(self._read_fd, self._step)
        return self

    def __exit__(self, *exc: object) -> None:
        self._loop.remove_reader(self._read_fd)
        os.close(self._read_fd)

    def started(self) -> None:
        """The process has its own copy of the writing end, or there is none."""
        os.close(self.write_fd)

    def _step(self) -> None:
        chunk = os.read(self._read_fd, 4096)
        self._line += chunk
        if not chunk or b"\n" in self._line:
            self._loop.remove_reader(self._read_fd)
            with contextlib.suppress(ValueError, KeyError, TypeError):
                self._listens(int(json.loads(self._line)["port"]))
