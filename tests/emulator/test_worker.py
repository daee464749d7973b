"""What a worker refuses to start with, and how light it and the resource manager are."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

from pathways_runtime import _contract

PLACE = {"MEGASCALE_SLICE_ID": "0", "JOB_COMPLETION_INDEX": "0"}
ADDRESS = "--resource_manager_address=127.0.0.1:1"


def run_worker(*flags: str, environment: dict[str, str]) -> tuple[int, str]:
    """(exit code, stderr)."""
    inherited = {key: value for key, value in os.environ.items() if key not in PLACE}
    finished = subprocess.run(
        [sys.executable, "-m", "pathways_runtime.emulator.worker", *flags],
        env=inherited | environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    return finished.returncode, finished.stderr


@pytest.mark.parametrize(
    ("flags", "environment", "complaint"),
    [
        ((), PLACE, "--resource_manager_address=HOST:PORT is missing"),
        (("--resource_manager_address=head",), PLACE, "'head' is not HOST:PORT"),
        (("--resource_manager_address=head:99999",), PLACE, "'head:99999' is not HOST:PORT"),
        ((ADDRESS,), {}, "MEGASCALE_SLICE_ID=''"),
        ((ADDRESS,), {"MEGASCALE_SLICE_ID": "0"}, "JOB_COMPLETION_INDEX=''"),
        ((ADDRESS,), PLACE | {"MEGASCALE_SLICE_ID": "-1"}, "'-1' is not a number from 0"),
        ((ADDRESS, "--server_prot=1"), PLACE, "did you mean --server_port"),
        ((ADDRESS, "--server_port=http"), PLACE, "'http' is not a port"),
        ((ADDRESS, "29005"), PLACE, "argument '29005' is not a flag"),
        ((ADDRESS, "--token_file=/does/not/exist"), PLACE, "/does/not/exist"),
    ],
)
def test_wrong_flags_and_variables_are_refused(
    flags: tuple[str, ...], environment: dict[str, str], complaint: str
) -> None:
    code, stderr = run_worker(*flags, environment=environment)
    assert code == _contract.EXIT_BAD_FLAGS
    assert complaint in stderr
    assert stderr.startswith("error: ")
    assert "Traceback" not in stderr


def test_flags_about_tpu_hardware_are_taken_and_reported(spawn: Callable[..., Any]) -> None:
    manager = spawn(
        "pathways_runtime.emulator",
        "--node_type=resource_manager",
        "--server_port=0",
        "--instance_type=tpuv6e:1x1",
        "--instance_count=1",
    )
    worker = spawn(
        "pathways_runtime.emulator.worker",
        f"--resource_manager_address=127.0.0.1:{manager.port}",
        "--tpu_premapped_buffer_size=4294967296",
        environment=PLACE,
    )
    assert worker.port == _contract.WORKER_PORT
    assert "--tpu_premapped_buffer_size=4294967296 has no effect" in worker.log.read_text()


@pytest.mark.parametrize(
    "arguments",
    [
        ("pathways_runtime.emulator.worker", "--server_prot=1"),
        ("pathways_runtime.emulator", "--node_type=resource_manager"),
    ],
)
def test_neither_worker_nor_resource_manager_loads_a_large_library(arguments: tuple[str, ...]) -> None:
    finished = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", *arguments], capture_output=True, text=True, timeout=60, check=False
    )
    assert finished.returncode == _contract.EXIT_BAD_FLAGS
    loaded = {line.rpartition("|")[2].strip().partition(".")[0] for line in finished.stderr.splitlines()}
    assert "pathways_runtime" in loaded
    assert not loaded & {"jax", "jaxlib", "grpc", "numpy", "google", "yaml", "typer"}


def test_a_worker_costs_little_more_than_python_itself() -> None:
    def cpu_s(*arguments: str) -> float:
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([sys.executable, *arguments], capture_output=True, timeout=60, check=False)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime

    worker = min(cpu_s("-m", "pathways_runtime.emulator.worker") for _ in range(5))
    bare = min(cpu_s("-c", "pass") for _ in range(5))
    assert worker < bare + 0.08
