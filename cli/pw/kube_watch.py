"""Objects of a cluster as they change. A watch survives dropped streams and versions that the server forgot."""

from __future__ import annotations

import json
import math
import threading
import time
from collections.abc import Iterator

from pw.errors import BackendUnavailableError
from pw.kube import ApiError, Json, Kube, Stream

# The server ends a watch after this long; it goes on from where it was.
_SERVER_TIMEOUT_S = 300
_LONGEST_PAUSE_S = 5.0
# A stream that held this long was sound; what broke it starts the count of failures anew.
_LONG_ENOUGH_S = 30.0
_FAILURES = 6
_GONE = 410


class Watch:
    """The objects under a path, given anew at each change.

    Iterating gives the list of all that match, first as it is and then after each change; so what a gap hid (410 Gone,
    a dropped stream) is in the next list, and nothing is told twice as new. It ends when `deadline`, on the clock of
    time.monotonic, is over or `close` was called, and raises BackendUnavailableError when the cluster stays away.
    """

    def __init__(self, kube: Kube, path: str, *, deadline: float = math.inf, **selectors: str) -> None:
        self._kube = kube
        self._path = path
        self._deadline = deadline
        self._selectors = selectors
        self._closed = threading.Event()
        self._stream: Stream | None = None
        self._failures = 0
        self._opened = time.monotonic()

    def __iter__(self) -> Iterator[list[Json]]:
        try:
            while not self._over():
                try:
                    items, version = self._kube.list(self._path, **self._selectors)
                    known = {item["metadata"]["uid"]: item for item in items}
                    yield list(known.values())
                    yield from self._changes(known, version)
                except ApiError as exc:
                    if exc.code != _GONE and not (exc.transient and self._pause()):
                        raise
        finally:
            self.close()

    def close(self) -> None:
        """Ends the iteration, from any thread."""
        self._closed.set()
        if self._stream is not None:
            self._stream.close()

    def _over(self) -> bool:
        return self._closed.is_set() or time.monotonic() >= self._deadline

    def _changes(self, known: dict[str, Json], version: str) -> Iterator[list[Json]]:
        """Goes on until the server has forgotten `version`, so that everything has to be read again."""
        while not self._over():
            try:
                for event in self._events(version):
                    kind, item = event["type"], event["object"]
                    if kind == "ERROR":
                        raise ApiError(f"watch of {self._path} failed: {item.get('message')}", code=item["code"])
                    self._failures = 0
                    version = item["metadata"]["resourceVersion"]
                    if kind != "BOOKMARK":
                        _apply(known, kind, item)
                        yield list(known.values())
            except BackendUnavailableError:
                if not self._pause():
                    raise

    def _events(self, version: str) -> Iterator[Json]:
        left_s = max(0.01, self._deadline - time.monotonic())
        server_timeout_s = max(1, math.ceil(min(left_s, _SERVER_TIMEOUT_S)))
        self._stream = self._kube.stream(
            self._path,
            # Silence past the server's own limit is a dead connection.
            read_timeout_s=min(left_s, server_timeout_s + 10.0),
            watch="true",
            allowWatchBookmarks="true",
            resourceVersion=version,
            timeoutSeconds=str(server_timeout_s),
            **self._selectors,
        )
        self._opened = time.monotonic()
        if self._closed.is_set():
            self._stream.close()
        yield from (json.loads(line) for line in self._stream if line)

    def _pause(self) -> bool:
        """Waits a little longer after each failure in a row; False when there were too many."""
        lasted_s = time.monotonic() - self._opened
        self._failures = 1 if lasted_s > _LONG_ENOUGH_S else self._failures + 1
        left_s = max(0.0, self._deadline - time.monotonic())
        self._closed.wait(min(0.1 * 2**self._failures, _LONGEST_PAUSE_S, left_s))
        return self._failures < _FAILURES


def _apply(known: dict[str, Json], kind: str, item: Json) -> None:
    if kind == "DELETED":
        known.pop(item["metadata"]["uid"], None)
    else:
        known[item["metadata"]["uid"]] = item
