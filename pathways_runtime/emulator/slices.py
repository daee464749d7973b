"""What the emulated machines are, and which of their slices live. Standard library only.

`Topology` says where each device sits; it never changes. `Slices` says which slices are up, and tells, from a stamp
taken earlier, whether what lived on them since has been lost.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Final

from pathways_runtime import _tpus

# One (slice, generation) for each slice that something lives on. A generation is one life of a slice, 0 the first.
Stamp = tuple[tuple[int, int], ...]
# Called with (slice, is it up, reason of the loss or "").
Listener = Callable[[int, bool, str], None]

_NEVER: Final = -1  # the generation of a stamp that was taken while its slice was down


@dataclass(frozen=True, slots=True)
class Device:
    """One device as JAX sees it.

    `coords` are the chip's (x, y, z) in its slice, z = 0 where a generation has two dimensions. `host` counts within
    the slice, `task` over all slices. `local_hardware_id` counts within the host. A chip of `tpu7x` is two devices,
    told apart by `core_on_chip`, each with half of the chip's memory.
    """

    id: int
    slice: int
    host: int
    task: int
    coords: tuple[int, int, int]
    core_on_chip: int
    local_hardware_id: int
    kind: str
    hbm_bytes: int


@dataclass(frozen=True)
class Topology:
    """`num_slices` equal slices of `instance_type` (`tpuv6e:2x4`).

    ValueError names an instance type that no TPU has, or a number of slices below one.
    """

    instance_type: str
    num_slices: int
    first_device_id: int = 0

    def __post_init__(self) -> None:
        if self.num_slices < 1:
            raise ValueError(f"{self.num_slices} slices: at least 1 is needed")
        if self.first_device_id < 0:
            raise ValueError(f"first device id {self.first_device_id} is negative")
        _ = self.shape

    @cached_property
    def shape(self) -> _tpus.SliceShape:
        """One slice, from the table of TPU facts."""
        return _tpus.parse_instance_type(self.instance_type)

    @property
    def hosts_per_slice(self) -> int:
        """Worker processes in each slice."""
        return self.shape.hosts

    @property
    def num_hosts(self) -> int:
        """Worker processes in all slices."""
        return self.num_slices * self.hosts_per_slice

    @property
    def devices_per_slice(self) -> int:
        """JAX devices in each slice."""
        return self.shape.jax_devices

    @cached_property
    def devices(self) -> tuple[Device, ...]:
        """All devices in order of id: slice by slice, host by host, chip by chip, core by core."""
        places = tuple(self._places_of_slice())
        hbm_bytes = (self.shape.hbm_gib_per_chip << 30) // self.shape.generation.jax_devices_per_chip
        devices: list[Device] = []
        for slice_index in range(self.num_slices):
            for host, local, coords, core in places:
                devices.append(
                    Device(
                        id=self.first_device_id + len(devices),
                        slice=slice_index,
                        host=host,
                        task=slice_index * self.hosts_per_slice + host,
                        coords=coords,
                        core_on_chip=core,
                        local_hardware_id=local,
                        kind=self.shape.device_kind,
                        hbm_bytes=hbm_bytes,
                    )
                )
        return tuple(devices)

    @cached_property
    def by_id(self) -> dict[int, Device]:
        """Each device under its id."""
        return {device.id: device for device in self.devices}

    def slices_of(self, device_ids: Iterable[int]) -> tuple[int, ...]:
        """The slices that these devices are on, each once, in order. KeyError for an id that no device has."""
        return tuple(sorted({self.by_id[device_id].slice for device_id in device_ids}))

    def _places_of_slice(self) -> Iterable[tuple[int, int, tuple[int, int, int], int]]:
        """(host, local hardware id, coords, core) of each device of a slice, in order of id."""
        sides = _three_sides(self.shape.dims)
        block = host_block(sides, self.shape.chips_per_host)
        hosts = _points(tuple(math.ceil(side / edge) for side, edge in zip(sides, block, strict=True)))
        for host, (bx, by, bz) in enumerate(hosts):
            local = 0
            for x, y, z in _points(block):
                coords = (bx * block[0] + x, by * block[1] + y, bz * block[2] + z)
                for core in range(self.shape.generation.jax_devices_per_chip):
                    yield host, local, coords, core
                    local += 1


def host_block(sides: tuple[int, int, int], chips_per_host: int) -> tuple[int, int, int]:
    """The block of chips that one host owns, as (x, y, z): 1x1x1, 2x2x1, or 2x4x1 for hosts of eight chips."""
    x = min(2, sides[0], chips_per_host)
    y = min(chips_per_host // x, sides[1])
    return x, y, chips_per_host // (x * y)


def _three_sides(topology: tuple[int, ...]) -> tuple[int, int, int]:
    x, y, z = (*topology, 1, 1)[:3]
    return x, y, z


def _points(sides: tuple[int, ...]) -> list[tuple[int, int, int]]:
    """All points of a box, x fastest."""
    return [(x, y, z) for z in range(sides[2]) for y in range(sides[1]) for x in range(sides[0])]


class Slices:
    """Which slices are up. All slices begin down, in generation 0; each loss begins a new generation.

    Safe to use from any thread. Subscribers are called one at a time, in the order of the changes, from the thread that
    made the change; they may read, but must not mark slices.
    """

    def __init__(self, num_slices: int) -> None:
        self._up = [False] * num_slices
        self._generations = [0] * num_slices
        self._reasons = ["it has not started yet"] * num_slices
        self._listeners: list[Listener] = []
        self._changed = threading.Condition(threading.RLock())
        self._telling = threading.RLock()

    @property
    def num_slices(self) -> int:
        """How many slices there are, up or down."""
        return len(self._up)

    def is_up(self, index: int) -> bool:
        """True while programs may run on the slice. IndexError where there is no such slice."""
        with self._changed:
            return self._up[index]

    def state(self, index: int) -> tuple[bool, int, str]:
        """(is it up, how often it has been lost, why it was lost last)."""
        with self._changed:
            return self._up[index], self._generations[index], self._reasons[index]

    def stamp(self, slice_indices: Iterable[int]) -> Stamp:
        """The present life of each of these slices, to ask about later. Of a slice that is down it is lost already."""
        with self._changed:
            return tuple((i, self._generations[i] if self._up[i] else _NEVER) for i in sorted(set(slice_indices)))

    def lost(self, stamp: Stamp) -> str | None:
        """Why what was made under this stamp is gone: a slice of it is down, or has been since. None while it lives."""
        with self._changed:
            for index, generation in stamp:
                if not self._up[index]:
                    return f"slice {index} is down: {self._reasons[index]}"
                if generation != self._generations[index]:
                    return f"slice {index} was lost and has come back since: {self._reasons[index]}"
            return None

    def mark_up(self, index: int) -> None:
        """Programs may run on the slice from now on."""
        with self._telling:
            with self._changed:
                if self._up[index]:
                    return
                self._up[index] = True
                self._changed.notify_all()
            self._tell(index, True, "")

    def mark_down(self, index: int, reason: str) -> None:
        """The slice is lost with all that lived on it. One that is down already keeps its reason."""
        with self._telling:
            with self._changed:
                if not self._up[index]:
                    return
                self._up[index] = False
                self._generations[index] += 1
                self._reasons[index] = reason
                self._changed.notify_all()
            self._tell(index, False, reason)

    def subscribe(self, listener: Listener) -> Callable[[], None]:
        """Calls `listener` with every later change. Returns what ends that."""
        with self._telling:
            self._listeners.append(listener)

        def unsubscribe() -> None:
            with self._telling:
                if listener in self._listeners:
                    self._listeners.remove(listener)

        return unsubscribe

    def wait_up(self, indices: Iterable[int], timeout_s: float | None) -> bool:
        """True once all these slices are up at the same moment, False when that took longer than `timeout_s`."""
        wanted = tuple(indices)
        with self._changed:
            return self._changed.wait_for(lambda: all(self._up[index] for index in wanted), timeout_s)

    def wait_started(self, indices: Iterable[int], timeout_s: float | None) -> bool:
        """True once each of these slices has been up, whatever became of it since; False when that took longer.

        The head of a job starts before its workers, so who waits for this sees no slice that is not there yet.
        """
        wanted = tuple(indices)
        with self._changed:
            return self._changed.wait_for(
                lambda: all(self._up[index] or self._generations[index] for index in wanted), timeout_s
            )

    def _tell(self, index: int, up: bool, reason: str) -> None:
        for listener in tuple(self._listeners):
            listener(index, up, reason)
