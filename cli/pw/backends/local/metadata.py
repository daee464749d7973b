"""Names, labels and annotations that JobSet and Job give the pods of a manifest."""

from __future__ import annotations

import secrets
import uuid
from collections.abc import Mapping
from typing import Any

from pathways_runtime import _contract
from pw import names
from pw.backends.local.images import Meta
from pw.backends.local.jobset import PodKey

_JOBSET = "jobset.sigs.k8s.io"
_JOB = "batch.kubernetes.io"
# The letters of Kubernetes' generated names.
_ALPHABET = "bcdfghjklmnpqrstvwxz2456789"


class Names:
    """What of a JobSet's manifest concerns names."""

    def __init__(self, manifest: Mapping[str, Any]) -> None:
        self.name: str = manifest["metadata"]["name"]
        self._spec: Mapping[str, Any] = manifest["spec"]
        self._replicated = {replicated["name"]: replicated for replicated in self._spec["replicatedJobs"]}

    @property
    def coordinator(self) -> tuple[PodKey, str]:
        """The coordinator's place and its address in a cluster; the first pod's where the manifest names none."""
        wanted = self._spec.get("coordinator", {})
        job = wanted.get("replicatedJob", next(iter(self._replicated)))
        key = PodKey(job, int(wanted.get("jobIndex", 0)), int(wanted.get("podIndex", 0)))
        subdomain = self._spec.get("network", {}).get("subdomain") or self.name
        return key, f"{names.pod_name(self.name, *key)}.{subdomain}"

    @property
    def slices(self) -> int:
        """Slices of the job; 0 for a JobSet without workers."""
        return int(self._replicated[_contract.WORKER_JOB].get("replicas", 1)) if self._has_workers else 0

    @property
    def hosts(self) -> int:
        """Hosts of each slice."""
        return int(self.job_spec(_contract.WORKER_JOB).get("completions", 1)) if self._has_workers else 0

    @property
    def _has_workers(self) -> bool:
        return _contract.WORKER_JOB in self._replicated

    def job_spec(self, replicated_job: str) -> Mapping[str, Any]:
        spec: Mapping[str, Any] = self._replicated[replicated_job]["template"]["spec"]
        return spec

    def pod_spec(self, replicated_job: str) -> Mapping[str, Any]:
        spec: Mapping[str, Any] = self.job_spec(replicated_job)["template"]["spec"]
        return spec

    def meta(self, key: PodKey, *, restart_attempt: int) -> Meta:
        """A new pod's metadata: name, uid, labels, annotations, and its index where the Job is Indexed."""
        template = self.job_spec(key.replicated_job)["template"].get("metadata", {})
        given = self._given(key, restart_attempt)
        suffix = "".join(secrets.choice(_ALPHABET) for _ in range(5))
        return {
            "name": f"{names.pod_name(self.name, *key)}-{suffix}",
            "uid": str(uuid.uuid4()),
            "labels": template.get("labels", {}) | given,
            "annotations": self._replicated[key.replicated_job]["template"].get("metadata", {}).get("annotations", {})
            | template.get("annotations", {})
            | given,
            "completion_index": key.pod_index if self._indexed(key) else None,
        }

    def _given(self, key: PodKey, restart_attempt: int) -> dict[str, str]:
        job = names.job_name(self.name, key.replicated_job, key.job_index)
        given = {
            f"{_JOBSET}/jobset-name": self.name,
            f"{_JOBSET}/replicatedjob-name": key.replicated_job,
            f"{_JOBSET}/replicatedjob-replicas": str(self._replicated[key.replicated_job].get("replicas", 1)),
            f"{_JOBSET}/job-index": str(key.job_index),
            f"{_JOBSET}/restart-attempt": str(restart_attempt),
            f"{_JOB}/job-name": job,
            "job-name": job,
        }
        if self._indexed(key):
            given[f"{_JOB}/job-completion-index"] = str(key.pod_index)
        if "coordinator" in self._spec:
            given[f"{_JOBSET}/coordinator"] = self.coordinator[1]
        return given

    def _indexed(self, key: PodKey) -> bool:
        return self.job_spec(key.replicated_job).get("completionMode") == "Indexed"


def slice_of(pod: str, name: str) -> int | None:
    """The slice that a pod of job `name` is a host of; None for any other pod."""
    prefix = f"{name}-{_contract.WORKER_JOB}-"
    index = pod.removeprefix(prefix).partition("-")[0] if pod.startswith(prefix) else ""
    return int(index) if index.isdecimal() else None
