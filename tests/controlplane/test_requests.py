"""What the backend asks of an API server, on any: planning, sending, looking, and each refusal."""

from __future__ import annotations

import pytest

from pw.backends.gke import GkeBackend
from pw.errors import JobExistsError, JobNotFoundError, SpecError, WaitTimeoutError
from pw.status import JobRef, JobState
from tests.controlplane.conftest import MakeSpec


def test_a_submitted_job_is_found_by_its_reference_and_in_the_list(
    any_backend: GkeBackend, make_spec: MakeSpec
) -> None:
    spec = make_spec(num_slices=2, restarts=3)

    ref = any_backend.submit(any_backend.plan(spec))

    status = any_backend.get(JobRef.parse(str(ref), backend="gke"))
    assert status.state is JobState.PENDING
    assert (status.compute_type, status.num_slices, status.max_restarts) == ("v6e-8", 2, 3)
    assert ref in [job.ref for job in any_backend.list()]


def test_a_name_in_use_is_refused_with_the_jobs_name(any_backend: GkeBackend, make_spec: MakeSpec) -> None:
    plan = any_backend.plan(make_spec())
    any_backend.submit(plan)

    with pytest.raises(JobExistsError, match=plan.spec.name):
        any_backend.submit(plan)


def test_replace_leaves_a_job_that_runs(any_backend: GkeBackend, make_spec: MakeSpec) -> None:
    plan = any_backend.plan(make_spec())
    ref = any_backend.submit(plan)

    with pytest.raises(JobExistsError, match=ref.name):
        any_backend.submit(plan, replace=True)
    assert any_backend.get(ref).state is JobState.PENDING


def test_planning_sends_nothing(any_backend: GkeBackend, make_spec: MakeSpec) -> None:
    plan = any_backend.plan(make_spec())

    with pytest.raises(JobNotFoundError, match=plan.spec.name):
        any_backend.get(JobRef("gke", plan.spec.name))


def test_an_image_without_a_registry_is_refused(any_backend: GkeBackend, make_spec: MakeSpec) -> None:
    with pytest.raises(SpecError, match="my_base_image"):
        any_backend.plan(make_spec(image="my_base_image"))


def test_every_verb_says_that_there_is_no_such_job(any_backend: GkeBackend) -> None:
    ref = JobRef("gke", "absent")
    for verb in (any_backend.get, any_backend.cancel, any_backend.delete, any_backend.wait):
        with pytest.raises(JobNotFoundError, match="'absent'"):
            verb(ref)


def test_a_job_that_runs_is_not_deleted(any_backend: GkeBackend, make_spec: MakeSpec) -> None:
    ref = any_backend.submit(any_backend.plan(make_spec()))

    with pytest.raises(SpecError, match="cancel it"):
        any_backend.delete(ref)


def test_a_cancelled_job_keeps_its_record(any_backend: GkeBackend, make_spec: MakeSpec) -> None:
    ref = any_backend.submit(any_backend.plan(make_spec()))

    any_backend.cancel(ref)

    assert any_backend.get(ref).state is JobState.CANCELLED
    assert any_backend.wait(ref).state is JobState.CANCELLED


def test_waiting_ends_when_the_time_is_over(any_backend: GkeBackend, make_spec: MakeSpec) -> None:
    ref = any_backend.submit(any_backend.plan(make_spec()))

    with pytest.raises(WaitTimeoutError, match=ref.name):
        any_backend.wait(ref, timeout_s=0.2)
