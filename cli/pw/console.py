"""All that `pw` prints: data on stdout, talk on stderr. The only user of rich, which it imports when it needs it.

What a user or a job wrote is never taken for markup. On a terminal there is colour, unless NO_COLOR is set; into a pipe
goes plain text with nothing cut off.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import json
import os
import signal
import sys
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime
from types import FrameType
from typing import TYPE_CHECKING, Any, NoReturn

from pw.status import LogLine
from pw.streams import translated

if TYPE_CHECKING:
    from rich.console import Console

_PREFIX_COLOURS = ("cyan", "green", "yellow", "magenta", "blue", "bright_cyan", "bright_green", "bright_magenta")


def out(text: str = "", *, end: str = "\n") -> None:
    """Writes data to stdout at once. Raises OutputClosedError when nobody reads it, OutputError when that fails."""
    with translated():
        sys.stdout.write(text + end)
        sys.stdout.flush()


def say(text: str) -> None:
    """Tells the user something on stderr."""
    _talk("", "", text)


def warn(text: str) -> None:
    """Tells the user of something that is likely not meant."""
    _talk("warning: ", "bold yellow", text)


def error(text: str, hints: Sequence[str] = ()) -> None:
    """Tells the user what went wrong, and what to do next on lines of their own."""
    _talk("error: ", "bold red", text)
    for hint in hints:
        _talk("", "", f"  {hint}")


def _talk(label: str, style: str, text: str) -> None:
    with contextlib.suppress(OSError):
        sys.stderr.write(f"{_coloured(label, style, sys.stderr) if label else ''}{text}\n")
        sys.stderr.flush()


def json_value(value: Any) -> Any:
    """`value` as JSON has it: dataclasses as objects, times in ISO 8601, enumerations by value, references as text."""
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, datetime):
        return value.isoformat()
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        if type(value).__str__ is not object.__str__:
            return str(value)
        return {field.name: json_value(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): json_value(item) for key, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [json_value(item) for item in value]
    return value


def print_json(value: Any) -> None:
    """One JSON document on stdout."""
    out(json.dumps(json_value(value), indent=2, ensure_ascii=False))


def table(
    columns: Sequence[str], rows: Sequence[Sequence[str]], *, json: bool = False, records: Sequence[Any] | None = None
) -> None:
    """Rows under column names on stdout, a line each; with `json` the `records`, or the rows by column where none are
    given. A terminal may wrap a long line, but no name in it is broken into what cannot be copied."""
    if json:
        print_json([dict(zip(columns, row, strict=True)) for row in rows] if records is None else records)
        return
    lines = [columns, *([_cell(cell) for cell in row] for row in rows)]
    widths = [max(len(line[index]) for line in lines) for index in range(len(columns))]
    head, *body = ("  ".join(map(str.ljust, line, widths)).rstrip() for line in lines)
    # At once: what fits into a pipe is written even where its reader wants the first line alone.
    out("\n".join((_coloured(head, "bold", sys.stdout), *body)))


def _cell(text: str) -> str:
    return " ".join(text.split())


@contextlib.contextmanager
def progress(text: str) -> Iterator[Callable[[str], None]]:
    """Shows on a terminal's stderr that long work goes on; gives a function that changes the text."""
    if not _is_terminal(sys.stderr):
        say(text)
        yield lambda _text: None
        return
    from rich.text import Text

    terminal = _console(sys.stderr)
    with _ending_in_order():
        try:
            with terminal.status(Text(text)) as status:
                yield lambda text: status.update(Text(text))
        finally:
            # What interrupts the start of the status leaves it hidden.
            terminal.show_cursor(True)


@contextlib.contextmanager
def _ending_in_order() -> Iterator[None]:
    """SIGTERM in here ends the command as an error does: what was done to the terminal, as to its cursor, is undone."""

    def end(number: int, _frame: FrameType | None) -> NoReturn:
        sys.exit(128 + number)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


class LogPrinter:
    """Prints log lines on stdout as `POD/CONTAINER | TEXT`, each container in a colour of its own on a terminal; with
    `json` as an object a line."""

    def __init__(self, *, json: bool = False) -> None:
        self._json = json
        self._prefixes: dict[tuple[str, str], str] = {}

    def line(self, line: LogLine) -> None:
        """One line. Its text goes out as the job wrote it."""
        if self._json:
            out(json.dumps(json_value(line), ensure_ascii=False))
        else:
            out(f"{self._prefix(line.pod, line.container)} {line.text}")

    def _prefix(self, pod: str, container: str) -> str:
        found = self._prefixes.get((pod, container))
        if found is None:
            # By name and not by order of appearance, so that a container keeps its colour from one command to the next.
            colour = _PREFIX_COLOURS[zlib.crc32(f"{pod}/{container}".encode()) % len(_PREFIX_COLOURS)]
            found = _coloured(f"{pod}/{container} |", colour, sys.stdout)
            self._prefixes[pod, container] = found
        return found


def stdout_is_terminal() -> bool:
    """Whether someone looks at stdout as it comes."""
    return _is_terminal(sys.stdout)


def _is_terminal(stream: Any) -> bool:
    return bool(stream.isatty())


def _console(stream: Any) -> Console:
    from rich.console import Console

    return Console(file=stream, highlight=False, markup=False, emoji=False)


def _coloured(text: str, style: str, stream: Any) -> str:
    if not _is_terminal(stream) or os.environ.get("NO_COLOR"):
        return text
    from rich.color import ColorSystem
    from rich.style import Style

    if _console(stream).color_system is None:
        return text
    return Style.parse(style).render(text, color_system=ColorSystem.STANDARD)
