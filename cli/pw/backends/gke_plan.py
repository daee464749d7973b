"""Plans a job for a cluster: the manifest, and all that can be found wrong with it before it is sent."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from pw import notes as notes_of_all
from pw import proof, tpus
from pw.backends import gke_cluster
from pw.backends.gke_paths import CRD_NAME, job_errors, jobs_path
from pw.errors import SpecError
from pw.kube import ApiError, ForbiddenError, Kube
from pw.render import render
from pw.specs import JobSpec, Plan

_CRD = f"/apis/apiextensions.k8s.io/v1/customresourcedefinitions/{CRD_NAME}"
_CONFLICT, _INVALID = 409, (400, 403, 422)


def plan_for(kube: Kube, spec: JobSpec) -> Plan:
    """The plan for the cluster as it is. What the user may not read is not checked, and a note says so."""
    notes: list[str] = []
    placement = gke_cluster.Placement(spec.slice_shape, "", ())
    with _if_allowed("node pools", notes):
        placement = gke_cluster.place(spec, gke_cluster.pools_of(kube.list("/api/v1/nodes")[0]))
    manifest = render(spec, head_node_pool=placement.head_node_pool, shape=placement.shape)
    plan = _plan(spec, manifest, (*placement.notes, *notes))
    with job_errors(kube), _if_allowed("fields of the installed JobSet", []):  # the server's own check finds them too
        gke_cluster.check_fields(manifest, kube.get(_CRD))
    _check_on_server(kube, manifest)
    return plan


def plan_without_cluster(spec: JobSpec, why: str) -> Plan:
    """The plan where no cluster can be asked."""
    note = f"node pools, the head's pool and the fields of JobSet were not checked: {why}"
    return _plan(spec, render(spec), (tpus.resolve(spec.compute_type, spec.topology).note, note))


def _plan(spec: JobSpec, manifest: dict[str, Any], notes: tuple[str, ...]) -> Plan:
    proof.prove(manifest, spec)
    pods = [job["template"]["spec"]["template"]["spec"] for job in manifest["spec"]["replicatedJobs"]]
    known = notes_of_all.platforms(container for pod in pods for container in pod["containers"])
    found = (*notes, *known, notes_of_all.image_tag(spec))
    return Plan(backend="gke", spec=spec, manifest=manifest, notes=tuple(note for note in found if note))


def _check_on_server(kube: Kube, manifest: dict[str, Any]) -> None:
    """Has the API server and its webhooks check the manifest without keeping it."""
    try:
        with job_errors(kube):
            kube.create(jobs_path(kube), manifest, dry_run=True)
    except ApiError as exc:
        if exc.code in _INVALID:
            raise SpecError(exc.message, hints=exc.hints) from exc
        if exc.code != _CONFLICT:  # a name in use is for submit to say
            raise


@contextmanager
def _if_allowed(what: str, notes: list[str]) -> Iterator[None]:
    try:
        yield
    except ForbiddenError as exc:
        notes.append(f"{what} were not checked: {exc.message}")
