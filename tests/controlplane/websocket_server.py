"""The server's side of a port-forward: RFC 6455 frames, each with the number of its channel in front."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import socket
import struct
import threading
from http.server import BaseHTTPRequestHandler
from io import BufferedIOBase

_GUID = b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11"
_BINARY, _CLOSE = 2, 8


def forward(
    handler: BaseHTTPRequestHandler, targets: dict[tuple[str, int], tuple[str, int]], pod: str, port: int
) -> None:
    """Joins the request's connection to the address that stands for this port of the pod."""
    if (pod, port) not in targets:
        handler.send_error(500, "nothing listens there")
        return
    accept = base64.b64encode(hashlib.sha1(handler.headers["Sec-WebSocket-Key"].encode() + _GUID).digest()).decode()
    handler.send_response(101)
    handler.send_header("Upgrade", "websocket")
    handler.send_header("Connection", "Upgrade")
    handler.send_header("Sec-WebSocket-Accept", accept)
    handler.send_header("Sec-WebSocket-Protocol", "v4.channel.k8s.io")
    handler.end_headers()
    handler.close_connection = True
    with socket.create_connection(targets[pod, port]) as target:
        for channel in (0, 1):
            _send(handler.wfile, bytes((channel,)) + struct.pack("<H", port))
        back = threading.Thread(target=_back, args=(target, handler.wfile), daemon=True)
        back.start()
        with contextlib.suppress(OSError):
            while (frame := _receive(handler.rfile)) is not None:
                target.sendall(frame[1:])
        with contextlib.suppress(OSError):
            target.shutdown(socket.SHUT_RDWR)
        back.join()


def _back(target: socket.socket, stream: BufferedIOBase) -> None:
    try:
        while data := target.recv(2**14):
            _send(stream, b"\0" + data)
        stream.write(bytes((0x80 | _CLOSE, 0)))
        stream.flush()
    except (OSError, ValueError):
        return


def _send(stream: BufferedIOBase, data: bytes) -> None:
    size = bytes((len(data),)) if len(data) < 126 else bytes((126,)) + struct.pack(">H", len(data))
    stream.write(bytes((0x80 | _BINARY,)) + size + data)
    stream.flush()


def _receive(stream: BufferedIOBase) -> bytes | None:
    """The next binary frame of the client, which masks what it sends; None at the end."""
    head = stream.read(2)
    if len(head) < 2 or head[0] & 15 == _CLOSE:
        return None
    size = head[1] & 127
    if size >= 126:
        size = int.from_bytes(stream.read(2 if size == 126 else 8), "big")
    mask = stream.read(4)
    return bytes(byte ^ mask[index % 4] for index, byte in enumerate(stream.read(size)))
