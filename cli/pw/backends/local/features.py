"""Which parts of a JobSet manifest run locally. What is not known here is refused, never passed over in silence.

Three kinds of field: those that the controller acts on, those that have no effect on one machine (`WITHOUT_EFFECT`),
and all others, which are refused by name.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from pathways_runtime import _contract
from pw.backends.local import images
from pw.errors import SpecError

Object = Mapping[str, Any]

_KNOWN = {
    "JobSet": {"apiVersion", "kind", "metadata", "spec"},
    "spec": {
        *("replicatedJobs", "network", "coordinator", "startupPolicy", "successPolicy", "failurePolicy"),
        "ttlSecondsAfterFinished",
    },
    "failurePolicy": {"maxRestarts", "restartStrategy", "rules"},
    "replicatedJob": {"name", "replicas", "template", "groupName"},
    "jobTemplate": {"metadata", "spec"},
    "job": {
        *("completions", "parallelism", "completionMode", "backoffLimit", "backoffLimitPerIndex", "maxFailedIndexes"),
        *("podFailurePolicy", "podReplacementPolicy", "template"),
    },
    "podTemplate": {"metadata", "spec"},
    "pod": {"containers", "initContainers", "restartPolicy", "terminationGracePeriodSeconds"},
    "container": {"name", "image", "command", "args", "env", "ports", "restartPolicy"},
    "env": {"name", "value", "valueFrom"},
}
# Where a pod runs, what it may do and which of its node's files it sees: on one machine there is nothing to choose.
WITHOUT_EFFECT = {
    "pod": {
        *("nodeSelector", "affinity", "tolerations", "topologySpreadConstraints", "schedulerName"),
        *("priorityClassName", "hostNetwork", "dnsPolicy", "serviceAccountName", "automountServiceAccountToken"),
        *("imagePullSecrets", "volumes", "securityContext", "enableServiceLinks"),
    },
    "container": {
        *("resources", "volumeMounts", "imagePullPolicy", "securityContext"),
        *("terminationMessagePath", "terminationMessagePolicy"),
    },
}
_CHOICES = {
    ("failurePolicy", "restartStrategy"): {"Recreate", "BlockingRecreate"},
    ("job", "completionMode"): {"Indexed", "NonIndexed"},
    ("pod", "restartPolicy"): {"Never", "OnFailure"},
}
_RULE_ACTIONS = {"FailJobSet", "RestartJobSet", "RestartJobSetAndIgnoreMaxRestarts"}
_POD_RULE_ACTIONS = {"FailJob", "FailIndex", "Ignore", "Count"}


def check(manifest: Object) -> None:
    """Raises SpecError that names the field which the local backend cannot honour."""
    _fields("JobSet", manifest, "manifest")
    spec = manifest["spec"]
    _fields("spec", spec, "spec")
    policy = spec.get("failurePolicy", {})
    _fields("failurePolicy", policy, "spec.failurePolicy")
    for rule in policy.get("rules", ()):
        _choice(rule["action"], _RULE_ACTIONS, "spec.failurePolicy.rules.action")
    for replicated in spec["replicatedJobs"]:
        path = f"spec.replicatedJobs[{replicated['name']}]"
        _fields("replicatedJob", replicated, path)
        _fields("jobTemplate", replicated["template"], f"{path}.template")
        _job(replicated["template"]["spec"], f"{path}.template.spec")


def _job(job: Object, path: str) -> None:
    _fields("job", job, path)
    if "completions" not in job and int(job.get("parallelism", 1)) != 1:
        raise SpecError(f"{path}.parallelism without completions is a work queue, which is not run locally")
    for rule in job.get("podFailurePolicy", {}).get("rules", ()):
        _choice(rule["action"], _POD_RULE_ACTIONS, f"{path}.podFailurePolicy.rules.action")
    _fields("podTemplate", job["template"], f"{path}.template")
    pod, path = job["template"]["spec"], f"{path}.template.spec"
    _fields("pod", pod, path)
    if "restartPolicy" not in pod:
        raise SpecError(f"{path}.restartPolicy is missing: a Job wants Never or OnFailure")
    for kind in ("initContainers", "containers"):
        for container in pod.get(kind, ()):
            _container(container, f"{path}.{kind}[{container['name']}]", init=kind == "initContainers")


def _container(container: Object, path: str, *, init: bool) -> None:
    _fields("container", container, path)
    if "restartPolicy" in container and not (init and container["restartPolicy"] == "Always"):
        raise SpecError(f"{path}.restartPolicy is for init containers, and there it is Always")
    if container["name"] == _contract.SIDECAR_CONTAINER:
        raise SpecError(
            "colocated Python is not emulated by the local backend: leave out "
            "--pathways-colocated-python-sidecar-image, or use --backend gke"
        )
    if not container.get("command") and not images.is_emulated(container):
        raise SpecError(f"{path} has no command: what its image {container.get('image')!r} would run is not known here")
    for entry in container.get("env", ()):
        _env(entry, f"{path}.env[{entry['name']}]")


def _env(entry: Object, path: str) -> None:
    _fields("env", entry, path)
    source = entry.get("valueFrom")
    if not source:
        return
    if set(source) != {"fieldRef"}:
        raise SpecError(f"{path}.valueFrom.{next(iter(source))} is not known locally: want value or a fieldRef")
    problem = images.field_problem(source["fieldRef"]["fieldPath"])
    if problem:
        raise SpecError(f"{path}: {problem}")


def _fields(kind: str, value: Object, path: str) -> None:
    for name in value:
        if name not in _KNOWN[kind] and name not in WITHOUT_EFFECT.get(kind, ()):
            raise SpecError(f"{path}.{name} is not run by the local backend: leave it out, or use --backend gke")
    for (owner, name), choices in _CHOICES.items():
        if owner == kind and name in value:
            _choice(value[name], choices, f"{path}.{name}")


def _choice(value: str, choices: set[str], path: str) -> None:
    if value not in choices:
        raise SpecError(f"{path} {value!r} is not run by the local backend: want {' or '.join(sorted(choices))}")


def notes(manifest: Object) -> tuple[str, ...]:
    """What a user should know of how this manifest runs on one machine."""
    return tuple(_notes(manifest))


def _notes(manifest: Object) -> Iterator[str]:
    mounts = {
        mount["mountPath"]
        for container in _containers(manifest)
        for mount in container.get("volumeMounts", ())
        if mount["mountPath"] not in ("/tmp", "/dev/shm")
    }
    if mounts:
        yield f"mounts are not made locally: {', '.join(sorted(mounts))} is what this machine has there"
    for replicated in manifest["spec"]["replicatedJobs"]:
        for volume in replicated["template"]["spec"]["template"]["spec"].get("volumes", ()):
            if "sizeLimit" in (volume.get("emptyDir") or {}):
                yield f"volume {volume['name']} is this machine's: its size limit has no effect locally"
    if not any(container["name"] == _contract.USER_CONTAINER for container in _containers(manifest)):
        yield "headless: it runs until it is cancelled (pw job cancel)"


def _containers(manifest: Object) -> Iterator[Object]:
    for replicated in manifest["spec"]["replicatedJobs"]:
        pod = replicated["template"]["spec"]["template"]["spec"]
        yield from (*pod.get("initContainers", ()), *pod["containers"])
