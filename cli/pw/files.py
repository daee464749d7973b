"""Files that the user asked for: whole or not at all, and never over one that is there."""

from __future__ import annotations

import os
from pathlib import Path

from pw.errors import SpecError


def check_new(path: Path) -> None:
    """Raises SpecError if a file cannot be made at `path`: something is there, or its folder is not."""
    if os.path.lexists(path):
        raise SpecError(f"{str(path)!r} is there already: remove it or name another file")
    if not path.parent.is_dir():
        raise SpecError(f"folder {str(path.parent)!r} of {path.name!r} does not exist")


def write_new(path: Path, text: str) -> None:
    """Writes a file that was not there, under a name of its own until it is whole. Raises SpecError."""
    check_new(path)
    whole = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        try:
            with whole.open("x", encoding="utf-8") as file:
                file.write(text)
            os.replace(whole, path)
        finally:
            whole.unlink(missing_ok=True)
    except OSError as exc:
        raise SpecError(f"{str(path)!r} cannot be written: {exc.strerror}") from exc
