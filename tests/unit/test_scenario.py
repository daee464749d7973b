"""Scenarios of faults in files: what is read, what is refused, and that a seed always means the same slices."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from pw import scenario
from pw.errors import SpecError
from pw.faults import CRASH, HANG, Fault
from pw.scenario import Scenario

Read = Callable[[str], Scenario]


@pytest.fixture
def read(tmp_path: Path) -> Read:
    def write_and_read(text: str) -> Scenario:
        path = tmp_path / "faults.yaml"
        path.write_text(text)
        return scenario.read(path)

    return write_and_read


def test_faults_come_in_order_with_their_waits(read: Read) -> None:
    found = read(
        """
        faults:
          - {after: 1m5s, slice: 1, kind: crash}
          - {after: 0, slice: 0, kind: hang, for: 30s}
        """
    )
    assert found.faults(2) == [(65, Fault(CRASH, 1)), (0, Fault(HANG, 0, 30))]


def test_a_seed_means_the_same_slices_each_time_and_another_means_others(read: Read) -> None:
    steps = "faults: [" + ", ".join(["{after: 1s, slice: random, kind: crash}"] * 50) + "]"
    first, again, other = ([fault.slice for _, fault in read(f"seed: {seed}\n{steps}").faults(4)] for seed in (7, 7, 8))
    assert first == again != other
    assert set(first) == {0, 1, 2, 3}


def test_a_named_slice_does_not_change_which_the_random_ones_are(read: Read) -> None:
    def slices(second: str) -> list[int]:
        kinds = ["random", second, "random"]
        text = ", ".join(f"{{after: 1s, slice: {slice}, kind: crash}}" for slice in kinds)
        return [fault.slice for _, fault in read(f"faults: [{text}]").faults(100)]

    assert slices("random")[::2] == slices("5")[::2]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "want seed, faults"),
        ("- a", "want seed, faults"),
        ("seed: 1", "want faults: a list"),
        ("faults: []", "want faults: a list"),
        ("faults: {after: 1s}", "want faults: a list"),
        ("fautls: []", "key 'fautls' is unknown: want one of seed, faults"),
        ("seed: x\nfaults: [{after: 1s, slice: 0, kind: crash}]", "'x' is not a number from 0"),
        ("faults: [crash]", "fault 1: want after, slice, kind, for"),
        ("faults: [{slice: 0, kind: crash}]", "fault 1: after is missing"),
        ("faults: [{after: soon, slice: 0, kind: crash}]", "fault 1: want a duration"),
        ("faults: [{after: 1s, kind: crash}]", "fault 1: slice is missing"),
        ("faults: [{after: 1s, slice: -1, kind: crash}]", "fault 1: '-1' is not a number from 0"),
        ("faults: [{after: 1s, slice: [0], kind: crash}]", "fault 1: slice: want one value"),
        ("faults: [{after: 1s, slice: 0, kind: slow}]", "fault 1: fault 'slow' is not supported yet"),
        ("faults: [{after: 1s, slice: 0, kind: crash, for: 1s}]", "fault 1: a crash has no duration"),
        ("faults: [{after: 1s, slice: 0, kind: crash, at: 1s}]", "fault 1: key 'at' is unknown"),
        ("faults: [{after: 1s, slice: 0, kind: crash}, 3]", "fault 2: "),
        ("faults: [", "is not YAML"),
        ("faults: !!python/object:os.system {}", "want faults: a list"),
        ("? [a]\n: b", "is not YAML"),
    ],
)
def test_what_is_no_scenario_is_refused_with_the_file_and_the_fault(read: Read, text: str, problem: str) -> None:
    with pytest.raises(SpecError, match=r"faults\.yaml") as caught:
        read(text)
    assert problem in caught.value.message


def test_a_file_that_is_not_there_is_said(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="cannot be read"):
        scenario.read(tmp_path / "none.yaml")
