"""The only user of private jax and jaxlib names. Each holds for jax 0.8 to 0.12 unless it says otherwise.

Importing this module imports jax. `start_cpu_backend` must come before anything that asks jax for devices.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from importlib import import_module
from types import SimpleNamespace
from typing import Any, Final, cast

import jax
import numpy as np
from jax._src import callback, compiler, sharding_impls, xla_bridge
from jax.extend import ifrt_programs
from jaxlib import _jax, xla_client
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import sdy, stablehlo

from pathways_runtime import _callback_messages

# jax 0.8 and 0.9 have in `_jax` what jax 0.10 has in `_hlo`.
_hlo: Final = import_module("jaxlib._hlo") if importlib.util.find_spec("jaxlib._hlo") else _jax

JAX_VERSION: Final[str] = jax.__version__
ShapedArray: Final = jax.core.ShapedArray
GSPMDSharding: Final = sharding_impls.GSPMDSharding
OpSharding: Final = _hlo.OpSharding
HloSharding: Final = _hlo.HloSharding
ALWAYS_COPY: Final = _jax.ArrayCopySemantics.ALWAYS_COPY
REUSE_INPUT: Final = _jax.ArrayCopySemantics.REUSE_INPUT
DONATE_INPUT: Final = _jax.ArrayCopySemantics.DONATE_INPUT


# To jax 0.11.0 a result is checked unless told otherwise; later versions never do, and take no such argument.
_UNCHECKED: Final = {"_skip_checks": True} if "_skip_checks" in xla_client.array_result_handler.__doc__ else {}


def backends_are_initialized() -> bool:
    """Whether JAX has made its devices; asks without making them."""
    return bool(xla_bridge.backends_are_initialized())


def start_cpu_backend(num_devices: int) -> Any:
    """jaxlib's CPU client with so many devices, every dtype enabled, LAPACK's calls registered."""
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", num_devices)
    jax.config.update("jax_enable_x64", True)
    client = jax.devices("cpu")[0].client
    _forget_tracebacks()
    _register_linear_algebra()
    return client


def _forget_tracebacks() -> None:
    """jaxlib records the Python stack of each execution, and keeps some 200 bytes of it for ever."""
    _jax.set_tracebacks_enabled(False)


def _register_linear_algebra() -> None:
    """Finds LAPACK's functions in scipy. Without it the first Cholesky decomposition kills the process."""
    from jaxlib import cpu_sparse, lapack  # noqa: F401  (their import registers call targets)
    from jaxlib.cpu import _lapack

    _lapack.initialize()


def single_device_sharding(device: Any, memory_kind: str | None) -> Any:
    """Everything on one device."""
    return jax.sharding.SingleDeviceSharding(device, memory_kind=memory_kind)


def hlo_sharding(serialized: bytes) -> Any:
    """An `HloSharding` of a serialized `xla.OpSharding`. Raises what jaxlib raises where it makes no sense."""
    proto = OpSharding()
    proto.ParseFromString(serialized)
    return HloSharding.from_proto(proto)


def tiled_hlo_sharding(tiles: Sequence[int], num_devices: int) -> Any:
    """Even tiles in order of the devices; where there are more devices than tiles, each tile is on several."""
    num_tiles = int(np.prod(tiles, dtype=np.int64))
    if num_tiles == 1:
        return HloSharding.replicate()
    if num_tiles == num_devices:
        return HloSharding.iota_tile(list(tiles))
    copies = num_devices // num_tiles
    return HloSharding.iota_tile([*tiles, copies], subgroup_types=[OpSharding.Type.REPLICATED])


def device_sharding(devices: Sequence[Any], sharding: Any, memory_kind: str | None) -> Any:
    """`sharding` (an `HloSharding`) over these devices in this order."""
    return GSPMDSharding(tuple(devices), sharding, memory_kind=memory_kind)


def put_shards(
    shape: tuple[int, ...], dtype: np.dtype[Any], sharding: Any, shards: Sequence[Any], devices: Sequence[Any]
) -> Any:
    """An array of these shards, each on its device. A 64-byte aligned numpy shard may be used in place, not copied."""
    aval = ShapedArray(shape, dtype)
    return xla_client.batched_device_put(aval, sharding, shards, devices, True, enable_x64=True)


