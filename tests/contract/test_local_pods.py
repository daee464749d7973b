"""JobSet, Job and Pod as the local backend plays them, with real processes."""

from __future__ import annotations

import dataclasses
import os
import re
import signal
import time
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from pathways_runtime import _contract
from pw.backends.local import LocalBackend
from pw.config import Settings
from pw.status import ContainerStatus, JobRef, JobState, JobStatus, LogQuery

Saw = Callable[..., str]


def texts(backend: LocalBackend, ref: JobRef, **query: Any) -> list[str]:
    return [line.text for line in backend.logs(ref, LogQuery(**query))]


def container(status: JobStatus, name: str, pod: int = 0) -> ContainerStatus:
    return next(container for container in status.pods[pod].containers if container.name == name)


def started(container: ContainerStatus) -> datetime:
    assert container.started is not None
    return container.started


def test_a_failed_container_restarts_in_place_until_it_succeeds(local: LocalBackend, make: Any, tmp_path: Path) -> None:
    script = f"cd {tmp_path}; echo try >> tries; [ $(wc -l < tries) -eq 3 ]"
    status = local.wait(local.submit(make.command(script, policy="OnFailure", backoffLimit=6)))
    assert status.state is JobState.SUCCEEDED
    assert (len(status.pods), container(status, "main").restarts) == (1, 2)


def test_restarts_in_place_end_at_the_limit(local: LocalBackend, make: Any) -> None:
    ref = local.submit(make.command("echo try; exit 9", policy="OnFailure", backoffLimit=3))
    status = local.wait(ref)
    assert (status.state, status.exit_code) == (JobState.FAILED, 9)
    assert "BackoffLimitExceeded" in status.reason
    assert texts(local, ref) == ["try"] * 3


def test_a_failed_pod_is_replaced_until_the_limit_is_exceeded(local: LocalBackend, make: Any) -> None:
    ref = local.submit(make.command("echo try; exit 9", backoffLimit=2))
    assert local.wait(ref).state is JobState.FAILED
    lines = list(local.logs(ref, LogQuery()))
    assert [line.text for line in lines] == ["try"] * 3
    assert len({line.pod for line in lines}) == 3


def test_the_whole_set_restarts_as_often_as_it_may(local: LocalBackend, make: Any) -> None:
    attempt = {"fieldRef": {"fieldPath": "metadata.labels['jobset.sigs.k8s.io/restart-attempt']"}}
    main = make.sh("echo attempt $ATTEMPT; exit 1", env=[{"name": "ATTEMPT", "valueFrom": attempt}])
    ref = local.submit(make.jobset(make.job(main), failurePolicy={"maxRestarts": 2}))
    status = local.wait(ref)
    assert (status.state, status.restarts, status.restarts_counted, status.max_restarts) == (JobState.FAILED, 2, 2, 2)
    assert status.reason.startswith("the command exited with 1, after 2 restarts (ReachedMaxRestarts: job main-0")
    notes = [f"restart {number} of 2: the command exited with 1" for number in (1, 2)]
    assert texts(local, ref) == ["attempt 0", notes[0], "attempt 1", notes[1], "attempt 2"]


def test_a_restart_on_an_exit_code_does_not_count(local: LocalBackend, make: Any, tmp_path: Path) -> None:
    script = f"cd {tmp_path}; echo try >> tries; [ $(wc -l < tries) -lt 3 ] && exit 42; exit ${{LAST:-0}}"
    job = make.job(make.sh(script), podFailurePolicy={"rules": [fail_job_on(42)]})
    rule = {"name": "again", "action": "RestartJobSetAndIgnoreMaxRestarts", "onJobFailureReasons": ["PodFailurePolicy"]}
    ref = local.submit(make.jobset(job, failurePolicy={"maxRestarts": 0, "rules": [rule]}))
    status = local.wait(ref)
    assert (status.state, status.restarts) == (JobState.SUCCEEDED, 2)
    assert (status.restarts_counted, status.max_restarts) == (0, 0)
    assert texts(local, ref) == ["restart that does not count: the command exited with 42"] * 2


def fail_job_on(code: int) -> dict[str, Any]:
    return {"action": "FailJob", "onExitCodes": {"containerName": "main", "operator": "In", "values": [code]}}


def test_the_next_replicated_job_waits_until_the_one_before_is_ready(local: LocalBackend, make: Any) -> None:
    head = make.job(make.sh("exec sleep 600"), name="head", init=(make.sh("sleep 0.3", "first"),))
    workers = make.job(make.sh("true"), name="worker", hosts=2)
    plan = make.jobset(
        head,
        workers,
        startupPolicy={"startupPolicyOrder": "InOrder"},
        successPolicy={"operator": "All", "targetReplicatedJobs": ["worker"]},
    )
    status = local.wait(local.submit(plan))
    assert status.state is JobState.SUCCEEDED
    ready = started(container(status, "main"))
    assert started(container(status, "first")) <= ready
    assert all(started(pod.containers[0]) >= ready for pod in status.pods[1:])


