from __future__ import annotations

import hashlib
import time
from collections import Counter

import pytest

from pathways_runtime import _tpus
from pathways_runtime._tpus import SliceShape
from pw import tpus
from pw.errors import SpecError
from pw.tpus import NodePool

# generation, machine type, topology, chips, chips per host, hosts, TensorCores, JAX devices, node label, instance type
ROWS = """
v4 ct4p-hightpu-4t 2x2x1 4 4 1 8 4 tpu-v4-podslice tpuv4:2x2x1
v4 ct4p-hightpu-4t 2x2x2 8 4 2 16 8 tpu-v4-podslice tpuv4:2x2x2
v4 ct4p-hightpu-4t 2x2x4 16 4 4 32 16 tpu-v4-podslice tpuv4:2x2x4
v4 ct4p-hightpu-4t 2x4x4 32 4 8 64 32 tpu-v4-podslice tpuv4:2x4x4
v4 ct4p-hightpu-4t 4x4x16 256 4 64 512 256 tpu-v4-podslice tpuv4:4x4x16
v4 ct4p-hightpu-4t 4x8x8 256 4 64 512 256 tpu-v4-podslice tpuv4:4x8x8
v4 ct4p-hightpu-4t 4x16x16 1024 4 256 2048 1024 tpu-v4-podslice tpuv4:4x16x16
v4 ct4p-hightpu-4t 4x4x256 4096 4 1024 8192 4096 tpu-v4-podslice tpuv4:4x4x256
v5e ct5lp-hightpu-1t 1x1 1 1 1 1 1 tpu-v5-lite-podslice tpuv5e:1x1
v5e ct5lp-hightpu-4t 2x2 4 4 1 4 4 tpu-v5-lite-podslice tpuv5e:2x2
v5e ct5lp-hightpu-4t 2x4 8 4 2 8 8 tpu-v5-lite-podslice tpuv5e:2x4
v5e ct5lp-hightpu-4t 4x4 16 4 4 16 16 tpu-v5-lite-podslice tpuv5e:4x4
v5e ct5lp-hightpu-4t 4x8 32 4 8 32 32 tpu-v5-lite-podslice tpuv5e:4x8
v5e ct5lp-hightpu-4t 16x16 256 4 64 256 256 tpu-v5-lite-podslice tpuv5e:16x16
v5e ct5lp-hightpu-8t 2x4 8 8 1 8 8 tpu-v5-lite-podslice tpuv5e1t:2x4
v5p ct5p-hightpu-4t 2x2x1 4 4 1 8 4 tpu-v5p-slice tpuv5:2x2x1
v5p ct5p-hightpu-4t 2x2x2 8 4 2 16 8 tpu-v5p-slice tpuv5:2x2x2
v5p ct5p-hightpu-4t 4x4x8 128 4 32 256 128 tpu-v5p-slice tpuv5:4x4x8
v5p ct5p-hightpu-4t 8x16x16 2048 4 512 4096 2048 tpu-v5p-slice tpuv5:8x16x16
v5p ct5p-hightpu-4t 4x8x256 8192 4 2048 16384 8192 tpu-v5p-slice tpuv5:4x8x256
v5p ct5p-hightpu-4t 16x20x28 8960 4 2240 17920 8960 tpu-v5p-slice tpuv5:16x20x28
v6e ct6e-standard-1t 1x1 1 1 1 1 1 tpu-v6e-slice tpuv6e:1x1
v6e ct6e-standard-4t 2x2 4 4 1 4 4 tpu-v6e-slice tpuv6e:2x2
v6e ct6e-standard-4t 2x4 8 4 2 8 8 tpu-v6e-slice tpuv6e:2x4
v6e ct6e-standard-4t 8x8 64 4 16 64 64 tpu-v6e-slice tpuv6e:8x8
v6e ct6e-standard-4t 8x16 128 4 32 128 128 tpu-v6e-slice tpuv6e:8x16
v6e ct6e-standard-8t 2x4 8 8 1 8 8 tpu-v6e-slice tpuv6e1t:2x4
tpu7x tpu7x-standard-1t 1x1x1 1 1 1 2 2 tpu7x tpu7x:1x1x1
tpu7x tpu7x-standard-4t 2x2x1 4 4 1 8 8 tpu7x tpu7x:2x2x1
tpu7x tpu7x-standard-4t 4x4x8 128 4 32 256 256 tpu7x tpu7x:4x4x8
tpu7x tpu7x-standard-4t 16x16x32 8192 4 2048 16384 16384 tpu7x tpu7x:16x16x32
tpu7x tpu7x-standard-4t 4x44x52 9152 4 2288 18304 18304 tpu7x tpu7x:4x44x52
tpu7x tpu7x-standard-4t 16x24x24 9216 4 2304 18432 18432 tpu7x tpu7x:16x24x24
""".strip().splitlines()

