"""What a backend says of its jobs: references, states, pods, log lines. Frozen values."""

from __future__ import annotations

import enum
import re
import signal
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from pw.errors import SpecError

_NAME = re.compile(r"[a-z0-9](?:[-a-z0-9]{0,61}[a-z0-9])?")
_SCOPE = re.compile(r"[A-Za-z0-9](?:[-A-Za-z0-9.:_]*[A-Za-z0-9])?")


@dataclass(frozen=True, slots=True)
class JobRef:
    """Where a job lives. `str()` gives `local://NAME` or `gke://PROJECT/LOCATION/CLUSTER/NAMESPACE/NAME`."""

    backend: str
    name: str
    scope: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.backend}://{'/'.join((*self.scope, self.name))}"

    @classmethod
    def parse(cls, text: str, *, backend: str) -> JobRef:
        """The reference in `text`, which is one that `str()` gave or the bare name of a job of `backend`."""
        scheme, separator, rest = text.partition("://")
        scheme, (*scope, name) = (scheme, rest.split("/")) if separator else (backend, [text])
        # Parts become parts of paths and URLs.
        if not scheme or not _NAME.fullmatch(name) or not all(_SCOPE.fullmatch(part) for part in scope):
            raise SpecError(f"{text!r} names no job: want NAME or BACKEND://NAME (pw job list)")
        return cls(scheme, name, tuple(scope))


class JobState(enum.StrEnum):
    """Where a job stands; the last three are final."""

    PENDING = "Pending"
    SUSPENDED = "Suspended"
    RUNNING = "Running"
    SUCCEEDED = "Succeeded"
    FAILED = "Failed"
    CANCELLED = "Cancelled"

    @property
    def final(self) -> bool:
        return self in (JobState.SUCCEEDED, JobState.FAILED, JobState.CANCELLED)


def exit_text(code: int) -> str:
    """How a process ended, as Kubernetes reports it: `exited with 7`, or `was killed by SIGKILL` for 128 + 9."""
    try:
        return f"was killed by {signal.Signals(code - 128).name}"
    except ValueError:
        return f"exited with {code}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ContainerStatus:
    """One container: `state` is waiting, running or terminated; `restarts` counts those of this pod."""

    name: str
    state: str
    restarts: int = 0
    exit_code: int | None = None
    reason: str = ""
    started: datetime | None = None
    finished: datetime | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PodStatus:
    """One pod: `phase` as Kubernetes has it, or Stopped for one that the local backend ended with its job; `slice` and
    `host` are None for the head."""

    name: str
    phase: str
    slice: int | None = None
    host: int | None = None
    reason: str = ""
    containers: tuple[ContainerStatus, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class SliceStatus:
    """One slice: `state` is pending, ready (when all `hosts` are), down, hung by `pw job fault`, or ended with
    its job."""

    index: int
    state: str
    hosts: int
    hosts_ready: int
    restarts: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class JobStatus:
    """A job at one moment. Times are aware UTC; `exit_code` is the command's, once the job is over. `restarts` are all
    of the job, and `restarts_counted` those of them that count against `max_restarts`."""

    ref: JobRef
    state: JobState
    reason: str = ""
    compute_type: str = ""
    num_slices: int = 0
    created: datetime
    started: datetime | None = None
    finished: datetime | None = None
    restarts: int = 0
    restarts_counted: int = 0
    max_restarts: int = 0
    exit_code: int | None = None
    slices: tuple[SliceStatus, ...] = ()
    pods: tuple[PodStatus, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class LogQuery:
    """Which lines of a job: all containers of all pods and attempts unless narrowed.

    `tail` counts lines of each container, `since` is an aware time, `slice` the index of a slice's workers,
    `container` a container's name.
    """

    follow: bool = False
    tail: int | None = None
    since: datetime | None = None
    slice: int | None = None
    container: str | None = None


@dataclass(frozen=True, slots=True)
class LogLine:
    """One line without its newline, and where it came from. `time` is aware UTC; `stream` is stdout or stderr."""

    time: datetime
    pod: str
    container: str
    stream: str
    text: str


def check_query(query: LogQuery, jobset: Mapping[str, Any], *, slices: int) -> None:
    """Raises SpecError for a container or slice that a job of `slices` slices with this JobSet does not have."""
    pods = [job["template"]["spec"]["template"]["spec"] for job in jobset["spec"]["replicatedJobs"]]
    containers = (part for pod in pods for part in (*(pod.get("initContainers") or ()), *pod["containers"]))
    names = dict.fromkeys(container["name"] for container in containers)
    if query.container is not None and query.container not in names:
        raise SpecError(f"the job has no container {query.container!r}: want {', '.join(names)}")
    if query.slice is not None and query.slice not in range(slices):
        wanted = f"0 to {slices - 1}" if slices > 1 else "0" if slices else "none"
        raise SpecError(f"the job has no slice {query.slice}: want {wanted}")
