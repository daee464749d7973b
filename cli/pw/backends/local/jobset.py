"""What a JobSet decides about its Jobs: order of start, success, failure and restarts. Pure, as `jobs` is.

The rules are those of the JobSet controller: failures are looked at before successes; the first rule that matches a
failed Job decides, and without one the set restarts until `maxRestarts` is used up.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from pw.backends.local.jobs import Backoff, Exit, Job, Outcome

FAILED_JOBS = "FailedJobs"
REACHED_MAX_RESTARTS = "ReachedMaxRestarts"
FAIL_JOB_SET_ACTION = "FailJobSetFailurePolicyAction"


class PodKey(NamedTuple):
    """A pod's stable place: it stays while pods come and go."""

    replicated_job: str
    job_index: int
    pod_index: int


@dataclass(frozen=True, slots=True)
class StartPod:
    """Create the pod of `key` after `delay_s`."""

    key: PodKey
    delay_s: float


@dataclass(frozen=True, slots=True)
class Restart:
    """Stop every pod, then call `begin` again. One that `counts` does so against `max_restarts`."""

    message: str
    counts: bool = True


@dataclass(frozen=True, slots=True)
class Finish:
    """Stop every pod; the set is over."""

    succeeded: bool
    reason: str = ""
    message: str = ""


Action = StartPod | Restart | Finish


class JobSet:
    """The machine. Each method returns what is to be done now; after Restart or Finish it is silent until `begin`."""

    def __init__(self, manifest: Mapping[str, Any], *, backoff: Backoff) -> None:
        self._spec: Mapping[str, Any] = manifest["spec"]
        self._backoff = backoff
        self._jobs: dict[tuple[str, int], Job] = {}
        self._begun: set[str] = set()
        self._quiet = True
        self.restarts = 0
        self.restarts_counted = 0

    @property
    def max_restarts(self) -> int:
        return int(self._spec.get("failurePolicy", {}).get("maxRestarts", 0))

    def begin(self) -> list[Action]:
        """Makes all Jobs anew, as at the first start, and says which pods come first."""
        self._quiet = False
        self._begun.clear()
        self._jobs = {
            (replicated["name"], number): Job(replicated["template"]["spec"], backoff=self._backoff)
            for replicated in self._spec["replicatedJobs"]
            for number in range(int(replicated.get("replicas", 1)))
        }
        return self._decide()

    def end(self) -> None:
        """The set is over, whatever happens to its pods from now on."""
        self._quiet = True

    def pod_ready(self, key: PodKey, ready: bool) -> list[Action]:
        """A pod became ready, or is no longer."""
        self._job(key).pod_ready(key.pod_index, ready)
        return self._decide()

    def container_restarts(self, key: PodKey, restarts: int) -> list[Action]:
        """The containers of a pod have restarted `restarts` times in all."""
        self._job(key).container_restarts(key.pod_index, restarts)
        return self._decide()

    def pod_ended(self, key: PodKey, *, succeeded: bool, exits: Iterable[Exit], pod: str) -> list[Action]:
        """A pod reached its end."""
        self._job(key).pod_ended(key.pod_index, succeeded=succeeded, exits=exits, pod=pod)
        return self._decide()

    def job_active(self, replicated_job: str, job_index: int) -> bool:
        """Whether a Job is neither complete nor failed."""
        return self._jobs[replicated_job, job_index].outcome is None

    def _job(self, key: PodKey) -> Job:
        return self._jobs[key.replicated_job, key.job_index]

    def _decide(self) -> list[Action]:
        if self._quiet:
            return []
        last = self._after_failures() or self._after_successes()
        if last is not None:
            self._quiet = True
            return [last]
        return list(self._pods_to_start())

    def _pods_to_start(self) -> Iterator[Action]:
        in_order = self._spec.get("startupPolicy", {}).get("startupPolicyOrder") == "InOrder"
        its_turn = True
        for replicated in self._spec["replicatedJobs"]:
            name = replicated["name"]
            # Only its first pods wait for the job before; afterwards a Job sees to its own.
            if not its_turn and name not in self._begun:
                return
            self._begun.add(name)
            jobs = [(number, job) for (owner, number), job in self._jobs.items() if owner == name]
            for number, job in jobs:
                for index, delay_s in job.pods_to_start():
                    yield StartPod(PodKey(name, number, index), delay_s)
            its_turn = not in_order or all(job.ready or job.outcome for _, job in jobs)

    def _after_failures(self) -> Action | None:
        for (name, number), job in self._jobs.items():
            if job.outcome is not None and not job.outcome.complete:
                return self._failed(name, number, job.outcome)
        return None

    def _failed(self, name: str, number: int, outcome: Outcome) -> Action:
        message = f"job {name}-{number} failed: {outcome.reason}: {outcome.message}"
        policy = self._spec.get("failurePolicy")
        if policy is None:
            return Finish(False, FAILED_JOBS, message)
        action = next(
            (rule["action"] for rule in policy.get("rules", ()) if _matches(rule, name, outcome)), "RestartJobSet"
        )
        if action == "FailJobSet":
            return Finish(False, FAIL_JOB_SET_ACTION, message)
        if action == "RestartJobSet":
            if self.restarts_counted >= self.max_restarts:
                return Finish(False, REACHED_MAX_RESTARTS if self.max_restarts else FAILED_JOBS, message)
            self.restarts_counted += 1
        self.restarts += 1
        return Restart(message, counts=action == "RestartJobSet")

    def _after_successes(self) -> Action | None:
        policy = self._spec.get("successPolicy", {})
        targets = set(policy.get("targetReplicatedJobs") or (name for name, _ in self._jobs))
        complete = [
            job.outcome is not None and job.outcome.complete for (name, _), job in self._jobs.items() if name in targets
        ]
        enough = any(complete) if policy.get("operator") == "Any" else all(complete)
        return Finish(True) if enough else None


def _matches(rule: Mapping[str, Any], replicated_job: str, outcome: Outcome) -> bool:
    targets = rule.get("targetReplicatedJobs") or [replicated_job]
    reasons = rule.get("onJobFailureReasons") or [outcome.reason]
    patterns = rule.get("onJobFailureMessagePatterns") or [""]
    return (
        replicated_job in targets
        and outcome.reason in reasons
        and any(re.search(pattern, outcome.message) for pattern in patterns)
    )
