"""Jobs on a GKE cluster: the manifest is planned against what the cluster has, sent, and watched."""

from __future__ import annotations

import builtins
import math
import re
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, closing
from urllib.parse import unquote

from pathways_runtime import _contract
from pw import checks, config, kube_forward
from pw.backends import gke_logs, gke_plan, gke_status
from pw.backends.gke_paths import job_errors, jobs_path, not_found, pods_path
from pw.backends.gke_status import job_state, job_status, worker_job
from pw.config import Settings
from pw.errors import (
    AuthError,
    BackendUnavailableError,
    ConfigError,
    JobNotFoundError,
    SpecError,
    WaitTimeoutError,
)
from pw.faults import CRASH, Fault, check_all
from pw.kube import ApiError, Json, Kube, connect, path_segment
from pw.kube_watch import Watch
from pw.render import QUEUE_LABEL
from pw.specs import JobSpec, Plan
from pw.status import JobRef, JobStatus, LogLine, LogQuery, check_query

_KUEUE = "/apis/kueue.x-k8s.io"
_NOT_FOUND = 404


class GkeBackend:
    """Jobs as JobSets on the cluster that the settings name, else on that of the current kubeconfig context."""

    name = "gke"

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._clusters: dict[tuple[str, str], Kube] = {}

    def plan(self, spec: JobSpec) -> Plan:
        """The manifest, fitted to the cluster's node pools and checked by its API server. Where the cluster cannot be
        asked, the manifest alone, and a note of what was not checked. Raises SpecError for what it would refuse."""
        checks.check_gke(spec)
        try:
            return gke_plan.plan_for(self._kube(), spec)
        except (ConfigError, BackendUnavailableError, AuthError) as exc:
            return gke_plan.plan_without_cluster(spec, exc.message)

    def submit(self, plan: Plan, *, replace: bool = False) -> JobRef:
        kube = self._kube()
        ref = _ref(kube, plan.spec.name)
        if replace:
            self._replace(kube, ref)
        with job_errors(kube, ref):
            kube.create(jobs_path(kube), plan.manifest)
        return ref

    def get(self, ref: JobRef) -> JobStatus:
        kube = self._kube(ref)
        jobset = self._jobset(kube, ref)
        pods, _ = kube.list(pods_path(kube), labelSelector=gke_status.pod_selector(ref.name))
        return job_status(_ref(kube, ref.name), jobset, pods)

    def list(self) -> builtins.list[JobStatus]:
        """All Pathways jobs of the namespace, newest first, by whatever tool; without their pods."""
        kube = self._kube()
        with job_errors(kube, None):
            jobsets, _ = kube.list(jobs_path(kube))
        found = [job_status(_ref(kube, item["metadata"]["name"]), item) for item in jobsets if gke_status.is_ours(item)]
        return sorted(found, key=lambda status: status.created, reverse=True)

    def cancel(self, ref: JobRef) -> None:
        """Suspends the JobSet, so that its record stays until `delete`, and returns once no pod runs."""
        kube = self._kube(ref)
        jobset = self._jobset(kube, ref)
        if job_state(jobset).final:
            return
        if QUEUE_LABEL in (jobset["metadata"].get("labels") or {}):
            _deactivate(kube, jobset["metadata"]["uid"])
        with job_errors(kube, ref):
            kube.patch(
                f"{jobs_path(kube)}/{path_segment(ref.name)}",
                {"metadata": {"annotations": {gke_status.CANCELLED_ANNOTATION: "true"}}, "spec": {"suspend": True}},
            )
        watch = Watch(kube, pods_path(kube), labelSelector=gke_status.pod_selector(ref.name))
        with closing(watch):
            next(pods for pods in watch if not gke_status.pods_running(pods))

    def delete(self, ref: JobRef) -> None:
        kube = self._kube(ref)
        jobset = self._jobset(kube, ref)
        if not job_state(jobset).final:
            raise SpecError(
                f"job {ref.name!r} is {job_state(jobset)}: cancel it before it is deleted",
                hints=(f"pw job cancel {ref}",),
            )
        _delete(kube, ref.name, jobset["metadata"]["uid"])

    def logs(self, ref: JobRef, query: LogQuery) -> Iterator[LogLine]:
        kube = self._kube(ref)
        jobset = self._jobset(kube, ref)
        workers = worker_job(jobset)
        check_query(query, jobset, slices=workers.get("replicas", 1) if workers else 0)
        yield from gke_logs.job_logs(kube, ref.name, jobs_path(kube), query)

    def wait(self, ref: JobRef, *, timeout_s: float | None = None) -> JobStatus:
        kube = self._kube(ref)
        deadline = math.inf if timeout_s is None else time.monotonic() + timeout_s
        watch = Watch(kube, jobs_path(kube), deadline=deadline, fieldSelector=f"metadata.name={ref.name}")
        with closing(watch), job_errors(kube, ref):
            for jobs in watch:
                if not jobs:
                    raise not_found(kube, ref.name)
                if job_state(jobs[0]).final:
                    return self.get(ref)
        raise WaitTimeoutError(f"job {ref.name!r} has not ended after {timeout_s:g} s; it goes on")

    def inject(self, ref: JobRef, fault: Fault) -> None:
        """Deletes the pods of the slice's hosts without a grace period. A slice cannot hang."""
        if fault.kind != CRASH:
            raise SpecError(f"a slice on a cluster cannot {fault.kind}: want {CRASH}")
        kube = self._kube(ref)
        jobset = self._jobset(kube, ref)
        pods, _ = kube.list(pods_path(kube), labelSelector=gke_status.pod_selector(ref.name))
        check_all(job_status(_ref(kube, ref.name), jobset, pods), [fault])
        for pod in gke_status.pods_of_slice(pods, fault.slice):
            _delete_object(kube, f"{pods_path(kube)}/{path_segment(pod['metadata']['name'])}", grace_s=0)

    def connect(self, ref: JobRef, port: int) -> AbstractContextManager[str]:
        kube = self._kube(ref)
        self._jobset(kube, ref)
        return kube_forward.forwarded(kube, lambda: _head_pod(kube, ref.name), port)

    def _kube(self, ref: JobRef | None = None) -> Kube:
        """The cluster that `ref` names, else the one of the settings."""
        context, namespace, how = self._where(ref)
        key = context or "", namespace
        if key not in self._clusters:
            self._clusters[key] = connect(context, namespace, how=how)
        return self._clusters[key]

    def _where(self, ref: JobRef | None) -> tuple[str | None, str, str]:
        """The context (None for the current one), the namespace ("" for the context's), and how to get the context."""
        settings = self._settings
        project, location, cluster = settings.project, settings.location, settings.cluster
        namespace = "" if settings.sources.get("namespace") == config.DEFAULT else settings.namespace
        if ref is not None and len(ref.scope) == 4:
            project, location, cluster, namespace = ref.scope
        elif ref is not None and len(ref.scope) == 2:
            return unquote(ref.scope[0]), ref.scope[1], "kubectl config get-contexts"
        how = "gcloud container clusters get-credentials {} --location={} --project={}".format(
            cluster or "CLUSTER", location or "LOCATION", project or "PROJECT"
        )
        if not cluster:
            return None, namespace, how
        if not (project and location):
            raise ConfigError(f"cluster {cluster!r} needs its project and location: add --project and --location")
        return f"gke_{project}_{location}_{cluster}", namespace, how

    def _jobset(self, kube: Kube, ref: JobRef) -> Json:
        with job_errors(kube, ref):
            return kube.get(f"{jobs_path(kube)}/{path_segment(ref.name)}")

    def _replace(self, kube: Kube, ref: JobRef) -> None:
        """Deletes a finished job of this name; leaves one that runs for the API server to refuse."""
        try:
            jobset = self._jobset(kube, ref)
        except JobNotFoundError:
            return
        if job_state(jobset).final:
            _delete(kube, ref.name, jobset["metadata"]["uid"])


