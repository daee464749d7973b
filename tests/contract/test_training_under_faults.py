"""A training run whose slices crash at random ends as one whose slices do not, to the last bit."""

from __future__ import annotations

import random
import shlex
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from pathways_runtime import _contract
from pw import jobs
from pw.backends.local import LocalBackend
from pw.faults import CRASH, Fault
from pw.specs import JobSpec
from pw.status import JobRef, LogQuery

SCRIPT = Path(__file__).with_name("elastic_training.py")
SEED = 20260
Until = Callable[..., None]


@pytest.fixture
def train(local: LocalBackend) -> Callable[..., JobRef]:
    """`train(name, num_slices, steps)`: a job of the script, which makes a snapshot every ten steps."""

    def start(name: str, num_slices: int, steps: int) -> JobRef:
        spec = JobSpec(
            name=name,
            compute_type="v6e:2x2",
            num_slices=num_slices,
            command=shlex.join([sys.executable, str(SCRIPT), str(steps), "10"]),
            pathways_elastic_slices=num_slices,
            pathways_max_slice_restarts=1000,
        )
        return local.submit(local.plan(spec))

    return start


def lose_slices(local: LocalBackend, ref: JobRef, until: Until, *, crashes: int, num_slices: int, steps: int) -> None:
    """Lets a random slice crash at each of `crashes` random steps, once the job has lived through the crash before."""
    chance = random.Random(SEED)
    lines = (line.text for line in local.logs(ref, LogQuery(follow=True, container=_contract.USER_CONTAINER)))
    for at in sorted(chance.sample(range(1, steps * 3 // 4), crashes)):
        until(local, ref, lambda status: {slice.state for slice in status.slices} == {"ready"})
        read_to(lines, "step", at)
        jobs.inject(local, [Fault(CRASH, chance.randrange(num_slices))], ref)
        read_to(lines, "lost")
        read_to(lines, "restored")


def read_to(lines: Iterator[str], word: str, step: int = 0) -> None:
    """Reads on to a line that begins with the word, and has a number of at least `step` behind it."""
    for line in lines:
        if line.startswith(f"{word} ") and (not step or int(line.split()[1]) >= step):
            return
    pytest.fail(f"the job ended without {word!r}")


def said(local: LocalBackend, ref: JobRef, word: str) -> list[str]:
    """The lines that begin with a word, of a job that has succeeded."""
    jobs.check(local, jobs.wait(local, ref, timeout_s=600))
    query = LogQuery(container=_contract.USER_CONTAINER)
    return [line.text for line in local.logs(ref, query) if line.text.startswith(word)]


def check_that_it_ends_alike(
    local: LocalBackend, train: Callable[..., JobRef], until: Until, *, crashes: int, num_slices: int, steps: int
) -> None:
    calm, troubled = train("calm", num_slices, steps), train("troubled", num_slices, steps)
    lose_slices(local, troubled, until, crashes=crashes, num_slices=num_slices, steps=steps)
    assert said(local, troubled, "digest ") == said(local, calm, "digest ") != []
    assert len(said(local, troubled, "lost")) == crashes
    assert said(local, calm, "lost") == []
    assert sum(slice.restarts for slice in local.get(troubled).slices) == crashes


def test_training_ends_with_the_same_bits_though_slices_crash(
    local: LocalBackend, train: Callable[..., JobRef], until: Until
) -> None:
    check_that_it_ends_alike(local, train, until, crashes=2, num_slices=2, steps=200)


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_training_ends_with_the_same_bits_though_slices_crash_often(
    local: LocalBackend, train: Callable[..., JobRef], until: Until
) -> None:
    check_that_it_ends_alike(local, train, until, crashes=40, num_slices=4, steps=4000)
