"""The runner of JAX's tests, on a checkout made up here."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

RUNNER = Path(__file__).with_name("run.py")

TESTS = """
import os, signal, threading
import jax, psutil, pytest

THROUGH = "TPU_DEVICE" in repr(jax.devices()[0])

def test_that_passes(): assert jax.device_count() == 8 and float(jax.numpy.ones(3).sum()) == 3

def test_that_fails_on_plain_cpu(): assert THROUGH

def test_that_fails_through():
    if THROUGH: raise ValueError("device 7 is odd\\nand more")

def test_that_cannot_pass(): assert not THROUGH, "there is no unsafe_buffer_pointer"

def test_that_ends_the_client():
    if THROUGH: os._exit(3)

def test_that_ends_the_server():
    if THROUGH:
        for process in psutil.Process(os.getppid()).children():
            if "pathways_runtime.emulator" in process.cmdline(): process.kill()
        jax.numpy.ones(3).block_until_ready()

def test_that_hangs():
    if THROUGH: threading.Event().wait()

def test_after_all_that(): pass
"""


def run(checkout: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(RUNNER), "--jax-checkout", str(checkout), *flags]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests/some_test.py").write_text(TESTS)
    return tmp_path


@pytest.mark.soak
def test_each_test_is_told_by_how_it_ended(checkout: Path) -> None:
    report = checkout / "report.json"
    ended = run(checkout, "--modules=some", "--timeout-s=30", f"--report={report}", f"--logs={checkout / 'logs'}")
    assert ended.returncode == 0, ended.stderr
    outcomes = json.loads(report.read_text())["modules"]["some"]
    assert {test.partition("::test_")[2]: pair[0] for test, pair in outcomes["emulator"].items()} == {
        "that_passes": "passed",
        "that_fails_through": "failed",
        "that_cannot_pass": "failed",
        "that_ends_the_client": "client crash",
        "that_ends_the_server": "server crash",
        "that_hangs": "hang",
        "after_all_that": "passed",
    }
    assert outcomes["cpu"]["tests/some_test.py::test_that_fails_on_plain_cpu"][0] == "failed"
    # plain CPU, through, %, impossible, % of the rest, crashes and hangs
    assert ended.stdout.splitlines()[1].split() == ["some", "7", "2", "28.6", "1", "33.3", "3"]
    assert "1 failed: ValueError: device N is odd\n" in ended.stdout
    assert "unsafe_buffer_pointer" not in ended.stdout


def test_a_module_that_the_checkout_lacks_is_refused(checkout: Path) -> None:
    ended = run(checkout, "--modules=some,other")
    assert (ended.returncode, ended.stdout) == (2, "")
    assert "has no other_test.py" in ended.stderr
