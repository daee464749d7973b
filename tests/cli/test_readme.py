"""README's commands, re-run."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

RunPw = Callable[..., Any]
README = Path(__file__).parents[2] / "README.md"


def commands() -> list[list[str]]:
    """Every `pw` command that stands indented or fenced in README, without its comment."""
    text = README.read_text(encoding="utf-8").replace("\\\n", " ")
    return [shlex.split(line, comments=True)[1:] for line in re.findall(r"^ {4}(pw .*)$", text, re.MULTILINE)]


def dry(command: list[str]) -> list[str]:
    """The command so that it starts nothing."""
    if command[:2] != ["job", "submit"] or "-o" in command:
        return command
    words = [word for word in command if word != "--follow"]
    return [*words[:2], "--dry-run", *words[2:]]


def block(beginning: str) -> str:
    """The YAML of README that begins so."""
    blocks: list[str] = re.findall(r"^```yaml\n(.*?)^```", README.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    return next(text for text in blocks if text.startswith(beginning))


def test_readme_has_commands() -> None:
    assert len([command for command in commands() if command[:2] == ["job", "submit"]]) >= 4


def test_every_command_of_readme_is_understood(run_pw: RunPw, home: Path) -> None:
    (home / "job.env").write_text("A=1\n")
    (home / "faults.yaml").write_text(block("seed:"))
    for command in commands():
        result = run_pw(*dry(command))
        missing = result.code == 1 and "job 'digits'" in result.err
        gke = "-c" in command
        assert result.code == 0 or missing or gke, f"{command}: {result.err}"
        assert result.code != 2, f"{command}: {result.err}"


@pytest.mark.parametrize("path", re.findall(r"(?:examples|cli|pathways_runtime)/[\w/]+\.py", README.read_text("utf-8")))
def test_every_file_that_readme_names_is_there(path: str) -> None:
    assert (README.parent / path).is_file()
