"""JobSet and Job as pure machines: what Kubernetes' controllers would do after each event."""

from __future__ import annotations

from typing import Any

import pytest

from pw.backends.local.jobs import Backoff, Exit, Job
from pw.backends.local.jobset import Action, Finish, JobSet, PodKey, Restart, StartPod

BACKOFF = Backoff(base_s=1, cap_s=8)


def job(policy: str = "Never", **spec: Any) -> Job:
    template = {"spec": {"restartPolicy": policy}}
    return Job({"completions": 1, "parallelism": 1, "template": template} | spec, backoff=BACKOFF)


def fail(job: Job, index: int = 0, code: int = 1, container: str = "main") -> None:
    job.pod_ended(index, succeeded=False, exits=[Exit(container, code)], pod=f"pod-{index}")


def succeed(job: Job, index: int = 0) -> None:
    job.pod_ended(index, succeeded=True, exits=[Exit("main", 0)], pod=f"pod-{index}")


def test_as_many_pods_run_at_once_as_parallelism_says() -> None:
    machine = job(completions=3, parallelism=2)
    assert machine.pods_to_start() == [(0, 0), (1, 0)]
    assert machine.pods_to_start() == []
    succeed(machine, 1)
    assert machine.pods_to_start() == [(2, 0)]
    succeed(machine, 0)
    succeed(machine, 2)
    assert machine.outcome and machine.outcome.complete


def test_replacements_wait_twice_as_long_each_time_up_to_the_cap() -> None:
    machine = job(backoffLimit=10)
    delays = []
    for _ in range(6):
        delays += [delay_s for _, delay_s in machine.pods_to_start()]
        fail(machine)
    assert delays == [0, 1, 2, 4, 8, 8]


def test_a_success_ends_the_back_off() -> None:
    machine = job(completions=3, parallelism=1, backoffLimit=10)
    machine.pods_to_start()
    fail(machine)
    assert machine.pods_to_start() == [(0, 1)]
    succeed(machine)
    assert machine.pods_to_start() == [(1, 0)]


@pytest.mark.parametrize("limit", [0, 1, 3])
def test_a_job_fails_with_one_failed_pod_more_than_its_limit(limit: int) -> None:
    machine = job(backoffLimit=limit)
    for _ in range(limit):
        machine.pods_to_start()
        fail(machine)
        assert machine.outcome is None
    machine.pods_to_start()
    fail(machine)
    assert machine.outcome and machine.outcome.reason == "BackoffLimitExceeded"
    assert machine.pods_to_start() == []


