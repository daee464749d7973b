"""One host of a slice: `python -m pathways_runtime.emulator.worker`. Standard library only.

It computes nothing. It is connected to the resource manager for as long as it lives, and the end of that connection is
the loss of its slice. After the goodbye of a resource manager, as when its job is over, it waits for the next at the
same address, or to be told to end. The slice and the host are in MEGASCALE_SLICE_ID and JOB_COMPLETION_INDEX, as in a
worker's pod.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from pathways_runtime import _contract
from pathways_runtime.emulator import flags, link
from pathways_runtime.emulator.process import StopSignals, exit_code, report_ready, say

CONNECT_TIMEOUT_S: Final = 60.0
_PR_SET_PDEATHSIG: Final = 1  # linux/prctl.h


@dataclass(frozen=True)
class Settings:
    """What a worker is told. It ends with the process `parent_pid`, its parent, unless that is 0."""

    slice: int
    host: int
    server_port: int
    resource_manager: tuple[str, int]
    token: str
    parent_pid: int
    without_effect: tuple[str, ...]


def main(arguments: Sequence[str], environment: Mapping[str, str]) -> int:
    """Runs until a signal or the loss of the resource manager; returns the exit code (`_contract`)."""
    try:
        settings = parse(arguments, environment)
    except flags.FlagError as error:
        return flags.fail(error)
    return run(settings)


def run(settings: Settings) -> int:
    """Is the worker until a signal or the loss of the resource manager; returns the exit code."""
    if settings.parent_pid and not die_with_parent(settings.parent_pid):
        return _contract.EXIT_RESOURCE_MANAGER_LOST
    for flag in settings.without_effect:
        say(f"{flag} has no effect on CPU devices")
    with StopSignals() as stop:
        try:
            received = _serve(settings, stop)
        except link.LinkError as error:
            say(f"slice {settings.slice} host {settings.host} ends: resource manager: {error}")
            return _contract.EXIT_RESOURCE_MANAGER_LOST
    return exit_code(received)


def parse(arguments: Sequence[str], environment: Mapping[str, str]) -> Settings:
    """FlagError for what no worker can run with."""
    parser = flags.Parser("pathways_runtime.emulator.worker", "One host of an emulated slice.")
    flags.add_common(parser, str(_contract.WORKER_PORT))
    known, others = parser.split(arguments)
    for flag in others:
        if not flags.has_no_effect(flag):
            raise parser.refuse(flag)
    if not known.resource_manager_address:
        raise flags.FlagError("--resource_manager_address=HOST:PORT is missing")
    try:
        address = link.parse_address(known.resource_manager_address)
    except ValueError as error:
        raise flags.FlagError(f"--resource_manager_address: {error}") from error
    return Settings(
        slice=_index(environment, _contract.MEGASCALE_SLICE_ID),
        host=_index(environment, _contract.JOB_COMPLETION_INDEX),
        server_port=_contract.WORKER_PORT if known.server_port is None else known.server_port,
        resource_manager=address,
        token=flags.read_token(known.token_file),
        parent_pid=0,
        without_effect=tuple(others),
    )


def _index(environment: Mapping[str, str], name: str) -> int:
    text = environment.get(name, "")
    if not text.isascii() or not text.isdigit():
        raise flags.FlagError(f"environment variable {name}={text!r} is not a number from 0")
    return int(text)


def _serve(settings: Settings, stop: StopSignals) -> signal.Signals:
    """Stays connected until a signal comes, which is returned. LinkError when the resource manager is lost."""
    hello = link.Hello(link.VERSION, link.ROLE_WORKER, settings.slice, settings.host, settings.token)
    connection = link.connect(settings.resource_manager, hello, CONNECT_TIMEOUT_S, stop.fileno())
    while connection is not None:
        say(f"slice {settings.slice} host {settings.host} is process {os.getpid()}, and registered")
        say(_contract.LOG_SERVER_READY.format(port=settings.server_port))
        report_ready(settings.server_port)
        try:
            connection.follow(_ignore, stop.fileno())
            break
        except link.EndedError as error:
            connection.close()
            silence_s = connection.welcome.silence_s
            say(f"resource manager: {error}; waiting {silence_s:g} s for another")
            connection = link.connect(settings.resource_manager, hello, silence_s, stop.fileno())
    received = stop.wait()
    if connection is not None:
        connection.close(goodbye=received.name)
    return received


def _ignore(message: link.Message) -> None:
    """A resource manager has nothing to tell a worker but that it is there."""


def die_with_parent(parent_pid: int) -> bool:
    """Asks the kernel (Linux) to kill this process when its parent ends; False when that has happened already.

    Elsewhere the connection to the resource manager, which is in the parent, ends the worker.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    return os.getppid() == parent_pid


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], os.environ))
