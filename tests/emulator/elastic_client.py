"""A script for `test_pathwaysutils_elastic.py`: trains with pathwaysutils' elastic manager and Orbax, step by step.

    python elastic_client.py FOLDER

Each line of stdin is a deed: `step` trains a step and saves it, `grow` waits until a slice has come back and asks for
it, `end` ends. Each line of stdout says what has happened. The numbers are whole, so that they are the same on any
number of slices.
"""

from __future__ import annotations

import sys
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pathwaysutils
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from pathwaysutils.elastic import elastic
from pathwaysutils.elastic.manager import Manager, ScaleUpSignalError

POLL_S = 0.05
SHAPE = (16, 8)


def say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


@jax.jit
def train_step(weights: jax.Array, batch: jax.Array) -> jax.Array:
    return weights * 3 + batch.sum(0) + weights.sum(0)


def batch_of(step: int) -> np.ndarray[Any, np.dtype[np.int32]]:
    return np.random.default_rng(step).integers(0, 100, SHAPE, dtype=np.int32)


def restore(checkpoints: ocp.CheckpointManager, sharding: NamedSharding) -> tuple[int, jax.Array]:
    """(how many steps have been trained, the weights after them)."""
    done = checkpoints.latest_step() or 0
    if done == 0:
        return 0, jax.device_put(np.ones(SHAPE, np.int32), sharding)
    wanted = {"weights": jax.ShapeDtypeStruct(SHAPE, jnp.int32, sharding=sharding)}
    return done, checkpoints.restore(done, args=ocp.args.StandardRestore(wanted))["weights"]


def train(manager: Manager, folder: str) -> None:
    active = sorted(manager.active_slice_indices)
    mesh = Mesh(np.array([manager.slice_to_devices[index] for index in active]), ("slice", "chip"))
    with ocp.CheckpointManager(folder) as checkpoints:
        done, weights = restore(checkpoints, NamedSharding(mesh, P("chip")))
        say(f"slices {active} from step {done}")
        for line in sys.stdin:
            if line == "end\n":
                break
            if line == "grow\n":
                while not manager.available_inactive_slices:
                    time.sleep(POLL_S)
                raise ScaleUpSignalError
            weights = train_step(weights, jax.device_put(batch_of(done), NamedSharding(mesh, P(("slice", "chip")))))
            done += 1
            checkpoints.save(done, args=ocp.args.StandardSave({"weights": weights}))
            checkpoints.wait_until_finished()
            say(f"step {done}")
        say(" ".join(str(number) for number in np.asarray(weights).ravel()))


def on_event() -> None:
    try:
        elastic.wait_for_slices(poll_interval=POLL_S, timeout=POLL_S)
    except TimeoutError:
        say("not all slices are there")
    else:
        say("all slices are there")


def main(folder: str) -> None:
    pathwaysutils.initialize()
    manager = Manager()
    retry = manager.elastic_retry(minimum_slice_count=1, poll_interval=POLL_S, on_elastic_event_callback=on_event)
    retry(train)(manager, folder)
    manager.close()


if __name__ == "__main__":
    main(sys.argv[1])
