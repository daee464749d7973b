"""Programs on the emulator call functions of this process."""

from __future__ import annotations

import functools
import gc
import subprocess
import sys
import threading
import weakref
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.experimental import io_callback
from jax.sharding import NamedSharding, PartitionSpec

from pathways_runtime import _callback_messages as messages
from pathways_runtime.emulator import callbacks

Devices = list[jax.Device]


def like(x: Any) -> Any:
    return jax.ShapeDtypeStruct(x.shape, x.dtype)


def test_debug_print_prints_here(devices: Devices, capfd: pytest.CaptureFixture[str]) -> None:
    @jax.jit
    def count(x: Any) -> Any:
        def step(i: Any, total: Any) -> Any:
            jax.debug.print("step {i}: {total}", i=i, total=total, ordered=True)
            return total + i

        return jax.lax.fori_loop(0, 3, step, x)

    assert count(jnp.int32(5)) == 8
    jax.effects_barrier()
    assert capfd.readouterr().out == "step 0: 5\nstep 1: 5\nstep 2: 6\n"


def test_a_pure_callback_gives_its_result_to_the_program(devices: Devices) -> None:
    def double(x: Any) -> Any:
        return np.asarray(x) * 2

    x = np.arange(6, dtype=np.float32).reshape(2, 3)
    assert jax.jit(lambda x: jax.pure_callback(double, like(x), x) + 1)(x).tolist() == [[1, 3, 5], [7, 9, 11]]


@pytest.mark.parametrize("dtype", [np.bool_, np.int8, np.uint32, np.complex64, jnp.bfloat16, jnp.float8_e4m3fn])
def test_dtypes_pass_both_ways(devices: Devices, dtype: Any) -> None:
    x = np.array([0, 1, 1, 0]).astype(dtype)
    result = jax.jit(lambda x: jax.pure_callback(lambda x: x, like(x), x))(x)
    assert (result.dtype, np.asarray(result).tobytes()) == (x.dtype, x.tobytes())


def test_a_callback_of_no_arguments_and_one_of_no_results(devices: Devices) -> None:
    seen: list[Any] = []
    jax.jit(lambda x: io_callback(seen.append, None, x))(7)
    jax.effects_barrier()
    assert [int(x) for x in seen] == [7]
    assert (
        jax.jit(lambda: io_callback(lambda: np.zeros((0, 2), np.int32), like(np.zeros((0, 2), np.int32))))().size == 0
    )


def test_a_sharded_program_calls_with_the_whole(devices: Devices) -> None:
    mesh = jax.sharding.Mesh(np.array(devices), "x")
    x = jax.device_put(np.arange(16, dtype=np.float32), NamedSharding(mesh, PartitionSpec("x")))
    backwards = jax.jit(lambda x: jax.pure_callback(lambda x: np.asarray(x)[::-1], like(x), x))(x)
    assert np.asarray(backwards).tolist() == list(range(15, -1, -1))


def test_a_callback_on_each_device(devices: Devices) -> None:
    mesh = jax.sharding.Mesh(np.array(devices), "x")
    seen: list[float] = []

    @jax.jit
    @functools.partial(jax.shard_map, mesh=mesh, in_specs=PartitionSpec("x"), out_specs=PartitionSpec("x"))
    def each(x: jax.Array) -> jax.Array:
        jax.debug.callback(lambda x: seen.extend(np.asarray(x).tolist()), x)
        return x * 2

    each(np.arange(8, dtype=np.float32)).block_until_ready()
    jax.effects_barrier()
    assert sorted(seen) == list(range(8))


def test_an_error_in_a_callback_is_that_of_the_program(devices: Devices) -> None:
    def fail(x: Any) -> Any:
        raise ValueError("no such row")

    with pytest.raises(jax.errors.JaxRuntimeError, match=r"(?s)no such row"):
        jax.jit(lambda x: jax.pure_callback(fail, like(x), x))(jnp.ones(3)).block_until_ready()
    assert jnp.ones(3).sum() == 3


