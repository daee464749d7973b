"""What the commands about jobs share: the flags that choose a backend, the choice, and following a job."""

from __future__ import annotations

import contextlib
import functools
import inspect
import re
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import FrameType
from typing import Annotated, Any, NoReturn

import typer

from pathways_runtime import _contract
from pw import backends, config, console, fields, jobs
from pw.backends import Backend
from pw.commands import _draw
from pw.errors import ConfigError, SpecError, WaitTimeoutError
from pw.status import JobRef, JobStatus, LogQuery

_CLUSTER = "Cluster"

JsonFlag = Annotated[bool, typer.Option("--json", help="Print JSON.")]
JobArgument = Annotated[
    str | None, typer.Argument(metavar="JOB", help="Name or reference; the newest job if left out.", show_default=False)
]


@dataclass(frozen=True, slots=True)
class Where:
    """The flags that say where a job runs, None where not given."""

    backend: str | None = None
    cluster: str | None = None
    location: str | None = None
    project: str | None = None
    gke_namespace: str | None = None

    def settings(self) -> config.Settings:
        """The settings under these flags. Raises ConfigError for flags that contradict each other."""
        flags = {"cluster": self.cluster, "location": self.location, "project": self.project}
        given = {**flags, "gke-namespace": self.gke_namespace}
        clash = next((name for name, value in given.items() if value is not None), None)
        if self.backend == "local" and clash:
            raise ConfigError(f"--backend local and --{clash} contradict each other: leave one out")
        return config.load({**flags, "namespace": self.gke_namespace, "backend": self.backend})


_WHERE_FLAGS = {
    "backend": typer.Option("--backend", metavar="local|gke", help="What runs the job."),
    "cluster": typer.Option("--cluster", "-c", metavar="NAME", help="GKE cluster.", rich_help_panel=_CLUSTER),
    "location": typer.Option("--location", "-l", metavar="NAME", help="Region or zone.", rich_help_panel=_CLUSTER),
    "project": typer.Option("--project", "-p", metavar="ID", help="Google Cloud project.", rich_help_panel=_CLUSTER),
    "gke_namespace": typer.Option(
        "--gke-namespace", metavar="NAME", help="Namespace of the jobs.", rich_help_panel=_CLUSTER
    ),
}


def placed(command: Callable[..., None]) -> Callable[..., None]:
    """`command` with the flags that say where, instead of its parameter `where`."""

    @functools.wraps(command)
    def run(**given: Any) -> None:
        where = Where(**{name: given.pop(name) for name in _WHERE_FLAGS})
        command(where=where, **given)

    signature = inspect.signature(command, eval_str=True)
    own = [parameter for parameter in signature.parameters.values() if parameter.name != "where"]
    flags = [
        inspect.Parameter(
            name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[str | None, declaration]
        )
        for name, declaration in _WHERE_FLAGS.items()
    ]
    run.__signature__ = signature.replace(parameters=[*own, *flags])  # type: ignore[attr-defined]
    return run


def choose_backend(where: Where) -> Backend:
    """The backend that the flags or settings name."""
    settings = where.settings()
    return backends.get(config.default_backend(settings), settings)


def choose(where: Where, job: str | None = None) -> tuple[Backend, JobRef]:
    """The job, the newest if None, and the backend that its reference names, else the flags or settings."""
    scheme, separator, _ = (job or "").partition("://")
    if separator and where.backend not in (None, scheme):
        raise ConfigError(f"--backend {where.backend} and job {job!r} contradict each other: leave the flag out")
    backend = backends.get(scheme, where.settings()) if separator else choose_backend(where)
    return backend, jobs.find(backend, job)


def seconds(flag: str, text: str | None) -> int | None:
    """The duration that was typed for a flag. Raises SpecError."""
    try:
        return None if text is None else fields.duration_s(text)
    except ValueError as exc:
        raise SpecError(f"{flag} {text!r}: {exc}") from exc


def count(flag: str, text: str) -> int:
    """The number that was typed for a flag. Raises SpecError for all but 0 and more."""
    if not re.fullmatch(r"[0-9]{1,9}", text):
        raise SpecError(f"{flag} {text!r}: want a whole number, 0 or more")
    return int(text)


def follow(backend: Backend, ref: JobRef, query: LogQuery, *, timeout_s: int | None = None, json: bool = False) -> None:
    """Prints a job's lines until it ends. Raises JobFailedError for one that failed, WaitTimeoutError when the time is
    over."""
    with _deadline(ref, timeout_s):
        printed = print_logs(backend, ref, query, json=json)
        seen = _contract.USER_CONTAINER in printed and console.stdout_is_terminal()
        end(backend, jobs.wait(backend, ref), seen=seen)


def print_logs(backend: Backend, ref: JobRef, query: LogQuery, *, json: bool = False) -> set[str]:
    """Prints the lines that a job has, or with a query that follows, those to come as well. Gives the names of the
    containers whose lines they were."""
    printer = console.LogPrinter(json=json)
    printed: set[str] = set()
    for line in backend.logs(ref, query):
        printer.line(line)
        printed.add(line.container)
    return printed


def end(backend: Backend, found: JobStatus, *, seen: bool = False) -> None:
    """Tells how a job ended, unless that is an error: raises JobFailedError, with the last lines of its command unless
    the user has just `seen` them."""
    jobs.check(backend, found, tail=0 if seen else jobs.LAST_LINES)
    console.say(_draw.sentence(found))


def wait(backend: Backend, ref: JobRef, *, timeout_s: int | None = None) -> JobStatus:
    """The status of a job once it has ended, however that was. Raises WaitTimeoutError when the time is over."""
    with _deadline(ref, timeout_s), console.progress(f"waiting for job {ref.name!r}"):
        return jobs.wait(backend, ref)


@contextlib.contextmanager
def left_running(ref: JobRef) -> Iterator[None]:
    """Ctrl-C in here says that the job goes on, and how to get back to it."""
    try:
        yield
    except KeyboardInterrupt:
        console.say(f"\njob {ref.name!r} goes on")
        console.say(f"  pw job logs -f {ref}")
        console.say(f"  pw job cancel {ref}")
        raise


@contextlib.contextmanager
def interrupts_held() -> Iterator[list[int]]:
    """Ctrl-C in here is only noted, in the list: what is begun comes to its end. A second one is not held back."""
    noted: list[int] = []

    def note(number: int, _frame: FrameType | None) -> None:
        if noted:
            raise KeyboardInterrupt
        noted.append(number)

    before = signal.getsignal(signal.SIGINT)
    if before is not signal.default_int_handler:
        yield noted
        return
    signal.signal(signal.SIGINT, note)
    try:
        yield noted
    finally:
        signal.signal(signal.SIGINT, before)


@contextlib.contextmanager
def _deadline(ref: JobRef, timeout_s: int | None) -> Iterator[None]:
    """Raises WaitTimeoutError in here, whatever the main thread waits for, when the time is over."""

    def ring(_number: int, _frame: FrameType | None) -> NoReturn:
        raise WaitTimeoutError(
            f"job {ref.name!r} has not ended after {fields.duration_text(timeout_s or 0)}; it goes on",
            hints=(f"pw job logs -f {ref}", f"pw job cancel {ref}"),
        )

    if timeout_s is None:
        yield
        return
    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, timeout_s)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
