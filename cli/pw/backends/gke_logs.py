"""The log lines of a job on a cluster: which containers a query means, and when following them ends."""

from __future__ import annotations

from collections.abc import Iterator

from pw.backends import gke_status
from pw.kube import Json, Kube
from pw.kube_follow import Follower, history
from pw.kube_logs import ContainerLog, container_statuses, has_run
from pw.kube_watch import Watch
from pw.status import LogLine, LogQuery


def job_logs(kube: Kube, job: str, jobs_path: str, query: LogQuery) -> Iterator[LogLine]:
    """The lines of all containers that `query` means: first what there is, in order of time; then, to follow, what
    comes. Kubernetes keeps stdout and stderr as one, so every line counts as stdout."""
    pods_path = f"/api/v1/namespaces/{kube.namespace}/pods"
    selector = gke_status.pod_selector(job)
    containers = _Containers(kube, query)
    pods, _ = kube.list(pods_path, labelSelector=selector)
    yield from history(containers.discover(pods), tail=query.tail)
    if query.follow:
        yield from Follower(
            pods=Watch(kube, pods_path, labelSelector=selector),
            discover=containers.discover,
            job=Watch(kube, jobs_path, fieldSelector=f"metadata.name={job}"),
            is_over=lambda jobs: all(gke_status.job_state(found).final for found in jobs),
            last_pods=lambda: kube.list(pods_path, labelSelector=selector)[0],
        )


class _Containers:
    """The logs of the containers that a query means, each once."""

    def __init__(self, kube: Kube, query: LogQuery) -> None:
        self._kube = kube
        self._query = query
        self._logs: dict[tuple[str, str], ContainerLog] = {}

    def discover(self, pods: list[Json]) -> list[ContainerLog]:
        """All logs so far, with those of containers of `pods` that have started since."""
        for pod in pods:
            if self._query.slice is not None and gke_status.slice_index(pod) != self._query.slice:
                continue
            for status in container_statuses(pod):
                key = pod["metadata"]["uid"], status["name"]
                if key not in self._logs and self._query.container in (None, status["name"]) and has_run(status):
                    self._logs[key] = ContainerLog(self._kube, pod, status["name"], since=self._query.since)
        return list(self._logs.values())
