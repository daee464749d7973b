"""`pw job`: submit, watch and stop jobs."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Annotated

import typer

from pw import console, fields, jobs
from pw.commands import _shared
from pw.commands._shared import Where, placed
from pw.commands.job_submit import SubmitCommand, submit
from pw.errors import SpecError
from pw.status import ContainerStatus, JobState, JobStatus, LogQuery, PodStatus

app = typer.Typer(help="Submit, watch and stop jobs.")
app.command("submit", cls=SubmitCommand, context_settings={"allow_extra_args": True})(submit)


@app.command("list")
@placed
def list_jobs(
    *,
    where: Where,
    status: Annotated[
        list[str] | None, typer.Option("--status", metavar="STATE", help="Only jobs in this state; may be repeated.")
    ] = None,
    name_contains: Annotated[str, typer.Option(metavar="TEXT", help="Only jobs with this in the name.")] = "",
    json: _shared.JsonFlag = False,
) -> None:
    """List jobs, newest first."""
    states = [_state(text) for text in status or ()]
    chosen = _shared.choose_backend(where)
    found = jobs.list(chosen, states=states, name_contains=name_contains)
    console.table(_LIST_COLUMNS, [_list_row(job) for job in found], json=json, records=found)
    if not found and not json:
        console.say("no jobs")


@app.command("status")
@placed
def show_status(
    *,
    where: Where,
    job: _shared.JobArgument = None,
    json: _shared.JsonFlag = False,
) -> None:
    """Show a job: its slices, pods, restarts, and why it stands where it does."""
    chosen, ref = _shared.choose(where, job)
    found = jobs.get(chosen, ref)
    if json:
        console.print_json(found)
        return
    console.out("\n".join(_summary(found)))
    if found.slices:
        console.out()
        console.table(_SLICE_COLUMNS, _slice_rows(found))
    if found.pods:
        console.out()
        console.table(_POD_COLUMNS, [row for pod in found.pods for row in _pod_rows(pod)])


@app.command()
@placed
def logs(
    *,
    where: Where,
    job: _shared.JobArgument = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on until the job ends.")] = False,
    tail: Annotated[int | None, typer.Option(metavar="N", min=0, help="Last lines of each container.")] = None,
    since: Annotated[str | None, typer.Option(metavar="DURATION", help="Only lines this new, such as 10m.")] = None,
    slice: Annotated[int | None, typer.Option(metavar="N", min=0, help="Only workers of this slice.")] = None,
    container: Annotated[str | None, typer.Option(metavar="NAME", help="Only this container, such as main.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print a JSON object for each line.")] = False,
) -> None:
    """Print a job's log lines; with -f until it ends, and then exit as it did."""
    seconds = _shared.seconds("--since", since)
    oldest = None if seconds is None else datetime.now(UTC) - timedelta(seconds=seconds)
    query = LogQuery(follow=follow, tail=tail, since=oldest, slice=slice, container=container)
    chosen, ref = _shared.choose(where, job)
    if follow:
        with _shared.left_running(ref):
            _shared.follow(chosen, ref, query, json=json)
    else:
        _shared.print_logs(chosen, ref, query, json=json)


@app.command()
@placed
def cancel(
    *,
    where: Where,
    job: _shared.JobArgument = None,
    json: _shared.JsonFlag = False,
) -> None:
    """Stop a job within its grace period; of a finished job nothing changes."""
    chosen, ref = _shared.choose(where, job)
    with console.progress(f"stopping job {ref.name!r}"):
        jobs.cancel(chosen, ref)
    found = jobs.get(chosen, ref)
    console.say(f"job {ref.name!r}: {_outcome(found)}")
    if json:
        console.print_json(found)


@app.command()
@placed
def wait(
    *,
    where: Where,
    job: _shared.JobArgument = None,
    timeout: Annotated[
        str | None, typer.Option(metavar="DURATION", help="Wait no longer than this, and then exit 124.")
    ] = None,
    json: _shared.JsonFlag = False,
) -> None:
    """Wait until a job ends, and exit as it did."""
    timeout_s = _shared.seconds("--timeout", timeout)
    chosen, ref = _shared.choose(where, job)
    with _shared.left_running(ref):
        found = _shared.wait(chosen, ref, timeout_s=timeout_s)
    if json:
        console.print_json(found)
    jobs.check(chosen, found)
    console.say(f"job {ref.name!r}: {_outcome(found)}")