def test_a_callback_may_use_jax_on_cpu(devices: Devices) -> None:
    x = jnp.ones(3)
    assert jax.jit(lambda x: jax.pure_callback(lambda x: jnp.cumsum(x), like(x), x))(x).tolist() == [1, 2, 3]


def test_a_function_is_kept_while_its_program_may_call_it(devices: Devices) -> None:
    gone = threading.Event()

    def run() -> Any:
        def function(x: Any) -> Any:
            return np.asarray(x)

        weakref.finalize(function, gone.set)
        jitted = jax.jit(lambda x: jax.pure_callback(function, like(x), x))
        for _ in range(2):
            gc.collect()
            assert jitted(jnp.ones(2)).tolist() == [1, 1]

    run()
    assert not gone.is_set()
    jax.clear_caches()
    for _ in range(100):  # JAX lets go of it with a later program, and then it is garbage
        (jnp.ones(3) + 1).block_until_ready()
        gc.collect()
        if gone.wait(0.1):
            break
    assert gone.is_set()


TPU_SCRIPT = """
import pathways_runtime; pathways_runtime.initialize()
import jax, jax.numpy as jnp

@jax.jit
def f(x):
    jax.debug.print("x is {}", x)
    return jax.pure_callback(lambda x: x * 2, jax.ShapeDtypeStruct((), jnp.float32), x)

print(jax.devices()[0].platform, f(3.0))
"""


def test_callbacks_of_a_program_that_jax_lowers_for_tpus(start_emulator: Any) -> None:
    emulator = start_emulator("--platform=tpu", "--instance_type=tpuv6e:1x1", "--instance_count=1")
    command = [sys.executable, "-c", TPU_SCRIPT]
    done = subprocess.run(command, env=emulator.client_environment, capture_output=True, text=True, check=False)
    assert (done.returncode, sorted(done.stdout.splitlines())) == (0, ["tpu 6.0", "x is 3.0"]), done.stderr


def test_messages_are_what_was_packed() -> None:
    arrays = [np.arange(6, dtype=np.int16).reshape(2, 3).T, None, np.zeros((0, 4)), np.array(1, ml_dtypes.bfloat16)]
    header, read = messages.unpack(messages.of_text(messages.as_text(messages.pack({"call": 3}, arrays))))
    assert header == {"call": 3}
    for got, wanted in zip(read, arrays, strict=True):
        assert (got is None) == (wanted is None)
        if got is not None and wanted is not None:
            assert (got.dtype, got.shape, got.tolist()) == (wanted.dtype, wanted.shape, wanted.tolist())


@pytest.mark.parametrize("message", [b"", b"1\n", b'{"arrays": [["no", [1]]]}\n', b'{"arrays": [["int8", [9]]]}\n12'])
def test_what_is_no_message_is_refused(message: bytes) -> None:
    with pytest.raises(ValueError):
        messages.unpack(message)


@pytest.mark.parametrize("answer", [np.zeros(2, np.float32), np.zeros(3, np.int32), None])
def test_an_answer_that_the_program_cannot_take_is_an_error(answer: Any) -> None:
    channel = callbacks.Channel()
    function = callbacks.Remote(channel, 7, (((3,), np.dtype(np.float32)),))

    def client() -> None:
        header, _ = messages.unpack(channel.take())
        channel.give(messages.pack({"call": header["call"]}, [answer]))

    thread = threading.Thread(target=client)
    thread.start()
    with pytest.raises(RuntimeError, match=r"where the program wants \(\(\(3,\), dtype\('float32'\)\),\)"):
        function(np.ones(3))
    thread.join()


def test_calls_end_with_the_client_that_they_are_for() -> None:
    channel = callbacks.Channel()
    function = callbacks.Remote(channel, 7, ())

    def client() -> None:
        channel.take()
        channel.give(messages.pack({"end": True}))

    thread = threading.Thread(target=client)
    thread.start()
    for _ in range(2):
        with pytest.raises(RuntimeError, match="is gone"):
            function()
    thread.join()
