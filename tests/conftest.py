"""The emulator as a process, for every suite that runs JAX against it."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import hypothesis
import pytest

from pathways_runtime import _contract

# How long an example takes says more about what else the machine does than about the code.
hypothesis.settings.register_profile("pw", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow])
hypothesis.settings.load_profile("pw")


# A shell that starts the tests in the background has them ignore Ctrl-C, and so would all that they start.
signal.signal(signal.SIGINT, signal.default_int_handler)


@dataclasses.dataclass(frozen=True)
class Emulator:
    """A running emulator."""

    target: str  # what goes into JAX_BACKEND_TARGET
    log: Path  # stdout and stderr
    process: subprocess.Popen[bytes]

    @property
    def client_environment(self) -> dict[str, str]:
        """The environment of a script that is to run on it, as the manifest gives it to the user's container."""
        return os.environ | {
            _contract.JAX_PLATFORMS: f"{_contract.PROXY_PLATFORM},cpu",
            _contract.JAX_BACKEND_TARGET: self.target,
            _contract.INSECURE_CREDENTIALS: "true",
            _contract.CONNECTION_TIMEOUT_S: "30",
        }


StartEmulator = Callable[..., Emulator]


@pytest.fixture(scope="session")
def start_emulator(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StartEmulator]:
    """Starts an emulator and returns once it listens: `start_emulator("--instance_count=2", ...)`."""
    started: list[subprocess.Popen[bytes]] = []

    def start(*flags: str, port: int = 0) -> Emulator:
        log = tmp_path_factory.mktemp("emulator") / "log"
        reader, writer = os.pipe()
        with log.open("wb") as output, open(reader, encoding="utf-8") as ready:
            process = subprocess.Popen(
                [sys.executable, "-m", "pathways_runtime.emulator", f"--server_port={port}", *flags],
                stdout=output,
                stderr=subprocess.STDOUT,
                env=os.environ | {_contract.READY_FD: str(writer)},
                pass_fds=[writer],
                start_new_session=True,
            )
            started.append(process)
            os.close(writer)
            line = ready.readline()
        if not line:
            pytest.fail(f"the emulator ended with {process.wait()} before it listened:\n{log.read_text()}")
        return Emulator(f"grpc://127.0.0.1:{json.loads(line)['port']}", log, process)

    yield start
    for process in started:
        _end(process)


def _end(process: subprocess.Popen[bytes]) -> None:
    """Asks, waits, and leaves nothing of the process's group behind."""
    process.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(timeout=10)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


@pytest.fixture(scope="session")
def emulator(start_emulator: StartEmulator) -> Emulator:
    """Two slices of four chips, shared by all tests that do not harm it."""
    return start_emulator("--instance_type=tpuv6e:2x2", "--instance_count=2")
