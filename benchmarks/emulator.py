"""What the emulator costs: training steps, small calls, compiles and transfers through it, against plain CPU.

    python benchmarks/emulator.py [ROUNDS]

Both sides have eight devices, each in a process of its own, and take turns for every figure, so that a busy machine
slows both; ratios are of medians. On plain CPU a result is in the caller's memory already, which the transfers show.
"""

from __future__ import annotations

import contextlib
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from pathways_runtime import _contract

ROUNDS = 3
SECONDS = 0.4  # for each figure in each round
# Plain CPU deadlocks where more multi-device programs are in flight than it has threads for.
STEPS_IN_FLIGHT = 10
MIB_64 = 64 << 20
EMULATOR = ("--instance_type=tpuv6e:2x2", "--instance_count=2", "--server_port=0")

Run = Callable[[], float]  # does some of the work and returns the seconds that it took


class Figure(NamedTuple):
    """What is counted, how much of it one run does, and what makes the run once jax has its devices."""

    unit: str
    amount: float
    prepare: Callable[[], Run]


def seconds(work: Callable[[], object]) -> float:
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


def mesh() -> Any:
    import jax
    import numpy as np

    return jax.sharding.Mesh(np.array(jax.devices()).reshape(2, 4), ("slice", "fsdp"))


def put(shape: tuple[int, ...], *spec: Any) -> Any:
    """An array of noise, divided over the mesh."""
    import jax
    import numpy as np

    values = np.random.default_rng(0).normal(size=shape).astype(np.float32)
    return jax.device_put(values, jax.sharding.NamedSharding(mesh(), jax.sharding.PartitionSpec(*spec)))


def training(layers: int, width: int, batch_size: int) -> Callable[[], Run]:
    """Steps of a perceptron: FSDP within a slice, data-parallel over slices, donated state."""

    def prepare() -> Run:
        import jax
        import jax.numpy as jnp

        def loss_of(params: Any, x: Any) -> Any:
            for weight, bias in params:
                x = jnp.tanh(x @ weight + bias)
            return (x**2).mean()

        def step(params: Any, x: Any) -> Any:
            loss, gradients = jax.value_and_grad(loss_of)(params, x)
            return jax.tree.map(lambda p, g: p - 0.01 * g, params, gradients), loss

        compiled = jax.jit(step, donate_argnums=0)
        state = [[put((width, width), "fsdp"), put((width,), "fsdp")] for _ in range(layers)]
        x = put((batch_size, width), ("slice", "fsdp"))

        def run() -> None:
            nonlocal state
            for _ in range(STEPS_IN_FLIGHT):
                state, loss = compiled(state, x)
            float(loss)

        return lambda: seconds(run)

    return prepare


def calls(sharded: bool, blocking: bool) -> Callable[[], Run]:
    """Calls of a small program, each on the result of the one before."""

    def prepare() -> Run:
        import jax
        import numpy as np

        step = jax.jit(lambda x: x * 2 + 1)
        start = put((8, 8), ("slice", "fsdp")) if sharded else jax.device_put(np.ones((8, 8), np.float32))

        def run() -> None:
            x = start
            for _ in range(STEPS_IN_FLIGHT):
                x = step(x)
                if blocking:
                    x.block_until_ready()
            x.block_until_ready()

        return lambda: seconds(run)

    return prepare


def compiles() -> Run:
    import jax
    import numpy as np

    numbers = iter(range(1 << 30))

    def run() -> float:
        number = next(numbers)  # a program that nobody has compiled yet
        return seconds(lambda: jax.jit(lambda x: x + number).lower(np.float32(0)).compile())

    return run


def upload() -> Run:
    import jax
    import numpy as np

    values = np.ones(MIB_64, np.uint8)
    return lambda: seconds(lambda: jax.device_put(values, jax.devices()[0]).block_until_ready())


def download() -> Run:
    import jax
    import numpy as np

    add = jax.jit(lambda x: x + np.uint8(1))
    values = jax.device_put(np.ones(MIB_64, np.uint8), jax.devices()[0])

    def run() -> float:
        fresh = add(values).block_until_ready()  # an array keeps what was once fetched of it
        return seconds(lambda: np.array(fresh))

    return run


def many_uploads() -> Run:
    import jax
    import numpy as np

    values = [np.full(8, number, np.float32) for number in range(1000)]
    sharding = jax.sharding.NamedSharding(mesh(), jax.sharding.PartitionSpec(("slice", "fsdp")))
    return lambda: seconds(lambda: jax.block_until_ready(jax.device_put(values, sharding)))


def many_downloads() -> Run:
    import jax
    import numpy as np

    values = [np.full(8, number, np.float32) for number in range(1000)]
    sharding = jax.sharding.NamedSharding(mesh(), jax.sharding.PartitionSpec(("slice", "fsdp")))

    def run() -> float:
        arrays = jax.block_until_ready(jax.device_put(values, sharding))
        return seconds(lambda: jax.device_get(arrays))

    return run


