"""JAX in this process: a client of the emulator, and plain CPU devices beside it as the yardstick."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import pathways_runtime
from pathways_runtime import _contract

Devices = list[jax.Device]
# Takes the devices to run on, gives a tree of arrays.
Program = Callable[[Devices], Any]


@pytest.fixture(scope="session")
def devices(emulator: Any) -> Iterator[Devices]:
    """The emulator's eight devices, in two slices of four. They are JAX's default."""
    jax.config.update("jax_platforms", "proxy,cpu")
    jax.config.update("jax_backend_target", emulator.target)
    jax.config.update("jax_num_cpu_devices", 8)
    pathways_runtime.initialize()
    yield jax.devices()
    jax.clear_caches()  # programs are released while the server still listens


@pytest.fixture(scope="session")
def cpu_devices(devices: Devices) -> Devices:
    """Eight plain CPU devices in this process."""
    return jax.devices("cpu")


@pytest.fixture
def check_same(devices: Devices, cpu_devices: Devices) -> Callable[[Program], None]:
    """Runs a program on both, and fails unless dtypes, shapes and every bit agree."""

    def check(program: Program) -> None:
        actual = jax.device_get(program(devices))
        with jax.default_device(cpu_devices[0]):
            expected = jax.device_get(program(cpu_devices))
        assert_identical(actual, expected)

    return check


def assert_identical(actual: Any, expected: Any) -> None:
    """Trees of arrays with the same structure, dtypes, shapes and bits (so NaN equals the same NaN)."""
    leaves, structure = jax.tree.flatten(actual)
    expected_leaves, expected_structure = jax.tree.flatten(expected)
    assert str(structure) == str(expected_structure)
    for got, wanted in zip(map(np.asarray, leaves), map(np.asarray, expected_leaves), strict=True):
        assert (got.dtype, got.shape) == (wanted.dtype, wanted.shape)
        assert got.tobytes() == wanted.tobytes(), f"{got}\nis not\n{wanted}"


@dataclasses.dataclass(frozen=True)
class Spawned:
    """A process of the emulator that has reported its port; None for one that ended before."""

    process: subprocess.Popen[bytes]
    port: int | None
    log: Path


@pytest.fixture
def spawn(tmp_path: Path) -> Iterator[Callable[..., Spawned]]:
    """Starts `python -m MODULE FLAGS` and waits until it is ready or ended: `spawn(module, *flags, environment={})`."""
    started: list[subprocess.Popen[bytes]] = []

    def start(module: str, *flags: str, environment: dict[str, str] | None = None) -> Spawned:
        log = tmp_path / f"{len(started)}.log"
        reader, writer = os.pipe()
        with log.open("wb") as output, open(reader, encoding="utf-8") as ready:
            process = subprocess.Popen(
                [sys.executable, "-m", module, *flags],
                stdout=output,
                stderr=subprocess.STDOUT,
                env=os.environ | {_contract.READY_FD: str(writer)} | (environment or {}),
                pass_fds=[writer],
            )
            started.append(process)
            os.close(writer)
            line = ready.readline()
        return Spawned(process, json.loads(line)["port"] if line else None, log)

    yield start
    for process in started:
        process.kill()
        process.wait()


@pytest.fixture
def follow() -> Callable[[Any, str], str]:
    """Waits for the first line of an emulator's log with a text; gives the rest of it: `follow(emulator, text)`."""

    def follow(emulator: Any, text: str) -> str:
        tail = subprocess.Popen(["tail", "-n", "+1", "-f", str(emulator.log)], stdout=subprocess.PIPE, text=True)
        assert tail.stdout is not None
        try:
            return next(line.partition(text)[2] for line in tail.stdout if text in line)
        finally:
            tail.kill()
            tail.communicate()

    return follow
