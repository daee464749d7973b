"""A manifest that a cluster would refuse, or that lost something of the job, is found before it is sent."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import jsonschema
import pytest

from pw import proof, render, schema
from pw.errors import SpecError
from pw.fields import Mount
from pw.specs import JobSpec

JOB = JobSpec(
    name="digits",
    command="echo $(date) $$",
    image="gcr.io/team/train:1",
    compute_type="v6e-16",
    num_slices=2,
    gcs_scratch_location="gs://bucket/scratch/",
    env=(("LR", "1e-5"), ("TEXT", "$(PATHWAYS_HEAD) $$")),
    mount=(Mount("gs://bucket/data", "/data"),),
    priority="high",
    queue="user-queue",
    service_account="trainer",
    image_pull_secret=("secret",),
    node_constraint=(("team", "a"), ("zone", "b|c")),
    restart_on_exit_codes=(42, 143),
    pathways_proxy_args=("--xla_a=b c", "--xla_a=b c"),
    pathways_colocated_python_sidecar_image="gcr.io/team/sidecar:1",
)


def head(manifest: Any) -> Any:
    return manifest["spec"]["replicatedJobs"][0]["template"]["spec"]


def workers(manifest: Any) -> Any:
    return manifest["spec"]["replicatedJobs"][1]["template"]["spec"]


def pod(job: Any) -> Any:
    return job["template"]["spec"]


def main(manifest: Any) -> Any:
    return pod(head(manifest))["containers"][0]


def proxy(manifest: Any) -> Any:
    return pod(head(manifest))["initContainers"][1]


def worker(manifest: Any) -> Any:
    return pod(workers(manifest))["containers"][0]


def test_what_is_rendered_proves() -> None:
    proof.prove(render.render(JOB), JOB)


BREAKS: dict[str, tuple[Callable[[Any], Any], str]] = {
    "unknown field": (lambda m: m["spec"].update(succesPolicy={}), "JobSet has no such field"),
    "wrong type": (lambda m: m["spec"].update(ttlSecondsAfterFinished="60"), "is not of type integer"),
    "boolean for a number": (lambda m: head(m).update(backoffLimit=True), "is not of type integer"),
    "number for a string": (lambda m: main(m)["env"][-1].update(value=1), "is not of type string"),
    "int32": (lambda m: workers(m).update(backoffLimit=2**31), "maximum 2147483647"),
    "rule name": (
        lambda m: m["spec"]["failurePolicy"]["rules"][0].update(name="restart-on-exit"),
        "breaks pattern",
    ),
    "missing field": (lambda m: pod(head(m)).pop("restartPolicy"), "restartPolicy: it is missing"),
    "name": (lambda m: m["metadata"].update(name="a" * 23), "coordinator label"),
    "pod name": (
        lambda m: m["spec"]["replicatedJobs"][1].update(name="worker-of-a-name-that-is-far-too-long-for-its-pods"),
        "pod name of worker-of",
    ),
    "success target": (
        lambda m: m["spec"]["successPolicy"].update(targetReplicatedJobs=["head"]),
        "'head', which is not there",
    ),
    "rule target": (
        lambda m: m["spec"]["failurePolicy"]["rules"][0].update(targetReplicatedJobs=["driver"]),
        "'driver', which is not there",
    ),
    "pod failure policy with OnFailure": (
        lambda m: workers(m).update(podFailurePolicy=head(m)["podFailurePolicy"]),
        "only with restartPolicy Never",
    ),
    "pod failure policy of nobody": (
        lambda m: head(m)["podFailurePolicy"]["rules"][0]["onExitCodes"].update(containerName="user"),
        "names a container that is not there",
    ),
    "order of exit codes": (
        lambda m: head(m)["podFailurePolicy"]["rules"][0]["onExitCodes"].update(values=[143, 42]),
        "must be in order",
    ),
    "not indexed": (lambda m: workers(m).update(completionMode="NonIndexed"), "must be Indexed"),
    "fewer hosts": (lambda m: workers(m).update(completions=3, parallelism=3), "2 slices of 12 chips"),
    "fewer slices": (lambda m: m["spec"]["replicatedJobs"][1].update(replicas=1), "1 slices of 16 chips"),
    "fewer chips": (
        lambda m: worker(m)["resources"]["limits"].update({"google.com/tpu": "8"}),
        "2 slices of 32 chips",
    ),
    "container restart policy": (lambda m: main(m).update(restartPolicy="Always"), "only an init container"),
    "port twice": (lambda m: main(m).update(ports=[{"containerPort": 29000}]), "host port 29000 is there twice"),
    "container twice": (lambda m: main(m).update(name="pathways-rm"), "'pathways-rm' is there twice"),
    "mount without volume": (lambda m: pod(workers(m))["volumes"].pop(), "which its pod lacks"),
    "mount twice": (
        lambda m: main(m)["volumeMounts"].append({"name": "shared-tmp", "mountPath": "/data"}),
        "mount at '/data' is there twice",
    ),
    "variable twice": (
        lambda m: main(m)["env"].append({"name": "LR", "value": "1e-5"}),
        "variable 'LR' is there twice",
    ),
    "order of variables": (lambda m: main(m)["env"].reverse(), "$(PATHWAYS_HEAD)"),
    "no variables": (lambda m: proxy(m).pop("env"), "is not a variable that stands above it"),
    "lost command": (
        lambda m: main(m)["args"].__setitem__(0, "echo $$(date) $$"),
        "does not arrive as it was given",
    ),
    "lost argument": (lambda m: proxy(m)["args"].pop(), "'--xla_a=b c' does not arrive"),
    "lost variable": (lambda m: main(m)["env"].pop(), "arrives as None"),
    "unescaped variable": (lambda m: main(m)["env"][-1].update(value="$(PATHWAYS_HEAD) $$"), "the variable TEXT="),
    "lost image": (lambda m: main(m).update(image="gcr.io/team/other:1"), "is not its image"),
    "lost scratch": (lambda m: worker(m)["args"].pop(2), "'--gcs_scratch_location=gs://bucket/scratch'"),
    "lost mount": (lambda m: worker(m)["volumeMounts"].pop(), "the mount 'gs://bucket/data:/data:ro' is not in it"),
    "lost priority": (lambda m: pod(head(m)).pop("priorityClassName"), "priorityClassName 'high' is None"),
    "lost secret": (lambda m: pod(workers(m)).pop("imagePullSecrets"), "the secrets ['secret']"),
    "lost constraint": (lambda m: pod(workers(m)).pop("affinity"), "the node constraint 'zone=b|c' is None"),
    "lost queue": (lambda m: m["metadata"].update(labels={}), "the queue 'user-queue'"),
    "lost sidecar": (lambda m: pod(workers(m)).pop("initContainers"), "no container 'colocated-python-sidecar'"),
}


@pytest.mark.parametrize("name", BREAKS)
def test_a_broken_manifest_is_refused_with_the_place_that_breaks(name: str) -> None:
    spoil, said = BREAKS[name]
    manifest = copy.deepcopy(render.render(JOB))
    spoil(manifest)
    with pytest.raises(SpecError, match="would not run as asked, so nothing was sent") as caught:
        proof.prove(manifest, JOB)
    assert any(said in line for line in (caught.value.message, *caught.value.hints)), caught.value.hints


@pytest.mark.parametrize("name", BREAKS)
def test_our_walker_of_the_schema_agrees_with_jsonschema(name: str) -> None:
    manifest = copy.deepcopy(render.render(JOB))
    BREAKS[name][0](manifest)
    valid = jsonschema.Draft202012Validator(schema.jobset_schema()).is_valid(manifest)
    assert valid == (not list(schema.problems(manifest, schema.jobset_schema())))


def test_the_schema_uses_no_word_that_our_walker_lacks() -> None:
    with pytest.raises(ValueError, match="'oneOf'"):
        list(schema.problems({}, {"oneOf": []}))

    def walk(node: dict[str, Any]) -> None:
        list(schema.problems({}, {key: value for key, value in node.items() if key != "$ref"} | {"$defs": {}}))
        inner = [*node.get("properties", {}).values(), *node.get("$defs", {}).values()]
        inner += [node[key] for key in ("items", "additionalProperties") if isinstance(node.get(key), dict)]
        for each in inner:
            walk(each)

    walk(schema.jobset_schema())


def test_a_job_that_is_too_large_for_kubernetes_is_refused() -> None:
    job = JobSpec(
        name="digits",
        command="true",
        compute_type="v6e-16",
        env=tuple((f"TEXT_{index}", "x" * 100_000) for index in range(15)),
    )
    with pytest.raises(SpecError, match="bytes that Kubernetes stores"):
        proof.prove(render.render(job), job)


@pytest.mark.parametrize(
    "word", ["y", "no", "on", "1e-5", "0o17", "0x1F", "1_000", "~", "2026-01-01", "=", "<<", "a", ".5"]
)
def test_a_plain_word_is_not_taken_for_what_all_of_yaml_reads(word: str) -> None:
    with pytest.raises(SpecError, match="plain"):
        proof.read_as_go(f"key: {word}\n")


@pytest.mark.parametrize("key", ["y", "no", "on", "1", "true", "null"])
def test_a_plain_key_is_not_either(key: str) -> None:
    with pytest.raises(SpecError, match="plain key"):
        proof.read_as_go(f'{key}: "text"\n')
