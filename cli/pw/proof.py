"""The proof of a manifest before it is sent: what Kubernetes or its kubelet would find later is found here.

`prove` raises SpecError with the place that breaks. It looks at the manifest alone, as a cluster would: at its schema,
then at names, policies and pods (`proof_pods`); and at last for everything that the user asked for, byte for byte,
after the kubelet's expansion, and after YAML as Go reads it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import yaml

from pathways_runtime import _contract
from pw import names, proof_pods, schema
from pw.errors import SpecError
from pw.render import to_yaml

if TYPE_CHECKING:
    from pw.specs import JobSpec

TPU = "google.com/tpu"
# etcd takes requests of 1.5 MiB; the status and what the server adds to an object must fit beside it.
MAX_OBJECT_BYTES = 1_400_000
# Plain words that Go's YAML, both its versions, reads as the integers and booleans that they look like.
_PLAIN_VALUES = re.compile(r"-?(?:0|[1-9][0-9]*)|true|false")
_PLAIN_KEY = re.compile(r"[A-Za-z][A-Za-z0-9./-]*[A-Za-z]")
_Loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def prove(manifest: Mapping[str, Any], spec: JobSpec) -> None:
    """Raises SpecError, with the places that break, unless a cluster takes `manifest` and it is what `spec` asks."""
    for look in (_of_schema, _of_structure, _of_what_was_asked):
        if found := list(look(manifest, spec)):
            raise SpecError(
                f"the manifest of {spec.name!r} would not run as asked, so nothing was sent: {found[0]}",
                hints=tuple(found[1:]),
            )


def _of_schema(manifest: Mapping[str, Any], _: JobSpec) -> Iterator[str]:
    return schema.problems(manifest, schema.jobset_schema())


def _of_structure(manifest: Mapping[str, Any], spec: JobSpec) -> Iterator[str]:
    yield from _of_names(manifest)
    yield from _of_policies(manifest)
    yield from _of_shape(manifest, spec)
    for job in manifest["spec"]["replicatedJobs"]:
        yield from proof_pods.problems(job["name"], job["template"]["spec"]["template"]["spec"])


def _of_what_was_asked(manifest: Mapping[str, Any], spec: JobSpec) -> Iterator[str]:
    yield from proof_pods.lost(manifest, spec)
    text = to_yaml(manifest)
    if read_as_go(text) != manifest:
        yield "its YAML is not read back as it was written"
    if len(text.encode()) > MAX_OBJECT_BYTES:
        yield f"it is larger than the {MAX_OBJECT_BYTES} bytes that Kubernetes stores: put text into files"


def _jobs(manifest: Mapping[str, Any]) -> dict[str, Any]:
    return {job["name"]: job for job in manifest["spec"]["replicatedJobs"]}


def _of_names(manifest: Mapping[str, Any]) -> Iterator[str]:
    name = manifest["metadata"]["name"]
    subdomain = manifest["spec"].get("network", {}).get("subdomain", "")
    derived = [("coordinator label", names.coordinator(name, subdomain))]
    for job in manifest["spec"]["replicatedJobs"]:
        last = names.pod_name(name, job["name"], job["replicas"] - 1, job["template"]["spec"]["completions"] - 1)
        derived.append((f"pod name of {job['name']}", last + names.GENERATED_SUFFIX))
    for what, text in derived:
        if len(text) > names.MAX_LABEL:
            yield f"{what} {text!r} has {len(text)} characters and may have {names.MAX_LABEL}: choose a shorter --name"


def _of_policies(manifest: Mapping[str, Any]) -> Iterator[str]:
    jobs, spec = _jobs(manifest), manifest["spec"]
    if len(jobs) != len(spec["replicatedJobs"]):
        yield "two replicated jobs have one name"
    targets = [spec["coordinator"]["replicatedJob"], *spec.get("successPolicy", {}).get("targetReplicatedJobs", ())]
    for rule in spec["failurePolicy"].get("rules", ()):
        targets += rule.get("targetReplicatedJobs", ())
    yield from (
        f"a policy names the replicated job {target!r}, which is not there" for target in targets if target not in jobs
    )
    for name, job in jobs.items():
        yield from _of_job(name, job["template"]["spec"])


def _of_job(name: str, job: Mapping[str, Any]) -> Iterator[str]:
    pod = job["template"]["spec"]
    if job.get("completionMode") != "Indexed" or job.get("completions") != job.get("parallelism"):
        yield f"job {name}: its pods must be Indexed and run all at once"
    rules = job.get("podFailurePolicy", {}).get("rules", ())
    if rules and pod["restartPolicy"] != "Never":
        yield f"job {name}: Kubernetes takes a podFailurePolicy only with restartPolicy Never"
    known = {container["name"] for container in proof_pods.containers(pod)}
    for rule in rules:
        if rule["onExitCodes"].get("containerName", "") not in known:
            yield f"job {name}: its podFailurePolicy names a container that is not there"
        if rule["onExitCodes"]["values"] != sorted(rule["onExitCodes"]["values"]):
            yield f"job {name}: exit codes must be in order"


def _of_shape(manifest: Mapping[str, Any], spec: JobSpec) -> Iterator[str]:
    workers = _jobs(manifest).get(_contract.WORKER_JOB)
    if workers is None:
        yield f"there is no replicated job {_contract.WORKER_JOB!r}"
        return
    job = workers["template"]["spec"]
    limits = [container.get("resources", {}).get("limits", {}) for container in job["template"]["spec"]["containers"]]
    chips = job["completions"] * sum(int(limit.get(TPU, 0)) for limit in limits)
    if (workers["replicas"], chips) != (spec.num_slices, spec.slice_shape.chips):
        yield (
            f"its workers are {workers['replicas']} slices of {chips} chips, "
            f"and {spec.num_slices} of {spec.slice_shape.chips} were asked for"
        )


def read_as_go(text: str) -> Any:
    """The data that Go's YAML makes of `text`. Raises SpecError for a plain word that some reader takes otherwise."""
    return _go_value(yaml.compose(text, Loader=_Loader))


def _go_value(node: Any) -> Any:
    if isinstance(node, yaml.MappingNode):
        return {_go_key(key): _go_value(value) for key, value in node.value}
    if isinstance(node, yaml.SequenceNode):
        return [_go_value(item) for item in node.value]
    if node.style:
        return node.value
    if not _PLAIN_VALUES.fullmatch(node.value):
        raise SpecError(f"the plain word {node.value!r} in the manifest's YAML is not the same to all that read YAML")
    return json.loads(node.value)


def _go_key(node: Any) -> str:
    key = str(node.value)
    if not node.style and (_PLAIN_KEY.fullmatch(key) is None or node.tag != "tag:yaml.org,2002:str"):
        raise SpecError(f"the plain key {key!r} in the manifest's YAML is not the same to all that read YAML")
    return key
