"""What every backend does with a job from submit to delete."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from pw.backends import Backend
from pw.errors import JobExistsError, JobNotFoundError, SpecError, WaitTimeoutError
from pw.status import JobRef, JobState, LogQuery

Saw = Callable[..., str]


def texts(backend: Backend, ref: JobRef, **query: Any) -> list[str]:
    return [line.text for line in backend.logs(ref, LogQuery(**query))]


def test_a_command_that_ends_with_0_has_succeeded(backend: Backend, make: Any) -> None:
    ref = backend.submit(make.command("echo done"))
    status = backend.wait(ref)
    assert (status.state, status.exit_code) == (JobState.SUCCEEDED, 0)
    assert status.started and status.finished
    assert status.created <= status.started <= status.finished
    assert texts(backend, ref) == ["done"]


@pytest.mark.parametrize(("script", "code"), [("exit 7", 7), ("kill -KILL $$", 137), ("kill -TERM $$", 143)])
def test_a_command_that_fails_gives_its_exit_code_as_kubernetes_does(
    backend: Backend, make: Any, script: str, code: int
) -> None:
    status = backend.wait(backend.submit(make.command(script)))
    assert (status.state, status.exit_code) == (JobState.FAILED, code)
    assert "BackoffLimitExceeded" in status.reason


def test_a_job_runs_on_after_wait_has_given_up(backend: Backend, make: Any) -> None:
    ref = backend.submit(make.command("exec sleep 600"))
    with pytest.raises(WaitTimeoutError):
        backend.wait(ref, timeout_s=0.05)
    assert not backend.get(ref).state.final


def test_cancel_ends_a_job_and_twice_does_no_more(backend: Backend, make: Any, saw: Saw) -> None:
    job = make.job(make.sh("echo up; exec sleep 600"))
    ref = backend.submit(make.jobset(job, failurePolicy={"maxRestarts": 1}))
    saw(backend, ref, "up")
    backend.cancel(ref)
    cancelled = backend.get(ref)
    assert (cancelled.state, cancelled.exit_code, cancelled.restarts) == (JobState.CANCELLED, 143, 0)
    backend.cancel(ref)
    assert backend.get(ref) == cancelled


def test_cancel_of_a_finished_job_does_nothing(backend: Backend, make: Any) -> None:
    ref = backend.submit(make.command("true"))
    finished = backend.wait(ref)
    backend.cancel(ref)
    assert backend.get(ref) == finished


def test_a_taken_name_is_refused_and_names_the_job(backend: Backend, make: Any) -> None:
    ref = backend.submit(make.command("exec sleep 600"))
    for replace in (False, True):
        with pytest.raises(JobExistsError, match="'job'"):
            backend.submit(make.command("true"), replace=replace)
    assert not backend.get(ref).state.final


def test_replace_takes_the_place_of_a_finished_job(backend: Backend, make: Any) -> None:
    backend.wait(backend.submit(make.command("echo old")))
    with pytest.raises(JobExistsError, match="--replace"):
        backend.submit(make.command("echo new"))
    ref = backend.submit(make.command("echo new"), replace=True)
    backend.wait(ref)
    assert texts(backend, ref) == ["new"]


def test_of_many_submits_of_one_name_one_wins(backend: Backend, make: Any) -> None:
    def attempt(number: int) -> bool:
        try:
            backend.submit(make.command(f"echo {number}; exec sleep 600"))
        except JobExistsError:
            return False
        return True

    with ThreadPoolExecutor(8) as pool:
        assert sum(pool.map(attempt, range(8))) == 1
    assert len(backend.list()) == 1


def test_delete_frees_the_name_of_a_finished_job_only(backend: Backend, make: Any) -> None:
    ref = backend.submit(make.command("exec sleep 600"))
    with pytest.raises(SpecError, match="cancel it first"):
        backend.delete(ref)
    backend.cancel(ref)
    backend.delete(ref)
    with pytest.raises(JobNotFoundError):
        backend.get(ref)
    backend.wait(backend.submit(make.command("true")))


def test_the_list_begins_with_the_newest(backend: Backend, make: Any) -> None:
    for name in ("b", "a", "c"):
        backend.wait(backend.submit(make.command("true", name=name)))
    assert [status.ref.name for status in backend.list()] == ["c", "a", "b"]


def test_a_job_that_is_not_there_is_said_by_every_verb(backend: Backend) -> None:
    ref = JobRef(backend.name, "missing")
    for verb in (backend.get, backend.cancel, backend.delete, backend.wait, lambda ref: backend.logs(ref, LogQuery())):
        with pytest.raises(JobNotFoundError, match="'missing'"):
            verb(ref)


def test_logs_can_be_narrowed(backend: Backend, make: Any) -> None:
    workers = make.job(
        make.sh('for i in 1 2 3; do echo "slice $SLICE line $i"; done', env=[slice_of_pod()]), name="worker", replicas=2
    )
    head = make.job(make.sh("echo one; echo two >&2"), make.sh("echo other", name="other"))
    ref = backend.submit(make.jobset(head, workers))
    backend.wait(ref)
    assert texts(backend, ref, slice=1) == [f"slice 1 line {number}" for number in (1, 2, 3)]
    assert texts(backend, ref, slice=0, tail=1) == ["slice 0 line 3"]
    assert texts(backend, ref, container="other") == ["other"]
    lines = list(backend.logs(ref, LogQuery()))
    assert lines == sorted(lines, key=lambda line: line.time)
    assert {line.stream for line in lines if line.text == "two"} == {"stderr"}
    assert texts(backend, ref, since=lines[-1].time) == [line.text for line in lines if line.time == lines[-1].time]


def slice_of_pod() -> dict[str, Any]:
    path = "metadata.labels['jobset.sigs.k8s.io/job-index']"
    return {"name": "SLICE", "valueFrom": {"fieldRef": {"fieldPath": path}}}


def test_following_gives_every_line_and_ends_with_the_job(backend: Backend, make: Any) -> None:
    ref = backend.submit(make.command("for i in $(seq 2000); do echo line $i; done; printf 'no newline'"))
    assert texts(backend, ref, follow=True) == [*(f"line {i + 1}" for i in range(2000)), "no newline"]
    assert backend.get(ref).state.final


def test_following_a_finished_job_gives_its_last_lines_and_ends(backend: Backend, make: Any) -> None:
    ref = backend.submit(make.command("seq 100"))
    backend.wait(ref)
    assert texts(backend, ref, follow=True, tail=2) == ["99", "100"]


def test_logs_of_what_the_job_does_not_have_are_refused(backend: Backend, make: Any) -> None:
    workers = make.job(make.sh("true", "host"), name="worker", replicas=2)
    ref = backend.submit(make.jobset(make.job(make.sh("true")), workers))
    backend.wait(ref)
    with pytest.raises(SpecError, match="no container 'nosuch': want main, host"):
        texts(backend, ref, container="nosuch")
    for index in (2, -1):
        with pytest.raises(SpecError, match=f"no slice {index}: want 0 to 1"):
            texts(backend, ref, slice=index)
