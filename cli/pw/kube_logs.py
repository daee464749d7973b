"""The log of one container, read on over dropped streams, rotations and restarts: no line lost, none given twice."""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Iterator
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from typing import Any

from pw.errors import BackendUnavailableError
from pw.kube import READ_TIMEOUT_S, ApiError, Json, Kube, Stream, path_segment
from pw.status import LogLine

# A silent follower asks anew after this long: the connection may be dead without a word.
FOLLOW_TIMEOUT_S = 300.0
_LONGEST_PAUSE_S = 5.0
_FAILURES = 3
# stdout and stderr are stamped by two writers, so neighbours may stand in the wrong order by a little.
_OVERLAP = timedelta(seconds=1)
_NOT_FOUND, _BAD_REQUEST = 404, 400


class Cursor:
    """How far a log was read. A stream resumes at a whole second, so it repeats lines; `admit` knows them again."""

    def __init__(self, since: datetime | None) -> None:
        self._since = since
        self._newest: datetime | None = None
        self._recent: deque[tuple[datetime, int]] = deque()
        self._repeated: Counter[int] = Counter()

    def resume_at(self) -> datetime | None:
        """Where the next stream has to start, None for the log's begin. What was admitted from there on is expected
        once more."""
        if self._newest is None:
            return self._since
        start = self._newest.replace(microsecond=0) - _OVERLAP
        self._repeated = Counter(line for time, line in self._recent if time >= start)
        return start

    def admit(self, time: datetime, line: bytes) -> bool:
        """Whether `line`, its stamp included, is new."""
        if self._since is not None and time < self._since:
            return False
        key = hash(line)
        if self._repeated[key] > 0:
            self._repeated[key] -= 1
            return False
        self._newest = max(time, self._newest or time)
        self._recent.append((time, key))
        oldest = self._newest.replace(microsecond=0) - _OVERLAP
        while self._recent[0][0] < oldest:
            self._recent.popleft()
        return True