# Of all rows, sorted, as `_row` writes them: computed from the checked catalogue and not from this table.
ROWS_SHA256 = "9a5f5f9e1e26e1eb05bb9876a2d28477124ec5180a5b62751a6b131dfce9d863"


def _row(shape: SliceShape) -> str:
    sizes = (shape.chips, shape.chips_per_host, shape.hosts, shape.tensorcores, shape.jax_devices)
    names = (shape.generation, shape.machine_type, shape.topology, *sizes, shape.gke_accelerator, shape.instance_type)
    return " ".join(str(part) for part in names)


def _refusal(compute_type: str, topology: str = "") -> str:
    with pytest.raises(SpecError) as caught:
        tpus.resolve(compute_type, topology)
    return str(caught.value)


def test_the_table_has_each_row_of_the_catalogue_and_no_other() -> None:
    rows = sorted(_row(shape) for shape in _tpus.shapes())
    assert not set(ROWS) - set(rows)
    assert hashlib.sha256("\n".join(rows).encode()).hexdigest() == ROWS_SHA256


def test_shapes_by_machine_type() -> None:
    assert Counter(shape.machine_type.name for shape in _tpus.shapes()) == {
        "ct4p-hightpu-4t": 70,
        "ct5lp-hightpu-1t": 1,
        "ct5lp-hightpu-4t": 7,
        "ct5lp-hightpu-8t": 1,
        "ct5p-hightpu-4t": 127,
        "ct6e-standard-1t": 1,
        "ct6e-standard-4t": 7,
        "ct6e-standard-8t": 1,
        "tpu7x-standard-1t": 1,
        "tpu7x-standard-4t": 130,
    }


def test_device_kinds_and_memory_by_generation() -> None:
    found = {each.name: (each.device_kind, each.hbm_gib_per_chip, each.dims) for each in _tpus.generations()}
    assert found == {
        "v4": ("TPU v4", 32, 3),
        "v5e": ("TPU v5 lite", 16, 2),
        "v5p": ("TPU v5", 95, 3),
        "v6e": ("TPU v6 lite", 32, 2),
        "tpu7x": ("TPU7x", 192, 3),
    }


def test_every_shape_is_found_by_each_of_its_explicit_names() -> None:
    for shape in _tpus.shapes():
        assert shape.hosts * shape.chips_per_host == shape.chips
        assert len(shape.dims) == shape.generation.dims
        assert _tpus.parse_instance_type(shape.instance_type) == shape
        assert tpus.resolve(shape.instance_type).shape == shape
        assert tpus.resolve(shape.machine_type.name, shape.topology).shape == shape
        assert tpus.resolve(str(shape)).shape == shape


def test_an_unknown_instance_type_names_near_ones() -> None:
    with pytest.raises(ValueError, match=r"'tpuv6e:4x5' is unknown.*tpuv6e:4x4"):
        _tpus.parse_instance_type("tpuv6e:4x5")


def test_the_table_loads_in_a_few_milliseconds() -> None:
    loads_s = []
    for _ in range(5):
        start_s = time.perf_counter()
        _tpus._load.__wrapped__()
        loads_s.append(time.perf_counter() - start_s)
    assert min(loads_s) < 0.005


@pytest.mark.parametrize(
    ("compute_type", "topology", "instance_type"),
    [
        ("v6e-16", "", "tpuv6e:4x4"),
        ("V6E-16", "", "tpuv6e:4x4"),
        ("V6E-16", "4X4", "tpuv6e:4x4"),
        ("trillium-16", "", "tpuv6e:4x4"),
        ("v5litepod-32", "", "tpuv5e:4x8"),
        ("v5e-32", "", "tpuv5e:4x8"),
        ("v5-lite-32", "", "tpuv5e:4x8"),
        ("v6e-1", "", "tpuv6e:1x1"),
        ("v6e-256", "", "tpuv6e:16x16"),
        ("v6e:4x4", "", "tpuv6e:4x4"),
        ("v6e-4x4", "", "tpuv6e:4x4"),
        ("v6e", "4x4", "tpuv6e:4x4"),
        ("tpuv6e:4x4", "", "tpuv6e:4x4"),
        ("tpuv6e", "4x4", "tpuv6e:4x4"),
        ("ct6e-standard-4t", "4x4", "tpuv6e:4x4"),
        ("ct6e-standard-4t:4x4", "", "tpuv6e:4x4"),
        ("ct6e-standard-4t-4x4", "", "tpuv6e:4x4"),
        ("ct6e-standard-8t", "", "tpuv6e1t:2x4"),
        ("tpuv6e1t:2x4", "", "tpuv6e1t:2x4"),
        ("v6e-8-1", "", "tpuv6e1t:2x4"),
        ("tpu-v6e-slice", "4x4", "tpuv6e:4x4"),
        ("tpu-v5p-slice", "2x2x2", "tpuv5:2x2x2"),
        ("v5p:2x2x2", "", "tpuv5:2x2x2"),
        ("v5p-2x2x2", "", "tpuv5:2x2x2"),
        ("tpuv5:2x2x2", "", "tpuv5:2x2x2"),
        ("v4-8", "", "tpuv4:2x2x1"),
        ("v4:4x4x16", "", "tpuv4:4x4x16"),
        ("tpu7x:2x2x1", "", "tpu7x:2x2x1"),
        ("ironwood:2x2x2", "", "tpu7x:2x2x2"),
    ],
)
def test_names_as_people_type_them(compute_type: str, topology: str, instance_type: str) -> None:
    resolution = tpus.resolve(compute_type, topology)
    assert resolution.shape.instance_type == instance_type
    assert resolution.note == ""


