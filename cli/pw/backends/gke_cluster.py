"""What a cluster has, against what a job asks for: node pools, a pool for the head, fields that its JobSet knows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from pathways_runtime._tpus import SliceShape
from pw import tpus
from pw.errors import SpecError
from pw.kube import Json
from pw.specs import JobSpec
from pw.tpus import NodePool

NODE_POOL_LABEL = "cloud.google.com/gke-nodepool"
_ACCELERATOR_LABEL = "cloud.google.com/gke-tpu-accelerator"
_TOPOLOGY_LABEL = "cloud.google.com/gke-tpu-topology"
_MACHINE_LABEL = "node.kubernetes.io/instance-type"

# The proxy takes 16 CPUs and 100 GB, the resource manager 8 and 32 GB, the command 24: xpk's filter of machines.
HEAD_CPUS = 49
HEAD_MEMORY_BYTES = 233 * 2**30
_HEAD_POOLS = ("cpu-np", "pathways-np")
_UNITS = {"Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40, "k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}


@dataclass(frozen=True, slots=True)
class Pool:
    """A node pool that has nodes now. `cpus` and `memory_bytes` are those of its largest node."""

    kind: NodePool
    cpus: float
    memory_bytes: float


@dataclass(frozen=True, slots=True)
class Placement:
    """Where a cluster has room for a job: the shape of its slices, the pool of its head ("" to leave it open)."""

    shape: SliceShape
    head_node_pool: str
    notes: tuple[str, ...]


def pools_of(nodes: Sequence[Json]) -> list[Pool]:
    """The node pools that these nodes belong to, by name."""
    pools: dict[str, Pool] = {}
    for node in nodes:
        labels = node["metadata"].get("labels") or {}
        name = labels.get(NODE_POOL_LABEL)
        if not name:
            continue
        kind = NodePool(
            name, labels.get(_MACHINE_LABEL, ""), labels.get(_ACCELERATOR_LABEL, ""), labels.get(_TOPOLOGY_LABEL, "")
        )
        capacity = (node.get("status") or {}).get("capacity") or {}
        cpus, memory = quantity(capacity.get("cpu", "0")), quantity(capacity.get("memory", "0"))
        known = pools.get(name)
        pools[name] = Pool(kind, max(cpus, known.cpus if known else 0), max(memory, known.memory_bytes if known else 0))
    return [pools[name] for name in sorted(pools)]


def place(spec: JobSpec, pools: Sequence[Pool]) -> Placement:
    """Where the job fits. Raises SpecError when no pool is large enough for the head and none will be made."""
    resolution = tpus.resolve(spec.compute_type, spec.topology)
    kinds = [pool.kind for pool in pools]
    shape, notes = resolution.shape, [resolution.note]
    if resolution.alternatives:
        followed = tpus.follow_node_pools(shape, kinds)
        if followed.shape != shape:
            shape, notes = followed.shape, [followed.note]
    if not any(kind.machine_type == shape.machine_type.name for kind in kinds) and not spec.gke_nap_provisioning:
        notes.append(f"no node of machine type {shape.machine_type} exists now: the workers wait until one does")
    return Placement(shape, _head_pool(spec, pools, notes), tuple(note for note in notes if note))


def _head_pool(spec: JobSpec, pools: Sequence[Pool], notes: list[str]) -> str:
    cpu_pools = [pool for pool in pools if not pool.kind.accelerator]
    if spec.pathways_head_np:
        if spec.pathways_head_np not in {pool.kind.name for pool in pools}:
            notes.append(f"node pool {spec.pathways_head_np!r} has no node now: the head waits until it has one")
        return spec.pathways_head_np
    fitting = [pool.kind.name for pool in cpu_pools if large_enough(pool)]
    named = [name for name in _HEAD_POOLS if name in fitting]
    if named or fitting:
        return (named or fitting)[0]
    if spec.gke_nap_provisioning:
        return ""
    exist = ", ".join(f"{pool.kind.name} ({pool.kind.machine_type})" for pool in cpu_pools) or "none without TPUs"
    raise SpecError(
        f"no node pool is large enough for the head, which wants {HEAD_CPUS} vCPU and {HEAD_MEMORY_BYTES // 2**30} "
        f"GiB: there is {exist}",
        hints=("make a pool of n2-standard-64, or name one that is scaled to zero: --pathways-head-np POOL",),
    )


def large_enough(pool: Pool) -> bool:
    """Whether the head fits on a node of this pool."""
    return pool.cpus >= HEAD_CPUS and pool.memory_bytes >= HEAD_MEMORY_BYTES


def quantity(text: str) -> float:
    """The number that a Kubernetes quantity such as `64`, `63770m` or `257Gi` means."""
    for unit, size in _UNITS.items():
        if text.endswith(unit):
            return float(text.removesuffix(unit)) * size
    return float(text.removesuffix("m")) / 1000 if text.endswith("m") else float(text)


def check_fields(manifest: Json, crd: Json) -> None:
    """Raises SpecError with the fields and values of a JobSet that the cluster's JobSet does not know."""
    version = str(manifest["apiVersion"]).rpartition("/")[2]
    served = {entry["name"]: entry for entry in crd["spec"]["versions"] if entry.get("served")}
    installed = (crd["metadata"].get("labels") or {}).get("app.kubernetes.io/version", "")
    which = f"the JobSet {installed} of this cluster".replace("  ", " ")
    if version not in served:
        raise SpecError(f"{which} does not serve {version}: it serves {', '.join(served) or 'nothing'}")
    schema = served[version]["schema"]["openAPIV3Schema"]
    unknown = list(_unknown(manifest.get("spec"), schema["properties"]["spec"], "spec"))
    if unknown:
        raise SpecError(f"{which} does not know {', '.join(unknown)}", hints=("update JobSet, or leave these out",))


def _unknown(value: Any, schema: Json, path: str) -> Iterator[str]:
    if value not in schema.get("enum", [value]):
        yield f"{path}={value!r}"
    if isinstance(value, list):
        for index, item in enumerate(value):
            yield from _unknown(item, schema.get("items") or {}, f"{path}[{index}]")
    if isinstance(value, dict):
        properties = schema.get("properties")
        for key, item in value.items():
            if properties and key in properties:
                yield from _unknown(item, properties[key], f"{path}.{key}")
            elif properties and not schema.get("x-kubernetes-preserve-unknown-fields"):
                yield f"{path}.{key}"
