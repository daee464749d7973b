"""Log files as a Kubernetes node writes them: what goes into a pipe comes back as lines."""

from __future__ import annotations

import asyncio
import os
from datetime import UTC, datetime
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pw.backends.local import logfiles
from pw.backends.local.logpipe import PART_SIZE_BYTES, LogFile, Pump, cri_time
from pw.backends.local.state import JobDir
from pw.status import LogLine, LogQuery


def pump(path: Path, *chunks: bytes, stream: str = "stdout") -> None:
    """Writes each chunk to a pipe that is read before the next one comes."""

    async def run() -> None:
        log = LogFile(path, before=lambda: None, after=lambda: None)
        pipe = Pump(log, stream)
        for chunk in chunks:
            os.write(pipe.write_fd, chunk)
            await asyncio.sleep(0)
            await asyncio.sleep(0)
        os.close(pipe.write_fd)
        pipe.finish()
        log.close()

    asyncio.run(run())


def lines(job: JobDir, **query: object) -> list[str]:
    return [line.text for line in logfiles.read(job, LogQuery(**query))]  # type: ignore[arg-type]


@pytest.fixture
def job(tmp_path: Path) -> JobDir:
    return JobDir(tmp_path / "job")


def test_each_line_has_its_time_stream_and_tag(job: JobDir) -> None:
    path = job.log_file("pod", "main")
    pump(path, b"one\ntwo\n", stream="stderr")
    first, second = path.read_text().splitlines()
    time, rest = first.split(" ", 1)
    assert rest == "stderr F one"
    assert second == f"{time} stderr F two"
    assert abs((datetime.now(UTC) - datetime.fromisoformat(time)).total_seconds()) < 60


def test_what_is_in_the_pipe_at_the_end_is_kept_though_another_holds_it_open(job: JobDir) -> None:
    async def run() -> None:
        log = LogFile(job.log_file("pod", "main"), before=lambda: None, after=lambda: None)
        pipe = Pump(log, "stdout")
        os.write(pipe.write_fd, b"last\nwords")
        pipe.finish()
        os.close(pipe.write_fd)
        log.close()

    asyncio.run(run())
    assert lines(job) == ["last", "words"]


def test_a_time_has_nine_digits_of_a_second() -> None:
    assert cri_time(1_000_000_001) == "1970-01-01T00:00:01.000000001Z"


def test_a_line_that_comes_in_pieces_is_one_line(job: JobDir) -> None:
    pump(job.log_file("pod", "main"), b"on", b"e\ntw", b"o", b"\n", b"three")
    assert lines(job) == ["one", "two", "three"]


def test_a_long_line_is_kept_in_parts_and_given_whole(job: JobDir) -> None:
    path = job.log_file("pod", "main")
    text = "x" * (2 * PART_SIZE_BYTES + 7)
    pump(path, *(text[start : start + 9000].encode() for start in range(0, len(text), 9000)), b"\nshort\n")
    assert [record.split(b" ", 3)[2] for record in path.read_bytes().splitlines()] == [b"P", b"P", b"F", b"F"]
    assert lines(job) == [text, "short"]
    assert lines(job, tail=2) == [text, "short"]


def test_bytes_that_are_no_text_are_kept_and_shown_replaced(job: JobDir) -> None:
    path = job.log_file("pod", "main")
    pump(path, b"caf\xe9\n")
    assert path.read_bytes().endswith(b"F caf\xe9\n")
    assert lines(job) == ["caf�"]


def test_of_a_progress_bar_the_last_state_is_shown(job: JobDir) -> None:
    path = job.log_file("pod", "main")
    pump(path, b"10%\r50%\r100%\nwindows\r\n")
    assert lines(job) == ["100%", "windows"]
    assert b"10%\r50%\r100%" in path.read_bytes()


def test_restarts_of_a_container_go_on_in_its_file(job: JobDir) -> None:
    for text in (b"first\n", b"second\n"):
        pump(job.log_file("pod", "main"), text)
    assert lines(job) == ["first", "second"]


def write(job: JobDir, pod: str, container: str, *texts: tuple[int, str]) -> None:
    path = job.log_file(pod, container)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.writelines(f"{cri_time(second * 10**9)} stdout F {text}\n" for second, text in texts)


def test_lines_of_all_containers_come_in_the_order_of_their_times(job: JobDir) -> None:
    write(job, "a", "main", (1, "a1"), (4, "a4"), (5, "a5"))
    write(job, "b", "main", (2, "b2"), (3, "b3"), (6, "b6"))
    assert lines(job) == ["a1", "b2", "b3", "a4", "a5", "b6"]
    assert lines(job, tail=1) == ["a5", "b6"]
    assert lines(job, since=datetime.fromtimestamp(4, UTC)) == ["a4", "a5", "b6"]


def test_a_slice_is_found_by_the_names_of_its_pods(job: JobDir) -> None:
    write(job, "job-worker-1-0-xxxxx", "pathways-worker", (1, "slice 1"))
    write(job, "job-worker-11-0-xxxxx", "pathways-worker", (1, "slice 11"))
    write(job, "job-pathways-head-0-0-xxxxx", "main", (1, "head"))
    assert lines(job, slice=1) == ["slice 1"]
    assert lines(job, container="main") == ["head"]


def test_half_a_record_from_a_full_disk_is_passed_over(job: JobDir) -> None:
    write(job, "pod", "main", (1, "whole"))
    with job.log_file("pod", "main").open("a") as file:
        file.write("2026-11-2\n\n")
    write(job, "pod", "main", (2, "whole again"))
    assert lines(job) == ["whole", "whole again"]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="only Linux has a device that is always full")
def test_a_full_disk_loses_lines_and_not_the_job(job: JobDir, caplog: pytest.LogCaptureFixture) -> None:
    path = job.log_file("pod", "main")
    path.parent.mkdir(parents=True)
    path.symlink_to("/dev/full")
    pump(path, b"one\n", b"two\n")
    assert [record.levelname for record in caplog.records] == ["ERROR"]
    assert "output is being dropped" in caplog.text


def test_following_gives_what_comes_between_and_new_files_from_their_start(job: JobDir) -> None:
    write(job, "a", "main", (1, "old"), (2, "last"))
    steps = [lambda: write(job, "a", "main", (3, "more")), lambda: write(job, "b", "main", (4, "new"), (5, "pod"))]

    def wait() -> bool:
        if not steps:
            write(job, "a", "main", (6, "end"))
            return False
        steps.pop(0)()
        return True

    found: list[LogLine] = list(logfiles.follow(job, LogQuery(follow=True, tail=1), wait=wait))
    assert [line.text for line in found] == ["last", "more", "new", "pod", "end"]


@settings(max_examples=50, deadline=None)
@given(count=st.integers(0, 40), tail=st.integers(0, 45), width=st.integers(0, 40_000))
def test_the_tail_is_the_end_of_the_whole(
    tmp_path_factory: pytest.TempPathFactory, count: int, tail: int, width: int
) -> None:
    job = JobDir(tmp_path_factory.mktemp("tail") / "job")
    write(job, "pod", "main", *((number, f"{number} {'x' * width}") for number in range(count)))
    assert lines(job, tail=tail) == lines(job)[max(count - tail, 0) :]
