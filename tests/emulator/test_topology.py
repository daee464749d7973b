"""Where the devices of emulated slices sit."""

from __future__ import annotations

import pytest

from pathways_runtime import _tpus
from pathways_runtime.emulator.slices import Topology

GIB = 1 << 30


def test_hosts_of_a_two_dimensional_slice_own_blocks_of_two_by_two() -> None:
    topology = Topology("tpuv6e:2x4", 2)
    assert topology.hosts_per_slice == 2
    assert [device.coords for device in topology.devices[:8]] == [
        *((0, 0, 0), (1, 0, 0), (0, 1, 0), (1, 1, 0)),
        *((0, 2, 0), (1, 2, 0), (0, 3, 0), (1, 3, 0)),
    ]
    assert [device.host for device in topology.devices] == [0] * 4 + [1] * 4 + [0] * 4 + [1] * 4
    assert [device.slice for device in topology.devices] == [0] * 8 + [1] * 8


def test_blocks_of_a_wider_slice_are_counted_along_x_first() -> None:
    devices = Topology("tpuv5e:4x4", 1).devices
    assert [device.coords for device in devices if device.local_hardware_id == 0] == [
        (0, 0, 0),
        (2, 0, 0),
        (0, 2, 0),
        (2, 2, 0),
    ]


def test_tasks_count_hosts_over_all_slices() -> None:
    devices = Topology("tpuv6e:2x4", 2).devices
    assert [device.task for device in devices] == [0] * 4 + [1] * 4 + [2] * 4 + [3] * 4
    assert [device.local_hardware_id for device in devices] == [0, 1, 2, 3] * 4


def test_a_host_of_eight_chips_owns_a_whole_slice_of_two_by_four() -> None:
    topology = Topology("tpuv6e1t:2x4", 2)
    assert topology.hosts_per_slice == 1
    assert [device.local_hardware_id for device in topology.devices] == [*range(8), *range(8)]
    assert topology.devices[7].coords == (1, 3, 0)


def test_hosts_of_a_three_dimensional_slice_lie_flat() -> None:
    topology = Topology("tpuv5:2x2x2", 1)
    assert [(device.host, device.coords[2]) for device in topology.devices] == [(0, 0)] * 4 + [(1, 1)] * 4


def test_a_chip_of_tpu7x_is_two_devices_that_share_its_memory() -> None:
    first, second, *_ = Topology("tpu7x:2x2x1", 1).devices
    assert (first.coords, first.core_on_chip) == ((0, 0, 0), 0)
    assert (second.coords, second.core_on_chip) == ((0, 0, 0), 1)
    assert first.hbm_bytes == second.hbm_bytes == 96 * GIB
    assert len(Topology("tpu7x:2x2x1", 1).devices) == 8


@pytest.mark.parametrize(
    ("instance_type", "kind", "hbm_gib"),
    [
        ("tpuv4:2x2x1", "TPU v4", 32),
        ("tpuv5e:2x2", "TPU v5 lite", 16),
        ("tpuv5:2x2x1", "TPU v5", 95),
        ("tpuv6e:2x2", "TPU v6 lite", 32),
        ("tpu7x:2x2x1", "TPU7x", 96),
    ],
)
def test_kind_and_memory_are_those_of_the_generation(instance_type: str, kind: str, hbm_gib: int) -> None:
    device = Topology(instance_type, 1).devices[0]
    assert (device.kind, device.hbm_bytes) == (kind, hbm_gib * GIB)


def test_ids_begin_where_they_are_told_to() -> None:
    topology = Topology("tpuv6e:2x2", 2, first_device_id=144)
    assert [device.id for device in topology.devices] == [*range(144, 152)]
    assert topology.slices_of([151, 144, 145]) == (0, 1)


def test_every_shape_there_is_fills_its_slice_exactly_once() -> None:
    for shape in _tpus.shapes():
        if shape.chips > 512:
            continue
        topology = Topology(shape.instance_type, 1)
        places = {(device.coords, device.core_on_chip) for device in topology.devices}
        assert len(places) == len(topology.devices) == shape.jax_devices, shape
        for axis, side in enumerate((*shape.dims, 1)[:3]):
            assert {device.coords[axis] for device in topology.devices} == set(range(side)), shape
        by_host = [sum(device.host == host for device in topology.devices) for host in range(shape.hosts)]
        assert by_host == [shape.jax_devices // shape.hosts] * shape.hosts, shape


def test_an_unknown_instance_type_is_refused_with_the_nearest() -> None:
    with pytest.raises(ValueError, match=r"'tpuv6e:2x3'.*tpuv6e:2x4"):
        Topology("tpuv6e:2x3", 1)


def test_no_slices_are_refused() -> None:
    with pytest.raises(ValueError, match="at least 1"):
        Topology("tpuv6e:2x4", 0)
