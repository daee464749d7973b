"""Faults one after the other, from a file.

    seed: 7
    faults:
      - {after: 5s, slice: random, kind: crash}
      - {after: 20s, slice: 1, kind: hang, for: 30s}

`after` counts from the fault before, `seed` (0 if left out) decides which slices the random ones are.
"""

from __future__ import annotations

import random
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pw import fields
from pw.errors import SpecError
from pw.faults import Fault

_RANDOM = "random"


@dataclass(frozen=True, slots=True)
class Step:
    """A fault `after_s` seconds after the one before; `slice` None is a random one."""

    after_s: int
    kind: str
    slice: int | None
    for_s: int | None

    def __post_init__(self) -> None:
        self.fault(0)

    def fault(self, slice: int) -> Fault:
        """The fault, of the random slice `slice` where the step names none."""
        return Fault(self.kind, slice if self.slice is None else self.slice, self.for_s)


@dataclass(frozen=True, slots=True)
class Scenario:
    """The steps in order."""

    seed: int
    steps: tuple[Step, ...]

    def faults(self, num_slices: int) -> list[tuple[int, Fault]]:
        """Each fault of a job of so many slices behind the seconds to wait for it; the same for the same seed."""
        chance = random.Random(self.seed)
        return [(step.after_s, step.fault(chance.randrange(num_slices))) for step in self.steps]


def read(path: Path) -> Scenario:
    """The scenario in a file. Raises SpecError that names the file and the fault, counted from 1."""
    root = _content(path)
    try:
        _check_keys(root, ("seed", "faults"))
        faults = root.get("faults")
        if not isinstance(faults, list) or not faults:
            raise ValueError("want faults: a list of {after, slice, kind}")
        steps = tuple(_step(number, each) for number, each in enumerate(faults, 1))
        return Scenario(_number(root.get("seed", "0")), steps)
    except ValueError as exc:
        raise SpecError(f"scenario {str(path)!r}: {exc}") from exc


def _content(path: Path) -> Any:
    import yaml

    try:
        # Every scalar as the text that stands there.
        return yaml.load(path.read_text(encoding="utf-8"), Loader=yaml.BaseLoader)
    except (OSError, UnicodeDecodeError) as exc:
        raise SpecError(f"scenario {str(path)!r} cannot be read: {exc}") from exc
    except (yaml.YAMLError, RecursionError, ValueError, TypeError) as exc:
        raise SpecError(f"scenario {str(path)!r} is not YAML: {exc}") from exc


def _step(number: int, entry: Any) -> Step:
    try:
        _check_keys(entry, ("after", "slice", "kind", "for"))
        return Step(
            after_s=fields.duration_s(_text(entry, "after")),
            kind=_text(entry, "kind"),
            slice=None if _text(entry, "slice") == _RANDOM else _number(entry["slice"]),
            for_s=fields.duration_s(_text(entry, "for")) if "for" in entry else None,
        )
    except ValueError as exc:
        raise ValueError(f"fault {number}: {exc}") from exc
    except SpecError as exc:
        raise ValueError(f"fault {number}: {exc.message}") from exc


def _check_keys(entry: Any, known: Collection[str]) -> None:
    if not isinstance(entry, dict):
        raise ValueError(f"want {', '.join(known)}, each with its value")
    for key in entry:
        if key not in known:
            raise ValueError(f"key {key!r} is unknown: want one of {', '.join(known)}")


def _text(entry: dict[str, Any], key: str) -> str:
    if not isinstance(entry.get(key), str):
        raise ValueError(f"{key} is missing" if key not in entry else f"{key}: want one value")
    return str(entry[key])


def _number(text: Any) -> int:
    if not (isinstance(text, str) and text.isascii() and text.isdigit()):
        raise ValueError(f"{text!r} is not a number from 0")
    return int(text)
