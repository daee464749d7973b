"""What all sessions share: devices, the health of slices, and the turn to execute."""

from __future__ import annotations

import hashlib
import itertools
import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final, Protocol

from pathways_runtime import _compat, _contract
from pathways_runtime._version import __version__
from pathways_runtime.emulator import wire
from pathways_runtime.emulator.slices import Device, Slices, Stamp, Topology
from pathways_runtime.emulator.status import StatusError

if TYPE_CHECKING:
    from pathways_runtime.emulator.sidecars import Sidecar

MEMORY_KINDS: Final = ("device", "pinned_host", "unpinned_host")


class Engine:
    """jaxlib's CPU client under the names of the emulated devices. One in a process, made once."""

    def __init__(self, topology: Topology, slices: Slices, platform: str) -> None:
        self.platform = platform
        self.topology = topology
        self.client = _compat.start_cpu_backend(len(topology.devices))
        self.devices = _jax_devices(topology, self.client)
        self.slice_of = {device.id: device.slice for device in topology.devices}
        self.slice_of |= {cpu_device_id(topology, device): device.slice for device in topology.devices}
        # Hosts count over all slices here.
        self.host_of = {device.id: device.task for device in topology.devices}
        self.host_of |= {cpu_device_id(topology, device): device.task for device in topology.devices}
        # Who runs colocated Python connects here, and is known by a key.
        self.target = ""
        self.sidecars: dict[bytes, Sidecar] = {}
        self.health = Health(slices)
        self.turns = Turns()
        self.placement = lru_cache(maxsize=4096)(self._placement)
        self.init_response = describe_devices(topology, platform)

    def cpu_devices_of(self, hosts: Sequence[int]) -> tuple[int, ...]:
        """The ids of the CPU devices of these hosts."""
        return tuple(cpu_device_id(self.topology, device) for device in self.topology.devices if device.task in hosts)

    def _placement(self, sharding: wire.Sharding, shape: tuple[int, ...]) -> Placement:
        return Placement(self, sharding, shape)

    def jax_devices(self, device_ids: Iterable[int]) -> list[Any]:
        """The CPU devices that stand for these. StatusError names an id that no device has."""
        try:
            return [self.devices[device_id] for device_id in device_ids]
        except KeyError as error:
            raise StatusError("INVALID_ARGUMENT", f"there is no device with id {error.args[0]}") from None


class Placement:
    """A sharding of the protocol for arrays of one shape, made fit for jaxlib. Cached: `Engine.placement`."""

    __slots__ = ("devices", "jax_devices", "sharding", "slices", "source")

    def __init__(self, engine: Engine, sharding: wire.Sharding, shape: tuple[int, ...]) -> None:
        if not sharding.devices:
            raise StatusError("INVALID_ARGUMENT", "a sharding over no devices")
        self.source = sharding
        self.devices = sharding.devices
        self.jax_devices = engine.jax_devices(sharding.devices)
        self.slices = tuple(sorted({engine.slice_of[device_id] for device_id in sharding.devices}))
        self.sharding = self._make_sharding(shape)

    def indices(self, shape: tuple[int, ...]) -> list[Any]:
        """What each device has of an array of this shape, as an index of the whole."""
        cuts = self.sharding.devices_indices_map(shape)
        return [cuts[device] for device in self.jax_devices]

    def shard_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of the first device's part of an array of this shape. No other is larger."""
        return tuple(len(range(*cut.indices(side))) for cut, side in zip(self.indices(shape)[0], shape, strict=True))

    def _make_sharding(self, shape: tuple[int, ...]) -> Any:
        source = self.source
        if len(self.devices) == 1:
            return _compat.single_device_sharding(self.jax_devices[0], source.memory_kind)
        if source.op_sharding is not None:
            cut = _compat.hlo_sharding(source.op_sharding)
        else:
            cut = _compat.tiled_hlo_sharding(_tiles(shape, source.shard_shape or shape), len(self.devices))
        return _compat.device_sharding(self.jax_devices, cut, source.memory_kind)


