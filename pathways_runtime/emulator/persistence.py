"""Arrays in files, in the form that Pathways shares with Orbax: a folder of zarr (version 2) for each array."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tensorstore

from pathways_runtime.emulator.status import StatusError

Values = np.ndarray[Any, np.dtype[Any]]


def path_of(folder: str, name: str) -> Path:
    """Where an array of this name lies. StatusError for a folder elsewhere, and for a name that leads out of it."""
    if "://" in folder or "\0" in folder or not os.path.isabs(folder):
        raise StatusError(
            "UNIMPLEMENTED", f"persistence at {folder!r}: only an absolute path of this machine is supported"
        )
    if not name or "/" in name or "\0" in name or name in (".", ".."):
        raise StatusError("INVALID_ARGUMENT", f"persistence under the name {name!r}: not the name of a file")
    return Path(folder, name)


def write(path: Path, values: Values, chunk_shape: Sequence[int]) -> None:
    """Writes beside `path` and renames, so that a reader finds the whole array or none."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=".", ignore_cleanup_errors=True) as folder:
        new = Path(folder, "new")
        metadata = {
            "shape": values.shape,
            "chunks": [max(1, side) for side in chunk_shape],
            "compressor": {"id": "zstd", "level": 1},
        }
        # A chunk of zeros is a file like the others: one that is missing is then an error to who reads it.
        spec = _spec(new) | {"metadata": metadata, "store_data_equal_to_fill_value": True}
        tensorstore.open(spec, dtype=values.dtype, create=True).result().write(values).result()
        with contextlib.suppress(FileNotFoundError):
            os.rename(path, Path(folder, "old"))
        os.rename(new, path)


def read(path: Path, dtype: np.dtype[Any], shape: tuple[int, ...]) -> Values:
    """The array at `path`. StatusError where there is none, or another."""
    try:
        store = tensorstore.open(_spec(path) | {"fill_missing_data_reads": False}, open=True).result()
        if store.dtype.numpy_dtype != dtype or store.shape != shape:
            found = f"{store.dtype.name}{list(store.shape)}"
            raise StatusError("INVALID_ARGUMENT", f"{path} holds {found}, not {dtype}{list(shape)}")
        values: Values = store.read().result()
    except ValueError as error:
        cause = StatusError.of(error)  # tensorstore names a code: NOT_FOUND where a file is missing
        raise StatusError.of_number(cause.code, f"cannot read {path}: {cause.message}") from error
    return values


def _spec(path: Path) -> dict[str, Any]:
    return {"driver": "zarr", "kvstore": {"driver": "file", "path": f"{path}/"}}
