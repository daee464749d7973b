"""Faults of slices of a local job: who has them, for how long, and what they leave."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from typing import Any

import psutil
import pytest

from pw import jobs
from pw.backends.local import LocalBackend, inbox
from pw.backends.local.events import watch
from pw.backends.local.state import JobDir
from pw.config import Settings
from pw.errors import BackendError, PwError, SpecError
from pw.faults import CRASH, HANG, Fault
from pw.scenario import Scenario, Step
from pw.status import JobRef, JobState, LogQuery

Saw = Callable[..., str]
Until = Callable[..., None]

# Says pong to each SIGUSR1.
HOST = "trap 'echo pong' USR1; echo pid $$; while true; do sleep 600 & wait; done"
KILLED_COMMAND = """
import os, signal, sys
from pathlib import Path
from pw.backends.local import LocalBackend
from pw.config import Settings
from pw.faults import Fault
from pw.scenario import Scenario, Step
from pw.status import JobRef
LocalBackend(Settings(state_dir=Path(sys.argv[1]))).inject(JobRef("local", "job"), Fault("hang", 0, 1))
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture
def ref(local: LocalBackend, make: Any, until: Until) -> JobRef:
    """A job of two slices of two hosts, all ready; each host is a shell."""
    workers = make.job(make.sh(HOST), name="worker", policy="OnFailure", replicas=2, hosts=2, backoffLimit=100)
    ref = local.submit(make.jobset(make.job(make.sh("exec sleep 600"), name="head"), workers))
    until(local, ref, lambda status: states(local, ref) == ["ready", "ready"])
    return ref


def states(local: LocalBackend, ref: JobRef) -> list[str]:
    return [slice.state for slice in local.get(ref).slices]


def processes(local: LocalBackend, ref: JobRef, index: int) -> list[psutil.Process]:
    """The process of each of the two hosts of a slice, once they have said which it is."""
    lines = local.logs(ref, LogQuery(follow=True, slice=index))
    return [psutil.Process(int(next(lines).text.removeprefix("pid "))) for _ in range(2)]


def test_a_crash_takes_every_host_of_its_slice_and_no_other(local: LocalBackend, ref: JobRef, until: Until) -> None:
    lost, others = (processes(local, ref, index) for index in (0, 1))
    assert len(lost) == len(others) == 2
    jobs.inject(local, [Fault(CRASH, 0)], ref)
    psutil.wait_procs(lost, timeout=30)
    until(local, ref, lambda status: states(local, ref) == ["ready", "ready"])
    assert [slice.restarts for slice in local.get(ref).slices] == [2, 0]
    assert [process.is_running() for process in (*lost, *others)] == [False, False, True, True]


def test_what_hangs_goes_on_when_its_time_is_over(local: LocalBackend, ref: JobRef, until: Until) -> None:
    hosts = processes(local, ref, 1)
    began = datetime.now(UTC)
    jobs.inject(local, [Fault(HANG, 1, 1)], ref)
    assert states(local, ref) == ["ready", "hung"]
    for process in hosts:
        process.send_signal(signal.SIGUSR1)
    pongs = (line for line in local.logs(ref, LogQuery(follow=True, slice=1)) if line.text == "pong")
    assert all(next(pongs).time >= began + timedelta(seconds=1) for _ in hosts)
    until(local, ref, lambda status: states(local, ref) == ["ready", "ready"])
    assert [slice.restarts for slice in local.get(ref).slices] == [0, 0]


def test_what_hangs_goes_on_though_the_command_that_asked_was_killed(
    local: LocalBackend, ref: JobRef, settings: Settings, until: Until
) -> None:
    hosts = processes(local, ref, 0)
    killed = subprocess.run([sys.executable, "-c", KILLED_COMMAND, settings.state_dir], check=False, timeout=60)
    assert killed.returncode == -signal.SIGKILL
    until(local, ref, lambda status: states(local, ref) == ["ready", "ready"])
    assert psutil.STATUS_STOPPED not in {process.status() for process in hosts}


def test_what_hangs_can_crash_and_what_comes_then_does_not_hang(local: LocalBackend, ref: JobRef, until: Until) -> None:
    jobs.inject(local, [Fault(HANG, 0)], ref)
    with pytest.raises(SpecError, match="slice 0 is hung: a hang needs one that is ready"):
        jobs.inject(local, [Fault(HANG, 0)], ref)
    jobs.inject(local, [Fault(CRASH, 0)], ref)
    until(local, ref, lambda status: states(local, ref) == ["ready", "ready"])


def test_a_job_whose_slices_hang_ends_at_once(local: LocalBackend, ref: JobRef) -> None:
    jobs.inject(local, [Fault(HANG, 0), Fault(HANG, 1)], ref)
    local.cancel(ref)
    status = local.get(ref)
    assert status.state is JobState.CANCELLED
    assert {container.exit_code for pod in status.pods for container in pod.containers} == {143}, "not killed"


