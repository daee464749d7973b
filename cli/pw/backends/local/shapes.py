"""What the files of a job must hold for the rest of this package to take them at their word."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from types import NoneType
from typing import Any

from pw.status import JobState

# A type or types, a parser that raises ValueError or TypeError, a list of one shape, or an object's fields: more may be
# there, and one with a question mark may be missing.
Shape = type | tuple[type, ...] | Callable[[Any], Any] | list[Any] | dict[str, Any]
Fields = dict[str, Any]


class BrokenRecordError(Exception):
    """A file of a job is not what was written: emptied by a crash of the machine, edited, or gone."""


def _time(value: Any) -> None:
    if datetime.fromisoformat(value).tzinfo is None:
        raise ValueError(value)


def _time_or_none(value: Any) -> None:
    if value is not None:
        _time(value)


def _count(value: Any) -> None:
    """An index, a number of things or seconds, the number of a process or port."""
    if type(value) is not int or not 0 <= value < 2**31:
        raise ValueError(value)


def _ports(value: Any) -> None:
    for port in dict(value).values():
        _count(port)


_CODE, _PLACE = (int, NoneType), (int, NoneType)
_TIMES: Fields = {"started": _time_or_none, "finished": _time_or_none}
SLICE: Fields = {"index": _count, "state": str, "hosts": _count, "hosts_ready": _count, "restarts": _count}
CONTAINER: Fields = {"name": str, "state": str, "restarts": _count, "exit_code": _CODE, "reason": str} | _TIMES
POD: Fields = {"name": str, "phase": str, "slice": _PLACE, "host": _PLACE, "reason": str, "containers": [CONTAINER]}
_RESTARTS: Fields = {"restarts": _count, "restarts_counted": _count, "max_restarts": _count}
_CONTROLLER: Fields = {"pid": _count, "event_port": _count, "ports": _ports}
_WHERE: Fields = {"state": JobState, "reason": str, "exit_code": _CODE, "slices": [SLICE], "pods": [POD]}
STATE: Fields = _WHERE | _RESTARTS | _CONTROLLER | _TIMES
_WHAT: Fields = {"name": str, "uid": str, "created": _time, "compute_type": str, "num_slices": _count}
_SHELL: Fields = {"cwd": str, "env": dict, "python": str}
JOB: Fields = _WHAT | _SHELL | {"backoff_base_s": (int, float), "backoff_cap_s": (int, float)}

_CONTAINERS: list[Shape] = [{"name": str, "args?": [str]}]
_POD_SPEC: Fields = {"containers": _CONTAINERS, "initContainers?": _CONTAINERS}
_JOB_SPEC: Fields = {"completions?": _count, "template": {"spec": _POD_SPEC}}
_REPLICATED: Fields = {"name": str, "replicas?": _count, "template": {"spec": _JOB_SPEC}}
_COORDINATOR: Fields = {"jobIndex?": _count, "podIndex?": _count, "replicatedJob?": str}
_SPEC: Fields = {"replicatedJobs": [_REPLICATED], "coordinator?": _COORDINATOR, "ttlSecondsAfterFinished?": _count}
MANIFEST: Fields = {"metadata": {"name": str}, "spec": _SPEC}


def read(path: Path, shape: Fields) -> dict[str, Any]:
    """The object in `path`. Raises BrokenRecordError, and FileNotFoundError where its very folder is gone."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        if path.parent.is_dir():
            raise BrokenRecordError(f"{path.name} is missing") from None
        raise
    except IsADirectoryError:
        raise BrokenRecordError(f"{path.name} is a folder") from None
    except (ValueError, RecursionError) as exc:
        raise BrokenRecordError(f"{path.name} is not JSON: {exc}") from None
    _check(value, shape, path.name)
    result: dict[str, Any] = value
    return result


def _check(value: Any, shape: Shape, where: str) -> None:
    if isinstance(shape, dict):
        if not isinstance(value, dict):
            raise BrokenRecordError(f"{where} is no object")
        for name, inner in shape.items():
            key = name.removesuffix("?")
            if key in value:
                _check(value[key], inner, f"{where}: {key}")
            elif key == name:
                raise BrokenRecordError(f"{where} has no {key!r}")
    elif isinstance(shape, list):
        if not isinstance(value, list):
            raise BrokenRecordError(f"{where} is no list")
        for index, item in enumerate(value):
            _check(item, shape[0], f"{where}[{index}]")
    elif not _fits(value, shape):
        raise BrokenRecordError(f"{where} is {value!r}")


def _fits(value: Any, shape: type | tuple[type, ...] | Callable[[Any], Any]) -> bool:
    if isinstance(shape, tuple) or shape in (int, str, dict):
        return isinstance(value, shape)
    try:
        shape(value)
    except (ValueError, TypeError):
        return False
    return True
