"""The health of slices: what a stamp says about what lives on them."""

from __future__ import annotations

import threading

from hypothesis import given
from hypothesis import strategies as st

from pathways_runtime.emulator.slices import Slices, Stamp

NUM_SLICES = 3


@given(
    st.lists(st.tuples(st.sampled_from(["up", "down", "stamp"]), st.sets(st.integers(0, NUM_SLICES - 1), min_size=1)))
)
def test_a_stamp_lives_exactly_until_one_of_its_slices_is_lost(steps: list[tuple[str, set[int]]]) -> None:
    slices = Slices(NUM_SLICES)
    up: set[int] = set()
    living: list[tuple[Stamp, set[int]]] = []
    dead: list[Stamp] = []
    for action, indices in steps:
        if action == "up":
            up |= indices
            for index in indices:
                slices.mark_up(index)
        elif action == "down":
            up -= indices
            dead += [stamp for stamp, on in living if on & indices]
            living = [(stamp, on) for stamp, on in living if not on & indices]
            for index in indices:
                slices.mark_down(index, "test")
        elif indices <= up:
            living.append((slices.stamp(indices), indices))
        else:
            dead.append(slices.stamp(indices))
        assert all(slices.lost(stamp) is None for stamp, _ in living)
        assert all(slices.lost(stamp) is not None for stamp in dead)
        assert {index for index in range(NUM_SLICES) if slices.is_up(index)} == up


def test_the_loss_is_told_with_its_reason_while_down_and_after_the_return() -> None:
    slices = Slices(2)
    slices.mark_up(1)
    stamp = slices.stamp([1])
    slices.mark_down(1, "host 0 is lost")
    assert slices.lost(stamp) == "slice 1 is down: host 0 is lost"
    slices.mark_up(1)
    assert slices.lost(stamp) == "slice 1 was lost and has come back since: host 0 is lost"
    assert slices.lost(slices.stamp([1])) is None


def test_a_loss_that_is_told_twice_counts_once() -> None:
    slices = Slices(1)
    slices.mark_up(0)
    slices.mark_down(0, "first")
    slices.mark_down(0, "second")
    assert slices.state(0) == (False, 1, "first")


def test_subscribers_hear_changes_in_order_until_they_leave() -> None:
    slices = Slices(2)
    heard: list[tuple[int, bool, str]] = []
    unsubscribe = slices.subscribe(lambda index, up, reason: heard.append((index, up, reason)))
    slices.mark_up(1)
    slices.mark_up(1)
    slices.mark_down(1, "crash")
    unsubscribe()
    slices.mark_up(0)
    assert heard == [(1, True, ""), (1, False, "crash")]


def test_a_wait_ends_when_the_last_slice_comes_up() -> None:
    slices = Slices(2)
    results: list[bool] = []
    waiter = threading.Thread(target=lambda: results.append(slices.wait_up([0, 1], timeout_s=30)))
    waiter.start()
    slices.mark_up(0)
    assert not results
    slices.mark_up(1)
    waiter.join(timeout=30)
    assert results == [True]


def test_a_wait_for_a_slice_that_stays_down_times_out() -> None:
    assert not Slices(1).wait_up([0], timeout_s=0.01)


def test_started_means_that_each_slice_was_up_once() -> None:
    slices = Slices(2)
    slices.mark_up(0)
    assert not slices.wait_started([0, 1], timeout_s=0)
    slices.mark_down(0, "crash")
    slices.mark_up(1)
    assert slices.wait_started([0, 1], timeout_s=0)
