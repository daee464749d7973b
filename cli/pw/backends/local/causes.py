"""Why a job waits, restarts or fails, in a user's words: which container ended how, and its last line.

Kubernetes' own words for it come from `jobs` and `jobset`; these go in front of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from pathways_runtime import _contract
from pw.backends.local.containers import START_ERROR, STOPPED, Container
from pw.backends.local.pods import Pod
from pw.status import exit_text

# A reason is one line of a table; the log has the whole.
_LONGEST_LINE = 200


def of_wait(pods: Iterable[Pod]) -> str:
    """What keeps a container from running that is tried again and again; "" where none is."""
    for pod, container in _containers(pods):
        # Until one of the emulator's says that it listens, it may end as it did before.
        if container.exit_code and container.state != "terminated" and not container.ready.is_set():
            times = f", restarted {container.restarts} times" if container.restarts else ""
            return f"CrashLoopBackOff: {_subject(pod, container)} {_ended(container)}{times}{_last_words(container)}"
    return ""


def of_end(pods: Iterable[Pod]) -> str:
    """How the container ended that made the job fail or start again; "" where none failed."""
    return next((f"{_subject(pod, container)} {_ended(container)}" for pod, container in _failed(pods)), "")


def code_of_end(pods: Iterable[Pod]) -> int | None:
    """The exit code of that container."""
    return next((container.exit_code for _, container in _failed(pods)), None)


def _failed(pods: Iterable[Pod]) -> list[tuple[Pod, Container]]:
    """Containers that failed and were not just stopped, the one that most likely is the cause first."""
    failed = [
        (pod, container)
        for pod, container in _containers(pods)
        if container.exit_code and container.state != "running" and container.reason != STOPPED
    ]
    return sorted(failed, key=lambda found: (not _is_command(*found), found[0].phase != "Failed"))


def of_refusal(pod: Pod, container: Container) -> str:
    """What an emulated container said that ended because of its flags."""
    return f"{_subject(pod, container)} {_ended(container)}{_last_words(container)}"


def _containers(pods: Iterable[Pod]) -> Iterator[tuple[Pod, Container]]:
    for pod in pods:
        for container in pod.containers:
            yield pod, container


def _is_command(pod: Pod, container: Container) -> bool:
    # A JobSet that is not of our template has its command in whatever is neither worker nor emulated.
    return container is pod.main and not container.emulated and pod.key.replicated_job != _contract.WORKER_JOB


def _subject(pod: Pod, container: Container) -> str:
    if _is_command(pod, container):
        return "the command"
    return f"{pod.name}/{container.name}" if pod.key.replicated_job == _contract.WORKER_JOB else container.name


def _ended(container: Container) -> str:
    if container.reason == START_ERROR:
        return "could not be started"
    return exit_text(container.exit_code or 0)


def _last_words(container: Container) -> str:
    line = container.last_line
    return f": {line[:_LONGEST_LINE]}{'...' if len(line) > _LONGEST_LINE else ''}" if line else ""