class ContainerLog:
    """The log of one container of one pod, over all its restarts that the node still keeps.

    `read` may be called again and goes on after the last line that it gave. One thread at a time reads; `close` may
    come from any other.
    """

    def __init__(self, kube: Kube, pod: Json, container: str, *, since: datetime | None) -> None:
        metadata = pod["metadata"]
        self.pod: str = metadata["name"]
        self.container = container
        self.done = False
        self._kube = kube
        self._path = f"/api/v1/namespaces/{path_segment(metadata['namespace'])}/pods/{path_segment(self.pod)}"
        self._uid = metadata["uid"]
        self._cursor = Cursor(since)
        self._read_run = -1  # the restart count of the last run that was read to its end
        self._run = 0  # that of the run that is read
        self._begun = False  # whether a line of it was given
        self._stream: Stream | None = None
        self._closed = threading.Event()

    def behind(self, pod: Json) -> bool:
        """Whether `pod` has something that `read` has not seen: another run, or its end."""
        status = status_of(pod, self.container)
        return pod_ended(pod) or ("running" in status.get("state", {}) and status["restartCount"] > self._read_run)

    def read(self, *, follow: bool, tail: int | None = None) -> Iterator[LogLine]:
        """The lines after those that were given. With `follow` until the run of the container has ended or `close`;
        without, until the present end, at most `tail` of each run. `done` is set when no line can come any more."""
        failures = 0
        while not self._closed.is_set():
            failures += 1
            try:
                for line in self._rest(follow=follow, tail=tail):
                    failures = 0
                    yield line
                if self.done or not follow or self._closed.is_set() or self._settled():
                    return
            except BackendUnavailableError as exc:
                if failures >= _FAILURES and not follow:
                    yield self._note(exc)
                    self.done = True
                    return
            self._closed.wait(min(0.1 * 2 ** min(failures, 10), _LONGEST_PAUSE_S))

    def reopen(self) -> None:
        """Lets `read` be called again after `close`."""
        self._closed.clear()

    def close(self) -> None:
        """Ends the `read` that runs or comes next, from any thread."""
        self._closed.set()
        if self._stream is not None:
            self._stream.close()

    def _rest(self, *, follow: bool, tail: int | None) -> Iterator[LogLine]:
        """The rest of the run before this one, where one is kept that was not read to its end, and of this one."""
        pod = self._pod()
        if pod is None:
            self.done = True
            return
        status = status_of(pod, self.container)
        self._run = status.get("restartCount", 0)
        if self._read_run < self._run - 1 and "waiting" not in status.get("state", {}):
            yield from self._lines(previous=True, follow=False, tail=tail)
            if self._closed.is_set():
                return
            self._read_run, self._begun = self._run - 1, False
        yield from self._lines(previous=False, follow=follow, tail=tail)
        # A stream that was closed has ended too, but not the log.
        self.done = pod_ended(pod) and not self._closed.is_set()

    def _settled(self) -> bool:
        """Whether what was read just now is all that the container says until it starts again."""
        pod = self._pod()
        if pod is None:
            self.done = True
            return True
        status = status_of(pod, self.container)
        if "running" in status.get("state", {}) or status.get("restartCount", 0) > self._run:
            return False
        self._read_run, self._begun = self._run, False
        return True

    def _pod(self) -> Json | None:
        """The pod as it is, None when it is gone."""
        try:
            pod = self._kube.get(self._path)
        except ApiError as exc:
            if exc.code == _NOT_FOUND:
                return None
            raise BackendUnavailableError(exc.message, hints=exc.hints) from exc
        return pod if pod["metadata"]["uid"] == self._uid else None

    def _lines(self, *, previous: bool, follow: bool, tail: int | None) -> Iterator[LogLine]:
        stream = self._open(previous=previous, follow=follow, tail=tail)
        for line in stream or ():
            stamp, _, text = line.partition(b" ")
            time = _time(stamp)
            if time is not None and self._cursor.admit(time, line):
                self._begun = True
                yield LogLine(time, self.pod, self.container, "stdout", text.decode(errors="replace").rstrip("\r"))

    def _open(self, *, previous: bool, follow: bool, tail: int | None) -> Stream | None:
        """The stream from where the cursor is; None where the node has no such log."""
        query = {"container": self.container, "timestamps": "true"}
        start = self._cursor.resume_at()
        query |= {"sinceTime": start.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")} if start else {}
        query |= {"tailLines": str(tail)} if tail is not None and not self._begun else {}
        query |= {"previous": "true"} if previous else {}
        query |= {"follow": "true"} if follow else {}
        timeout_s = FOLLOW_TIMEOUT_S if follow else READ_TIMEOUT_S
        try:
            self._stream = self._kube.stream(f"{self._path}/log", read_timeout_s=timeout_s, **query)
        except ApiError as exc:
            # The container has not started, has no run before this one, or its pod went this moment.
            if exc.code in (_BAD_REQUEST, _NOT_FOUND):
                return None
            raise BackendUnavailableError(exc.message, hints=exc.hints) from exc
        if self._closed.is_set():
            self._stream.close()
        return self._stream

    def _note(self, exc: BackendUnavailableError) -> LogLine:
        text = f"pw: the rest of this log cannot be read: {exc.message}"
        return LogLine(datetime.now(UTC), self.pod, self.container, "stderr", text)


def container_statuses(pod: Json) -> list[dict[str, Any]]:
    """The statuses of all containers of a pod, init containers first."""
    status = pod.get("status") or {}
    return [*(status.get("initContainerStatuses") or []), *(status.get("containerStatuses") or [])]


def status_of(pod: Json, container: str) -> dict[str, Any]:
    """The status of one container of a pod, empty while there is none."""
    return next((status for status in container_statuses(pod) if status["name"] == container), {})


def pod_ended(pod: Json) -> bool:
    """Whether none of the pod's containers will run again."""
    return (pod.get("status") or {}).get("phase") in ("Succeeded", "Failed")


def has_run(status: Json) -> bool:
    """Whether a container of this status ever started, so that it may have a log."""
    states = (status.get("state") or {}, status.get("lastState") or {})
    return any("running" in state or "terminated" in state for state in states)


def _time(stamp: bytes) -> datetime | None:
    """An RFC 3339 time to the microsecond, as aware UTC; None for what is no time, such as a kubelet's own message."""
    with suppress(ValueError):
        time = datetime.fromisoformat(stamp.decode("ascii", errors="replace"))
        return time.astimezone(UTC) if time.tzinfo else None
    return None
