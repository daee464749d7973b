"""The local backend: runs a job's JobSet on this machine, each job in the care of a controller process of its own."""

from __future__ import annotations

import builtins
import contextlib
import dataclasses
import importlib.util
import os
import shutil
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from datetime import datetime
from pathlib import Path
from typing import Any

from pathways_runtime import _contract
from pw import faults, tpus
from pw.backends.local import cleanup, events, features, images, inbox, logfiles
from pw.backends.local.jobs import Backoff
from pw.backends.local.metadata import Names
from pw.backends.local.report import BACKEND, broken_status, job_status, reference
from pw.backends.local.shapes import BrokenRecordError
from pw.backends.local.start import start_controller
from pw.backends.local.state import JobDir, State, locked, now
from pw.backends.local.store import Store
from pw.config import Settings
from pw.errors import BackendError, BackendUnavailableError, JobNotFoundError, SpecError, WaitTimeoutError
from pw.faults import Fault
from pw.specs import JobSpec, Plan
from pw.status import JobRef, JobState, JobStatus, LogLine, LogQuery, check_query

# How long `connect` waits for a server that is being started.
CONNECT_TIMEOUT_S = 60.0
# What the emulator cannot do without; looked for, never imported.
_EMULATOR_PACKAGES = ("jaxlib", "hpack")


class LocalBackend:
    """Jobs under `settings.state_dir`. `clock` says what time it is when jobs expire."""

    name = BACKEND

    def __init__(self, settings: Settings, *, clock: Callable[[], datetime] = now) -> None:
        self._settings = settings
        self._store = Store(settings.state_dir)
        self._clock = clock

    def plan(self, spec: JobSpec) -> Plan:
        """The manifest that a cluster gets too, with this machine's image and scratch folder where none is named.
        Raises SpecError for what cannot run here."""
        from pw.proof import prove
        from pw.render import render

        scratch = spec.gcs_scratch_location or str(self._store.folder(spec.name).scratch)
        local = dataclasses.replace(spec, image=spec.image or _contract.SHELL_IMAGE, gcs_scratch_location=scratch)
        manifest = render(local)
        prove(manifest, local)
        features.check(manifest)
        shape = tpus.resolve(spec.compute_type, spec.topology)
        notes = (*filter(None, [shape.note]), *features.notes(manifest))
        return Plan(backend=BACKEND, spec=spec, manifest=manifest, notes=notes)

    def submit(self, plan: Plan, *, replace: bool = False) -> JobRef:
        """Starts the job and returns once its controller lives. Its containers run in this process' folder and with
        its PATH. Raises JobExistsError, and BackendUnavailableError where the emulator is not installed."""
        _check_emulator(self._settings.emulator_python)
        features.check(plan.manifest)
        name = str(plan.manifest["metadata"]["name"])
        with _translated(name), ExitStack() as locks:
            self._store.expire(self._clock())
            static, state = self._static(name, plan.spec), _first_state(plan.manifest)
            files = {"manifest.json": plan.manifest, "job.json": static, "state.json": state}
            lock_fd = self._store.create(name, files, replace=replace, locks=locks)
            job = self._store.folder(name)
            try:
                start_controller(job, lock_fd=lock_fd, uid=static["uid"])
            except BackendError as exc:
                job.write_state(state | {"state": JobState.FAILED, "reason": str(exc), "finished": now().isoformat()})
                raise
        return reference(name)

    def _static(self, name: str, spec: JobSpec) -> dict[str, Any]:
        backoff = Backoff(self._settings.local_backoff_s)
        return {
            "name": name,
            "uid": str(uuid.uuid4()),
            "created": now().isoformat(),
            "compute_type": spec.compute_type,
            "num_slices": spec.num_slices,
            "cwd": _current_folder(),
            "env": images.inherited(os.environ),
            "python": self._settings.emulator_python,
            "backoff_base_s": backoff.base_s,
            "backoff_cap_s": max(backoff.base_s, backoff.cap_s),
        }

    def _find(self, ref: JobRef) -> JobDir:
        if ref.backend != BACKEND or ref.scope:
            raise SpecError(f"{str(ref)!r} is no local job: want NAME or {BACKEND}://NAME", hints=("pw job list",))
        return self._store.find(ref.name)

    def get(self, ref: JobRef) -> JobStatus:
        """The job as it is now; one whose controller was killed is cleaned up first."""
        with _translated(ref.name):
            self._store.expire(self._clock())
            return _status(self._find(ref))

    def list(self) -> builtins.list[JobStatus]:
        """All jobs, newest first."""
        with _translated("?"):
            self._store.expire(self._clock())
            jobs = self._store.all()
        statuses = []
        for job in jobs:
            with contextlib.suppress(JobNotFoundError), _translated(job.name):
                statuses.append(_status(job))
        return sorted(statuses, key=lambda status: status.created, reverse=True)

    def cancel(self, ref: JobRef) -> None:
        """SIGTERM to all processes of the job, SIGKILL after its grace period; returns when it is over."""
        with _translated(ref.name):
            job = self._find(ref)
            with _watching(job) as watch:
                if watch is not None:
                    cleanup.stop_controller(job)
                    while watch.wait():
                        pass
            try:
                cleanup.final(job)
            except BrokenRecordError:
                cleanup.end_broken(job)

    def delete(self, ref: JobRef) -> None:
        """Removes a finished job with its logs."""
        with _translated(ref.name):
            self._store.remove(self._find(ref))

    def logs(self, ref: JobRef, query: LogQuery) -> Iterator[LogLine]:
        """Lines in order of time, over the restarts of containers and of the whole set. Raises SpecError for a
        container or slice that the job does not have."""
        with _translated(ref.name):
            job = self._find(ref)
            # What there is of a job whose manifest is broken can still be read.
            with contextlib.suppress(BrokenRecordError):
                manifest = job.manifest()
                check_query(query, manifest, slices=Names(manifest).slices)
        return self._logs(job, query)

    def _logs(self, job: JobDir, query: LogQuery) -> Iterator[LogLine]:
        with _translated(job.name):
            if not query.follow:
                yield from logfiles.read(job, query)
                return
            with _watching(job) as watch:
                yield from logfiles.follow(job, query, wait=watch.wait if watch else lambda: False)

    def wait(self, ref: JobRef, *, timeout_s: float | None = None) -> JobStatus:
        """The final status. Raises WaitTimeoutError after `timeout_s`."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        with _translated(ref.name):
            job = self._find(ref)
            with _watching(job) as watch:
                try:
                    while watch is not None and watch.wait(deadline):
                        pass
                except TimeoutError:
                    raise WaitTimeoutError(
                        f"job {ref.name!r} has not ended after {timeout_s:g} s; it goes on",
                        hints=(f"pw job wait {ref.name}", f"pw job cancel {ref.name}"),
                    ) from None
            return _status(job, cleanup.final)

    def inject(self, ref: JobRef, fault: Fault) -> None:
        """Has the controller kill or stop the processes of the slice's hosts. What hangs goes on when its time is over
        or the job ends, whatever becomes of this process."""
        with _translated(ref.name):
            job = self._find(ref)
            with _watching(job) as watch:
                faults.check_all(_status(job), [fault])
                if watch is None:
                    raise BackendError(f"job {ref.name!r} has just ended")
                inbox.send(job, fault, watch)

    @contextlib.contextmanager
    def connect(self, ref: JobRef, port: int) -> Iterator[str]:
        """`127.0.0.1:N` of a server of the head, once it listens; any other port is the command's own, as it is."""
        with _translated(ref.name):
            job = self._find(ref)
            server = port in _server_ports(job.manifest())
            with _watching(job) as watch:
                real = _real_port(job, port, watch) if server else port
        yield f"{events.LOOPBACK}:{real}"


