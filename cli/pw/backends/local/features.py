"""Which parts of a JobSet manifest run locally. What is not known here is refused, never passed over in silence."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from pathways_runtime import _contract
from pw import notes as notes_of_all
from pw.backends.local import images
from pw.backends.local.metadata import Names
from pw.errors import SpecError

Object = Mapping[str, Any]

# A field that the controller acts on as a whole, and one that has no effect on one machine: where a pod runs, what it
# may use and which files it sees are not chosen there.
_ACTED_ON, _WITHOUT_EFFECT = "acted on", "without effect"
# By kind of object its fields; a field's value is one of the above or the kind of the object, or objects, in it.
_FIELDS: dict[str, dict[str, str]] = {
    "manifest": {"spec": "spec"} | dict.fromkeys(("apiVersion", "kind", "metadata"), _ACTED_ON),
    "spec": {
        "network": "network",
        "coordinator": "coordinator",
        "startupPolicy": "startupPolicy",
        "successPolicy": "successPolicy",
        "failurePolicy": "failurePolicy",
        "replicatedJobs": "replicatedJob",
        "ttlSecondsAfterFinished": _ACTED_ON,
    },
    "network": {
        "subdomain": _ACTED_ON,
        "enableDNSHostnames": _WITHOUT_EFFECT,
        "publishNotReadyAddresses": _WITHOUT_EFFECT,
    },
    "coordinator": dict.fromkeys(("replicatedJob", "jobIndex", "podIndex"), _ACTED_ON),
    "startupPolicy": {"startupPolicyOrder": _ACTED_ON},
    "successPolicy": dict.fromkeys(("operator", "targetReplicatedJobs"), _ACTED_ON),
    "failurePolicy": {"maxRestarts": _ACTED_ON, "restartStrategy": _ACTED_ON, "rules": "failureRule"},
    "failureRule": dict.fromkeys(
        ("name", "action", "targetReplicatedJobs", "onJobFailureReasons", "onJobFailureMessagePatterns"), _ACTED_ON
    ),
    "replicatedJob": {
        "name": _ACTED_ON,
        "replicas": _ACTED_ON,
        "groupName": _WITHOUT_EFFECT,
        "template": "jobTemplate",
    },
    "jobTemplate": {"metadata": _ACTED_ON, "spec": "job"},
    "job": {
        **dict.fromkeys(("completions", "parallelism", "completionMode", "backoffLimit"), _ACTED_ON),
        **dict.fromkeys(("backoffLimitPerIndex", "maxFailedIndexes", "podReplacementPolicy"), _ACTED_ON),
        "podFailurePolicy": "podFailurePolicy",
        "template": "podTemplate",
    },
    "podFailurePolicy": {"rules": "podFailureRule"},
    # Nothing disrupts a pod here, so no condition ever holds.
    "podFailureRule": {"action": _ACTED_ON, "onExitCodes": _ACTED_ON, "onPodConditions": _WITHOUT_EFFECT},
    "podTemplate": {"metadata": _ACTED_ON, "spec": "pod"},
    "pod": {
        "containers": "container",
        "initContainers": "initContainer",
        "restartPolicy": _ACTED_ON,
        "terminationGracePeriodSeconds": _ACTED_ON,
        **dict.fromkeys(("nodeSelector", "affinity", "tolerations", "topologySpreadConstraints"), _WITHOUT_EFFECT),
        **dict.fromkeys(("schedulerName", "priorityClassName", "hostNetwork", "dnsPolicy"), _WITHOUT_EFFECT),
        **dict.fromkeys(("serviceAccountName", "automountServiceAccountToken", "imagePullSecrets"), _WITHOUT_EFFECT),
        **dict.fromkeys(("volumes", "securityContext", "enableServiceLinks"), _WITHOUT_EFFECT),
    },
    "env": {"name": _ACTED_ON, "value": _ACTED_ON, "valueFrom": "valueFrom"},
    "valueFrom": {"fieldRef": "fieldRef"},
    "fieldRef": {"fieldPath": _ACTED_ON, "apiVersion": _WITHOUT_EFFECT},
}
_CONTAINER = {
    "env": "env",
    **dict.fromkeys(("name", "image", "command", "args", "ports"), _ACTED_ON),
    **dict.fromkeys(("resources", "volumeMounts", "imagePullPolicy", "securityContext"), _WITHOUT_EFFECT),
    **dict.fromkeys(("terminationMessagePath", "terminationMessagePolicy"), _WITHOUT_EFFECT),
}
_KINDS = _FIELDS | {"container": _CONTAINER, "initContainer": _CONTAINER | {"restartPolicy": _ACTED_ON}}
_CHOICES = {
    ("startupPolicy", "startupPolicyOrder"): ("InOrder", "AnyOrder"),
    ("successPolicy", "operator"): ("All", "Any"),
    ("failurePolicy", "restartStrategy"): ("Recreate", "BlockingRecreate"),
    ("failureRule", "action"): ("FailJobSet", "RestartJobSet", "RestartJobSetAndIgnoreMaxRestarts"),
    ("job", "completionMode"): ("Indexed", "NonIndexed"),
    ("podFailureRule", "action"): ("FailJob", "FailIndex", "Ignore", "Count"),
    ("pod", "restartPolicy"): ("Never", "OnFailure"),
    ("initContainer", "restartPolicy"): ("Always",),
}


# More hosts than this are worth a word; an emulated one has this much memory for itself, measured on Linux.
_MANY_HOSTS = 32
_WORKER_MB = 15

# Names become those of folders and files.
_NAME = re.compile(r"[a-z0-9](?:[-a-z0-9]{0,61}[a-z0-9])?")


def check(manifest: Object) -> None:
    """Raises SpecError that names the first field which the local backend cannot honour."""
    _check_name(manifest.get("metadata", {}).get("name"), "manifest.metadata.name")
    for kind, value, path in _objects("manifest", manifest, "manifest"):
        _check_fields(kind, value, path)
        if kind in ("replicatedJob", "container", "initContainer"):
            _check_name(value.get("name"), f"{path}.name")
        if kind == "job" and "completions" not in value and value.get("parallelism", 1) != 1:
            raise SpecError(f"{path}.parallelism without completions is a work queue, which is not run locally")
        if kind == "pod" and "restartPolicy" not in value:
            raise SpecError(f"{path}.restartPolicy is missing: a Job wants Never or OnFailure")
        if kind in ("container", "initContainer"):
            _check_container(value, path)
        if kind == "fieldRef" and (problem := images.field_problem(value["fieldPath"])):
            raise SpecError(f"{path}: {problem}")


def _objects(kind: str, value: Object, path: str) -> Iterator[tuple[str, Object, str]]:
    """An object and all objects in it, outer before inner."""
    yield kind, value, path
    for name, child in value.items():
        child_kind = _KINDS[kind][name]
        if child_kind in _KINDS:
            for item in child if isinstance(child, list) else [child]:
                label = f"[{item['name']}]" if isinstance(child, list) and "name" in item else ""
                yield from _objects(child_kind, item, f"{path}.{name}{label}")


def _check_fields(kind: str, value: Object, path: str) -> None:
    for name in value:
        if name not in _KINDS[kind]:
            raise SpecError(f"{path}.{name} is not run by the local backend: leave it out, or use --backend gke")
        choices = _CHOICES.get((kind, name))
        if choices and value[name] not in choices:
            raise SpecError(
                f"{path}.{name} {value[name]!r} is not run by the local backend: want {' or '.join(choices)}"
            )


def _check_name(name: Any, path: str) -> None:
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise SpecError(f"{path} {name!r} is not a name: want at most 63 lower-case letters, digits and dashes")


def _check_container(container: Object, path: str) -> None:
    if not container.get("command") and not images.is_emulated(container):
        raise SpecError(f"{path} has no command: what its image {container.get('image')!r} would run is not known here")


def notes(manifest: Object) -> tuple[str, ...]:
    """What a user should know of how this manifest runs on one machine."""
    return tuple(_notes(manifest))


def _notes(manifest: Object) -> Iterator[str]:
    objects = list(_objects("manifest", manifest, "manifest"))
    containers = [value for kind, value, _ in objects if kind in ("container", "initContainer")]
    yield from notes_of_all.platforms(containers)
    for container in containers:
        if images.is_played_by_proxy(container):
            yield (
                f"{container['name']}: the emulator runs colocated Python itself, in processes with its own packages; "
                f"{container['image']} is not used"
            )
    mounted = {mount["mountPath"] for container in containers for mount in container.get("volumeMounts", ())}
    # What every job has, and what every machine has too.
    if other := mounted - {"/tmp", "/dev/shm"}:
        yield f"mounts are not made locally: {', '.join(sorted(other))} is what this machine has there"
    volumes = [volume for kind, value, _ in objects if kind == "pod" for volume in value.get("volumes", ())]
    if any("sizeLimit" in volume.get("emptyDir", {}) for volume in volumes):
        yield "/dev/shm is this machine's: its size has no effect locally"
    names = Names(manifest)
    if (hosts := names.slices * names.hosts) > _MANY_HOSTS:
        yield (
            f"{hosts} hosts are {hosts} processes on this machine, of about {_WORKER_MB} MB each "
            f"({hosts * _WORKER_MB / 1000:.1f} GB in all): it takes a while until all are ready"
        )
    if not any(container["name"] == _contract.USER_CONTAINER for container in containers):
        yield "headless: it runs until it is cancelled (pw job cancel)"
