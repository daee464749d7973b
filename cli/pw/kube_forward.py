"""A port of a pod on this machine's loopback."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from pw.errors import PwError
from pw.kube import Kube

_BLOCK_BYTES = 2**16
# Frames carry the number of a channel first: data or errors of the one port that is forwarded.
_DATA, _ERRORS = 0, 1


@contextmanager
def forwarded(kube: Kube, find_pod: Callable[[], str], port: int) -> Iterator[str]:
    """`127.0.0.1:PORT`, each connection to which reaches `port` of the pod that `find_pod` names then.

    The tunnel of a connection that breaks closes the connection; the next one gets a tunnel of its own, to the pod as
    it is then. Raises BackendUnavailableError when the port cannot be reached at the start.
    """

    def connect() -> _Tunnel:
        return _Tunnel(kube.open_port(find_pod(), port))

    connect().close()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        server = threading.Thread(target=_serve, args=(listener, connect), name="pw-forward", daemon=True)
        server.start()
        try:
            yield f"127.0.0.1:{listener.getsockname()[1]}"
        finally:
            # Closing alone does not wake a thread that waits in accept.
            with suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)
            server.join()


class _Tunnel:
    """One connection to a port, over a WebSocket."""

    def __init__(self, websocket: Any) -> None:
        self._websocket = websocket

    def relay(self, connection: socket.socket) -> None:
        """Carries data both ways until either side ends."""
        up = threading.Thread(target=self._send_all, args=(connection,), name="pw-forward", daemon=True)
        up.start()
        with suppress(OSError, self._broken()):
            self._receive_all(connection)
        with suppress(OSError):
            connection.shutdown(socket.SHUT_RDWR)
        up.join()

    def close(self) -> None:
        self._wake()
        self._websocket.shutdown()

    def _receive_all(self, connection: socket.socket) -> None:
        opened: set[int] = set()
        while frame := self._websocket.recv():
            channel = frame[0]
            if channel not in opened:  # the first frame of a channel repeats the port's number
                opened.add(channel)
            elif channel == _ERRORS:
                return
            else:
                connection.sendall(frame[1:])

    def _send_all(self, connection: socket.socket) -> None:
        with suppress(OSError, self._broken()):
            while data := connection.recv(_BLOCK_BYTES):
                self._websocket.send_binary(bytes((_DATA,)) + data)
        self._wake()

    def _wake(self) -> None:
        """Ends the read of the WebSocket; its reader closes it."""
        with suppress(OSError, AttributeError):
            self._websocket.sock.shutdown(socket.SHUT_RDWR)

    @staticmethod
    def _broken() -> type[Exception]:
        from websocket import WebSocketException

        return WebSocketException


def _serve(listener: socket.socket, connect: Callable[[], _Tunnel]) -> None:
    while True:
        try:
            connection, _ = listener.accept()
        except OSError:
            return
        threading.Thread(target=_carry, args=(connection, connect), name="pw-forward", daemon=True).start()


def _carry(connection: socket.socket, connect: Callable[[], _Tunnel]) -> None:
    # A pod that is not there now ends the connection; the client tries again, and so do we.
    with connection, suppress(PwError):
        tunnel = connect()
        try:
            tunnel.relay(connection)
        finally:
            tunnel.close()
