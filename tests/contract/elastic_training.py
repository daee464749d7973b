"""Trains on all slices and lives through the loss of any: `python elastic_training.py STEPS SNAPSHOT_EVERY`.

The smallest elastic loop there is: a snapshot on the host every few steps; on DATA_LOSS it waits for the slices, puts
the snapshot back and goes on from there. A step's batch follows from the step's number, so what it ends with does not
depend on how often it had to go back. Prints each step, each loss, and a digest of every bit of the final state.
"""

from __future__ import annotations

import hashlib
import sys
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import pathways_runtime

WIDTH, ROWS = 64, 64
POLL_S = 0.05
State = dict[str, Any]


def main(steps: int, snapshot_every: int) -> None:
    pathways_runtime.initialize()
    num_slices = len({device.slice_index for device in jax.devices()})
    mesh = Mesh(np.array(jax.devices()).reshape(num_slices, -1), ("slice", "chip"))
    over_all = NamedSharding(mesh, PartitionSpec(("slice", "chip")))
    within_slice = NamedSharding(mesh, PartitionSpec("chip"))
    train_step = jax.jit(step_of, donate_argnums=0, out_shardings=(within_slice, None))
    snapshot, reached = first_state(), 0
    while reached < steps:
        try:
            state = jax.device_put(snapshot, within_slice)
            print(f"restored to step {reached}", flush=True)
            for step in range(reached, steps):
                state, loss = train_step(state, jax.device_put(batch(step), over_all))
                print(f"step {step} loss {float(loss):.6f}", flush=True)
                if (step + 1) % snapshot_every == 0 or step + 1 == steps:
                    snapshot, reached = jax.device_get(state), step + 1
        except jax.errors.JaxRuntimeError as error:
            if not is_loss(error):
                raise
            print("lost a slice", flush=True)
            wait_for_slices(mesh)
    print(f"digest {digest(snapshot)}", flush=True)


def first_state() -> State:
    random = np.random.default_rng(0)
    weights = {name: random.normal(0, 0.1, (WIDTH, WIDTH)).astype(np.float32) for name in ("first", "second")}
    return {"weights": weights, "momentum": {name: np.zeros_like(value) for name, value in weights.items()}}


def batch(step: int) -> np.ndarray:
    return np.random.default_rng(step).normal(size=(ROWS, WIDTH)).astype(np.float32)


def step_of(state: State, rows: jax.Array) -> tuple[State, jax.Array]:
    def loss_of(weights: dict[str, jax.Array]) -> jax.Array:
        return jnp.mean((jnp.tanh(rows @ weights["first"]) @ weights["second"] - jnp.sin(rows)) ** 2)

    loss, gradients = jax.value_and_grad(loss_of)(state["weights"])
    momentum = jax.tree.map(lambda m, g: 0.9 * m + g, state["momentum"], gradients)
    weights = jax.tree.map(lambda w, m: w - 0.1 * m, state["weights"], momentum)
    return {"weights": weights, "momentum": momentum}, loss


def wait_for_slices(mesh: Mesh) -> None:
    """Returns once every device computes; a client learns that only by trying."""
    for device in mesh.devices.flat:
        while True:
            try:
                jax.device_put(np.float32(1), device).block_until_ready()
                break
            except jax.errors.JaxRuntimeError as error:
                if not is_loss(error):
                    raise
                time.sleep(POLL_S)


def is_loss(error: Exception) -> bool:
    return str(error).startswith("DATA_LOSS")


def digest(snapshot: State) -> str:
    return hashlib.sha256(b"".join(leaf.tobytes() for leaf in jax.tree.leaves(snapshot))).hexdigest()


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