def _current_folder() -> str:
    try:
        return str(Path.cwd())
    except FileNotFoundError:
        raise SpecError(
            "the current folder no longer exists, and the command would run in it: cd to one that does"
        ) from None


def _check_emulator(python: str) -> None:
    if python != sys.executable:
        missing = [] if shutil.which(python) else [f"program {python!r}"]
    else:
        missing = [name for name in _EMULATOR_PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        raise BackendUnavailableError(
            f"the local backend runs the emulator, and there is no {' and no '.join(missing)} for it",
            hints=("pip install 'pathways-launcher[local]'",),
        )


def _first_state(manifest: Mapping[str, Any]) -> State:
    names = Names(manifest)
    pending = {"state": "pending", "hosts": names.hosts, "hosts_ready": 0, "restarts": 0}
    return {
        "state": JobState.PENDING,
        "reason": "",
        "started": None,
        "finished": None,
        "restarts": 0,
        "restarts_counted": 0,
        "max_restarts": int(manifest["spec"].get("failurePolicy", {}).get("maxRestarts", 0)),
        "exit_code": None,
        "pid": 0,
        "event_port": 0,
        "ports": {},
        "slices": [{"index": index, **pending} for index in range(names.slices)],
        "pods": [],
    }


def _server_ports(manifest: Mapping[str, Any]) -> set[int | None]:
    names = Names(manifest)
    pod = names.pod_spec(names.coordinator[0].replicated_job)
    containers = (*pod.get("initContainers", ()), *pod["containers"])
    return {images.server_port(container) for container in containers if images.is_emulated(container)}


def _real_port(job: JobDir, port: int, watch: events.Watch | None) -> int:
    deadline = time.monotonic() + CONNECT_TIMEOUT_S
    state = job.state()
    try:
        while watch is not None and str(port) not in state["ports"] and watch.wait(deadline):
            state = job.state()
    except TimeoutError:
        pass
    state = cleanup.settle(job)
    if JobState(state["state"]).final:
        raise BackendError(f"job {job.name!r} is {state['state']}: nothing listens any more")
    if str(port) not in state["ports"]:
        raise BackendError(
            f"job {job.name!r} does not listen on port {port} after {CONNECT_TIMEOUT_S:g} s",
            hints=(f"pw job status {job.name}",),
        )
    return int(state["ports"][str(port)])


def _status(job: JobDir, state_of: Callable[[JobDir], State] = cleanup.settle) -> JobStatus:
    try:
        return job_status(job.job(), state_of(job))
    except BrokenRecordError as exc:
        return broken_status(job, exc)


@contextlib.contextmanager
def _watching(job: JobDir) -> Iterator[events.Watch | None]:
    """A connection that tells of changes, or None when the job is over."""
    try:
        with locked(job.starting, shared=True):
            # A `submit` in another process may still be at work.
            state = cleanup.settle(job)
        uid = job.job()["uid"]
    except BrokenRecordError:
        yield None
        return
    if JobState(state["state"]).final:
        yield None
        return
    with events.watch(state["event_port"], uid) as watch:
        yield watch


@contextlib.contextmanager
def _translated(name: str) -> Iterator[None]:
    """Errors of the file system as those of a backend."""
    try:
        yield
    except FileNotFoundError as exc:
        raise JobNotFoundError(f"the record of local job {name!r} is gone: {exc}", hints=("pw job list",)) from exc
    except OSError as exc:
        raise BackendError(f"the state of local job {name!r} cannot be kept: {exc}") from exc
    except BrokenRecordError as exc:
        raise BackendError(
            f"the record of local job {name!r} is broken: {exc}", hints=(f"pw job delete {name}",)
        ) from exc
