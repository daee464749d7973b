"""The command line as a user meets it: arguments in, exit code and two streams out."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from pw.__main__ import main


@dataclasses.dataclass(frozen=True)
class Result:
    code: int
    out: str
    err: str


RunPw = Callable[..., Result]
StartPw = Callable[..., subprocess.Popen[str]]


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home of its own: no settings, no jobs, and the test's folder to work in."""
    for name in [name for name in os.environ if name.startswith("PW_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def run_pw() -> RunPw:
    """`run_pw("job", "list")`: what the command `pw` does with these arguments, in this process."""

    def run(*arguments: str) -> Result:
        out, err = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = main(arguments)
        return Result(code, out.getvalue(), err.getvalue())

    return run


@pytest.fixture
def start_pw() -> Iterator[StartPw]:
    """`start_pw("job", "logs", "-f")`: the command in a process of its own, with pipes."""
    started: list[subprocess.Popen[str]] = []

    def start(*arguments: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-m", "pw", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        started.append(process)
        return process

    yield start
    for process in started:
        with process:
            process.kill()


@pytest.fixture
def stop_jobs(run_pw: RunPw) -> Iterator[None]:
    """Stops every job that the test left running."""
    yield
    for job in json.loads(run_pw("job", "list", "--json").out):
        run_pw("job", "cancel", job["ref"])
