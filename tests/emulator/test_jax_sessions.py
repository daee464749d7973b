"""Several clients at once, in processes of their own: each has its arrays, and none can hurt another."""

from __future__ import annotations

import signal
import subprocess
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

Devices = list[jax.Device]

CLIENT = """
import sys
import pathways_runtime
pathways_runtime.initialize()
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
seed = int(sys.argv[1])
x = jax.device_put(np.arange(8.0, dtype=np.float32) + seed, NamedSharding(Mesh(np.array(jax.devices()), "x"), P("x")))
step = jax.jit(lambda x: jnp.sin(x) + x.sum() / 8)
"""
FINISHES = """
for _ in range(100):
    x = step(x)
print(np.asarray(x).tobytes().hex())
"""
NEVER_FINISHES = """
while True:
    x = step(x)
    np.asarray(x)
    print("still here", flush=True)
"""


def start_client(emulator: Any, body: str, seed: int) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", CLIENT + body, str(seed)],
        env=emulator.client_environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def on_plain_cpu(seed: int, device: jax.Device) -> np.ndarray:
    x = jax.device_put(np.arange(8.0, dtype=np.float32) + seed, device)
    for _ in range(100):
        x = jnp.sin(x) + x.sum() / 8
    return np.asarray(x)


def test_clients_at_once_get_their_own_results(emulator: Any, devices: Devices, cpu_devices: Devices) -> None:
    clients = [start_client(emulator, FINISHES, seed) for seed in range(3)]
    for seed, client in enumerate(clients):
        output, errors = client.communicate(timeout=60)
        assert client.returncode == 0, errors
        result = np.frombuffer(bytes.fromhex(output), np.float32)
        np.testing.assert_allclose(result, on_plain_cpu(seed, cpu_devices[0]), rtol=1e-4)


def test_a_client_that_is_killed_at_work_hurts_nobody(emulator: Any, devices: Devices) -> None:
    mine = jax.device_put(np.arange(4, dtype=np.int32), devices[0])
    with start_client(emulator, NEVER_FINISHES, 0) as client:
        assert client.stdout is not None
        assert client.stdout.readline() == "still here\n"
        client.send_signal(signal.SIGKILL)
    assert int(jax.jit(lambda x: x.sum())(mine)) == 6
    with start_client(emulator, FINISHES, 1) as next_client:
        _, errors = next_client.communicate(timeout=60)
    assert next_client.returncode == 0, errors
