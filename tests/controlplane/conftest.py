"""The gke backend against an API server on loopback: in memory, or a real one.

With PW_TEST_KUBECONFIG the tests of requests run against the current context of that file. Its cluster needs JobSet's
CRD and may be without nodes and controllers; the tests of what controllers do keep to the one in memory.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import yaml

from pw.backends.gke import GkeBackend
from pw.config import Settings
from pw.specs import JobSpec
from tests.controlplane.apiserver import TOKEN, ApiServer
from tests.controlplane.cluster import Cluster

MakeSpec = Callable[..., JobSpec]


@pytest.fixture
def server() -> Iterator[ApiServer]:
    server = ApiServer()
    yield server
    server.stop()


@pytest.fixture
def kubeconfig(server: ApiServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A kubeconfig whose current context `here` is the server in memory."""
    path = tmp_path / "kubeconfig"
    path.write_text(
        yaml.safe_dump(
            {
                "apiVersion": "v1",
                "kind": "Config",
                "current-context": "here",
                "clusters": [{"name": "here", "cluster": {"server": server.start()}}],
                "users": [{"name": "me", "user": {"token": TOKEN}}],
                "contexts": [{"name": "here", "context": {"cluster": "here", "user": "me"}}],
            }
        )
    )
    monkeypatch.setenv("KUBECONFIG", str(path))
    return path


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return Settings(backend="gke", state_dir=tmp_path / "state", sources={"namespace": "default"})


@pytest.fixture
def cluster(kubeconfig: Path, server: ApiServer) -> Cluster:
    """A cluster with a pool of 4-chip v6e hosts and one for the head."""
    cluster = Cluster(server)
    cluster.add_pool("cpu-np", "n2-standard-64")
    cluster.add_pool("tpu-np", "ct6e-standard-4t", "tpu-v6e-slice", "2x4", nodes=2)
    return cluster


@pytest.fixture
def backend(cluster: Cluster, settings: Settings) -> GkeBackend:
    return GkeBackend(settings)


@pytest.fixture
def any_backend(request: pytest.FixtureRequest, settings: Settings, monkeypatch: pytest.MonkeyPatch) -> GkeBackend:
    """The backend on the cluster of PW_TEST_KUBECONFIG, else on the one in memory."""
    real = os.environ.get("PW_TEST_KUBECONFIG")
    if real:
        monkeypatch.setenv("KUBECONFIG", real)
    else:
        request.getfixturevalue("cluster")
    return GkeBackend(settings)


@pytest.fixture
def make_spec() -> MakeSpec:
    """`make_spec(num_slices=2)`: a job of a fresh name, all that GKE wants, and what else is given."""

    def make(**fields: object) -> JobSpec:
        given: dict[str, object] = {
            "name": f"job-{uuid.uuid4().hex[:8]}",
            "compute_type": "v6e-8",
            "command": "python train.py",
            "image": "us-docker.pkg.dev/project/repo/train:1",
            "gcs_scratch_location": "gs://bucket/scratch",
            "pathways_head_np": "cpu-np",
        }
        return JobSpec(**(given | fields))  # type: ignore[arg-type]

    return make
