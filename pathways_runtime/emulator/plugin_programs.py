"""Programs that Pathways itself runs: arrays to and from files, resharding, profiles (`jax.extend.ifrt_programs`).

The program is JSON behind a marker. Its names are those that pathwaysutils 0.1.13 writes.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from pathways_runtime.emulator import persistence, wire
from pathways_runtime.emulator.arrays import Array, put
from pathways_runtime.emulator.profiles import Profile
from pathways_runtime.emulator.status import StatusError
from pathways_runtime.emulator.storage import Place
from pathways_runtime.emulator.transfers import reshard

if TYPE_CHECKING:
    from pathways_runtime.emulator.engine import Engine

_MARKER: Final = b"__serialized_plugin_program "
_WRITERS: Final = ThreadPoolExecutor(4, thread_name_prefix="persistence")


def compile_plugin(engine: Engine, program: bytes, options: bytes) -> Any:
    """The program that the JSON asks for. StatusError for one that is unknown or malformed."""
    if not program.startswith(_MARKER):
        raise StatusError("INVALID_ARGUMENT", "not a plugin program: its marker is missing")
    try:
        request = json.loads(program[len(_MARKER) :])
        [(name, body)] = request.items()
    except (ValueError, AttributeError) as error:
        raise StatusError("INVALID_ARGUMENT", f"a plugin program is JSON with one key: {error}") from error
    make = KINDS.get(name)
    if make is None:
        known = ", ".join(sorted(KINDS))
        raise StatusError("UNIMPLEMENTED", f"plugin program {name!r} is not supported; known: {known}")
    try:
        return make(engine, body)
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        message = f"plugin program {name!r} is malformed: {type(error).__name__}: {error}"
        raise StatusError("INVALID_ARGUMENT", message) from error


class PluginProgram:
    """What all plugin programs have in common. `outputs` are (dtype, shape, where) of each."""

    fingerprint: bytes | None = None

    def __init__(
        self,
        engine: Engine,
        name: str,
        devices: tuple[int, ...],
        outputs: Sequence[tuple[np.dtype[Any], tuple[int, ...], wire.Sharding]] = (),
    ) -> None:
        self.name = name
        # Pathways runs it where its arrays are, and the client checks that.
        self.devices = devices
        self._engine = engine
        self._outputs = outputs

    @property
    def outputs(self) -> list[Any]:
        """The outputs as the protocol describes them."""
        return [wire.write_output(dtype, shape, sharding) for dtype, shape, sharding in self._outputs]

    def describe(self, reply: Any) -> None:
        """Says that there is nothing to know: no layouts, nothing donated."""
        unknown = StatusError("UNIMPLEMENTED", f"{self.name} is a plugin program")
        for field in (
            reply.parameter_layouts_error,
            reply.output_layouts_error,
            reply.compiled_memory_stats_error,
            reply.output_memory_kinds.status,
        ):
            wire.write_status(field, unknown)
        reply.donated_input_indices.SetInParent()

    def cost_analysis(self) -> dict[str, float]:
        """StatusError: XLA knows nothing of it."""
        raise StatusError("UNIMPLEMENTED", f"{self.name} is a plugin program, without a cost analysis")

    def text(self) -> str:
        """StatusError: it has no text."""
        raise StatusError("UNIMPLEMENTED", f"{self.name} is a plugin program, without a text")


class Write(PluginProgram):
    """Writes each argument to a folder of its own."""

    def __init__(self, engine: Engine, requests: Sequence[Mapping[str, Any]]) -> None:
        super().__init__(engine, "persistence_write", _devices(requests[0]))
        self._places = [_place(request) for request in requests]

    def launch(self, arguments: Sequence[Array], kept: Sequence[int], wants_token: bool) -> tuple[list[Array], Any]:
        """Fetches the arguments at once, and writes them in the background: ([], a token of the last write)."""
        if len(arguments) != len(self._places):
            raise StatusError("INVALID_ARGUMENT", f"{len(arguments)} arrays to write to {len(self._places)} files")
        # What is fetched here is what is written, whatever the program does to the arrays next.
        values = [_values(argument) for argument in arguments]
        chunks = [argument.placement.shard_shape(argument.shape) for argument in arguments]
        return [], _Token(
            [_WRITERS.submit(persistence.write, *item) for item in zip(self._places, values, chunks, strict=True)]
        )


class Read(PluginProgram):
    """Reads each output from its folder."""

    def __init__(self, engine: Engine, requests: Sequence[Mapping[str, Any]]) -> None:
        outputs = [_read_output(request) for request in requests]
        super().__init__(engine, "persistence_read", outputs[0][2].devices, outputs)
        self._places = [_place(request) for request in requests]

    def launch(self, arguments: Sequence[Array], kept: Sequence[int], wants_token: bool) -> tuple[list[Array], Any]:
        """Reads the files: (outputs, None)."""
        return [self._read(place, *output) for place, output in zip(self._places, self._outputs, strict=True)], None

    def _read(self, place: Place, dtype: np.dtype[Any], shape: tuple[int, ...], sharding: wire.Sharding) -> Array:
        placement = self._engine.placement(sharding, shape)
        stamp = self._engine.health.stamp(placement.slices)
        whole = persistence.read(place, dtype, shape)
        return put([whole[index] for index in placement.indices(shape)], dtype, shape, placement, stamp)


class Reshard(PluginProgram):
    """Gives each argument another sharding."""

    def __init__(self, engine: Engine, request: Mapping[str, Any]) -> None:
        sources = [_sharding(sharding) for sharding in request["inSharding"]]
        self._targets = [_sharding(sharding) for sharding in request["outSharding"]]
        self._donates = bool(request.get("donateInput"))
        # What they are shows with the first arguments.
        unknown = [(np.dtype(np.float32), (), target) for target in self._targets]
        super().__init__(engine, "reshard", sources[0].devices, unknown)

    def launch(self, arguments: Sequence[Array], kept: Sequence[int], wants_token: bool) -> tuple[list[Array], Any]:
        """Reshards: (outputs, None)."""
        if len(arguments) != len(self._targets):
            raise StatusError("INVALID_ARGUMENT", f"{len(arguments)} arrays for {len(self._targets)} shardings")
        pairs = list(zip(arguments, self._targets, strict=True))
        self._outputs = [(array.dtype, array.shape, target) for array, target in pairs]
        results = [reshard(self._engine, array, target) for array, target in pairs]
        if self._donates:
            for array in arguments:
                array.delete()
        return results, None


class Profiling(PluginProgram):
    """Starts a profile when it runs, and ends it when it runs again."""

    def __init__(self, engine: Engine, request: Mapping[str, Any]) -> None:
        device = (engine.topology.devices[0].id,)
        # Only who asks with these options wants to be told where the profile goes.
        where = [(wire.STRING, (1,), wire.Sharding(device))] if "xprofTraceOptions" in request else []
        super().__init__(engine, "profile", device, where)
        self._profile = Profile(request)
        self._is_started = False

    def launch(self, arguments: Sequence[Array], kept: Sequence[int], wants_token: bool) -> tuple[list[Array], Any]:
        """Starts, or ends in the background: (an array with the folder's name, None or a token of the file)."""
        token = None
        if self._is_started:
            token = _Token([_WRITERS.submit(self._profile.stop)])
        else:
            self._profile.start()
        self._is_started = not self._is_started
        folder = str(self._profile.folder).encode()
        # Of no slice: a profile is ended after the loss of one, too.
        return [
            put([(folder,)], dtype, shape, self._engine.placement(sharding, shape), ())
            for dtype, shape, sharding in self._outputs
        ], token


class _Token:
    """Becomes ready when all files are written."""

    def __init__(self, writes: Sequence[Future[None]]) -> None:
        self._writes = writes

    def block_until_ready(self) -> None:
        """Raises the first error of a write."""
        for write in self._writes:
            write.result()


KINDS: Final[dict[str, Callable[[Engine, Any], PluginProgram]]] = {
    "persistenceWriteRequest": lambda engine, body: Write(engine, [body]),
    "bulk_persistence_write_request": lambda engine, body: Write(engine, body["write_requests"]),
    "persistenceReadRequest": lambda engine, body: Read(engine, [body]),
    "bulk_persistence_read_request": lambda engine, body: Read(engine, body["read_requests"]),
    "reshardRequest": Reshard,
    "profileRequest": Profiling,
}


def _values(array: Array) -> persistence.Values:
    if array.dtype is wire.STRING:
        raise StatusError("INVALID_ARGUMENT", "an array of strings cannot be written to files")
    return np.asarray(array.check())


def _devices(request: Mapping[str, Any]) -> tuple[int, ...]:
    return tuple(int(device_id) for device_id in request["devices"]["device_ids"])


def _sharding(request: Mapping[str, Any]) -> wire.Sharding:
    return wire.Sharding(_devices(request), request.get("memory_kind"), base64.b64decode(request["xla_hlo_sharding"]))


def _read_output(request: Mapping[str, Any]) -> tuple[np.dtype[Any], tuple[int, ...], wire.Sharding]:
    shape = tuple(int(side) for side in request["shape"]["dimensions"])
    sharding = wire.Sharding(_devices(request), None, base64.b64decode(request["b64_hlo_sharding_string"]))
    return wire.named_dtype(request["shape"]["xla_primitive_type_str"]), shape, sharding


def _place(request: Mapping[str, Any]) -> Place:
    folder, name = (base64.b64decode(request[key]).decode() for key in ("b64_location", "b64_name"))
    return Place.parse(folder) / name
