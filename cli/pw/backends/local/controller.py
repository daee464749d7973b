"""The process that runs one job: `python -m pw.backends.local.controller JOB_DIR LOCK_FD REPORT_FD`.

`submit` starts it. It detaches, keeps the lock that it inherits, and lives as long as the job. It decides nothing by
itself: what happens to pods goes to the `jobset` machine, and the actions that come back are carried out.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import sys
from collections.abc import Coroutine, Iterable
from pathlib import Path
from typing import Any

from pw.backends.local import causes, inbox, processes
from pw.backends.local.containers import Container, Host
from pw.backends.local.events import Bell
from pw.backends.local.images import Machine
from pw.backends.local.jobs import Backoff
from pw.backends.local.jobset import Action, Finish, JobSet, PodKey, Restart, StartPod
from pw.backends.local.metadata import Names
from pw.backends.local.pods import Pod
from pw.backends.local.ports import Ports
from pw.backends.local.processes import Reaper
from pw.backends.local.record import Record
from pw.backends.local.state import JobDir
from pw.faults import Fault, refusal
from pw.status import JobState

_LOG = logging.getLogger(__name__)


class Controller:
    """Runs the job of one folder to its end."""

    def __init__(self, job: JobDir) -> None:
        static, manifest = job.job(), job.manifest()
        self._job = job
        self._uid: str = static["uid"]
        self._shell = Machine(static["python"], Path(static["cwd"]), static["env"], job.path.absolute(), self._uid)
        self._names = Names(manifest)
        self._backoff = Backoff(static["backoff_base_s"], static["backoff_cap_s"])
        self._jobset = JobSet(manifest, backoff=self._backoff)
        self._bell = Bell(self._uid, self._take_faults)
        self._record = Record(job, self._jobset, self._names, written=self._bell.ring)
        self._tasks: dict[PodKey, asyncio.Task[None]] = {}
        self._background: set[asyncio.Task[None]] = set()
        self._told: dict[PodKey, tuple[bool, int]] = {}
        self._note = ""
        self._end: asyncio.Future[tuple[JobState, str]] = asyncio.get_running_loop().create_future()

    async def run(self, report_fd: int) -> None:
        """Runs the job; `report_fd` gets `ok` once the state says that the controller is there."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGHUP, signal.SIGINT):
            loop.add_signal_handler(number, lambda: None)
        loop.add_signal_handler(signal.SIGTERM, self._finish, JobState.CANCELLED, "")
        await self._open()
        _report(report_fd)
        self._apply(self._jobset.begin())
        state, reason = await self._end
        await self._all_stopped()
        await processes.kill_all(lambda: processes.of_job(self._uid), self._host.reaper)
        self._record.end(state, reason)

    async def _open(self) -> None:
        key, address = self._names.coordinator
        ports = Ports(key, address, self._names.pod_spec(key.replicated_job))
        self._host = Host(
            job=self._job,
            machine=self._shell,
            ports=ports,
            reaper=Reaper(),
            backoff=self._backoff,
            changed=self._changed,
            refused=self._refused,
            flush=self._record.flush,
            ring=self._bell.ring,
            turn=asyncio.Lock(),
        )
        self._record.open(await self._bell.open(), ports)

    def _apply(self, actions: Iterable[Action]) -> None:
        for action in actions:
            if self._end.done():
                return
            match action:
                case StartPod(key, delay_s):
                    self._start(key, delay_s)
                case Restart(message, counts):
                    self._note = self._restart_note(counts)
                    self._stop()
                    self._background.add(self._watched(self._restart(message)))
                case Finish(succeeded=True):
                    self._finish(JobState.SUCCEEDED, "")
                case Finish(_, reason, message):
                    self._finish(JobState.FAILED, self._failure(f"{reason}: {message}"))

    def _start(self, key: PodKey, delay_s: float) -> None:
        meta = self._names.meta(key, restart_attempt=self._jobset.restarts)
        pod = Pod(self._names.pod_spec(key.replicated_job), key, meta, self._host)
        if key == self._names.coordinator[0]:
            # For who reads the command's output, which begins anew.
            pod.main.note, self._note = self._note, ""
        self._told[key] = False, 0
        self._record.add(pod)
        self._tasks[key] = self._watched(self._run_pod(pod, delay_s))

    async def _run_pod(self, pod: Pod, delay_s: float) -> None:
        succeeded = await pod.run(delay_s)
        self._apply(self._jobset.pod_ended(pod.key, succeeded=succeeded, exits=pod.exits, pod=pod.name))

    async def _restart(self, message: str) -> None:
        _LOG.info("restart %d: %s", self._jobset.restarts, message)
        await self._all_stopped()
        if not self._end.done():
            self._record.clear()
            self._apply(self._jobset.begin())

    def _restart_note(self, counts: bool) -> str:
        number = f"{self._jobset.restarts_counted} of {self._jobset.max_restarts}" if counts else "that does not count"
        return f"restart {number}: {causes.of_end(self._record.pods) or 'a job of the set failed'}"

    def _failure(self, kubernetes: str) -> str:
        """The reason of a failed job: what a user wants to know first, and what Kubernetes says of it."""
        cause, restarts = causes.of_end(self._record.pods), self._jobset.restarts
        again = f", after {restarts} restart{'s' if restarts > 1 else ''}" if restarts else ""
        return f"{cause}{again} ({kubernetes})" if cause else kubernetes

    def _refused(self, key: PodKey, container: Container) -> None:
        self._finish(JobState.FAILED, causes.of_refusal(self._record.pod(key), container))

    def _finish(self, state: JobState, reason: str) -> None:
        if not self._end.done():
            self._jobset.end()
            self._record.note_failure()
            self._end.set_result((state, reason))
            self._stop()

    def _stop(self) -> None:
        for pod in self._record.pods:
            pod.stop()
        self._record.touch()

    async def _all_stopped(self) -> None:
        self._stop()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)

    def _changed(self, key: PodKey) -> None:
        """Something about a pod changed: the machine is told what it asks to know, and whoever watches."""
        pod = self._record.pod(key)
        ready, restarts = pod.ready, pod.restarts
        was_ready, had_restarts = self._told[key]
        self._told[key] = ready, restarts
        if ready != was_ready:
            self._apply(self._jobset.pod_ready(key, ready))
        if restarts != had_restarts:
            self._apply(self._jobset.container_restarts(key, restarts))
        self._record.touch()

    def _take_faults(self) -> None:
        """Does what commands have asked for, each request once, and answers it."""
        try:
            for request in inbox.take(self._job):
                problem = self._suffer(request.fault)
                # Who hears the answer finds the state as it is since.
                self._record.flush()
                request.answer(problem)
        except OSError as exc:
            _LOG.error("a request was not read or not answered: %s", exc)
        self._bell.ring()

    def _suffer(self, fault: Fault) -> str:
        """Lets a slice have a fault; why not, where it cannot."""
        if self._end.done():
            return "it is ending"
        problem = refusal(self._record.slice_state(fault.slice), fault)
        if not problem:
            _LOG.info("slice %d: %s, as was asked", fault.slice, fault.kind)
            for pod in self._record.pods_of_slice(fault.slice):
                pod.suffer(fault)
        return problem

    def _watched(self, coroutine: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """A task whose failure, which is ours and not the job's, ends the job."""
        task = asyncio.create_task(coroutine)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._background.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None:
            _LOG.error("the controller failed", exc_info=error)
            self._finish(JobState.FAILED, f"ControllerError: {type(error).__name__}: {error}")


def _report(report_fd: int) -> None:
    # A `submit` that was killed does not listen any more; the job goes on.
    with contextlib.suppress(BrokenPipeError):
        os.write(report_fd, b"ok")
    os.close(report_fd)


async def _run(job: JobDir, report_fd: int) -> None:
    await Controller(job).run(report_fd)


def main() -> None:
    """Detaches and runs the job that the arguments name."""
    path, lock_fd, report_fd = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    # The child is nobody's to reap, and as no session's leader it never gets a terminal.
    if os.fork():
        os._exit(0)
    for descriptor in (lock_fd, report_fd):
        os.set_inheritable(descriptor, False)
    logging.basicConfig(format="%(asctime)s %(levelname)s %(message)s", level=logging.INFO)
    processes.become_controller()
    asyncio.run(_run(JobDir(Path(path)), report_fd))


if __name__ == "__main__":
    main()
