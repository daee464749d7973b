"""Reading a job's log files: lines in the order of their times, from the start or the end, and as they come."""

from __future__ import annotations

import heapq
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import BinaryIO

from pw.backends.local.metadata import slice_of
from pw.backends.local.state import JobDir
from pw.status import LogLine, LogQuery

_BLOCK_SIZE_BYTES = 256 * 1024
_TAG_AT = len("2026-11-29T13:00:00.000000000Z stdout ")
# A line that never ends is cut here, so that reading it takes no more memory than this.
_LONGEST_LINE_BYTES = 1024 * 1024
_LAST_LINES = 20


@dataclass(frozen=True, slots=True)
class Source:
    """One container's log file."""

    path: Path
    pod: str
    container: str


def sources(job: JobDir, query: LogQuery) -> list[Source]:
    """The files that `query` asks for and that exist now, in order of name."""
    found = (Source(path, path.parent.name, path.stem) for path in sorted(job.pods.glob("*/*.log")))
    return [
        source
        for source in found
        if (query.container is None or source.container == query.container)
        and (query.slice is None or slice_of(source.pod, job.name) == query.slice)
    ]


class Reader:
    """Lines of one file from where it stood; call `read` again when there is more."""

    def __init__(self, source: Source, *, tail: int | None = None, since: datetime | None = None) -> None:
        self._source = source
        self._since = since
        self._file: BinaryIO = source.path.open("rb")
        if tail is not None:
            self._file.seek(_start_of_tail(self._file, tail))
        self._torn = b""
        self._parts: dict[bytes, bytes] = {}

    def read(self) -> Iterator[LogLine]:
        """What has been written since the last call, whole lines only."""
        while block := self._file.read(_BLOCK_SIZE_BYTES):
            *records, self._torn = (self._torn + block).split(b"\n")
            for record in records:
                line = self._line(record)
                if line is not None and (self._since is None or line.time >= self._since):
                    yield line

    def close(self) -> None:
        self._file.close()

    def _line(self, record: bytes) -> LogLine | None:
        time, stream, tag, text = (*record.split(b" ", 3), b"", b"", b"")[:4]
        text = self._parts.pop(stream, b"") + text
        if tag == b"P" and len(text) < _LONGEST_LINE_BYTES:
            self._parts[stream] = text
            return None
        try:
            moment = datetime.fromisoformat(time.decode())
        except ValueError:
            # Half a record, from when the disk was full.
            return None
        return LogLine(moment, self._source.pod, self._source.container, stream.decode(), _shown(text))


def _shown(text: bytes) -> str:
    """A line as a terminal leaves it: of a progress bar that returns to the line's start, the last state."""
    return text.rstrip(b"\r").rpartition(b"\r")[2].decode(errors="replace")


def _start_of_tail(file: BinaryIO, tail: int) -> int:
    """The offset at which the last `tail` lines begin; parts of a long line count as the one line they are."""
    position = file.seek(0, os.SEEK_END)
    records: list[bytes] = []
    torn = b""
    while position > 0 and sum(map(_ends_line, records)) <= tail:
        size = min(_BLOCK_SIZE_BYTES, position)
        position -= size
        file.seek(position)
        torn, *whole = (file.read(size) + torn).split(b"\n")
        records = whole + records
    return _offset(position, torn, records, tail)


def _offset(position: int, torn: bytes, records: list[bytes], tail: int) -> int:
    """Of the records that follow `torn` at `position`, where the last `tail` whole lines begin."""
    lines = [torn, *records]
    wanted, index = tail, len(lines)
    while index > 0:
        if _ends_line(lines[index - 1]):
            if wanted == 0:
                break
            wanted -= 1
        index -= 1
    return position + sum(len(record) + 1 for record in lines[:index])


def _ends_line(record: bytes) -> bool:
    return record.startswith(b"F ", _TAG_AT)


def last_line(path: Path) -> str:
    """The last line of a file that says something, "" where none of its last ones does."""
    reader = Reader(Source(path, "", ""), tail=_LAST_LINES)
    try:
        return next((line.text for line in reversed(list(reader.read())) if line.text.strip()), "")
    finally:
        reader.close()


def merged(readers: list[Reader]) -> Iterator[LogLine]:
    """What all readers have now, in order of time."""
    yield from heapq.merge(*(reader.read() for reader in readers), key=lambda line: line.time)


def follow(job: JobDir, query: LogQuery, *, wait: Callable[[], bool]) -> Iterator[LogLine]:
    """Lines as they come. `wait` returns at the next change, False once the job is over; files that appear are read
    from their start."""
    readers: dict[Path, Reader] = {}
    going_on, tail = True, query.tail
    try:
        while True:
            for source in sources(job, query):
                if source.path not in readers:
                    readers[source.path] = Reader(source, tail=tail, since=query.since)
            tail = None
            yield from merged(list(readers.values()))
            if not going_on:
                return
            going_on = wait()
    finally:
        for reader in readers.values():
            reader.close()


def read(job: JobDir, query: LogQuery) -> Iterator[LogLine]:
    """What there is now."""
    yield from follow(job, query, wait=lambda: False)
