"""The worker processes of an emulator that is all on one machine: one for each host, started again when it dies."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from typing import Final

from pathways_runtime import _contract
from pathways_runtime.emulator.process import say
from pathways_runtime.emulator.slices import Topology

_PAUSES_S: Final = (0.1, 5.0)  # the first and the longest between two starts of a worker that dies at once
_SETTLED_S: Final = 10.0
_GRACE_S: Final = 2.0


class Workers:
    """One process for each host of `topology`, each in its own process group, until `stop`.

    Each has a thread that starts it and waits for it: Linux ends a child that asked for it (`worker.py`) together with
    the thread that started it, so even a parent that is killed leaves none behind.
    """

    def __init__(self, topology: Topology, resource_manager_port: int) -> None:
        self._address = f"127.0.0.1:{resource_manager_port}"
        self._stopping = threading.Event()
        self._lock = threading.Lock()
        self._running: set[subprocess.Popen[bytes]] = set()
        self._threads = [
            threading.Thread(target=self._keep, args=(index, host), name=f"slice-{index}-host-{host}", daemon=True)
            for index in range(topology.num_slices)
            for host in range(topology.hosts_per_slice)
        ]

    def start(self) -> None:
        """Starts them all; that they have registered is seen in the slices' health."""
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """Ends them all, by SIGKILL those that take longer than two seconds."""
        self._stopping.set()
        with self._lock:
            for process in self._running:
                process.terminate()
        deadline = time.monotonic() + _GRACE_S
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        with self._lock:
            for process in self._running:
                process.kill()
        for thread in self._threads:
            thread.join()

    def _keep(self, index: int, host: int) -> None:
        first_s, longest_s = _PAUSES_S
        pause_s = first_s
        while True:
            process = self._spawn(index, host)
            if process is None:
                return
            began = time.monotonic()
            code = process.wait()
            with self._lock:
                self._running.discard(process)
            pause_s = first_s if time.monotonic() - began > _SETTLED_S else min(2 * pause_s, longest_s)
            if self._stopping.wait(pause_s):
                return
            say(f"worker of slice {index} host {host} ended with {code}; starting it again")

    def _spawn(self, index: int, host: int) -> subprocess.Popen[bytes] | None:
        environment = {key: value for key, value in os.environ.items() if key != _contract.READY_FD}
        environment |= {_contract.MEGASCALE_SLICE_ID: str(index), _contract.JOB_COMPLETION_INDEX: str(host)}
        with self._lock:  # so that `stop` sees every process there is
            if self._stopping.is_set():
                return None
            process = subprocess.Popen(
                self._command(), env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, process_group=0
            )
            self._running.add(process)
        return process

    def _command(self) -> Sequence[str]:
        return (
            sys.executable,
            "-m",
            "pathways_runtime.emulator.worker",
            f"--{_contract.FLAG_SERVER_PORT}=0",
            f"--{_contract.FLAG_RESOURCE_MANAGER}={self._address}",
            f"--parent_pid={os.getpid()}",
        )
