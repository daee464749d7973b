"""What the next command does for a job whose controller is gone: ends what is left of it and records the truth."""

from __future__ import annotations

import contextlib
import signal
from datetime import datetime, timedelta
from typing import Any

from pathways_runtime import _contract
from pw.backends.local import processes
from pw.backends.local.shapes import BrokenRecordError
from pw.backends.local.state import JobDir, State, if_free, locked, now
from pw.status import JobState

CONTROLLER_LOST = "ControllerLost"
CONTROLLER_MODULE = "pw.backends.local.controller"
# What is left has lost its controller and with it its pipes; it gets this long to end by itself.
STRAY_GRACE_S = 2.0
# How many of hundreds of containers a reason names.
_NAMED = 4


def settle(job: JobDir, *, grace_s: float = STRAY_GRACE_S) -> State:
    """The job's true state. If nobody runs a job that is not over, its processes are ended and it has failed.

    Raises FileNotFoundError when the record is gone, and BrokenRecordError.
    """
    state, _ = _read(job)
    if JobState(state["state"]).final:
        return state
    with if_free(job.lock) as free:
        return _settled(job, grace_s) if free else state


def final(job: JobDir, *, grace_s: float = STRAY_GRACE_S) -> State:
    """The job's last state, once its controller is no more. Raises as `settle` does."""
    # The controller of one whose record is broken may live on; it is not waited for.
    _read(job)
    with locked(job.lock):
        return _settled(job, grace_s)


def _read(job: JobDir) -> tuple[State, str]:
    return job.state(), job.job()["uid"]


def _settled(job: JobDir, grace_s: float) -> State:
    state, uid = _read(job)
    if not JobState(state["state"]).final:
        end_strays(uid, grace_s=grace_s)
        state = _lost(state)
        try:
            job.write_state(state)
        except OSError as exc:
            # As true as if it were written; who only asks need not care.
            state["reason"] += f"; this cannot be written: {exc.strerror}"
    return state


def stop_controller(job: JobDir) -> None:
    """Tells the controller to end the job; does nothing when there is none any more."""
    import psutil

    uid = job.job()["uid"]
    with contextlib.suppress(psutil.NoSuchProcess):
        process = psutil.Process(job.state()["pid"])
        # While the lock is held the number cannot have gone to another process; the environment is the proof.
        with if_free(job.lock) as free:
            if not free and process.environ().get(_contract.LOCAL_JOB_UID) == uid:
                process.terminate()


def end_broken(job: JobDir) -> None:
    """Ends what still runs of a job whose record is broken, as far as it can be told whose that is."""
    uid = _uid(job)
    if uid is not None:
        end_strays(uid, grace_s=STRAY_GRACE_S)


def _uid(job: JobDir) -> str | None:
    import psutil

    with contextlib.suppress(BrokenRecordError):
        return str(job.job()["uid"])
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            # The controller's own command line names the folder.
            if {CONTROLLER_MODULE, str(job.path.absolute())} <= set(process.cmdline()):
                return process.environ().get(_contract.LOCAL_JOB_UID)
    return None


def end_strays(uid: str, *, grace_s: float) -> None:
    """Ends every process of a job: SIGTERM, `grace_s` seconds, then SIGKILL until none is left."""
    found = processes.of_job(uid)
    processes.end(found, signal.SIGTERM)
    processes.wait_ended(found, grace_s)
    while left := processes.of_job(uid):
        processes.end(left, signal.SIGKILL)
        processes.wait_ended(left, 1.0)


def _lost(state: State) -> State:
    running = [
        f"{pod['name']}/{container['name']}"
        for pod in state["pods"]
        for container in pod["containers"]
        if container["state"] == "running"
    ]
    more = f" and {len(running) - _NAMED} more" if len(running) > _NAMED else ""
    what = f"; it ran {', '.join(running[:_NAMED])}{more}" if running else ""
    return state | {
        "state": JobState.FAILED,
        "reason": f"{CONTROLLER_LOST}: the controller of this job was killed{what}",
        "finished": now().isoformat(),
        "slices": [slice | {"state": "down", "hosts_ready": 0} for slice in state["slices"]],
        "pods": [_ended(pod) for pod in state["pods"]],
    }


def _ended(pod: dict[str, Any]) -> dict[str, Any]:
    if pod["phase"] not in ("Pending", "Running"):
        return pod
    containers = [
        container | {"state": "terminated", "exit_code": 137, "reason": CONTROLLER_LOST}
        if container["state"] == "running"
        else container
        for container in pod["containers"]
    ]
    return pod | {"phase": "Failed", "reason": CONTROLLER_LOST, "containers": containers}


def expired(job: JobDir, at: datetime) -> bool:
    """Whether the job is over, and its manifest's `ttlSecondsAfterFinished` was at `at`."""
    finished = job.state()["finished"]
    ttl_s = job.manifest()["spec"].get("ttlSecondsAfterFinished")
    if ttl_s is None or finished is None:
        return False
    return at >= datetime.fromisoformat(finished) + timedelta(seconds=ttl_s)
