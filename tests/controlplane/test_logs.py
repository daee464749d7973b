"""Logs of a job on a cluster: no line lost, none given twice, whatever breaks between."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta

import pytest

from pw import kube_follow
from pw.backends.gke import GkeBackend
from pw.errors import AuthError, JobNotFoundError, SpecError
from pw.status import JobRef, LogLine, LogQuery
from tests.controlplane.cluster import Cluster
from tests.controlplane.conftest import MakeSpec

START = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
TIMEOUT_S = 20.0


class Tail:
    """Follows logs in a thread, as a terminal would."""

    def __init__(self, lines: Iterator[LogLine]) -> None:
        self._found: queue.Queue[LogLine | BaseException | None] = queue.Queue()
        self._lines = lines
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        try:
            for line in self._lines:
                self._found.put(line)
            self._found.put(None)
        except BaseException as exc:
            self._found.put(exc)

    def next(self, count: int = 1) -> list[str]:
        """The next lines, once they have come."""
        found = [self._found.get(timeout=TIMEOUT_S) for _ in range(count)]
        return [line.text for line in found if isinstance(line, LogLine)]

    def rest(self) -> list[str]:
        """What comes until the end; raises what ended it."""
        texts: list[str] = []
        while (line := self._found.get(timeout=TIMEOUT_S)) is not None:
            if isinstance(line, BaseException):
                raise line
            texts.append(line.text)
        return texts


@pytest.fixture
def job(cluster: Cluster, backend: GkeBackend, make_spec: MakeSpec) -> JobRef:
    return backend.submit(backend.plan(make_spec()))


@pytest.fixture
def head(cluster: Cluster, job: JobRef) -> str:
    """The name of the head's pod of a job that runs."""
    return cluster.run(job.name)[0]


@pytest.fixture
def say(cluster: Cluster, head: str) -> Callable[..., None]:
    """`say("text", at=1.5)`: the command prints a line, 1.5 s after `START`."""

    def say(text: str, *, at: float, run: int = 0) -> None:
        cluster.server.logs.write(head, "main", text, run=run, time=START + timedelta(seconds=at))

    return say


Say = Callable[..., None]


def texts(lines: Iterator[LogLine]) -> list[str]:
    return [line.text for line in lines]


def test_lines_of_all_containers_come_in_order_of_time(
    cluster: Cluster, backend: GkeBackend, job: JobRef, head: str
) -> None:
    worker = next(name for name in cluster.pods if "-worker-0-1-" in name)
    for index, (pod, container) in enumerate(
        [(head, "main"), (worker, "pathways-worker"), (head, "pathways-proxy")] * 3
    ):
        cluster.server.logs.write(pod, container, f"line {index}", time=START + timedelta(milliseconds=index))

    lines = list(backend.logs(job, LogQuery()))

    assert [line.text for line in lines] == [f"line {index}" for index in range(9)]
    assert (lines[1].pod, lines[1].container, lines[1].stream) == (worker, "pathways-worker", "stdout")
    assert lines[1].time == START + timedelta(milliseconds=1)


def test_a_line_is_given_as_it_was_written(backend: GkeBackend, job: JobRef, say: Say) -> None:
    hostile = "\ttab  two spaces \x1b[31mred\x1b[0m ünï \u2028 [/tmp/x] "
    say(hostile, at=0)
    say("", at=1)

    assert texts(backend.logs(job, LogQuery())) == [hostile, ""]


def test_a_query_narrows_by_slice_container_time_and_count(
    cluster: Cluster, backend: GkeBackend, job: JobRef, head: str, say: Say
) -> None:
    for index in range(5):
        say(f"main {index}", at=index + 0.5)
    worker = next(name for name in cluster.pods if "-worker-0-0-" in name)
    cluster.server.logs.write(worker, "pathways-worker", "worker", time=START)

    assert texts(backend.logs(job, LogQuery(slice=0))) == ["worker"]
    for query, exist in ((LogQuery(container="nosuch"), "pathways-proxy"), (LogQuery(slice=9), "want 0")):
        with pytest.raises(SpecError, match=exist):
            next(backend.logs(job, query))
    assert texts(backend.logs(job, LogQuery(container="main", tail=2))) == ["main 3", "main 4"]
    assert texts(backend.logs(job, LogQuery(since=START + timedelta(seconds=3.5)))) == ["main 3", "main 4"]


