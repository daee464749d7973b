"""`pw` itself: help, version, what it imports, and how it ends."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import Any

import pytest

RunPw = Callable[..., Any]


def test_help_names_the_commands(run_pw: RunPw) -> None:
    result = run_pw("--help")
    assert result.code == 0
    assert "job" in result.out and "tpus" in result.out
    assert result.err == ""


@pytest.mark.parametrize("arguments", [(), ("job",)])
def test_without_a_command_help_is_shown(run_pw: RunPw, arguments: Sequence[str]) -> None:
    result = run_pw(*arguments)
    assert result.code == 0
    assert "Commands" in result.out


def test_version_is_the_package_s(run_pw: RunPw) -> None:
    result = run_pw("--version")
    assert result.code == 0
    assert result.out.startswith("pw ")


@pytest.mark.parametrize(("typed", "meant"), [(["jbo"], "'job'"), (["job", "sbmit"], "'submit'")])
def test_an_unknown_command_names_the_nearest(run_pw: RunPw, typed: list[str], meant: str) -> None:
    result = run_pw(*typed)
    assert result.code == 2
    assert result.out == ""
    assert meant in result.err
    assert result.err.startswith("error: ")


def test_every_option_shows_its_help_whole(run_pw: RunPw, monkeypatch: pytest.MonkeyPatch) -> None:
    from pw import specs

    monkeypatch.setenv("COLUMNS", "500")
    shown = " ".join(run_pw("job", "submit", "--help").out.split())
    for option in specs.options():
        assert option.help in shown
        assert all(flag in shown for flag in option.flags)


OUTPUTS = [
    *(["tpus"], ["--version"], ["--help"], ["job", "submit", "--help"], ["job", "list", "--json"]),
    ["job", "submit", "--name", "a", "--compute-type", "v6e-16", "--dry-run", "--command", "true"],
]


@pytest.mark.parametrize("arguments", OUTPUTS)
def test_a_closed_pipe_ends_the_command_quietly(arguments: list[str]) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "pw", *arguments]
    done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True, check=False)
    os.close(writer)
    assert done.returncode == 141
    assert "error" not in done.stderr and "Traceback" not in done.stderr


@pytest.mark.parametrize("arguments", OUTPUTS)
@pytest.mark.parametrize("stdout", [">/dev/full", ">&-"])
def test_an_output_that_cannot_be_written_is_one_line(arguments: list[str], stdout: str) -> None:
    shell = ["sh", "-c", f'exec "$0" -m pw "$@" {stdout}', sys.executable, *arguments]
    done = subprocess.run(shell, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 1
    why = "No space left on device" if "full" in stdout else "Bad file descriptor"
    assert done.stderr.splitlines()[-1] == f"error: cannot write to stdout: {why}"
    assert "Traceback" not in done.stderr


def test_without_any_stream_a_command_ends_with_its_code() -> None:
    shell = ["sh", "-c", 'exec "$0" -m pw tpus nope <&- >&- 2>&-', sys.executable]
    assert subprocess.run(shell, check=False).returncode == 2


INTERRUPTED = """
import os, signal, sys
module = sys.argv[1]
class Interrupt:
    def find_spec(self, name, path=None, target=None):
        if name == module:
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Interrupt())
from pw.__main__ import main
sys.argv[1:] = ["job", "list"]
sys.exit(main())
"""


@pytest.mark.parametrize("module", ["typer", "pw.app", "pw.commands.job"])
def test_ctrl_c_while_modules_are_loaded_leaves_no_traceback(module: str) -> None:
    done = subprocess.run([sys.executable, "-c", INTERRUPTED, module], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


def test_text_that_the_terminal_cannot_show_does_not_break_a_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONIOENCODING", "ascii")
    command = [sys.executable, "-m", "pw", "job", "status", "größe"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode in (1, 2)
    assert done.stderr.startswith("error: ")
