"""A cluster for tests: the API server in memory, and what JobSet's controller, the scheduler and kubelets would do."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator
from typing import Any

from tests.controlplane.apiserver import CRDS, JOBSETS, ApiServer, Fault, Json

PODS = "/api/v1/namespaces/{}/pods"
NODES = "/api/v1/nodes"
HEAD, WORKER = "pathways-head", "worker"
_LABEL = "jobset.sigs.k8s.io/"


class Cluster:
    """What happens on a cluster happens when a test says so; deleting and suspending a JobSet take effect at once."""

    def __init__(self, server: ApiServer, namespace: str = "default") -> None:
        self.server = server
        self.namespace = namespace
        self._numbers = itertools.count()
        server.on_change = self._react

    @property
    def jobsets(self) -> dict[str, Json]:
        return self.server.store.objects.setdefault(JOBSETS.format(self.namespace), {})

    @property
    def pods(self) -> dict[str, Json]:
        return self.server.store.objects.setdefault(PODS.format(self.namespace), {})

    def fail(self, method: str, path: str, **how: Any) -> None:
        """Has the next requests that match go wrong; see `Fault`."""
        self.server.faults.append(Fault(method, path, **how))

    def add_pool(self, name: str, machine: str, accelerator: str = "", topology: str = "", *, nodes: int = 1) -> None:
        """A node pool; machines called *-standard-64 have the size of an n2-standard-64, others are small."""
        labels = {"cloud.google.com/gke-nodepool": name, "node.kubernetes.io/instance-type": machine}
        if accelerator:
            labels |= {
                "cloud.google.com/gke-tpu-accelerator": accelerator,
                "cloud.google.com/gke-tpu-topology": topology,
            }
        large = machine.endswith("-64")
        capacity = {"cpu": "64", "memory": "264000000Ki"} if large else {"cpu": "4", "memory": "16000000Ki"}
        for index in range(nodes):
            node = {"metadata": {"name": f"{name}-{index}", "labels": labels}, "status": {"capacity": capacity}}
            self.server.store.put(NODES, node)

    def forget_field(self, *path: str) -> None:
        """Makes the installed JobSet one that does not have this field of its spec yet."""
        crd = copy.deepcopy(self.server.store.objects[CRDS]["jobsets.jobset.x-k8s.io"])
        schema = crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"]
        for name in path[:-1]:
            schema = schema["properties"][name]
        del schema["properties"][path[-1]]
        self.server.store.put(CRDS, crd)

    def run(self, job: str, *, attempt: int = 0) -> list[str]:
        """Starts all pods of a JobSet; gives their names, the head's first."""
        jobset = self.jobsets[job]
        names = [self._start(jobset, entry, attempt, *at) for entry, at in _places(jobset)]
        counts = [{"name": entry["name"], "ready": entry["replicas"]} for entry in jobset["spec"]["replicatedJobs"]]
        self._set_status(job, {"restarts": attempt, "restartsCountTowardsMax": attempt, "replicatedJobsStatus": counts})
        return names

    def pend(self, job: str, message: str) -> None:
        """Makes the head's pod one that no node has room for."""
        jobset = self.jobsets[job]
        entry, at = next(_places(jobset))
        name = self._start(jobset, entry, 0, *at)
        condition = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": message}
        self._set_pod(name, {"phase": "Pending", "conditions": [condition], "containerStatuses": []})

    def set_condition(self, pod: str, **condition: str) -> None:
        conditions = [*self.pods[pod]["status"]["conditions"], condition]
        self._set_pod(pod, {"conditions": conditions})

    def restart(self, pod: str, container: str) -> int:
        """Ends the container's run and starts the next; gives its number."""
        statuses = copy.deepcopy(self.pods[pod]["status"]["containerStatuses"])
        status = next(status for status in statuses if status["name"] == container)
        run = status["restartCount"]
        status |= {"restartCount": run + 1, "lastState": {"terminated": {"exitCode": 1}}}
        self.server.logs.end(pod, container, run=run)
        self._set_pod(pod, {"containerStatuses": statuses})
        return int(run) + 1

    def hold(self, pods: list[str]) -> None:
        """Makes the pods' containers wait for their images; see `release`."""
        for pod in pods:
            self._set_states(pod, {"waiting": {"reason": "ContainerCreating"}})

    def release(self, pods: list[str]) -> None:
        for pod in pods:
            self._set_states(pod, {"running": {"startedAt": "2026-01-02T03:00:00Z"}})

    def end_pod(self, pod: str, exit_code: int = 0) -> None:
        """Ends all containers of a pod, the user's with this code."""
        changes: Json = {"phase": "Failed" if exit_code else "Succeeded", "conditions": []}
        for key in ("initContainerStatuses", "containerStatuses"):
            statuses = copy.deepcopy(self.pods[pod]["status"][key])
            for status in statuses:
                code = exit_code if status["name"] == "main" else 0
                status["state"] = {"terminated": {"exitCode": code, "reason": "Error" if code else "Completed"}}
                self.server.logs.end(pod, status["name"], run=status["restartCount"])
            changes[key] = statuses
        self._set_pod(pod, changes)

    def remove_pod(self, pod: str) -> None:
        self.server.store.remove(PODS.format(self.namespace), pod)

    def finish(self, job: str, exit_code: int = 0) -> None:
        """Ends the head with this code and the JobSet with it; the workers go."""
        for name in list(self.pods):
            labels = self.pods[name]["metadata"]["labels"]
            if labels[f"{_LABEL}jobset-name"] == job and labels[f"{_LABEL}replicatedjob-name"] == HEAD:
                self.end_pod(name, exit_code)
        self.conclude(job, "Failed" if exit_code else "Completed", "jobset failed due to one or more job failures")
        for name in [name for name in self.pods if name.startswith(f"{job}-{WORKER}-")]:
            self.remove_pod(name)

    def conclude(self, job: str, condition: str, message: str = "") -> None:
        """Gives the JobSet a condition that holds."""
        known = self.jobsets[job].get("status", {}).get("conditions", [])
        found = {
            "type": condition,
            "status": "True",
            "message": message,
            "lastTransitionTime": "2026-01-02T03:04:05Z",
        }
        self._set_status(job, {"conditions": [*known, found]})

    def _start(self, jobset: Json, entry: Json, attempt: int, index: int, host: int) -> str:
        job = jobset["metadata"]["name"]
        name = f"{job}-{entry['name']}-{index}-{host}-{next(self._numbers):05d}"
        spec = entry["template"]["spec"]["template"]["spec"]
        labels = {
            f"{_LABEL}jobset-name": job,
            f"{_LABEL}replicatedjob-name": entry["name"],
            f"{_LABEL}job-index": str(index),
            f"{_LABEL}restart-attempt": str(attempt),
            "batch.kubernetes.io/job-completion-index": str(host),
        }
        status: Json = {"phase": "Running", "startTime": "2026-01-02T03:00:00Z"}
        status["conditions"] = [{"type": "Ready", "status": "True"}]
        for key, containers in (("initContainerStatuses", "initContainers"), ("containerStatuses", "containers")):
            status[key] = [
                {"name": one["name"], "restartCount": 0, "state": {"running": {"startedAt": "2026-01-02T03:00:00Z"}}}
                for one in spec.get(containers, [])
            ]
        metadata = {"name": name, "namespace": self.namespace, "labels": labels}
        self.server.store.put(PODS.format(self.namespace), {"metadata": metadata, "spec": spec, "status": status})
        return name

    def _set_pod(self, name: str, changes: Json) -> None:
        pod = copy.deepcopy(self.pods[name])
        pod["status"] |= changes
        self.server.store.put(PODS.format(self.namespace), pod)

    def _set_states(self, pod: str, state: Json) -> None:
        statuses = [status | {"state": state} for status in self.pods[pod]["status"]["containerStatuses"]]
        self._set_pod(pod, {"containerStatuses": statuses})

    def _set_status(self, job: str, changes: Json) -> None:
        jobset = copy.deepcopy(self.jobsets[job])
        jobset["status"] = jobset.get("status", {}) | changes
        self.server.store.put(JOBSETS.format(self.namespace), jobset)

    def _react(self, collection: str, item: Json) -> None:
        if collection != JOBSETS.format(self.namespace):
            return
        name = item["metadata"]["name"]
        gone = "deletionTimestamp" in item["metadata"]
        if gone or item["spec"].get("suspend"):
            for pod in [pod for pod in self.pods if pod.startswith(f"{name}-")]:
                self.remove_pod(pod)
        if gone:
            self.server.store.remove(collection, name)


def _places(jobset: Json) -> Iterator[tuple[Json, tuple[int, int]]]:
    """Every pod of a JobSet: its replicated job, and the indices of its job and of itself."""
    for entry in jobset["spec"]["replicatedJobs"]:
        for index in range(entry["replicas"]):
            for host in range(entry["template"]["spec"]["parallelism"]):
                yield entry, (index, host)
