"""Files of environment variables, as `--env-file` takes them."""

from __future__ import annotations

from pathlib import Path

from pw.errors import SpecError
from pw.fields import PAIRS, Pairs


def read(path: Path) -> Pairs:
    """The NAME=VALUE lines of a file, in order. Empty lines and lines that begin with # say nothing; a value is all
    that follows the first equals sign, quotes included. Raises SpecError with file and line."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as exc:
        raise SpecError(f"env file {str(path)!r} cannot be read: {exc}") from exc
    pairs: list[tuple[str, str]] = []
    for number, line in enumerate(lines, 1):
        if line.strip() and not line.lstrip().startswith("#"):
            try:
                pairs += PAIRS.read([line])
            except ValueError as exc:
                raise SpecError(f"{path}, line {number}: {exc}") from exc
    return tuple(pairs)
