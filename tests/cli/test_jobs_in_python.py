"""`pw.jobs`: what the terminal can do, for a notebook."""

from __future__ import annotations

import pytest

from pw import backends, jobs
from pw.errors import JobFailedError, JobNotFoundError, SpecError, WaitTimeoutError
from pw.specs import JobSpec
from pw.status import JobRef, JobState

pytestmark = pytest.mark.usefixtures("stop_jobs")


def spec(name: str, command: str) -> JobSpec:
    return JobSpec(name=name, compute_type="v6e:1x1", command=command, restarts=0, grace_period_s=5)


def test_a_job_is_submitted_watched_and_deleted() -> None:
    backend = backends.get("local")
    job = jobs.submit(backend, spec("first", "echo hello"))
    assert job == JobRef("local", "first")
    lines = list(jobs.logs(backend, job, follow=True, container="main"))
    assert [line.text for line in lines] == ["hello"]
    status = jobs.wait(backend, "first", timeout_s=60)
    assert (status.state, status.exit_code) == (JobState.SUCCEEDED, 0)
    jobs.check(backend, status)
    assert jobs.delete(backend) == job
    with pytest.raises(JobNotFoundError):
        jobs.get(backend, job)


def test_a_plan_is_what_submit_sends() -> None:
    backend = backends.get("local")
    plan = backend.plan(spec("planned", "true"))
    assert jobs.submit(backend, plan).name == plan.manifest["metadata"]["name"]


def test_the_newest_job_is_meant_where_none_is_named_and_lists_are_narrowed() -> None:
    backend = backends.get("local")
    with pytest.raises(JobNotFoundError):
        jobs.newest(backend)
    for name in ("one", "two"):
        jobs.submit(backend, spec(name, "sleep 600"))
    assert jobs.get(backend).ref.name == "two"
    assert [status.ref.name for status in jobs.list(backend, name_contains="n")] == ["one"]
    jobs.cancel(backend, "one")
    assert [status.ref.name for status in jobs.list(backend, states=[JobState.CANCELLED])] == ["one"]
    with pytest.raises(WaitTimeoutError):
        jobs.wait(backend, timeout_s=0.1)


def test_check_raises_what_the_job_ended_with() -> None:
    backend = backends.get("local")
    jobs.submit(backend, spec("fails", "echo why; exit 9"))
    with pytest.raises(JobFailedError, match="'fails' failed") as caught:
        jobs.check(backend, jobs.wait(backend, timeout_s=60))
    assert caught.value.exit_code == 9
    assert any(hint.endswith("/main | why") for hint in caught.value.hints)


@pytest.mark.parametrize("text", ["", "a/b", "local://", "local://..", "Ünï", "local://a b"])
def test_what_names_no_job_is_refused(text: str) -> None:
    with pytest.raises(SpecError, match="names no job"):
        jobs.find(backends.get("local"), text)