def _ref(kube: Kube, name: str) -> JobRef:
    match = re.fullmatch(r"gke_([^_/]+)_([^_/]+)_([^_/]+)", kube.context)
    scope = match.groups() if match else (path_segment(kube.context),)
    return JobRef(GkeBackend.name, name, (*scope, kube.namespace))


def _delete(kube: Kube, name: str, uid: str) -> None:
    """Deletes a JobSet and returns once it and its pods are gone."""
    _delete_object(kube, f"{jobs_path(kube)}/{path_segment(name)}")
    watch = Watch(kube, jobs_path(kube), fieldSelector=f"metadata.name={name}")
    with closing(watch):
        next(jobs for jobs in watch if all(job["metadata"]["uid"] != uid for job in jobs))


def _delete_object(kube: Kube, path: str, *, grace_s: int | None = None) -> None:
    """Deletes what may have gone by itself meanwhile."""
    try:
        kube.delete(path, grace_s=grace_s)
    except ApiError as exc:
        if exc.code != _NOT_FOUND:
            raise


def _deactivate(kube: Kube, uid: str) -> None:
    """Has Kueue evict a JobSet and not admit it again; left alone, it would resume what is suspended."""
    try:
        version = kube.get(_KUEUE)["preferredVersion"]["groupVersion"]
    except ApiError as exc:
        if exc.code == _NOT_FOUND:
            return
        raise
    path = f"/apis/{version}/namespaces/{path_segment(kube.namespace)}/workloads"
    workloads, _ = kube.list(path, labelSelector=f"kueue.x-k8s.io/job-uid={uid}")
    for workload in workloads:
        kube.patch(f"{path}/{path_segment(workload['metadata']['name'])}", {"spec": {"active": False}})


def _head_pod(kube: Kube, name: str) -> str:
    """The name of the head's pod that runs now."""
    selector = f"{gke_status.pod_selector(name)},{gke_status.REPLICATED_JOB_LABEL}={_contract.HEAD_JOB}"
    pods, _ = kube.list(pods_path(kube), labelSelector=selector)
    running = [pod for pod in pods if pod["status"].get("phase") == "Running"]
    if not running:
        raise BackendUnavailableError(f"the head of job {name!r} does not run now", hints=(f"pw job status {name}",))
    return str(max(running, key=lambda pod: pod["metadata"]["creationTimestamp"])["metadata"]["name"])
