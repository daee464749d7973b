"""TPU generations, machine types and slice shapes, from `tpus.toml` beside this file. Standard library only.

Launcher and emulator read the same table, so a slice that is planned and a slice that is emulated have the same hosts,
chips and device kind. Names as people type them are the launcher's business (`pw.tpus`).
"""

from __future__ import annotations

import difflib
import math
import tomllib
from dataclasses import dataclass
from functools import cache
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """One TPU generation. `pathways_version_8t` is "" where no 8-chip host exists; `dims` counts the axes of its
    topologies; `jax_devices_per_chip` is what JAX shows, which is two on chips whose cores are devices of their own."""

    name: str
    aliases: tuple[str, ...]
    gke_accelerator: str
    pathways_version: str
    pathways_version_8t: str = ""
    device_kind: str
    dims: int
    tensorcores_per_chip: int
    jax_devices_per_chip: int
    hbm_gib_per_chip: int

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineType:
    """One kind of TPU host with `chips` chips. `vcpus` and `memory_gb` are None where no public page says them;
    `refused` is why Pathways cannot run on it, "" where it can."""

    name: str
    generation: Generation
    chips: int
    vcpus: int | None = None
    memory_gb: int | None = None
    topologies: tuple[str, ...] = ()
    refused: str = ""

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True, slots=True)
class SliceShape:
    """A slice of `machine_type` hosts: `topology` is its chips by axis, such as 4x4. `str()` gives a name that
    `pw.tpus.resolve` takes for this shape and no other."""

    generation: Generation
    machine_type: MachineType
    topology: str

    @property
    def dims(self) -> tuple[int, ...]:
        """Chips along each axis."""
        return tuple(int(side) for side in self.topology.split("x"))

    @property
    def chips(self) -> int:
        return math.prod(self.dims)

    @property
    def chips_per_host(self) -> int:
        return self.machine_type.chips

    @property
    def hosts(self) -> int:
        return self.chips // self.machine_type.chips

    @property
    def jax_devices(self) -> int:
        return self.chips * self.generation.jax_devices_per_chip

    @property
    def tensorcores(self) -> int:
        return self.chips * self.generation.tensorcores_per_chip

    @property
    def gke_accelerator(self) -> str:
        """The value of the node label cloud.google.com/gke-tpu-accelerator."""
        return self.generation.gke_accelerator

    @property
    def pathways_version(self) -> str:
        """What Pathways calls these hosts, such as tpuv6e, or tpuv6e1t where a host has 8 chips."""
        return self.generation.pathways_version_8t if self.chips_per_host == 8 else self.generation.pathways_version

    @property
    def instance_type(self) -> str:
        """Pathways' --instance_type, such as tpuv6e:4x4."""
        return f"{self.pathways_version}:{self.topology}"

    @property
    def device_kind(self) -> str:
        """`Device.device_kind` as JAX has it."""
        return self.generation.device_kind

    @property
    def hbm_gib_per_chip(self) -> int:
        return self.generation.hbm_gib_per_chip

    def __str__(self) -> str:
        prefix = self.machine_type.name if self.chips_per_host == 8 else self.generation.name
        return f"{prefix}:{self.topology}"


@cache
def _load() -> tuple[tuple[Generation, ...], tuple[MachineType, ...]]:
    with Path(__file__).with_name("tpus.toml").open("rb") as file:
        table = tomllib.load(file)
    found = {row["name"]: Generation(**row | {"aliases": tuple(row["aliases"])}) for row in table["generation"]}
    machines = tuple(
        MachineType(
            **row | {"generation": found[row["generation"]], "topologies": tuple(row.get("topologies", "").split())}
        )
        for row in table["machine_type"]
    )
    return tuple(found.values()), machines


def generations() -> tuple[Generation, ...]:
    """All generations, oldest first."""
    return _load()[0]


def machine_types() -> tuple[MachineType, ...]:
    """All machine types, by generation and chips."""
    return _load()[1]


@cache
def shapes(generation: str | None = None) -> tuple[SliceShape, ...]:
    """The shapes of all generations, or of the one called `generation`, in the order of the table."""
    if generation is not None:
        return tuple(shape for shape in shapes() if shape.generation.name == generation)
    return tuple(
        SliceShape(machine.generation, machine, topology)
        for machine in machine_types()
        for topology in machine.topologies
    )


@cache
def _by_instance_type() -> dict[str, SliceShape]:
    return {shape.instance_type: shape for shape in shapes()}


def parse_instance_type(text: str) -> SliceShape:
    """The shape of Pathways' `text`, such as tpuv6e:4x4. Raises ValueError that names the nearest ones."""
    known = _by_instance_type()
    if text not in known:
        near = difflib.get_close_matches(text, known, n=3, cutoff=0.4)
        raise ValueError(
            f"instance type {text!r} is unknown: want VERSION:TOPOLOGY"
            + (f", such as {', '.join(near)}" if near else "")
        )
    return known[text]
