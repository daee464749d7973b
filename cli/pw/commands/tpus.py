"""`pw tpus`: the slices that a job can ask for."""

from __future__ import annotations

import difflib
from typing import Annotated

import typer

from pathways_runtime import _tpus
from pathways_runtime._tpus import SliceShape
from pw import console
from pw.errors import SpecError

app = typer.Typer(add_completion=False)

_COLUMNS = ("NAME", "TOPOLOGY", "CHIPS", "HOSTS", "MACHINE TYPE", "JAX DEVICES", "INSTANCE TYPE")


@app.command()
def tpus(
    generation: Annotated[str, typer.Argument(help="Only this generation, such as v6e.")] = "",
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """List the shapes of TPU slices, under the names that --compute-type takes."""
    shapes = _tpus.shapes(_generation(generation) if generation else None)
    rows = [[str(cell) for cell in _record(shape).values()] for shape in shapes]
    console.table(_COLUMNS, rows, json=json, records=[_record(shape) for shape in shapes])


def _record(shape: SliceShape) -> dict[str, str | int]:
    return {
        "name": str(shape),
        "topology": shape.topology,
        "chips": shape.chips,
        "hosts": shape.hosts,
        "machine_type": shape.machine_type.name,
        "jax_devices": shape.jax_devices,
        "instance_type": shape.instance_type,
    }


def _generation(text: str) -> str:
    names = {name: each.name for each in _tpus.generations() for name in (each.name, *each.aliases)}
    if text.lower() in names:
        return names[text.lower()]
    near = difflib.get_close_matches(text.lower(), names, n=1, cutoff=0.6)
    hint = f"did you mean {near[0]!r}? " if near else ""
    known = ", ".join(each.name for each in _tpus.generations())
    raise SpecError(f"TPU generation {text!r} is unknown: {hint}want one of {known} (pw tpus)")
