"""What is left when something is killed, full, late or in the way."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import psutil
import pytest

from pw.backends.local import LocalBackend
from pw.backends.local.processes import wait_ended
from pw.config import Settings
from pw.errors import BackendError, JobNotFoundError, SpecError
from pw.status import JobRef, JobState, LogQuery

Saw = Callable[..., str]
SUBMIT = """
import json, sys
from pathlib import Path
from pw.backends.local import LocalBackend
from pw.config import Settings
from pw.specs import JobSpec, Plan
spec = JobSpec(name="inner", compute_type="v6e-8", command="true")
plan = Plan(backend="local", spec=spec, manifest=json.loads(Path(sys.argv[2]).read_text()))
LocalBackend(Settings(state_dir=Path(sys.argv[1]))).submit(plan)
"""


def kill_controller(settings: Settings, ref: JobRef) -> None:
    state = json.loads((settings.state_dir / "jobs" / ref.name / "state.json").read_text())
    controller = psutil.Process(state["pid"])
    controller.kill()
    # It is nobody's child here, so its end is awaited and not collected.
    wait_ended([controller], 60)


def live(processes: list[psutil.Process]) -> list[psutil.Process]:
    """Those that have not ended; one that nobody has collected yet has."""
    return [process for process in processes if process.is_running() and process.status() != psutil.STATUS_ZOMBIE]


def processes_named(lines: list[str]) -> list[psutil.Process]:
    return [psutil.Process(int(line.split()[-1])) for line in lines]


def test_after_a_killed_controller_the_next_command_tells_and_clears_up(
    local: LocalBackend, settings: Settings, make: Any
) -> None:
    left = "setsid bash -c 'trap \"\" HUP; echo left $$; exec sleep 600 > /dev/null 2>&1' &"
    ref = local.submit(make.command(f"{left} sleep 600 & echo child $!; echo main $$; wait"))
    lines = local.logs(ref, LogQuery(follow=True))
    processes = processes_named([next(lines).text for _ in range(3)])
    kill_controller(settings, ref)
    assert list(lines) == []
    status = local.get(ref)
    assert (status.state, status.exit_code) == (JobState.FAILED, None)
    assert status.reason.startswith("ControllerLost")
    assert "/main" in status.reason
    assert live(processes) == []
    assert [status.state for status in local.list()] == [JobState.FAILED]
    local.delete(ref)


@pytest.mark.skipif(not os.path.exists("/proc"), reason="the kernel does this on Linux only")
def test_a_command_dies_with_its_controller(local: LocalBackend, settings: Settings, make: Any, saw: Saw) -> None:
    ref = local.submit(make.command("echo pid $$; exec sleep 600"))
    processes = processes_named([saw(local, ref, "pid")])
    kill_controller(settings, ref)
    wait_ended(processes, 60)
    assert live(processes) == []


def test_what_ignores_sigterm_is_killed_when_its_controller_was(
    local: LocalBackend, settings: Settings, make: Any, saw: Saw
) -> None:
    stubborn = "setsid bash -c 'trap \"\" TERM HUP; echo pid $$; while true; do sleep 600; done' &"
    ref = local.submit(make.command(f"{stubborn} wait"))
    processes = processes_named([saw(local, ref, "pid")])
    kill_controller(settings, ref)
    local.cancel(ref)
    assert local.get(ref).state is JobState.FAILED
    assert live(processes) == []


def test_waiting_for_a_job_whose_controller_is_killed_ends(
    local: LocalBackend, settings: Settings, make: Any, saw: Saw
) -> None:
    ref = local.submit(make.command("echo up; exec sleep 600"))
    saw(local, ref, "up")
    kill_controller(settings, ref)
    assert local.wait(ref).state is JobState.FAILED


def test_a_job_started_by_a_job_is_a_job_of_its_own(local: LocalBackend, make: Any, tmp_path: Path) -> None:
    script = tmp_path / "inner.py"
    script.write_text(SUBMIT)
    inner = tmp_path / "inner.json"
    inner.write_text(json.dumps(make.command("echo inner; exec sleep 600", name="inner").manifest))
    ref = local.submit(make.command(f"{sys.executable} {script} {tmp_path / 'state'} {inner}"))
    assert local.wait(ref).state is JobState.SUCCEEDED
    assert local.get(JobRef("local", "inner")).state in (JobState.PENDING, JobState.RUNNING)


def test_a_finished_job_goes_when_its_time_is_over(local: LocalBackend, settings: Settings, make: Any) -> None:
    plan = make.jobset(make.job(make.sh("true")), ttlSecondsAfterFinished=60)
    ref = local.submit(plan)
    finished = local.wait(ref).finished
    assert finished is not None
    before = LocalBackend(settings, clock=lambda: finished + timedelta(seconds=59))
    assert before.get(ref).state is JobState.SUCCEEDED
    after = LocalBackend(settings, clock=lambda: finished + timedelta(seconds=60))
    after.wait(after.submit(plan))
    after = LocalBackend(settings, clock=lambda: finished + timedelta(days=1))
    with pytest.raises(JobNotFoundError):
        after.get(ref)
    assert after.list() == []


def test_a_running_job_has_no_time_to_be_over(local: LocalBackend, settings: Settings, make: Any) -> None:
    ref = local.submit(make.jobset(make.job(make.sh("exec sleep 600")), ttlSecondsAfterFinished=0))
    late = LocalBackend(settings, clock=lambda: datetime(2200, 1, 1, tzinfo=UTC))
    assert not late.get(ref).state.final


def test_a_state_folder_that_cannot_be_written_is_said(settings: Settings, make: Any) -> None:
    settings.state_dir.parent.mkdir(exist_ok=True)
    settings.state_dir.write_text("a file where the folder should be")
    backend = LocalBackend(settings)
    for use in (lambda: backend.submit(make.command("true")), backend.list, lambda: backend.get(JobRef("local", "a"))):
        with pytest.raises(BackendError, match=f"{settings.state_dir}.*: Not a directory") as caught:
            use()
        assert caught.value.hints == ("PW_STATE_DIR=FOLDER names another",)


def test_a_half_made_job_of_a_killed_submit_is_in_nobodys_way(
    local: LocalBackend, settings: Settings, make: Any
) -> None:
    for name in (".new", ".removed"):
        (settings.state_dir / "jobs" / name / "pods").mkdir(parents=True)
    assert local.list() == []
    local.wait(local.submit(make.command("true")))
    assert sorted(path.name for path in (settings.state_dir / "jobs").iterdir()) == [".lock", "job"]


def test_a_controller_that_cannot_start_says_why(
    local: LocalBackend, make: Any, monkeypatch: Any, tmp_path: Path
) -> None:
    (tmp_path / "asyncio.py").write_text("raise SystemExit('no asyncio today')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(BackendError, match="did not start") as caught:
        local.submit(make.command("true"))
    assert "no asyncio today" in caught.value.hints
    assert local.list()[0].state is JobState.FAILED


def test_all_output_is_kept_of_a_command_that_says_much_and_fails(local: LocalBackend, make: Any) -> None:
    ref = local.submit(make.command("seq 400000; exit 1"))
    status = local.wait(ref)
    assert status.exit_code == 1
    assert sum(int(line.text) for line in local.logs(ref, LogQuery())) == 400000 * 400001 // 2


def test_a_command_that_writes_in_the_end_only_loses_nothing(local: LocalBackend, make: Any) -> None:
    ref = local.submit(make.command("trap 'seq 5000' TERM; echo up; kill -TERM $$; exit 3"))
    local.wait(ref)
    assert [line.text for line in local.logs(ref, LogQuery(tail=2))] == ["4999", "5000"]


def test_the_terminal_may_close(local: LocalBackend, settings: Settings, make: Any, saw: Saw) -> None:
    ref = local.submit(make.command("echo up; exec sleep 600"))
    saw(local, ref, "up")
    state = json.loads((settings.state_dir / "jobs" / ref.name / "state.json").read_text())
    controller = psutil.Process(state["pid"])
    assert os.getsid(controller.pid) != os.getsid(0)
    for number in (signal.SIGHUP, signal.SIGINT):
        controller.send_signal(number)
    assert not local.get(ref).state.final
    local.cancel(ref)
    assert local.get(ref).state is JobState.CANCELLED


def test_a_current_folder_that_is_gone_is_named(
    local: LocalBackend, make: Any, monkeypatch: Any, tmp_path: Path
) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    (tmp_path / "here").rmdir()
    with pytest.raises(SpecError, match="the current folder no longer exists"):
        local.submit(make.command("true"))
    assert local.list() == []
