"""`pw job fault`: loses or stops slices of a running job on purpose."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from pw import console, faults, fields, jobs
from pw.backends import Backend
from pw.commands import _shared
from pw.commands._shared import Where, placed
from pw.errors import SpecError
from pw.faults import Fault
from pw.status import JobRef

_COLUMNS = ("SLICE", "FAULT", "FOR")


@placed
def fault(
    *,
    where: Where,
    job: _shared.JobArgument = None,
    slices: Annotated[list[int], typer.Option("--slice", metavar="N", min=0, help="Which slice; may be repeated.")],
    kind: Annotated[
        str, typer.Option(metavar="|".join(faults.KINDS), help="Lose the slice's hosts, or have them hang.")
    ],
    for_: Annotated[
        str | None, typer.Option("--for", metavar="DURATION", help="How long it hangs; until the job ends if left out.")
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="On a cluster, do not ask.")] = False,
    json: _shared.JsonFlag = False,
) -> None:
    """Lose or stop slices of a running job on purpose, and see it live through that.

    A slice that crashes loses what is on it, and comes back by the job's own rules.
    """
    for_s = _shared.seconds("--for", for_)
    wanted = [Fault(kind, index, for_s) for index in slices]
    chosen, ref = _shared.choose(where, job)
    if chosen.name != "local" and not yes:
        _ask(chosen, ref, slices)
    jobs.inject(chosen, wanted, ref)
    rows = [(str(each.slice), each.kind, "" if for_s is None else fields.duration_text(for_s)) for each in wanted]
    console.table(_COLUMNS, rows, json=json, records=wanted)
    console.say(f"  pw job status {ref}")


def _ask(backend: Backend, ref: JobRef, slices: list[int]) -> None:
    """Returns when the user wants it; raises SpecError where nobody can be asked."""
    what = f"the worker pods of {', '.join(f'slice {index}' for index in slices)} of job {ref}"
    if not sys.stdin.isatty():
        raise SpecError(f"on backend {backend.name!r} this deletes {what}: add --yes")
    typer.confirm(f"Delete {what}?", abort=True, err=True)
