"""Jobs as rows and lines of text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import UTC, datetime

from pw import fields
from pw.status import ContainerStatus, JobState, JobStatus, PodStatus

Row = Sequence[str]

JOB_COLUMNS = ("NAME", "STATUS", "SLICES", "RESTARTS", "CREATED", "COMPLETED")
SLICE_COLUMNS = ("SLICE", "STATE", "READY", "RESTARTS", "HOSTS")
POD_COLUMNS = ("POD", "PHASE", "CONTAINER", "STATE", "RESTARTS", "EXIT", "WHY")


def job_row(job: JobStatus) -> Row:
    """The job under `JOB_COLUMNS`: how long ago, so that a row fits on 80 columns."""
    restarts = f"{job.restarts_counted}/{job.max_restarts}"
    return (job.ref.name, job.state.value, _slices(job), restarts, _ago(job.created), _ago(job.finished))


def summary(job: JobStatus) -> list[str]:
    """What is true of the whole job, a line for each."""
    times = (("created", job.created), ("started", job.started), ("ended", job.finished))
    return [
        f"{job.ref}  {outcome(job)}",
        f"{_slices(job)}, {_restarts(job)}",
        ", ".join(f"{word} {_time(time)}" for word, time in times if time is not None),
    ]


def _restarts(job: JobStatus) -> str:
    free = job.restarts - job.restarts_counted
    more = f" ({free} more that do not count)" if free else ""
    return f"{job.restarts_counted} of {job.max_restarts} restarts used{more}"


def outcome(job: JobStatus) -> str:
    """Where the job stands, for how long, and why: `Failed after 5s: the command exited with 7`."""
    code = f", exit code {job.exit_code}" if job.exit_code else ""
    reason = f": {' '.join(job.reason.split())}" if job.reason else code
    return f"{job.state}{_duration(job)}{reason}"


def sentence(job: JobStatus) -> str:
    """That in a sentence: `job 'digits' succeeded after 23s`."""
    text = outcome(job)
    return f"job {job.ref.name!r} {text[0].lower()}{text[1:]}"


def _duration(job: JobStatus) -> str:
    if job.started is None or not (job.state.final or job.state is JobState.RUNNING):
        return ""
    took = (job.finished or datetime.now(UTC)) - job.started
    word = "after" if job.state.final else "for"
    return f" {word} {fields.duration_text(max(0, round(took.total_seconds())))}"


def slice_rows(job: JobStatus) -> list[Row]:
    """The slices under `SLICE_COLUMNS`, each with the phase of every host's pod."""
    return [
        (
            str(slice.index),
            slice.state,
            f"{slice.hosts_ready}/{slice.hosts}",
            str(slice.restarts),
            "  ".join(f"{pod.host}:{pod.phase}" for pod in job.pods if pod.slice == slice.index),
        )
        for slice in job.slices
    ]


def pod_rows(job: JobStatus) -> list[Row]:
    """A row under `POD_COLUMNS` for each container; what belongs to the pod stands in the pod's first."""
    return [row for pod in job.pods for row in _rows_of_pod(pod)]


def _rows_of_pod(pod: PodStatus) -> Iterator[Row]:
    if not pod.containers:
        yield (pod.name, pod.phase, "", "", "", "", pod.reason)
    for number, container in enumerate(pod.containers):
        name, phase, reason = ("", "", "") if number else (pod.name, pod.phase, pod.reason)
        yield (name, phase, *_cells(container), container.reason or reason)


def _cells(container: ContainerStatus) -> Row:
    code = "" if container.exit_code is None else str(container.exit_code)
    return (container.name, container.state, str(container.restarts), code)


def _slices(job: JobStatus) -> str:
    return f"{job.num_slices} x {job.compute_type}" if job.compute_type else str(job.num_slices)


def _ago(time: datetime | None) -> str:
    """`3m ago`: in the largest unit of which there are two, or in seconds."""
    if time is None:
        return ""
    seconds = max(0, int((datetime.now(UTC) - time).total_seconds()))
    for unit, size_s in (("d", 86400), ("h", 3600), ("m", 60)):
        if seconds >= 2 * size_s:
            return f"{seconds // size_s}{unit} ago"
    return f"{seconds}s ago"


def _time(time: datetime | None) -> str:
    return "" if time is None else time.astimezone().strftime("%Y-%m-%d %H:%M:%S")
