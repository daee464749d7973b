"""Every name that is derived from a job's name, and the limits they must keep.

Kubernetes refuses some of them when the JobSet is made and others only when its controller makes pods, where nobody
looks; so they are all checked here, before anything is sent.
"""

from __future__ import annotations

import re
import shlex
from pathlib import PurePosixPath
from typing import TYPE_CHECKING

from pathways_runtime import _contract
from pw.errors import SpecError

if TYPE_CHECKING:
    from random import Random

# RFC 1035 labels: services and the names of Jobs' pods must be one (Kubernetes, "Object Names and IDs").
MAX_LABEL = 63
_LABEL = re.compile(r"[a-z](?:[-a-z0-9]*[a-z0-9])?")
# What a Job puts behind the name of each pod that it makes: a dash and five characters.
GENERATED_SUFFIX = "-xxxxx"
# The letters that Kubernetes uses for such: no vowels and nothing that looks like another.
_ALPHABET = "bcdfghjklmnpqrstvwxz2456789"
_RANDOM_CHARACTERS = 4
# Characters of a subdomain that is suggested.
_SHORT = 8


def job_name(name: str, replicated_job: str, index: int) -> str:
    """The Job that JobSet makes for replica `index` of a replicated job."""
    return f"{name}-{replicated_job}-{index}"


def pod_name(name: str, replicated_job: str, index: int, completion: int) -> str:
    """The host name of a pod; its object's name has `GENERATED_SUFFIX` behind it."""
    return f"{job_name(name, replicated_job, index)}-{completion}"


def head_pod(name: str) -> str:
    """The host name of the head pod."""
    return pod_name(name, _contract.HEAD_JOB, 0, 0)


def worker_pod(name: str, slice: int, host: int) -> str:
    """The host name of the pod of host `host` of slice `slice`."""
    return pod_name(name, _contract.WORKER_JOB, slice, host)


def coordinator(name: str, subdomain: str = "") -> str:
    """The head's address in the cluster, which JobSet also puts into a label. `subdomain` defaults to `name`."""
    return f"{head_pod(name)}.{subdomain or name}"


def max_length(subdomain: str = "") -> int:
    """Characters that a job's name may have with this subdomain: 22 without one."""
    pod_limit = MAX_LABEL - len(head_pod("") + GENERATED_SUFFIX)
    rest = MAX_LABEL - len(head_pod("") + ".")
    return min(pod_limit, rest - len(subdomain) if subdomain else rest // 2)


def check(name: str, *, subdomain: str = "") -> None:
    """Raises SpecError with the derived name that breaks, and a name that would do."""
    _check_label("job name", name)
    if subdomain:
        _check_label("subdomain", subdomain)
    if len(name) <= max_length(subdomain):
        return
    derived = coordinator(name, subdomain)
    what = "the label of its coordinator"
    if len(derived) <= MAX_LABEL:
        derived, what = head_pod(name) + GENERATED_SUFFIX, "the name of its head pod"
    raise SpecError(
        f"job name {name!r} is too long: {what} {derived!r} has {len(derived)} characters and may have {MAX_LABEL}; "
        f"{_advice(name, subdomain)}"
    )


def _advice(name: str, subdomain: str) -> str:
    ways: list[str] = []
    room = max_length(subdomain)
    if room > 0:
        ways.append(f"a name of at most {room} characters, such as {_fixed(name, room)!r}")
    if len(name) <= max_length("p"):
        spare = MAX_LABEL - len(head_pod(name) + ".")
        shorter = _fixed(subdomain or name, min(_SHORT, spare))
        ways.append(f"a --subdomain of at most {spare}, such as {shorter!r}")
    if not ways:
        ways.append(f"no --subdomain and a name such as {_fixed(name, max_length())!r}")
    return f"want {', or '.join(ways)}"


def _check_label(what: str, text: str) -> None:
    if not text:
        raise SpecError(f"{what} is empty: want lower-case letters, digits and dashes")
    if _LABEL.fullmatch(text):
        if len(text) > MAX_LABEL:
            raise SpecError(f"{what} {text!r} has {len(text)} characters and may have {MAX_LABEL}")
        return
    raise SpecError(
        f"{what} {text!r} is not valid: want lower-case letters, digits and dashes, beginning with a letter and not "
        f"ending with a dash, such as {_fixed(text, max_length())!r}"
    )


def _fixed(text: str, length: int) -> str:
    label = re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")
    if not label[:1].isalpha():
        label = f"job-{label}"
    return label[:length].strip("-")


def generate(command: str, random: Random | None = None) -> str:
    """A valid name for a job that was given none: the stem of the script in `command` and four random characters."""
    if random is None:
        from random import SystemRandom

        random = SystemRandom()
    suffix = "".join(random.choice(_ALPHABET) for _ in range(_RANDOM_CHARACTERS))
    stem = _fixed(_script(command), max_length() - len(suffix) - 1)
    return f"{stem}-{suffix}"


def _script(command: str) -> str:
    """The word of `command` that says best what it runs."""
    try:
        words = shlex.split(command)
    except ValueError:
        words = command.split()
    for word in words:
        if word.endswith((".py", ".sh")):
            return PurePosixPath(word).stem
    if "-m" in words[:-1]:
        return words[words.index("-m") + 1].rpartition(".")[2]
    programs = [word for word in words if "=" not in word and not word.startswith("-")]
    return PurePosixPath(programs[0]).stem if programs else "job"
