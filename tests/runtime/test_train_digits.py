"""The first example: on plain CPU, on the emulator, and with pathwaysutils in our place."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).parents[2] / "examples" / "train_digits.py"
# Runs the example with pathwaysutils as the module that it imports as pathways_runtime.
WITH_PATHWAYSUTILS = f"""
import runpy, sys
import pathwaysutils
sys.modules["pathways_runtime"] = pathwaysutils
runpy.run_path({str(SCRIPT)!r}, run_name="__main__")
"""
EPOCH = re.compile(r"epoch (\d+)/\d+  loss (\d+\.\d{4})  test accuracy (\d+\.\d{2})%")
History = list[tuple[int, float, float]]  # epoch, loss, accuracy in percent


def train(environment: dict[str, str], *arguments: str, script: tuple[str, ...] = (str(SCRIPT),)) -> str:
    """The output of a run that succeeded."""
    command = [sys.executable, *script, *arguments]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100)
    assert result.returncode == 0, result.stderr
    return result.stdout


def history(output: str) -> History:
    return [(int(epoch), float(loss), float(accuracy)) for epoch, loss, accuracy in EPOCH.findall(output)]


def plain_cpu(count: int) -> dict[str, str]:
    return os.environ | {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": str(count)}


@pytest.fixture(scope="module")
def on_plain_cpu() -> History:
    output = train(plain_cpu(8))
    assert output.startswith("slices x devices: 1 x 8 (cpu)\n")
    return history(output)


def assert_same_training(actual: History, expected: History) -> None:
    """Other shardings add in another order, which the fourth digit of a loss may show."""
    assert [epoch for epoch, _, _ in actual] == [epoch for epoch, _, _ in expected]
    assert [loss for _, loss, _ in actual] == pytest.approx([loss for _, loss, _ in expected], abs=5e-4)
    assert [accuracy for _, _, accuracy in actual] == pytest.approx([x for _, _, x in expected], abs=0.6)


def test_it_learns_on_plain_cpu(on_plain_cpu: History) -> None:
    assert [epoch for epoch, _, _ in on_plain_cpu] == list(range(1, 11))
    assert on_plain_cpu[-1][1] < on_plain_cpu[0][1] / 10
    assert on_plain_cpu[-1][2] > 95


def test_it_learns_the_same_on_two_emulated_slices(emulator: Any, on_plain_cpu: History) -> None:
    output = train(emulator.client_environment)
    assert output.startswith("slices x devices: 2 x 4 (TPU v6 lite)\n")
    assert_same_training(history(output), on_plain_cpu)


def test_it_runs_unchanged_with_pathwaysutils(emulator: Any, on_plain_cpu: History) -> None:
    output = train(emulator.client_environment, script=("-c", WITH_PATHWAYSUTILS))
    assert output.startswith("slices x devices: 2 x 4 (TPU v6 lite)\n")
    assert_same_training(history(output), on_plain_cpu)


SMALL = ("--epochs=2", "--batch-size=100", "--hidden-size=50")


@pytest.fixture(scope="module")
def small_on_one_device() -> History:
    return history(train(plain_cpu(1), *SMALL))


def test_devices_and_batches_need_not_divide_anything(small_on_one_device: History) -> None:
    assert_same_training(history(train(plain_cpu(3), *SMALL)), small_on_one_device)


@pytest.mark.parametrize(("seed", "same"), [(0, True), (4, False)])
def test_a_seed_gives_the_same_run_and_another_another(small_on_one_device: History, seed: int, same: bool) -> None:
    again = history(train(plain_cpu(1), *SMALL, f"--seed={seed}"))
    assert (again == small_on_one_device) == same


def test_nonsense_is_refused() -> None:
    result = subprocess.run(
        [sys.executable, SCRIPT, "--batch-size=0"], env=plain_cpu(1), capture_output=True, text=True
    )
    assert result.returncode == 2
    assert "--batch-size" in result.stderr
