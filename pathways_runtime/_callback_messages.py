"""Calls of host callbacks as bytes: what the emulator asks a client's process to run, and what came of it.

A message is a line of JSON and the bytes of its arrays. Both sides read it, and neither runs anything that is in it.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

import ml_dtypes
import numpy as np

# The module attribute by which a program says whom it calls: "CHANNEL:FUNCTION,FUNCTION,...".
ATTRIBUTE: Final = "pathways_runtime.callbacks"
# The plugin programs with which a client takes a message and gives one. Their body is the channel's name.
TAKE: Final = "pathwaysRuntimeCallbackTake"
GIVE: Final = "pathwaysRuntimeCallbackGive"

Array = np.ndarray[Any, np.dtype[Any]]


def pack(header: Mapping[str, Any], arrays: Sequence[Array | None] = ()) -> bytes:
    """A message. None among the arrays stands for a token, the order of effects."""
    described = [None if array is None else [array.dtype.name, list(array.shape)] for array in arrays]
    data = [array.tobytes() for array in arrays if array is not None]
    return b"".join([json.dumps({**header, "arrays": described}).encode(), b"\n", *data])


def unpack(message: bytes) -> tuple[dict[str, Any], list[Array | None]]:
    """(header, arrays) of a message; the arrays are read-only. ValueError where it is none."""
    line, _, data = message.partition(b"\n")
    try:
        header = json.loads(line)
        arrays: list[Array | None] = []
        offset = 0
        for described in header.pop("arrays"):
            if described is None:
                arrays.append(None)
                continue
            dtype, shape = _dtype(described[0]), tuple(described[1])
            count = int(np.prod(shape, dtype=np.int64))
            arrays.append(np.frombuffer(data, dtype, count, offset).reshape(shape) if count else np.zeros(shape, dtype))
            offset += count * dtype.itemsize
    except (KeyError, TypeError, AttributeError, IndexError) as error:
        raise ValueError(f"not a message about a callback: {error}") from error
    return header, arrays


def as_text(message: bytes) -> str:
    """A message as a string, which a string array can hold."""
    return base64.b64encode(message).decode()


def of_text(text: str) -> bytes:
    """The reverse of `as_text`."""
    return base64.b64decode(text)


def _dtype(name: str) -> np.dtype[Any]:
    return np.dtype(getattr(ml_dtypes, name, None) or name)
