"""How the user's container runs its command, with the real bash."""

from __future__ import annotations

import signal
import subprocess

import pytest

from pw.manifest_parts import RUN_COMMAND


def start(command: str) -> subprocess.Popen[str]:
    return subprocess.Popen(["bash", "-c", RUN_COMMAND, "main", command], stdout=subprocess.PIPE, text=True)


def ends_with_after_term(command: str) -> int:
    """The exit code after a SIGTERM that comes once the command has said that it is ready."""
    process = start(command)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=30)
    return process.returncode


@pytest.mark.parametrize("code", [0, 1, 42, 255])
def test_the_exit_code_is_that_of_the_command(code: int) -> None:
    with start(f"exit {code}") as process:
        process.communicate(timeout=30)
    assert process.returncode == code


def test_a_killed_command_counts_as_killed() -> None:
    with start("kill -9 $$") as process:
        process.communicate(timeout=30)
    assert process.returncode == 128 + signal.SIGKILL


def test_quotes_and_newlines_reach_the_inner_shell_as_typed() -> None:
    out, _ = start("echo \"a  'b'\"\necho '$HOME' # comment").communicate(timeout=30)
    assert out == "a  'b'\n$HOME\n"


def test_every_process_of_a_compound_command_gets_sigterm() -> None:
    process = start("(trap 'echo inner; exit 0' TERM; echo ready; while :; do sleep 0.1; done); echo after")
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGTERM)
    out, _ = process.communicate(timeout=30)
    assert "inner" in out
    assert process.returncode == 128 + signal.SIGTERM


def test_a_command_that_ends_with_0_after_sigterm_has_not_succeeded() -> None:
    assert ends_with_after_term("trap 'exit 0' TERM; echo ready; while :; do sleep 0.1; done") == 143


def test_a_command_may_choose_its_own_exit_code_after_sigterm() -> None:
    assert ends_with_after_term("trap 'exit 7' TERM; echo ready; while :; do sleep 0.1; done") == 7


def test_a_command_that_ignores_sigterm_goes_on() -> None:
    assert ends_with_after_term("trap '' TERM; echo ready; sleep 0.5; exit 5") == 5
