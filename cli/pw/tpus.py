"""The names of TPU slices as people type them: `v6e-16`, `v5litepod-32`, `v6e:4x4`, a machine type, a node label.

Tools disagree on some of them. One that means different chips to different tools is refused with each reading; one that
only leaves open how many chips a host has takes 4-chip hosts, as Pathways' own guide does, and says so in `note`.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache

from pathways_runtime import _tpus
from pathways_runtime._tpus import Generation, MachineType, SliceShape
from pw.errors import SpecError

_TOPOLOGY = r"[0-9]+(?:x[0-9]+)+"
_SHOWN = 8
# Generations of Cloud TPU before those of Pathways on GKE.
_TOO_OLD = ("v2", "v3")


@dataclass(frozen=True, slots=True)
class Resolution:
    """The shape that a name means, what the user should know about the choice (`note`, "" for none), and the shapes
    of the same chips and topology that the name leaves open as well."""

    shape: SliceShape
    note: str = ""
    alternatives: tuple[SliceShape, ...] = ()


@dataclass(frozen=True, slots=True)
class NodePool:
    """A node pool that exists on a cluster: `accelerator` and `topology` are its GKE labels, "" where it has none."""

    name: str
    machine_type: str
    accelerator: str
    topology: str


@dataclass(frozen=True, slots=True)
class _Typed:
    """The parts of a compute type: `hosts` is axlearn's second number, as in v6e-8-1."""

    text: str
    prefix: str
    topology: str = ""
    number: int | None = None
    hosts: int | None = None


@cache
def resolve(compute_type: str, topology: str = "") -> Resolution:
    """The shape that `compute_type` and `topology` name. Raises SpecError with what would do instead."""
    for what, text in (("compute type", compute_type), ("topology", topology)):
        if text != text.strip():
            raise SpecError(f"{what} {text!r} has white space around it: leave that out")
    typed = _parse(compute_type)
    machines = _machines(typed)
    wanted = _agreed_topology(typed, topology.lower())
    if typed.number is not None:
        return _by_number(typed, machines, wanted)
    if not wanted:
        return _without_topology(typed, machines)
    return _choose(typed, _of_topology(typed, machines, wanted))


def follow_node_pools(shape: SliceShape, pools: Iterable[NodePool]) -> Resolution:
    """`shape`, or the shape of the same generation and topology on other hosts if only that one has a pool."""
    pools = tuple(pools)
    if any(_has(pool, shape) for pool in pools):
        return Resolution(shape)
    for other in _tpus.shapes(shape.generation.name):
        pool = next((pool for pool in pools if _has(pool, other)), None)
        if pool is not None and other.topology == shape.topology:
            return Resolution(
                other, f"{shape.topology} is taken as {_hosts_of(other)}, as node pool {pool.name!r} has them"
            )
    return Resolution(shape)


def _has(pool: NodePool, shape: SliceShape) -> bool:
    # GKE lets a pool of single hosts go without a topology.
    topology = pool.topology or (shape.topology if shape.hosts == 1 else "")
    return (pool.machine_type, topology) == (shape.machine_type.name, shape.topology)


def _parse(compute_type: str) -> _Typed:
    text = compute_type.lower()
    prefix, separator, topology = text.partition(":")
    if separator:
        return _Typed(compute_type, prefix, topology)
    if match := re.fullmatch(rf"(.+)-({_TOPOLOGY})", text):
        return _Typed(compute_type, match[1], match[2])
    if text not in _prefixes() and (match := re.fullmatch(r"(.+?)-([0-9]{1,6})(?:-([0-9]{1,6}))?", text)):
        hosts = int(match[3]) if match[3] else None
        return _Typed(compute_type, match[1], number=int(match[2]), hosts=hosts)
    return _Typed(compute_type, text)


