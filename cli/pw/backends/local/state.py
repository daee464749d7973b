"""The files of one local job, and the locks that say who may write them. Nothing here starts or ends a process.

jobs/<name>/manifest.json          the JobSet, as planned
jobs/<name>/job.json               what else the controller needs; written once
jobs/<name>/state.json             where the job stands; replaced by rename, by who holds `lock`
jobs/<name>/lock                   flock held by the controller for its life: free means that none lives
jobs/<name>/starting               flock held by `submit` until the controller has reported
jobs/<name>/pods/<pod>/<container>.log
jobs/<name>/faults                 requests of commands, and the controller's answers
jobs/<name>/scratch                the scratch location of a job that named none
jobs/.lock                         flock held while a job is made or removed
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from pw.backends.local import shapes
from pw.backends.local.shapes import BrokenRecordError

State = dict[str, Any]


def now() -> datetime:
    """This moment, aware UTC."""
    return datetime.now(UTC)


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Replaces `path` by rename, so that a reader or a crash sees the old or the new whole."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        # In one piece: json.dump to a file is ten times slower, and a job may have hundreds of pods.
        temporary.write_text(json.dumps(value), encoding="utf-8")
        temporary.replace(path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise


def read_json(path: Path) -> dict[str, Any]:
    """The object in `path`. Raises OSError or ValueError."""
    value = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(value, dict):
        raise ValueError(f"{path} holds no object")
    return value


@dataclass(frozen=True, slots=True)
class JobDir:
    """The folder of one job. What reads its files raises BrokenRecordError, and FileNotFoundError once it is gone."""

    path: Path

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def pods(self) -> Path:
        return self.path / "pods"

    @property
    def scratch(self) -> Path:
        return self.path / "scratch"

    @property
    def faults(self) -> Path:
        return self.path / "faults"

    @property
    def lock(self) -> Path:
        return self.path / "lock"

    @property
    def starting(self) -> Path:
        return self.path / "starting"

    @property
    def controller_log(self) -> Path:
        return self.path / "controller.log"

    def log_file(self, pod: str, container: str) -> Path:
        return self.pods / pod / f"{container}.log"

    def manifest(self) -> dict[str, Any]:
        return shapes.read(self.path / "manifest.json", shapes.MANIFEST)

    def job(self) -> dict[str, Any]:
        static = shapes.read(self.path / "job.json", shapes.JOB)
        if static["name"] != self.name:
            raise BrokenRecordError(f"job.json is of job {static['name']!r}")
        return static

    def state(self) -> State:
        return shapes.read(self.path / "state.json", shapes.STATE)

    def write_state(self, state: State) -> None:
        write_json(self.path / "state.json", state)

    def overwrite_state(self, state: State) -> None:
        """Writes the last state over the one that is there, for when a disk has no room for both: in the blocks that
        the file has, without the pods if need be. Raises OSError."""
        path = self.path / "state.json"
        with path.open("r+b") as file:
            room_bytes = os.fstat(file.fileno()).st_blocks * 512
            whole, short = (json.dumps(value).encode() for value in (state, state | {"pods": []}))
            file.write(whole if len(whole) <= room_bytes else short)
            file.truncate()


@contextlib.contextmanager
def locked(path: Path, *, shared: bool = False) -> Iterator[int]:
    """Holds an flock on `path`, made if need be, and gives its descriptor; waits for who has it."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH if shared else fcntl.LOCK_EX)
        yield descriptor
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def if_free(path: Path) -> Iterator[bool]:
    """Holds the flock on `path` when nobody else does, and says whether it does."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
        else:
            yield True
    finally:
        os.close(descriptor)