@pytest.mark.parametrize(
    ("wanted", "problem"),
    [
        ([Fault(CRASH, 2)], "has no slice 2: it has slices 0 to 1"),
        ([Fault(CRASH, 0), Fault(HANG, 0)], "slice 0 is named twice"),
        ([Fault(CRASH, 0), Fault(CRASH, 9)], "no slice 9"),
    ],
)
def test_faults_that_cannot_be_are_refused_before_any_is_done(
    local: LocalBackend, ref: JobRef, wanted: list[Fault], problem: str
) -> None:
    with pytest.raises(SpecError, match=problem):
        jobs.inject(local, wanted, ref)
    assert states(local, ref) == ["ready", "ready"]


def test_a_slice_that_is_down_cannot_crash_again(local: LocalBackend, make: Any, until: Until, saw: Saw) -> None:
    worker = make.job(make.sh("echo up; exec sleep 600"), name="worker", policy="OnFailure", backoffLimit=100)
    slow = LocalBackend(Settings(state_dir=local._settings.state_dir, local_backoff_s=600))
    ref = slow.submit(make.jobset(make.job(make.sh("exec sleep 600"), name="head"), worker))
    until(slow, ref, lambda status: states(slow, ref) == ["ready"])
    jobs.inject(slow, [Fault(CRASH, 0)], ref)
    with pytest.raises(SpecError, match="slice 0 is down: a crash needs one that is ready"):
        jobs.inject(slow, [Fault(CRASH, 0)], ref)


def test_a_finished_job_has_no_faults(local: LocalBackend, ref: JobRef) -> None:
    local.cancel(ref)
    with pytest.raises(SpecError, match="is Cancelled: only a job that runs"):
        jobs.inject(local, [Fault(CRASH, 0)], ref)


def test_of_many_commands_at_once_one_has_its_crash(local: LocalBackend, ref: JobRef, until: Until) -> None:
    def crash(_: int) -> bool:
        try:
            local.inject(ref, Fault(CRASH, 1))
        except SpecError:
            return False
        return True

    with ThreadPoolExecutor(4) as pool:
        done = sum(pool.map(crash, range(4)))
    until(local, ref, lambda status: states(local, ref) == ["ready", "ready"])
    assert done >= 1
    assert local.get(ref).slices[1].restarts == 2 * done


def test_a_request_is_done_once_and_leaves_nothing(local: LocalBackend, ref: JobRef, settings: Settings) -> None:
    jobs.inject(local, [Fault(HANG, 0, 600)], ref)
    assert os.listdir(settings.state_dir / "jobs" / ref.name / "faults") == []


def test_a_request_that_nobody_understands_harms_nobody(
    local: LocalBackend, ref: JobRef, settings: Settings, until: Until
) -> None:
    folder = settings.state_dir / "jobs" / ref.name
    (folder / "faults").mkdir()
    for number, content in enumerate(("[]", "{", '{"kind": "fire", "slice": 0, "expires": 1e12}', '{"slice": 0}')):
        (folder / "faults" / f"{number}.request").write_text(content)
    jobs.inject(local, [Fault(CRASH, 0)], ref)
    until(local, ref, lambda status: states(local, ref) == ["ready", "ready"])


def test_a_controller_that_is_killed_meanwhile_is_said(local: LocalBackend, ref: JobRef, settings: Settings) -> None:
    folder = settings.state_dir / "jobs" / ref.name
    state, uid = json.loads((folder / "state.json").read_text()), json.loads((folder / "job.json").read_text())["uid"]
    with watch(state["event_port"], uid) as changes:
        assert changes is not None
        controller = psutil.Process(state["pid"])
        controller.suspend()
        with ThreadPoolExecutor(1) as pool:
            asked = pool.submit(inbox.send, JobDir(folder), Fault(CRASH, 0), changes)
            controller.kill()
            with pytest.raises(BackendError, match="ended before slice 0 could crash"):
                asked.result(timeout=60)
    assert os.listdir(folder / "faults") == []


def test_a_scenario_goes_on_where_a_slice_cannot_have_its_fault(local: LocalBackend, ref: JobRef, until: Until) -> None:
    waits: list[float] = []

    def sleep(time_s: float) -> None:
        waits.append(time_s)

    steps = (Step(5, HANG, 0, None), Step(7, HANG, 0, None), Step(9, CRASH, None, None))
    done = list(jobs.play(local, Scenario(0, steps), ref, sleep=sleep))
    assert waits == [5, 7, 9]
    assert [(fault.kind, problem.partition(": ")[2]) for fault, problem in done] == [
        (HANG, ""),
        (HANG, "slice 0 is hung: a hang needs one that is ready"),
        (CRASH, ""),
    ]
    assert done[2][0].slice in (0, 1)


def test_a_scenario_for_a_slice_that_is_not_there_does_nothing(local: LocalBackend, ref: JobRef) -> None:
    steps = (Step(0, HANG, 0, None), Step(0, HANG, 2, None))
    with pytest.raises(SpecError, match="no slice 2"):
        list(jobs.play(local, Scenario(0, steps), ref))
    assert states(local, ref) == ["ready", "ready"]


def test_a_scenario_ends_with_its_job(local: LocalBackend, ref: JobRef) -> None:
    played = jobs.play(local, Scenario(0, (Step(0, HANG, 0, None), Step(0, CRASH, 1, None))), ref)
    next(played)
    local.cancel(ref)
    with pytest.raises(PwError, match="is Cancelled: it ended before fault 2 of 2"):
        next(played)
