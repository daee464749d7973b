"""A script for `test_orbax.py`: saves and restores with Orbax as a training script does, on whatever JAX runs on.

    python orbax_client.py FOLDER DEED...

Its deeds: `save=STEP` saves in the background; `die=STEP` saves, and ends by SIGKILL when all is written and nothing
committed; `restore` brings back the newest step in several ways. The last line of stdout is JSON about that.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
import pathwaysutils
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

DTYPES = ("bfloat16", *("float32", "float64", *(f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64))))
Tree = dict[str, Any]


def state_of(step: int) -> Tree:
    """What a training run has after so many steps: random bits of each dtype that Pathways can write, and a scalar."""
    random = np.random.default_rng(step)
    dtypes = [jax.numpy.dtype(name) for name in DTYPES]
    return {
        "parameters": {str(t): np.frombuffer(random.bytes(16 * 8 * t.itemsize), t).reshape(16, 8) for t in dtypes},
        "zeros": np.zeros((4, 4), np.float32),
        "step": np.array(step, np.int32),
    }


def shardings_of(state: Tree, mesh: Mesh, spec: P) -> Tree:
    """Matrices are cut as `spec` says, and scalars are whole everywhere."""
    shardings: Tree = jax.tree.map(lambda value: NamedSharding(mesh, spec if np.ndim(value) else P()), state)
    return shardings


def manager_of(folder: str, barrier: Callable[..., None] | None = None) -> ocp.CheckpointManager:
    options = ocp.CheckpointManagerOptions(async_options=ocp.AsyncOptions(barrier_sync_fn=barrier))
    # Without OCDBT, as MaxText does on Pathways: plain CPU then writes the same kind of file.
    handler = ocp.PyTreeCheckpointHandler(use_ocdbt=False)
    return ocp.CheckpointManager(folder, options=options, item_handlers=handler)


def save(manager: ocp.CheckpointManager, step: int) -> None:
    state = state_of(step)
    mesh = Mesh(np.array(jax.devices()).reshape(2, 4), ("slice", "chip"))
    arrays = jax.tree.map(jax.device_put, state, shardings_of(state, mesh, P("slice", "chip")))
    manager.save(step, args=ocp.args.PyTreeSave(arrays))
    # The next step of a training run takes the memory of the one before.
    jax.jit(lambda tree: jax.tree.map(lambda x: x * 0, tree), donate_argnums=0)(arrays)


def restore(manager: ocp.CheckpointManager) -> dict[str, Any]:
    step = manager.latest_step()
    assert step is not None
    expected = state_of(step)
    devices = jax.devices()
    both, one = np.array(devices).reshape(2, 4), np.array(devices[:4]).reshape(2, 2)
    ways = {
        "as it was": (both, P("slice", "chip")),
        "another sharding": (both, P(None, "slice")),
        "replicated": (both, P()),
        "one slice": (one, P("chip", "slice")),
    }
    differing = []
    for way, (places, spec) in ways.items():
        shardings = shardings_of(expected, Mesh(places, ("slice", "chip")), spec)
        wanted = jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), expected, shardings)
        arguments = ocp.checkpoint_utils.construct_restore_args(wanted)
        arrays = manager.restore(step, args=ocp.args.PyTreeRestore(wanted, restore_args=arguments))
        if not jax.tree.all(jax.tree.map(is_same, arrays, expected, shardings)):
            differing.append(way)
    return {"step": step, "all_steps": manager.all_steps(), "differing": differing, "ways": len(ways)}


def is_same(array: jax.Array, expected: Any, sharding: NamedSharding) -> bool:
    same_type = (array.dtype, array.shape, array.sharding) == (expected.dtype, expected.shape, sharding)
    return same_type and np.asarray(array).tobytes() == expected.tobytes()


def die(**_: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def main(folder: str, deeds: Sequence[str]) -> None:
    jax.config.update("jax_enable_x64", True)
    jax.config.update("jax_num_cpu_devices", 8)
    pathwaysutils.initialize()
    answer: Tree = {"handler": type(ocp.type_handlers.get_type_handler(jax.Array)).__name__}
    for deed in deeds:
        verb, _, step = deed.partition("=")
        with manager_of(folder, die if verb == "die" else None) as manager:
            if step:
                save(manager, int(step))
            else:
                manager.wait_until_finished()
                answer |= restore(manager)
    sys.stdout.write(json.dumps(answer) + "\n")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
