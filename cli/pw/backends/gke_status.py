"""What a JobSet and its pods say of a job. Pure: from the API's objects to a JobStatus.

Facts: labels and conditions as JobSet 0.10 and 0.11 write them; `DisruptionTarget` is Kubernetes' condition of a pod
that is evicted or preempted, `TerminationTarget` is Kueue's. Neither fails a job; only a condition of the JobSet does.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import UTC, datetime

from pathways_runtime import _contract
from pw.kube import Json
from pw.kube_logs import container_statuses
from pw.render import COMPUTE_TYPE_ANNOTATION, QUEUE_LABEL
from pw.status import ContainerStatus, JobRef, JobState, JobStatus, PodStatus, SliceStatus, exit_text

# Set with `spec.suspend` by `cancel`: a JobSet that somebody else suspended is not cancelled.
CANCELLED_ANNOTATION = "pathways-launcher/cancelled"
JOBSET_LABEL = "jobset.sigs.k8s.io/jobset-name"
REPLICATED_JOB_LABEL = "jobset.sigs.k8s.io/replicatedjob-name"
JOB_INDEX_LABEL = "jobset.sigs.k8s.io/job-index"
ATTEMPT_LABEL = "jobset.sigs.k8s.io/restart-attempt"
COMPLETION_INDEX = "batch.kubernetes.io/job-completion-index"

_DISRUPTIONS = ("DisruptionTarget", "TerminationTarget")
_ENDED_PHASES = ("Succeeded", "Failed")


def job_status(ref: JobRef, jobset: Json, pods: Sequence[Json] = ()) -> JobStatus:
    """The job as it stands. Without `pods` it is as the JobSet alone has it: no slices, pods and exit code."""
    state = job_state(jobset)
    current = _present(pods)
    ended = _condition(jobset, "Completed") or _condition(jobset, "Failed")
    status = jobset.get("status") or {}
    return JobStatus(
        ref=ref,
        state=state,
        reason=_reason(jobset, state, current),
        compute_type=(jobset["metadata"].get("annotations") or {}).get(COMPUTE_TYPE_ANNOTATION, ""),
        num_slices=worker_job(jobset).get("replicas", 1) if worker_job(jobset) else 0,
        created=_time(jobset["metadata"]["creationTimestamp"]) or datetime.now(UTC),
        started=_first(_started(pod) for pod in pods),
        finished=_time(ended.get("lastTransitionTime")) if ended else None,
        restarts=status.get("restarts", 0),
        restarts_counted=status.get("restartsCountTowardsMax", 0),
        max_restarts=(jobset["spec"].get("failurePolicy") or {}).get("maxRestarts", 0),
        exit_code=_exit_code(state, current),
        slices=_slices(jobset, current) if pods else (),
        pods=tuple(sorted((_pod(pod) for pod in pods), key=_place)),
    )


def job_state(jobset: Json) -> JobState:
    """Where the job stands by its JobSet alone."""
    if _condition(jobset, "Completed"):
        return JobState.SUCCEEDED
    if _condition(jobset, "Failed"):
        return JobState.FAILED
    if CANCELLED_ANNOTATION in (jobset["metadata"].get("annotations") or {}):
        return JobState.CANCELLED
    if jobset["spec"].get("suspend"):
        return JobState.SUSPENDED
    counts = (jobset.get("status") or {}).get("replicatedJobsStatus") or []
    ready = {entry["name"]: entry.get("ready", 0) + entry.get("succeeded", 0) for entry in counts}
    return JobState.RUNNING if ready.get(_contract.HEAD_JOB) else JobState.PENDING


def pod_selector(job: str) -> str:
    """The label selector of a job's pods."""
    return f"{JOBSET_LABEL}={job}"


def is_ours(jobset: Json) -> bool:
    """Whether a JobSet is a Pathways job, by whatever tool."""
    return any(job["name"] == _contract.HEAD_JOB for job in jobset["spec"].get("replicatedJobs") or [])


def worker_job(jobset: Json) -> Json:
    """The replicated job of the workers, empty where there is none."""
    jobs: list[Json] = jobset["spec"].get("replicatedJobs") or []
    return next((job for job in jobs if job["name"] != _contract.HEAD_JOB), {})


def slice_index(pod: Json) -> int | None:
    """The slice that a worker's pod belongs to; None for the head."""
    labels = pod["metadata"].get("labels") or {}
    if labels.get(REPLICATED_JOB_LABEL) == _contract.HEAD_JOB:
        return None
    return int(labels.get(JOB_INDEX_LABEL, 0))


def pods_of_slice(pods: Sequence[Json], index: int) -> list[Json]:
    """The pods of the slice in the present attempt that are not being deleted."""
    return [pod for pod in _present(pods) if slice_index(pod) == index and not pod["metadata"].get("deletionTimestamp")]


def _present(pods: Sequence[Json]) -> list[Json]:
    attempt = max(map(_attempt, pods), default=0)
    return [pod for pod in pods if _attempt(pod) == attempt]


def _condition(item: Json, kind: str) -> Json:
    """The condition of this type that holds, empty where none does."""
    conditions: list[Json] = (item.get("status") or {}).get("conditions") or []
    return next((found for found in conditions if found["type"] == kind and found["status"] == "True"), {})


