"""The processes that run clients' colocated Python: one for each group of hosts that a client's programs run on.

A real sidecar is a container beside each worker. Here one stands for all hosts of a program's devices, so its process
index is 0 and its devices are all local. It belongs to one client, and ends with it or with one of its slices.
"""

from __future__ import annotations

import itertools
import json
import logging
import os
import queue
import secrets
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from socket import socketpair
from typing import TYPE_CHECKING, Any, Final

from pathways_runtime import _contract
from pathways_runtime.emulator.status import StatusError

if TYPE_CHECKING:
    from pathways_runtime.emulator.engine import Engine
    from pathways_runtime.emulator.slices import Stamp

_log: Final = logging.getLogger(__name__)
# Called once with what the sidecar answered, or with the error that came instead.
Answer = Callable[[StatusError | None], None]


class Sidecars:
    """Those of one session, started when they are needed."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._lock = threading.Lock()
        self._by_hosts: dict[tuple[int, ...], Sidecar] = {}
        self._closed = False

    def of(self, devices: Sequence[int]) -> Sidecar:
        """The one for the hosts of these devices. StatusError where a slice of theirs is down, or the session over."""
        hosts = tuple(sorted({self._engine.host_of[device] for device in devices}))
        with self._lock:
            if self._closed:
                raise StatusError("CANCELLED", "the session ended")
            if not self._by_hosts:
                self._engine.health.watch(self)
            sidecar = self._by_hosts.get(hosts)
            if sidecar is None or sidecar.has_ended:
                sidecar = self._by_hosts[hosts] = Sidecar(self._engine, hosts)
            return sidecar

    def drop_lost(self) -> None:
        """Ends those with a host on a lost slice."""
        with self._lock:
            for sidecar in self._by_hosts.values():
                if self._engine.health.error(sidecar.stamp) is not None:
                    sidecar.kill()

    def close(self) -> None:
        """Ends them all, and with them every wait for them."""
        with self._lock:
            self._closed = True
            for sidecar in self._by_hosts.values():
                sidecar.kill()


class Sidecar:
    """One process. It is a client of this server, which knows it by `key`, and sees the CPU devices of its hosts."""

    def __init__(self, engine: Engine, hosts: tuple[int, ...]) -> None:
        self.key = secrets.token_hex(32).encode()
        self.devices = engine.cpu_devices_of(hosts)
        self.stamp: Stamp = engine.health.stamp(tuple(sorted({engine.slice_of[device] for device in self.devices})))
        # What is to change hands under each ticket (`colocated.py`).
        self.calls: dict[int, Any] = {}
        self.new_ticket = itertools.count().__next__
        self.has_ended = False
        self._name = f"colocated Python on host{'s' * (len(hosts) > 1)} {', '.join(map(str, hosts))}"
        self._engine = engine
        self._lock = threading.Lock()
        self._answers: dict[int, Answer] = {}
        self._requests: queue.SimpleQueue[tuple[dict[str, Any], bytes] | None] = queue.SimpleQueue()
        self._loaded: set[int] = set()
        engine.sidecars[self.key] = self
        self._connection, self._process = _start(self.key, engine.target)
        threading.Thread(target=self._read, name="sidecar-answers", daemon=True).start()
        threading.Thread(target=self._write, name="sidecar-requests", daemon=True).start()

    def load(self, program: int, payload: bytes) -> bool:
        """Gives it a program; False where it has it. StatusError where the payload makes no sense to it."""
        if program in self._loaded:
            return False
        done = threading.Event()
        errors: list[StatusError | None] = []

        def finish(error: StatusError | None) -> None:
            errors.append(error)
            done.set()

        self.ask({"verb": "load", "program": program}, finish, payload)
        done.wait()
        if errors[0] is not None:
            raise errors[0]
        self._loaded.add(program)
        return True

    def unload(self, program: int) -> None:
        """Has it forget a program, and what only that kept alive. From any thread, also one that collects garbage."""
        self._requests.put(({"verb": "unload", "program": program, "ticket": -1}, b""))

    def ask(self, request: dict[str, Any], answer: Answer, payload: bytes = b"", ticket: int | None = None) -> None:
        """Sends a request; `answer` is called from another thread, or from this one where the process has ended."""
        number = self.new_ticket() if ticket is None else ticket
        with self._lock:
            has_ended = self.has_ended
            if not has_ended:
                self._answers[number] = answer
        if has_ended:
            answer(self._end_error())
        else:
            self._requests.put((request | {"ticket": number}, payload))

    def kill(self) -> None:
        """Ends it. What it has not answered is then an error."""
        self._process.kill()

    def _write(self) -> None:
        try:
            while (item := self._requests.get()) is not None:
                request, payload = item
                self._connection.send_bytes(json.dumps(request).encode())
                self._connection.send_bytes(payload)
        except (OSError, ValueError):
            self._process.kill()  # whoever reads sees its end, and answers

    def _read(self) -> None:
        try:
            while True:
                answered = json.loads(self._connection.recv_bytes())
                with self._lock:
                    answer = self._answers.pop(int(answered["ticket"]), None)
                if answer is not None:
                    text = answered["error"]
                    answer(None if text is None else StatusError("UNKNOWN", str(text)))
        except (EOFError, OSError):
            pass
        except Exception:
            _log.exception("%s: its answer makes no sense", self._name)
        self._process.kill()
        self._process.wait()
        self._engine.sidecars.pop(self.key, None)
        with self._lock:
            self.has_ended = True
            answers, self._answers = self._answers, {}
        self._requests.put(None)
        _log.info("%s: process %d ended with %d", self._name, self._process.pid, self._process.returncode)
        for answer in answers.values():
            answer(self._end_error())
        for call in list(self.calls.values()):  # whose function has returned, but not what
            call.finish(self._end_error())

    def _end_error(self) -> StatusError:
        lost = self._engine.health.error(self.stamp)
        code = self._process.returncode
        how = signal.Signals(-code).name if code is not None and code < 0 else f"code {code}"
        return lost or StatusError("INTERNAL", f"{self._name}: its process ended with {how}")


def _start(key: bytes, target: str) -> tuple[Connection, subprocess.Popen[bytes]]:
    ours, theirs = socketpair()
    with theirs:
        environment = os.environ | {
            _contract.JAX_PLATFORMS: f"{_contract.PROXY_PLATFORM},cpu",
            _contract.JAX_BACKEND_TARGET: target,
            _contract.INSECURE_CREDENTIALS: "true",
            _contract.PROXY_TOKEN: key.decode(),
        }
        environment.pop(_contract.READY_FD, None)
        process = subprocess.Popen(
            [sys.executable, "-m", "pathways_runtime.emulator.sidecar", str(theirs.fileno())],
            env=environment,
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=sys.stderr,
        )
    return Connection(ours.detach()), process
