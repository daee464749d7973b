"""The seam: what runs jobs. Both backends start from the same JobSet manifest."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Protocol, cast

from pw.errors import ConfigError

if TYPE_CHECKING:
    # Not at run time: every controller of a local job imports this package, and should start at once.
    from pw.config import Settings
    from pw.faults import Fault
    from pw.specs import JobSpec, Plan
    from pw.status import JobRef, JobStatus, LogLine, LogQuery

BACKENDS = {"local": "pw.backends.local:LocalBackend", "gke": "pw.backends.gke:GkeBackend"}


class Backend(Protocol):
    """Plans, starts and watches jobs. Every method but `plan` raises BackendError when what runs the jobs breaks."""

    @property
    def name(self) -> str:
        """What `--backend` and references call it."""
        ...

    def plan(self, spec: JobSpec) -> Plan:
        """What `submit` would send. Changes nothing. Raises SpecError for what this backend cannot run."""
        ...

    def submit(self, plan: Plan, *, replace: bool = False) -> JobRef:
        """Starts the job and returns once it is recorded. Raises JobExistsError for a name in use; with `replace`, a
        finished job of that name is deleted first."""
        ...

    def get(self, ref: JobRef) -> JobStatus:
        """The job as it is now. Raises JobNotFoundError."""
        ...

    def list(self) -> list[JobStatus]:
        """All jobs, newest first."""
        ...

    def cancel(self, ref: JobRef) -> None:
        """Stops a job, honouring its grace period, and returns once it has stopped; of a finished one does nothing."""
        ...

    def delete(self, ref: JobRef) -> None:
        """Removes a finished job's record, so that its name is free. Raises SpecError for one that still runs."""
        ...

    def logs(self, ref: JobRef, query: LogQuery) -> Iterator[LogLine]:
        """Lines in order of time; with `follow` ends when the job has ended and its last line was given. Raises
        SpecError for a container or slice that the job does not have."""
        ...

    def wait(self, ref: JobRef, *, timeout_s: float | None = None) -> JobStatus:
        """The final status. Raises WaitTimeoutError when the time is over."""
        ...

    def inject(self, ref: JobRef, fault: Fault) -> None:
        """Lets a slice of a running job have a fault; what comes then is the manifest's doing. Raises SpecError for one
        that cannot happen to the job now, or not at all on this backend."""
        ...

    def connect(self, ref: JobRef, port: int) -> AbstractContextManager[str]:
        """`host:port` at which this machine reaches the head container port `port`, while the context lasts."""
        ...


def get(name: str, settings: Settings | None = None) -> Backend:
    """The backend called `name`, under `settings` or those of this process. Raises ConfigError for an unknown name."""
    from pw import config

    if name not in BACKENDS:
        raise ConfigError(f"backend {name!r} is unknown: want {' or '.join(BACKENDS)}")
    module, _, attribute = BACKENDS[name].partition(":")
    factory = getattr(importlib.import_module(module), attribute)
    return cast(Backend, factory(settings or config.load()))
