"""How a controller wakes those who watch its job: a byte on a loopback connection for each change.

A watcher wakes the controller in the same way, to have it look for requests. Nothing else crosses it. The end of the
connection is the end of the controller, however it came about, since the kernel closes what a killed process held.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections.abc import Callable, Iterator

LOOPBACK = "127.0.0.1"
# A controller answers within milliseconds; a machine that is short of memory or processors may need longer.
ANSWER_TIMEOUT_S = 60.0


class Bell:
    """The controller's side. `ring` may be called often: a client that lags gets one byte for many changes.

    `rung` is called when a client has rung.
    """

    def __init__(self, uid: str, rung: Callable[[], None]) -> None:
        self._greeting = uid.encode()
        self._rung = rung
        self._clients: set[asyncio.WriteTransport] = set()

    async def open(self) -> int:
        """Listens on a free loopback port for as long as the event loop runs, and returns it."""
        loop = asyncio.get_running_loop()
        server = await loop.create_server(lambda: _Client(self._greeting, self._clients, self._rung), LOOPBACK, 0)
        return int(server.sockets[0].getsockname()[1])

    def ring(self) -> None:
        for client in self._clients:
            if client.get_write_buffer_size() == 0:
                client.write(b".")


class _Client(asyncio.Protocol):
    """One watcher, as long as it is connected."""

    def __init__(self, greeting: bytes, clients: set[asyncio.WriteTransport], rung: Callable[[], None]) -> None:
        self._greeting = greeting
        self._clients = clients
        self._rung = rung

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.WriteTransport)
        self._transport = transport
        transport.write(self._greeting)
        self._clients.add(transport)

    def data_received(self, data: bytes) -> None:
        self._rung()

    def connection_lost(self, exc: Exception | None) -> None:
        self._clients.discard(self._transport)


class Watch:
    """A watcher's side, of the controller that greets with `uid` on `port`."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection

    def ring(self) -> None:
        """Has the controller look for requests, if it is still there."""
        with contextlib.suppress(ConnectionError):
            self._connection.sendall(b".")

    def wait(self, deadline: float | None = None) -> bool:
        """Returns at the next change: False when the controller has ended. Raises TimeoutError once the monotonic
        clock passes `deadline`."""
        timeout_s = None if deadline is None else max(deadline - time.monotonic(), 0.001)
        self._connection.settimeout(timeout_s)
        try:
            return bool(self._connection.recv(65536))
        except ConnectionError:
            return False


@contextlib.contextmanager
def watch(port: int, uid: str) -> Iterator[Watch | None]:
    """A connection to the controller, or None when it is no longer there. Raises TimeoutError when it is there and does
    not answer."""
    try:
        connection = socket.create_connection((LOOPBACK, port), timeout=ANSWER_TIMEOUT_S)
    except ConnectionError:
        yield None
        return
    with connection:
        yield Watch(connection) if _greeting(connection, len(uid)) == uid.encode() else None


def _greeting(connection: socket.socket, size_bytes: int) -> bytes:
    greeting = b""
    with contextlib.suppress(ConnectionError):
        while len(greeting) < size_bytes and (more := connection.recv(size_bytes - len(greeting))):
            greeting += more
    return greeting