def test_the_run_before_a_restart_is_shown(
    cluster: Cluster, backend: GkeBackend, job: JobRef, head: str, say: Say
) -> None:
    say("first run", at=0)
    cluster.restart(head, "main")
    say("second run", at=5, run=1)

    assert texts(backend.logs(job, LogQuery())) == ["first run", "second run"]


def test_following_ends_with_the_job_and_its_last_line(
    cluster: Cluster, backend: GkeBackend, job: JobRef, say: Say
) -> None:
    say("before", at=0)
    tail = Tail(backend.logs(job, LogQuery(follow=True)))
    assert tail.next() == ["before"]
    say("during", at=1)
    assert tail.next() == ["during"]

    for index in range(3000):
        say(f"last {index}", at=2)
    cluster.finish(job.name, exit_code=1)

    assert tail.rest() == [f"last {index}" for index in range(3000)]


@pytest.mark.parametrize("after", [0, 1, 2])
def test_a_stream_that_drops_in_a_line_goes_on_without_loss(
    cluster: Cluster, backend: GkeBackend, job: JobRef, say: Say, after: int
) -> None:
    # Equal stamps and equal lines, as a tight loop prints them, in one second and over its end.
    cluster.fail("GET", "/log.*container=main.*follow=true", after=after, times=3)
    say("start", at=0)
    tail = Tail(backend.logs(job, LogQuery(follow=True, container="main")))
    assert tail.next() == ["start"]
    wanted = ["a", "same", "same", "b", "c", "d", "same"]
    for text, at in zip(wanted, [0.1, 0.2, 0.2, 0.2, 0.9, 1.1, 1.1], strict=True):
        say(text, at=at)

    assert tail.next(len(wanted)) == wanted

    cluster.finish(job.name)
    assert tail.rest() == []


def test_a_stream_that_ends_early_as_at_log_rotation_goes_on(
    cluster: Cluster, backend: GkeBackend, job: JobRef, head: str, say: Say
) -> None:
    tail = Tail(backend.logs(job, LogQuery(follow=True, container="main")))
    say("a", at=0)
    assert tail.next() == ["a"]
    cluster.server.logs.end(head, "main")
    cluster.server.logs.resume(head, "main")
    say("b", at=0.1)

    assert tail.next() == ["b"]


def test_lines_out_of_order_around_a_drop_are_kept(
    cluster: Cluster, backend: GkeBackend, job: JobRef, say: Say
) -> None:
    cluster.fail("GET", "/log.*follow=true", after=1)
    say("stdout", at=1.0)
    tail = Tail(backend.logs(job, LogQuery(follow=True, container="main")))
    assert tail.next() == ["stdout"]
    say("stderr, stamped before", at=0.99)
    say("next", at=1.2)

    assert tail.next(2) == ["stderr, stamped before", "next"]


def test_following_goes_on_with_a_container_that_restarts(
    cluster: Cluster, backend: GkeBackend, job: JobRef, head: str, say: Say
) -> None:
    say("first run", at=0)
    tail = Tail(backend.logs(job, LogQuery(follow=True, container="main")))
    assert tail.next() == ["first run"]

    run = cluster.restart(head, "main")
    say("second run", at=3, run=run)

    assert tail.next() == ["second run"]
    cluster.finish(job.name)
    assert tail.rest() == []


