"""jax.experimental.colocated_python as it is: the client's code in processes of its own, beside the hosts."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import psutil
import pytest
from jax.experimental import colocated_python as colocated
from jax.extend.ifrt_programs import ifrt_programs
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

Devices = list[jax.Device]
Follow = Callable[[Any, str], str]
TIMEOUT_S = 60.0


def on(devices: Devices) -> jax.Array:
    """0, 1, 2... one number on the CPU device beside each of these."""
    mesh = colocated.colocated_cpu_devices(Mesh(np.array(devices), ("chip",)))
    array: jax.Array = jax.device_put(np.arange(len(devices), dtype=np.int32), NamedSharding(mesh, P("chip")))
    return array


def sidecars_of(emulator: Any) -> list[psutil.Process]:
    children = psutil.Process(emulator.process.pid).children()
    return [child for child in children if "pathways_runtime.emulator.sidecar" in child.cmdline()]


def test_results_stay_on_the_devices_that_they_were_computed_on(devices: Devices) -> None:
    @colocated.colocated_python
    def double(tree: Any) -> Any:
        return jax.tree.map(lambda x: x * 2, tree)

    x = on(devices)
    for _ in range(3):
        found = double({"a": [x, x + 1]})
    assert [array.sharding for array in found["a"]] == [x.sharding] * 2
    assert np.array_equal(found["a"][1], (np.arange(8) + 1) * 2)


def test_the_code_runs_in_a_process_that_has_the_devices_of_its_hosts(devices: Devices, emulator: Any) -> None:
    @colocated.colocated_python
    def look(x: jax.Array) -> Any:
        seen = [os.getpid(), len(jax.devices()), jax.devices()[0].id]
        return jax.device_put(jnp.array(seen, jnp.int32), x.addressable_shards[0].device)

    pids = set()
    for hosts_devices in (devices[:4], devices[4:]):
        x = on(hosts_devices)
        pid, count, first = (int(value) for value in look(x))
        assert (count, first) == (4, x.addressable_shards[0].device.id)
        pids.add(pid)
    assert len(pids) == 2 and pids <= {process.pid for process in sidecars_of(emulator)}


def test_what_the_code_raises_reaches_the_client(devices: Devices) -> None:
    @colocated.colocated_python
    def fail(x: jax.Array) -> jax.Array:
        raise LookupError(f"no such shard: {x.shape}")

    with pytest.raises(jax.errors.JaxRuntimeError, match=r"LookupError: no such shard: \(4,\)\n[^$]*in fail"):
        fail(on(devices[:4]))


def test_an_object_keeps_its_state_on_its_hosts(devices: Devices) -> None:
    @colocated.colocated_python_class
    class Counter:
        def __init__(self, start: int) -> None:
            self.count = start

        def add(self, x: jax.Array) -> jax.Array:
            self.count += 1
            return x + self.count

    first, second, x = Counter(10), Counter(20), on(devices[:4])
    results = [first.add(x) for _ in range(4)]
    assert [int(result[0]) for result in results] == [11, 12, 13, 14]
    assert int(second.add(x)[0]) == 21


def test_code_that_donates_its_arguments_leaves_those_of_the_client(devices: Devices) -> None:
    @colocated.colocated_python
    def use_up(x: jax.Array) -> Any:
        return jax.jit(lambda y: y + 1, donate_argnums=0)(x)

    x = on(devices[:4])
    assert all(np.array_equal(use_up(x), np.arange(4) + 1) for _ in range(3))
    assert np.array_equal(x, np.arange(4))


def test_colocated_python_calls_no_colocated_python(devices: Devices) -> None:
    @colocated.colocated_python
    def call(x: jax.Array) -> Any:
        return colocated.colocated_python(lambda y: y)(x)

    with pytest.raises(jax.errors.JaxRuntimeError, match=r"PERMISSION_DENIED: colocated Python cannot call"):
        call(on(devices[:4]))


def test_a_function_that_says_what_it_returns_is_not_waited_for(devices: Devices, tmp_path: Path) -> None:
    gate = str(tmp_path / "gate")

    @colocated.colocated_python
    def wait(x: jax.Array) -> jax.Array:
        with open(gate) as file:  # a pipe: blocks until somebody writes
            return x + len(file.read())

    os.mkfifo(gate)
    result = wait.specialize(out_specs_fn=lambda spec: spec)(on(devices[:4]))
    assert not result.is_ready()
    Path(gate).write_text("abc")
    assert np.array_equal(result, np.arange(4) + 3)


def test_a_result_that_is_not_as_promised_is_an_error(devices: Devices) -> None:
    @colocated.colocated_python
    def cut(x: jax.Array) -> Any:
        return x.addressable_shards[0].data

    with pytest.raises(jax.errors.JaxRuntimeError, match=r"INVALID_ARGUMENT.*returned int32\[1\].*not int32\[4\]"):
        cut.specialize(out_specs_fn=lambda spec: spec)(on(devices[:4])).block_until_ready()


def test_a_crash_is_an_error_of_that_host_alone(devices: Devices) -> None:
    @colocated.colocated_python_class
    class Fragile:
        def __init__(self) -> None:
            self.calls = 0

        def call(self, x: jax.Array) -> jax.Array:
            self.calls += 1
            return x + self.calls

        def crash(self, x: jax.Array) -> None:
            os.abort()

    left, right = Fragile(), Fragile()
    x, y = on(devices[:4]), on(devices[4:])
    assert int(left.call(x)[0]) == int(right.call(y)[0]) == 1
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"INTERNAL: colocated Python on host 1.*ended with SIGABRT"):
        right.crash(y)
    assert int(left.call(x)[0]) == 2
    assert int(right.call(y)[0]) == 1, "a new process, without the state"


def test_bytes_that_are_no_code_are_refused(devices: Devices) -> None:
    [device] = colocated.colocated_cpu_devices(devices[:1])
    device_list = on(devices[:1]).sharding._internal_device_list
    program = ifrt_programs.make_colocated_python_program("garbage", b"\x80garbage", device_list, [], [])
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"UNKNOWN: .*the client must have the same: .*pickle"):
        device.client.compile_ifrt_program(program, ifrt_programs.make_colocated_python_compile_options())


# Calls a function that never returns, on the second slice of two, prints what came of it, and stays.
STUCK = """
import sys
import pathways_runtime
pathways_runtime.initialize()
import jax, numpy as np
from jax.experimental import colocated_python as colocated

