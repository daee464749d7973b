"""The manifest of a job.

`tests/unit/golden` has one manifest for each family of flags. After a change that is meant:

    PW_UPDATE_GOLDEN=1 .venv/bin/python -m pytest tests/unit/test_render.py

writes them anew; read the difference before you commit it.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from pathways_runtime import _contract
from pw import names, proof, proof_pods, render, schema, tpus, versions
from pw.expansion import expand
from pw.fields import Mount
from pw.specs import JobSpec

GOLDEN = Path(__file__).with_name("golden")
BASIC: dict[str, Any] = {
    "name": "digits",
    "command": "python train.py",
    "image": "europe-docker.pkg.dev/team/repo/train:1",
    "compute_type": "v6e-16",
    "num_slices": 2,
    "gcs_scratch_location": "gs://bucket/scratch",
}
FAMILIES: dict[str, dict[str, Any]] = {
    "basic": {},
    "env_and_mounts": {
        "env": (("LR", "1e-5"), ("SHELL_LINE", 'echo "$HOME" $(date)'), ("JAX_PLATFORMS", "proxy")),
        "mount": (
            Mount("gs://bucket/data", "/data"),
            Mount("pvc://claim", "/claim", read_only=False),
            Mount("filestore://10.0.0.2/share", "/share"),
            Mount("/mnt/disk", "/disk"),
        ),
        "shm_size": "150Gi",
        "verbose": True,
    },
    "queue_and_priority": {
        "queue": "user-queue",
        "priority": "high",
        "gke_scheduler": "gke.io/topology-aware-auto",
        "node_constraint": (("team", "a"), ("cloud.google.com/zone", "b|c")),
        "placement_policy": "compact",
        "service_account": "trainer",
        "image_pull_secret": ("first", "second"),
        "pathways_head_np": "cpu-np",
        "ttl_after_finished_s": 60,
        "grace_period_s": 90,
    },
    "nap_reservation": {
        "gke_nap_provisioning": "reservation",
        "gke_nap_reservation": "projects/owner/reservations/block-of-v6e/reservationBlocks/block-1",
    },
    "spot": {"spot": True},
    "elastic": {"pathways_elastic_slices": 1, "pathways_max_slice_restarts": 1_000_000_000},
    "headless": {"pathways_headless": True, "command": "", "image": ""},
    "colocated": {"pathways_colocated_python_sidecar_image": "us-docker.pkg.dev/team/repo/sidecar:1"},
    "images_args_env": {
        "pathways_proxy_server_image": "us-docker.pkg.dev/team/repo/proxy:jax-0.9.2",
        "pathways_proxy_args": ("--xla_a=1", "--xla_b=x y", "--price=$$(COST)"),
        "pathways_server_args": ("--enable_gcs_olm=false",),
        "pathways_worker_args": ("--megascale_x=1",),
        "pathways_proxy_env": (("A", "yes"),),
        "pathways_server_env": (("TPU_SKIP_MDS_QUERY", "false"),),
        "pathways_worker_env": (("B", "0o17"),),
    },
    "restarts": {"restarts": 5, "restart_on_exit_codes": (42, 143)},
    "eight_chip_hosts": {"compute_type": "ct6e-standard-8t", "topology": "2x4"},
    "subdomain": {"name": "a-name-that-is-longer-than-22", "subdomain": "pw"},
}


def job(**changes: Any) -> JobSpec:
    return JobSpec(**BASIC | changes)


def manifest(**changes: Any) -> dict[str, Any]:
    return render.render(job(**changes), jax_version="0.10.0")


def pods(of: dict[str, Any]) -> dict[str, Any]:
    return {each["name"]: each["template"]["spec"]["template"]["spec"] for each in of["spec"]["replicatedJobs"]}


def containers(of: dict[str, Any]) -> dict[str, Any]:
    return {each["name"]: each for pod in pods(of).values() for each in proof_pods.containers(pod)}


def jobs(of: dict[str, Any]) -> dict[str, Any]:
    return {each["name"]: each["template"]["spec"] for each in of["spec"]["replicatedJobs"]}


@pytest.mark.parametrize("family", FAMILIES)
def test_each_family_of_flags_gives_its_golden_manifest(family: str) -> None:
    path, text = GOLDEN / f"{family}.yaml", render.to_yaml(manifest(**FAMILIES[family]))
    if os.environ.get("PW_UPDATE_GOLDEN"):
        path.write_text(text, encoding="utf-8")
    assert text == path.read_text(encoding="utf-8")


def test_every_golden_manifest_belongs_to_a_family() -> None:
    assert {path.stem for path in GOLDEN.iterdir()} == set(FAMILIES)


@pytest.mark.parametrize("family", FAMILIES)
def test_golden_manifests_are_valid_and_prove(family: str) -> None:
    golden = yaml.safe_load((GOLDEN / f"{family}.yaml").read_text(encoding="utf-8"))
    jsonschema.Draft202012Validator(schema.jobset_schema()).validate(golden)
    proof.prove(golden, job(**FAMILIES[family]))


def test_servers_start_before_the_command_and_end_with_it() -> None:
    head = pods(manifest())[_contract.HEAD_JOB]
    assert [(each["name"], each["restartPolicy"]) for each in head["initContainers"]] == [
        ("pathways-rm", "Always"),
        ("pathways-proxy", "Always"),
    ]
    assert [each["name"] for each in head["containers"]] == ["main"]


def test_a_headless_head_is_plain_containers_and_has_no_end() -> None:
    headless = manifest(**FAMILIES["headless"])
    head = pods(headless)[_contract.HEAD_JOB]
    assert "initContainers" not in head
    assert [each["name"] for each in head["containers"]] == ["pathways-rm", "pathways-proxy"]
    assert not any("restartPolicy" in each for each in head["containers"])
    assert "successPolicy" not in headless["spec"]


def test_the_command_finds_the_proxy_at_the_head() -> None:
    user = containers(manifest())["main"]
    addresses = {"metadata.labels['jobset.sigs.k8s.io/coordinator']": names.coordinator("digits")}
    env = proof_pods.environment(user)
    target = env["JAX_BACKEND_TARGET"]
    for path, address in addresses.items():
        target = target.replace(path, address)
    assert target == "grpc://digits-pathways-head-0-0.digits:29000"
    assert env["JAX_PLATFORMS"] == "proxy,cpu"
    assert env["IFRT_PROXY_USE_INSECURE_GRPC_CREDENTIALS"] == "true"


@pytest.mark.parametrize("container", ["pathways-proxy", "pathways-worker"])
def test_servers_find_the_resource_manager(container: str) -> None:
    found = containers(manifest())[container]
    arguments = [expand(word, {"PATHWAYS_HEAD": "head.digits"}) for word in found["args"]]
    assert "--resource_manager_address=head.digits:29001" in arguments
    assert found["env"][0]["name"] == "PATHWAYS_HEAD"


def test_a_variable_of_the_user_replaces_the_default_of_pw() -> None:
    env = containers(manifest(env=(("JAX_PLATFORMS", "proxy"), ("JAX_PLATFORMS", "cpu"))))["main"]["env"]
    assert [entry["value"] for entry in env if entry["name"] == "JAX_PLATFORMS"] == ["cpu"]


def test_mounts_reach_head_and_workers() -> None:
    found = containers(manifest(**FAMILIES["env_and_mounts"] | FAMILIES["colocated"]))
    for container in ("main", "pathways-worker", "colocated-python-sidecar"):
        places = {mount["mountPath"]: mount.get("readOnly") for mount in found[container]["volumeMounts"]}
        assert places.items() >= {"/data": True, "/claim": False, "/share": True, "/disk": True}.items()


def test_only_pods_with_a_bucket_ask_for_fuse() -> None:
    def annotations(of: dict[str, Any]) -> list[dict[str, str]]:
        return [each["template"].get("metadata", {}).get("annotations", {}) for each in jobs(of).values()]

    assert annotations(manifest()) == [{}, {}]
    assert annotations(manifest(mount=(Mount("gs://bucket", "/data"),))) == [{"gke-gcsfuse/volumes": "true"}] * 2


def test_slices_stand_apart_by_annotations_of_the_job_templates() -> None:
    key = "alpha.jobset.sigs.k8s.io/exclusive-topology"
    found = {each["name"]: each["template"]["metadata"] for each in manifest()["spec"]["replicatedJobs"]}
    assert found["pathways-head"]["annotations"][key] == "kubernetes.io/hostname"
    assert found["worker"]["annotations"][key] == "cloud.google.com/gke-nodepool"


def test_a_sidecar_shares_memory_with_its_worker_and_the_proxy_knows_of_it() -> None:
    colocated = manifest(**FAMILIES["colocated"])
    found = containers(colocated)
    directory = proof_pods.environment(found["colocated-python-sidecar"])["CLOUD_PATHWAYS_SIDECAR_SHM_DIRECTORY"]
    assert f"--cloud_pathways_sidecar_shm_directory={directory}" in found["pathways-worker"]["args"]
    assert "--sidecar_name=external" in found["pathways-proxy"]["args"]
    shared = {"name": "sidecar-shared-memory", "mountPath": directory}
    assert shared in found["pathways-worker"]["volumeMounts"]
    assert shared in found["colocated-python-sidecar"]["volumeMounts"]
    assert {"name": "sidecar-shared-memory", "emptyDir": {"medium": "Memory"}} in pods(colocated)["worker"]["volumes"]


@pytest.mark.parametrize(
    ("changes", "limit"),
    [
        ({}, 16),
        ({"pathways_max_slice_restarts": 7}, 16),
        ({"pathways_elastic_slices": 1, "pathways_max_slice_restarts": 7}, 28),
        ({"pathways_elastic_slices": 1, "pathways_max_slice_restarts": 2**31 - 1}, 2**31 - 1),
    ],
)
def test_the_backoff_limit_follows_hosts_and_elasticity(changes: dict[str, Any], limit: int) -> None:
    assert jobs(manifest(**changes))["worker"]["backoffLimit"] == limit


def test_the_codes_of_the_command_restart_the_job_without_counting() -> None:
    restarts = manifest(restart_on_exit_codes=(143, 42, 42))
    (rule,) = jobs(restarts)["pathways-head"]["podFailurePolicy"]["rules"]
    assert rule["onExitCodes"] == {"containerName": "main", "operator": "In", "values": [42, 143]}
    (policy,) = restarts["spec"]["failurePolicy"]["rules"]
    assert policy["action"] == "RestartJobSetAndIgnoreMaxRestarts"
    assert policy["onJobFailureReasons"] == ["PodFailurePolicy"]


def test_a_slice_that_hosts_of_two_kinds_can_make_names_its_machine_type() -> None:
    label = "node.kubernetes.io/instance-type"
    of_type = {kind: pods(manifest(compute_type=kind))["worker"]["nodeSelector"] for kind in ("v6e-8", "v6e-16")}
    assert of_type["v6e-8"][label] == "ct6e-standard-4t"
    assert label not in of_type["v6e-16"]
    by_nap = manifest(compute_type="v6e-8", gke_nap_provisioning="on-demand")
    assert label not in pods(by_nap)["worker"]["nodeSelector"], "auto-provisioning picks the machine by its chips"


def test_node_pools_may_decide_the_shape() -> None:
    other = tpus.resolve("ct6e-standard-8t", "2x4").shape
    found = render.render(job(compute_type="v6e-8"), shape=other)
    assert jobs(found)["worker"]["completions"] == 1
    assert "--instance_type=tpuv6e1t:2x4" in containers(found)["pathways-rm"]["args"]
    proof.prove(found, job(compute_type="v6e-8"))


def test_the_head_goes_to_the_pool_that_is_named_or_found() -> None:
    def head(**changes: Any) -> Any:
        return pods(render.render(job(**changes), head_node_pool="found"))["pathways-head"]["nodeSelector"]

    assert head() == {"cloud.google.com/gke-nodepool": "found"}
    assert head(pathways_head_np="named") == {"cloud.google.com/gke-nodepool": "named"}
    assert "nodeSelector" not in pods(manifest())["pathways-head"]


def test_shared_memory_beyond_the_memory_of_the_command_raises_it() -> None:
    def memory(size: str) -> tuple[str, str | None]:
        found = manifest(shm_size=size)
        volume = next(each for each in pods(found)["pathways-head"]["volumes"] if each["name"] == "shared-memory")
        return containers(found)["main"]["resources"]["requests"]["memory"], volume["emptyDir"].get("sizeLimit")

    assert memory("") == ("100G", None)
    assert memory("10Gi") == ("100G", "10Gi")
    assert memory("150Gi") == ("150Gi", "150Gi")


@pytest.mark.parametrize(
    ("changes", "proxy", "server"),
    [
        ({}, "jax-0.10.0", "jax-0.10.0"),
        ({"pathways_proxy_server_image": "gcr.io/a/proxy:jax-0.9.2"}, "jax-0.9.2", "jax-0.9.2"),
        ({"pathways_server_image": "gcr.io/a/server:jax-0.9.2"}, "jax-0.9.2", "jax-0.9.2"),
        ({"pathways_proxy_server_image": f"gcr.io/a/proxy@sha256:{'0' * 64}"}, "", "jax-0.10.0"),
        ({"pathways_proxy_server_image": "localhost:5000/proxy"}, "", "jax-0.10.0"),
    ],
)
def test_proxy_and_servers_are_of_one_tag(changes: dict[str, Any], proxy: str, server: str) -> None:
    found = containers(manifest(**changes))
    assert versions.tag_of(found["pathways-proxy"]["image"]) == proxy
    assert versions.tag_of(found["pathways-rm"]["image"]) == server
    assert found["pathways-worker"]["image"] == found["pathways-rm"]["image"]


def test_the_sidecar_decides_the_version_of_the_servers() -> None:
    found = containers(manifest(pathways_colocated_python_sidecar_image="gcr.io/x/sidecar:2026_03_31-jax_0.9.2"))
    assert {versions.tag_of(found[name]["image"]) for name in ("pathways-proxy", "pathways-rm")} == {"jax-0.9.2"}


def test_no_image_is_the_latest() -> None:
    assert versions.image_tag() == f"jax-{versions.installed_jax() or versions.DEFAULT_JAX}"
    assert "latest" not in render.to_yaml(render.render(job()))


def test_without_an_image_the_command_runs_in_the_shell_of_the_user() -> None:
    assert containers(manifest(image=""))["main"]["image"] == _contract.SHELL_IMAGE


def test_a_name_that_the_template_lacks_is_an_error() -> None:
    template = render._environment().from_string("a: {{ nothing }}")
    with pytest.raises(Exception, match="'nothing' is undefined"):
        template.render()