def test_the_others_are_stopped_when_those_that_count_have_succeeded(local: LocalBackend, make: Any) -> None:
    head = make.job(make.sh("true"), name="head")
    workers = make.job(make.sh("exec sleep 600"), name="worker", policy="OnFailure", hosts=2)
    plan = make.jobset(head, workers, successPolicy={"operator": "All", "targetReplicatedJobs": ["head"]})
    status = local.wait(local.submit(plan))
    assert (status.state, status.exit_code) == (JobState.SUCCEEDED, 0)
    assert {(pod.phase, pod.reason) for pod in status.pods[1:]} == {("Stopped", "Stopped")}
    assert {(c.exit_code, c.reason) for pod in status.pods[1:] for c in pod.containers} == {(143, "Stopped")}
    assert [slice.state for slice in status.slices] == ["ended"]


def test_sidecars_start_in_order_and_end_last_in_reverse(local: LocalBackend, make: Any, tmp_path: Path) -> None:
    for name in ("a", "b"):
        os.mkfifo(tmp_path / name)

    def sidecar(name: str) -> Any:
        script = f"trap 'echo {name} ends; exit 0' TERM; echo > {tmp_path / name}; sleep 600 & wait"
        return make.sidecar(script, name)

    main = make.sh(f"cat {tmp_path / 'a'} {tmp_path / 'b'} > /dev/null; echo main ends")
    ref = local.submit(make.jobset(make.job(main, init=(sidecar("a"), sidecar("b")))))
    status = local.wait(ref)
    assert status.state is JobState.SUCCEEDED
    starts = [started(container) for container in status.pods[0].containers]
    assert starts == sorted(starts)
    assert texts(local, ref) == ["main ends", "b ends", "a ends"]


def test_a_sidecar_restarts_whatever_its_exit_code(local: LocalBackend, make: Any, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "up")
    main = make.sh(f"for i in 1 2 3; do cat {tmp_path / 'up'}; done")
    ref = local.submit(make.jobset(make.job(main, init=(make.sidecar(f"echo up > {tmp_path / 'up'}", "side"),))))
    status = local.wait(ref)
    assert status.state is JobState.SUCCEEDED
    assert container(status, "side").restarts >= 2


def test_what_a_job_waits_for_is_said_with_its_last_words(
    local: LocalBackend, settings: Settings, make: Any, until: Callable[..., None], tmp_path: Path
) -> None:
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho up >&2; echo 'no luck today' >&2; echo; exit 69\n")
    python.chmod(0o755)
    backend = LocalBackend(dataclasses.replace(settings, emulator_python=str(python)))
    proxy = make.sidecar("", _contract.PROXY_CONTAINER)
    ref = backend.submit(make.jobset(make.job(make.sh("echo never"), init=(proxy,))))
    until(local, ref, lambda status: "restarted 2 times" in status.reason)
    (status,) = local.list()
    assert status.state is JobState.PENDING
    assert re.fullmatch(
        r"CrashLoopBackOff: pathways-proxy exited with 69, restarted \d+ times: no luck today", status.reason
    )


@pytest.mark.parametrize("worker", [False, True])
def test_a_server_that_refuses_its_flags_fails_the_job_at_once(local: LocalBackend, make: Any, worker: bool) -> None:
    flags: dict[str, Any] = {"command": [], "args": ["--nonsense=1"]}
    head, workers = make.sh("exec sleep 600"), make.job(make.sh("exec sleep 600"), name="worker")
    if worker:
        bad = make.sh("", _contract.WORKER_CONTAINER, **flags)
        workers = make.job(bad, name="worker", policy="OnFailure", backoffLimit=100)
        plan = make.jobset(make.job(head, name="pathways-head"), workers)
    else:
        bad = make.sidecar("", _contract.PROXY_CONTAINER, **flags)
        plan = make.jobset(make.job(head, name="pathways-head", init=(bad,)), workers, failurePolicy={"maxRestarts": 9})
    status = local.wait(local.submit(plan))
    assert (status.state, status.restarts, status.exit_code) == (JobState.FAILED, 0, 2)
    assert "exited with 2: error: " in status.reason
    assert "--nonsense" in status.reason


def test_a_failed_init_container_fails_the_pod(local: LocalBackend, make: Any) -> None:
    ref = local.submit(make.jobset(make.job(make.sh("echo never"), init=(make.sh("exit 4", "first"),))))
    status = local.wait(ref)
    assert (status.state, status.exit_code) == (JobState.FAILED, 4)
    assert texts(local, ref) == []


def test_a_command_that_is_not_there_says_so_in_the_log(local: LocalBackend, make: Any) -> None:
    ref = local.submit(make.jobset(make.job(make.sh("true", command=["no-such-program"]))))
    status = local.wait(ref)
    assert (status.exit_code, container(status, "main").reason) == (128, "StartError")
    assert status.reason.startswith("the command could not be started (")
    assert "no-such-program" in texts(local, ref)[0]


