"""Jobs as text."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest

from pw.commands import _draw
from pw.status import JobRef, JobState, JobStatus


def job(state: JobState = JobState.PENDING, *, age: timedelta = timedelta(seconds=1), reason: str = "") -> JobStatus:
    created = datetime.now(UTC) - age
    return JobStatus(
        ref=JobRef("local", "a" * 22),
        state=state,
        reason=reason,
        compute_type="v6e-256",
        num_slices=16,
        created=created,
        finished=created if state.final else None,
        restarts=5,
        restarts_counted=2,
        max_restarts=10,
    )


@pytest.mark.parametrize(
    ("age", "shown"),
    [
        (timedelta(seconds=5), "5s ago"),
        (timedelta(seconds=119), "119s ago"),
        (timedelta(minutes=3, seconds=59), "3m ago"),
        (timedelta(hours=47, minutes=1), "47h ago"),
        (timedelta(days=400), "400d ago"),
    ],
)
def test_a_list_says_how_long_ago(age: timedelta, shown: str) -> None:
    assert _draw.job_row(job(age=age))[4] == shown


def test_a_row_of_a_usual_job_fits_on_80_columns() -> None:
    row = _draw.job_row(job(JobState.SUCCEEDED, age=timedelta(days=40)))
    columns = [max(map(len, column)) for column in zip(_draw.JOB_COLUMNS, row, strict=True)]
    assert sum(columns) + 2 * (len(columns) - 1) <= 80


def test_the_first_line_says_why_a_job_waits() -> None:
    first, restarts, *_ = _draw.summary(job(reason="slice 0: no node\nhas room"))
    assert first == f"local://{'a' * 22}  Pending: slice 0: no node has room"
    assert restarts.endswith("2 of 10 restarts used (3 more that do not count)")
