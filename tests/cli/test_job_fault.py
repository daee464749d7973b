"""`pw job fault` as a user meets it. What a fault does is tests/contract's."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pw.backends.local.events import watch

RunPw = Callable[..., Any]


def status_of(run_pw: RunPw, job: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(run_pw("job", "status", job, "--json").out)
    return found


def wait_until_ready(run_pw: RunPw, home: Path) -> None:
    """Until every slice of job `a` is ready; looks at each change."""
    folder = home / "state" / "pw" / "jobs" / "a"
    state, job = (json.loads((folder / name).read_text()) for name in ("state.json", "job.json"))
    with watch(state["event_port"], job["uid"]) as changes:
        while {slice["state"] for slice in status_of(run_pw, "a")["slices"]} != {"ready"}:
            assert changes is not None and changes.wait()


@pytest.mark.usefixtures("stop_jobs")
def test_slices_crash_and_the_command_says_which(run_pw: RunPw, home: Path) -> None:
    run_pw("job", "submit", "--name", "a", "--compute-type", "v6e:1x1", "--num-slices", "2", "--pathways-headless")
    wait_until_ready(run_pw, home)
    result = run_pw("job", "fault", "a", "--slice", "0", "--slice", "1", "--kind", "crash", "--json")
    assert result.code == 0, result.err
    assert json.loads(result.out) == [{"kind": "crash", "slice": index, "for_s": None} for index in (0, 1)]
    assert "pw job status local://a" in result.err


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ([], "missing: --slice, --kind (or --scenario)"),
        (["--slice", "0"], "missing: --kind (or --scenario)"),
        (["--kind", "crash"], "missing: --slice (or --scenario)"),
        (["--scenario", "none.yaml"], "'none.yaml' cannot be read"),
        (["--scenario", "none.yaml", "--for", "3s"], "--scenario and --for contradict each other"),
        (["--slice", "-1", "--kind", "crash"], "--slice"),
        (["--slice", "x", "--kind", "crash"], "--slice 'x': want a whole number, 0 or more"),
        (["--slice", "0", "--kind", "preempt"], "fault 'preempt' is not supported yet: want crash or hang"),
        (["--slice", "0", "--kind", "slow", "--for", "3s"], "fault 'slow' is not supported yet"),
        (["--slice", "0", "--kind", "fire"], "fault 'fire' is unknown: want crash or hang"),
        (["--slice", "0", "--kind", "crash", "--for", "30s"], "a crash has no duration"),
        (["--slice", "0", "--kind", "hang", "--for", "soon"], "--for 'soon'"),
        (["--slice", "0", "--kind", "hang", "--for", "0s"], "cannot hang for 0 s: want 1s or more"),
    ],
)
def test_bad_input_is_refused(run_pw: RunPw, arguments: list[str], problem: str) -> None:
    result = run_pw("job", "fault", "a", *arguments)
    assert (result.code, result.out) == (2, "")
    assert problem in result.err


def test_on_a_cluster_nothing_is_deleted_where_nobody_can_be_asked(run_pw: RunPw) -> None:
    result = run_pw("job", "fault", "gke://p/l/c/n/digits", "--slice", "1", "--kind", "crash")
    assert (result.code, result.out) == (2, "")
    assert "deletes the worker pods of slice 1 of job gke://p/l/c/n/digits: add --yes" in result.err


def test_a_job_that_is_not_there_has_no_faults(run_pw: RunPw) -> None:
    result = run_pw("job", "fault", "nobody", "--slice", "0", "--kind", "crash")
    assert result.code == 1
    assert "no local job 'nobody'" in result.err
