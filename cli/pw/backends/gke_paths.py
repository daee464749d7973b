"""Where a job's objects are on the API server, and what its refusals mean for a job."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from pw.errors import BackendError, JobExistsError, JobNotFoundError
from pw.kube import ApiError, Kube, path_segment
from pw.status import JobRef

CRD_NAME = "jobsets.jobset.x-k8s.io"
_NOT_FOUND, _CONFLICT = 404, 409


def jobs_path(kube: Kube) -> str:
    """The JobSets of the namespace."""
    return f"/apis/jobset.x-k8s.io/v1alpha2/namespaces/{path_segment(kube.namespace)}/jobsets"


def pods_path(kube: Kube) -> str:
    """The pods of the namespace."""
    return f"/api/v1/namespaces/{path_segment(kube.namespace)}/pods"


def not_found(kube: Kube, name: str) -> JobNotFoundError:
    """The error for a name that no job has."""
    return JobNotFoundError(
        f"there is no job {name!r} in namespace {kube.namespace!r} of cluster {kube.context!r}", hints=("pw job list",)
    )


@contextmanager
def job_errors(kube: Kube, ref: JobRef | None = None) -> Iterator[None]:
    """Says what a refusal of the API server means for the job `ref`, or for JobSets at all."""
    try:
        yield
    except ApiError as exc:
        if exc.code == _NOT_FOUND and exc.object_name in ("", CRD_NAME):
            raise BackendError(
                f"JobSet is not installed on cluster {kube.context!r}",
                hints=("install it: https://jobset.sigs.k8s.io/docs/installation",),
            ) from exc
        if ref is not None and exc.code == _NOT_FOUND and exc.object_name == ref.name:
            raise not_found(kube, ref.name) from exc
        if ref is not None and exc.code == _CONFLICT:
            raise JobExistsError(
                f"job {ref.name!r} exists on cluster {kube.context!r}",
                hints=(f"see it: pw job status {ref}", "delete it if it has finished: --replace", "or choose a --name"),
            ) from exc
        raise