def _tiles(shape: tuple[int, ...], shard_shape: tuple[int, ...]) -> tuple[int, ...]:
    if len(shape) != len(shard_shape):
        raise StatusError("INVALID_ARGUMENT", f"shards of shape {shard_shape} cannot make up shape {shape}")
    return tuple(-(-side // part) if part else 1 for side, part in zip(shape, shard_shape, strict=True))


class Loses(Protocol):
    """What holds arrays, and lets go of those whose slice is lost."""

    def drop_lost(self) -> None:
        """Frees the memory of lost arrays; their use is an error from then on."""


class Health:
    """Which slices are up, as cheaply as the path of execution needs it.

    `epoch` grows with every change, so that code which took a stamp can tell whether anything has changed since.
    """

    def __init__(self, slices: Slices) -> None:
        self.epoch = 0
        self._slices = slices
        self._stamps: dict[tuple[int, ...], Stamp] = {}
        self._holders: weakref.WeakSet[Any] = weakref.WeakSet()
        self._down = self._now_down()
        slices.subscribe(self._on_change)

    def watch(self, holder: Loses) -> None:
        """Calls `holder.drop_lost` after each loss, for as long as the holder lives."""
        self._holders.add(holder)

    def stamp(self, slices: tuple[int, ...]) -> Stamp:
        """The present life of these slices. StatusError (DATA_LOSS) names one that is down."""
        if self._down and not self._down.isdisjoint(slices):
            raise StatusError("DATA_LOSS", self._slices.lost(self._slices.stamp(slices)) or "a slice was lost")
        stamp = self._stamps.get(slices)
        if stamp is None:
            stamps = self._stamps
            stamp = stamps[slices] = self._slices.stamp(slices)
        return stamp

    def error(self, stamp: Stamp) -> StatusError | None:
        """What the use of something with this stamp answers, None while it lives."""
        reason = self._slices.lost(stamp)
        return None if reason is None else StatusError("DATA_LOSS", reason)

    def _now_down(self) -> frozenset[int]:
        return frozenset(index for index in range(self._slices.num_slices) if not self._slices.is_up(index))

    def _on_change(self, index: int, is_up: bool, reason: str) -> None:
        # In this order: who sees the old epoch has put arrays where `drop_lost` finds them, or looks again.
        self._down = self._now_down()
        self._stamps = {}
        self.epoch += 1
        if not is_up:
            for holder in list(self._holders):
                holder.drop_lost()


class Turns:
    """One execution over several devices at a time, the next once the last has ended.

    XLA:CPU gives every device of an execution a thread that waits for the others. Two executions that share the
    threads can wait for each other for ever, and jaxlib then aborts the process.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._last: Any = None

    def take(self, start: Callable[[], Any]) -> None:
        """Runs `start` when its turn has come. It returns a token that becomes ready when the execution has ended."""
        with self._lock:
            last, self._last = self._last, None
            if last is not None:
                _wait(last)
            self._last = start()


def _wait(token: Any) -> None:
    try:
        token.block_until_ready()
    except Exception:  # the error of that execution is in its outputs, and its own session answers with it
        return


def cpu_device_id(topology: Topology, device: Device) -> int:
    """The id of the host's CPU device beside an accelerator device, where colocated Python runs."""
    return device.id + len(topology.devices)


def _jax_devices(topology: Topology, client: Any) -> dict[int, Any]:
    """The CPU devices that stand for the emulated ones and for the CPU devices beside them, by id."""
    devices: dict[int, Any] = {}
    for device, jax_device in zip(topology.devices, client.devices(), strict=True):
        devices[device.id] = devices[cpu_device_id(topology, device)] = jax_device
    return devices


def describe_devices(topology: Topology, platform: str) -> Any:
    """The answer to a client's Init, the session's id left out."""
    response = _describe_server(platform)
    memory_ids = itertools.count()
    for device in topology.devices:
        _describe_accelerator(response, device, platform, [next(memory_ids) for _ in MEMORY_KINDS])
    for device in topology.devices:
        _describe_cpu(response, topology, device, [next(memory_ids) for _ in MEMORY_KINDS])
    return response


def describe_cpu_devices(topology: Topology, device_ids: Iterable[int]) -> Any:
    """The answer to a sidecar's Init: of all devices it sees these CPU devices alone."""
    response = _describe_server("cpu")
    memory_ids = itertools.count()
    wanted = set(device_ids)
    for device in topology.devices:
        device_id = cpu_device_id(topology, device)
        if device_id in wanted:
            _describe_cpu(response, topology, device, [next(memory_ids) for _ in MEMORY_KINDS])
            response.primary_device_ids.append(device_id)
    return response


def _describe_server(platform: str) -> Any:
    response = wire.InitResponse(
        platform_name=platform,
        platform_version=f"pathways_runtime emulator {__version__} (jax-{_compat.JAX_VERSION})",
        platform_id=int.from_bytes(hashlib.sha256(platform.encode()).digest()[:7], "big"),
        runtime_type=_contract.RUNTIME_TYPE,
    )
    if "client_attributes" in response.DESCRIPTOR.fields_by_name:
        attributes = {"serialize_with_sdy": True, "supports_executable_serialization": False}
        wire.write_attributes(response.client_attributes, attributes)
    return response


def _describe_accelerator(response: Any, device: Device, platform: str, memory_ids: Sequence[int]) -> None:
    coords = ",".join(str(place) for place in (*device.coords, device.core_on_chip))
    text = f"device({device.id},TPU_DEVICE,coords=[{coords}],vtask={device.task},slice={device.slice},"
    text += f"default_mem={MEMORY_KINDS[0]},mem_spaces={len(MEMORY_KINDS)})"
    message = _add_device(response, device.id, platform, device.kind, text, memory_ids)
    message.local_hardware_id = device.local_hardware_id
    attributes: dict[str, wire.AttributeValue] = {
        "slice_index": device.slice,
        "coords": device.coords,
        "core_on_chip": device.core_on_chip,
        "num_cores": 1,
        "virtual_task_index": device.task,
        "colocation_id": device.id,
    }
    wire.write_attributes(message.attributes, attributes)
    response.primary_device_ids.append(device.id)
    _add_memories(response, memory_ids, device.id)


def _describe_cpu(response: Any, topology: Topology, device: Device, memory_ids: Sequence[int]) -> None:
    device_id = cpu_device_id(topology, device)
    text = f"device({device_id},CPU_DEVICE,coords=[],vtask={device.task},slice={device.slice},"
    text += f"default_mem={MEMORY_KINDS[0]},mem_spaces={len(MEMORY_KINDS)})"
    message = _add_device(response, device_id, "cpu", "cpu", text, memory_ids)
    attributes: dict[str, wire.AttributeValue] = {
        "slice_index": device.slice,
        "virtual_task_index": device.task,
        "colocation_id": device.id,
    }
    wire.write_attributes(message.attributes, attributes)
    _add_memories(response, memory_ids, device_id)


def _add_device(response: Any, device_id: int, platform: str, kind: str, text: str, memory_ids: Sequence[int]) -> Any:
    response.addressable_device_ids.append(device_id)
    message = response.all_devices.add(
        id=device_id,
        local_device_id=device_id,
        local_hardware_id=device_id,
        platform_name=platform,
        device_kind=kind,
        default_memory_id=memory_ids[0],
        memory_ids=memory_ids,
    )
    # jaxlib prints `to_string` as the device's repr.
    message.debug_string = message.to_string = text
    return message


def _add_memories(response: Any, memory_ids: Sequence[int], device_id: int) -> None:
    for memory_id, (number, kind) in zip(memory_ids, enumerate(MEMORY_KINDS), strict=True):
        memory = response.memories.add(id=memory_id, memory_space_kind=kind, kind_id=number, device_ids=[device_id])
        memory.debug_string = memory.to_string = f"memory({memory_id},{kind},device={device_id})"