def test_following_picks_up_pods_that_come_later(
    cluster: Cluster, backend: GkeBackend, job: JobRef, head: str, say: Say
) -> None:
    say("first attempt", at=0)
    tail = Tail(backend.logs(job, LogQuery(follow=True, container="main")))
    assert tail.next() == ["first attempt"]
    for pod in list(cluster.pods):
        cluster.remove_pod(pod)
    cluster.server.logs.end(head, "main")

    again = cluster.run(job.name, attempt=1)[0]
    cluster.server.logs.write(again, "main", "second attempt", time=START + timedelta(seconds=9))

    assert tail.next() == ["second attempt"]
    cluster.finish(job.name)
    assert tail.rest() == []


def test_more_containers_than_readers_are_all_followed(
    cluster: Cluster, backend: GkeBackend, make_spec: MakeSpec
) -> None:
    # 16 hosts of 4 slices, of one container each, and the head.
    cluster.add_pool("large", "ct6e-standard-4t", "tpu-v6e-slice", "8x8")
    job = backend.submit(backend.plan(make_spec(compute_type="v6e-64", num_slices=4)))
    _, *workers = cluster.run(job.name)
    late = workers[kube_follow.READERS // 2 :]
    assert len(late) > kube_follow.READERS
    cluster.hold(late)
    tail = Tail(backend.logs(job, LogQuery(follow=True)))
    cluster.server.logs.write(workers[0], "pathways-worker", "few")
    assert tail.next() == ["few"]

    cluster.release(late)
    for round in range(2):
        for worker in workers:
            cluster.server.logs.write(worker, "pathways-worker", f"{worker} {round}")
        assert sorted(tail.next(len(workers))) == sorted(f"{worker} {round}" for worker in workers)

    cluster.finish(job.name)
    assert tail.rest() == []


def test_a_pod_that_no_watch_told_of_is_read_when_the_job_ends(
    cluster: Cluster, backend: GkeBackend, job: JobRef, head: str, say: Say
) -> None:
    say("first", at=0)
    cluster.fail("GET", "/pods.*watch=true", code=503, message="overloaded", times=99)
    tail = Tail(backend.logs(job, LogQuery(follow=True)))
    assert tail.next() == ["first"]

    again = cluster.run(job.name, attempt=1)[0]
    cluster.server.logs.write(again, "main", "second", time=START + timedelta(seconds=9))
    cluster.finish(job.name)

    assert tail.rest() == ["second"]


def test_a_log_that_stays_away_is_said_and_the_others_come(
    cluster: Cluster, backend: GkeBackend, job: JobRef, head: str, say: Say
) -> None:
    say("from the command", at=0)
    cluster.fail("GET", "container=pathways-proxy", code=500, message="dial tcp: i/o timeout", times=99)

    found = texts(backend.logs(job, LogQuery()))

    assert found[0] == "from the command"
    assert "cannot be read" in found[1] and "i/o timeout" in found[1]


def test_a_permission_that_is_missing_ends_the_logs(
    cluster: Cluster, backend: GkeBackend, job: JobRef, head: str
) -> None:
    cluster.fail("GET", "/log", code=403, message="pods/log is forbidden", times=99)

    with pytest.raises(AuthError, match="pods/log is forbidden"):
        list(backend.logs(job, LogQuery(follow=True)))


def test_who_stops_following_leaves_no_reader(cluster: Cluster, backend: GkeBackend, job: JobRef, say: Say) -> None:
    say("one", at=0)
    before = set(threading.enumerate())
    lines = backend.logs(job, LogQuery(follow=True))
    assert next(lines).text == "one"
    say("two", at=1)
    assert next(lines).text == "two"

    lines.close()  # type: ignore[attr-defined]

    ours = [thread for thread in set(threading.enumerate()) - before if thread.name.startswith("pw-")]
    for thread in ours:
        thread.join(TIMEOUT_S)
    assert not [thread for thread in ours if thread.is_alive()]


def test_logs_of_no_job_say_so(backend: GkeBackend) -> None:
    with pytest.raises(JobNotFoundError, match="'absent'"):
        list(backend.logs(JobRef("gke", "absent"), LogQuery()))
