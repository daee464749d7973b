"""Arrays in files, in the form that Pathways shares with Orbax: a folder of zarr (version 2) for each array."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from pathways_runtime.emulator.status import StatusError
from pathways_runtime.emulator.storage import Place

Values = np.ndarray[Any, np.dtype[Any]]


def write(place: Place, values: Values, chunk_shape: Sequence[int]) -> None:
    """Writes an array. Who reads a path of this machine meanwhile finds the whole array or none."""
    if place.bucket:
        _write(place, values, chunk_shape)
        return
    path = Path(place.path)
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=".", ignore_cleanup_errors=True) as folder:
        new = Path(folder, "new")
        _write(Place("", str(new)), values, chunk_shape)
        with contextlib.suppress(FileNotFoundError):
            os.rename(path, Path(folder, "old"))
        os.rename(new, path)


def _write(place: Place, values: Values, chunk_shape: Sequence[int]) -> None:
    import tensorstore  # few servers ever need it

    metadata = {
        "shape": values.shape,
        "chunks": [max(1, side) for side in chunk_shape],
        "compressor": {"id": "zstd", "level": 1},
    }
    # A chunk of zeros is a file like the others: one that is missing is then an error to who reads it.
    spec = _spec(place) | {"metadata": metadata, "store_data_equal_to_fill_value": True}
    store = tensorstore.open(spec, dtype=values.dtype, create=True, delete_existing=True).result()
    store.write(values).result()


def read(place: Place, dtype: np.dtype[Any], shape: tuple[int, ...]) -> Values:
    """The array at `place`. StatusError where there is none, or another."""
    import tensorstore

    try:
        store = tensorstore.open(_spec(place) | {"fill_missing_data_reads": False}, open=True).result()
        if store.dtype.numpy_dtype != dtype or store.shape != shape:
            found = f"{store.dtype.name}{list(store.shape)}"
            raise StatusError("INVALID_ARGUMENT", f"{place} holds {found}, not {dtype}{list(shape)}")
        values: Values = store.read().result()
    except ValueError as error:
        cause = StatusError.of(error)  # tensorstore names a code: NOT_FOUND where a file is missing
        raise StatusError.of_number(cause.code, f"cannot read {place}: {cause.message}") from error
    return values


def _spec(place: Place) -> dict[str, Any]:
    return {"driver": "zarr", "kvstore": place.kvstore}