def round_trip() -> Run:
    import jax
    import numpy as np

    return lambda: seconds(lambda: float(jax.device_put(np.float32(1), jax.devices()[0])))


FIGURES: dict[str, Figure] = {
    "training step, 2 layers of 64": Figure("steps/s", STEPS_IN_FLIGHT, training(2, 64, 64)),
    "training step, 100 layers (200 parameters)": Figure("steps/s", STEPS_IN_FLIGHT, training(100, 64, 64)),
    "training step, 4 layers of 512": Figure("steps/s", STEPS_IN_FLIGHT, training(4, 512, 256)),
    "small program, 1 device": Figure("calls/s", STEPS_IN_FLIGHT, calls(sharded=False, blocking=False)),
    "small program, 1 device, waiting for each": Figure(
        "calls/s", STEPS_IN_FLIGHT, calls(sharded=False, blocking=True)
    ),
    "small program, 8 devices": Figure("calls/s", STEPS_IN_FLIGHT, calls(sharded=True, blocking=False)),
    "small program, 8 devices, waiting for each": Figure(
        "calls/s", STEPS_IN_FLIGHT, calls(sharded=True, blocking=True)
    ),
    "trivial compile": Figure("compiles/s", 1, compiles),
    "64 MiB, host to device": Figure("MB/s", MIB_64 / 1e6, upload),
    "64 MiB, device to host": Figure("MB/s", MIB_64 / 1e6, download),
    "scalar there and back": Figure("trips/s", 1, round_trip),
    "1000 arrays of 8 shards, host to device": Figure("arrays/s", 1000, many_uploads),
    "1000 arrays of 8 shards, device to host": Figure("arrays/s", 1000, many_downloads),
}


def serve() -> None:
    """The measured side: for each name of a figure on stdin, one rate on stdout."""
    import pathways_runtime

    if os.environ[_contract.JAX_PLATFORMS] != "cpu":
        pathways_runtime.initialize()
    runs: dict[str, Run] = {}
    for line in sys.stdin:
        name = line.strip()
        if name not in runs:
            runs[name] = FIGURES[name].prepare()
            runs[name]()
        print(rate(runs[name], FIGURES[name].amount), flush=True)


def rate(run: Run, amount: float) -> float:
    done = spent = 0.0
    end = time.perf_counter() + SECONDS
    while not spent or time.perf_counter() < end:
        spent += run()
        done += amount
    return done / spent


@contextlib.contextmanager
def emulator() -> Iterator[str]:
    """The address of a running emulator."""
    reader, writer = os.pipe()
    with open(reader) as ready:
        command = [sys.executable, "-m", "pathways_runtime.emulator", *EMULATOR]
        environ = os.environ | {_contract.READY_FD: str(writer)}
        quiet = subprocess.DEVNULL
        process = subprocess.Popen(command, env=environ, pass_fds=[writer], stdout=quiet, stderr=quiet)
        os.close(writer)
        line = ready.readline()
    try:
        yield f"grpc://127.0.0.1:{json.loads(line)['port']}"
    finally:
        process.terminate()
        process.wait()


@contextlib.contextmanager
def side(**variables: str) -> Iterator[Callable[[str], float]]:
    """Measures a figure in a process with these variables. Raises RuntimeError if that process dies."""
    command = [sys.executable, __file__, "--serve"]
    environ = os.environ | {"JAX_NUM_CPU_DEVICES": "8", "TF_CPP_MIN_LOG_LEVEL": "3"} | variables
    with subprocess.Popen(command, env=environ, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None

        def measure(name: str) -> float:
            print(name, file=process.stdin, flush=True)
            answer = process.stdout.readline() if process.stdout else ""
            if not answer:
                raise RuntimeError(f"the process of {variables} ended with {process.wait()} at {name!r}")
            return float(answer)

        yield measure
        process.stdin.close()


def main(rounds: int) -> None:
    print(f"{'':44}{'plain CPU':>12}{'emulator':>12}{'ratio':>8}")
    with (
        emulator() as target,
        side(JAX_PLATFORMS="cpu") as on_cpu,
        side(JAX_PLATFORMS="proxy", JAX_BACKEND_TARGET=target) as on_emulator,
    ):
        for name, figure in FIGURES.items():
            pairs = [(on_cpu(name), on_emulator(name)) for _ in range(rounds)]
            cpu, emulated = (statistics.median(column) for column in zip(*pairs, strict=True))
            print(f"{name:44}{cpu:12,.0f}{emulated:12,.0f}{emulated / cpu:8.2f}  {figure.unit}", flush=True)


if __name__ == "__main__":
    if sys.argv[1:] == ["--serve"]:
        serve()
    else:
        main(int(sys.argv[1]) if len(sys.argv) > 1 else ROUNDS)
