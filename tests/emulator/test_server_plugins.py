"""What pathwaysutils asks of Pathways beyond XLA programs: arrays in files, and resharding in one request."""

from __future__ import annotations

import base64
import datetime
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from pathwaysutils.experimental import reshard
from pathwaysutils.persistence import helper
from pathwaysutils.plugin_executable import PluginExecutable

Devices = list[jax.Device]
Arrays = Mapping[str, jax.Array | jax.ShapeDtypeStruct]
# pathwaysutils 0.1.13 uses names that jax 0.10 is about to drop.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")
TIMEOUT = datetime.timedelta(seconds=30)


@pytest.fixture
def mesh(devices: Devices) -> Mesh:
    return Mesh(np.array(devices).reshape(2, 4), ("slice", "chip"))


@pytest.fixture
def half(devices: Devices) -> Mesh:
    return Mesh(np.array(devices[:4]), ("chip",))


@pytest.fixture
def arrays(mesh: Mesh) -> dict[str, jax.Array]:
    """One that is cut, one that is whole everywhere, one without values, one of a dtype that numpy has not."""
    return {
        "layer.kernel": jax.device_put(
            np.arange(64.0, dtype=np.float32).reshape(8, 8), NamedSharding(mesh, P("chip", "slice"))
        ),
        "layer.bias": jax.device_put(np.arange(3, dtype=np.int32), NamedSharding(mesh, P())),
        "empty": jax.device_put(np.zeros((0, 4), np.float32), NamedSharding(mesh, P())),
        "narrow": jax.device_put(jnp.arange(8, dtype=jnp.bfloat16), NamedSharding(mesh, P("chip"))),
    }


def write(folder: Path, arrays: dict[str, jax.Array]) -> None:
    helper.write_arrays(str(folder), list(arrays), list(arrays.values()), TIMEOUT).result()


def read(folder: Path, like: Arrays, mesh: Mesh, spec: Any = None) -> list[jax.Array]:
    shardings = [NamedSharding(mesh, spec or P()) for _ in like]
    dtypes, shapes = [array.dtype for array in like.values()], [array.shape for array in like.values()]
    result, done = helper.read_arrays(str(folder), list(like), dtypes, shapes, shardings, mesh.devices, TIMEOUT)
    done.result()
    return list(result)


def test_arrays_come_back_from_files_on_other_devices(tmp_path: Path, arrays: dict[str, jax.Array], half: Mesh) -> None:
    write(tmp_path / "new" / "folder", arrays)
    for found, array in zip(read(tmp_path / "new" / "folder", arrays, half), arrays.values(), strict=True):
        assert found.sharding == NamedSharding(half, P())
        assert np.array_equal(np.asarray(found), np.asarray(array))


def test_an_array_comes_back_cut_otherwise(tmp_path: Path, arrays: dict[str, jax.Array], half: Mesh) -> None:
    kernel = {"layer.kernel": arrays["layer.kernel"]}
    write(tmp_path, kernel)
    [found] = read(tmp_path, kernel, half, P(None, "chip"))
    assert np.array_equal(np.asarray(found), np.asarray(arrays["layer.kernel"]))
    assert found.addressable_shards[0].data.shape == (8, 2)


@pytest.mark.parametrize("chips", [1, 4])
def test_what_is_written_is_the_value_at_that_moment(tmp_path: Path, devices: Devices, half: Mesh, chips: int) -> None:
    mesh = Mesh(np.array(devices[:chips]), ("chip",))
    expected = np.arange(64, dtype=np.float32).reshape(8, 8)
    kernel = jax.device_put(expected, NamedSharding(mesh, P("chip")))
    done = helper.write_arrays(str(tmp_path), ["kernel"], [kernel], TIMEOUT)
    jax.jit(lambda x: x * 0, donate_argnums=0)(kernel).block_until_ready()
    done.result()
    [found] = read(tmp_path, {"kernel": jax.ShapeDtypeStruct((8, 8), np.float32)}, half)
    assert np.array_equal(np.asarray(found), expected)


