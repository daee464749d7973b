"""The table of requests: for each, who answers it and which arrays its failure poisons."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathways_runtime.emulator.session import Session

# What a handler leaves for a thread of the pool, since it blocks: it fills the reply.
Later = Callable[[Any], None]
# (session, request, reply) -> None when the reply is complete. Runs on the session's one thread, in order.
Handler = Callable[["Session", Any, Any], Later | None]


@dataclass(frozen=True, slots=True)
class Entry:
    """How a kind of request is answered.

    `results` are the fields of the request with the handles that the client gave to arrays still to be made.
    Some have no place in the sequence of responses (`numbered=False`; see `session.py`).
    Where nobody waits for the answer (`awaited=False`), it may leave with the next that somebody waits for.
    """

    name: str
    handler: Handler
    results: tuple[str, ...]
    numbered: bool
    awaited: bool

    @property
    def reply_field(self) -> str:
        """The field of the response that answers this request."""
        return f"{self.name}_response"


TABLE: dict[str, Entry] = {}


def handles(
    name: str, *, results: tuple[str, ...] = (), numbered: bool = True, awaited: bool = True
) -> Callable[[Handler], Handler]:
    """Puts a function into the table as the one that answers `{name}_request`."""

    def register(handler: Handler) -> Handler:
        TABLE[f"{name}_request"] = Entry(name, handler, results, numbered, awaited)
        return handler

    return register
