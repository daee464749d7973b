"""A port of a pod on this machine's loopback."""

from __future__ import annotations

import select
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from typing import Any

from pw.errors import PwError
from pw.kube import Kube

_BLOCK_BYTES = 2**16


@contextmanager
def forwarded(kube: Kube, find_pod: Callable[[], str], port: int) -> Iterator[str]:
    """`127.0.0.1:PORT`, each connection to which reaches `port` of the pod that `find_pod` names then.

    The tunnel of a connection that breaks closes the connection; the next one gets a tunnel of its own, to the pod as
    it is then. Raises BackendUnavailableError when the port cannot be reached at the start.
    """

    def connect() -> Any:
        return kube.port_socket(find_pod(), port)

    connect().close()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=_serve, args=(listener, connect), daemon=True).start()
        try:
            yield f"127.0.0.1:{listener.getsockname()[1]}"
        finally:
            # Closing alone does not wake a thread that waits in accept.
            with suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)


def _serve(listener: socket.socket, connect: Callable[[], Any]) -> None:
    while True:
        try:
            connection, _ = listener.accept()
        except OSError:
            return
        threading.Thread(target=_tunnel, args=(connection, connect), daemon=True).start()


def _tunnel(connection: socket.socket, connect: Callable[[], Any]) -> None:
    with connection, suppress(OSError, PwError), closing(connect()) as remote:
        while True:
            readable, _, _ = select.select([connection, remote], [], [])
            for source, target in ((connection, remote), (remote, connection)):
                if source in readable:
                    data = source.recv(_BLOCK_BYTES)
                    if not data:
                        return
                    target.sendall(data)
