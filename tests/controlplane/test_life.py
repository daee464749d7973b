"""A job's life as the cluster plays it: what status says, when wait ends, what cancel and delete leave."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

from pw.backends.gke import GkeBackend
from pw.errors import JobNotFoundError
from pw.status import JobRef, JobState, JobStatus
from tests.controlplane.cluster import Cluster
from tests.controlplane.conftest import MakeSpec

Submit = Callable[..., JobRef]
WATCH = "GET .*/jobsets.*watch=true"


@pytest.fixture
def submit(backend: GkeBackend, make_spec: MakeSpec) -> Submit:
    return lambda **fields: backend.submit(backend.plan(make_spec(**fields)))


def in_background(work: Callable[[], Any]) -> tuple[threading.Thread, list[Any]]:
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(work()), daemon=True)
    thread.start()
    return thread, found


def test_a_running_job_shows_slices_hosts_and_containers(cluster: Cluster, backend: GkeBackend, submit: Submit) -> None:
    ref = submit(num_slices=2)
    cluster.run(ref.name)

    status = backend.get(ref)

    assert status.state is JobState.RUNNING
    assert [(one.index, one.state, one.hosts_ready, one.hosts) for one in status.slices] == [
        (0, "ready", 2, 2),
        (1, "ready", 2, 2),
    ]
    head, *workers = status.pods
    assert [one.name for one in head.containers] == ["pathways-rm", "pathways-proxy", "main"]
    assert [(pod.slice, pod.host) for pod in workers] == [(0, 0), (0, 1), (1, 0), (1, 1)]


def test_a_job_that_finds_no_room_says_what_is_missing(cluster: Cluster, backend: GkeBackend, submit: Submit) -> None:
    ref = submit()
    cluster.pend(ref.name, "0/3 nodes are available: 3 Insufficient google.com/tpu.")

    status = backend.get(ref)

    assert status.state is JobState.PENDING
    assert "Insufficient google.com/tpu" in status.reason


@pytest.mark.parametrize("condition", ["DisruptionTarget", "TerminationTarget"])
def test_a_preempted_worker_is_a_slice_down_and_no_failure(
    cluster: Cluster, backend: GkeBackend, submit: Submit, condition: str
) -> None:
    ref = submit()
    worker = cluster.run(ref.name)[1]
    cluster.set_condition(worker, type=condition, status="True", reason="PreemptionByScheduler", message="by another")
    cluster.set_condition(worker, type="Ready", status="False")

    status = backend.get(ref)

    assert status.state is JobState.RUNNING
    assert status.reason.startswith("preempted (PreemptionByScheduler)")


def test_a_job_in_a_queue_is_suspended_and_names_it(cluster: Cluster, backend: GkeBackend, submit: Submit) -> None:
    ref = submit(queue="user-queue")
    cluster.jobsets[ref.name]["spec"]["suspend"] = True

    status = backend.get(ref)

    assert (status.state, status.reason) == (JobState.SUSPENDED, "waits in queue 'user-queue'")


def test_waiting_gives_the_commands_exit_code(cluster: Cluster, backend: GkeBackend, submit: Submit) -> None:
    ref = submit()
    cluster.run(ref.name)
    thread, found = in_background(lambda: backend.wait(ref))

    cluster.finish(ref.name, exit_code=7)
    thread.join(20)

    status: JobStatus = found[0]
    assert (status.state, status.exit_code) == (JobState.FAILED, 7)
    assert status.reason.startswith("the command exited with 7 (jobset failed due to one or more job failures")


def test_a_failed_pod_is_no_failed_job_while_restarts_remain(
    cluster: Cluster, backend: GkeBackend, submit: Submit
) -> None:
    ref = submit(restarts=3)
    head = cluster.run(ref.name)[0]
    cluster.end_pod(head, exit_code=1)
    cluster.run(ref.name, attempt=1)

    status = backend.get(ref)

    assert (status.state, status.restarts, status.restarts_counted) == (JobState.RUNNING, 1, 1)
    assert status.max_restarts == 3


def test_waiting_sees_what_changed_in_a_gap_that_the_server_forgot(
    cluster: Cluster, backend: GkeBackend, submit: Submit
) -> None:
    ref = submit()
    cluster.fail("GET", "jobsets.*watch=true", after=0, gone=True)
    thread, found = in_background(lambda: backend.wait(ref))
    cluster.server.await_request(WATCH)

    cluster.conclude(ref.name, "Completed")
    thread.join(20)

    assert found[0].state is JobState.SUCCEEDED


def test_waiting_goes_on_where_its_version_is_too_old(cluster: Cluster, backend: GkeBackend, submit: Submit) -> None:
    ref = submit()
    cluster.fail("GET", "jobsets.*watch=true", code=410, message="too old resource version")
    thread, found = in_background(lambda: backend.wait(ref))
    cluster.server.await_request(WATCH)

    cluster.conclude(ref.name, "Completed")
    thread.join(20)

    assert found[0].state is JobState.SUCCEEDED


def test_waiting_goes_on_over_a_watch_that_breaks(cluster: Cluster, backend: GkeBackend, submit: Submit) -> None:
    ref = submit()
    cluster.fail("GET", "jobsets.*watch=true", after=0, times=2)
    cluster.fail("GET", "jobsets.*watch=true", code=503, message="the server is starting", times=4)
    thread, found = in_background(lambda: backend.wait(ref))
    cluster.server.await_request(WATCH)

    cluster.run(ref.name)
    cluster.finish(ref.name)
    thread.join(20)

    assert found[0].state is JobState.SUCCEEDED


def test_cancelling_stops_the_pods(cluster: Cluster, backend: GkeBackend, submit: Submit) -> None:
    ref = submit()
    cluster.run(ref.name)

    backend.cancel(ref)

    assert not cluster.pods
    assert backend.get(ref).state is JobState.CANCELLED


def test_cancelling_a_queued_job_keeps_kueue_from_resuming_it(
    cluster: Cluster, backend: GkeBackend, submit: Submit
) -> None:
    ref = submit(queue="user-queue")
    store = cluster.server.store
    workloads = "/apis/kueue.x-k8s.io/v1beta2/namespaces/default/workloads"
    version = {"groupVersion": "kueue.x-k8s.io/v1beta2"}
    store.put("/apis", {"metadata": {"name": "kueue.x-k8s.io"}, "preferredVersion": version})
    uid = cluster.jobsets[ref.name]["metadata"]["uid"]
    metadata = {"name": "w", "labels": {"kueue.x-k8s.io/job-uid": uid}}
    store.put(workloads, {"metadata": metadata, "spec": {"active": True}})

    backend.cancel(ref)

    assert store.objects[workloads]["w"]["spec"]["active"] is False


def test_cancel_of_a_finished_job_does_nothing(cluster: Cluster, backend: GkeBackend, submit: Submit) -> None:
    ref = submit()
    cluster.run(ref.name)
    cluster.finish(ref.name)

    backend.cancel(ref)

    assert backend.get(ref).state is JobState.SUCCEEDED


def test_deleting_a_finished_job_frees_its_name(cluster: Cluster, backend: GkeBackend, submit: Submit) -> None:
    ref = submit()
    cluster.run(ref.name)
    cluster.finish(ref.name)

    backend.delete(ref)

    with pytest.raises(JobNotFoundError):
        backend.get(ref)
    assert not cluster.pods


def test_replace_deletes_a_finished_job_of_the_name(cluster: Cluster, backend: GkeBackend, make_spec: MakeSpec) -> None:
    plan = backend.plan(make_spec())
    old = cluster.jobsets
    ref = backend.submit(plan)
    first = old[ref.name]["metadata"]["uid"]
    cluster.run(ref.name)
    cluster.finish(ref.name)

    backend.submit(plan, replace=True)

    assert cluster.jobsets[ref.name]["metadata"]["uid"] != first
    assert backend.get(ref).state is JobState.PENDING


def test_the_list_is_of_pathways_jobs_newest_first(cluster: Cluster, backend: GkeBackend, submit: Submit) -> None:
    first, second = submit(), submit()
    cluster.jobsets[first.name]["metadata"]["creationTimestamp"] = "2026-01-01T00:00:00Z"
    cluster.server.store.put(
        "/apis/jobset.x-k8s.io/v1alpha2/namespaces/default/jobsets",
        {"metadata": {"name": "other"}, "spec": {"replicatedJobs": [{"name": "main"}]}},
    )

    assert [status.ref for status in backend.list()] == [second, first]
