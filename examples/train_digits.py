"""Train a small classifier on scikit-learn's handwritten digits, with every device that JAX sees.

Each batch is split over all devices. Parameters are split over the devices of a slice (FSDP) and repeated in every
slice, so that between slices only gradients travel. The same file runs on plain CPU, on emulated slices and on GKE:

    python examples/train_digits.py
    pw job submit --name digits --compute-type v6e-8 --num-slices 2 --command "python examples/train_digits.py"
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
import numpy as np
import sklearn.datasets
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import pathways_runtime

Examples = dict[str, np.ndarray]  # on the host
Batch = dict[str, jax.Array]  # on the devices
Params = dict[str, jax.Array]
State = dict[str, Params]
Step = Callable[[State, Batch], tuple[State, jax.Array]]


def main() -> None:
    args = parse_arguments()
    pathways_runtime.initialize()

    mesh = make_mesh()
    kind = jax.devices()[0].device_kind
    print(f"slices x devices: {mesh.shape['slice']} x {mesh.shape['fsdp']} ({kind})", flush=True)
    train, test = load_digits(args.seed)
    over_all_devices = NamedSharding(mesh, PartitionSpec(("slice", "fsdp")))
    state, train_step = make_trainer(mesh, args.hidden_size, args.learning_rate, args.seed)
    order = np.random.default_rng(args.seed)
    test_batch = jax.device_put(pad(test, to_multiple_of=mesh.size), over_all_devices)
    for epoch in range(1, args.epochs + 1):
        losses = []
        for examples in batches(train, args.batch_size, order):
            padded = pad(examples, rows=args.batch_size, to_multiple_of=mesh.size)
            state, loss = train_step(state, jax.device_put(padded, over_all_devices))
            losses.append(loss)
        mean_loss = np.mean(jax.device_get(losses))
        test_accuracy = accuracy(state["params"], test_batch)
        print(f"epoch {epoch}/{args.epochs}  loss {mean_loss:.4f}  test accuracy {test_accuracy:.2%}", flush=True)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch-size", type=int, default=128, help="examples in a step, over all devices")
    parser.add_argument("--hidden-size", type=int, default=256)
    parser.add_argument("--learning-rate", type=float, default=0.1)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    if min(args.epochs, args.batch_size, args.hidden_size) < 1:
        parser.error("--epochs, --batch-size and --hidden-size must be at least 1")
    return args


def make_mesh() -> Mesh:
    """All devices as (slice, fsdp): a row for each slice. Plain CPU has no slices, so it is one."""
    slices: dict[int, list[jax.Device]] = {}
    for device in jax.devices():
        slices.setdefault(getattr(device, "slice_index", 0), []).append(device)
    return Mesh(np.array(list(slices.values())), ("slice", "fsdp"))


def load_digits(seed: int) -> tuple[Examples, Examples]:
    """1437 examples to train on and 360 to test with: images of 8x8 pixels from 0 to 1, and labels from 0 to 9."""
    digits = sklearn.datasets.load_digits()
    images, labels = (digits.data / 16).astype(np.float32), digits.target.astype(np.int32)
    order = np.random.default_rng(seed).permutation(len(labels))
    test, train = np.split(order, [len(labels) // 5 + 1])
    return {"image": images[train], "label": labels[train]}, {"image": images[test], "label": labels[test]}


def batches(examples: Examples, size: int, order: np.random.Generator) -> Iterator[Examples]:
    """One pass over the examples in a new order. The last batch may be smaller."""
    shuffled = order.permutation(len(examples["label"]))
    for start in range(0, len(shuffled), size):
        yield {name: values[shuffled[start : start + size]] for name, values in examples.items()}


def pad(examples: Examples, to_multiple_of: int, rows: int = 0) -> Examples:
    """The examples and rows of weight 0 after them, so that they divide evenly and every batch has one shape."""
    count = len(examples["label"])
    rows = -(-max(rows, count) // to_multiple_of) * to_multiple_of
    weighted = examples | {"weight": np.ones(count, np.float32)}
    return {name: np.pad(v, [(0, rows - count)] + [(0, 0)] * (v.ndim - 1)) for name, v in weighted.items()}


def make_trainer(mesh: Mesh, hidden_size: int, learning_rate: float, seed: int) -> tuple[State, Step]:
    """A fresh state, split as FSDP does, and the step that takes it and a batch to the next state and the loss."""

    def split(leaf: jax.ShapeDtypeStruct) -> NamedSharding:
        divides = leaf.shape[0] % mesh.shape["fsdp"] == 0
        return NamedSharding(mesh, PartitionSpec("fsdp") if divides else PartitionSpec())

    def new_state(key: jax.Array) -> State:
        params = new_params(key, hidden_size)
        return {"params": params, "momentum": jax.tree.map(jnp.zeros_like, params)}

    def step(state: State, batch: Batch) -> tuple[State, jax.Array]:
        loss, gradients = jax.value_and_grad(loss_of)(state["params"], batch)
        momentum = jax.tree.map(lambda m, g: 0.9 * m + g, state["momentum"], gradients)
        params = jax.tree.map(lambda p, m: p - learning_rate * m, state["params"], momentum)
        return {"params": params, "momentum": momentum}, loss

    key = jax.random.key(seed)
    shardings = jax.tree.map(split, jax.eval_shape(new_state, key))
    state = jax.jit(new_state, out_shardings=shardings)(key)
    return state, jax.jit(step, donate_argnums=0, out_shardings=(shardings, None))


def new_params(key: jax.Array, hidden_size: int) -> Params:
    key1, key2 = jax.random.split(key)
    return {
        "w1": jax.random.normal(key1, (64, hidden_size)) * jnp.sqrt(2 / 64),
        "b1": jnp.zeros(hidden_size),
        "w2": jax.random.normal(key2, (hidden_size, 10)) * jnp.sqrt(2 / hidden_size),
        "b2": jnp.zeros(10),
    }


def logits_of(params: Params, images: jax.Array) -> jax.Array:
    hidden = jax.nn.relu(images @ params["w1"] + params["b1"])
    return hidden @ params["w2"] + params["b2"]


def loss_of(params: Params, batch: Batch) -> jax.Array:
    """Mean cross entropy over the rows that count."""
    log_probabilities = jax.nn.log_softmax(logits_of(params, batch["image"]))
    of_label = jnp.take_along_axis(log_probabilities, batch["label"][:, None], axis=1)[:, 0]
    return -jnp.sum(of_label * batch["weight"]) / jnp.sum(batch["weight"])


@jax.jit
def accuracy(params: Params, batch: Batch) -> jax.Array:
    right = logits_of(params, batch["image"]).argmax(axis=1) == batch["label"]
    return jnp.sum(right * batch["weight"]) / jnp.sum(batch["weight"])


if __name__ == "__main__":
    main()
