"""A pytest plugin: it tells `run.py` of each test as it begins and ends, and puts JAX on Pathways where that is asked.

It is loaded with `-p recorder`, in a process of the checkout under test; the names below are of its environment.
"""

from __future__ import annotations

import json
import os
from collections.abc import Generator
from pathlib import Path
from typing import Any, Final

import pytest

# A file descriptor for one JSON object a line: a `test` that begins, or that ended with an `outcome` and an `error`.
EVENTS_FD: Final = "PW_CONFORMANCE_FD"
# A file of JSON: the tests to run (null: all), those to leave out, and N to take only every Nth.
SELECTION: Final = "PW_CONFORMANCE_SELECTION"


def pytest_configure() -> None:
    """Before collection: JAX's tests ask for devices while they are imported."""
    import pathways_runtime

    if pathways_runtime.is_pathways():
        pathways_runtime.initialize()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leaves out what is not selected."""
    only, without, every = json.loads(Path(os.environ[SELECTION]).read_text(encoding="utf-8"))
    leave_out = set(without)
    keep = None if only is None else set(only)
    items[:] = [
        item for item in items[::every] if item.nodeid not in leave_out and (keep is None or item.nodeid in keep)
    ]


def pytest_runtest_logstart(nodeid: str) -> None:
    """A test begins."""
    _outcome.clear()
    _tell({"test": nodeid})


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(call: pytest.CallInfo[None]) -> Generator[None, Any, Any]:
    """Keeps the first outcome of setup, call and teardown that is not "passed"."""
    report = yield
    if report.outcome != "passed" and not _outcome:
        _outcome.update(outcome=report.outcome, error="" if call.excinfo is None else _describe(call.excinfo.value))
    return report


def pytest_runtest_logfinish(nodeid: str) -> None:
    """A test has ended, with its teardown."""
    _tell({"test": nodeid, "outcome": "passed", "error": ""} | _outcome)


_outcome: Final[dict[str, str]] = {}


def _describe(error: BaseException) -> str:
    text = f"{type(error).__name__}: {error}".strip()
    return text[:2000]


def _tell(event: dict[str, str]) -> None:
    os.write(int(os.environ[EVENTS_FD]), json.dumps(event).encode() + b"\n")
