"""What the local backend makes of a manifest before a process starts: refusals, names, environments, ports."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest

from pathways_runtime import _contract
from pw.backends.local import features, images
from pw.backends.local.jobset import PodKey
from pw.backends.local.metadata import Names, slice_of
from pw.backends.local.ports import Ports
from pw.errors import SpecError
from pw.render import render
from pw.specs import JobSpec

HEAD = PodKey(_contract.HEAD_JOB, 0, 0)
MACHINE = images.Machine("python3", Path("/user"), {"PATH": "/bin", "X": "shell"}, Path("/state/job"), "uid")


@pytest.fixture
def manifest() -> dict[str, Any]:
    spec = JobSpec(
        name="digits",
        compute_type="v6e:4x4",
        num_slices=2,
        command="python train.py",
        image="registry.example/user:1",
        gcs_scratch_location="gs://bucket/scratch",
        restart_on_exit_codes=(42,),
        shm_size="10Gi",
    )
    return render(spec)


def at(manifest: Any, path: str) -> Any:
    """The object at a path such as `spec.replicatedJobs.0.template`."""
    for part in path.split("."):
        manifest = manifest[int(part) if part.isdecimal() else part]
    return manifest


HEAD_POD = "spec.replicatedJobs.0.template.spec.template.spec"
HEAD_JOB = "spec.replicatedJobs.0.template.spec"


def test_what_the_launcher_renders_is_run(manifest: dict[str, Any]) -> None:
    features.check(manifest)
    assert features.notes(manifest) == ("/dev/shm is this machine's: its size has no effect locally",)


@pytest.mark.parametrize(
    ("path", "field", "value"),
    [
        ("metadata", "name", "../up"),
        (f"{HEAD_POD}.containers.0", "name", "a/b"),
        ("spec", "suspend", True),
        ("spec", "managedBy", "kueue"),
        ("spec.failurePolicy", "restartStrategy", "InPlaceRestart"),
        ("spec.failurePolicy.rules.0", "action", "RestartJob"),
        ("spec.replicatedJobs.1", "dependsOn", [{"name": "x", "status": "Ready"}]),
        (HEAD_JOB, "activeDeadlineSeconds", 60),
        (HEAD_JOB, "successPolicy", {"rules": []}),
        (HEAD_POD, "restartPolicy", "Always"),
        (HEAD_POD, "hostPID", True),
        (f"{HEAD_POD}.containers.0", "livenessProbe", {}),
        (f"{HEAD_POD}.containers.0", "envFrom", []),
        (f"{HEAD_POD}.containers.0", "restartPolicy", "Always"),
        (f"{HEAD_POD}.containers.0", "command", []),
        (f"{HEAD_POD}.containers.0", "env", [{"name": "A", "valueFrom": {"secretKeyRef": {"name": "s", "key": "k"}}}]),
        (f"{HEAD_POD}.containers.0", "env", [{"name": "A", "valueFrom": {"fieldRef": {"fieldPath": "spec.x"}}}]),
    ],
)
def test_what_is_not_run_is_refused_by_its_path(manifest: dict[str, Any], path: str, field: str, value: Any) -> None:
    broken = copy.deepcopy(manifest)
    at(broken, path)[field] = value
    with pytest.raises(SpecError) as caught:
        features.check(broken)
    leaf = "fieldPath" if "fieldRef" in str(value) else field if field != "env" else "secretKeyRef"
    assert leaf.removesuffix("Path") in caught.value.message


def test_a_mount_is_noted_as_not_made(manifest: dict[str, Any]) -> None:
    at(manifest, f"{HEAD_POD}.containers.0")["volumeMounts"].append({"name": "data", "mountPath": "/data"})
    assert any("/data" in note for note in features.notes(manifest))


def test_more_hosts_than_a_laptop_starts_at_once_are_noted(manifest: dict[str, Any]) -> None:
    at(manifest, "spec.replicatedJobs.1")["replicas"] = 8
    assert not any("processes" in note for note in features.notes(manifest))
    at(manifest, "spec.replicatedJobs.1")["replicas"] = 64
    assert any(note.startswith("256 hosts are 256 processes") and "3.8 GB" in note for note in features.notes(manifest))


def test_pods_have_the_names_and_labels_that_jobset_gives_them(manifest: dict[str, Any]) -> None:
    names = Names(manifest)
    assert names.coordinator == (HEAD, "digits-pathways-head-0-0.digits")
    assert (names.slices, names.hosts) == (2, 4)
    meta = names.meta(PodKey("worker", 1, 3), restart_attempt=2)
    assert meta["name"].startswith("digits-worker-1-3-")
    assert slice_of(meta["name"], "digits") == 1
    labels = {key.rpartition("/")[2]: value for key, value in meta["labels"].items()}
    assert labels["job-index"] == "1"
    assert labels["restart-attempt"] == "2"
    assert labels["replicatedjob-replicas"] == "2"
    assert labels["coordinator"] == "digits-pathways-head-0-0.digits"
    assert meta["completion_index"] == 3


def test_a_slice_is_no_part_of_other_pods_names() -> None:
    assert slice_of("digits-pathways-head-0-0-xxxxx", "digits") is None
    assert slice_of("digits-worker-10-0-xxxxx", "digits") == 10
    assert slice_of("digits-worker-worker-1-0-xxxxx", "digits-worker") == 1


def container(manifest: dict[str, Any], kind: str, name: str, job: int = 0) -> dict[str, Any]:
    pod = at(manifest, f"spec.replicatedJobs.{job}.template.spec.template.spec")
    found: dict[str, Any] = next(container for container in pod[kind] if container["name"] == name)
    return found


def launch(manifest: dict[str, Any], spec: dict[str, Any], key: PodKey, ports: Ports) -> images.Launch:
    meta = Names(manifest).meta(key, restart_attempt=0)
    port = ports.to_listen_on(key, spec["name"])
    return images.launch(spec, meta, MACHINE, localise=ports.localise, port=port)


@pytest.fixture
def ports(manifest: dict[str, Any]) -> Ports:
    key, address = Names(manifest).coordinator
    return Ports(key, address, at(manifest, HEAD_POD))


def test_servers_listen_on_any_port_and_are_found_where_they_do(manifest: dict[str, Any], ports: Ports) -> None:
    manager = container(manifest, "initContainers", _contract.RESOURCE_MANAGER_CONTAINER)
    first = launch(manifest, manager, HEAD, ports)
    assert first.argv[:3] == ["python3", "-m", "pathways_runtime.emulator"]
    assert "--server_port=0" in first.argv
    assert first.cwd == MACHINE.job_dir
    ports.listens(HEAD, _contract.RESOURCE_MANAGER_CONTAINER, 41001)
    ports.listens(HEAD, _contract.PROXY_CONTAINER, 41000)
    assert "--server_port=41001" in launch(manifest, manager, HEAD, ports).argv

    worker = launch(
        manifest, container(manifest, "containers", _contract.WORKER_CONTAINER, 1), PodKey("worker", 0, 0), ports
    )
    assert worker.argv[2] == "pathways_runtime.emulator.worker"
    assert "--resource_manager_address=127.0.0.1:41001" in worker.argv
    user = launch(manifest, container(manifest, "containers", _contract.USER_CONTAINER), HEAD, ports)
    assert user.env[_contract.JAX_BACKEND_TARGET] == "grpc://127.0.0.1:41000"
    assert (user.argv[0], user.argv[-1]) == ("bash", "python train.py")
    assert (user.cwd, user.env["PATH"]) == (Path("/user"), "/bin")
    assert ports.published() == {"29000": 41000, "29001": 41001}


def test_the_arguments_of_a_command_are_never_rewritten(manifest: dict[str, Any], ports: Ports) -> None:
    user = container(manifest, "containers", _contract.USER_CONTAINER)
    text = "curl digits-pathways-head-0-0.digits:29000 --server_port=29000"
    user |= {"command": ["bash", "-c"], "args": [text]}
    assert launch(manifest, user, HEAD, ports).argv[-1] == text


@pytest.mark.parametrize(
    "text",
    [
        "digits-pathways-head-0-0.digits:290001",
        "digits-pathways-head-0-0.digits:8080",
        "other.digits-pathways-head-0-0.digits:29000",
        "digits-pathways-head-0-0.digits",
    ],
)
def test_other_addresses_are_left_alone(ports: Ports, text: str) -> None:
    assert ports.localise(text) == text


def test_a_server_that_is_named_before_it_starts_starts_where_it_was_named(ports: Ports) -> None:
    address = ports.localise("digits-pathways-head-0-0.digits:29001")
    port = ports.to_listen_on(HEAD, _contract.RESOURCE_MANAGER_CONTAINER)
    assert address == f"127.0.0.1:{port}"


def test_a_server_that_could_not_have_its_port_takes_another(ports: Ports) -> None:
    ports.listens(HEAD, _contract.RESOURCE_MANAGER_CONTAINER, 41001)
    ports.forget(HEAD, _contract.RESOURCE_MANAGER_CONTAINER)
    assert ports.to_listen_on(HEAD, _contract.RESOURCE_MANAGER_CONTAINER) == 0


def test_what_the_manifest_sets_wins_over_the_shell(manifest: dict[str, Any], ports: Ports) -> None:
    user = container(manifest, "containers", _contract.USER_CONTAINER)
    user["env"].append({"name": "X", "value": "manifest"})
    assert launch(manifest, user, HEAD, ports).env["X"] == "manifest"


def test_secrets_of_the_shell_are_not_taken_over() -> None:
    taken = images.inherited({"PATH": "/bin", "AWS_SECRET_ACCESS_KEY": "s", "JAX_PLATFORMS": "cpu"})
    assert taken == {"PATH": "/bin", "PYTHONUNBUFFERED": "1"}
