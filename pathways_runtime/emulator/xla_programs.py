"""Programs that JAX lowers: StableHLO, compiled by XLA:CPU and run on the devices that stand for the emulated ones."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from google.protobuf.message import DecodeError

from pathways_runtime import _callback_messages, _compat
from pathways_runtime._compat import mlir
from pathways_runtime.emulator import wire, xla_flags
from pathways_runtime.emulator.arrays import Array
from pathways_runtime.emulator.callbacks import Returns, read_functions
from pathways_runtime.emulator.program_checks import check_program
from pathways_runtime.emulator.status import StatusError

if TYPE_CHECKING:
    from pathways_runtime.emulator.engine import Engine, Placement

# Targets of calls whose operand is an address in the client's process. To run one here would crash the server.
_CLIENT_CALLS: Final = (
    b"xla_python_cpu_callback",
    b"xla_buffer_python_cpu_callback",
    b"CustomSPMDPartitioning",
    b"InspectSharding",
)
# Those that are served by `callbacks`, where the program says whom to call.
_CALLBACKS: Final = ("xla_ffi_python_cpu_callback", "xla_ffi_partitioned_python_cpu_callback")
# Where such a call has its settings, among them which of the program's functions it calls.
_CALL_SETTINGS: Final = ("mhlo.backend_config", "backend_config")
# What JAX passes for a token, the order of effects: no value, but it must be waited for.
_TOKEN_TYPE: Final = "!stablehlo.token"
_TOKEN: Final = ((0,), np.dtype(np.bool_))


@dataclass(frozen=True, slots=True)
class Signature:
    """What the program says about itself. Shapes are global; `donated` are indices of arguments.

    `callbacks` names the functions of the client that it calls, and `returns` says by index what each must return.
    """

    name: str
    outputs: tuple[tuple[tuple[int, ...], np.dtype[Any]], ...]
    donated: frozenset[int]
    callbacks: str
    returns: Mapping[int, Returns]


class XlaProgram:
    """An executable of jaxlib with all that an execution needs prepared."""

    def __init__(self, engine: Engine, program: bytes, options: bytes) -> None:
        self._signature = read_signature(program)
        _refuse_client_calls(program, self._signature.callbacks)
        self.name = self._signature.name
        self.devices, compile_options = _read_options(engine, options)
        self._engine = engine
        self._executable = _compat.compile_program(
            engine.client,
            program,
            engine.jax_devices(self.devices),
            compile_options,
            read_functions(self._signature.callbacks, self._signature.returns) if self._signature.callbacks else (),
        )
        self._memory_kinds = _compat.output_memory_kinds(self._executable, len(self._signature.outputs))
        self._op_shardings = self._executable.get_output_shardings()
        self._placements = [self._place(index) for index in range(len(self._signature.outputs))]
        self._handlers = [
            _compat.result_handler(shape, dtype, placement.sharding)
            for (shape, dtype), placement in zip(self._signature.outputs, self._placements, strict=True)
        ]
        self._slices = tuple(sorted({engine.slice_of[device_id] for device_id in self.devices}))
        self._is_alone = len(self.devices) == 1
        self.outputs = [
            wire.write_output(dtype, shape, placement.source)
            for (shape, dtype), placement in zip(self._signature.outputs, self._placements, strict=True)
        ]
        self.fingerprint = _as_bytes(self._executable.fingerprint)

    def launch(self, arguments: Sequence[Array], kept: Sequence[int], wants_token: bool) -> tuple[list[Array], Any]:
        """Starts an execution: (outputs, None or a token to wait for). `kept` arguments are not donated.

        StatusError where a slice is down, or what an argument was poisoned with.
        """
        stamp = self._engine.health.stamp(self._slices)
        values = [argument.check() for argument in arguments]
        for index in kept:
            if index in self._signature.donated:
                values[index] = _copy(values[index], arguments[index].placement)
        results: list[Any] = []
        token = None

        def start() -> Any:
            nonlocal results, token
            run = self._executable.execute_sharded(values, with_tokens=wants_token or not self._is_alone)
            results = run.consume_with_handlers(self._handlers)
            if wants_token or not self._is_alone:
                token = run.consume_token()
            return token

        if self._is_alone:
            start()
        else:
            self._engine.turns.take(start)
        outputs = [
            Array(value, dtype, shape, placement, stamp)
            for value, (shape, dtype), placement in zip(results, self._signature.outputs, self._placements, strict=True)
        ]
        return outputs, token

    def describe(self, reply: Any) -> None:
        """Fills a `LoadedExecutableMetadataResponse`."""
        reply.CopyFrom(self._metadata)

    def cost_analysis(self) -> dict[str, float]:
        """What XLA estimates: flops, bytes accessed and others by name."""
        return {name: float(value) for name, value in self._executable.cost_analysis().items()}

    def text(self) -> str:
        """The optimized HLO."""
        return "\n\n".join(module.to_string() for module in self._executable.hlo_modules())

    @cached_property
    def _metadata(self) -> Any:
        reply = wire.ExecutableMetadata()
        executable = self._executable
        for field, shardings in (
            (reply.parameter_shardings, executable.get_parameter_shardings()),
            (reply.output_shardings, self._op_shardings),
        ):
            if shardings is not None:
                field.SetInParent()
                for sharding in shardings:
                    field.shardings.add().ParseFromString(sharding.SerializeToString())
        _write_layouts(reply, "parameter_layouts", executable.get_parameter_layouts)
        _write_layouts(reply, "output_layouts", executable.get_output_layouts)
        reply.output_memory_kinds.memory_kind_lists.add(memory_kinds=self._memory_kinds)
        # Set even when empty: without it the client asks for each argument whether it was donated.
        reply.donated_input_indices.SetInParent()
        reply.donated_input_indices.donated_input_indices.extend(sorted(self._signature.donated))
        _write_stats(reply.compiled_memory_stats, executable.get_compiled_memory_stats())
        reply.size_of_generated_code_in_bytes = executable.size_of_generated_code_in_bytes()
        return reply

    def _place(self, index: int) -> Placement:
        op_sharding = None
        if len(self.devices) > 1:
            # Without a word from the compiler an output is the same on all devices.
            sharding = self._op_shardings[index] if self._op_shardings else _compat.replicated()
            op_sharding = sharding.SerializeToString()
        sharding = wire.Sharding(self.devices, self._memory_kinds[index], op_sharding)
        return self._engine.placement(sharding, self._signature.outputs[index][0])


def read_signature(program: bytes) -> Signature:
    """The signature of a StableHLO portable artifact. StatusError where it is none, or has values of unknown types."""
    try:
        with mlir.Context() as context:
            module = _compat.parse_program(context, program)
            check_program(module)
            name = _symbol(module.operation) or "main"
            main = next(op for op in module.body.operations if _symbol(op) == "main")
            types = mlir.FunctionType(mlir.TypeAttr(main.attributes["function_type"]).value)
            outputs = tuple(_tensor(type_) for type_ in types.results)
            callbacks = _text(module.operation, _callback_messages.ATTRIBUTE) or ""
            returns = _read_returns(module) if callbacks else {}
            return Signature(name, outputs, frozenset(_donated(main)), callbacks, returns)
    except (ValueError, LookupError, StopIteration, mlir.MLIRError) as error:
        raise StatusError("INVALID_ARGUMENT", f"not a StableHLO program: {error}") from error


def _symbol(operation: Any) -> str | None:
    return _text(operation, "sym_name")


def _text(operation: Any, attribute: str) -> str | None:
    attributes = operation.attributes
    return str(mlir.StringAttr(attributes[attribute]).value) if attribute in attributes else None


def _tensor(type_: Any) -> tuple[tuple[int, ...], np.dtype[Any]]:
    if str(type_) == _TOKEN_TYPE:
        return _TOKEN
    tensor = mlir.RankedTensorType(type_)
    return tuple(tensor.shape), wire.mlir_dtype(str(tensor.element_type))


def _read_returns(module: Any) -> dict[int, Returns]:
    """What each function of the client must return, by its index. XLA reads as much memory as the program says."""
    calls: list[Any] = []

    def keep(operation: Any) -> Any:
        if operation.name == "stablehlo.custom_call" and _text(operation, "call_target_name") in _CALLBACKS:
            calls.append(operation)
        return mlir.WalkResult.ADVANCE

    module.operation.walk(keep)
    returns: dict[int, Returns] = {}
    for call in calls:
        [settings] = [call.attributes[name] for name in _CALL_SETTINGS if name in call.attributes]
        index = mlir.IntegerAttr(mlir.DictAttr(settings)["index"]).value
        results = tuple(None if str(r.type) == _TOKEN_TYPE else _tensor(r.type) for r in call.results)
        if returns.setdefault(index, results) != results:
            raise ValueError(f"callback {index} has several types of results")
    return returns


def _donated(main: Any) -> list[int]:
    if "arg_attrs" not in main.attributes:
        return []
    arguments = [mlir.DictAttr(attributes) for attributes in mlir.ArrayAttr(main.attributes["arg_attrs"])]
    return [i for i, names in enumerate(arguments) if "tf.aliasing_output" in names or "jax.buffer_donor" in names]


def _refuse_client_calls(program: bytes, callbacks: str) -> None:
    for target in _CLIENT_CALLS if callbacks else (*_CLIENT_CALLS, *(name.encode() for name in _CALLBACKS)):
        if target in program:
            what = f"a program that calls {target.decode()!r} in the client's process is not supported"
            raise StatusError("UNIMPLEMENTED", what)


def _read_options(engine: Engine, options: bytes) -> tuple[tuple[int, ...], bytes]:
    """(ids of the devices in order, the options for jaxlib with the ids of the CPU devices in their place)."""
    try:
        inner = wire.CompileOptions.FromString(options).compile_options
    except DecodeError as error:
        raise StatusError("INVALID_ARGUMENT", f"not the compile options of an XLA program: {error}") from error
    xla_flags.apply_own(inner)
    build = inner.executable_build_options
    assignment = build.device_assignment
    if not assignment.replica_count:
        build.ClearField("device_assignment")
        build.num_replicas = build.num_partitions = 1
        return (engine.topology.devices[0].id,), inner.SerializeToString()
    devices = _read_assignment(assignment)
    build.num_replicas, build.num_partitions = assignment.replica_count, assignment.computation_count
    for computation in assignment.computation_devices:
        ids = [device.id for device in engine.jax_devices(computation.replica_device_ids)]
        del computation.replica_device_ids[:]
        computation.replica_device_ids.extend(ids)
    return devices, inner.SerializeToString()


def _read_assignment(assignment: Any) -> tuple[int, ...]:
    """Its devices, replica by replica. StatusError where it is at odds with itself, which would end XLA's process."""
    rows = [tuple(computation.replica_device_ids) for computation in assignment.computation_devices]
    sides = (len(rows), {len(row) for row in rows})
    if not rows or sides != (assignment.computation_count, {assignment.replica_count}):
        raise StatusError("INVALID_ARGUMENT", f"a device assignment that is incomplete: {assignment}")
    devices = tuple(device for replica in zip(*rows, strict=True) for device in replica)
    if len(set(devices)) != len(devices):
        raise StatusError("INVALID_ARGUMENT", f"a device assignment with a device twice: {devices}")
    return devices


def _copy(value: Any, placement: Placement) -> Any:
    [copied] = _compat.copy_arrays([value], [placement.sharding], _compat.ALWAYS_COPY)
    return copied


def _write_layouts(reply: Any, name: str, get: Callable[[], Sequence[Any]]) -> None:
    try:
        layouts = get()
    except Exception as error:  # jaxlib has none for a program with tokens
        wire.write_status(getattr(reply, f"{name}_error"), StatusError.of(error))
        return
    field = getattr(reply, f"{name}_list")
    field.SetInParent()
    for layout in layouts:
        field.layouts.add(minor_to_major=_compat.minor_to_major(layout))


def _write_stats(field: Any, stats: Any) -> None:
    field.SetInParent()
    for name in field.DESCRIPTOR.fields_by_name:
        value = getattr(stats, name, None)
        if isinstance(value, int):
            setattr(field, name, value)


def _as_bytes(fingerprint: bytes | str | None) -> bytes | None:
    return fingerprint.encode() if isinstance(fingerprint, str) else fingerprint
