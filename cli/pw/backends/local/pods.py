"""One pod: init containers and sidecars in order, the main containers, restarts by its policy, its end."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping, Sequence
from typing import Any

from pathways_runtime import _contract
from pw.backends.local import images
from pw.backends.local.containers import STOPPED, Container, Host
from pw.backends.local.jobs import Exit
from pw.backends.local.jobset import PodKey
from pw.faults import CRASH, HANG, Fault

# Kubernetes' default.
DEFAULT_GRACE_S = 30
# The result of a container that was stopped before it ran.
NEVER_RAN_CODE = 143


class Pod:
    """A pod from its creation to its end. `run` once; `stop` makes it end early."""

    def __init__(self, spec: Mapping[str, Any], key: PodKey, meta: images.Meta, host: Host) -> None:
        self.key = key
        self.name: str = meta["name"]
        self.phase = "Pending"
        self.reason = ""
        self._host = host
        self._policy: str = spec["restartPolicy"]
        self._grace_s = float(spec.get("terminationGracePeriodSeconds", DEFAULT_GRACE_S))
        inits = [init for init in spec.get("initContainers", ()) if not images.is_played_by_proxy(init)]
        self._inits = [(Container(init, key, meta, host), init) for init in inits]
        self._mains = [Container(main, key, meta, host) for main in spec["containers"]]
        self._sidecars: list[tuple[Container, asyncio.Task[int]]] = []
        self._stopping = asyncio.Event()
        self._timer: asyncio.TimerHandle | None = None

    @property
    def containers(self) -> Sequence[Container]:
        """All, in the order in which they start."""
        return (*(container for container, _ in self._inits), *self._mains)

    @property
    def main(self) -> Container:
        """The first container that is neither init container nor sidecar."""
        return self._mains[0]

    @property
    def ready(self) -> bool:
        """Whether all that should run does and has said that it is ready."""
        lasting = [*self._mains, *(container for container, _ in self._sidecars)]
        return self.phase == "Running" and all(each.ready.is_set() and not each.fault for each in lasting)

    @property
    def hung(self) -> bool:
        """Whether a container was told to hang, and still does."""
        return any(container.fault == HANG for container in self.containers)

    @property
    def restarts(self) -> int:
        """Restarts of all containers."""
        return sum(container.restarts for container in self.containers)

    @property
    def exits(self) -> list[Exit]:
        """How the containers that have ended did, the main ones first."""
        containers = (*self._mains, *(container for container, _ in self._inits))
        return [Exit(c.name, c.exit_code) for c in containers if c.exit_code is not None]

    async def run(self, delay_s: float = 0.0) -> bool:
        """Whether every main container ended with 0; True or False comes when none of its processes is left."""
        try:
            await self._pause(delay_s)
            succeeded = await self._initialise() and await self._run_mains()
        finally:
            await self._stop_sidecars()
            if self._timer is not None:
                self._timer.cancel()
        self.phase = "Succeeded" if succeeded else STOPPED if self._stopping.is_set() else "Failed"
        self._host.changed(self.key)
        return succeeded

    def stop(self) -> None:
        """Begins its end: first of the main containers, then of the sidecars in reverse, in one grace period."""
        if self.phase in ("Pending", "Running") and not self._stopping.is_set():
            self.reason = self.reason or STOPPED
            self._stopping.set()
            self._limit_time()
            sidecars = [container for container, _ in self._sidecars]
            for container in self.containers:
                if container not in sidecars:
                    container.terminate()

    def suffer(self, fault: Fault) -> None:
        """Does to its containers what a fault does to a host."""
        for container in self.containers:
            if fault.kind == CRASH:
                container.crash()
            else:
                container.hang(fault.for_s)

    def _limit_time(self) -> None:
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(self._grace_s, self._kill)

    def _kill(self) -> None:
        for container in self.containers:
            container.kill()

    async def _initialise(self) -> bool:
        for container, spec in self._inits:
            if self._stopping.is_set():
                return False
            if spec.get("restartPolicy") == "Always":
                self._sidecars.append((container, asyncio.create_task(self._keep(container, "Always"))))
                await self._first_of(container.ready.wait())
            elif await self._keep(container, self._policy) != 0:
                self.reason = self.reason or f"init container {container.name} failed"
                return False
        return not self._stopping.is_set()

    async def _run_mains(self) -> bool:
        self.phase = "Running"
        codes = await asyncio.gather(*(self._keep(container, self._policy) for container in self._mains))
        return not any(codes)

    async def _keep(self, container: Container, policy: str) -> int:
        """Runs a container until its policy lets it rest or it is stopped; its last exit code."""
        code, in_a_row = NEVER_RAN_CODE, 0
        while await self._turn() and not container.stopping.is_set():
            began = self._now()
            code = await container.run()
            if code == _contract.EXIT_BAD_FLAGS and container.emulated and not container.stopping.is_set():
                # The kubelet would start it again for ever, though the flags that it refuses never change.
                self._host.refused(self.key, container)
            if container.stopping.is_set() or policy == "Never" or (policy == "OnFailure" and code == 0):
                return code
            # As the kubelet does: one that ran for long begins again with the shortest wait.
            in_a_row = 1 if self._now() - began > 2 * self._host.backoff.cap_s else in_a_row + 1
            await self._wait_to_restart(container, self._host.backoff.delay_s(in_a_row))
        if container.exit_code is not None:
            container.ended(container.exit_code)
        return code

    async def _turn(self) -> bool:
        # Hundreds of hosts start at once; between two of them the event loop sees to pipes and watchers.
        async with self._host.turn:
            return True

    async def _wait_to_restart(self, container: Container, delay_s: float) -> None:
        container.waits("CrashLoopBackOff")
        await _set_within(container.stopping, delay_s)
        if not container.stopping.is_set():
            container.restarts += 1
            # This may find a limit exceeded, and stop this pod.
            self._host.changed(self.key)

    async def _stop_sidecars(self) -> None:
        if self._sidecars:
            self._limit_time()
        for container, task in reversed(self._sidecars):
            container.terminate()
            await task

    def _now(self) -> float:
        return asyncio.get_running_loop().time()

    async def _pause(self, delay_s: float) -> None:
        if delay_s:
            await _set_within(self._stopping, delay_s)

    async def _first_of(self, awaited: Any) -> None:
        tasks = [asyncio.ensure_future(awaited), asyncio.ensure_future(self._stopping.wait())]
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in tasks:
            task.cancel()


async def _set_within(event: asyncio.Event, timeout_s: float) -> None:
    """Returns once `event` is set, or after `timeout_s`."""
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(event.wait(), timeout_s)
