"""The standard streams of `pw`. A failure to write to stdout is an error of ours, whoever writes: Typer's help too."""

from __future__ import annotations

import contextlib
import io
import os
import sys
from collections.abc import Iterator

from pw.errors import PwError


class OutputError(PwError):
    """stdout cannot be written, as on a full disk."""


class OutputClosedError(Exception):
    """Who read our stdout has gone; nothing is left to say."""


class _Stdout(io.TextIOWrapper):
    def write(self, text: str) -> int:
        with translated():
            return super().write(text)

    def flush(self) -> None:
        with translated():
            super().flush()


@contextlib.contextmanager
def translated() -> Iterator[None]:
    """Failures of stdout as OutputError and OutputClosedError."""
    try:
        yield
    except BrokenPipeError as exc:
        raise OutputClosedError from exc
    except OSError as exc:
        raise OutputError(f"cannot write to stdout: {exc.strerror}") from exc


def guard() -> None:
    """Has stdout raise errors of this file, and both streams write what their encoding lacks as escapes. A stream that
    was closed when the process began is opened: stdout so that writing fails, stderr so that it says nothing."""
    for number, mode in enumerate((os.O_RDONLY, os.O_RDONLY, os.O_WRONLY)):
        _occupy(number, mode)
    if sys.stderr is None:
        sys.stderr = open(2, "w", closefd=False)  # noqa: SIM115
    if sys.stdout is None:
        sys.stdout = _Stdout(open(1, "wb", closefd=False))  # noqa: SIM115
    elif type(sys.stdout) is io.TextIOWrapper:  # a test's stream may be any file
        sys.stdout = _Stdout(sys.stdout.buffer, sys.stdout.encoding, line_buffering=sys.stdout.line_buffering)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def _occupy(number: int, mode: int) -> None:
    """Opens a descriptor that is closed, so that no other file gets its number."""
    try:
        os.fstat(number)
    except OSError:
        null = os.open(os.devnull, mode)
        if null != number:
            os.dup2(null, number, inheritable=True)
            os.close(null)


def abandon_stdout() -> None:
    """Gives up what was not written: Python flushes stdout once more when it exits, and must not fail again."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, sys.stdout.fileno())
    os.close(null)
