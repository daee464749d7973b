"""The line between the resource manager and its workers and proxies. Standard library only.

Newline-delimited JSON over TCP. A peer says `Hello` first and hears `Welcome` or `Refusal`; then the resource manager
sends every change of a slice to proxies. Both sides send `Ping` when they have nothing to say, and take a peer that
was silent for `silence_s` for lost: a process that is stopped or hung keeps its connection open for ever.
"""

from __future__ import annotations

import json
import select
import socket
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, fields
from typing import Final

VERSION: Final = 1
MAX_LINE_BYTES: Final = 16 * 1024
ROLE_WORKER: Final = "worker"
ROLE_PROXY: Final = "proxy"
PINGS_PER_SILENCE: Final = 4
_READ_BYTES: Final = 64 * 1024
_CONNECT_PAUSES_S: Final = (0.02, 0.5)  # the first and the longest between two tries to connect


class LinkError(Exception):
    """The peer is gone, silent, or said what this protocol does not know."""


class EndedError(LinkError):
    """The peer said goodbye: it ended because it was told to."""


class RefusedError(LinkError):
    """The resource manager does not want this peer; to try again would not help."""


@dataclass(frozen=True)
class Hello:
    """The first line of a worker (with its place) or a proxy (slice and host are 0)."""

    version: int
    role: str
    slice: int
    host: int
    token: str


@dataclass(frozen=True)
class Welcome:
    """The answer to `Hello`. `epoch` differs in each life of the resource manager."""

    version: int
    epoch: str
    instance_type: str
    num_slices: int
    first_device_id: int
    silence_s: float


@dataclass(frozen=True)
class SliceState:
    """Sent to proxies: for each slice after the welcome, then with every change."""

    slice: int
    up: bool
    generation: int
    reason: str


@dataclass(frozen=True)
class Ping:
    """Nothing new, still alive."""


@dataclass(frozen=True)
class Goodbye:
    """The last line of a peer that ends on purpose."""

    reason: str


@dataclass(frozen=True)
class Refusal:
    """The last line of the resource manager to a peer that it does not want."""

    message: str


Message = Hello | Welcome | SliceState | Ping | Goodbye | Refusal

_KINDS: Final = {
    "hello": Hello,
    "welcome": Welcome,
    "slice": SliceState,
    "ping": Ping,
    "goodbye": Goodbye,
    "refusal": Refusal,
}
_NAMES: Final = {kind: name for name, kind in _KINDS.items()}
_TYPES: Final = {"int": int, "str": str, "bool": bool, "float": float}


def encode(message: Message) -> bytes:
    """One line, newline included."""
    return json.dumps({"kind": _NAMES[type(message)], **vars(message)}).encode() + b"\n"


def decode(line: bytes) -> Message:
    """What `encode` made. LinkError for anything else: not JSON, an unknown kind, missing, extra or mistyped fields."""
    if len(line) > MAX_LINE_BYTES:
        raise LinkError(f"a line of {len(line)} bytes; {MAX_LINE_BYTES} are allowed")
    try:
        values = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise LinkError(f"a line that is not JSON: {line[:60]!r}") from error
    kind = values.pop("kind", None) if isinstance(values, dict) else None
    message_type = _KINDS.get(kind) if isinstance(kind, str) else None
    if message_type is None:
        raise LinkError(f"a line of no known kind: {line[:60]!r}")
    wanted = {field.name: _TYPES[str(field.type)] for field in fields(message_type)}
    if {name: type(value) for name, value in values.items()} != wanted:
        raise LinkError(f"a {kind!r} whose fields are not {', '.join(wanted) or 'none'}: {line[:60]!r}")
    message: Message = message_type(**values)
    return message


def parse_address(text: str) -> tuple[str, int]:
    """(host, port) of `HOST:PORT` or `[HOST]:PORT`. ValueError for anything else."""
    host, separator, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not separator or not host or not port.isascii() or not port.isdigit() or not 0 < int(port) < 65536:
        raise ValueError(f"address {text!r} is not HOST:PORT")
    return host, int(port)