@app.command()
@placed
def delete(
    *,
    where: Where,
    job: _shared.JobArgument = None,
    json: _shared.JsonFlag = False,
) -> None:
    """Remove a finished job's record, so that its name is free."""
    chosen, ref = _shared.choose(where, job)
    jobs.delete(chosen, ref)
    console.say(f"deleted job {ref.name!r}")
    if json:
        console.print_json({"ref": ref})


_LIST_COLUMNS = ("NAME", "STATUS", "SLICES", "RESTARTS", "CREATED", "COMPLETED")
_SLICE_COLUMNS = ("SLICE", "STATE", "READY", "RESTARTS", "HOSTS")
_POD_COLUMNS = ("POD", "PHASE", "CONTAINER", "STATE", "RESTARTS", "EXIT", "WHY")


def _state(text: str) -> JobState:
    for state in JobState:
        if state.value.lower() == text.lower():
            return state
    raise SpecError(f"--status {text!r} is unknown: want {', '.join(JobState)}")


def _list_row(job: JobStatus) -> Sequence[str]:
    return (
        job.ref.name,
        job.state.value,
        _slices(job),
        f"{job.restarts}/{job.max_restarts}",
        _time(job.created),
        _time(job.finished),
    )


def _summary(job: JobStatus) -> list[str]:
    """What is true of the whole job, a line for each."""
    lines = [f"{job.ref}  {_outcome(job)}", f"{_slices(job)}, {job.restarts} of {job.max_restarts} restarts used"]
    lines.append(f"created {_time(job.created)}" + "".join(f", {word} {_time(time)}" for word, time in _times(job)))
    return lines


def _times(job: JobStatus) -> list[tuple[str, datetime]]:
    return [(word, time) for word, time in (("started", job.started), ("ended", job.finished)) if time is not None]


def _outcome(job: JobStatus) -> str:
    took = ""
    if job.started is not None and job.state is not JobState.PENDING:
        end = job.finished or datetime.now(UTC)
        took = f" after {fields.duration_text(max(0, round((end - job.started).total_seconds())))}"
        took = took if job.state.final else took.replace("after", "for")
    code = f", exit code {job.exit_code}" if job.exit_code else ""
    return f"{job.state}{took}{code}" + (f": {job.reason}" if job.reason else "")


def _slices(job: JobStatus) -> str:
    return f"{job.num_slices} x {job.compute_type}" if job.compute_type else str(job.num_slices)


def _slice_rows(job: JobStatus) -> list[Sequence[str]]:
    return [
        (
            str(slice.index),
            # Nobody looks for a finished job's slices: they have gone with it.
            "ended" if job.state.final else slice.state,
            f"{slice.hosts_ready}/{slice.hosts}",
            str(slice.restarts),
            "  ".join(f"{pod.host}:{pod.phase}" for pod in job.pods if pod.slice == slice.index),
        )
        for slice in job.slices
    ]


def _pod_rows(pod: PodStatus) -> list[Sequence[str]]:
    """A row for each container; what belongs to the pod stands in the first."""
    rows: list[Sequence[str]] = [_container_cells(container) for container in pod.containers] or [("", "", "", "", "")]
    first, *rest = ((name, state, restarts, code, why) for name, state, restarts, code, why in rows)
    name, state, restarts, code, why = first
    return [
        (pod.name, pod.phase, name, state, restarts, code, why or pod.reason),
        *(("", "", *cells) for cells in rest),
    ]


def _container_cells(container: ContainerStatus) -> Sequence[str]:
    code = "" if container.exit_code is None else str(container.exit_code)
    return (container.name, container.state, str(container.restarts), code, container.reason)


def _time(time: datetime | None) -> str:
    return "" if time is None else time.astimezone().strftime("%Y-%m-%d %H:%M:%S")
