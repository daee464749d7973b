"""A plan follows what the cluster has: node pools, a pool for the head, the fields of its JobSet."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pw.backends.gke import GkeBackend
from pw.config import Settings
from pw.errors import SpecError
from pw.specs import Plan
from tests.controlplane.apiserver import ApiServer
from tests.controlplane.cluster import Cluster
from tests.controlplane.conftest import MakeSpec


def jobs(plan: Plan) -> dict[str, Any]:
    return {job["name"]: job["template"]["spec"] for job in plan.manifest["spec"]["replicatedJobs"]}


def node_selector(plan: Plan, job: str) -> dict[str, str]:
    selector: dict[str, str] = jobs(plan)[job]["template"]["spec"]["nodeSelector"]
    return selector


@pytest.fixture
def bare(kubeconfig: Path, server: ApiServer) -> Cluster:
    """A cluster without nodes."""
    return Cluster(server)


def test_a_slice_takes_the_hosts_that_the_node_pool_has(bare: Cluster, settings: Settings, make_spec: MakeSpec) -> None:
    bare.add_pool("cpu-np", "n2-standard-64")
    bare.add_pool("tpu-8t", "ct6e-standard-8t", "tpu-v6e-slice", "2x4")

    plan = GkeBackend(settings).plan(make_spec(compute_type="v6e-8"))

    assert jobs(plan)["worker"]["parallelism"] == 1
    assert any("tpu-8t" in note for note in plan.notes)


def test_a_slice_keeps_4_chip_hosts_where_they_exist(backend: GkeBackend, make_spec: MakeSpec) -> None:
    assert jobs(backend.plan(make_spec(compute_type="v6e-8")))["worker"]["parallelism"] == 2


def test_a_machine_type_that_was_named_is_kept(bare: Cluster, settings: Settings, make_spec: MakeSpec) -> None:
    bare.add_pool("cpu-np", "n2-standard-64")
    bare.add_pool("tpu-8t", "ct6e-standard-8t", "tpu-v6e-slice", "2x4")

    plan = GkeBackend(settings).plan(make_spec(compute_type="ct6e-standard-4t", topology="2x4"))

    assert jobs(plan)["worker"]["parallelism"] == 2
    assert any("ct6e-standard-4t" in note for note in plan.notes)


def test_the_heads_pool_is_found_by_its_size(bare: Cluster, settings: Settings, make_spec: MakeSpec) -> None:
    bare.add_pool("default-pool", "e2-standard-4")
    bare.add_pool("large", "n4-standard-64")

    plan = GkeBackend(settings).plan(make_spec(pathways_head_np=""))

    assert node_selector(plan, "pathways-head") == {"cloud.google.com/gke-nodepool": "large"}


def test_of_large_pools_the_one_for_heads_is_taken(bare: Cluster, settings: Settings, make_spec: MakeSpec) -> None:
    bare.add_pool("a-large", "n4-standard-64")
    bare.add_pool("pathways-np", "n2-standard-64")

    plan = GkeBackend(settings).plan(make_spec(pathways_head_np=""))

    assert node_selector(plan, "pathways-head") == {"cloud.google.com/gke-nodepool": "pathways-np"}


def test_without_a_pool_for_the_head_the_job_is_refused_with_what_exists(
    bare: Cluster, settings: Settings, make_spec: MakeSpec
) -> None:
    bare.add_pool("default-pool", "e2-standard-4")

    with pytest.raises(SpecError, match=r"default-pool \(e2-standard-4\)"):
        GkeBackend(settings).plan(make_spec(pathways_head_np=""))


def test_a_field_that_the_installed_jobset_lacks_is_named_before_anything_is_sent(
    cluster: Cluster, backend: GkeBackend, make_spec: MakeSpec
) -> None:
    cluster.forget_field("ttlSecondsAfterFinished")

    with pytest.raises(SpecError, match=r"spec\.ttlSecondsAfterFinished"):
        backend.plan(make_spec())
    assert not [request for request in cluster.server.requests if request.startswith("POST")]


def test_what_may_not_be_read_is_not_checked_and_said(
    cluster: Cluster, backend: GkeBackend, make_spec: MakeSpec
) -> None:
    cluster.fail("GET", "/nodes", code=403, message="nodes is forbidden")

    plan = backend.plan(make_spec())

    assert any("node pools were not checked" in note and "nodes is forbidden" in note for note in plan.notes)


def test_without_a_cluster_there_is_a_manifest_and_a_note(
    tmp_path: Path, settings: Settings, make_spec: MakeSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
    spec = make_spec()

    plan = GkeBackend(settings).plan(spec)

    assert plan.manifest["metadata"]["name"] == spec.name
    assert any("were not checked" in note for note in plan.notes)
