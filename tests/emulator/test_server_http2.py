"""Flow control: nothing leaves that the peer has no room for, and what waits leaves when it has."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

from pathways_runtime.emulator.http2_output import (
    DATA,
    FRAME_HEADER,
    HEADERS,
    RST_STREAM,
    SETTINGS,
    Output,
    ProtocolError,
    Stream,
)


class Pair:
    """An output, and what the peer at its other end has received of it."""

    def __init__(self) -> None:
        ours, self._theirs = socket.socketpair()
        self._theirs.setblocking(False)
        self.streams: dict[int, Stream] = {}
        self.output = Output(ours, self.streams)
        self._ours = ours

    def open(self, stream_id: int) -> Stream:
        stream = Stream(self.output, stream_id, [])
        stream.has_ended = True
        self.output.open(stream)
        return stream

    def received(self) -> list[tuple[int, int, bytes]]:
        """(type, stream, payload) of the frames that came since the last time."""
        data, frames = b"", []
        try:
            while part := self._theirs.recv(1 << 20):
                data += part
        except BlockingIOError:
            pass
        while data:
            high, low, kind, _, stream = FRAME_HEADER.unpack_from(data)
            length = high << 8 | low
            frames.append((kind, stream, data[9 : 9 + length]))
            data = data[9 + length :]
        return frames

    def close(self) -> None:
        self._ours.close()
        self._theirs.close()


@pytest.fixture
def pair() -> Iterator[Pair]:
    pair = Pair()
    yield pair
    pair.close()


def sizes(frames: list[tuple[int, int, bytes]]) -> list[tuple[int, int]]:
    return [(stream, len(payload)) for kind, stream, payload in frames if kind == DATA]


def test_data_waits_for_the_streams_window(pair: Pair) -> None:
    pair.output.apply_settings(10, None)
    stream = pair.open(1)
    stream.send(b"x" * 25)
    assert sizes(pair.received()) == [(1, 10)]
    pair.output.widen(1, 5)
    assert sizes(pair.received()) == [(1, 5)]
    pair.output.widen(1, 100)
    assert sizes(pair.received()) == [(1, 10)]


def test_data_waits_for_the_connections_window(pair: Pair) -> None:
    pair.output.apply_settings(1 << 20, 1 << 20)
    first, second = pair.open(1), pair.open(3)
    first.send(b"x" * 65000)
    second.send(b"y" * 1000)
    assert sizes(pair.received()) == [(1, 65000), (3, 535)]
    pair.output.widen(0, 1000)
    assert sizes(pair.received()) == [(3, 465)]


def test_large_data_is_cut_into_frames_that_the_peer_takes(pair: Pair) -> None:
    pair.open(1).send(memoryview(bytes(40000)))
    assert sizes(pair.received()) == [(1, 16384), (1, 16384), (1, 7232)]


def test_a_larger_window_is_used_only_behind_its_acknowledgement(pair: Pair) -> None:
    pair.output.apply_settings(10, None)
    pair.open(1).send(b"x" * 25)
    pair.received()
    pair.output.apply_settings(30, None)
    assert [kind for kind, _, _ in pair.received()] == [SETTINGS, DATA]


def test_the_end_comes_behind_data_that_waits(pair: Pair) -> None:
    pair.output.apply_settings(10, None)
    stream = pair.open(1)
    stream.send(b"x" * 15)
    stream.end(b"trailers")
    pair.received()
    pair.output.widen(1, 10)
    assert [(kind, payload) for kind, _, payload in pair.received()] == [(DATA, b"x" * 5), (HEADERS, b"trailers")]
    assert not pair.streams


def test_a_request_that_is_answered_early_need_not_be_sent_on(pair: Pair) -> None:
    stream = pair.open(1)
    stream.has_ended = False
    stream.end(b"trailers")
    assert [kind for kind, _, _ in pair.received()] == [HEADERS, RST_STREAM]


def test_a_smaller_window_stops_a_stream_that_has_used_more(pair: Pair) -> None:
    stream = pair.open(1)
    stream.send(b"x" * 100)
    pair.output.apply_settings(50, None)
    stream.send(b"y" * 10)
    assert sizes(pair.received()) == [(1, 100)]
    pair.output.widen(1, 60)
    assert sizes(pair.received()) == [(1, 10)]


def test_what_is_sent_after_the_end_is_dropped(pair: Pair) -> None:
    stream = pair.open(1)
    stream.end(b"trailers")
    stream.send(b"late")
    stream.end(b"again")
    assert [payload for _, _, payload in pair.received()] == [b"trailers"]


def test_what_one_thread_holds_leaves_together(pair: Pair) -> None:
    stream = pair.open(1)
    pair.output.hold()
    stream.send(b"a")
    stream.send(b"b")
    assert pair.received() == []
    pair.output.release()
    assert sizes(pair.received()) == [(1, 1), (1, 1)]


@pytest.mark.parametrize(("window", "frame"), [(1 << 31, None), (None, 100), (None, 1 << 24)])
def test_settings_out_of_range_are_an_error(pair: Pair, window: int | None, frame: int | None) -> None:
    pair.open(1)
    with pytest.raises(ProtocolError):
        pair.output.apply_settings(window, frame)
