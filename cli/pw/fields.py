"""The rows of `JobSpec`'s table: what a field is called on the command line and in a spec file, and its text form.

A `TextForm` reads the strings that were typed (one for each time the flag was given) and writes them back, so that
`--dry-run=spec` gives a file from which the same job comes again.
"""

from __future__ import annotations

import dataclasses
import re
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from pw.errors import SpecError

# The name of an environment variable.
VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")

Pairs = tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class Mount:
    """A volume of head and workers: `source` as typed, `target` an absolute path."""

    source: str
    target: str
    read_only: bool = True

    def __str__(self) -> str:
        return f"{self.source}:{self.target}:{'ro' if self.read_only else 'rw'}"


@dataclass(frozen=True, slots=True)
class TextForm:
    """How a field is typed. `read` raises ValueError with what it wants; `write` gives strings that `read` takes.

    `kind` is the Python type of one typed value; `repeatable` says whether the flag may be given more than once.
    """

    read: Callable[[Sequence[str]], Any]
    write: Callable[[Any], list[str]]
    kind: type = str
    repeatable: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """One row: `flags` (long first), the repeatable `single` form if there is one, and how help shows it."""

    name: str
    flags: tuple[str, ...]
    single: str | None
    text: TextForm
    default: Any
    required: bool
    panel: str
    help: str

    @property
    def key(self) -> str:
        """The name in a spec file: the long flag's, in snake case."""
        return self.flags[0].lstrip("-").replace("-", "_")


def row(
    *flags: str,
    text: TextForm,
    panel: str,
    help: str,
    default: Any = dataclasses.MISSING,
    single: str | None = None,
) -> Any:
    """A dataclass field that carries its row of the table."""
    metadata = {"flags": flags, "single": single, "text": text, "panel": panel, "help": help}
    return dataclasses.field(default=default, metadata=metadata)


def option_of(field: dataclasses.Field[Any]) -> Option:
    """The row that `row()` put on a field."""
    required = field.default is dataclasses.MISSING
    return Option(name=field.name, default=None if required else field.default, required=required, **field.metadata)


def _last(values: Sequence[str]) -> str:
    return values[-1]


def _integer(values: Sequence[str]) -> int:
    if not re.fullmatch(r"[+-]?[0-9]+", values[-1].strip()):
        raise ValueError("want a whole number")
    return int(values[-1])


# What Kubernetes' int32 holds.
MAX_DURATION_S = 2**31 - 1
_UNIT_S = {"s": 1, "m": 60, "h": 3600, "d": 86400}


def duration_s(text: str) -> int:
    """Seconds of `90`, `90s`, `1h30m` or `2d`. Raises ValueError for anything else, and for more than 68 years."""
    text = text.strip()
    if not re.fullmatch(r"[0-9]{1,12}|(?:[0-9]{1,12}[smhd])+", text):
        raise ValueError("want a duration such as 90s, 30m or 1h30m")
    seconds = sum(int(count) * _UNIT_S[unit or "s"] for count, unit in re.findall(r"([0-9]+)([smhd]?)", text))
    if seconds > MAX_DURATION_S:
        raise ValueError(f"want at most {MAX_DURATION_S // 86400}d")
    return seconds


def duration_text(seconds: int) -> str:
    """The shortest text that `duration_s` reads as `seconds`: 5400 is 1h30m."""
    parts: list[str] = []
    for unit, size_s in (("h", 3600), ("m", 60), ("s", 1)):
        count, seconds = divmod(seconds, size_s)
        if count:
            parts.append(f"{count}{unit}")
    return "".join(parts) or "0s"


def _pairs(values: Sequence[str]) -> Pairs:
    pairs: list[tuple[str, str]] = []
    for value in values:
        name, separator, text = value.partition("=")
        if not separator or not name:
            raise ValueError(f"want NAME=VALUE, got {value!r}")
        pairs.append((name, text))
    return tuple(pairs)


