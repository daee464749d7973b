"""A slice is lost under a JAX client, and comes back: real processes throughout."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

StartEmulator = Callable[..., Any]
Spawn = Callable[..., Any]
TIMEOUT_S = 60.0

# Reads a word from stdin, does what it says, and answers with one line.
CLIENT = """
import sys
import pathways_runtime
pathways_runtime.initialize()
import jax, jax.numpy as jnp

first, last = jax.devices()[0], jax.devices()[-1]
kept = {"first": jax.device_put(jnp.arange(8.0), first), "last": jax.device_put(jnp.arange(8.0), last)}
step = jax.jit(lambda x: (x + 1).sum())

def attempt(word):
    if word == "devices":
        return f"{len(jax.devices())} devices on slices {sorted({d.slice_index for d in jax.devices()})}"
    if word == "anew":
        return float(step(jax.device_put(jnp.arange(8.0), last)))
    return float(step(kept[word]))

for line in sys.stdin:
    try:
        print(attempt(line.strip()), flush=True)
    except jax.errors.JaxRuntimeError as error:
        print(str(error).splitlines()[0], flush=True)
"""


class Client:
    """The script above, asked word by word."""

    def __init__(self, target: str, environment: dict[str, str], folder: Path) -> None:
        script = folder / "client.py"
        script.write_text(CLIENT)
        self.process = subprocess.Popen(
            [sys.executable, str(script)],
            env=environment | {"JAX_BACKEND_TARGET": target},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )

    def ask(self, word: str) -> str:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(word + "\n")
        self.process.stdin.flush()
        return self.process.stdout.readline().strip()


@pytest.fixture
def connect(tmp_path: Path) -> Iterator[Callable[[Any], Client]]:
    clients: list[Client] = []

    def start(emulator: Any) -> Client:
        clients.append(Client(emulator.target, emulator.client_environment, tmp_path))
        return clients[-1]

    yield start
    for client in clients:
        client.process.communicate(timeout=TIMEOUT_S)


def workers_of(emulator: Any) -> dict[tuple[int, int], psutil.Process]:
    """The worker process of each (slice, host), as the log names them."""
    found = re.findall(r"slice (\d+) host (\d+) is process (\d+)", emulator.log.read_text())
    return {(int(index), int(host)): psutil.Process(int(pid)) for index, host, pid in found}


def wait_for_line(emulator: Any, text: str, count: int) -> None:
    """Until the emulator's log has `count` lines with this text; follows it with `tail`, which sleeps in the kernel."""
    tail = subprocess.Popen(["tail", "-n", "+1", "-f", str(emulator.log)], stdout=subprocess.PIPE, text=True)
    assert tail.stdout is not None
    try:
        for line in tail.stdout:
            count -= text in line
            if count == 0:
                return
    finally:
        tail.kill()
        tail.communicate()


def test_a_killed_worker_is_data_loss_on_its_slice_only_until_it_is_back(
    start_emulator: StartEmulator, connect: Callable[[Any], Client]
) -> None:
    emulator = start_emulator("--instance_type=tpuv6e:2x4", "--instance_count=2")
    client = connect(emulator)
    assert client.ask("devices") == "16 devices on slices [0, 1]"
    assert client.ask("last") == client.ask("first") == "36.0"

    workers_of(emulator)[1, 0].kill()
    wait_for_line(emulator, "slice 1 is down: host 0 is lost", 1)
    assert client.ask("last").startswith("DATA_LOSS")
    assert client.ask("first") == "36.0"

    wait_for_line(emulator, "*** 2/2 Pathways Slices Now Ready ***", 2)
    assert client.ask("anew") == "36.0"
    assert client.ask("last").startswith("DATA_LOSS"), "what was lost stays lost"


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_an_emulator_that_ends_leaves_no_process_behind(start_emulator: StartEmulator, number: signal.Signals) -> None:
    emulator = start_emulator("--instance_type=tpuv6e:2x4", "--instance_count=2")
    wait_for_line(emulator, "and registered", 4)
    workers = [*workers_of(emulator).values(), *psutil.Process(emulator.process.pid).children()]
    assert len(workers) == 5, "four hosts and what starts them"
    workers[0].suspend()  # one that cannot notice by itself
    emulator.process.send_signal(number)
    code = emulator.process.wait(TIMEOUT_S)
    assert code == (-number if number == signal.SIGKILL else 128 + number)
    _, alive = psutil.wait_procs(workers, timeout=TIMEOUT_S)
    assert not alive
    assert "starting it again" not in emulator.log.read_text()


