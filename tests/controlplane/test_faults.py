"""Faults of slices on a cluster: which pods are deleted, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from pw import jobs
from pw.backends.gke import GkeBackend
from pw.errors import SpecError
from pw.faults import CRASH, HANG, Fault
from pw.status import JobRef
from tests.controlplane.cluster import Cluster
from tests.controlplane.conftest import MakeSpec


@pytest.fixture
def ref(cluster: Cluster, backend: GkeBackend, make_spec: MakeSpec) -> JobRef:
    """A job of two slices whose pods run."""
    ref = backend.submit(backend.plan(make_spec(num_slices=2)))
    cluster.run(ref.name)
    return ref


def being_deleted(cluster: Cluster) -> dict[str, Any]:
    """The grace periods of the pods that are being deleted, by the beginning of their names."""
    return {
        name.rpartition("-")[0]: pod["metadata"].get("deletionGracePeriodSeconds")
        for name, pod in cluster.pods.items()
        if "deletionTimestamp" in pod["metadata"]
    }


def test_a_crash_deletes_the_pods_of_its_slice_without_grace(
    cluster: Cluster, backend: GkeBackend, ref: JobRef
) -> None:
    jobs.inject(backend, [Fault(CRASH, 1)], ref)

    assert being_deleted(cluster) == {f"{ref.name}-worker-1-0": 0, f"{ref.name}-worker-1-1": 0}
    assert [slice.state for slice in backend.get(ref).slices] == ["ready", "down"]


def test_a_crash_goes_on_where_a_pod_has_gone_by_itself(cluster: Cluster, backend: GkeBackend, ref: JobRef) -> None:
    first = next(name for name in cluster.pods if "-worker-0-0-" in name)
    cluster.fail("DELETE", f".*/pods/{first}", code=404)

    jobs.inject(backend, [Fault(CRASH, 0)], ref)

    assert being_deleted(cluster) == {f"{ref.name}-worker-0-1": 0}


@pytest.mark.parametrize(
    ("fault", "problem"),
    [(Fault(HANG, 0), "cannot hang: want crash"), (Fault(CRASH, 2), "has no slice 2: it has slices 0 to 1")],
)
def test_what_cannot_be_done_is_refused_and_deletes_nothing(
    cluster: Cluster, backend: GkeBackend, ref: JobRef, fault: Fault, problem: str
) -> None:
    with pytest.raises(SpecError, match=problem):
        jobs.inject(backend, [Fault(CRASH, 1), fault] if fault.kind == CRASH else [fault], ref)
    assert being_deleted(cluster) == {}


def test_a_slice_that_is_down_and_a_finished_job_cannot_crash(
    cluster: Cluster, backend: GkeBackend, ref: JobRef
) -> None:
    def crash() -> JobRef:
        return jobs.inject(backend, [Fault(CRASH, 0)], ref)

    crash()
    with pytest.raises(SpecError, match="slice 0 is down"):
        crash()
    cluster.finish(ref.name)
    with pytest.raises(SpecError, match="only a job that runs"):
        crash()
