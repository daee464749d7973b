"""What a job must not ask for: found here, before anything is sent or overwritten, and said with what to ask instead.

`check_job` refuses what no backend can run; `check_gke` what only a cluster refuses. Both raise SpecError.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from pathways_runtime import _contract
from pw import fields, manifest_parts, mounts, versions
from pw.errors import SpecError
from pw.fields import Pairs

if TYPE_CHECKING:
    from pw.specs import JobSpec

_LABEL_VALUE = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._-]{0,61}[A-Za-z0-9])?")
_LABEL_KEY = re.compile(r"(?:(?P<prefix>[^/]+)/)?(?P<name>[A-Za-z0-9](?:[A-Za-z0-9._-]{0,61}[A-Za-z0-9])?)")
_QUANTITY = re.compile(r"[1-9][0-9]{0,14}(?:[kMGT]|[KMGT]i)?")
_IMAGE = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._/:@-]*[A-Za-z0-9])?")
# What follows an @ in an image's name, if one does.
_DIGEST = re.compile(r"|sha256:[0-9a-f]{64}")
_RESERVATION = re.compile(
    r"(?:projects/[^/]+/reservations/)?[^/]+(?:/reservationBlocks/[^/]+(?:/reservationSubBlocks/[^/]+)?)?"
)

# Flags that pw gives the servers, and what to type instead.
SERVER_FLAGS: Mapping[str, str] = {
    _contract.FLAG_SERVER_PORT: "the ports are fixed; drop it",
    _contract.FLAG_RESOURCE_MANAGER: "it is the head of this job; drop it",
    _contract.FLAG_NODE_TYPE: "it follows from the container; drop it",
    _contract.FLAG_SCRATCH: "use --gcs-scratch-location",
    _contract.FLAG_INSTANCE_COUNT: "use --num-slices",
    _contract.FLAG_INSTANCE_TYPE: "use --compute-type and --topology",
    _contract.FLAG_ELASTIC_SLICES: "use --pathways-elastic-slices",
    _contract.FLAG_SIDECAR_NAME: "use --pathways-colocated-python-sidecar-image",
    _contract.FLAG_SIDECAR_SHM: "use --pathways-colocated-python-sidecar-image",
}
# What Linux takes as one argument or variable (MAX_ARG_STRLEN), less a variable's name.
MAX_TEXT_BYTES = 128 * 1024 - 256
# A node that goes waits an hour at most; more than a day is a slip of the unit.
MAX_GRACE_S = 24 * 3600
_PROVISIONING = ("on-demand", "spot", "reservation")


def check_job(spec: JobSpec) -> None:
    """Raises SpecError for a job that no backend can run."""
    _check_text(spec)
    _check_command(spec)
    _check_environments(spec)
    _check_arguments(spec)
    _check_capacity(spec)
    _check_names(spec)
    _check_images(spec)
    _check_node_constraints(spec)
    if spec.gcs_scratch_location:
        mounts.check_scratch("--gcs-scratch-location", spec.gcs_scratch_location)
    own = ["/tmp", "/dev/shm"]
    if spec.pathways_colocated_python_sidecar_image:
        own.append(manifest_parts.SIDECAR_DIRECTORY)
    mounts.check_mounts(spec.mount, taken=own)


def check_gke(spec: JobSpec) -> None:
    """Raises SpecError for a job that runs on this machine but not on a cluster."""
    if not spec.pathways_headless and not spec.image:
        raise SpecError("a job on GKE needs an image to run its command in: add --image REGISTRY/PATH:TAG")
    for flag, image in _images(spec):
        registry, slash, path = image.partition("/")
        if not slash or not ({".", ":"} & set(registry) or registry == "localhost"):
            hub = image if slash else f"library/{image}"
            raise SpecError(
                f"{flag} {image!r} names no registry, and nodes cannot pull it: push it and give its full path, "
                f"such as REGION-docker.pkg.dev/PROJECT/REPOSITORY/{path or registry}, "
                f"or docker.io/{hub} if that is meant"
            )
    if not spec.gcs_scratch_location:
        raise SpecError(
            "Pathways on GKE needs a folder for its compile cache: add --gcs-scratch-location gs://BUCKET/FOLDER"
        )
    mounts.check_gs("--gcs-scratch-location", spec.gcs_scratch_location)
    for mount in spec.mount:
        kind, rest = mounts.split_source(mount.source)
        server = rest.partition("/")[0]
        if kind == "filestore" and "." not in server and ":" not in server:
            raise SpecError(
                f"mount {str(mount)!r}: {server!r} is no address; want filestore://ADDRESS/SHARE with the address that "
                f"`gcloud filestore instances describe {server}` shows, or a claim: pvc://CLAIM"
            )


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            yield from _texts(getattr(value, field.name))
    elif isinstance(value, tuple):
        for item in value:
            yield from _texts(item)


def _check_text(spec: JobSpec) -> None:
    for field in dataclasses.fields(spec):
        for text in _texts(getattr(spec, field.name)):
            if unfit := _unfit(text):
                shown = repr(text) if len(text) < 200 else f"{text[:40]!r}..."
                raise SpecError(f"{field.name} {shown} {unfit}")


def _unfit(text: str) -> str:
    """Why no process can be given `text`, "" where it can."""
    if "\0" in text:
        return "has a NUL character in it, which no process can be given"
    try:
        size_bytes = len(text.encode())
    except UnicodeEncodeError:
        return "is not valid Unicode: write it in UTF-8"
    if size_bytes > MAX_TEXT_BYTES:
        return f"has {size_bytes} bytes, and a process can be given {MAX_TEXT_BYTES}: put it into a file"
    return ""


def _check_command(spec: JobSpec) -> None:
    if not spec.pathways_headless:
        if not spec.command.strip():
            raise SpecError(
                f"command {spec.command!r} is empty: say what to run with --command, or ask for --pathways-headless"
            )
        if spec.command.startswith(("-", "+")):
            raise SpecError(
                f"command {spec.command!r} begins with {spec.command[0]!r}: bash takes it for its own option"
            )
        return
    for flag, value in (
        ("--command", spec.command),
        ("--env", [name for name, _ in spec.env]),
        ("--shm-size", spec.shm_size),
        ("--restart-on-exit-codes", spec.restart_on_exit_codes),
    ):
        if value:
            raise SpecError(
                f"{flag} {value!r} with --pathways-headless: a headless job has no command; drop one of them"
            )


# Variables that a user cannot set, by container: they say where this job's head is, and which host of it a pod is.
_OF_PROCESSES = frozenset({_contract.READY_FD, _contract.LOCAL_JOB_UID, _contract.JOB_COMPLETION_INDEX})
RESERVED_ENV: Mapping[str, frozenset[str]] = {
    container: _OF_PROCESSES.union(from_pod) for container, from_pod in manifest_parts.FROM_POD.items()
}


def _check_environments(spec: JobSpec) -> None:
    for flag, container, pairs in (
        ("--env", _contract.USER_CONTAINER, spec.env),
        ("--pathways-proxy-env", _contract.PROXY_CONTAINER, spec.pathways_proxy_env),
        ("--pathways-server-env", _contract.RESOURCE_MANAGER_CONTAINER, spec.pathways_server_env),
        ("--pathways-worker-env", _contract.WORKER_CONTAINER, spec.pathways_worker_env),
    ):
        _check_environment(flag, pairs, RESERVED_ENV[container])
    if _contract.JAX_BACKEND_TARGET in dict(spec.env):
        raise SpecError(
            f"--env: {_contract.JAX_BACKEND_TARGET!r} is set by pw, to the proxy of this very job; drop it, or set "
            f"{_contract.JAX_PLATFORMS}=cpu to run without Pathways"
        )


def _check_environment(flag: str, pairs: Pairs, reserved: frozenset[str]) -> None:
    for name, _ in pairs:
        if not fields.VARIABLE.fullmatch(name):
            raise SpecError(f"{flag}: {name!r} is not the name of a variable: want letters, digits and underscores")
        if name in reserved:
            raise SpecError(f"{flag}: {name!r} is set by pw, to what it is in this very job; drop it")


def _check_arguments(spec: JobSpec) -> None:
    for flag, arguments in (
        ("--pathways-proxy-args", spec.pathways_proxy_args),
        ("--pathways-server-args", spec.pathways_server_args),
        ("--pathways-worker-args", spec.pathways_worker_args),
    ):
        for argument in arguments:
            name = argument.partition("=")[0].lstrip("-").replace("-", "_")
            if argument.startswith("-") and name in SERVER_FLAGS:
                raise SpecError(f"{flag}: {argument!r} is an argument that pw itself gives: {SERVER_FLAGS[name]}")


def _check_capacity(spec: JobSpec) -> None:
    if spec.pathways_elastic_slices > spec.num_slices:
        raise SpecError(
            f"--pathways-elastic-slices {spec.pathways_elastic_slices} is more than the job has: "
            f"want at most --num-slices {spec.num_slices}"
        )
    provisioning, reservation = spec.gke_nap_provisioning, spec.gke_nap_reservation
    if provisioning and provisioning not in _PROVISIONING:
        raise SpecError(f"--gke-nap-provisioning {provisioning!r} is unknown: want {', '.join(_PROVISIONING)}")
    if provisioning == "reservation" and not reservation:
        raise SpecError("--gke-nap-provisioning 'reservation' needs the reservation: add --gke-nap-reservation NAME")
    if reservation and provisioning != "reservation":
        raise SpecError(
            f"--gke-nap-reservation {reservation!r} is only used with --gke-nap-provisioning reservation; "
            f"it is {provisioning or 'not given'!r}"
        )
    if reservation:
        _check_reservation(reservation)
    if spec.spot and provisioning not in ("", "spot"):
        raise SpecError(f"--spot contradicts --gke-nap-provisioning {provisioning!r}; drop one of them")
    if spec.grace_period_s > MAX_GRACE_S:
        raise SpecError(
            f"--grace-period {fields.duration_text(spec.grace_period_s)} is too long: "
            f"want at most {fields.duration_text(MAX_GRACE_S)}"
        )
    if spec.shm_size and not _QUANTITY.fullmatch(spec.shm_size):
        raise SpecError(f"--shm-size {spec.shm_size!r} is not a size: want one such as 100Gi")
    for code in spec.restart_on_exit_codes:
        if not 1 <= code <= 255:
            raise SpecError(f"--restart-on-exit-codes: {code} is out of range: want 1 to 255")


def _check_reservation(reservation: str) -> None:
    parts = reservation.split("/")
    values = parts[1::2] if len(parts) % 2 == 0 else [parts[0], *parts[2::2]]
    if not _RESERVATION.fullmatch(reservation) or not all(_LABEL_VALUE.fullmatch(value) for value in values):
        raise SpecError(
            f"--gke-nap-reservation {reservation!r} is not a reservation: want NAME or "
            "projects/PROJECT/reservations/NAME, and /reservationBlocks/BLOCK behind it for one block"
        )


def _check_names(spec: JobSpec) -> None:
    for flag, name in (
        ("--priority", spec.priority),
        ("--queue", spec.queue),
        ("--service-account", spec.service_account),
        *(("--image-pull-secret", secret) for secret in spec.image_pull_secret),
    ):
        if name and not mounts.is_dns_name(name):
            raise SpecError(f"{flag} {name!r} is not a Kubernetes name: want lower-case letters, digits, dashes, dots")
    for flag, value in (
        ("--queue", spec.queue),
        ("--pathways-head-np", spec.pathways_head_np),
        ("--placement-policy", spec.placement_policy),
    ):
        if value and not _LABEL_VALUE.fullmatch(value):
            raise SpecError(
                f"{flag} {value!r} is not a label: want at most 63 letters, digits, dashes, dots, underscores"
            )
    if spec.gke_scheduler and not _LABEL_KEY.fullmatch(spec.gke_scheduler):
        raise SpecError(f"--gke-scheduler {spec.gke_scheduler!r} is not the name of a scheduler")


def _images(spec: JobSpec) -> list[tuple[str, str]]:
    """The images that the user gave, and the flag of each."""
    given = (
        ("--image", spec.image),
        ("--pathways-proxy-server-image", spec.pathways_proxy_server_image),
        ("--pathways-server-image", spec.pathways_server_image),
        ("--pathways-worker-image", spec.pathways_worker_image),
        ("--pathways-colocated-python-sidecar-image", spec.pathways_colocated_python_sidecar_image),
    )
    return [(flag, image) for flag, image in given if image]


def _check_images(spec: JobSpec) -> None:
    versions_of: dict[str, str] = {}
    for flag, image in _images(spec):
        if not _IMAGE.fullmatch(image) or "//" in image or not _DIGEST.fullmatch(image.partition("@")[2]):
            raise SpecError(
                f"{flag} {image!r} is not the name of an image: want REGISTRY/PATH:TAG or REGISTRY/PATH@sha256:DIGEST, "
                "64 hexadecimal digits"
            )
        if flag != "--image" and (version := versions.jax_of(image)):
            versions_of[f"{flag} {image!r}"] = version
    if len(set(versions_of.values())) > 1:
        raise SpecError(f"Pathways' images must be of one JAX version, and these are not: {', '.join(versions_of)}")


def _check_node_constraints(spec: JobSpec) -> None:
    taken = manifest_parts.NODE_LABELS
    seen: set[str] = set()
    for key, value in spec.node_constraint:
        what = f"--node-constraint {f'{key}={value}'!r}"
        match = _LABEL_KEY.fullmatch(key)
        if match is None or (match["prefix"] and not mounts.is_dns_name(match["prefix"])):
            raise SpecError(f"{what}: {key!r} is not the key of a label")
        if key in taken:
            raise SpecError(f"{what}: pw sets this label; {taken[key]}")
        if key in seen:
            raise SpecError(f"{what}: {key!r} is given twice, and no node has two values; want KEY=A|B for either")
        if not all(_LABEL_VALUE.fullmatch(part) for part in value.split("|")):
            raise SpecError(f"{what}: {value!r} is not the value of a label, or several with | between them")
        seen.add(key)