def test_a_file_that_lacks_a_part_is_an_error_and_not_zeros(tmp_path: Path, devices: Devices, half: Mesh) -> None:
    zeros = {"zeros": jax.device_put(np.zeros(8, np.float32), NamedSharding(half, P("chip")))}
    write(tmp_path, zeros)
    (tmp_path / "zeros" / "2").unlink()
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"cannot read .*/zeros"):
        read(tmp_path, zeros, half)


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path, arrays: dict[str, jax.Array]) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"/file"):
        write(tmp_path / "file" / "folder", arrays)


def test_a_write_leaves_only_its_files(tmp_path: Path, arrays: dict[str, jax.Array]) -> None:
    write(tmp_path, arrays)
    write(tmp_path, arrays)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(arrays)


def test_a_file_that_is_missing_is_named(tmp_path: Path, half: Mesh) -> None:
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"NOT_FOUND.*/made_up"):
        read(tmp_path, {"made_up": jax.ShapeDtypeStruct((2,), np.float32)}, half)


@pytest.mark.parametrize(("shape", "dtype"), [((4, 16), np.float32), ((8, 8), np.int32), ((8, 8), jnp.bfloat16)])
def test_a_file_with_another_array_is_refused(
    tmp_path: Path, arrays: dict[str, jax.Array], half: Mesh, shape: tuple[int, ...], dtype: Any
) -> None:
    write(tmp_path, {"kernel": arrays["layer.kernel"]})
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"INVALID_ARGUMENT.*holds float32\[8, 8\]"):
        read(tmp_path, {"kernel": jax.ShapeDtypeStruct(shape, dtype)}, half)


@pytest.mark.parametrize("location", ["relative/folder", "s3://bucket/folder", "gs://B/folder", ""])
def test_a_place_that_is_none_is_named(arrays: dict[str, jax.Array], location: str) -> None:
    with pytest.raises(jax.errors.JaxRuntimeError, match=f"INVALID_ARGUMENT.*'{location}' is neither"):
        helper.write_arrays(location, list(arrays), list(arrays.values()), TIMEOUT)


@pytest.mark.parametrize("name", ["../up", "a/b", "", "."])
def test_a_name_that_is_no_file_is_refused(tmp_path: Path, arrays: dict[str, jax.Array], name: str) -> None:
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"INVALID_ARGUMENT.*is not the name of a file"):
        helper.write_arrays(str(tmp_path), [name], [arrays["layer.kernel"]], TIMEOUT)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("donate", [False, True])
def test_a_tree_is_resharded_in_one_request(arrays: dict[str, jax.Array], half: Mesh, donate: bool) -> None:
    expected = {name: np.array(array) for name, array in arrays.items()}
    shardings = {name: NamedSharding(half, P("chip") if name == "layer.kernel" else P()) for name in arrays}
    moved = reshard.reshard(arrays, shardings, donate=donate)
    for name, array in moved.items():
        assert array.sharding == shardings[name]
        assert np.array_equal(np.asarray(array), expected[name])


@pytest.mark.parametrize(
    ("program", "complaint"),
    [
        ("not json", "JSON with one key"),
        ("{}", "JSON with one key"),
        ("[1]", "JSON with one key"),
        (json.dumps({"madeUpRequest": {}}), "'madeUpRequest' is not supported"),
        (json.dumps({"reshardRequest": {}}), "'reshardRequest' is malformed"),
        (json.dumps({"persistenceWriteRequest": {"devices": {"device_ids": [0]}, "b64_location": "%"}}), "malformed"),
        (json.dumps({"bulk_persistence_read_request": {"read_requests": []}}), "malformed"),
    ],
)
def test_a_program_that_makes_no_sense_is_refused(devices: Devices, program: str, complaint: str) -> None:
    with pytest.raises(jax.errors.JaxRuntimeError, match=complaint):
        PluginExecutable(program)


def test_a_location_that_is_not_base64_is_refused(devices: Devices) -> None:
    request = {"devices": {"device_ids": [0]}, "b64_location": base64.b64encode(b"\xff").decode(), "b64_name": ""}
    with pytest.raises(jax.errors.JaxRuntimeError, match="malformed"):
        PluginExecutable(json.dumps({"persistenceWriteRequest": request}))
