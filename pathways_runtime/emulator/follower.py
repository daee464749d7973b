"""A proxy's side of the link: the topology from the resource manager, and slices that are as it says."""

from __future__ import annotations

from typing import Final

from pathways_runtime.emulator import link
from pathways_runtime.emulator.process import say
from pathways_runtime.emulator.slices import Slices, Topology

CONNECT_TIMEOUT_S: Final = 60.0


class Follower:
    """Keeps the slices of a proxy true over every loss of the resource manager.

    While the connection alone is broken nothing is lost: generations tell, on return, what was. A resource manager that
    does not answer for `silence_s` takes all slices with it, and so does a new one, whose workers are new.
    """

    def __init__(self, address: tuple[str, int], token: str) -> None:
        self._address = address
        self._hello = link.Hello(link.VERSION, link.ROLE_PROXY, 0, 0, token)
        self._generations: dict[int, int] = {}
        self._link: link.Link | None = None

    def connect(self, stop_fd: int, timeout_s: float = CONNECT_TIMEOUT_S) -> Topology | None:
        """What the resource manager emulates, or None when `stop_fd` became readable. LinkError where there is none."""
        self._link = link.connect(self._address, self._hello, timeout_s, stop_fd)
        return None if self._link is None else _topology(self._link.welcome)

    def follow(self, slices: Slices, stop_fd: int) -> None:
        """Marks slices up and down until `stop_fd` becomes readable. `connect` comes first.

        LinkError when the resource manager does not want this proxy any more, or has become one of another topology.
        """
        while self._link is not None:
            lost = self._link
            try:
                lost.follow(lambda message: self._hear(slices, message), stop_fd)
                lost.close(goodbye="the proxy server ends")
                return
            except link.LinkError as error:
                lost.close()
                say(f"resource manager: {error}; connecting again")
            self._link = self._connect_again(slices, lost.welcome, stop_fd)

    def _connect_again(self, slices: Slices, before: link.Welcome, stop_fd: int) -> link.Link | None:
        while True:
            try:
                found = link.connect(self._address, self._hello, before.silence_s, stop_fd)
                break
            except link.RefusedError:
                raise
            except link.LinkError as error:
                self._lose_all(slices, f"the resource manager is lost: {error}")
        if found is not None and found.welcome.epoch != before.epoch:
            self._lose_all(slices, "the resource manager was started anew")
            self._generations.clear()
            if _topology(found.welcome) != _topology(before):
                found.close()
                raise link.LinkError("the resource manager has come back with another topology")
        return found

    def _hear(self, slices: Slices, message: link.Message) -> None:
        if not isinstance(message, link.SliceState) or not 0 <= message.slice < slices.num_slices:
            return
        known = self._generations.get(message.slice, message.generation)
        self._generations[message.slice] = message.generation
        if not message.up or message.generation != known:
            slices.mark_down(message.slice, message.reason)
        if message.up:
            slices.mark_up(message.slice)

    def _lose_all(self, slices: Slices, reason: str) -> None:
        for index in range(slices.num_slices):
            slices.mark_down(index, reason)


def _topology(welcome: link.Welcome) -> Topology:
    return Topology(welcome.instance_type, welcome.num_slices, welcome.first_device_id)