@pytest.mark.parametrize(("limit", "allowed"), [(0, 0), (1, 0), (4, 3)])
def test_restarts_of_containers_count_over_all_pods_of_the_job(limit: int, allowed: int) -> None:
    machine = job("OnFailure", completions=2, parallelism=2, backoffLimit=limit)
    machine.pods_to_start()
    for restarts in range(1, allowed + 1):
        machine.container_restarts(restarts % 2, (restarts + 1) // 2)
        assert machine.outcome is None
    machine.container_restarts(0, allowed + 1)
    assert machine.outcome and machine.outcome.reason == "BackoffLimitExceeded"


def test_restarts_of_sidecars_do_not_count_where_pods_are_not_restarted() -> None:
    machine = job("Never", backoffLimit=0)
    machine.container_restarts(0, 100)
    assert machine.outcome is None


def test_with_a_limit_per_index_one_index_may_fail_while_others_go_on() -> None:
    machine = job(completions=2, parallelism=2, backoffLimitPerIndex=1, maxFailedIndexes=1)
    machine.pods_to_start()
    fail(machine, 0)
    assert machine.pods_to_start() == [(0, 1)]
    fail(machine, 0)
    assert (machine.outcome, machine.pods_to_start()) == (None, [])
    succeed(machine, 1)
    assert machine.outcome and machine.outcome.reason == "FailedIndexes"


def test_too_many_failed_indexes_end_the_job() -> None:
    machine = job(completions=3, parallelism=3, backoffLimitPerIndex=0, maxFailedIndexes=1)
    machine.pods_to_start()
    fail(machine, 0)
    assert machine.outcome is None
    fail(machine, 2)
    assert machine.outcome and machine.outcome.reason == "MaxFailedIndexesExceeded"


def rule(action: str, operator: str, *values: int, container: str | None = None) -> dict[str, Any]:
    codes: dict[str, Any] = {"operator": operator, "values": list(values)}
    return {"action": action, "onExitCodes": codes | ({"containerName": container} if container else {})}


def test_the_first_rule_that_matches_an_exit_code_decides() -> None:
    rules = [rule("Ignore", "In", 7), rule("FailJob", "In", 7, 8), rule("FailJob", "NotIn", 9, container="other")]
    machine = job(backoffLimit=0, podFailurePolicy={"rules": rules})
    for code in (7, 7):
        machine.pods_to_start()
        fail(machine, code=code)
        assert machine.outcome is None
    machine.pods_to_start()
    fail(machine, code=8)
    assert machine.outcome and machine.outcome.reason == "PodFailurePolicy"
    assert "exit code 8" in machine.outcome.message


def test_a_container_that_ended_with_0_matches_no_rule() -> None:
    machine = job(backoffLimit=1, podFailurePolicy={"rules": [rule("FailJob", "NotIn", 9)]})
    machine.pods_to_start()
    machine.pod_ended(0, succeeded=False, exits=[Exit("main", 0), Exit("side", 9)], pod="pod")
    assert machine.outcome is None


def jobset(*names: str, hosts: int = 1, backoffLimit: int = 0, **spec: Any) -> JobSet:
    template = {"spec": {"restartPolicy": "Never"}}
    job_spec = {"completions": hosts, "parallelism": hosts, "backoffLimit": backoffLimit, "template": template}
    jobs = [{"name": name, "replicas": 1, "template": {"spec": job_spec}} for name in names]
    return JobSet({"spec": {"replicatedJobs": jobs, **spec}}, backoff=BACKOFF)


def started(actions: list[Action]) -> list[str]:
    return [action.key.replicated_job for action in actions if isinstance(action, StartPod)]


def end(machine: JobSet, name: str, code: int = 0, index: int = 0) -> list[Action]:
    return machine.pod_ended(PodKey(name, 0, index), succeeded=code == 0, exits=[Exit("main", code)], pod=name)


def test_without_an_order_all_start_together() -> None:
    assert started(jobset("head", "worker").begin()) == ["head", "worker"]


def test_in_order_the_next_starts_when_all_pods_of_the_former_are_ready() -> None:
    machine = jobset("head", "worker", hosts=2, startupPolicy={"startupPolicyOrder": "InOrder"})
    assert started(machine.begin()) == ["head", "head"]
    assert machine.pod_ready(PodKey("head", 0, 0), True) == []
    assert machine.pod_ready(PodKey("head", 0, 0), False) == []
    assert machine.pod_ready(PodKey("head", 0, 1), True) == []
    assert started(machine.pod_ready(PodKey("head", 0, 0), True)) == ["worker", "worker"]


def test_a_pod_is_replaced_though_the_job_before_is_not_ready_any_more() -> None:
    machine = jobset("head", "worker", startupPolicy={"startupPolicyOrder": "InOrder"}, backoffLimit=1)
    machine.begin()
    machine.pod_ready(PodKey("head", 0, 0), True)
    machine.pod_ready(PodKey("head", 0, 0), False)
    assert started(end(machine, "worker", 1)) == ["worker"]


def test_all_jobs_must_succeed_where_no_policy_says_otherwise() -> None:
    machine = jobset("a", "b")
    machine.begin()
    assert end(machine, "a") == []
    assert end(machine, "b") == [Finish(True)]


@pytest.mark.parametrize(("operator", "enough"), [("All", False), ("Any", True)])
def test_a_success_policy_chooses_the_jobs_that_count(operator: str, enough: bool) -> None:
    machine = jobset("a", "b", "c", successPolicy={"operator": operator, "targetReplicatedJobs": ["a", "b"]})
    machine.begin()
    assert end(machine, "c") == []
    assert bool(end(machine, "a")) is enough
    assert bool(end(machine, "b")) is not enough


def test_without_a_failure_policy_the_first_failed_job_ends_the_set() -> None:
    machine = jobset("a", "b")
    machine.begin()
    (finish,) = end(machine, "b", 1)
    assert isinstance(finish, Finish)
    assert (finish.succeeded, finish.reason) == (False, "FailedJobs")
    assert end(machine, "a", 1) == []


def test_the_set_restarts_until_its_restarts_are_used_up() -> None:
    machine = jobset("a", failurePolicy={"maxRestarts": 1})
    machine.begin()
    assert isinstance(end(machine, "a", 1)[0], Restart)
    assert started(machine.begin()) == ["a"]
    (finish,) = end(machine, "a", 1)
    assert isinstance(finish, Finish)
    assert finish.reason == "ReachedMaxRestarts"
    assert machine.restarts == 1


@pytest.mark.parametrize(
    ("fields", "kind"),
    [
        ({"action": "FailJobSet"}, Finish),
        ({"action": "FailJobSet", "targetReplicatedJobs": ["b"]}, Restart),
        ({"action": "FailJobSet", "onJobFailureReasons": ["PodFailurePolicy"]}, Restart),
        ({"action": "FailJobSet", "onJobFailureReasons": ["BackoffLimitExceeded"]}, Finish),
        ({"action": "FailJobSet", "onJobFailureMessagePatterns": ["no such"]}, Restart),
        ({"action": "FailJobSet", "onJobFailureMessagePatterns": ["pods failed"]}, Finish),
        ({"action": "RestartJobSet"}, Restart),
    ],
)
def test_a_rule_of_the_failure_policy_decides_where_all_it_asks_is_so(fields: dict[str, Any], kind: type) -> None:
    machine = jobset("a", "b", failurePolicy={"maxRestarts": 1, "rules": [{"name": "rule", **fields}]})
    machine.begin()
    (action,) = end(machine, "a", 1)
    assert isinstance(action, kind)


def test_restarts_that_are_not_counted_have_no_end() -> None:
    rules = [{"name": "again", "action": "RestartJobSetAndIgnoreMaxRestarts"}]
    machine = jobset("a", failurePolicy={"maxRestarts": 0, "rules": rules})
    for _ in range(5):
        machine.begin()
        assert isinstance(end(machine, "a", 1)[0], Restart)
    assert machine.restarts == 5
