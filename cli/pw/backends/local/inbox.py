"""Faults on their way from a command to the controller: a file for each, and an answer beside it.

The command makes `jobs/<name>/faults/<id>.request` by rename and rings; the controller removes it before it acts, so
that it acts once, and makes `<id>.answer`. The command takes both away, whatever happens to it short of SIGKILL. The
folder is what proves that the request is the user's: whoever reaches the controller's port can do no more than ring.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from pw.backends.local.events import ANSWER_TIMEOUT_S, Watch
from pw.backends.local.state import JobDir, read_json, write_json
from pw.errors import BackendError, SpecError
from pw.faults import Fault

_LOG = logging.getLogger(__name__)
_REQUEST, _ANSWER = ".request", ".answer"


@dataclass(frozen=True, slots=True)
class Request:
    """One that the controller has taken."""

    fault: Fault
    _answer: Path

    def answer(self, problem: str) -> None:
        """Tells the command why it is refused, or with "" that it is done."""
        write_json(self._answer, {"problem": problem})


def send(job: JobDir, fault: Fault, watch: Watch) -> None:
    """Returns once the controller has done it. Raises SpecError when it refuses, BackendError when it does not answer;
    nothing happens then."""
    job.faults.mkdir(exist_ok=True)
    request = job.faults / f"{uuid.uuid4().hex}{_REQUEST}"
    answer = request.with_suffix(_ANSWER)
    deadline = time.monotonic() + ANSWER_TIMEOUT_S
    try:
        write_json(request, dataclasses.asdict(fault) | {"expires": time.time() + ANSWER_TIMEOUT_S})
        watch.ring()
        while not answer.exists():
            if not watch.wait(deadline):
                raise BackendError(f"job {job.name!r} ended before slice {fault.slice} could {fault.kind}")
        if problem := read_json(answer)["problem"]:
            raise SpecError(f"job {job.name!r}: {problem}", hints=(f"pw job status {job.name}",))
    except TimeoutError as exc:
        raise BackendError(
            f"the controller of job {job.name!r} does not answer: slice {fault.slice} is as it was"
        ) from exc
    finally:
        for file in (request, answer):
            file.unlink(missing_ok=True)


def take(job: JobDir) -> Iterator[Request]:
    """Every request that waits, each given once. Those whose command was killed long ago are dropped, and so is what no
    command of ours has written. Raises OSError."""
    for path in sorted(job.faults.glob(f"*{_REQUEST}")):
        try:
            text = path.read_text(encoding="utf-8", errors="replace")
            path.unlink()
        except FileNotFoundError:
            continue  # its command has given up
        try:
            content = json.loads(text)
            if content.pop("expires") > time.time():
                yield Request(Fault(**content), path.with_suffix(_ANSWER))
        except (ValueError, KeyError, TypeError, AttributeError, SpecError) as exc:
            _LOG.error("%s is no request: %s", path.name, exc)
