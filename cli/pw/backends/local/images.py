"""What a container becomes on this machine: arguments, environment, folder.

Images are not pulled. The Pathways images are the emulator; any other container's command runs with the programs of
the shell that submitted the job. A container sees a small part of that shell's environment, and what the manifest
gives it.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pathways_runtime import _contract
from pw.expansion import expand

Meta = Mapping[str, Any]

# What a container takes over from the shell that submitted the job: where programs, their files and their caches are,
# who and in which language. Not secrets, and nothing that would reach a container on a cluster by accident.
INHERITED = (
    *("PATH", "HOME", "USER", "LOGNAME", "SHELL", "LANG", "LANGUAGE", "LC_ALL", "LC_CTYPE", "TZ", "TMPDIR"),
    *("VIRTUAL_ENV", "CONDA_PREFIX", "CONDA_DEFAULT_ENV", "PYENV_VERSION", "PYTHONPATH", "LD_LIBRARY_PATH"),
    *("XDG_CACHE_HOME", "XDG_CONFIG_HOME", "XDG_DATA_HOME", "SSL_CERT_FILE", "REQUESTS_CA_BUNDLE"),
    *("http_proxy", "https_proxy", "no_proxy", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY"),
)
# A pipe makes Python hold its output back; in a log every line should have its own time.
_ALWAYS = {"PYTHONUNBUFFERED": "1"}

_MODULES = {
    _contract.PROXY_CONTAINER: "pathways_runtime.emulator",
    _contract.RESOURCE_MANAGER_CONTAINER: "pathways_runtime.emulator",
    _contract.WORKER_CONTAINER: "pathways_runtime.emulator.worker",
}
_SERVER_PORT = re.compile(rf"--{_contract.FLAG_SERVER_PORT}=([0-9]+)")
_POD_FIELDS = ("metadata.name", "metadata.namespace", "metadata.uid", "spec.nodeName", "status.hostIP", "status.podIP")
_INDEXED = re.compile(r"metadata\.(labels|annotations)\['([^']+)'\]")


def inherited(environ: Mapping[str, str]) -> dict[str, str]:
    """The part of a shell's environment that its jobs' containers see."""
    return _ALWAYS | {name: environ[name] for name in INHERITED if name in environ}


def is_emulated(container: Mapping[str, Any]) -> bool:
    """Whether the emulator plays this container."""
    return container["name"] in _MODULES or is_played_by_proxy(container)


def is_played_by_proxy(container: Mapping[str, Any]) -> bool:
    """Whether the emulator's proxy starts itself, for each client, what this container would be: no process here."""
    return bool(container["name"] == _contract.SIDECAR_CONTAINER)


def server_port(container: Mapping[str, Any]) -> int | None:
    """The port that the manifest has an emulated container listen on."""
    for argument in container.get("args", ()):
        match = _SERVER_PORT.fullmatch(argument)
        if match:
            return int(match[1])
    return None


def field_problem(path: str) -> str | None:
    """Why a fieldRef cannot be resolved here, or None."""
    known = path in _POD_FIELDS or _INDEXED.fullmatch(path)
    return (
        None
        if known
        else f"fieldRef {path!r} is not known locally: want {', '.join(_POD_FIELDS)}, a label or annotation"
    )


@dataclass(frozen=True, slots=True)
class Machine:
    """What all containers of a job share: the emulator's Python, the submitting shell, the job's folder and id."""

    python: str
    cwd: Path
    env: Mapping[str, str]
    job_dir: Path
    uid: str


@dataclass(frozen=True, slots=True)
class Launch:
    """What to execute."""

    argv: Sequence[str]
    env: Mapping[str, str]
    cwd: Path


def launch(
    container: Mapping[str, Any], pod: Meta, machine: Machine, *, localise: Callable[[str], str], port: int
) -> Launch:
    """The process that plays `container` in the pod with metadata `pod`.

    `localise` replaces addresses of the job's own servers by those on this machine; an emulated container listens on
    `port`, 0 for one of its own choice.
    """
    declared = environment(container, pod)
    argv = [expand(word, declared) for word in (*container.get("command", ()), *container.get("args", ()))]
    env = {**machine.env, **{name: localise(value) for name, value in declared.items()}}
    if not is_emulated(container):
        return Launch(argv, env, machine.cwd)
    arguments = [_SERVER_PORT.sub(f"--{_contract.FLAG_SERVER_PORT}={port}", localise(word)) for word in argv]
    return Launch([machine.python, "-m", _MODULES[container["name"]], *arguments], env, machine.job_dir)


def environment(container: Mapping[str, Any], pod: Meta) -> dict[str, str]:
    """The variables that the manifest gives a container, in order, each expanded with those before it."""
    variables: dict[str, str] = {}
    for entry in container.get("env", ()):
        source = entry.get("valueFrom")
        if source:
            variables[entry["name"]] = _field(source["fieldRef"]["fieldPath"], pod)
        else:
            variables[entry["name"]] = expand(entry.get("value", ""), variables)
    if pod["completion_index"] is not None:
        variables.setdefault(_contract.JOB_COMPLETION_INDEX, str(pod["completion_index"]))
    return variables


def _field(path: str, pod: Meta) -> str:
    match = _INDEXED.fullmatch(path)
    if match:
        return str(pod[match[1]].get(match[2], ""))
    fields = {
        "metadata.name": pod["name"],
        "metadata.namespace": "default",
        "metadata.uid": pod["uid"],
        "spec.nodeName": os.uname().nodename,
        "status.hostIP": "127.0.0.1",
        "status.podIP": "127.0.0.1",
    }
    return str(fields[path])
