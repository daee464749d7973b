"""Everything that `pw` raises on purpose, and the exit code each ends the command with.

    PwError                      1   something in the world went wrong
      SpecError                  2   what the user asked for is refused; nothing was sent
      ConfigError                2   a setting is wrong; nothing was sent
      JobNotFoundError           1
      JobExistsError             2   the name is taken; nothing was sent
      JobFailedError             the job's own exit code where it has one, else 1
      WaitTimeoutError           124 as timeout(1)
      BackendError               1   the machine or cluster that runs jobs refused or broke
        BackendUnavailableError  1
        AuthError                1

A message says what, which value, and what to do next: lower case, values quoted with `!r`, no full stop at the end.
`__main__` prints `error: <message>` and each of `hints` on a line of its own; foreign errors are translated once, in
the file that owns the library.
"""

from __future__ import annotations


class PwError(Exception):
    """Base of all errors that are told to the user without a traceback. `hints` are the next things to type or read."""

    exit_code: int = 1

    def __init__(self, message: str, *, hints: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.message = message
        self.hints = hints


class SpecError(PwError):
    """What was asked for is refused before anything is sent or overwritten."""

    exit_code = 2


class ConfigError(PwError):
    """A setting is missing, unknown or not of its type."""

    exit_code = 2


class JobNotFoundError(PwError):
    """No job of this name, or no job at all."""


class JobExistsError(PwError):
    """The name is taken by a job that is named in the message."""

    exit_code = 2


class JobFailedError(PwError):
    """The job ended and did not succeed."""

    def __init__(self, message: str, *, exit_code: int = 1, hints: tuple[str, ...] = ()) -> None:
        super().__init__(message, hints=hints)
        self.exit_code = exit_code or 1


class WaitTimeoutError(PwError):
    """The job had not ended when the time the user gave was over; it goes on."""

    exit_code = 124


class BackendError(PwError):
    """What runs the jobs refused a request or broke."""


class BackendUnavailableError(BackendError):
    """What runs the jobs cannot be reached."""


class AuthError(BackendError):
    """The credentials are missing, expired or not allowed to do this."""
