"""A port of the head on this machine."""

from __future__ import annotations

import socket
import socketserver
import threading
from collections.abc import Iterator

import pytest

from pw.backends.gke import GkeBackend
from pw.errors import BackendUnavailableError
from pw.status import JobRef
from tests.controlplane.cluster import Cluster
from tests.controlplane.conftest import MakeSpec

PORT = 29000
TIMEOUT_S = 20.0


class Echo(socketserver.BaseRequestHandler):
    """Sends back what comes; ends the connection after a message that ends in "bye"."""

    def handle(self) -> None:
        while data := self.request.recv(2**16):
            self.request.sendall(data)
            if data.endswith(b"bye"):
                return


@pytest.fixture
def echo() -> Iterator[tuple[str, int]]:
    """The address of a server that stands for the container's port."""
    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Echo) as server:
        server.daemon_threads = True
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        yield ("127.0.0.1", server.server_address[1])
        server.shutdown()
        thread.join()


@pytest.fixture
def job(backend: GkeBackend, make_spec: MakeSpec) -> JobRef:
    return backend.submit(backend.plan(make_spec()))


def ask(address: str, message: bytes) -> bytes:
    """What comes back on a connection of its own, until as much came as was sent."""
    host, _, port = address.partition(":")
    with socket.create_connection((host, int(port)), TIMEOUT_S) as connection:
        connection.sendall(message)
        answer = b""
        while len(answer) < len(message) and (data := connection.recv(2**16)):
            answer += data
        return answer


def test_data_goes_both_ways_on_connections_of_their_own(
    cluster: Cluster, backend: GkeBackend, job: JobRef, echo: tuple[str, int]
) -> None:
    cluster.server.port_targets[cluster.run(job.name)[0], PORT] = echo

    with backend.connect(job, PORT) as address:
        assert address.startswith("127.0.0.1:")
        assert ask(address, b"hello") == b"hello"
        assert ask(address, b"x" * 200_000) == b"x" * 200_000


def test_a_new_head_is_reached_after_the_old_one_went(
    cluster: Cluster, backend: GkeBackend, job: JobRef, echo: tuple[str, int]
) -> None:
    old = cluster.run(job.name)[0]
    cluster.server.port_targets[old, PORT] = echo

    with backend.connect(job, PORT) as address:
        assert ask(address, b"bye") == b"bye"
        cluster.remove_pod(old)
        cluster.server.port_targets[cluster.run(job.name, attempt=1)[0], PORT] = echo
        assert ask(address, b"again") == b"again"


def test_nothing_listens_after_the_context(
    cluster: Cluster, backend: GkeBackend, job: JobRef, echo: tuple[str, int]
) -> None:
    cluster.server.port_targets[cluster.run(job.name)[0], PORT] = echo
    with backend.connect(job, PORT) as address:
        pass

    with pytest.raises(ConnectionError):
        ask(address, b"hello")


def test_a_head_that_does_not_run_is_said(backend: GkeBackend, job: JobRef) -> None:
    with pytest.raises(BackendUnavailableError, match="does not run"), backend.connect(job, PORT):
        pass


def test_a_port_that_nothing_listens_on_is_said(cluster: Cluster, backend: GkeBackend, job: JobRef) -> None:
    cluster.run(job.name)

    with pytest.raises(BackendUnavailableError, match="port 29000 of pod"), backend.connect(job, PORT):
        pass
