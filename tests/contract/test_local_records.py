"""Records that were emptied, edited, lost or cannot be written: every verb goes on, and the name is never locked."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pw.backends.local import LocalBackend
from pw.config import Settings
from pw.errors import BackendError, JobExistsError, SpecError
from pw.faults import CRASH, Fault
from pw.status import JobRef, JobState, LogQuery

Saw = Callable[..., str]
FILES = ("job.json", "state.json")
FOREIGN = {
    "empty": "",
    "no JSON": "{",
    "null": "null",
    "a list": "[]",
    "another object": '{"a": 1}',
    "too deep": "[" * 100_000,
    "missing": None,
}


def spoil(settings: Settings, ref: JobRef, file: str, text: str | None) -> None:
    path = settings.state_dir / "jobs" / ref.name / file
    path.unlink()
    if text is not None:
        path.write_text(text)


def edit(settings: Settings, ref: JobRef, file: str, **fields: Any) -> None:
    path = settings.state_dir / "jobs" / ref.name / file
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


@pytest.fixture
def finished(local: LocalBackend, make: Any) -> JobRef:
    """A finished job beside another, called `good`."""
    local.wait(local.submit(make.command("echo good", name="good")))
    ref: JobRef = local.submit(make.command("echo old"))
    local.wait(ref)
    return ref


@pytest.mark.parametrize("file", FILES)
def test_a_broken_record_is_a_failed_job_and_in_nobodys_way(
    local: LocalBackend, settings: Settings, make: Any, finished: JobRef, file: str
) -> None:
    for what, text in FOREIGN.items():
        spoil(settings, finished, file, text)
        states = {status.ref.name: status.state for status in local.list()}
        assert states == {"job": JobState.FAILED, "good": JobState.SUCCEEDED}, what
        for status in (local.get(finished), local.wait(finished)):
            assert status.reason.startswith(f"record is broken: {file}"), what
            assert status.compute_type == ("" if file == "job.json" else "v6e-8"), what
        local.cancel(finished)
        with pytest.raises(JobExistsError, match="--replace"):
            local.submit(make.command("true"))
        with pytest.raises(SpecError, match="Failed"):
            local.inject(finished, Fault(CRASH, 0))
        assert [line.text for line in local.logs(finished, LogQuery(follow=True))] in (["old"], ["new"])
        local.submit(make.command("echo new"), replace=True)
        assert local.wait(finished).state is JobState.SUCCEEDED, what


@pytest.mark.parametrize("file", [*FILES, "manifest.json"])
def test_a_broken_record_can_be_deleted(local: LocalBackend, settings: Settings, finished: JobRef, file: str) -> None:
    spoil(settings, finished, file, None)
    local.delete(finished)
    assert [status.ref.name for status in local.list()] == ["good"]


def test_a_broken_manifest_leaves_a_finished_job_what_it_was(
    local: LocalBackend, settings: Settings, finished: JobRef
) -> None:
    spoil(settings, finished, "manifest.json", '{"a": 1}')
    assert {status.state for status in local.list()} == {JobState.SUCCEEDED}
    with pytest.raises(BackendError, match=r"is broken: manifest.json has no 'metadata'"), local.connect(finished, 1):
        pass


@pytest.mark.parametrize(
    "fields",
    [
        {"state": "Dreaming"},
        {"started": "yesterday"},
        {"slices": [1]},
        {"pods": [{"name": "a"}]},
        {"pid": -1},
        {"ports": {"1": "x"}},
    ],
)
def test_a_value_that_cannot_be_is_named(
    local: LocalBackend, settings: Settings, finished: JobRef, fields: dict[str, Any]
) -> None:
    edit(settings, finished, "state.json", **fields)
    assert local.get(finished).reason.startswith(f"record is broken: state.json: {next(iter(fields))}")


def test_what_still_runs_of_a_broken_record_ends_with_it(
    local: LocalBackend, settings: Settings, make: Any, saw: Saw
) -> None:
    for file in FILES:
        ref = local.submit(make.command("echo pid $$; exec sleep 600"))
        pid = saw(local, ref, "pid").split()[1]
        spoil(settings, ref, file, "")
        local.delete(ref)
        assert not Path(f"/proc/{pid}").exists()
        assert local.list() == []


def full(settings: Settings, ref: JobRef, pid: int) -> None:
    """Has process `pid` fail to write the job's state anew: a folder is where its temporary file would be."""
    (settings.state_dir / "jobs" / ref.name / f".state.json.{pid}").mkdir()


def test_a_controller_without_room_still_writes_how_the_job_ended(
    local: LocalBackend, settings: Settings, make: Any, tmp_path: Path
) -> None:
    os.mkfifo(tmp_path / "go")
    ref = local.submit(make.command(f"cat {tmp_path / 'go'}; exit 7"))
    state = json.loads((settings.state_dir / "jobs" / ref.name / "state.json").read_text())
    with (tmp_path / "go").open("w"):
        full(settings, ref, state["pid"])
    status = local.wait(ref)
    assert (status.state, status.exit_code) == (JobState.FAILED, 7)
    assert status.finished is not None


def test_a_true_state_that_cannot_be_written_is_shown(
    local: LocalBackend, settings: Settings, finished: JobRef
) -> None:
    # As a killed controller leaves it.
    edit(settings, finished, "state.json", state="Running", finished=None)
    full(settings, finished, os.getpid())
    (status,) = (status for status in local.list() if status.ref == finished)
    assert status.state is JobState.FAILED
    assert status.reason.startswith("ControllerLost")
    assert "cannot be written: Is a directory" in status.reason
    assert local.get(finished).state is JobState.FAILED