def assemble(shape: tuple[int, ...], dtype: np.dtype[Any], sharding: Any, shards: Sequence[Any]) -> Any:
    """One array over single-device arrays, which it shares."""
    return _jax.ArrayImpl(ShapedArray(shape, dtype), sharding, list(shards), committed=True, _skip_checks=True)


def disassemble(array: Any) -> list[Any]:
    """The single-device arrays of an array, in order of its devices, shared with it."""
    shards: list[Any] = array._arrays
    return shards


def copy_arrays(arrays: Sequence[Any], shardings: Sequence[Any], semantics: Any) -> list[Any]:
    """Each array with another sharding that cuts it into the same shards."""
    device_lists = [sharding._internal_device_list for sharding in shardings]
    return list(
        xla_client.batched_copy_array_to_devices_with_sharding(
            list(arrays), device_lists, list(shardings), [semantics] * len(arrays)
        )
    )


def result_handler(shape: tuple[int, ...], dtype: np.dtype[Any], sharding: Any) -> Any:
    """What makes an array of one output of `execute_sharded`."""
    return xla_client.array_result_handler(ShapedArray(shape, dtype), sharding, True, **_UNCHECKED)


def compile_program(
    client: Any,
    program: bytes,
    devices: Sequence[Any],
    options: bytes,
    host_callbacks: Sequence[Callable[..., tuple[Any, ...]]] = (),
) -> Any:
    """A loaded executable of a StableHLO portable artifact and a serialized `xla.CompileOptionsProto`.

    It keeps the callbacks, which take and return numpy arrays (None for a token), in the program's order.
    """
    parsed = xla_client.CompileOptions.ParseFromString(options)
    device_list = _jax.DeviceList(tuple(devices))
    if not host_callbacks:
        return client.compile_and_load(program, device_list, parsed)
    with ir.Context() as context:
        module = parse_program(context, program)
        return client.compile_and_load(module, device_list, parsed, host_callbacks=list(host_callbacks))


def default_compile_options() -> bytes:
    """A serialized `xla.CompileOptionsProto` as this process's XLA_FLAGS have it."""
    serialized: bytes = xla_client.CompileOptions().SerializeAsString()
    return serialized


def default_layout(client: Any, dtype: np.dtype[Any], shape: Sequence[int], device: Any) -> bytes:
    """The serialized PjRt layout that an array has where nobody asks for another."""
    layout: bytes = client.get_default_layout(dtype, list(shape), device).__getstate__()[0]
    return layout


def parse_program(context: ir.Context, program: bytes) -> Any:
    """The MLIR module of a StableHLO portable artifact, in a context with the dialects that JAX emits."""
    stablehlo.register_dialect(context)
    sdy.register_dialect(context)
    return stablehlo.deserialize_portable_artifact(context, program)


mlir: Final = ir


def replicated() -> Any:
    """An `OpSharding` for the whole on each device."""
    return HloSharding.replicate().to_proto()


def minor_to_major(layout: Any) -> list[int]:
    """The order of dimensions of a `PjRtLayout`, which says so in its text alone: `{1,0:T(8,128)}`."""
    order = str(layout).strip("{}").partition(":")[0]
    return [int(dimension) for dimension in order.split(",") if dimension]


def output_memory_kinds(executable: Any, count: int) -> list[str]:
    """Where each of `count` outputs lies. jax 0.8's CPU client does not say: on the device then."""
    try:
        kinds = executable.get_output_memory_kinds()
    except jax.errors.JaxRuntimeError:
        kinds = []
    return list(kinds[0]) if kinds else ["device"] * count


def route_callbacks(is_ours: Callable[[Any], bool], offer: Callable[[Sequence[Callable[..., Any]]], str]) -> None:
    """Has JAX compile for the clients that are ours without host callbacks, for the life of the process.

    What `offer` says of them becomes an attribute of the program.
    """
    compile_ = compiler.backend_compile_and_load

    def compile_and_load(backend: Any, module: Any, devices: Any, options: Any, host_callbacks: Sequence[Any]) -> Any:
        if not host_callbacks or not is_ours(backend):
            return compile_(backend, module, devices, options, host_callbacks)
        attributes = module.operation.attributes
        attributes[_callback_messages.ATTRIBUTE] = ir.StringAttr.get(offer(host_callbacks), module.context)
        try:
            return compile_(backend, module, devices, options, [])
        finally:
            del attributes[_callback_messages.ATTRIBUTE]

    compiler.backend_compile_and_load = compile_and_load
    emit = callback.emit_python_callback

    def emit_python_callback(context: Any, *arguments: Any, **named: Any) -> Any:
        # For TPUs JAX has the client's runtime exchange the values, which the proxy's cannot.
        if context.module_context.platforms == ("tpu",) and is_ours(context.module_context.get_backend()):
            module_context = context.module_context.replace(platforms=("cpu",), backend=SimpleNamespace(platform="cpu"))
            context = context.replace(module_context=module_context)
        return emit(context, *arguments, **named)

    callback.emit_python_callback = cast(Any, emit_python_callback)


