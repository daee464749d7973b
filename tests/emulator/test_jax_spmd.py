"""Programs over several devices: subsets, permutations, slices, collectives, and shardings in and out."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

Devices = list[jax.Device]
CheckSame = Callable[[Callable[[Devices], Any]], None]

# Places in the list of eight devices (slice 0 is 0 to 3, slice 1 is 4 to 7), in the order of the mesh.
SUBSETS = {
    "all": [0, 1, 2, 3, 4, 5, 6, 7],
    "one slice": [4, 5, 6, 7],
    "across slices": [2, 3, 4, 5],
    "two": [1, 6],
    "permuted": [3, 1, 7, 5],
    "reversed": [7, 6, 5, 4, 3, 2, 1, 0],
    "one": [6],
}


def line(devices: Devices, places: list[int] = SUBSETS["all"]) -> Mesh:
    return Mesh(np.array([devices[place] for place in places]), "x")


def grid(devices: Devices) -> Mesh:
    return Mesh(np.array(devices).reshape(2, 4), ("slice", "chip"))


def put(values: np.ndarray, mesh: Mesh, *spec: Any) -> jax.Array:
    array: jax.Array = jax.device_put(values, NamedSharding(mesh, P(*spec)))
    return array


def matrix(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def test_devices_are_in_two_slices_and_all_local(devices: Devices) -> None:
    assert [device.slice_index for device in devices] == [0] * 4 + [1] * 4
    assert (jax.process_index(), jax.process_count()) == (0, 1)
    assert jax.local_devices() == jax.devices() == devices


@pytest.mark.parametrize("places", SUBSETS.values(), ids=SUBSETS)
def test_a_program_over_some_devices_gives_the_same(check_same: CheckSame, places: list[int]) -> None:
    def program(devices: Devices) -> Any:
        x = put(matrix(0, 8, 8), line(devices, places), "x")
        y = jax.jit(lambda x: (x @ x.T, x.sum(), jnp.sin(x)))(x)
        assert y[2].sharding.device_set == {devices[place] for place in places}
        return y, [shard.data for shard in y[2].addressable_shards]

    check_same(program)


@pytest.mark.parametrize("places", SUBSETS.values(), ids=SUBSETS)
def test_each_shard_of_a_result_is_on_the_device_of_its_place_in_the_mesh(devices: Devices, places: list[int]) -> None:
    result = jax.jit(lambda x: x + 1)(put(np.arange(8, dtype=np.int32), line(devices, places), "x"))
    width = 8 // len(places)
    for number, shard in enumerate(result.addressable_shards):
        assert shard.device == devices[places[number]]
        np.testing.assert_array_equal(np.asarray(shard.data), np.arange(number * width, (number + 1) * width) + 1)


@pytest.mark.parametrize("spec", [P(), P("slice"), P("chip"), P(("slice", "chip")), P("slice", "chip")], ids=str)
def test_outputs_have_the_sharding_that_is_asked_for(check_same: CheckSame, spec: P) -> None:
    def program(devices: Devices) -> Any:
        mesh = grid(devices)
        sharding = NamedSharding(mesh, spec)
        result = jax.jit(lambda a, b: a @ b, out_shardings=sharding)(
            put(matrix(0, 8, 8), mesh, ("slice", "chip")), put(matrix(1, 8, 8), mesh, None, "chip")
        )
        assert result.sharding == sharding
        return result, [shard.data for shard in result.addressable_shards]

    check_same(program)


def test_a_constraint_in_the_middle_of_a_program(check_same: CheckSame) -> None:
    def program(devices: Devices) -> Any:
        mesh = grid(devices)

        def layer(x: jax.Array, w: jax.Array) -> jax.Array:
            return jax.nn.relu(lax.with_sharding_constraint(x @ w, NamedSharding(mesh, P("slice", "chip")))) @ w.T

        return jax.jit(layer)(put(matrix(0, 16, 8), mesh, "slice"), put(matrix(1, 8, 12), mesh, None, "chip"))

    check_same(program)


COLLECTIVES: dict[str, Callable[[jax.Array], jax.Array]] = {
    "psum": lambda x: lax.psum(x, "x"),
    "pmean": lambda x: lax.pmean(x, "x"),
    "pmax": lambda x: lax.pmax(x, "x"),
    "pmin": lambda x: lax.pmin(x, "x"),
    "all_gather": lambda x: lax.all_gather(x, "x", axis=1, tiled=True),
    "psum_scatter": lambda x: lax.psum_scatter(x, "x", scatter_dimension=1, tiled=True),
    "all_to_all": lambda x: lax.all_to_all(x, "x", 1, 0, tiled=True),
    "ring": lambda x: lax.ppermute(x, "x", [(i, (i + 1) % 4) for i in range(4)]),
    "one way": lambda x: lax.ppermute(x, "x", [(0, 2), (1, 3)]),
    "axis_index": lambda x: x + lax.axis_index("x"),
    "psum twice": lambda x: lax.psum(jnp.sin(lax.psum(x, "x")), "x"),
}


@pytest.mark.parametrize("places", [[0, 1, 2, 3], [3, 6, 1, 4]], ids=["in a slice", "across slices"])
@pytest.mark.parametrize("name", COLLECTIVES)
def test_a_collective_gives_the_same(check_same: CheckSame, name: str, places: list[int]) -> None:
    def program(devices: Devices) -> Any:
        mesh = line(devices, places)
        function = jax.shard_map(COLLECTIVES[name], mesh=mesh, in_specs=P("x"), out_specs=P("x"), check_vma=False)
        return jax.jit(function)(put(matrix(0, 8, 8), mesh, "x"))

    check_same(program)


def test_collectives_over_one_axis_and_over_both(check_same: CheckSame) -> None:
    def program(devices: Devices) -> Any:
        mesh = grid(devices)

        def body(x: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
            return lax.psum(x, "slice"), lax.psum(x, "chip"), lax.psum(x, ("slice", "chip"))

        function = jax.shard_map(
            body, mesh=mesh, in_specs=P("slice", "chip"), out_specs=(P(None, "chip"), P("slice"), P())
        )
        return jax.jit(function)(put(matrix(0, 4, 8), mesh, "slice", "chip"))

    check_same(program)


def test_the_gradient_of_a_shard_map(check_same: CheckSame) -> None:
    def program(devices: Devices) -> Any:
        mesh = line(devices)
        mapped = jax.shard_map(
            lambda x: lax.psum((jnp.sin(x) ** 2).sum(), "x"), mesh=mesh, in_specs=P("x"), out_specs=P()
        )
        return jax.jit(jax.grad(mapped))(put(matrix(0, 16), mesh, "x"))

    check_same(program)


def test_pmap_gives_the_same(check_same: CheckSame) -> None:
    def program(devices: Devices) -> Any:
        normalise = jax.pmap(lambda x: x / lax.psum(x, "i"), "i", devices=devices)
        return normalise(normalise(np.arange(1, 17, dtype=np.float32).reshape(8, 2)))

    check_same(program)


def test_make_mesh_takes_the_devices_of_a_slice(devices: Devices) -> None:
    mesh = jax.make_mesh((2, 2), ("a", "b"), axis_types=(jax.sharding.AxisType.Auto,) * 2, devices=devices[:4])
    x = put(np.arange(16, dtype=np.float32).reshape(4, 4), mesh, "a", "b")
    assert float(jax.jit(jnp.sum)(x)) == 120


def test_random_numbers_do_not_depend_on_the_sharding(check_same: CheckSame) -> None:
    def program(devices: Devices) -> Any:
        sharding = NamedSharding(grid(devices), P("chip", "slice"))
        return jax.jit(partial(jax.random.normal, shape=(8, 6)), out_shardings=sharding)(jax.random.key(1))

    check_same(program)


def test_uneven_work_inside_a_program(check_same: CheckSame) -> None:
    def program(devices: Devices) -> Any:
        mesh = line(devices)
        return jax.jit(lambda x: jnp.cumsum(x[:5]) + x[3:].sum())(put(matrix(0, 8), mesh, "x"))

    check_same(program)


def test_different_programs_on_disjoint_devices_run_side_by_side(devices: Devices) -> None:
    step = jax.jit(lambda x: x * 2 % 1009 + x.sum() % 7)
    states = [put(np.arange(8, dtype=np.int32), line(devices, places), "x") for places in ([0, 1, 2, 3], [4, 5, 6, 7])]
    for _ in range(50):
        states = [step(state) for state in states]
    np.testing.assert_array_equal(np.asarray(states[0]), np.asarray(states[1]))


def test_a_training_loop_gives_the_same_losses(check_same: CheckSame) -> None:
    """Two axes of parallelism, donated state, twenty steps dispatched without waiting."""

    def program(devices: Devices) -> Any:
        mesh = grid(devices)
        weights = {"a": put(matrix(0, 16, 32), mesh, "chip"), "b": put(matrix(1, 32, 4), mesh, "chip")}
        batch = put(matrix(2, 16, 16), mesh, ("slice", "chip")), put(matrix(3, 16, 4), mesh, ("slice", "chip"))

        def loss_of(weights: dict[str, jax.Array], batch: tuple[jax.Array, jax.Array]) -> jax.Array:
            x, y = batch
            return ((jnp.tanh(x @ weights["a"]) @ weights["b"] - y) ** 2).mean()

        @partial(jax.jit, donate_argnums=0)
        def step(weights: dict[str, jax.Array], batch: Any) -> tuple[dict[str, jax.Array], jax.Array]:
            loss, gradients = jax.value_and_grad(loss_of)(weights, batch)
            return jax.tree.map(lambda w, g: w - 0.05 * g, weights, gradients), loss

        losses = []
        for _ in range(20):
            weights, loss = step(weights, batch)
            losses.append(loss)
        assert losses[-1] < losses[0]
        return losses, weights

    check_same(program)
