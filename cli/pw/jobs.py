"""The verbs: what a terminal can do with a job, for Python. Each takes a Backend, knows no cluster and prints nothing.

    from pw import backends, jobs
    from pw.specs import JobSpec

    backend = backends.get("local")
    job = jobs.submit(backend, JobSpec(name="digits", compute_type="v6e-8", command="python train.py"))
    for line in jobs.logs(backend, job, follow=True):
        print(line.text)
    status = jobs.wait(backend, job)

A job is given as a JobRef, as the text of one, by its name alone, or as None for the newest.
"""

from __future__ import annotations

import builtins
import contextlib
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from datetime import datetime

from pathways_runtime import _contract
from pw.backends import Backend
from pw.errors import JobFailedError, JobNotFoundError, PwError, SpecError
from pw.faults import Fault, check_all, check_slice
from pw.scenario import Scenario
from pw.specs import JobSpec, Plan
from pw.status import JobRef, JobState, JobStatus, LogLine, LogQuery

Job = JobRef | str | None

# Lines of each container among which the last that say something are looked for.
_READ_LINES = 200
# How many of those are shown of a job that failed.
LAST_LINES = 20


def submit(backend: Backend, work: JobSpec | Plan, *, replace: bool = False) -> JobRef:
    """Starts a job. With `replace` a finished job of its name is deleted first. Raises JobExistsError for a name in
    use, SpecError for what the backend cannot run."""
    return backend.submit(work if isinstance(work, Plan) else backend.plan(work), replace=replace)


def find(backend: Backend, job: Job = None) -> JobRef:
    """The reference of `job`, unchecked unless it is the newest."""
    if isinstance(job, JobRef):
        return job
    return newest(backend).ref if job is None else JobRef.parse(job, backend=backend.name)


def newest(backend: Backend) -> JobStatus:
    """The job that was submitted last. Raises JobNotFoundError when there is none."""
    statuses = backend.list()
    if not statuses:
        raise JobNotFoundError(f"there is no job on backend {backend.name!r} yet", hints=("pw job submit --help",))
    return statuses[0]


def get(backend: Backend, job: Job = None) -> JobStatus:
    """The job as it is now. Raises JobNotFoundError."""
    return newest(backend) if job is None else backend.get(find(backend, job))


def list(backend: Backend, *, states: Collection[JobState] = (), name_contains: str = "") -> builtins.list[JobStatus]:
    """All jobs, newest first, or those in one of `states` and with `name_contains` in the name."""
    return [
        status
        for status in backend.list()
        if name_contains in status.ref.name and (not states or status.state in states)
    ]


def logs(
    backend: Backend,
    job: Job = None,
    *,
    follow: bool = False,
    tail: int | None = None,
    since: datetime | None = None,
    slice: int | None = None,
    container: str | None = None,
) -> Iterator[LogLine]:
    """Lines in order of time, narrowed as LogQuery says; with `follow` those to come too, until the job ends. Raises
    JobNotFoundError."""
    query = LogQuery(follow=follow, tail=tail, since=since, slice=slice, container=container)
    return backend.logs(find(backend, job), query)


def wait(backend: Backend, job: Job = None, *, timeout_s: float | None = None) -> JobStatus:
    """The final status, whatever it is. Raises WaitTimeoutError; the job goes on then."""
    return backend.wait(find(backend, job), timeout_s=timeout_s)


def cancel(backend: Backend, job: Job = None) -> JobRef:
    """Stops a job within its grace period and returns once it has stopped; of a finished one does nothing."""
    ref = find(backend, job)
    backend.cancel(ref)
    return ref


def delete(backend: Backend, job: Job = None) -> JobRef:
    """Removes a finished job's record. Raises SpecError for one that still runs."""
    ref = find(backend, job)
    backend.delete(ref)
    return ref


def inject(backend: Backend, faults: Sequence[Fault], job: Job = None) -> JobRef:
    """Lets slices of a running job have these faults, one after the other; all are checked before the first. Raises
    SpecError for one that cannot happen to the job now."""
    ref = find(backend, job)
    check_all(backend.get(ref), faults)
    for fault in faults:
        backend.inject(ref, fault)
    return ref


def play(
    backend: Backend, scenario: Scenario, job: Job = None, *, sleep: Callable[[float], None] = time.sleep
) -> Iterator[tuple[Fault, str]]:
    """Lets slices of a running job have the faults of a scenario, in its own time. Gives each as it happens, with ""
    or with why it was left out, as one of a slice that is still down from the last.

    Raises SpecError, before the first, for a slice that the job does not have, and PwError when the job ends meanwhile.
    """
    ref = find(backend, job)
    status = backend.get(ref)
    planned = scenario.faults(max(len(status.slices), 1))
    for _, fault in planned:
        check_slice(status, fault)
    for number, (after_s, fault) in enumerate(planned, 1):
        sleep(after_s)
        state = backend.get(ref).state
        if state.final:
            raise PwError(f"job {ref.name!r} is {state}: it ended before fault {number} of {len(planned)}")
        try:
            inject(backend, [fault], ref)
        except SpecError as exc:
            yield fault, exc.message
        else:
            yield fault, ""


def check(backend: Backend, status: JobStatus, *, tail: int = LAST_LINES) -> None:
    """Raises JobFailedError for a job that ended and did not succeed: with its exit code, the last `tail` lines of its
    command and where the rest is. With `tail` 0 without lines, as for one who has just seen them."""
    if not status.state.final or status.state is JobState.SUCCEEDED:
        return
    verb = "was cancelled" if status.state is JobState.CANCELLED else "failed"
    code = "" if status.exit_code is None else f" (exit code {status.exit_code})"
    why = f": {status.reason}" if status.reason else code
    raise JobFailedError(
        f"job {status.ref.name!r} {verb}{why}",
        exit_code=status.exit_code or 1,
        hints=(*_last_lines(backend, status.ref, tail), f"pw job logs {status.ref}", f"pw job status {status.ref}"),
    )


def _last_lines(backend: Backend, ref: JobRef, count: int) -> builtins.list[str]:
    """The command's last lines that say something: JAX ends with a page of empty ones when its server goes."""
    if not count:
        return []
    query = LogQuery(tail=_READ_LINES, container=_contract.USER_CONTAINER)
    saying: deque[LogLine] = deque(maxlen=count)
    with contextlib.suppress(SpecError):  # a headless job has no command
        saying.extend(line for line in backend.logs(ref, query) if line.text.strip())
    return [f"{line.pod}/{line.container} | {line.text}" for line in saying]