@cache
def _prefixes() -> dict[str, tuple[MachineType, ...]]:
    """What each word before a number or topology may mean."""
    found: dict[str, tuple[MachineType, ...]] = {}
    for generation in _tpus.generations():
        machines = tuple(machine for machine in _tpus.machine_types() if machine.generation is generation)
        found.update({machine.name: (machine,) for machine in machines})
        found[generation.pathways_version] = tuple(machine for machine in machines if machine.chips != 8)
        if generation.pathways_version_8t:
            found[generation.pathways_version_8t] = tuple(machine for machine in machines if machine.chips == 8)
        for name in (generation.name, generation.gke_accelerator, *generation.aliases):
            found[name] = machines
    return found


def _machines(typed: _Typed) -> tuple[MachineType, ...]:
    prefixes = _prefixes()
    if typed.prefix in _TOO_OLD:
        raise SpecError(f"compute type {typed.text!r} is too old: Pathways on GKE runs on v4 and newer (pw tpus)")
    if typed.prefix not in prefixes:
        near = difflib.get_close_matches(typed.prefix, prefixes, n=1, cutoff=0.5)
        hint = f"did you mean {near[0]!r}? " if near else ""
        names = ", ".join(generation.name for generation in _tpus.generations())
        raise SpecError(
            f"compute type {typed.text!r} is unknown: {hint}want such as v6e-16, v6e:4x4 or a machine type with "
            f"--topology; generations are {names} (pw tpus)"
        )
    machines = prefixes[typed.prefix]
    usable = tuple(machine for machine in machines if not machine.refused)
    if not usable:
        raise SpecError(
            f"compute type {typed.text!r} cannot run Pathways: {machines[0].refused} (pw tpus {machines[0].generation})"
        )
    return usable


def _agreed_topology(typed: _Typed, topology: str) -> str:
    if topology and typed.topology and topology != typed.topology:
        raise SpecError(f"compute type {typed.text!r} and topology {topology!r} contradict each other: leave one out")
    return topology or typed.topology


def _of_topology(typed: _Typed, machines: Sequence[MachineType], topology: str) -> list[SliceShape]:
    found = [shape for shape in _shapes_of(machines) if shape.topology == topology]
    if found:
        return found
    generation = machines[0].generation
    whose = machines[0].name if typed.prefix == machines[0].name else generation.name
    others = [shape for shape in _tpus.shapes(generation.name) if shape.topology == topology]
    known = [shape.topology for shape in _shapes_of(machines)]
    hint = f"; {topology} is one of {others[0].machine_type}" if others else _nearest(topology, known)
    raise SpecError(f"topology {topology!r} is not a {whose} shape: {_shown(known)}{hint} (pw tpus {generation})")


def _nearest(topology: str, known: Sequence[str]) -> str:
    sides = "x".join(sorted(topology.split("x"), key=lambda side: (len(side), side)))
    near = [sides] if sides in known else difflib.get_close_matches(topology, known, n=1)
    return f"; the nearest is {near[0]}" if near else ""


def _shown(topologies: Iterable[str]) -> str:
    unique = list(dict.fromkeys(topologies))
    return ", ".join(unique[:_SHOWN]) + (", ..." if len(unique) > _SHOWN else "")


def _shapes_of(machines: Sequence[MachineType]) -> list[SliceShape]:
    return [shape for shape in _tpus.shapes(machines[0].generation.name) if shape.machine_type in machines]


def _without_topology(typed: _Typed, machines: Sequence[MachineType]) -> Resolution:
    found = _shapes_of(machines)
    if len(found) == 1:
        return Resolution(found[0])
    raise SpecError(
        f"compute type {typed.text!r} needs a topology: {_shown(shape.topology for shape in found)} "
        f"(--topology {found[0].topology}, pw tpus {found[0].generation})"
    )


def _choose(typed: _Typed, found: Sequence[SliceShape]) -> Resolution:
    """Of shapes of one topology, the one with 4-chip hosts."""
    shape = next((shape for shape in found if shape.chips_per_host == 4), found[0])
    others = tuple(other for other in found if other != shape)
    if not others:
        return Resolution(shape)
    note = f"{typed.text} is taken as {_hosts_of(shape)}; for {_hosts_of(others[0])} type {others[0]}"
    return Resolution(shape, note, others)


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" + ("s" if number != 1 else "")


