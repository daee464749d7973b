"""The worker processes of an emulator that is all on one machine: one for each host, started again when it dies.

A process of their own starts them: it is small and has one thread, so it can fork workers in a millisecond each, which
a process with jaxlib and gRPC in it cannot do at all. `python -m pathways_runtime.emulator.workers`, by `Workers` only.
"""

from __future__ import annotations

import argparse
import heapq
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from typing import Final

from pathways_runtime import _contract
from pathways_runtime.emulator import flags, link, worker
from pathways_runtime.emulator.process import StopSignals, exit_code, say

_FIRST_PAUSE_S: Final = 0.1  # between the death of a worker and the start of the next in its place
_LONGEST_PAUSE_S: Final = 5.0  # where one after the other dies at once
_SETTLED_S: Final = 10.0  # a worker that lived so long is no such case
_GRACE_S: Final = 2.0

Place = tuple[int, int]  # slice, host


class Workers:
    """A worker for each host, from `start` to `stop`, or until this process ends in whatever way."""

    def __init__(self, num_slices: int, hosts_per_slice: int, resource_manager_port: int) -> None:
        self._command = (
            *(sys.executable, "-m", "pathways_runtime.emulator.workers", f"--parent_pid={os.getpid()}"),
            *(f"--num_slices={num_slices}", f"--hosts_per_slice={hosts_per_slice}"),
            f"--{_contract.FLAG_RESOURCE_MANAGER}=127.0.0.1:{resource_manager_port}",
        )
        self._stopping = threading.Event()
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        # Linux ends a child that asked for it with the thread that started it, so this one stays until `stop`.
        self._thread = threading.Thread(target=self._keep, name="workers", daemon=True)

    def start(self) -> None:
        """Starts them all; that they have registered is seen in the slices' health."""
        self._thread.start()

    def stop(self) -> None:
        """Ends them all."""
        self._stopping.set()
        with self._lock:
            if self._process is not None:
                self._process.terminate()
        self._thread.join()

    def _keep(self) -> None:
        environment = {name: value for name, value in os.environ.items() if name != _contract.READY_FD}
        while not self._stopping.is_set():
            with self._lock:  # so that `stop` sees a process that is there
                self._process = subprocess.Popen(
                    self._command,
                    env=environment,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    process_group=0,  # a Ctrl-C is for the parent alone, which then ends its workers
                )
            code = self._process.wait()
            if not self._stopping.wait(_FIRST_PAUSE_S):
                say(f"the process that starts the workers ended with {code}; starting it again")


class _Nursery:
    """Forks workers, and forks again in the place of those that die."""

    def __init__(self, places: Sequence[Place], resource_manager: tuple[str, int], stop: StopSignals) -> None:
        self._resource_manager = resource_manager
        self._stop = stop
        self._due: list[tuple[float, Place]] = [(0.0, place) for place in places]  # a heap: when to start which
        self._running: dict[int, tuple[Place, float]] = {}  # process id -> place and start
        self._pauses_s: dict[Place, float] = {}

    def run(self, parent_pid: int) -> signal.Signals:
        """Until a stop signal comes, which is returned, or the parent is gone."""
        poll = select.poll()
        poll.register(self._stop.fileno(), select.POLLIN)
        while os.getppid() == parent_pid:
            now = time.monotonic()
            while self._due and self._due[0][0] <= now:
                self._fork(heapq.heappop(self._due)[1])
            wait_ms = (self._due[0][0] - now) * 1000 if self._due else None
            if poll.poll(wait_ms) and (received := self._stop.read()):
                return received
            self._replace(self._reap())
        return signal.SIGTERM

    def end_all(self) -> None:
        """SIGTERM to all, SIGKILL to those that are still there two seconds later."""
        self._signal_all(signal.SIGTERM)
        deadline = time.monotonic() + _GRACE_S
        poll = select.poll()
        poll.register(self._stop.fileno(), select.POLLIN)
        while self._running and time.monotonic() < deadline:
            self._reap()
            if self._running and poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
                self._stop.read()
        self._signal_all(signal.SIGKILL)

    def _fork(self, place: Place) -> None:
        parent_pid = os.getpid()
        child = os.fork()
        if child:
            self._running[child] = (place, time.monotonic())
            return
        try:
            self._stop.close()
            os._exit(worker.run(self._settings(place, parent_pid)))
        except BaseException:
            sys.excepthook(*sys.exc_info())
        finally:  # whatever happens, the loop of the parent is not for the child
            os._exit(1)

    def _settings(self, place: Place, parent_pid: int) -> worker.Settings:
        return worker.Settings(
            slice=place[0],
            host=place[1],
            server_port=0,
            resource_manager=self._resource_manager,
            token="",
            parent_pid=parent_pid,
            without_effect=(),
        )

    def _reap(self) -> list[tuple[Place, float, int]]:
        """The place, the seconds it lived and the exit code of each that has ended."""
        ended: list[tuple[Place, float, int]] = []
        while self._running:
            child, status = os.waitpid(-1, os.WNOHANG)
            if not child:
                break
            place, began = self._running.pop(child)
            ended.append((place, time.monotonic() - began, os.waitstatus_to_exitcode(status)))
        return ended

    def _replace(self, ended: Sequence[tuple[Place, float, int]]) -> None:
        for place, lived_s, code in ended:
            pause_s = _FIRST_PAUSE_S if lived_s > _SETTLED_S else self._pauses_s.get(place, _FIRST_PAUSE_S)
            self._pauses_s[place] = min(2 * pause_s, _LONGEST_PAUSE_S)
            heapq.heappush(self._due, (time.monotonic() + pause_s, place))
            index, host = place
            say(f"slice {index} host {host} ended with {code}; starting it again in {pause_s:g} s")

    def _signal_all(self, number: signal.Signals) -> None:
        for child in self._running:
            os.kill(child, number)


def main(arguments: Sequence[str]) -> int:
    """Runs until a stop signal or the end of the parent; returns the exit code."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    for name in ("parent_pid", "num_slices", "hosts_per_slice"):
        parser.add_argument(f"--{name}", type=flags.at_least(1), required=True)
    parser.add_argument(f"--{_contract.FLAG_RESOURCE_MANAGER}", type=link.parse_address, required=True)
    known = parser.parse_args(arguments)
    if not worker.die_with_parent(known.parent_pid):
        return _contract.EXIT_RESOURCE_MANAGER_LOST
    places = [(index, host) for index in range(known.num_slices) for host in range(known.hosts_per_slice)]
    with StopSignals(and_children=True) as stop:
        nursery = _Nursery(places, known.resource_manager_address, stop)
        received = nursery.run(known.parent_pid)
        nursery.end_all()
    return exit_code(received)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