class PluginProgram:
    """A program that the server itself runs, of a client of its own that JAX need not know."""

    def __init__(self, client: Any, text: str) -> None:
        programs = ifrt_programs.ifrt_programs
        program = programs.make_plugin_program(text)
        self._executable = client.compile_ifrt_program(program, programs.make_plugin_compile_options())
        self._device = client.devices()[0]
        self._sharding = single_device_sharding(self._device, None)

    def receive(self) -> str:
        """Runs it, and waits for the one string that is its result."""
        handler = result_handler((1,), np.dtypes.StringDType(), self._sharding)
        [array] = self._executable.execute_sharded([]).consume_with_handlers([handler])
        return str(np.asarray(array)[0])

    def send(self, value: np.ndarray[Any, np.dtype[Any]]) -> None:
        """Runs it with this argument."""
        self._executable.execute_sharded(
            [put_shards(value.shape, value.dtype, self._sharding, [value], [self._device])]
        )


# jax 0.8 has it among its experiments.
_enable_x64: Final[Any] = (jax if hasattr(jax, "enable_x64") else import_module("jax.experimental")).enable_x64
_WIDE: Final = tuple(np.dtype(name) for name in ("int64", "uint64", "float64", "complex128"))


class ColocatedFunction:
    """A function of `jax.experimental.colocated_python` as clients send it. Reading it runs the client's code."""

    def __init__(self, payload: bytes) -> None:
        from jax.experimental.colocated_python import serialization

        self._function, self._in_tree, self.in_specs, self._out_tree, out_specs, self.devices = (
            serialization._deserialize(payload)
        )
        # As in the client, where JAX makes such types only if it was told to.
        self._uses_x64 = any(spec.dtype in _WIDE for spec in (*self.in_specs, *out_specs))

    def __call__(self, arguments: Sequence[Any]) -> list[Any]:
        """The arrays that it returns. TypeError where they are not in the tree that the client was told of."""
        positional, named = jax.tree.unflatten(self._in_tree, arguments)
        with _enable_x64(self._uses_x64):
            leaves, tree = jax.tree.flatten(self._function(*positional, **named))
        if tree != self._out_tree:
            raise TypeError(f"the function returned {tree}, not {self._out_tree} as before")
        return leaves


def take_arrays(ticket: str, function: ColocatedFunction) -> list[Any]:
    """The arguments of a call, from the server."""
    return _exchange(ticket, function.devices, [], function.in_specs) if function.in_specs else []


def give_arrays(ticket: str, results: Sequence[Any]) -> None:
    """Gives the results of a call to the server: together those on the same devices."""
    by_devices: dict[Any, list[int]] = {}
    for index, result in enumerate(results):
        by_devices.setdefault(result.sharding._internal_device_list, []).append(index)
    for devices, indices in by_devices.items():
        _exchange(f"{ticket} {' '.join(map(str, indices))}", devices, [results[index] for index in indices], [])


def _exchange(text: str, devices: Any, arrays: Sequence[Any], specs: Sequence[Any]) -> list[Any]:
    """Gives `arrays` to the server and takes those of `specs` from it, by a program that only it understands."""
    from jax.extend.ifrt_programs import ifrt_programs

    given = [jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=array.sharding) for array in arrays]
    program = ifrt_programs.make_colocated_python_program("exchange", text.encode(), devices, given, specs)
    options = ifrt_programs.make_colocated_python_compile_options()
    executable = devices[0].client.compile_ifrt_program(program, options)
    results = executable.execute_sharded(list(arrays), with_tokens=True)
    avals = [ShapedArray(spec.shape, spec.dtype) for spec in specs]
    handlers = [
        xla_client.array_result_handler(aval, spec.sharding, True, **_UNCHECKED)
        for aval, spec in zip(avals, specs, strict=True)
    ]
    taken = list(results.consume_with_handlers(handlers))
    results.consume_token().block_until_ready()
    return taken
