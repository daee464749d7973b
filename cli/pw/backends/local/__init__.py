"""Runs jobs on this machine: the JobSet that a cluster would get, with processes for containers.

`backend` holds the verbs. `start` starts one `controller` for each job; that asks `jobset` and `jobs` (pure) what to do
and does it through `pods`, `containers` and `processes`. All they share with the verbs is the files of `state`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pw.backends.local.backend import LocalBackend as LocalBackend

__all__ = ["LocalBackend"]


def __getattr__(name: str) -> Any:
    # On demand: the controller imports this package and needs nothing of the verbs.
    if name != "LocalBackend":
        raise AttributeError(name)
    from pw.backends.local.backend import LocalBackend

    return LocalBackend