def test_the_environment_is_expanded_in_its_order(local: LocalBackend, make: Any) -> None:
    env = [
        {"name": "EARLY", "value": "$(LATE)"},
        {"name": "LATE", "value": "late"},
        {"name": "BOTH", "value": "$(LATE) $$(LATE) $(EARLY)"},
        {"name": "IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
        {
            "name": "JOB",
            "valueFrom": {"fieldRef": {"fieldPath": "metadata.annotations['jobset.sigs.k8s.io/jobset-name']"}},
        },
    ]
    main = make.sh(
        "", command=["bash", "-c", 'echo "$EARLY/$BOTH/$IP/$JOB/$JOB_COMPLETION_INDEX"; echo "$(LATE)"'], env=env
    )
    ref = local.submit(make.jobset(make.job(main)))
    local.wait(ref)
    assert texts(local, ref) == ["$(LATE)/late $(LATE) $(LATE)/127.0.0.1/job/0", "late"]


def test_a_container_sees_the_folder_and_path_of_the_shell_and_nothing_else(
    local: LocalBackend, make: Any, monkeypatch: Any, tmp_path: Path
) -> None:
    program = tmp_path / "my-program"
    program.write_text('#!/bin/bash\necho "$PWD ${SECRET:-no secret}"\n')
    program.chmod(0o755)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SECRET", "42")
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    ref = local.submit(make.command("my-program"))
    local.wait(ref)
    assert texts(local, ref) == [f"{tmp_path} no secret"]


def test_cancel_lets_a_command_save_what_it_has(local: LocalBackend, make: Any, saw: Saw) -> None:
    ref = local.submit(make.command("trap 'echo saved; exit 3' TERM; echo up; sleep 600 & wait"))
    saw(local, ref, "up")
    local.cancel(ref)
    status = local.get(ref)
    assert (status.state, status.exit_code) == (JobState.CANCELLED, 3)
    assert texts(local, ref) == ["up", "saved"]


def test_cancel_kills_what_ignores_it_after_the_grace_period(local: LocalBackend, make: Any, saw: Saw) -> None:
    ref = local.submit(make.command("trap '' TERM; echo up; while true; do sleep 600; done", grace_s=1))
    saw(local, ref, "up")
    began = time.monotonic()
    local.cancel(ref)
    assert time.monotonic() - began >= 1
    assert (local.get(ref).state, local.get(ref).exit_code) == (JobState.CANCELLED, 137)


def test_a_killed_worker_comes_back_and_is_counted(local: LocalBackend, make: Any, saw: Saw) -> None:
    head = make.job(make.sh("exec sleep 600"), name="pathways-head")
    worker = make.sh("echo pid $$; exec sleep 600")
    workers = make.job(worker, name="worker", policy="OnFailure", replicas=2, hosts=2, backoffLimit=8)
    ref = local.submit(make.jobset(head, workers))
    lines = local.logs(ref, LogQuery(follow=True, slice=1))
    first = next(lines)
    os.kill(int(first.text.removeprefix("pid ")), signal.SIGKILL)
    while (line := next(lines)).pod != first.pod:
        pass
    assert line.text != first.text
    status = local.get(ref)
    assert [slice.restarts for slice in status.slices] == [0, 1]
    restarted = next(pod for pod in status.pods if pod.name == first.pod)
    assert (restarted.slice, restarted.containers[0].restarts) == (1, 1)


def test_a_user_process_that_is_killed_fails_the_job(local: LocalBackend, make: Any, saw: Saw) -> None:
    ref = local.submit(make.command("echo pid $$; exec sleep 600"))
    os.kill(int(saw(local, ref, "pid").removeprefix("pid ")), signal.SIGKILL)
    status = local.wait(ref)
    assert (status.state, status.exit_code) == (JobState.FAILED, 137)
    assert status.reason.startswith("the command was killed by SIGKILL (")


def test_what_a_command_leaves_behind_ends_with_its_container(local: LocalBackend, make: Any, tmp_path: Path) -> None:
    first = "setsid sleep 600 & echo $! > pid; exit 1"
    script = f"cd {tmp_path}; [ -e pid ] || {{ {first}; }}; kill -0 $(cat pid) && echo alive || echo gone"
    ref = local.submit(make.command(script, policy="OnFailure", backoffLimit=6))
    local.wait(ref)
    assert texts(local, ref)[-1] == "gone"


def test_a_process_that_escaped_does_not_hold_up_the_end(local: LocalBackend, make: Any) -> None:
    ref = local.submit(make.command("env -i setsid sleep 600 & echo $!"))
    status = local.wait(ref)
    assert status.state is JobState.SUCCEEDED
    (pid,) = texts(local, ref)
    assert not Path(f"/proc/{pid}").exists()
