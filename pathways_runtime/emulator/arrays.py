"""Arrays by handle: their shards, the slices they live on, and the errors that poison them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Final

import numpy as np

from pathways_runtime import _compat
from pathways_runtime.emulator import wire
from pathways_runtime.emulator.engine import Health, Placement
from pathways_runtime.emulator.slices import Stamp
from pathways_runtime.emulator.status import StatusError

_DELETED: Final = StatusError("INVALID_ARGUMENT", "Array has been deleted.")


class Strings:
    """The shards of a string array. Its devices exist in name only: the strings live here."""

    def __init__(self, shards: Sequence[tuple[bytes, ...]]) -> None:
        self.shards = list(shards)

    def part(self, index: int) -> Strings:
        """That shard by itself."""
        return Strings([self.shards[index]])

    def is_ready(self) -> bool:
        """True: strings are never computed."""
        return True

    def is_deleted(self) -> bool:
        """False: strings are never donated."""
        return False

    def block_until_ready(self) -> None:
        """Returns at once."""


class Array:
    """What a handle stands for: shards of one dtype on the devices of `placement`, or the error that took their place.

    `value` is a jax array over all the devices, or `Strings`; None once there is an error.
    """

    __slots__ = ("dtype", "error", "placement", "shape", "stamp", "value")

    def __init__(
        self, value: Any, dtype: np.dtype[Any], shape: tuple[int, ...], placement: Placement, stamp: Stamp
    ) -> None:
        self.value = value
        self.dtype = dtype
        self.shape = shape
        self.placement = placement
        self.stamp = stamp
        self.error: StatusError | None = None

    def poison(self, error: StatusError) -> None:
        """Frees the shards; `error` answers every use from now on. The first error stays."""
        if self.error is None:
            self.error = error
        self.value = None

    def delete(self) -> None:
        """Frees the shards, once nothing reads or shares them any more. A poisoned array stays as it is."""
        if self.value is not None:
            self.poison(_DELETED)

    def check(self) -> Any:
        """The value; raises the error that poisoned the array."""
        value = self.value
        if value is None:
            raise (self.error or _DELETED).again()
        return value

    def is_ready(self) -> bool:
        """True when the value is computed, or never will be."""
        value = self.value
        return value is None or value.is_deleted() or value.is_ready()

    def wait(self) -> None:
        """Returns when the value is computed; raises the error that came instead, or the loss of a slice meanwhile."""
        self.check().block_until_ready()
        self.check()

    def is_deleted(self) -> bool:
        """True when it was deleted or donated. A poisoned array is not: its use tells why."""
        value = self.value
        return self.error is _DELETED if value is None else bool(value.is_deleted())

    def shards(self) -> list[Any]:
        """One value for each device, shared with the array."""
        value = self.check()
        if isinstance(value, Strings):
            return value.shards
        return [value] if len(self.placement.devices) == 1 else _compat.disassemble(value)

    def parts(self, indices: Iterable[int]) -> list[Any]:
        """The value of an array for each of these devices alone, shared with this one."""
        value = self.check()
        if isinstance(value, Strings):
            return [value.part(index) for index in indices]
        shards = self.shards()
        return [shards[index] for index in indices]


def assemble(
    shards: Sequence[Any], dtype: np.dtype[Any], shape: tuple[int, ...], placement: Placement, stamp: Stamp
) -> Array:
    """An array of one shard for each device of `placement`, which it shares."""
    if len(shards) != len(placement.devices):
        raise StatusError("INVALID_ARGUMENT", f"{len(shards)} shards for {len(placement.devices)} devices")
    value: Any
    if dtype is wire.STRING:
        value = Strings(shards)
    elif len(shards) == 1:
        value = shards[0]
    else:
        value = _compat.assemble(shape, dtype, placement.sharding, shards)
    return Array(value, dtype, shape, placement, stamp)


def put(
    shards: Sequence[Any], dtype: np.dtype[Any], shape: tuple[int, ...], placement: Placement, stamp: Stamp
) -> Array:
    """An array of one numpy array (or tuple of strings) for each device of `placement`."""
    if dtype is wire.STRING:
        return assemble(shards, dtype, shape, placement, stamp)
    value = _compat.put_shards(shape, dtype, placement.sharding, shards, placement.jax_devices)
    return Array(value, dtype, shape, placement, stamp)


class Poisoned(Array):
    """An array that never was, and of which no more is known than why."""

    __slots__ = ()

    def __init__(self, error: StatusError) -> None:
        self.value = None
        self.error = error
        self.stamp = ()
        self.dtype = np.dtype(np.float32)
        self.shape = ()


class ArrayTable:
    """The arrays of one session by handle. Lost slices empty them from another thread."""

    def __init__(self, health: Health) -> None:
        self._arrays: dict[int, Array] = {}
        self._health = health
        health.watch(self)

    def __getitem__(self, handle: int) -> Array:
        """The array, poisoned or not. StatusError where there is none."""
        try:
            return self._arrays[handle]
        except KeyError:
            raise StatusError("NOT_FOUND", f"there is no array {handle}") from None

    def __len__(self) -> int:
        return len(self._arrays)

    def add(self, handles: Sequence[int], arrays: Sequence[Array], epoch: int) -> None:
        """Puts arrays under their handles. `epoch` is that of the health before their stamps were taken."""
        self._arrays.update(zip(handles, arrays, strict=True))
        if self._health.epoch != epoch:
            self._drop(arrays)

    def poison(self, handles: Iterable[int], error: StatusError) -> None:
        """Puts `error` under each handle that stands for nothing yet; 0 is no handle."""
        for handle in handles:
            if handle and handle not in self._arrays:
                self._arrays[handle] = Poisoned(error)

    def delete(self, handles: Iterable[int]) -> None:
        """Frees the arrays; their handles stay, for the client to take back by `forget`."""
        for handle in handles:
            array = self._arrays.get(handle)
            if array is not None:
                array.delete()

    def forget(self, handles: Iterable[int]) -> list[int]:
        """Takes the handles back; returns those that stand for nothing."""
        return [handle for handle in handles if self._arrays.pop(handle, None) is None]

    def clear(self) -> None:
        """Takes all handles back."""
        self._arrays.clear()

    def drop_lost(self) -> None:
        """Poisons what lived on slices that are lost."""
        self._drop(list(self._arrays.values()))

    def _drop(self, arrays: Iterable[Array]) -> None:
        errors: dict[Stamp, StatusError | None] = {}
        for array in arrays:
            if array.value is None:
                continue
            if array.stamp not in errors:
                errors[array.stamp] = self._health.error(array.stamp)
            error = errors[array.stamp]
            if error is not None:
                array.poison(error)