def _mount(text: str) -> Mount:
    for mode, read_only in ((":ro", True), (":rw", False), ("", True)):
        if text.endswith(mode):
            source, separator, target = text[: len(text) - len(mode)].rpartition(":")
            # `gs://bucket` alone has no target, though a colon and a slash.
            if separator and source and target.startswith("/") and not target.startswith("//"):
                return Mount(source, target, read_only)
            break
    raise ValueError(f"want SOURCE:/TARGET[:ro|rw], got {text!r}")


def _exit_codes(values: Sequence[str]) -> tuple[int, ...]:
    codes: set[int] = set()
    for part in ",".join(values).split(","):
        match = re.fullmatch(r"\s*([0-9]+)(?:-([0-9]+))?\s*", part)
        if match is None:
            raise ValueError(f"want codes such as 42,128-255, got {part!r}")
        first, last = int(match[1]), int(match[2] or match[1])
        if first > last:
            raise ValueError(f"range {part.strip()!r} is backwards: want {last}-{first}")
        if not 1 <= first <= last <= 255:
            raise ValueError(f"exit codes are 1 to 255, got {part.strip()!r}")
        codes.update(range(first, last + 1))
    return tuple(sorted(codes))


def _exit_codes_text(codes: tuple[int, ...]) -> list[str]:
    spans: list[list[int]] = []
    for code in codes:
        if spans and spans[-1][1] == code - 1:
            spans[-1][1] = code
        else:
            spans.append([code, code])
    return [",".join(str(a) if a == b else f"{a}-{b}" for a, b in spans)] if spans else []


def _quantity(values: Sequence[str]) -> str:
    if not re.fullmatch(r"[1-9][0-9]*(?:[kMGT]|[KMGT]i)?", values[-1]):
        raise ValueError("want a size such as 100Gi")
    return values[-1]


def _arguments(values: Sequence[str]) -> tuple[str, ...]:
    return tuple(word for value in values for word in _words(value))


def _words(text: str) -> list[str]:
    try:
        return shlex.split(text)
    except ValueError as exc:
        raise ValueError(f"quotes do not match in {text!r}") from exc


def _flag(values: Sequence[str]) -> bool:
    if values[-1] not in ("true", "false"):
        raise ValueError("want true or false")
    return values[-1] == "true"


TEXT = TextForm(_last, lambda value: [value])
INTEGER = TextForm(_integer, lambda value: [str(value)], kind=int)
FLAG = TextForm(_flag, lambda value: ["true" if value else "false"], kind=bool)
DURATION = TextForm(lambda values: duration_s(values[-1]), lambda value: [duration_text(value)])
QUANTITY = TextForm(_quantity, lambda value: [value])
PAIRS = TextForm(_pairs, lambda pairs: [f"{name}={value}" for name, value in pairs], repeatable=True)
MOUNTS = TextForm(
    lambda values: tuple(_mount(value) for value in values),
    lambda mounts: [str(mount) for mount in mounts],
    repeatable=True,
)
COMMA_LIST = TextForm(
    lambda values: tuple(part.strip() for value in values for part in value.split(",") if part.strip()),
    lambda parts: list(parts),
    repeatable=True,
)
EXIT_CODES = TextForm(_exit_codes, _exit_codes_text, repeatable=True)
ARGUMENTS = TextForm(_arguments, lambda words: [shlex.join(words)] if words else [], repeatable=True)


def check_counts(spec: Any, *, at_least_1: tuple[str, ...] = (), at_least_0: tuple[str, ...] = ()) -> None:
    """Raises SpecError for a count of `spec` below its least value, or above what Kubernetes' int32 holds."""
    for least, names in ((1, at_least_1), (0, at_least_0)):
        for name in names:
            value = getattr(spec, name)
            if not least <= value < 2**31:
                raise SpecError(f"{_flag_of(spec, name)} {value!r} is out of range: want {least} to {2**31 - 1}")


def _flag_of(spec: Any, name: str) -> str:
    return next(option_of(field).flags[0] for field in dataclasses.fields(spec) if field.name == name)
