"""README's commands, re-run."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pw import config

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


def block(beginning: str, language: str = "yaml") -> str:
    """The block of README that begins so."""
    text = README.read_text(encoding="utf-8")
    blocks: list[str] = re.findall(rf"^```{language}\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    return next(text for text in blocks if text.startswith(beginning))


@pytest.mark.usefixtures("stop_jobs")
def test_the_python_of_readme_prints_what_the_job_says(home: Path) -> None:
    (home / "train.py").write_text("print('step 1: loss 0.5')\n")
    environ = os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    sample = [sys.executable, "-c", block("from pw import", "python")]
    done = subprocess.run(sample, env=environ, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "step 1: loss 0.5\nSucceeded 0\n"), done.stderr


def test_a_script_gets_the_devices_of_the_emulator_that_readme_starts() -> None:
    (line,) = re.findall(r"^ {4}python (-m pathways_runtime.emulator .*)$", README.read_text("utf-8"), re.MULTILINE)
    emulator = [sys.executable, *line.split(), "--server_port=0"]
    script = "import pathways_runtime; pathways_runtime.initialize(); import jax; print(len(jax.devices()))"
    with subprocess.Popen(emulator, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as running:
        assert running.stdout is not None
        variables = dict(running.stdout.readline().rstrip("\n").split("=", 1) for _ in range(2))
        command = [sys.executable, "-c", script]
        done = subprocess.run(command, env=os.environ | variables, capture_output=True, text=True, check=False)
        running.terminate()
    assert done.stdout == "16\n", done.stderr


def test_readme_s_settings_are_all_there_are(home: Path) -> None:
    text = block("backend", "toml")
    assert set(tomllib.loads(text)) == {row.name for row in config.rows()}
    file = config.config_path({}, home)
    file.parent.mkdir(parents=True)
    file.write_text(text)
    assert config.load(environ={}, home=home).cluster == "my-cluster"


def test_no_two_jobs_of_readme_take_one_name() -> None:
    local = [words for words in commands() if words[:2] == ["job", "submit"] and "-c" not in words]
    names = [words[words.index(flag) + 1] for words in local for flag in ("-n", "--name") if flag in words]
    assert len(names) == len(set(names)) >= 3
    assert "digits" not in names  # that of `make demo`


def test_readme_has_commands() -> None:
    assert len([command for command in commands() if command[:2] == ["job", "submit"]]) >= 4


def test_every_command_of_readme_is_understood(run_pw: RunPw, home: Path) -> None:
    (home / "job.env").write_text("A=1\n")
    (home / "faults.yaml").write_text(block("seed:"))
    for command in commands():
        result = run_pw(*dry(command))
        missing = result.code == 1 and re.search(r"no local job '\w+'", result.err)
        gke = "-c" in command
        assert result.code == 0 or missing or gke, f"{command}: {result.err}"
        assert result.code != 2, f"{command}: {result.err}"


@pytest.mark.parametrize("path", re.findall(r"(?:examples|cli|pathways_runtime)/[\w/]+\.py", README.read_text("utf-8")))
def test_every_file_that_readme_names_is_there(path: str) -> None:
    assert (README.parent / path).is_file()