@pytest.mark.parametrize(
    ("compute_type", "readings", "names"),
    [
        ("v5p-8", ("2x2x1, 4 chips, 1 host (xpk", "2x2x2, 8 chips, 2 hosts (gcluster"), ("v5p:2x2x1", "v5p:2x2x2")),
        ("v4-16", ("2x2x2, 8 chips, 2 hosts (xpk", "2x2x4, 16 chips, 4 hosts (gcluster"), ("v4:2x2x2", "v4:2x2x4")),
        ("tpu7x-8", ("2x2x1, 4 chips, 1 host (xpk", "2x2x2, 8 chips, 2 hosts"), ("tpu7x:2x2x1", "tpu7x:2x2x2")),
        ("v4-512", ("4x8x8, 256 chips", "8x8x8, 512 chips"), ("v4:4x8x8", "v4:8x8x8")),
        ("v5p-4", ("2x2x1, 4 chips, 1 host (gcluster",), ("v5p:2x2x1",)),
    ],
)
def test_a_name_whose_readings_differ_in_chips_is_refused(
    compute_type: str, readings: tuple[str, ...], names: tuple[str, ...]
) -> None:
    refusal = _refusal(compute_type)
    assert refusal.startswith(f"compute type {compute_type!r} ")
    assert all(reading in refusal for reading in readings)
    assert refusal.endswith(f"; type {' or '.join(names)}")
    assert [str(tpus.resolve(name).shape) for name in names] == list(names)


@pytest.mark.parametrize(
    ("compute_type", "topology"),
    [("v5p-8", "2x2x1"), ("v5p-8", "2x2x2"), ("v4-16", "2x2x2"), ("tpu7x-8", "2x2x1"), ("v4-512", "4x4x16")],
)
def test_a_topology_that_agrees_settles_an_ambiguous_name(compute_type: str, topology: str) -> None:
    assert tpus.resolve(compute_type, topology).shape.topology == topology


@pytest.mark.parametrize("compute_type", ["v6e-8", "trillium-8", "v5litepod-8", "v6e:2x4", "tpu-v6e-slice:2x4"])
def test_a_name_that_leaves_the_hosts_open_takes_4_chip_hosts_and_says_so(compute_type: str) -> None:
    resolution = tpus.resolve(compute_type)
    assert (resolution.shape.hosts, resolution.shape.chips_per_host) == (2, 4)
    (other,) = resolution.alternatives
    assert (other.hosts, other.chips_per_host) == (1, 8)
    assert resolution.note == f"{compute_type} is taken as 2 hosts of 4 chips; for 1 host of 8 chips type {other}"
    assert tpus.resolve(str(other)).shape == other


