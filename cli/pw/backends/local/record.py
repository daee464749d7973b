"""What the controller knows of its job, as `state.json` says it to everybody else."""

from __future__ import annotations

import asyncio
import logging
import os
from collections import Counter
from collections.abc import Callable, Collection
from datetime import datetime
from typing import Any

from pathways_runtime import _contract
from pw.backends.local import causes
from pw.backends.local.containers import Container
from pw.backends.local.jobset import JobSet, PodKey
from pw.backends.local.metadata import Names
from pw.backends.local.pods import Pod
from pw.backends.local.ports import Ports
from pw.backends.local.state import JobDir, State, now
from pw.status import JobState

_LOG = logging.getLogger(__name__)

# Changes that come together are written together: hundreds of hosts start within a second.
_WRITE_DELAY_S = 0.01


def _text(time: datetime | None) -> str | None:
    return None if time is None else time.isoformat()


class Record:
    """The pods of the current attempt and the job's state. `touch` after each change; `written` is told of the rest."""

    def __init__(self, job: JobDir, machine: JobSet, names: Names, *, written: Callable[[], None]) -> None:
        self.state = JobState.PENDING
        self.reason = ""
        self._job = job
        self._machine = machine
        self._names = names
        self._written = written
        self._pods: dict[PodKey, Pod] = {}
        self._ports: Ports | None = None
        self._event_port = 0
        self._was_ready: set[int] = set()
        self._earlier_restarts: Counter[int] = Counter()
        self._started: datetime | None = None
        self._finished: datetime | None = None
        self._exit_code: int | None = None
        self._failed_code: int | None = None
        self._unwritten = False
        self._timer: asyncio.TimerHandle | None = None

    def open(self, event_port: int, ports: Ports) -> None:
        """Writes the first state. Raises OSError."""
        self._event_port, self._ports = event_port, ports
        self._job.write_state(self._snapshot())

    @property
    def pods(self) -> Collection[Pod]:
        """The newest pod of each place."""
        return tuple(self._pods.values())

    def pod(self, key: PodKey) -> Pod:
        return self._pods[key]

    def add(self, pod: Pod) -> None:
        """A new pod, which takes the place of the one before."""
        if pod.key in self._pods:
            self._count(self._pods[pod.key], 1)
        self._pods[pod.key] = pod

    def clear(self) -> None:
        """All pods make room for a new attempt of the whole set."""
        for pod in self._pods.values():
            self._count(pod)
        self._pods.clear()
        self._was_ready.clear()

    def _count(self, pod: Pod, replaced: int = 0) -> None:
        if pod.key.replicated_job == _contract.WORKER_JOB:
            self._earlier_restarts[pod.key.job_index] += pod.restarts + replaced

    def note_failure(self) -> None:
        """Keeps the exit code of what failed, before all that still runs is stopped."""
        self._failed_code = causes.code_of_end(self._pods.values())

    def touch(self) -> None:
        """Something changed; it is written soon."""
        self._note_start()
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(_WRITE_DELAY_S, self.flush)

    def end(self, state: JobState, reason: str) -> None:
        """The last state, somehow. Raises OSError: then the next command has to find out what became of the job."""
        if self._timer is not None:
            self._timer.cancel()
        self.state, self.reason = state, reason
        self._finished, self._exit_code = now(), self._code(state)
        try:
            self._job.write_state(self._snapshot())
        except OSError as exc:
            _LOG.error("the last state is written in place: %s", exc)
            self._job.overwrite_state(self._snapshot())
        self._written()

    def flush(self) -> None:
        """Writes what was touched now. Without room for it the job goes on, and watchers see it late."""
        if self._timer is None:
            return
        self._timer.cancel()
        self._timer = None
        try:
            self._job.write_state(self._snapshot())
        except OSError as exc:
            if not self._unwritten:
                _LOG.error("the state is not written: %s", exc)
            self._unwritten = True
        else:
            self._unwritten = False
        self._written()

    def _snapshot(self) -> State:
        return {
            "state": self.state,
            "reason": self.reason or ("" if self.state.final else causes.of_wait(self._pods.values())),
            "started": _text(self._started),
            "finished": _text(self._finished),
            "restarts": self._machine.restarts,
            "restarts_counted": self._machine.restarts_counted,
            "max_restarts": self._machine.max_restarts,
            "exit_code": self._exit_code,
            "pid": os.getpid(),
            "event_port": self._event_port,
            "ports": self._ports.published() if self._ports else {},
            "slices": [self._slice(index) for index in range(self._names.slices)],
            "pods": [_pod(pod) for pod in self._pods.values()],
        }

    def _note_start(self) -> None:
        times = [pod.main.started for pod in self._pods.values() if pod.main.started is not None]
        if self._started is None and times:
            self._started = min(times)
            if self.state is JobState.PENDING:
                self.state = JobState.RUNNING

    def pods_of_slice(self, index: int) -> list[Pod]:
        return [pod for key, pod in self._pods.items() if key[:2] == (_contract.WORKER_JOB, index)]

    def slice_state(self, index: int) -> str:
        """As in SliceStatus; pending for a slice that is not there."""
        return str(self._slice(index)["state"])

    def _slice(self, index: int) -> dict[str, Any]:
        pods = self.pods_of_slice(index)
        ready = sum(pod.ready for pod in pods)
        if ready == self._names.hosts:
            self._was_ready.add(index)
        down = "hung" if any(pod.hung for pod in pods) else "down" if index in self._was_ready else "pending"
        return {
            "index": index,
            "state": "ready" if ready == self._names.hosts else down,
            "hosts": self._names.hosts,
            "hosts_ready": ready,
            "restarts": self._earlier_restarts[index] + sum(pod.restarts for pod in pods),
        }

    def _code(self, state: JobState) -> int | None:
        """The command's exit code; of a job that failed elsewhere, that of the container that did."""
        if state is JobState.FAILED and self._failed_code is not None:
            return self._failed_code
        coordinator = self._pods.get(self._names.coordinator[0])
        return coordinator.main.exit_code if coordinator and not coordinator.main.emulated else None


def _pod(pod: Pod) -> dict[str, Any]:
    worker = pod.key.replicated_job == _contract.WORKER_JOB
    return {
        "name": pod.name,
        "phase": pod.phase,
        "slice": pod.key.job_index if worker else None,
        "host": pod.key.pod_index if worker else None,
        "reason": pod.reason,
        "containers": [_container(container) for container in pod.containers],
    }


def _container(container: Container) -> dict[str, Any]:
    return {
        "name": container.name,
        "state": container.state,
        "restarts": container.restarts,
        "exit_code": container.exit_code,
        "reason": container.reason,
        "started": _text(container.started),
        "finished": _text(container.finished),
    }
