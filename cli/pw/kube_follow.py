"""The logs of many containers as one stream: what there is, in order of time; then what comes, from new pods too.

However many containers there are, at most `READERS` are read at once. While they all fit, each is followed on a
stream of its own; where they do not, the readers take turns.
"""

from __future__ import annotations

import heapq
import itertools
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from datetime import datetime
from tempfile import SpooledTemporaryFile

from pw.errors import PwError
from pw.kube import Json
from pw.kube_logs import ContainerLog
from pw.kube_watch import Watch
from pw.status import LogLine

READERS = 32
# Between two turns of a container that is read by turns.
_TURN_S = 1.0
_LINES_AHEAD = 10_000
_SPOOL_BYTES = 2**18

Discover = Callable[[list[Json]], list[ContainerLog]]


def history(logs: Sequence[ContainerLog], *, tail: int | None = None) -> Iterator[LogLine]:
    """All lines that there are now in order of time, or the last `tail` of each log. Large logs wait on disk."""
    with ExitStack() as files, ThreadPoolExecutor(READERS) as pool:
        spools = [_Spool(files.enter_context(SpooledTemporaryFile(_SPOOL_BYTES)), log) for log in logs]
        try:
            list(pool.map(lambda spool: spool.fill(tail), spools))
        except BaseException:
            for log in logs:
                log.close()
            pool.shutdown(wait=False, cancel_futures=True)
            raise
        yield from heapq.merge(*spools, key=lambda line: line.time)


class _Spool:
    """The lines of one log between being read and being merged."""

    def __init__(self, file: SpooledTemporaryFile[bytes], log: ContainerLog) -> None:
        self._file = file
        self._log = log

    def fill(self, tail: int | None) -> None:
        lines: Iterable[LogLine] = self._log.read(follow=False, tail=tail)
        for line in lines if tail is None else deque(lines, maxlen=tail):
            self._file.write(f"{line.time.isoformat()} {line.stream} {line.text}\n".encode())

    def __iter__(self) -> Iterator[LogLine]:
        self._file.seek(0)
        for data in self._file:
            stamp, stream, text = data[:-1].decode().split(" ", 2)
            yield LogLine(datetime.fromisoformat(stamp), self._log.pod, self._log.container, stream, text)