def test_the_two_lines_on_stdout_are_all_that_a_client_needs(spawn: Spawn) -> None:
    emulator = spawn("pathways_runtime.emulator", "--server_port=0", "--instance_type=tpuv6e:1x1", "--instance_count=1")
    stdout = [line for line in emulator.log.read_text().splitlines() if line.startswith("JAX_")]
    assert stdout == ["JAX_PLATFORMS=proxy", f"JAX_BACKEND_TARGET=grpc://127.0.0.1:{emulator.port}"]


def test_a_client_that_comes_before_the_workers_waits_for_them(
    spawn: Spawn, connect: Callable[[Any], Client], emulator: Any
) -> None:
    manager = spawn(
        "pathways_runtime.emulator",
        "--server_port=0",
        "--node_type=resource_manager",
        "--instance_type=tpuv6e:2x2",
        "--instance_count=1",
    )
    address = f"--resource_manager_address=127.0.0.1:{manager.port}"
    proxy = spawn("pathways_runtime.emulator", "--server_port=0", address)
    client = Client(f"grpc://127.0.0.1:{proxy.port}", emulator.client_environment, proxy.log.parent)
    spawn(
        "pathways_runtime.emulator.worker",
        address,
        environment={"MEGASCALE_SLICE_ID": "0", "JOB_COMPLETION_INDEX": "0"},
    )
    assert client.ask("last") == "36.0"
    client.process.communicate(timeout=TIMEOUT_S)
    proxy.process.send_signal(signal.SIGTERM)
    assert proxy.process.wait(TIMEOUT_S) == 128 + signal.SIGTERM


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        (["--instance_type=tpuv6e:2x3"], "'tpuv6e:2x3' is unknown"),
        (["--node_type=resource_manager", "--instance_count=2"], "needs --instance_type"),
        (["--node_type=manager"], "invalid choice: 'manager'"),
        (["--node_type=resource_manager", "--resource_manager_address=a:1"], "contradict each other"),
        (["--resource_manager_address=a:1", "--instance_count=2"], "a proxy asks the resource manager"),
        (["--instance_count=0"], "'0' is not a whole number from 1"),
        (["--num_elastic_slices=3"], "there are 2 slices"),
        (["--virtual_slices=tpuv6e:4x4"], "'tpuv6e:4x4' is not what the slices are"),
        (["--host=0.0.0.0"], "a --token_file is needed"),
        (["--xla_dmp_to=/tmp/x"], "did you mean --xla_dump_to"),
        (["--xla_cpu_enable_fast_math=maybe"], "does not take the value"),
        (["--instance_tpye=tpuv6e:2x4"], "did you mean --instance_type"),
    ],
)
def test_wrong_flags_are_refused_before_anything_starts(flags: list[str], complaint: str) -> None:
    finished = subprocess.run(
        [sys.executable, "-m", "pathways_runtime.emulator", *flags],
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
        env=os.environ | {"XLA_FLAGS": ""},
    )
    assert (finished.returncode, finished.stdout) == (2, "")
    assert complaint in finished.stderr
    assert "Traceback" not in finished.stderr


def test_xla_flags_take_effect_and_those_for_tpus_are_reported(
    start_emulator: StartEmulator, connect: Callable[[Any], Client], tmp_path: Path
) -> None:
    dump = tmp_path / "a folder"
    emulator = start_emulator(
        "--instance_type=tpuv6e:1x1", "--instance_count=1", f"--xla_dump_to={dump}", "--xla_tpu_scoped_vmem_limit_kib=1"
    )
    assert connect(emulator).ask("first") == "36.0"
    assert [*dump.glob("*jit__lambda*before_optimizations.txt")]
    assert "--xla_tpu_scoped_vmem_limit_kib=1 has no effect" in emulator.log.read_text()
