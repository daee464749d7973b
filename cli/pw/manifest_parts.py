"""What goes into a job's manifest: images, environments, volumes, node labels, limits. Shape is the template's.

Text of the user stands here as the kubelet must get it (`expansion.escape`); only our own `$(PATHWAYS_HEAD)` is left to
expand. Where the user sets a variable that pw has a default for, the user's value stands in its place; those that pw
must set are refused before (`checks.RESERVED_ENV`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pathways_runtime import _contract, _tpus
from pw import versions
from pw.expansion import escape
from pw.fields import Pairs

if TYPE_CHECKING:
    from pathways_runtime._tpus import SliceShape
    from pw.specs import JobSpec

INT32_MAX = 2**31 - 1
# Client and CPU: data loaders and checkpoint code ask for CPU devices, which `proxy` alone has none of.
JAX_PLATFORMS = f"{_contract.PROXY_PLATFORM},cpu"
SIDECAR_DIRECTORY = "/tmp/sidecar"
USER_MEMORY_BYTES = 100 * 10**9
# A host of a slice that cannot be lost gets this many tries before the whole job restarts.
TRIES_PER_HOST = 4

# What runs the command ($1): bash as the first process of a container does not pass SIGTERM on, and a command that ends
# with 0 because it was told to would make the JobSet complete. So its process group gets the signal, and 0 becomes 143.
RUN_COMMAND = """\
set -m
child= terms=0 seen=-1
trap 'terms=$((terms+1)); [ -z "$child" ] || kill -TERM -- "-$child" 2>/dev/null' TERM
bash -c "$1" & child=$!
if [ "$terms" != 0 ]; then kill -TERM -- "-$child" 2>/dev/null; fi
while [ "$seen" != "$terms" ]; do seen=$terms; wait "$child" 2>/dev/null; code=$?; done
if [ "$terms" != 0 ] && [ "$code" = 0 ]; then code=143; fi
exit "$code"
"""

_ADDRESS = f"$({_contract.PATHWAYS_HEAD})"
RESOURCE_MANAGER_FLAG = f"--{_contract.FLAG_RESOURCE_MANAGER}={_ADDRESS}:{_contract.RESOURCE_MANAGER_PORT}"
_ON_GOOGLE_CLOUD = {"XCLOUD_ENVIRONMENT": "GCP"}


def _label(name: str) -> dict[str, Any]:
    return {"fieldRef": {"fieldPath": f"metadata.labels['jobset.sigs.k8s.io/{name}']"}}


def _annotation(name: str) -> dict[str, Any]:
    return {"fieldRef": {"fieldPath": f"metadata.annotations['jobset.sigs.k8s.io/{name}']"}}


# Variables that hold what JobSet says of the pod, by container and in order: `$(NAME)` sees only what stands above it.
FROM_POD: Mapping[str, Mapping[str, dict[str, Any]]] = {
    _contract.RESOURCE_MANAGER_CONTAINER: {
        "HOST_ADDRESS": _label("coordinator"),
        "JOBSET_NAME": _annotation("jobset-name"),
        "REPLICATED_JOB_NAME": _annotation("replicatedjob-name"),
    },
    _contract.PROXY_CONTAINER: {_contract.PATHWAYS_HEAD: _label("coordinator")},
    _contract.USER_CONTAINER: {_contract.PATHWAYS_HEAD: _label("coordinator")},
    _contract.WORKER_CONTAINER: {
        _contract.PATHWAYS_HEAD: _label("coordinator"),
        "JOBSET_NAME": _annotation("jobset-name"),
        "REPLICATED_JOB_NAME": _annotation("replicatedjob-name"),
        _contract.MEGASCALE_COORDINATOR: _label("coordinator"),
        _contract.MEGASCALE_NUM_SLICES: _label("replicatedjob-replicas"),
        _contract.MEGASCALE_SLICE_ID: _label("job-index"),
    },
}


def environment(container: str, defaults: Mapping[str, str], user: Pairs) -> list[dict[str, Any]]:
    """The EnvVars of a container: from the pod, then pw's own with the user's values, then the user's."""
    values = dict(defaults) | {name: escape(value) for name, value in user}
    from_pod = [{"name": name, "valueFrom": source} for name, source in FROM_POD[container].items()]
    return from_pod + [{"name": name, "value": value} for name, value in values.items()]


