"""Real ports of a job's servers. A manifest fixes them, and several jobs on one machine cannot share them."""

from __future__ import annotations

import re
import socket
from collections.abc import Mapping
from typing import Any

from pw.backends.local import images
from pw.backends.local.events import LOOPBACK
from pw.backends.local.jobset import PodKey


class Ports:
    """Where each emulated container listens, and the job's own addresses as this machine reaches them.

    `coordinator` is the key and the address of the pod whose servers the others use.
    """

    def __init__(self, key: PodKey, address: str, pod: Mapping[str, Any]) -> None:
        self._key = key
        self._containers = {
            port: container["name"]
            for container in (*pod.get("initContainers", ()), *pod["containers"])
            if images.is_emulated(container) and (port := images.server_port(container)) is not None
        }
        # These start side by side, and one may name another before that has said where it listens.
        self._side_by_side = {container["name"] for container in pod["containers"]} & set(self._containers.values())
        self._reference = re.compile(rf"(?<![\w.-]){re.escape(address)}:([0-9]+)(?![0-9])")
        self._real: dict[tuple[PodKey, str], int] = {}

    def to_listen_on(self, key: PodKey, container: str) -> int:
        """The port to start a container with: the one it had before or that others were told, or 0 for any."""
        if key == self._key and container in self._side_by_side:
            return self._promised(container)
        return self._real.get((key, container), 0)

    def listens(self, key: PodKey, container: str, port: int) -> None:
        """A container said which port it has."""
        self._real[key, container] = port

    def forget(self, key: PodKey, container: str) -> None:
        """A container could not use its port, or died before it said so."""
        self._real.pop((key, container), None)

    def localise(self, text: str) -> str:
        """`text` with each address of a server of the coordinator's pod replaced by that on this machine."""

        def replaced(match: re.Match[str]) -> str:
            container = self._containers.get(int(match[1]))
            return match[0] if container is None else f"{LOOPBACK}:{self._promised(container)}"

        return self._reference.sub(replaced, text)

    def published(self) -> dict[str, int]:
        """Real port by the manifest's, of the coordinator's pod."""
        return {
            str(port): self._real[self._key, container]
            for port, container in self._containers.items()
            if (self._key, container) in self._real
        }

    def _promised(self, container: str) -> int:
        """The port of a server of the coordinator's pod, chosen now if it has none yet."""
        if (self._key, container) not in self._real:
            with socket.socket() as probe:
                probe.bind((LOOPBACK, 0))
                self._real[self._key, container] = probe.getsockname()[1]
        return self._real[self._key, container]
