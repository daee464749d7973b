"""The resource manager: counts the workers of each slice in and out, and tells the proxies. Standard library only.

A slice is up while every host of it is connected. A worker that closes its connection, says nothing for `silence_s` or
says nonsense takes its slice down at once; that its slice comes back takes a new connection.
"""

from __future__ import annotations

import asyncio
import threading
import uuid
from concurrent.futures import Future
from typing import Final

from pathways_runtime import _contract
from pathways_runtime.emulator import link
from pathways_runtime.emulator.link import LinkError
from pathways_runtime.emulator.process import say
from pathways_runtime.emulator.slices import Slices, Topology

DEFAULT_SILENCE_S: Final = 20.0
_MAX_STRANGERS: Final = 256  # connections beyond one for each host
_HELLO_S: Final = 5.0  # for a stranger to say hello, who keeps others out meanwhile
_MAX_UNSENT_BYTES: Final = 1 << 20


class ResourceManager:
    """Serves the link of `link.py` from a thread of its own, and keeps `slices` true.

    `token` is what every peer must say in its hello; "" asks for none.
    """

    def __init__(
        self, topology: Topology, slices: Slices, *, token: str = "", silence_s: float = DEFAULT_SILENCE_S
    ) -> None:
        self._topology = topology
        self._slices = slices
        self._token = token
        self._silence_s = silence_s
        self._epoch = uuid.uuid4().hex
        self._hosts: dict[tuple[int, int], _Peer] = {}
        self._proxies: set[_Peer] = set()
        self._peers: set[_Peer] = set()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop = asyncio.Event()
        self._thread: threading.Thread | None = None

    def start(self, host: str, port: int) -> int:
        """Listens on `host`; returns the port, which the system picks for `port` 0. OSError when it cannot be had."""
        bound: Future[int] = Future()
        self._thread = threading.Thread(
            target=self._run, args=(host, port, bound), name="resource-manager", daemon=True
        )
        self._thread.start()
        return bound.result()

    def stop(self) -> None:
        """Says goodbye on every connection, closes it and ends the thread; does nothing where none was started."""
        if self._loop is not None and self._thread is not None:
            self._loop.call_soon_threadsafe(self._stop.set)
            self._thread.join()

    def _run(self, host: str, port: int, bound: Future[int]) -> None:
        asyncio.run(self._serve(host, port, bound))

    async def _serve(self, host: str, port: int, bound: Future[int]) -> None:
        try:
            server = await asyncio.start_server(self._meet, host, port, limit=link.MAX_LINE_BYTES)
        except OSError as error:
            bound.set_exception(error)
            return
        self._loop = asyncio.get_running_loop()
        unsubscribe = self._slices.subscribe(self._tell_change)
        pinging = asyncio.create_task(self._ping())
        bound.set_result(server.sockets[0].getsockname()[1])
        await self._stop.wait()
        unsubscribe()
        pinging.cancel()
        server.close()  # first: who heard a goodbye looks for the next resource manager here
        for peer in tuple(self._peers):
            peer.send(link.Goodbye("the resource manager ends"))
            peer.drop()

    async def _meet(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        peer = _Peer(reader, writer)
        if len(self._peers) >= self._topology.num_hosts + _MAX_STRANGERS:
            peer.drop()
            return
        self._peers.add(peer)
        try:
            hello = await self._welcome(peer)
            try:
                self._join(peer, hello)
                await _listen(peer, self._silence_s)
            except Exception as error:
                self._leave(peer, hello, str(error))
                raise
        except LinkError as error:
            peer.send(link.Refusal(str(error)))
        except asyncio.CancelledError:
            pass  # the server ends; Python 3.11's streams would print that their task was cancelled
        finally:
            self._peers.discard(peer)
            peer.drop()

    async def _welcome(self, peer: _Peer) -> link.Hello:
        """The hello of a peer that may come in, which has been welcomed."""
        hello = await peer.receive(min(_HELLO_S, self._silence_s))
        if not isinstance(hello, link.Hello):
            raise LinkError("the first line must be a hello")
        self._check(hello)
        peer.send(
            link.Welcome(
                version=link.VERSION,
                epoch=self._epoch,
                instance_type=self._topology.instance_type,
                num_slices=self._topology.num_slices,
                first_device_id=self._topology.first_device_id,
                silence_s=self._silence_s,
            )
        )
        return hello

    def _check(self, hello: link.Hello) -> None:
        topology = self._topology
        if hello.version != link.VERSION:
            raise LinkError(f"this resource manager speaks version {link.VERSION} of the link, not {hello.version}")
        if self._token and not _same_token(hello.token, self._token):
            raise LinkError("the token is wrong; give the resource manager's with --token_file")
        if hello.role not in (link.ROLE_WORKER, link.ROLE_PROXY):
            raise LinkError(f"role {hello.role!r} is neither {link.ROLE_WORKER} nor {link.ROLE_PROXY}")
        if hello.role == link.ROLE_PROXY:
            return
        if not 0 <= hello.slice < topology.num_slices:
            raise LinkError(f"slice {hello.slice} is not one of the {topology.num_slices} slices, which count from 0")
        if not 0 <= hello.host < topology.hosts_per_slice:
            raise LinkError(
                f"host {hello.host} is not one of the {topology.hosts_per_slice} hosts"
                f" of a {topology.instance_type} slice, which count from 0"
            )

    def _join(self, peer: _Peer, hello: link.Hello) -> None:
        if hello.role == link.ROLE_PROXY:
            for index in range(self._topology.num_slices):
                peer.send(self._state(index))
            self._proxies.add(peer)
            return
        place = (hello.slice, hello.host)
        before = self._hosts.get(place)
        if before is not None:
            self._leave(before, hello, "another worker came in its place")
            before.drop()
        self._hosts[place] = peer
        if all((hello.slice, host) in self._hosts for host in range(self._topology.hosts_per_slice)):
            self._slices.mark_up(hello.slice)

    def _leave(self, peer: _Peer, hello: link.Hello, reason: str) -> None:
        self._proxies.discard(peer)
        place = (hello.slice, hello.host)
        if hello.role == link.ROLE_WORKER and self._hosts.get(place) is peer:
            del self._hosts[place]
            self._slices.mark_down(hello.slice, f"host {hello.host} is lost: {reason}")

    def _tell_change(self, index: int, up: bool, reason: str) -> None:
        if not up:
            say(f"slice {index} is down: {reason}")
        ready = sum(self._slices.is_up(each) for each in range(self._topology.num_slices))
        say(_contract.LOG_SLICES_READY.format(ready=ready, total=self._topology.num_slices))
        for proxy in self._proxies:
            proxy.send(self._state(index))

    def _state(self, index: int) -> link.SliceState:
        up, generation, reason = self._slices.state(index)
        return link.SliceState(slice=index, up=up, generation=generation, reason=reason)

    async def _ping(self) -> None:
        while True:
            await asyncio.sleep(self._silence_s / link.PINGS_PER_SILENCE)
            for peer in self._peers:
                peer.send(link.Ping())


class _Peer:
    """One connection, with a limit to what waits for a peer that does not read."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    async def receive(self, silence_s: float) -> link.Message:
        """The next message. LinkError when the peer is gone, silent for so long, or talks nonsense."""
        try:
            async with asyncio.timeout(silence_s):
                line = await self._reader.readuntil(b"\n")
        except TimeoutError as error:
            raise LinkError(f"no word for {silence_s:g} s") from error
        except asyncio.LimitOverrunError as error:
            raise LinkError(f"a line of more than {link.MAX_LINE_BYTES} bytes") from error
        except (asyncio.IncompleteReadError, OSError) as error:
            raise LinkError("its connection was closed") from error
        return link.decode(line)

    def send(self, message: link.Message) -> None:
        """Queues a message; drops a peer that lets too many of them lie."""
        if self._writer.transport.get_write_buffer_size() > _MAX_UNSENT_BYTES:
            self._writer.transport.abort()
        if not self._writer.is_closing():
            self._writer.write(link.encode(message))

    def drop(self) -> None:
        """Ends the connection once what is queued has gone out."""
        self._writer.close()


async def _listen(peer: _Peer, silence_s: float) -> None:
    """Hears a peer that was welcomed until its link ends, which is a LinkError with the reason."""
    while True:
        message = await peer.receive(silence_s)
        if isinstance(message, link.Goodbye):
            raise LinkError(f"it ended ({message.reason})")
        if not isinstance(message, link.Ping):
            raise LinkError(f"a {type(message).__name__.lower()} has no place here")


def _same_token(said: str, wanted: str) -> bool:
    from hmac import compare_digest

    return compare_digest(said.encode(), wanted.encode())
