"""What is proved of the pods: that Kubernetes takes them, and that each holds what the user asked for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from pathways_runtime import _contract
from pw import mounts
from pw.expansion import expand, references

if TYPE_CHECKING:
    from pw.specs import JobSpec

Container = Mapping[str, Any]
Pod = Mapping[str, Any]


def containers(pod: Pod) -> list[Container]:
    """The containers of a pod in the order in which they start."""
    return [*pod.get("initContainers", ()), *pod["containers"]]


def problems(job: str, pod: Pod) -> Iterator[str]:
    """What Kubernetes or its kubelet would refuse of the pods of replicated job `job`."""
    every = containers(pod)
    yield from _twice(f"pod of {job}: container", (container["name"] for container in every))
    yield from _twice(f"pod of {job}: volume", (volume["name"] for volume in pod.get("volumes", ())))
    if pod.get("hostNetwork"):
        ports = (port["containerPort"] for container in every for port in container.get("ports", ()))
        yield from _twice(f"pod of {job}: host port", ports)
    for container in pod["containers"]:
        if "restartPolicy" in container:
            yield f"container {container['name']}: only an init container may have a restartPolicy"
    volumes = {volume["name"] for volume in pod.get("volumes", ())}
    for container in every:
        yield from _of_mounts(container, volumes)
        yield from _of_references(container)


def _twice(what: str, items: Iterable[Any]) -> Iterator[str]:
    yield from (f"{what} {item!r} is there twice" for item, count in Counter(items).items() if count > 1)


def _of_mounts(container: Container, volumes: set[str]) -> Iterator[str]:
    placed = container.get("volumeMounts", ())
    yield from _twice(f"container {container['name']}: mount at", (mount["mountPath"] for mount in placed))
    for mount in placed:
        if mount["name"] not in volumes:
            yield f"container {container['name']}: it mounts the volume {mount['name']!r}, which its pod lacks"


def _of_references(container: Container) -> Iterator[str]:
    """The kubelet expands a `$(NAME)` only if NAME is a variable of this container, and above the one that uses it."""
    known: set[str] = set()
    for entry in container.get("env", ()):
        yield from _unknown(container, entry.get("value", ""), known)
        known.add(entry["name"])
    yield from _twice(f"container {container['name']}: variable", (entry["name"] for entry in container.get("env", ())))
    for text in (*container.get("command", ()), *container.get("args", ())):
        yield from _unknown(container, text, known)


def _unknown(container: Container, text: str, known: set[str]) -> Iterator[str]:
    for name in references(text):
        if name not in known:
            yield f"container {container['name']}: $({name}) in {text!r} is not a variable that stands above it"


def lost(manifest: Mapping[str, Any], spec: JobSpec) -> Iterator[str]:
    """What the user asked for and does not stand in the manifest as a process or Kubernetes will read it."""
    pods = {job["name"]: job["template"]["spec"]["template"]["spec"] for job in manifest["spec"]["replicatedJobs"]}
    found = {container["name"]: container for pod in pods.values() for container in containers(pod)}
    for container, asked in _asked_of_containers(spec).items():
        if container not in found:
            yield f"there is no container {container!r}"
        else:
            yield from _lost_of_container(found[container], asked)
    for pod in pods.values():
        yield from _lost_of_pod(pod, spec)
    yield from _lost_constraints(pods[_contract.WORKER_JOB], spec)
    labels = manifest["metadata"].get("labels", {}).values()
    if spec.queue and spec.queue not in labels:
        yield f"the queue {spec.queue!r} is not in it"


def _asked_of_containers(spec: JobSpec) -> dict[str, dict[str, Any]]:
    scratch = f"--{_contract.FLAG_SCRATCH}={spec.gcs_scratch_location.rstrip('/')}"
    asked = {
        _contract.PROXY_CONTAINER: {
            "image": spec.pathways_proxy_server_image,
            "args": (scratch, *spec.pathways_proxy_args),
            "env": spec.pathways_proxy_env,
        },
        _contract.RESOURCE_MANAGER_CONTAINER: {
            "image": spec.pathways_server_image,
            "args": (scratch, *spec.pathways_server_args),
            "env": spec.pathways_server_env,
        },
        _contract.WORKER_CONTAINER: {
            "image": spec.pathways_worker_image,
            "args": (scratch, *spec.pathways_worker_args),
            "env": spec.pathways_worker_env,
        },
    }
    if not spec.pathways_headless:
        asked[_contract.USER_CONTAINER] = {"image": spec.image, "args": (spec.command,), "env": spec.env}
    if spec.pathways_colocated_python_sidecar_image:
        asked[_contract.SIDECAR_CONTAINER] = {"image": spec.pathways_colocated_python_sidecar_image}
    return asked


def _lost_of_container(container: Container, asked: Mapping[str, Any]) -> Iterator[str]:
    what = f"container {container['name']}:"
    if asked["image"] and container["image"] != asked["image"]:
        yield f"{what} the image {asked['image']!r} is not its image"
    variables = environment(container)
    for name, value in dict(asked.get("env", ())).items():
        if variables.get(name) != value:
            yield f"{what} the variable {name}={value!r} arrives as {variables.get(name)!r}"
    words = [expand(word, variables) for word in (*container.get("command", ()), *container.get("args", ()))]
    for word, count in Counter(asked.get("args", ())).items():
        if words.count(word) < count:
            yield f"{what} the argument {word!r} does not arrive as it was given"


def environment(container: Container) -> dict[str, str]:
    """The variables that a container's process will have; what only the cluster knows is its field's path."""
    variables: dict[str, str] = {}
    for entry in container.get("env", ()):
        if "valueFrom" in entry:
            variables[entry["name"]] = entry["valueFrom"]["fieldRef"]["fieldPath"]
        else:
            variables[entry["name"]] = expand(entry.get("value", ""), variables)
    return variables


def _lost_of_pod(pod: Pod, spec: JobSpec) -> Iterator[str]:
    for key, value in (
        ("priorityClassName", spec.priority),
        ("serviceAccountName", spec.service_account),
        ("schedulerName", spec.gke_scheduler),
    ):
        if value and pod.get(key) != value:
            yield f"{key} {value!r} is {pod.get(key)!r}"
    secrets = [secret["name"] for secret in pod.get("imagePullSecrets", ())]
    if secrets != list(spec.image_pull_secret):
        yield f"the secrets {list(spec.image_pull_secret)} to pull images with are {secrets}"
    last = pod["containers"][-1]
    if last["name"] not in (_contract.USER_CONTAINER, _contract.WORKER_CONTAINER):
        return
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    places = {mount["mountPath"]: mount for mount in last.get("volumeMounts", ())}
    for mount in spec.mount:
        place = places.get(mount.target)
        if place is None or volumes[place["name"]] != mounts.volume(mount, place["name"]):
            yield f"container {last['name']}: the mount {str(mount)!r} is not in it"


def _lost_constraints(pod: Pod, spec: JobSpec) -> Iterator[str]:
    terms = pod.get("affinity", {}).get("nodeAffinity", {}).get("requiredDuringSchedulingIgnoredDuringExecution", {})
    found = {key: [value] for key, value in pod.get("nodeSelector", {}).items()}
    for term in terms.get("nodeSelectorTerms", ()):
        found |= {requirement["key"]: requirement["values"] for requirement in term["matchExpressions"]}
    for key, value in spec.node_constraint:
        if found.get(key) != value.split("|"):
            yield f"the node constraint {f'{key}={value}'!r} is {found.get(key)}"
