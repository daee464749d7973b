"""What the kubelet does to `command`, `args` and the values of `env`: `$(NAME)` is replaced, `$$` becomes `$`.

Kubernetes, `third_party/forked/golang/expansion`: a reference to an unknown name stays as it is, and so does a `$`
before anything else. That code works byte by byte and writes the byte after such a `$` as a rune, so that `$é` arrives
broken; `escape` therefore doubles that `$` too.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

_OPERATOR = re.compile(rb"\$(?:\$|\(([^)]*)\)|\(|([^$(]))", re.DOTALL)
_MEANT = re.compile(r"\$(?=[$(]|[^\x00-\x7f])")


def escape(text: str) -> str:
    """`text` such that `expand` gives it back, whatever the variables are."""
    return _MEANT.sub("$$", text)


def expand(text: str, variables: Mapping[str, str]) -> str:
    """`text` as a container receives it, given the variables that are set when it is expanded.

    A value that is inserted is not expanded again. Bytes that the kubelet would break come back as U+FFFD.
    """

    def replaced(match: re.Match[bytes]) -> bytes:
        if match[1] is not None:
            value = variables.get(match[1].decode())
            return match[0] if value is None else value.encode()
        if match[2] is not None:
            return b"$" + chr(match[2][0]).encode()
        return match[0] if match[0] == b"$(" else b"$"

    return _OPERATOR.sub(replaced, text.encode()).decode(errors="replace")


def references(text: str) -> list[str]:
    """The names that `expand` looks up, in order and as often as they stand there."""
    return [match[1].decode() for match in _OPERATOR.finditer(text.encode()) if match[1] is not None]