def _hosts(shape: SliceShape) -> str:
    return _count(shape.hosts, "host")


def _hosts_of(shape: SliceShape) -> str:
    return f"{_hosts(shape)} of {_count(shape.chips_per_host, 'chip')}"


def _by_number(typed: _Typed, machines: Sequence[MachineType], topology: str) -> Resolution:
    generation = machines[0].generation
    if typed.prefix not in (generation.name, *generation.aliases):
        raise SpecError(f"compute type {typed.text!r} is unknown: want {typed.prefix}:TOPOLOGY (pw tpus {generation})")
    readings = _readings(generation, typed.number or 0)
    counts = set(readings.values())
    if topology:
        found = _of_topology(typed, machines, topology)
        if found[0].chips not in counts:
            raise SpecError(
                f"compute type {typed.text!r} and topology {topology!r}, which has {found[0].chips} chips, contradict "
                f"each other: leave the number out, as in {found[0]}"
            )
        return _choose(typed, _of_hosts(typed, found))
    if len(counts) > 1:
        raise _ambiguous(typed, machines, readings)
    by_chips = _default_topology(machines, counts.pop())
    if by_chips is None:
        raise _no_such_number(typed, machines)
    return _choose(typed, _of_hosts(typed, _of_topology(typed, machines, by_chips)))


def _of_hosts(typed: _Typed, found: Sequence[SliceShape]) -> Sequence[SliceShape]:
    if typed.hosts is None:
        return found
    fitting = [shape for shape in found if shape.hosts == typed.hosts]
    if not fitting:
        names = " or ".join(_hosts_of(shape) for shape in found)
        raise SpecError(
            f"compute type {typed.text!r} cannot have {_count(typed.hosts, 'host')}: {found[0].topology} is {names}"
        )
    return fitting


def _readings(generation: Generation, number: int) -> dict[str, int]:
    """Chips that `number` means, by who reads it so. One reading where a chip is a core."""
    by_cores = number // generation.tensorcores_per_chip
    # gcluster halves the literal v4-8, and no other name.
    if by_cores == number or (generation.name, number) == ("v4", 8):
        return {"all tools": by_cores}
    by_chips = "read as chips; gcluster wants a topology" if generation.name == "tpu7x" else "gcluster: chips"
    return {"xpk, axlearn and MaxText: TensorCores": by_cores, by_chips: number}


def _default_topology(machines: Sequence[MachineType], chips: int) -> str | None:
    """The topology that a number of chips means: the one nearest to a cube."""
    fitting = [shape for shape in _shapes_of(machines) if shape.chips == chips]
    return max(fitting, key=lambda shape: shape.dims).topology if fitting else None


def _ambiguous(typed: _Typed, machines: Sequence[MachineType], readings: dict[str, int]) -> SpecError:
    found = {reader: _default_topology(machines, chips) for reader, chips in readings.items()}
    shapes = {reader: _of_topology(typed, machines, topology)[0] for reader, topology in found.items() if topology}
    if not shapes:
        return _no_such_number(typed, machines)
    meanings = " or ".join(
        f"{shape.topology}, {_count(shape.chips, 'chip')}, {_hosts(shape)} ({reader})"
        for reader, shape in shapes.items()
    )
    names = " or ".join(str(shape) for shape in shapes.values())
    differs = "means different slices to different tools" if len(shapes) > 1 else "names a slice to some tools only"
    return SpecError(f"compute type {typed.text!r} {differs}: {meanings}; type {names}")


def _no_such_number(typed: _Typed, machines: Sequence[MachineType]) -> SpecError:
    shapes = _shapes_of(machines)
    chips = sorted({shape.chips for shape in shapes})
    near = sorted(chips, key=lambda count: abs(count - (typed.number or 0)))[0]
    topology = _default_topology(machines, near)
    generation = machines[0].generation
    return SpecError(
        f"compute type {typed.text!r} is not a {generation} shape: the nearest is {generation}:{topology} with "
        f"{_count(near, 'chip')} (pw tpus {generation})"
    )
