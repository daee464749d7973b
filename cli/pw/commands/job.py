"""`pw job`: submit, watch and stop jobs."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Annotated

import typer

from pw import console, jobs
from pw.commands import _draw, _shared
from pw.commands._shared import Where, placed
from pw.commands.job_fault import fault
from pw.commands.job_submit import SubmitCommand, submit
from pw.errors import SpecError
from pw.status import JobState, LogQuery

app = typer.Typer(help="Submit, watch and stop jobs.")
app.command("fault")(fault)
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
    console.table(_draw.JOB_COLUMNS, [_draw.job_row(job) for job in found], json=json, records=found)
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
    console.out("\n".join(_draw.summary(found)))
    for columns, rows in ((_draw.SLICE_COLUMNS, _draw.slice_rows(found)), (_draw.POD_COLUMNS, _draw.pod_rows(found))):
        if rows:
            console.out()
            console.table(columns, rows)


@app.command()
@placed
def logs(
    *,
    where: Where,
    job: _shared.JobArgument = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on until the job ends.")] = False,
    tail: Annotated[str | None, typer.Option(metavar="N", help="Last lines of each container.")] = None,
    since: Annotated[str | None, typer.Option(metavar="DURATION", help="Only lines this new, such as 10m.")] = None,
    slice: Annotated[str | None, typer.Option(metavar="N", help="Only workers of this slice.")] = None,
    container: Annotated[str | None, typer.Option(metavar="NAME", help="Only this container, such as main.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print a JSON object for each line.")] = False,
) -> None:
    """Print a job's log lines; with -f until it ends, and then exit as it did."""
    seconds = _shared.seconds("--since", since)
    oldest = None if seconds is None else datetime.now(UTC) - timedelta(seconds=seconds)
    query = LogQuery(
        follow=follow,
        tail=None if tail is None else _shared.count("--tail", tail),
        since=oldest,
        slice=None if slice is None else _shared.count("--slice", slice),
        container=container,
    )
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
    found = jobs.get(chosen, ref)
    if not found.state.final:
        with console.progress(f"stopping job {ref.name!r}"):
            jobs.cancel(chosen, ref)
        found = jobs.get(chosen, ref)
    console.say(_draw.sentence(found))
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
    _shared.end(chosen, found)


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


def _state(text: str) -> JobState:
    for state in JobState:
        if state.value.lower() == text.lower():
            return state
    raise SpecError(f"--status {text!r} is unknown: want {', '.join(JobState)}")