def _reason(jobset: Json, state: JobState, pods: Sequence[Json]) -> str:
    if state is JobState.FAILED:
        failed = _condition(jobset, "Failed")
        why, code = str(failed.get("message") or failed.get("reason", "")), _exit_code(state, pods)
        return f"the command {exit_text(code)} ({why})" if code else why
    if state is JobState.SUSPENDED:
        queue = (jobset["metadata"].get("labels") or {}).get(QUEUE_LABEL)
        return f"waits in queue {queue!r}" if queue else "suspended"
    if state.final:
        return ""
    reasons = dict.fromkeys(reason for pod in pods if (reason := _pod_reason(pod)))
    return "; ".join(reasons)


def _pod(pod: Json) -> PodStatus:
    head = slice_index(pod) is None
    labels = {**(pod["metadata"].get("annotations") or {}), **(pod["metadata"].get("labels") or {})}
    return PodStatus(
        name=pod["metadata"]["name"],
        phase="Terminating" if pod["metadata"].get("deletionTimestamp") else pod["status"].get("phase", "Pending"),
        slice=slice_index(pod),
        host=None if head else int(labels.get(COMPLETION_INDEX, 0)),
        reason=_pod_reason(pod),
        containers=tuple(_container(status) for status in container_statuses(pod)),
    )


def _place(pod: PodStatus) -> tuple[int, int, str]:
    """The head first, then by slice and host."""
    return (-1 if pod.slice is None else pod.slice, pod.host or 0, pod.name)


def _pod_reason(pod: Json) -> str:
    """Why a pod does not run, in Kubernetes' own words; "" for one that does."""
    for kind in _DISRUPTIONS:
        if disrupted := _condition(pod, kind):
            return f"preempted ({disrupted.get('reason', kind)}): {disrupted.get('message', '')}".rstrip(": ")
    status = pod.get("status") or {}
    if status.get("phase") == "Pending":
        conditions: list[Json] = status.get("conditions") or []
        for found in conditions:
            if (found["type"], found["status"]) == ("PodScheduled", "False"):
                return str(found.get("message") or found.get("reason", ""))
    for container in container_statuses(pod):
        waiting = (container.get("state") or {}).get("waiting") or {}
        if waiting.get("reason", "PodInitializing") not in ("PodInitializing", "ContainerCreating"):
            return f"{container['name']}: {waiting['reason']}: {waiting.get('message', '')}".rstrip(": ")
    return str(status.get("message") or status.get("reason") or "")


def _container(status: Json) -> ContainerStatus:
    state = next(iter(status.get("state") or {"waiting": {}}))
    detail: Json = (status.get("state") or {}).get(state) or {}
    return ContainerStatus(
        name=status["name"],
        state=state,
        restarts=status.get("restartCount", 0),
        exit_code=detail.get("exitCode"),
        reason=detail.get("reason", ""),
        started=_time(detail.get("startedAt")),
        finished=_time(detail.get("finishedAt")),
    )


def _slices(jobset: Json, pods: Sequence[Json]) -> tuple[SliceStatus, ...]:
    job = worker_job(jobset)
    if not job:
        return ()
    hosts = job["template"]["spec"].get("parallelism", 1)
    by_slice: dict[int, list[Json]] = {index: [] for index in range(job.get("replicas", 1))}
    for pod in pods:
        index = slice_index(pod)
        if index is not None:
            by_slice.setdefault(index, []).append(pod)
    final = job_state(jobset).final
    return tuple(_slice(index, hosts, own, final=final) for index, own in by_slice.items())


def _slice(index: int, hosts: int, pods: Sequence[Json], *, final: bool) -> SliceStatus:
    alive = [pod for pod in pods if not pod["metadata"].get("deletionTimestamp")]
    ready = sum(1 for pod in alive if _condition(pod, "Ready"))
    lost = [pod for pod in pods if pod not in alive or pod["status"].get("phase") == "Failed" or _disrupted(pod)]
    restarts = sum(status.get("restartCount", 0) for pod in alive for status in container_statuses(pod))
    return SliceStatus(
        index=index,
        state="ended" if final else "ready" if ready >= hosts else "down" if lost else "pending",
        hosts=hosts,
        hosts_ready=ready,
        restarts=restarts + sum(1 for pod in pods if pod["status"].get("phase") == "Failed"),
    )


def _disrupted(pod: Json) -> bool:
    return any(_condition(pod, kind) for kind in _DISRUPTIONS)


def _exit_code(state: JobState, pods: Sequence[Json]) -> int | None:
    """The command's exit code, once the job is over and while its pod is kept."""
    if not state.final:
        return None
    for pod in pods:
        for status in container_statuses(pod):
            ended = (status.get("state") or {}).get("terminated")
            if slice_index(pod) is None and status["name"] == _contract.USER_CONTAINER and ended:
                return int(ended["exitCode"])
    return 0 if state is JobState.SUCCEEDED else None


def _attempt(pod: Json) -> int:
    return int((pod["metadata"].get("labels") or {}).get(ATTEMPT_LABEL, 0))


def _started(pod: Json) -> datetime | None:
    return _time((pod.get("status") or {}).get("startTime"))


def _first(times: Iterable[datetime | None]) -> datetime | None:
    return min((time for time in times if time is not None), default=None)


def _time(text: str | None) -> datetime | None:
    return datetime.fromisoformat(text).astimezone(UTC) if text else None


def pods_running(pods: Iterable[Json]) -> bool:
    """Whether any pod still holds its node."""
    return any(pod["status"].get("phase") not in _ENDED_PHASES for pod in pods)
