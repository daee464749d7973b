"""Logs of containers as a kubelet serves them: by run, with stamps, from a whole second on, followed to their end."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any


@dataclass
class Run:
    lines: list[tuple[datetime, str]] = field(default_factory=list)
    ended: bool = False


class PodLogs:
    """All logs, by pod, container and restart count."""

    def __init__(self) -> None:
        self._runs: dict[tuple[str, str, int], Run] = {}
        self._changed = threading.Condition()

    def write(self, pod: str, container: str, text: str, *, run: int = 0, time: datetime | None = None) -> None:
        with self._changed:
            lines = self._runs.setdefault((pod, container, run), Run()).lines
            lines.append((time or datetime.now(UTC), text))
            self._changed.notify_all()

    def end(self, pod: str, container: str, *, run: int = 0) -> None:
        """Ends a run: those who follow it reach its end."""
        with self._changed:
            self._runs.setdefault((pod, container, run), Run()).ended = True
            self._changed.notify_all()

    def resume(self, pod: str, container: str, *, run: int = 0) -> None:
        """Takes back `end`: only the streams had ended, as when a log is rotated."""
        with self._changed:
            self._runs[pod, container, run].ended = False

    def wake(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def read(self, pod: dict[str, Any], query: dict[str, str], stopped: threading.Event) -> Iterator[bytes] | None:
        """The lines that a request asks for, None where the node has no such run."""
        name, container = pod["metadata"]["name"], query["container"]
        statuses = [
            *pod["status"].get("initContainerStatuses", []),
            *pod["status"].get("containerStatuses", []),
        ]
        status = next(status for status in statuses if status["name"] == container)
        count = status["restartCount"] - (1 if query.get("previous") else 0)
        if count < 0 or ("waiting" in status["state"] and "lastState" not in status):
            return None
        run = self._runs.setdefault((name, container, count), Run())
        return self._lines(run, query, stopped)

    def _lines(self, run: Run, query: dict[str, str], stopped: threading.Event) -> Iterator[bytes]:
        since = datetime.fromisoformat(query["sinceTime"]) if "sinceTime" in query else None
        at = 0
        if "tailLines" in query:
            at = max(0, len(run.lines) - int(query["tailLines"]))
        while not stopped.is_set():
            with self._changed:
                new = run.lines[at:]
                at = len(run.lines)
                if not new:
                    if run.ended or query.get("follow") != "true":
                        return
                    self._changed.wait()
            for time, text in new:
                if since is None or time >= since:
                    # Nanoseconds, as containerd writes them.
                    stamp = time.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%S.%f000Z")
                    yield f"{stamp} {text}\n".encode()
