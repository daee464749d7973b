"""`pw job fault`: loses or stops slices of a running job on purpose."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from pw import console, faults, fields, jobs
from pw.backends import Backend
from pw.commands import _shared
from pw.commands._shared import Where, placed
from pw.errors import SpecError
from pw.faults import Fault
from pw.scenario import Scenario, read
from pw.status import JobRef

_COLUMNS = ("SLICE", "FAULT", "FOR")


@placed
def fault(
    *,
    where: Where,
    job: _shared.JobArgument = None,
    slices: Annotated[
        list[str] | None, typer.Option("--slice", metavar="N", help="Which slice; may be repeated.")
    ] = None,
    kind: Annotated[
        str | None, typer.Option(metavar="|".join(faults.KINDS), help="Lose the slice's hosts, or have them hang.")
    ] = None,
    for_: Annotated[
        str | None, typer.Option("--for", metavar="DURATION", help="How long it hangs; until the job ends if left out.")
    ] = None,
    scenario: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Instead: faults at their times, from YAML; ends with the last.")
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="On a cluster, do not ask.")] = False,
    json: _shared.JsonFlag = False,
) -> None:
    """Lose or stop slices of a running job on purpose, and see it live through that.

    A slice that crashes loses what is on it, and comes back by the job's own rules.
    """
    indices = None if slices is None else [_shared.count("--slice", text) for text in slices]
    wanted = _wanted(indices, kind, _shared.seconds("--for", for_), scenario)
    chosen, ref = _shared.choose(where, job)
    if chosen.name != "local" and not yes:
        _ask(chosen, ref, indices or [])
    if isinstance(wanted, Scenario):
        done = _play(chosen, ref, wanted)
    else:
        jobs.inject(chosen, wanted, ref)
        done = wanted
    console.table(_COLUMNS, [_row(each) for each in done], json=json, records=done)
    console.say(f"  pw job status {ref}")


def _wanted(
    slices: list[int] | None, kind: str | None, for_s: int | None, scenario: Path | None
) -> list[Fault] | Scenario:
    """What the flags ask for. Raises SpecError where they contradict each other or say too little."""
    given = {"--slice": slices, "--kind": kind, "--for": for_s}
    if scenario is not None:
        if clash := next((flag for flag, value in given.items() if value is not None), None):
            raise SpecError(f"--scenario and {clash} contradict each other: leave one out")
        return read(scenario)
    if slices is None or kind is None:
        missing = [flag for flag in ("--slice", "--kind") if given[flag] is None]
        raise SpecError(f"missing: {', '.join(missing)} (or --scenario)", hints=("pw job fault --help",))
    return [Fault(kind, index, for_s) for index in slices]


def _play(backend: Backend, ref: JobRef, scenario: Scenario) -> list[Fault]:
    """The faults that happened; tells of each as it does."""
    done: list[Fault] = []
    for fault, problem in jobs.play(backend, scenario, ref):
        if problem:
            console.warn(f"left out: {problem}")
        else:
            console.say(f"slice {fault.slice}: {fault.kind}")
            done.append(fault)
    return done


def _row(fault: Fault) -> tuple[str, str, str]:
    return (str(fault.slice), fault.kind, "" if fault.for_s is None else fields.duration_text(fault.for_s))


def _ask(backend: Backend, ref: JobRef, slices: list[int]) -> None:
    """Returns when the user wants it; raises SpecError where nobody can be asked."""
    which = ", ".join(f"slice {index}" for index in slices) or "slices, as the scenario has them,"
    what = f"the worker pods of {which} of job {ref}"
    if not sys.stdin.isatty():
        raise SpecError(f"on backend {backend.name!r} this deletes {what}: add --yes")
    typer.confirm(f"Delete {what}?", abort=True, err=True)
