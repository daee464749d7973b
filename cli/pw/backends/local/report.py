"""A job's files as the values that all backends give."""

from __future__ import annotations

import contextlib
from datetime import UTC, datetime
from typing import Any

from pw.backends.local import shapes
from pw.backends.local.shapes import BrokenRecordError
from pw.backends.local.state import JobDir, State
from pw.status import ContainerStatus, JobRef, JobState, JobStatus, PodStatus, SliceStatus

BACKEND = "local"


def reference(name: str) -> JobRef:
    """The reference of the local job of this name."""
    return JobRef(BACKEND, name)


def job_status(static: dict[str, Any], state: State) -> JobStatus:
    """The status that `job.json` and `state.json` tell."""
    return JobStatus(
        ref=reference(static["name"]),
        state=JobState(state["state"]),
        reason=state["reason"],
        compute_type=static["compute_type"],
        num_slices=static["num_slices"],
        created=datetime.fromisoformat(static["created"]),
        started=_time(state["started"]),
        finished=_time(state["finished"]),
        restarts=state["restarts"],
        restarts_counted=state["restarts_counted"],
        max_restarts=state["max_restarts"],
        exit_code=state["exit_code"],
        slices=tuple(_slice(slice, final=JobState(state["state"]).final) for slice in state["slices"]),
        pods=tuple(_pod(pod) for pod in state["pods"]),
    )


def broken_status(job: JobDir, broken: BrokenRecordError) -> JobStatus:
    """The status of a job of which at most `job.json` can be read; else it is as old as its folder's last change."""
    created = datetime.fromtimestamp(job.path.stat().st_mtime, UTC)
    static: dict[str, Any] = {"created": created.isoformat(), "compute_type": "", "num_slices": 0}
    with contextlib.suppress(BrokenRecordError):
        static = job.job()
    return JobStatus(
        ref=reference(job.name),
        state=JobState.FAILED,
        reason=f"record is broken: {broken}",
        compute_type=static["compute_type"],
        num_slices=static["num_slices"],
        created=datetime.fromisoformat(static["created"]),
    )


def _slice(slice: dict[str, Any], *, final: bool) -> SliceStatus:
    # The controller's last look at a slice finds it down: it has stopped it.
    known = {name: slice[name] for name in shapes.SLICE}
    return SliceStatus(**(known | ({"state": "ended"} if final else {})))


def _pod(pod: dict[str, Any]) -> PodStatus:
    known = {name: pod[name] for name in shapes.POD}
    return PodStatus(**(known | {"containers": tuple(_container(container) for container in pod["containers"])}))


def _container(container: dict[str, Any]) -> ContainerStatus:
    known = {name: container[name] for name in shapes.CONTAINER}
    times = {name: _time(container[name]) for name in ("started", "finished")}
    return ContainerStatus(**(known | times))


def _time(text: str | None) -> datetime | None:
    return None if text is None else datetime.fromisoformat(text)