@colocated.colocated_python
def wait(x):
    import threading
    print("it waits", file=sys.stderr, flush=True)
    threading.Event().wait()

x = jax.device_put(np.int32(1), colocated.colocated_cpu_devices(jax.devices()[-1:])[0])
try:
    wait.specialize(out_specs_fn=lambda spec: spec)(x).block_until_ready()
except jax.errors.JaxRuntimeError as error:
    print(error, flush=True)
sys.stdin.read()
"""


@pytest.fixture
def start_stuck(follow: Follow) -> Iterator[Callable[[Any], subprocess.Popen[str]]]:
    """Starts a client of an emulator, and returns when its colocated code has begun to wait for ever."""
    clients: list[subprocess.Popen[str]] = []

    def start(emulator: Any) -> subprocess.Popen[str]:
        client = subprocess.Popen(
            [sys.executable, "-c", STUCK],
            env=emulator.client_environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        clients.append(client)
        follow(emulator, "it waits")
        return client

    yield start
    for client in clients:
        client.kill()
        client.communicate()


def test_code_that_runs_on_a_slice_that_is_lost_ends_with_it(
    start_emulator: Callable[..., Any], start_stuck: Callable[[Any], subprocess.Popen[str]], follow: Follow
) -> None:
    emulator = start_emulator("--instance_type=tpuv6e:1x1", "--instance_count=2")
    client = start_stuck(emulator)
    [sidecar] = sidecars_of(emulator)
    worker = follow(emulator, "slice 1 host 0 is process ")
    psutil.Process(int(worker.split(",")[0])).kill()
    assert client.stdout is not None
    assert client.stdout.readline().startswith("DATA_LOSS: slice 1 is down")
    assert psutil.wait_procs([sidecar], timeout=TIMEOUT_S) == ([sidecar], [])


def test_code_ends_with_its_client(emulator: Any, start_stuck: Callable[[Any], subprocess.Popen[str]]) -> None:
    others = sidecars_of(emulator)
    client = start_stuck(emulator)
    [sidecar] = [process for process in sidecars_of(emulator) if process not in others]
    client.kill()
    assert psutil.wait_procs([sidecar], timeout=TIMEOUT_S) == ([sidecar], [])
