"""Elastic training with pathwaysutils and Orbax as they are, while a slice is lost and comes back."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import psutil
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from pathwaysutils.experimental.concatenate_by_mesh_axis import concatenate_by_mesh_axis
from pathwaysutils.experimental.split_by_mesh_axis import split_by_mesh_axis

SCRIPT = Path(__file__).with_name("elastic_client.py")
TIMEOUT_S = 60.0


class Client:
    """The script, told line by line."""

    def __init__(self, emulator: Any, folder: Path) -> None:
        with (folder / "stderr").open("wb") as stderr:
            self.process = subprocess.Popen(
                [sys.executable, str(SCRIPT), str(folder / "checkpoints")],
                env=emulator.client_environment | {"ENABLE_PATHWAYS_PERSISTENCE": "1"},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
            )

    def hear(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def tell(self, deed: str) -> str:
        assert self.process.stdin is not None
        self.process.stdin.write(deed + "\n")
        self.process.stdin.flush()
        return self.hear()


@pytest.fixture
def emulator_of_two(start_emulator: Callable[..., Any]) -> Any:
    return start_emulator("--instance_type=tpuv6e:2x2", "--instance_count=2")


@pytest.fixture
def client(emulator_of_two: Any, tmp_path: Path) -> Iterator[Client]:
    client = Client(emulator_of_two, tmp_path)
    yield client
    client.process.kill()
    client.process.communicate()


def expected_after(steps: int) -> str:
    weights = np.ones((16, 8), np.int32)
    for step in range(steps):
        batch = np.random.default_rng(step).integers(0, 100, weights.shape, dtype=np.int32)
        weights = weights * 3 + batch.sum(0, dtype=np.int32) + weights.sum(0, dtype=np.int32)
    return " ".join(map(str, weights.ravel()))


def test_training_goes_on_with_fewer_slices_and_then_with_all_again(
    emulator_of_two: Any, client: Client, follow: Callable[[Any, str], str]
) -> None:
    assert client.hear() == "slices [0, 1] from step 0"
    assert [client.tell("step") for _ in range(2)] == ["step 1", "step 2"]

    # Without what starts workers again, the slice stays away.
    children = psutil.Process(emulator_of_two.process.pid).children()
    [starter] = [child for child in children if "pathways_runtime.emulator.workers" in child.cmdline()]
    starter.suspend()
    found = re.match(r"\d+", follow(emulator_of_two, "slice 1 host 0 is process "))
    assert found is not None
    psutil.Process(int(found[0])).kill()
    follow(emulator_of_two, "slice 1 is down")

    assert client.tell("step") == "not all slices are there"
    assert client.hear() == "slices [0] from step 2"
    assert [client.tell("step") for _ in range(2)] == ["step 3", "step 4"]

    starter.resume()
    assert client.tell("grow") == "all slices are there"
    assert client.hear() == "slices [0, 1] from step 4"
    assert client.tell("step") == "step 5"
    assert client.tell("end") == expected_after(5)
    assert client.process.wait(TIMEOUT_S) == 0


@pytest.mark.parametrize("spec", [P("slice", "chip"), P("chip"), P(None, ("slice", "chip"))])
def test_arrays_are_split_by_slices_and_put_together_again(devices: list[jax.Device], spec: P) -> None:
    mesh = Mesh(np.array(devices).reshape(2, 4), ("slice", "chip"))
    values = np.arange(128, dtype=np.float32).reshape(8, 16)
    array = jax.device_put(values, NamedSharding(mesh, spec))
    parts = split_by_mesh_axis({"x": array}, "slice")
    assert [{device.slice_index for device in part["x"].sharding.device_set} for part in parts] == [{0}, {1}]
    dimensions = [index for index, names in enumerate(spec) if "slice" in (names or "")]
    expected = np.split(values, 2, dimensions[0]) if dimensions else [values, values]
    assert all(np.array_equal(part["x"], half) for part, half in zip(parts, expected, strict=True))
    whole = concatenate_by_mesh_axis(parts, "slice")["x"]
    assert whole.sharding == array.sharding
    assert np.array_equal(whole, values)