@pytest.mark.parametrize(
    ("compute_type", "topology", "message"),
    [
        (
            "v6e",
            "2x3",
            "topology '2x3' is not a v6e shape: 1x1, 2x2, 2x4, 4x4, 4x8, 8x8, 8x16, 16x16; the nearest is 2x4 "
            "(pw tpus v6e)",
        ),
        (
            "v5p:8x4x4",
            "",
            "topology '8x4x4' is not a v5p shape: 2x2x1, 2x2x2, 2x2x4, 2x4x4, 4x4x4, 4x4x8, 4x4x12, 4x8x8, ...; "
            "the nearest is 4x4x8 (pw tpus v5p)",
        ),
        (
            "ct6e-standard-4t",
            "1x1",
            "topology '1x1' is not a ct6e-standard-4t shape: 2x2, 2x4, 4x4, 4x8, 8x8, 8x16, 16x16; "
            "1x1 is one of ct6e-standard-1t (pw tpus v6e)",
        ),
        ("v6e-16", "2x4", "compute type 'v6e-16' and topology '2x4', which has 8 chips, contradict each other"),
        ("v5p-8", "4x4x4", "compute type 'v5p-8' and topology '4x4x4', which has 64 chips, contradict each other"),
        ("v6e:4x4", "2x4", "compute type 'v6e:4x4' and topology '2x4' contradict each other: leave one out"),
        ("v6e-12", "", "compute type 'v6e-12' is not a v6e shape: the nearest is v6e:2x4 with 8 chips (pw tpus v6e)"),
        ("v6e-0", "", "compute type 'v6e-0' is not a v6e shape: the nearest is v6e:1x1 with 1 chip (pw tpus v6e)"),
        ("v5p-7", "", "compute type 'v5p-7' is not a v5p shape: the nearest is v5p:2x2x2 with 8 chips (pw tpus v5p)"),
        ("v6e-8-4", "", "compute type 'v6e-8-4' cannot have 4 hosts: 2x4 is 2 hosts of 4 chips or 1 host of 8 chips"),
        ("v6e", "", "compute type 'v6e' needs a topology: 1x1, 2x2,"),
        ("ct6e-standard-4t", "", "compute type 'ct6e-standard-4t' needs a topology: 2x2, 2x4,"),
        ("ct6e-standart-4t", "4x4", "compute type 'ct6e-standart-4t' is unknown: did you mean 'ct6e-standard-4t'?"),
        ("v6f-16", "", "compute type 'v6f-16' is unknown: did you mean 'v6e'?"),
        ("ct6e-standard-4t-16", "", "compute type 'ct6e-standard-4t-16' is unknown: want ct6e-standard-4t:TOPOLOGY"),
        ("n2-standard-64", "", "compute type 'n2-standard-64' is unknown: "),
        ("v2-8", "", "compute type 'v2-8' is too old: Pathways on GKE runs on v4 and newer (pw tpus)"),
        ("v3:2x2", "", "compute type 'v3:2x2' is too old: Pathways on GKE runs on v4 and newer (pw tpus)"),
        ("v6e-16\n", "", "compute type 'v6e-16\\n' has white space around it: leave that out"),
        ("v6e", "4x4 ", "topology '4x4 ' has white space around it: leave that out"),
        ("", "4x4", "compute type '' is unknown: want such as v6e-16"),
        ("v6e-99999999999999999999", "", "compute type 'v6e-99999999999999999999' is unknown: "),
        (
            "ct5p-hightpu-1t",
            "",
            "compute type 'ct5p-hightpu-1t' cannot run Pathways: no slice of 1- or 2-chip v5p hosts",
        ),
        ("ct5p-hightpu-2t", "2x2x1", "compute type 'ct5p-hightpu-2t' cannot run Pathways: no slice of 1- or 2-chip"),
    ],
)
def test_what_is_no_slice_is_refused_with_what_would_do(compute_type: str, topology: str, message: str) -> None:
    assert _refusal(compute_type, topology).startswith(message)


EIGHT_CHIP_POOL = NodePool("tpu-8t", "ct6e-standard-8t", "tpu-v6e-slice", "2x4")
FOUR_CHIP_POOL = NodePool("tpu-4t", "ct6e-standard-4t", "tpu-v6e-slice", "2x4")


def test_open_hosts_follow_the_only_node_pool_that_fits() -> None:
    resolution = tpus.follow_node_pools(tpus.resolve("v6e-8").shape, [EIGHT_CHIP_POOL])
    assert resolution.shape.instance_type == "tpuv6e1t:2x4"
    assert resolution.note == "2x4 is taken as 1 host of 8 chips, as node pool 'tpu-8t' has them"


def test_an_8_chip_pool_without_a_topology_label_is_followed() -> None:
    pool = NodePool("tpu-8t", "ct6e-standard-8t", "", "")
    assert tpus.follow_node_pools(tpus.resolve("v6e-8").shape, [pool]).shape.chips_per_host == 8


@pytest.mark.parametrize(
    "pools",
    [
        [],
        [EIGHT_CHIP_POOL, FOUR_CHIP_POOL],
        [NodePool("cpu", "n2-standard-64", "", "")],
        [NodePool("other", "ct5lp-hightpu-8t", "tpu-v5-lite-podslice", "2x4")],
        [NodePool("larger", "ct6e-standard-4t", "tpu-v6e-slice", "4x4")],
    ],
)
def test_other_node_pools_change_nothing(pools: list[NodePool]) -> None:
    shape = tpus.resolve("v6e-8").shape
    assert tpus.follow_node_pools(shape, pools) == tpus.Resolution(shape)
