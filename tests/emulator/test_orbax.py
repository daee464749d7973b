"""Orbax as it is, with Pathways' own reading and writing: real client processes throughout."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).with_name("orbax_client.py")
TIMEOUT_S = 100.0
# Gives (exit code, what the script printed as JSON).
Run = Callable[..., tuple[int, dict[str, Any]]]


@pytest.fixture
def run(emulator: Any, tmp_path: Path) -> Run:
    """Runs the script on the emulator: `run("save=1", "restore")`; with `on_cpu=True` on plain CPU devices."""

    def run(*deeds: str, on_cpu: bool = False) -> tuple[int, dict[str, Any]]:
        where = {"JAX_PLATFORMS": "cpu"} if on_cpu else {"ENABLE_PATHWAYS_PERSISTENCE": "1"}
        finished = subprocess.run(
            [sys.executable, str(SCRIPT), str(tmp_path / "checkpoints"), *deeds],
            env=emulator.client_environment | where,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
        )
        assert finished.returncode <= 0, finished.stderr
        lines = finished.stdout.splitlines()
        return finished.returncode, json.loads(lines[-1]) if lines else {}

    return run


def same(step: int, all_steps: list[int], handler: str = "CloudPathwaysArrayHandler") -> tuple[int, dict[str, Any]]:
    """What the script says when each bit came back: cut as it was, cut otherwise, whole, and on one slice of two."""
    return 0, {"handler": handler, "step": step, "all_steps": all_steps, "differing": [], "ways": 4}


def test_checkpoints_come_back_bit_for_bit_on_and_off_pathways(run: Run) -> None:
    assert run("save=1", "save=2", "restore") == same(2, [1, 2])
    assert run("restore", "save=3", on_cpu=True) == same(2, [1, 2], "ArrayHandler")
    assert run("restore") == same(3, [1, 2, 3])


def test_a_client_killed_while_it_saves_leaves_the_last_good_checkpoint(run: Run) -> None:
    assert run("save=1", "die=2") == (-signal.SIGKILL, {})
    assert run("restore") == same(1, [1])
    assert run("save=2", "restore") == same(2, [1, 2])