class _Feed:
    """Hands lines from the readers to the one who asks. Full, it makes them wait."""

    def __init__(self) -> None:
        self._lines: deque[LogLine] = deque()
        self._changed = threading.Condition()
        self._closed = False
        self._error: BaseException | None = None

    def put(self, line: LogLine) -> bool:
        """False when nobody wants lines any more."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or len(self._lines) < _LINES_AHEAD)
            if self._closed:
                return False
            self._lines.append(line)
            self._changed.notify_all()
            return True

    def close(self, error: BaseException | None = None) -> None:
        """Ends the iteration after the lines that are in, with `error` if there is one."""
        with self._changed:
            self._error = self._error or error
            self._closed = True
            self._changed.notify_all()

    def __iter__(self) -> Iterator[LogLine]:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or self._lines)
                if not self._lines:
                    break
                line = self._lines.popleft()
                self._changed.notify_all()
            yield line
        if self._error is not None:
            raise self._error


class Follower:
    """Lines as they come until the job is over and its logs are drained.

    `pods` watches the job's pods, `discover` makes logs of containers that started and gives all known ones. `job`
    watches the job: once `is_over` holds for what it shows, the logs of `last_pods` are drained.
    """

    def __init__(
        self,
        *,
        pods: Watch,
        discover: Discover,
        job: Watch,
        is_over: Callable[[list[Json]], bool],
        last_pods: Callable[[], list[Json]],
    ) -> None:
        self._pods_watch = pods
        self._discover = discover
        self._job_watch = job
        self._is_over = is_over
        self._last_pods = last_pods
        self._feed = _Feed()
        self._changed = threading.Condition()
        self._order = itertools.count()
        self._due: list[tuple[float, int, ContainerLog]] = []
        self._waiting: set[ContainerLog] = set()  # in _due
        self._reading: set[ContainerLog] = set()
        self._followed: set[ContainerLog] = set()  # those of _reading that wait for more
        self._drained: set[ContainerLog] = set()
        self._logs: list[ContainerLog] = []
        self._pods: dict[str, Json] = {}
        self._over = False
        self._stopped = False
        self._readers = 0

    def __iter__(self) -> Iterator[LogLine]:
        self._start(self._watch_pods)
        self._start(self._watch_job)
        try:
            yield from self._feed
        finally:
            self._stop()

    def _start(self, work: Callable[[], None]) -> None:
        threading.Thread(target=self._guarded, args=(work,), name="pw-logs", daemon=True).start()

    def _guarded(self, work: Callable[[], None]) -> None:
        try:
            work()
        except PwError as exc:
            self._feed.close(exc)
        except BaseException as exc:
            self._feed.close(exc)
            raise

    def _stop(self) -> None:
        with self._changed:
            self._stopped = True
            self._changed.notify_all()
            logs = list(self._logs)
        self._feed.close()
        sources: list[Watch | ContainerLog] = [self._pods_watch, self._job_watch, *logs]
        for source in sources:
            source.close()

    def _watch_pods(self) -> None:
        for pods in self._pods_watch:
            self._see(pods)

    def _see(self, pods: list[Json]) -> None:
        """Takes in the pods as they are now: new containers, new runs, pods that went."""
        with self._changed:
            self._pods = {pod["metadata"]["name"]: pod for pod in pods}
            known = set(self._logs)
            self._logs = self._discover(pods)
            for log in self._logs:
                pod = self._pods.get(log.pod)
                if log not in known or pod is None or log.behind(pod):
                    self._push(log)

    def _watch_job(self) -> None:
        for jobs in self._job_watch:
            if self._is_over(jobs):
                break
        else:
            return
        self._see(self._last_pods())
        with self._changed:
            self._over = True
            self._pods_watch.close()
            for log in self._logs:
                self._push(log)
            # One more read of each, which does not wait for more.
            self._interrupt()
            self._end_if_drained()

    def _push(self, log: ContainerLog, after_s: float = 0.0) -> None:
        if log.done or log in self._waiting or log in self._reading or log in self._drained or self._stopped:
            return
        self._waiting.add(log)
        heapq.heappush(self._due, (time.monotonic() + after_s, next(self._order), log))
        if self._readers < min(READERS, len(self._logs)):
            self._readers += 1
            self._start(self._read)
        if self._by_turns():
            self._interrupt()
        self._changed.notify()

    def _interrupt(self) -> None:
        for log in self._followed:
            log.close()

    def _read(self) -> None:
        while (turn := self._next()) is not None:
            log, follow, last = turn
            for line in log.read(follow=follow):
                if not self._feed.put(line):
                    return
            self._put_back(log, last=last)

    def _next(self) -> tuple[ContainerLog, bool, bool] | None:
        """The next log to read, whether to wait on it, and whether it is for the last time; None at the end."""
        with self._changed:
            while not self._stopped:
                left_s = self._due[0][0] - time.monotonic() if self._due else None
                if left_s is not None and left_s <= 0:
                    log = heapq.heappop(self._due)[2]
                    self._waiting.discard(log)
                    self._reading.add(log)
                    follow = not self._over and not self._by_turns()
                    if follow:
                        self._followed.add(log)
                    log.reopen()
                    return log, follow, self._over
                self._changed.wait(left_s)
        return None

    def _put_back(self, log: ContainerLog, *, last: bool) -> None:
        with self._changed:
            self._reading.discard(log)
            self._followed.discard(log)
            if last or log.done:
                self._drained.add(log)
            elif self._over or log.behind(self._pods.get(log.pod, {})):
                self._push(log, _TURN_S if self._by_turns() and not self._over else 0.0)
            self._end_if_drained()

    def _by_turns(self) -> bool:
        return len(self._waiting) + len(self._reading) > READERS

    def _end_if_drained(self) -> None:
        if self._over and not self._waiting and not self._reading:
            self._feed.close()