class Link:
    """A worker's or proxy's side of the line: `connect`, then `follow`. One thread at a time."""

    def __init__(self, connection: socket.socket, hello: Hello, timeout_s: float) -> None:
        self._connection = connection
        self._tail = b""  # the beginning of a line that has not come whole
        self._messages: deque[Message] = deque()
        self._strange = True
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.settimeout(timeout_s)
        self._send(hello)
        self.welcome = self._expect_welcome()
        connection.settimeout(self.welcome.silence_s)

    def follow(self, on_message: Callable[[Message], None], stop_fd: int) -> None:
        """Calls `on_message` with what the peer says, and shows that this side lives, until `stop_fd` is readable.

        LinkError when the peer is gone, silent for its `silence_s`, or talks nonsense; EndedError after its goodbye.
        """
        ping_s = self.welcome.silence_s / PINGS_PER_SILENCE
        heard = pinged = time.monotonic()
        while True:
            while self._messages:
                on_message(self._messages.popleft())
            wait_s = max(0.0, pinged + ping_s - time.monotonic())
            readable = _readable((self._connection.fileno(), stop_fd), wait_s)
            now = time.monotonic()
            if stop_fd in readable:
                return
            if readable:
                heard = now
                self._receive()
            elif now - heard > self.welcome.silence_s:
                raise LinkError(f"no word for {now - heard:.1f} s")
            if now - pinged >= ping_s:
                pinged = now
                self._send(Ping())

    def close(self, goodbye: str = "") -> None:
        """Ends the connection; with `goodbye`, tells the peer why, if it still listens."""
        if goodbye:
            with suppress(LinkError):
                self._send(Goodbye(goodbye))
        self._connection.close()

    def _expect_welcome(self) -> Welcome:
        while not self._messages:
            self._receive()
        first = self._messages.popleft()
        if not isinstance(first, Welcome):
            raise LinkError(f"a {_NAMES[type(first)]!r} instead of a welcome")
        self._strange = False
        return first

    def _receive(self) -> None:
        """Reads what has come, at least one byte, into whole messages."""
        try:
            data = self._connection.recv(_READ_BYTES)
        except OSError as error:
            raise LinkError(f"the connection broke: {error}") from error
        if not data:
            raise LinkError("the connection was closed")
        *lines, self._tail = (self._tail + data).split(b"\n")
        if len(self._tail) > MAX_LINE_BYTES:
            raise LinkError(f"a line of more than {MAX_LINE_BYTES} bytes")
        for line in lines:
            message = decode(line)
            if isinstance(message, Refusal):
                raise RefusedError(message.message) if self._strange else LinkError(message.message)
            if isinstance(message, Goodbye):
                raise EndedError(f"it ended ({message.reason})")
            self._messages.append(message)

    def _send(self, message: Message) -> None:
        try:
            self._connection.sendall(encode(message))
        except OSError as error:
            raise LinkError(f"the connection broke: {error}") from error


def connect(address: tuple[str, int], hello: Hello, timeout_s: float, stop_fd: int) -> Link | None:
    """A link whose peer has said welcome, or None when `stop_fd` became readable first.

    While nobody listens it tries again, until `timeout_s` is over. RefusedError when the resource manager does not want
    this peer, LinkError when there is none in time.
    """
    deadline = time.monotonic() + timeout_s
    pause_s, longest_s = _CONNECT_PAUSES_S
    while True:
        left_s = max(0.1, deadline - time.monotonic())
        try:
            connection = socket.create_connection(address, timeout=left_s)
        except OSError as error:
            if time.monotonic() + pause_s > deadline:
                where = f"{address[0]}:{address[1]}"
                raise LinkError(f"nobody answers at {where} after {timeout_s:g} s: {error}") from error
        else:
            return _introduce(connection, hello, left_s)
        if _readable((stop_fd,), pause_s):
            return None
        pause_s = min(2 * pause_s, longest_s)


def _introduce(connection: socket.socket, hello: Hello, timeout_s: float) -> Link:
    try:
        return Link(connection, hello, timeout_s)
    except BaseException:
        connection.close()
        raise


def _readable(descriptors: tuple[int, ...], timeout_s: float) -> list[int]:
    """Those of the descriptors that can be read from, or have ended. `poll`, as `select` knows no number above 1023."""
    poll = select.poll()
    for descriptor in descriptors:
        poll.register(descriptor, select.POLLIN)
    return [descriptor for descriptor, _ in poll.poll(timeout_s * 1000)]