def user_env(spec: JobSpec) -> list[dict[str, Any]]:
    """The environment of the command: where JAX finds the proxy, and what the user adds."""
    defaults = {
        _contract.JAX_PLATFORMS: JAX_PLATFORMS,
        _contract.JAX_BACKEND_TARGET: f"grpc://{_ADDRESS}:{_contract.PROXY_PORT}",
        _contract.INSECURE_CREDENTIALS: "true",
    }
    return environment(_contract.USER_CONTAINER, defaults | _ON_GOOGLE_CLOUD, spec.env)


def proxy_env(spec: JobSpec) -> list[dict[str, Any]]:
    """The environment of the proxy, which speaks without ALTS as its client does."""
    defaults = {_contract.INSECURE_CREDENTIALS: "true"}
    return environment(_contract.PROXY_CONTAINER, defaults, spec.pathways_proxy_env)


def server_env(spec: JobSpec) -> list[dict[str, Any]]:
    """The environment of the resource manager, which runs where no TPU metadata can be asked for."""
    defaults = {"TPU_SKIP_MDS_QUERY": "true"}
    return environment(_contract.RESOURCE_MANAGER_CONTAINER, defaults, spec.pathways_server_env)


def worker_env(spec: JobSpec) -> list[dict[str, Any]]:
    """The environment of a worker."""
    logs = {"TPU_MIN_LOG_LEVEL": "0", "TF_CPP_MIN_LOG_LEVEL": "0"} if spec.verbose else {}
    defaults = {"MEGASCALE_GRPC_ENABLE_XOR_TRACER": "false"} | _ON_GOOGLE_CLOUD | logs
    return environment(_contract.WORKER_CONTAINER, defaults, spec.pathways_worker_env)


@dataclass(frozen=True, slots=True)
class Images:
    """The image of each container; `sidecar` is "" where there is none."""

    user: str
    proxy: str
    server: str
    worker: str
    sidecar: str


def images(spec: JobSpec, jax_version: str | None) -> Images:
    """The images as given; where not, those of one tag, so that proxy, servers and sidecar are of one JAX."""
    sidecar = spec.pathways_colocated_python_sidecar_image
    given = versions.tag_of(spec.pathways_server_image) or versions.tag_of(spec.pathways_proxy_server_image)
    tag = given or versions.image_tag(versions.jax_of(sidecar) or jax_version)
    server = spec.pathways_server_image or f"{_contract.SERVER_IMAGE}:{tag}"
    return Images(
        user=spec.image or _contract.SHELL_IMAGE,
        proxy=spec.pathways_proxy_server_image or f"{_contract.PROXY_IMAGE}:{tag}",
        server=server,
        worker=spec.pathways_worker_image or server,
        sidecar=sidecar,
    )


def worker_backoff_limit(spec: JobSpec, shape: SliceShape) -> int:
    """Failed pods that a slice survives; of an elastic job as many as the user lets each host have."""
    tries = spec.pathways_max_slice_restarts if spec.pathways_elastic_slices else TRIES_PER_HOST
    return min(tries * shape.hosts, INT32_MAX)


