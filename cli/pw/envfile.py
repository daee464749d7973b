"""Files of environment variables, as `--env-file` takes them."""

from __future__ import annotations

from pathlib import Path

from pw.errors import SpecError
from pw.fields import PAIRS, VARIABLE, Pairs


def read(path: Path) -> Pairs:
    """The NAME=VALUE lines of a file, in order. Empty lines and lines that begin with # say nothing; a value is all
    that follows the first equals sign, quotes included. Raises SpecError with file and line."""
    try:
        # Editors on Windows begin a file with a byte order mark.
        lines = path.read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as exc:
        raise SpecError(f"env file {str(path)!r} cannot be read: {exc}") from exc
    pairs: list[tuple[str, str]] = []
    for number, line in enumerate(lines, 1):
        if line.strip() and not line.lstrip().startswith("#"):
            try:
                pairs += PAIRS.read([line])
                _check_name(pairs[-1][0])
            except ValueError as exc:
                raise SpecError(f"{path}, line {number}: {exc}") from exc
    return tuple(pairs)


def _check_name(name: str) -> None:
    if name.startswith("export "):
        raise ValueError(f"this is no shell script: leave out 'export', as in {name.split()[-1]}=VALUE without quotes")
    if not VARIABLE.fullmatch(name):
        raise ValueError(f"{name!r} is not the name of a variable: want letters, digits and underscores")
