"""`python -m pathways_runtime.emulator`: a resource manager, a proxy server, or everything on this machine.

Which of them follows from the flags of the real binaries (`settings.py`). A resource manager
loads neither jax nor grpc.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, NoReturn

from pathways_runtime import _contract
from pathways_runtime.emulator import flags, link
from pathways_runtime.emulator.flags import FlagError
from pathways_runtime.emulator.process import LOG_FORMAT, LOG_TIME, StopSignals, exit_code, report_ready, say
from pathways_runtime.emulator.resource_manager import ResourceManager
from pathways_runtime.emulator.settings import LOOPBACK, Settings, parse
from pathways_runtime.emulator.slices import Slices, Topology

if TYPE_CHECKING:
    from pathways_runtime.emulator.server import Server


def main(arguments: Sequence[str]) -> int:
    """Runs until a signal comes; returns the exit code (`_contract`)."""
    try:
        settings = parse(arguments)
        for flag in settings.without_effect:
            say(f"{flag} has no effect on CPU devices")
        if settings.is_manager:
            return _run_resource_manager(settings)
        return _run_proxy(settings) if settings.resource_manager else _run_all(settings)
    except FlagError as error:
        return flags.fail(error)
    except OSError as error:
        say(str(error))
        _end(1)
    except link.LinkError as error:
        say(f"resource manager: {error}")
        _end(_contract.EXIT_RESOURCE_MANAGER_LOST)


def _run_resource_manager(settings: Settings) -> int:
    assert settings.topology is not None
    slices = Slices(settings.topology.num_slices)
    manager = ResourceManager(settings.topology, slices, token=settings.token, silence_s=settings.silence_s)
    with StopSignals() as stop:
        port = manager.start(settings.host, settings.port)
        say(_contract.LOG_SERVER_READY.format(port=port))
        say(_contract.LOG_SLICES_READY.format(ready=0, total=settings.topology.num_slices))
        report_ready(port)
        received = stop.wait()
        say(f"{received.name}: the resource manager ends")
        manager.stop()
    return exit_code(received)


def _run_proxy(settings: Settings) -> int:
    from pathways_runtime.emulator.follower import Follower

    assert settings.resource_manager is not None
    with StopSignals() as stop:
        follower = Follower(settings.resource_manager, settings.token)
        topology = follower.connect(stop.fileno())
        if topology is None:
            return exit_code(stop.wait())
        slices = Slices(topology.num_slices)
        server = _start_server(settings, _visible(settings, topology), slices)
        report_ready(server.port)
        try:
            follower.follow(slices, stop.fileno())
            received = stop.wait()
        finally:
            server.stop()
    _end(exit_code(received))


def _run_all(settings: Settings) -> int:
    from pathways_runtime.emulator.workers import Workers

    topology = settings.topology
    assert topology is not None
    visible = _visible(settings, topology)
    slices = Slices(topology.num_slices)
    manager = ResourceManager(topology, slices, silence_s=settings.silence_s)
    with StopSignals() as stop:
        workers = Workers(topology.num_slices, topology.hosts_per_slice, manager.start(LOOPBACK, 0))
        workers.start()
        try:
            server = _start_server(settings, visible, slices)
            sys.stdout.write(
                f"{_contract.JAX_PLATFORMS}={_contract.PROXY_PLATFORM}\n"
                f"{_contract.JAX_BACKEND_TARGET}=grpc://{LOOPBACK}:{server.port}\n"
            )
            sys.stdout.flush()
            say("a script with these variables calls pathways_runtime.initialize() before its first use of a device")
            report_ready(server.port)
            received = stop.wait()
            server.stop()
        finally:
            workers.stop()
            manager.stop()
    _end(exit_code(received))


def _start_server(settings: Settings, topology: Topology, slices: Slices) -> Server:
    """The IFRT proxy server, which is listening. XLA reads its flags once, when jaxlib is loaded."""
    if settings.xla_flags:
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flags.xla_flags_variable(settings.xla_flags)}"
    from pathways_runtime.emulator.server import start_server

    logging.basicConfig(level=logging.INFO, format=LOG_FORMAT, datefmt=LOG_TIME)
    server = start_server(
        topology=topology,
        slices=slices,
        host=settings.host,
        port=settings.port,
        platform=settings.platform,
        token=settings.token,
    )
    say(_contract.LOG_PROXY_READY)
    threading.Thread(target=_end_with, args=(server,), name="server", daemon=True).start()
    return server


def _end_with(server: Server) -> None:
    """Ends the process when the server cannot start."""
    try:
        server.wait()
    except Exception as error:
        say(f"the proxy server did not start: {error}")
        _end(1)


def _visible(settings: Settings, topology: Topology) -> Topology:
    """The slices that clients of this proxy see: all of them, or as many as `--virtual_slices` names."""
    if settings.elastic_slices > topology.num_slices:
        raise FlagError(f"--num_elastic_slices={settings.elastic_slices}: there are {topology.num_slices} slices")
    for wanted in settings.virtual_slices:
        if wanted != topology.instance_type:
            raise FlagError(f"--virtual_slices: {wanted!r} is not what the slices are, {topology.instance_type!r}")
    if len(settings.virtual_slices) > topology.num_slices:
        raise FlagError(f"--virtual_slices names {len(settings.virtual_slices)} slices of {topology.num_slices}")
    count = len(settings.virtual_slices) or topology.num_slices
    return Topology(topology.instance_type, count, topology.first_device_id)


def _end(code: int) -> NoReturn:
    """Ends a process that has loaded jaxlib: programs that still run in its threads would crash an orderly exit."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