_UNIT = {"": 1, "k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
_UNIT |= {"Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40}


def size_bytes(quantity: str) -> int:
    """Bytes of a Kubernetes quantity without a fraction, such as 100Gi or 32G."""
    digits = quantity.rstrip("kKMGTi")
    return int(digits) * _UNIT[quantity[len(digits) :]]


def user_memory(spec: JobSpec) -> str:
    """The memory that the command asks for; /dev/shm is part of it, so it is never less."""
    if spec.shm_size and size_bytes(spec.shm_size) > USER_MEMORY_BYTES:
        return spec.shm_size
    return f"{USER_MEMORY_BYTES // 10**9}G"


def pod_annotations(spec: JobSpec) -> dict[str, str]:
    """Annotations of head and worker pods: GKE adds the FUSE container to the pods that ask for it so."""
    return {"gke-gcsfuse/volumes": "true"} if any(mount.source.startswith("gs://") for mount in spec.mount) else {}


def pod_settings(spec: JobSpec) -> dict[str, Any]:
    """Settings of head and worker pods alike, those that the user gave."""
    settings = {
        "priorityClassName": spec.priority,
        "serviceAccountName": spec.service_account,
        "schedulerName": spec.gke_scheduler,
        "imagePullSecrets": [{"name": name} for name in spec.image_pull_secret],
    }
    return {key: value for key, value in settings.items() if value}


ACCELERATOR_LABEL = "cloud.google.com/gke-tpu-accelerator"
TOPOLOGY_LABEL = "cloud.google.com/gke-tpu-topology"
MACHINE_TYPE_LABEL = "node.kubernetes.io/instance-type"
PLACEMENT_LABEL = "cloud.google.com/placement-policy-name"
SPOT_LABEL = "cloud.google.com/gke-spot"
PROVISIONING_LABEL = "cloud.google.com/gke-provisioning"
_RESERVATION = "cloud.google.com/reservation"
# Labels of worker nodes that have flags of their own.
NODE_LABELS: Mapping[str, str] = {
    ACCELERATOR_LABEL: "use --compute-type",
    TOPOLOGY_LABEL: "use --topology",
    MACHINE_TYPE_LABEL: "use --compute-type MACHINE_TYPE --topology TOPOLOGY",
    PLACEMENT_LABEL: "use --placement-policy",
    SPOT_LABEL: "use --spot",
    PROVISIONING_LABEL: "use --gke-nap-provisioning",
} | {
    f"{_RESERVATION}-{part}": "use --gke-nap-reservation"
    for part in ("name", "affinity", "project", "blocks", "subblocks")
}


def _reservation_labels(reservation: str) -> dict[str, str]:
    """Node labels that ask for a reservation given by name, as projects/P/reservations/R, or with its block."""
    parts = reservation.split("/")
    if len(parts) % 2:
        parts = ["reservations", *parts]
    named = dict(zip(parts[::2], parts[1::2], strict=True))
    labels = {
        f"{_RESERVATION}-name": named.get("reservations", ""),
        f"{_RESERVATION}-affinity": "specific",
        f"{_RESERVATION}-project": named.get("projects", ""),
        f"{_RESERVATION}-blocks": named.get("reservationBlocks", ""),
        f"{_RESERVATION}-subblocks": named.get("reservationSubBlocks", ""),
    }
    return {label: value for label, value in labels.items() if value}


def _provisioning_labels(spec: JobSpec) -> dict[str, str]:
    if spec.gke_nap_provisioning == "reservation":
        return _reservation_labels(spec.gke_nap_reservation)
    kinds = {"spot": "spot", "on-demand": "standard"}
    if spec.gke_nap_provisioning:
        return {PROVISIONING_LABEL: kinds[spec.gke_nap_provisioning]}
    return {}


def _needs_machine_type(spec: JobSpec, shape: SliceShape) -> bool:
    """Whether accelerator and topology do not tell the hosts: 2x4 is two 4-chip hosts or one of 8 chips."""
    same = [other for other in _tpus.shapes(shape.generation.name) if other.topology == shape.topology]
    return len(same) > 1 and not spec.gke_nap_provisioning


def node_labels(spec: JobSpec, shape: SliceShape) -> dict[str, str]:
    """The labels that pw itself demands of worker nodes."""
    labels = {
        ACCELERATOR_LABEL: shape.gke_accelerator,
        TOPOLOGY_LABEL: shape.topology,
    }
    if _needs_machine_type(spec, shape):
        labels[MACHINE_TYPE_LABEL] = shape.machine_type.name
    if spec.placement_policy:
        labels[PLACEMENT_LABEL] = spec.placement_policy
    if spec.spot:
        labels[SPOT_LABEL] = "true"
    return labels | _provisioning_labels(spec)


def worker_node_selector(spec: JobSpec, shape: SliceShape) -> dict[str, str]:
    """`node_labels` and the user's constraints that name one value."""
    return node_labels(spec, shape) | {key: value for key, value in spec.node_constraint if "|" not in value}


def worker_affinity(spec: JobSpec) -> list[dict[str, Any]]:
    """The user's constraints that leave a choice, KEY=A|B."""
    return [
        {"key": key, "operator": "In", "values": value.split("|")}
        for key, value in spec.node_constraint
        if "|" in value
    ]
