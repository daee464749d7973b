"""Many jobs, one after the other and at once. Runs in `make soak`."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from pathways_runtime import _contract

RunPw = Callable[..., Any]

WAVES = 20
JOBS = 5


def processes_of_jobs(home: Path) -> list[psutil.Process]:
    """What runs now of the jobs of a user with this home."""
    found = []
    for process in psutil.process_iter():
        try:
            environ = process.environ()
        except psutil.Error:
            continue
        if _contract.LOCAL_JOB_UID in environ and environ.get("HOME") == str(home / "home"):
            found.append(process)
    return found


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.usefixtures("stop_jobs")
def test_a_hundred_jobs_end_as_they_should_and_leave_no_process_behind(run_pw: RunPw, home: Path) -> None:
    seen = 0
    for wave in range(WAVES):
        for number in range(JOBS):
            script = {0: "sleep 600", 1: "exit 3"}.get(number, "echo done")
            name = ("--name", f"soak-{wave}-{number}", "--restarts", "0", "--grace-period", "5s", "--env", "A=1")
            result = run_pw("job", "submit", *name, "--compute-type", "v6e-8", "--command", script)
            assert result.code == 0, result.err
        seen = max(seen, len(processes_of_jobs(home)))
        assert run_pw("job", "cancel", f"soak-{wave}-0").code == 0
        assert run_pw("job", "wait", f"soak-{wave}-1").code == 3
        for number in range(2, JOBS):
            assert run_pw("job", "wait", f"soak-{wave}-{number}").code == 0
    jobs = json.loads(run_pw("job", "list", "--json").out)
    assert len(jobs) == WAVES * JOBS
    assert seen > JOBS
    left = processes_of_jobs(home)
    assert psutil.wait_procs(left, timeout=10)[1] == []
