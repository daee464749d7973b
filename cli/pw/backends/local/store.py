"""The folder of all local jobs. A job is made and removed so that a crash leaves it whole or not there."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from datetime import datetime
from pathlib import Path
from typing import Any

from pw import config
from pw.backends.local import cleanup
from pw.backends.local.shapes import BrokenRecordError
from pw.backends.local.state import JobDir, locked, write_json
from pw.errors import BackendError, JobExistsError, JobNotFoundError, SpecError
from pw.status import JobState

# Folders with a dot in front are no jobs: one that is being made or removed, or was when its command was killed.
_NEW = ".new"
_REMOVED = ".removed"


class Store:
    """The jobs under `state_dir`."""

    def __init__(self, state_dir: Path) -> None:
        self._root = state_dir / "jobs"

    def folder(self, name: str) -> JobDir:
        """Where the job called `name` is, or would be."""
        return JobDir(self._root / name)

    def find(self, name: str) -> JobDir:
        """The folder of a job. Raises JobNotFoundError."""
        job = self.folder(name)
        self._check()
        if not name or "/" in name or name.startswith(".") or not job.path.is_dir():
            raise JobNotFoundError(f"there is no local job {name!r}", hints=("pw job list --backend local",))
        return job

    def all(self) -> list[JobDir]:
        """The folders of all jobs, in no order."""
        if not self._check():
            return []
        return [JobDir(path) for path in self._root.iterdir() if not path.name.startswith(".") and path.is_dir()]

    def create(self, name: str, files: Mapping[str, Mapping[str, Any]], *, replace: bool, locks: ExitStack) -> int:
        """Makes the folder of a job with `files` in it and returns the descriptor of its `lock`.

        `locks` holds that and `starting` from the first moment that others can see the folder. Of several at once for
        one name exactly one succeeds; the others get JobExistsError.
        """
        with self._changing():
            job = self.folder(name)
            if job.path.exists():
                self._make_room(job, replace=replace)
            new = JobDir(self._root / _NEW)
            new.pods.mkdir(parents=True)
            for file, value in files.items():
                write_json(new.path / file, value)
            lock_fd, _ = (locks.enter_context(locked(lock)) for lock in (new.lock, new.starting))
            new.path.rename(job.path)
            return lock_fd

    def _make_room(self, job: JobDir, *, replace: bool) -> None:
        state = _state(job, settle=replace)
        if not replace or not state.final:
            advice = "add --replace, or choose another --name" if state.final else "cancel it, or choose another --name"
            raise JobExistsError(
                f"the name {job.name!r} is taken by local job {job.name!r}, which is {state}: {advice}",
                hints=(f"pw job status {job.name}",),
            )
        self._remove(job)

    def remove(self, job: JobDir) -> None:
        """Removes the record of a job. Raises SpecError for one that is not over."""
        with self._changing():
            state = _state(job, settle=True)
            if not state.final:
                raise SpecError(
                    f"job {job.name!r} is {state} and keeps its record: cancel it first",
                    hints=(f"pw job cancel {job.name}",),
                )
            self._remove(job)

    def expire(self, at: datetime) -> None:
        """Removes the jobs whose time to live was over at `at`."""
        for job in self.all():
            # One that cannot be removed now is none of the business of who only asks.
            with contextlib.suppress(OSError, BackendError, BrokenRecordError):
                if cleanup.expired(job, at):
                    with self._changing():
                        if cleanup.expired(job, at):
                            self._remove(job)

    def _remove(self, job: JobDir) -> None:
        grave = self._root / _REMOVED
        with locked(job.lock):
            # Its controller, which wrote the last state, has let go. The rename frees the name at once.
            job.path.rename(grave)
        shutil.rmtree(grave)

    @contextlib.contextmanager
    def _changing(self) -> Iterator[None]:
        """The right to make and remove jobs. What a killed command left half done is cleared away."""
        with self._usable():
            self._root.mkdir(parents=True, exist_ok=True, mode=0o700)
            # With a file in it: another user's folder can be entered and not written to.
            (self._root / ".lock").touch(mode=0o600)
        with locked(self._root / ".lock"):
            for left in (_NEW, _REMOVED):
                if (self._root / left).exists():
                    shutil.rmtree(self._root / left)
            yield

    def _check(self) -> bool:
        """Whether there is a folder of jobs. Raises BackendError where that cannot be seen."""
        with self._usable():
            try:
                os.listdir(self._root)
            except FileNotFoundError:
                return False
        return True

    @contextlib.contextmanager
    def _usable(self) -> Iterator[None]:
        try:
            yield
        except OSError as exc:
            raise BackendError(
                f"the folder of local jobs, {self._root}, cannot be used: {exc.strerror}",
                hints=(f"{config.variable('state_dir')}=FOLDER names another",),
            ) from exc


def _state(job: JobDir, *, settle: bool) -> JobState:
    """Where a job stands, once that is settled if so asked; failed, of one whose record is broken."""
    try:
        return JobState((cleanup.settle(job) if settle else job.state())["state"])
    except BrokenRecordError:
        if settle:
            cleanup.end_broken(job)
        return JobState.FAILED
