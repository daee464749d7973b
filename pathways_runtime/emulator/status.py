"""Errors as the protocol knows them: a code and a message."""

from __future__ import annotations

import re
from typing import Final

CODES: Final = {
    "CANCELLED": 1,
    "UNKNOWN": 2,
    "INVALID_ARGUMENT": 3,
    "DEADLINE_EXCEEDED": 4,
    "NOT_FOUND": 5,
    "ALREADY_EXISTS": 6,
    "PERMISSION_DENIED": 7,
    "RESOURCE_EXHAUSTED": 8,
    "FAILED_PRECONDITION": 9,
    "ABORTED": 10,
    "OUT_OF_RANGE": 11,
    "UNIMPLEMENTED": 12,
    "INTERNAL": 13,
    "UNAVAILABLE": 14,
    "DATA_LOSS": 15,
    "UNAUTHENTICATED": 16,
}
_NAMES: Final = {number: name for name, number in CODES.items()}
_NAMED: Final = re.compile(rf"({'|'.join(CODES)}): ?(.*)", re.DOTALL)


class StatusError(Exception):
    """An error of one request, or of an array: what its use answers from then on.

    The message does not begin with the code's name: the client puts it there.
    """

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = CODES[code]
        self.message = message

    def again(self) -> StatusError:
        """An equal error to raise. One that is raised twice would keep the stack of both."""
        return StatusError.of_number(self.code, self.message)

    @classmethod
    def of_number(cls, number: int, message: str) -> StatusError:
        """The error of a numeric code; UNKNOWN for a number that is no code."""
        return cls(_NAMES.get(number, "UNKNOWN"), message)

    @classmethod
    def of(cls, error: BaseException) -> StatusError:
        """What a client is told about any exception. jaxlib's own carry the code's name in front of their text."""
        if isinstance(error, StatusError):
            return error
        if isinstance(error, NotImplementedError):
            return cls("UNIMPLEMENTED", str(error))
        named = _NAMED.fullmatch(str(error))
        if named is not None:
            return cls(named[1], named[2])
        if isinstance(error, (ValueError, TypeError, KeyError, IndexError, OverflowError)):
            return cls("INVALID_ARGUMENT", f"{type(error).__name__}: {error}")
        return cls("INTERNAL", f"{type(error).__name__}: {error}")
