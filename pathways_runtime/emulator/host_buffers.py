"""Bytes on their way between a client's host and the devices, by the handles that the client gave them."""

from __future__ import annotations

import os
import threading
from typing import Any, Final

import numpy as np

from pathways_runtime.emulator.status import StatusError

# XLA:CPU uses host memory in place when it is aligned like this, and copies it otherwise.
_ALIGNMENT_BYTES: Final = 64
# How many times its own size an array may take with strides that leave gaps.
_MAX_SPREAD: Final = 64
_MEMORY_BYTES: Final = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


class HostBuffers:
    """The buffers of one session. From any thread."""

    def __init__(self) -> None:
        self._buffers: dict[int, Any] = {}
        self._changed = threading.Condition()
        self._closed = False

    def store(self, handle: int, data: Any) -> None:
        """Keeps `data`, which supports the buffer protocol, until `delete`; not in a session that has ended."""
        with self._changed:
            if self._closed:
                return
            self._buffers[handle] = data
            self._changed.notify_all()

    def fail(self, handle: int, error: StatusError) -> None:
        """Raises `error` where the buffer is taken: its data will not come."""
        self.store(handle, error)

    def take(self, handle: int) -> Any:
        """The buffer, which is then forgotten. Waits for it: data may arrive after the request that uses it."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or handle in self._buffers)
            if handle not in self._buffers:
                raise StatusError("CANCELLED", f"the session ended before host buffer {handle} arrived")
            data = self._buffers.pop(handle)
        if isinstance(data, StatusError):
            raise data
        return data

    def get(self, handle: int) -> Any:
        """The buffer, which is kept. StatusError where there is none."""
        with self._changed:
            data = self._buffers.get(handle)
        if data is None or isinstance(data, StatusError):
            raise StatusError("NOT_FOUND", f"there is no host buffer {handle}")
        return data

    def delete(self, handle: int) -> None:
        """Forgets a buffer; one that is not there is forgotten already."""
        with self._changed:
            self._buffers.pop(handle, None)

    def close(self) -> None:
        """Forgets all and ends every wait."""
        with self._changed:
            self._closed = True
            self._buffers.clear()
            self._changed.notify_all()


def allocate(size_bytes: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Uninitialized bytes that XLA:CPU can use in place. ValueError or MemoryError for a size that cannot be."""
    if size_bytes < 0:
        raise ValueError("a negative size")
    if size_bytes > _MEMORY_BYTES:
        raise MemoryError(f"this machine has {_MEMORY_BYTES} bytes of memory")
    memory = np.empty(size_bytes + _ALIGNMENT_BYTES, np.uint8)
    offset = -memory.ctypes.data % _ALIGNMENT_BYTES
    return memory[offset : offset + size_bytes]


def as_array(
    data: Any, dtype: np.dtype[Any], shape: tuple[int, ...], byte_strides: tuple[int, ...] | None
) -> np.ndarray[Any, np.dtype[Any]]:
    """The array that these bytes are, without a copy. StatusError where the shape or the strides lead out of them."""
    try:
        # A zero-length array has no strides worth keeping, and numpy refuses a buffer of no bytes for it.
        if byte_strides is None or 0 in shape:
            return np.frombuffer(data, np.uint8)[: dtype.itemsize * int(np.prod(shape))].view(dtype).reshape(shape)
        if len(byte_strides) != len(shape) or any(stride < 0 for stride in byte_strides):
            raise ValueError("there must be one for each dimension, none negative")
        if _extent(shape, byte_strides) + dtype.itemsize > len(memoryview(data)):
            raise ValueError("they lead out of the bytes")
        return np.ndarray(shape, dtype, data, 0, byte_strides)
    except (ValueError, TypeError) as error:
        what = f"{len(memoryview(data))} bytes are no {dtype}{list(shape)} with strides {byte_strides}"
        raise StatusError("INVALID_ARGUMENT", f"{what}: {error}") from error


def as_bytes(array: np.ndarray[Any, np.dtype[Any]], byte_strides: tuple[int, ...] | None) -> memoryview:
    """The bytes of an array in C order, or laid out by `byte_strides`; without a copy where it lies so already."""
    if byte_strides is None or array.size == 0:
        return _flat(np.ascontiguousarray(array))
    if len(byte_strides) != array.ndim or any(stride < 0 for stride in byte_strides):
        raise StatusError("INVALID_ARGUMENT", f"strides {byte_strides} do not fit an array of shape {array.shape}")
    if byte_strides == array.strides and array.flags.c_contiguous:
        return _flat(array)
    size_bytes = _extent(array.shape, byte_strides) + array.itemsize
    if size_bytes > _MAX_SPREAD * array.nbytes:
        raise StatusError(
            "INVALID_ARGUMENT", f"strides {byte_strides} spread shape {array.shape} over {size_bytes} bytes"
        )
    laid_out = np.zeros(size_bytes, np.uint8)
    np.ndarray(array.shape, array.dtype, laid_out, 0, byte_strides)[...] = array
    return _flat(laid_out)


def _extent(shape: tuple[int, ...], byte_strides: tuple[int, ...]) -> int:
    """How far the last element is from the first. All strides are positive."""
    return sum((side - 1) * stride for side, stride in zip(shape, byte_strides, strict=True))


def _flat(array: np.ndarray[Any, np.dtype[Any]]) -> memoryview:
    # The stubs of numpy and of `memoryview` agree from Python 3.12 on.
    flat: Any = array.reshape(-1).view(np.uint8)
    return memoryview(flat)
