"""Each way in which a cluster says no, or nothing at all, and what the user is told."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from pw.backends.gke import GkeBackend
from pw.config import Settings
from pw.errors import AuthError, BackendError, BackendUnavailableError, ConfigError, SpecError
from pw.status import JobRef
from tests.controlplane.cluster import Cluster
from tests.controlplane.conftest import MakeSpec


def test_credentials_that_are_not_accepted_say_how_to_log_in(cluster: Cluster, backend: GkeBackend) -> None:
    cluster.fail("GET", "/jobsets", code=401, message="Unauthorized")

    with pytest.raises(AuthError, match=r"'here'.*Unauthorized") as raised:
        backend.list()
    assert any("gcloud auth login" in hint for hint in raised.value.hints)


def test_a_missing_permission_is_named(cluster: Cluster, backend: GkeBackend, make_spec: MakeSpec) -> None:
    plan = backend.plan(make_spec())
    cluster.fail("POST", "/jobsets", code=403, message='User "me" cannot create resource "jobsets"')

    with pytest.raises(AuthError, match='cannot create resource "jobsets"'):
        backend.submit(plan)


def test_what_a_webhook_refuses_is_the_jobs_fault(cluster: Cluster, backend: GkeBackend, make_spec: MakeSpec) -> None:
    said = 'admission webhook "vjobset.kb.io" denied the request: name is too long'
    cluster.fail("POST", "dryRun=All", code=403, message=said)

    with pytest.raises(SpecError, match="name is too long"):
        backend.plan(make_spec())


def test_an_invalid_object_gives_the_servers_own_words(
    cluster: Cluster, backend: GkeBackend, make_spec: MakeSpec
) -> None:
    plan = backend.plan(make_spec())
    cluster.fail("POST", "/jobsets", code=422, message="spec.replicatedJobs[1].replicas: must be positive")

    with pytest.raises(BackendError, match=r"spec.replicatedJobs\[1\].replicas: must be positive"):
        backend.submit(plan)


def test_a_server_that_keeps_failing_is_a_backend_error(cluster: Cluster, backend: GkeBackend) -> None:
    cluster.fail("GET", "/jobsets", code=500, message="etcdserver: request timed out", times=99)

    with pytest.raises(BackendError, match="etcdserver: request timed out"):
        backend.list()


def test_a_server_that_fails_once_is_asked_again(cluster: Cluster, backend: GkeBackend) -> None:
    cluster.fail("GET", "/jobsets", code=503, message="starting")

    assert backend.list() == []


def test_a_cluster_without_jobset_is_told_from_a_job_that_is_not_there(cluster: Cluster, backend: GkeBackend) -> None:
    cluster.fail("GET", "/jobsets", code=404, message="404 page not found")

    with pytest.raises(BackendError, match="JobSet is not installed"):
        backend.get(JobRef("gke", "absent"))


def test_a_server_that_does_not_listen_is_named(kubeconfig: Path, settings: Settings) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    text = kubeconfig.read_text()
    address = next(word for word in text.split() if word.startswith("http://"))
    kubeconfig.write_text(text.replace(address, f"http://127.0.0.1:{port}"))

    with pytest.raises(BackendUnavailableError, match=r"'here' cannot be reached.*refused"):
        GkeBackend(settings).list()


def test_a_server_whose_certificate_is_not_trusted_is_named(kubeconfig: Path, settings: Settings) -> None:
    kubeconfig.write_text(kubeconfig.read_text().replace("http://", "https://"))

    with pytest.raises(BackendUnavailableError, match=r"'here' cannot be reached"):
        GkeBackend(settings).list()


def test_a_missing_kubeconfig_says_how_to_get_one(
    tmp_path: Path, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))

    with pytest.raises(ConfigError, match="no kubeconfig") as raised:
        GkeBackend(settings).list()
    assert "gcloud container clusters get-credentials" in raised.value.hints[0]


def test_a_cluster_that_the_kubeconfig_does_not_have_says_how_to_add_it(kubeconfig: Path, tmp_path: Path) -> None:
    settings = Settings(project="p", location="us-east5", cluster="c", state_dir=tmp_path)

    with pytest.raises(ConfigError, match=r"no context 'gke_p_us-east5_c'.*it has here") as raised:
        GkeBackend(settings).list()
    assert raised.value.hints == ("gcloud container clusters get-credentials c --location=us-east5 --project=p",)
