"""The entry of the command `pw`. It imports all else where Ctrl-C is caught."""

from __future__ import annotations

import sys
from collections.abc import Sequence

# Exit code of a command that Ctrl-C ended, as a shell gives it: 128 and the signal's number.
_EXIT_INTERRUPTED = 130


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command (of `sys.argv` by default) and returns its exit code."""
    try:
        from pw.app import run

        return run(sys.argv[1:] if arguments is None else arguments)
    except KeyboardInterrupt:
        return _EXIT_INTERRUPTED


if __name__ == "__main__":
    sys.exit(main())
