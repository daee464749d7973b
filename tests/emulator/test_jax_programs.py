"""Programs on one device of the emulator give plain CPU's results, bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

Devices = list[jax.Device]
CheckSame = Callable[[Callable[[Devices], Any]], None]


def matrix(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def recurrence(weights: jax.Array, steps: jax.Array) -> jax.Array:
    """A small recurrent network: matmul, tanh and scan."""

    def step(carry: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        carry = jnp.tanh(carry @ weights) + x
        return carry, carry.sum()

    last, sums = lax.scan(step, jnp.ones(weights.shape[0]), steps)
    return last.sum() + sums.mean()


def collatz(n: int) -> Callable[[], jax.Array]:
    """Steps to reach 1: while and cond, with an integer carry."""

    def step(state: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        value, count = state
        return lax.cond(value % 2 == 0, lambda v: v // 2, lambda v: 3 * v + 1, value), count + 1

    return lambda: lax.while_loop(lambda state: state[0] != 1, step, (jnp.int32(n), jnp.int32(0)))[1]


@jax.custom_vjp
def clipped(x: jax.Array) -> jax.Array:
    return x**2


clipped.defvjp(lambda x: (clipped(x), x), lambda x, g: (jnp.clip(2 * x * g, -1, 1),))

PROGRAMS: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
    "elementwise": (lambda x: jnp.sin(x) * 2 + jnp.exp(-(x**2)), (matrix(0, 30, 7),)),
    "matmul": (lambda a, b: a @ b, (matrix(0, 40, 50), matrix(1, 50, 60))),
    "reductions": (lambda x: (x.sum(0), x.max(1), jnp.argmin(x), x.var()), (matrix(0, 31, 17),)),
    "scan": (recurrence, (matrix(0, 5, 5), matrix(1, 9, 5))),
    "grad": (jax.value_and_grad(recurrence), (matrix(0, 5, 5), matrix(1, 9, 5))),
    "hessian": (jax.hessian(lambda x: jnp.prod(jnp.sin(x))), (matrix(0, 4),)),
    "remat": (jax.grad(jax.checkpoint(recurrence)), (matrix(0, 5, 5), matrix(1, 9, 5))),
    "vmap": (jax.vmap(recurrence, in_axes=(0, None)), (matrix(0, 3, 5, 5), matrix(1, 9, 5))),
    "jvp": (lambda x: jax.jvp(jnp.tanh, (x,), (jnp.ones_like(x),)), (matrix(0, 6),)),
    "custom derivative": (jax.grad(lambda x: clipped(x).sum()), (matrix(0, 6),)),
    "while and cond": (collatz(27), ()),
    "switch": (lambda i: lax.switch(i, [lambda: 1.0, lambda: 2.0, lambda: 3.0]), (np.int32(2),)),
    "fori": (lambda x: lax.fori_loop(0, 10, lambda i, v: v * 1.5 + i, x), (np.float32(1),)),
    "sort": (lambda x: (jnp.sort(x), jnp.argsort(x), lax.top_k(x, 3)), (matrix(0, 50),)),
    "gather and scatter": (lambda x, i: (x[i], x.at[i].add(1), x.at[i].mul(2)), (matrix(0, 10), np.array([3, 3, 9]))),
    "convolution": (lambda x, k: lax.conv(x, k, (1, 1), "SAME"), (matrix(0, 2, 3, 8, 8), matrix(1, 4, 3, 3, 3))),
    "fft": (lambda x: (jnp.fft.fft(x), jnp.fft.irfft(jnp.fft.rfft(x))), (matrix(0, 4, 16),)),
    "no inputs": (lambda: {"a": jnp.zeros(3), "b": (jnp.ones((2, 2)), jnp.int32(7))}, ()),
    "no outputs": (lambda x: (), (matrix(0, 3),)),
    "inputs as outputs": (lambda x, y: (y, x, y), (matrix(0, 3), matrix(1, 4))),
    "unused inputs": (lambda x, y: y + 1, (matrix(0, 3), matrix(1, 4))),
    "empty arrays": (lambda x: (x.sum(), jnp.concatenate([x, x])), (np.zeros((0, 3), np.float32),)),
    "bfloat16": (lambda x: x.astype(jnp.bfloat16) @ x.T.astype(jnp.bfloat16), (matrix(0, 8, 8),)),
    "complex": (lambda x: jnp.abs(jnp.exp(1j * x)) + jnp.angle(x + 1j * x), (matrix(0, 9),)),
    "bits": (lambda x: (x ^ (x >> 3)) & ~(x << 1), (np.arange(100, dtype=np.uint32),)),
    "nan and inf": (lambda x: (x / 0, jnp.log(-x), jnp.isnan(x / x)), (np.array([0, 1, -1], np.float32),)),
    "random normal": (lambda s: jax.random.normal(jax.random.key(s), (100,)), (np.uint32(5),)),
    "random choice": (lambda s: jax.random.permutation(jax.random.key(s), 50), (np.uint32(5),)),
    "random bits of rbg": (lambda s: jax.random.bits(jax.random.key(s, impl="rbg"), (64,)), (np.uint32(5),)),
    "cholesky": (lambda a: jnp.linalg.cholesky(a @ a.T + 5 * jnp.eye(6)), (matrix(0, 6, 6),)),
    "qr": (jnp.linalg.qr, (matrix(0, 8, 5),)),
    "svd": (lambda a: jnp.linalg.svd(a)[1], (matrix(0, 6, 4),)),
    "eigh": (lambda a: jnp.linalg.eigh(a + a.T), (matrix(0, 6, 6),)),
    "eig": (lambda a: jnp.linalg.eig(a)[0], (matrix(0, 5, 5),)),
    "inverse and determinant": (lambda a: (jnp.linalg.inv(a), jnp.linalg.det(a)), (matrix(0, 5, 5),)),
    "solve": (jnp.linalg.solve, (matrix(0, 5, 5), matrix(1, 5, 2))),
    "triangular solve": (
        lambda a, b: jax.scipy.linalg.solve_triangular(jnp.tril(a) + 5 * jnp.eye(5), b, lower=True),
        (matrix(0, 5, 5), matrix(1, 5, 2)),
    ),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_gives_the_same(check_same: CheckSame, name: str) -> None:
    function, arguments = PROGRAMS[name]
    check_same(lambda devices: jax.jit(function)(*jax.device_put(arguments, devices[-1])))


def test_double_precision_gives_the_same(check_same: CheckSame) -> None:
    values = np.random.default_rng(0).normal(size=(6, 6))
    with jax.enable_x64(True):
        check_same(lambda devices: jax.jit(lambda a: (jnp.linalg.inv(a), a.sum(), jnp.arange(3)))(values))


def test_operations_without_jit_give_the_same(check_same: CheckSame) -> None:
    def program(devices: Devices) -> Any:
        x = jnp.linspace(0, 1, 11)
        return x, x[2:5], x.at[3].set(7), jnp.outer(x, x).sum(), jax.nn.softmax(x), x > 0.5

    check_same(program)


def test_a_program_runs_on_the_device_of_its_inputs(devices: Devices) -> None:
    for device in devices:
        assert jax.jit(lambda x: x + 1)(jax.device_put(1.0, device)).devices() == {device}


def test_a_second_call_with_another_shape_compiles_anew(devices: Devices) -> None:
    double = jax.jit(lambda x: x * 2)
    assert double(np.ones(3, np.float32)).tolist() == [2, 2, 2]
    assert double(np.ones((1, 2), np.float32)).tolist() == [[2, 2]]
    assert double(np.ones(3, np.int32)).dtype == np.int32


def test_a_thousand_calls_in_flight_come_in_order(devices: Devices) -> None:
    step = jax.jit(lambda x: x * 3 % 1009)
    value, expected = jnp.int32(1), 1
    for _ in range(1000):
        value, expected = step(value), expected * 3 % 1009
    assert int(value) == expected


def test_a_result_can_be_waited_for_by_several_threads(devices: Devices) -> None:
    from concurrent.futures import ThreadPoolExecutor

    result = jax.jit(lambda x: (x @ x).sum())(jnp.ones((300, 300)))
    with ThreadPoolExecutor(4) as pool:
        assert set(pool.map(lambda _: float(result), range(8))) == {300.0**3}


def test_several_threads_compile_and_run_at_once(devices: Devices) -> None:
    from concurrent.futures import ThreadPoolExecutor

    def run(number: int) -> float:
        return float(jax.jit(lambda x: x.sum() + number)(jnp.ones(number + 1)))

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(run, range(8))) == [2.0 * number + 1 for number in range(8)]


def test_ahead_of_time_compilation(devices: Devices, cpu_devices: Devices) -> None:
    x = np.ones((64, 32), np.float32)
    compiled: Any = jax.jit(lambda a: a @ a.T).lower(x).compile()
    with jax.default_device(cpu_devices[0]):
        plain: Any = jax.jit(lambda a: a @ a.T).lower(x).compile()
    assert compiled(x).sum() == 64 * 64 * 32
    assert compiled.cost_analysis()["flops"] == plain.cost_analysis()["flops"] > 0
    assert compiled.memory_analysis().argument_size_in_bytes == x.nbytes
    assert compiled.memory_analysis().output_size_in_bytes == 64 * 64 * 4
    assert "HloModule" in compiled.as_text()


def test_a_compiled_program_refuses_another_shape(devices: Devices) -> None:
    compiled = jax.jit(lambda a: a + 1).lower(np.ones(3, np.float32)).compile()
    with pytest.raises(TypeError, match="called with"):
        compiled(np.ones(4, np.float32))
