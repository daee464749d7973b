"""What is done to a slice of a running job on purpose, to see the job live through it. Values and their checks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pw.errors import SpecError
from pw.status import JobStatus

CRASH = "crash"
HANG = "hang"
KINDS = (CRASH, HANG)
# Pathways has these as well; no backend does them yet.
UNSUPPORTED = ("preempt", "slow")


@dataclass(frozen=True, slots=True)
class Fault:
    """What happens to the slice of index `slice`: all its hosts crash, or hang for `for_s` seconds.

    Without `for_s` they hang until they crash or the job ends.
    """

    kind: str
    slice: int
    for_s: int | None = None

    def __post_init__(self) -> None:
        if self.kind in UNSUPPORTED:
            raise SpecError(f"fault {self.kind!r} is not supported yet: want {' or '.join(KINDS)}")
        if self.kind not in KINDS:
            raise SpecError(f"fault {self.kind!r} is unknown: want {' or '.join(KINDS)}")
        if self.for_s is not None and self.kind != HANG:
            raise SpecError(f"a {self.kind} has no duration: leave it out, or let the slice {HANG}")
        if self.for_s is not None and self.for_s < 1:
            raise SpecError(f"a slice cannot hang for {self.for_s} s: want 1s or more")


def check_all(status: JobStatus, faults: Sequence[Fault]) -> None:
    """Raises SpecError for faults that cannot happen to the job now."""
    if status.state.final:
        raise SpecError(f"job {status.ref.name!r} is {status.state}: only a job that runs can have a fault")
    states = {slice.index: slice.state for slice in status.slices}
    seen: set[int] = set()
    for fault in faults:
        check_slice(status, fault)
        if fault.slice in seen:
            raise SpecError(f"slice {fault.slice} is named twice: one fault at a time")
        seen.add(fault.slice)
        if problem := refusal(states[fault.slice], fault):
            raise SpecError(f"job {status.ref.name!r}: {problem}", hints=_look(status))


def check_slice(status: JobStatus, fault: Fault) -> None:
    """Raises SpecError for a slice that the job does not have."""
    count = len(status.slices)
    if fault.slice not in range(count):
        known = f"has slices 0 to {count - 1}" if count else "has no slices yet"
        raise SpecError(f"job {status.ref.name!r} has no slice {fault.slice}: it {known}", hints=_look(status))


def refusal(state: str, fault: Fault) -> str:
    """Why a slice in this state (as in SliceStatus) cannot have the fault; "" where it can."""
    if state == "ready" or (state == "hung" and fault.kind == CRASH):
        return ""
    return f"slice {fault.slice} is {state}: a {fault.kind} needs one that is ready"


def _look(status: JobStatus) -> tuple[str, ...]:
    return (f"pw job status {status.ref}",)
