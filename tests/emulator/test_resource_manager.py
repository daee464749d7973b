"""The resource manager as a process, with real workers and the link as a proxy uses it."""

from __future__ import annotations

import json
import os
import queue
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pathways_runtime.emulator import link
from pathways_runtime.emulator.follower import Follower
from pathways_runtime.emulator.slices import Slices

Spawn = Callable[..., Any]
TIMEOUT_S = 30.0
MANAGER = "pathways_runtime.emulator"
WORKER = "pathways_runtime.emulator.worker"


class Watcher:
    """A proxy that only watches."""

    def __init__(self, port: int, token: str = "") -> None:
        self._stop_reader, self._stop_writer = os.pipe()
        hello = link.Hello(link.VERSION, link.ROLE_PROXY, 0, 0, token)
        connection = link.connect(("127.0.0.1", port), hello, TIMEOUT_S, self._stop_reader)
        assert connection is not None
        self.welcome = connection.welcome
        self._connection = connection
        self._heard: queue.Queue[link.Message] = queue.Queue()
        self._thread = threading.Thread(target=connection.follow, args=(self._heard.put, self._stop_reader))
        self._thread.start()

    def next_state(self, index: int) -> link.SliceState:
        """The next state of this slice that comes."""
        while True:
            message = self._heard.get(timeout=TIMEOUT_S)
            if isinstance(message, link.SliceState) and message.slice == index:
                return message

    def close(self) -> None:
        os.write(self._stop_writer, b"x")
        self._thread.join()
        self._connection.close()
        os.close(self._stop_reader)
        os.close(self._stop_writer)


@pytest.fixture
def watch() -> Iterator[Callable[..., Watcher]]:
    watchers: list[Watcher] = []

    def start(port: int, token: str = "") -> Watcher:
        watchers.append(Watcher(port, token))
        return watchers[-1]

    yield start
    for watcher in watchers:
        watcher.close()


@pytest.fixture
def start_manager(spawn: Spawn) -> Callable[..., Any]:
    """Two slices of two hosts."""

    def start(*flags: str, port: int = 0) -> Any:
        manager = spawn(
            MANAGER,
            f"--server_port={port}",
            "--node_type=resource_manager",
            "--instance_type=tpuv6e:2x4",
            "--instance_count=2",
            *flags,
        )
        assert manager.port, manager.log.read_text()
        return manager

    return start


@pytest.fixture
def start_worker(spawn: Spawn) -> Callable[..., Any]:
    def start(port: int, index: int, host: int, *flags: str) -> Any:
        return spawn(
            WORKER,
            f"--resource_manager_address=127.0.0.1:{port}",
            *flags,
            environment={"MEGASCALE_SLICE_ID": str(index), "JOB_COMPLETION_INDEX": str(host)},
        )

    return start


def start_slice(start_worker: Callable[..., Any], port: int, index: int) -> list[Any]:
    return [start_worker(port, index, host) for host in range(2)]


def test_a_slice_is_up_once_all_its_hosts_are_there(
    start_manager: Spawn, start_worker: Spawn, watch: Callable[..., Watcher]
) -> None:
    manager = start_manager()
    start_worker(manager.port, 1, 0)
    watcher = watch(manager.port)
    assert not watcher.next_state(1).up
    start_worker(manager.port, 1, 1)
    assert watcher.next_state(1).up
    assert "*** 1/2 Pathways Slices Now Ready ***" in manager.log.read_text()


def test_the_welcome_says_what_is_emulated(start_manager: Spawn, watch: Callable[..., Watcher]) -> None:
    welcome = watch(start_manager("--first_device_id=144").port).welcome
    assert (welcome.instance_type, welcome.num_slices, welcome.first_device_id) == ("tpuv6e:2x4", 2, 144)


def test_a_killed_worker_takes_its_slice_down_and_its_return_begins_a_new_generation(
    start_manager: Spawn, start_worker: Spawn, watch: Callable[..., Watcher]
) -> None:
    manager = start_manager()
    _, victim = start_slice(start_worker, manager.port, 0)
    start_slice(start_worker, manager.port, 1)
    watcher = watch(manager.port)
    assert watcher.next_state(0).up
    assert watcher.next_state(1).up
    victim.process.kill()
    lost = watcher.next_state(0)
    assert (lost.up, lost.generation) == (False, 1)
    assert "host 1 is lost" in lost.reason
    start_worker(manager.port, 0, 1)
    back = watcher.next_state(0)
    assert (back.up, back.generation) == (True, 1)
    untouched = watch(manager.port).next_state(1)
    assert (untouched.up, untouched.generation) == (True, 0)


def test_a_worker_that_is_told_to_end_says_so_and_ends_with_the_code_of_the_signal(
    start_manager: Spawn, start_worker: Spawn, watch: Callable[..., Watcher]
) -> None:
    manager = start_manager()
    worker, _ = start_slice(start_worker, manager.port, 0)
    watcher = watch(manager.port)
    assert watcher.next_state(0).up
    worker.process.terminate()
    assert "SIGTERM" in watcher.next_state(0).reason
    assert worker.process.wait(TIMEOUT_S) == 128 + signal.SIGTERM


def test_a_stopped_worker_is_lost_when_its_time_is_over(
    start_manager: Spawn, start_worker: Spawn, watch: Callable[..., Watcher]
) -> None:
    manager = start_manager("--heartbeat_timeout_s=2")
    worker, _ = start_slice(start_worker, manager.port, 0)
    watcher = watch(manager.port)
    assert watcher.next_state(0).up
    worker.process.send_signal(signal.SIGSTOP)
    lost = watcher.next_state(0)
    assert (lost.up, lost.reason) == (False, "host 0 is lost: no word for 2 s")
    worker.process.send_signal(signal.SIGCONT)
    assert worker.process.wait(TIMEOUT_S) == 69


def test_a_second_worker_in_the_same_place_replaces_the_first(
    start_manager: Spawn, start_worker: Spawn, watch: Callable[..., Watcher]
) -> None:
    manager = start_manager()
    first, _ = start_slice(start_worker, manager.port, 0)
    watcher = watch(manager.port)
    assert watcher.next_state(0).up
    start_worker(manager.port, 0, 0)
    assert not watcher.next_state(0).up
    assert watcher.next_state(0).up
    assert first.process.wait(TIMEOUT_S) == 69


def test_workers_end_with_the_resource_manager(start_manager: Spawn, start_worker: Spawn) -> None:
    manager = start_manager()
    worker = start_worker(manager.port, 0, 0)
    manager.process.kill()
    assert worker.process.wait(TIMEOUT_S) == 69


def test_workers_wait_for_the_next_resource_manager_after_a_goodbye(
    start_manager: Spawn, start_worker: Spawn, watch: Callable[..., Watcher]
) -> None:
    manager = start_manager()
    workers = start_slice(start_worker, manager.port, 0)
    manager.process.terminate()
    assert manager.process.wait(TIMEOUT_S) == 128 + signal.SIGTERM
    again = start_manager(port=manager.port)
    watcher = watch(again.port)
    while not watcher.next_state(0).up:
        pass
    assert [worker.process.poll() for worker in workers] == [None, None]


def test_workers_that_wait_for_a_resource_manager_end_when_told_and_when_none_comes(
    start_manager: Spawn, start_worker: Spawn
) -> None:
    manager = start_manager("--heartbeat_timeout_s=1")
    told, patient = start_slice(start_worker, manager.port, 0)
    manager.process.terminate()
    manager.process.wait(TIMEOUT_S)
    told.process.terminate()
    assert told.process.wait(TIMEOUT_S) == 128 + signal.SIGTERM
    assert patient.process.wait(TIMEOUT_S) == 69
    assert "waiting 1 s for another" in patient.log.read_text()


def test_a_signal_ends_the_resource_manager_with_its_code(start_manager: Spawn) -> None:
    manager = start_manager()
    manager.process.send_signal(signal.SIGINT)
    assert manager.process.wait(TIMEOUT_S) == 128 + signal.SIGINT


def test_a_place_that_does_not_exist_is_refused(start_manager: Spawn, start_worker: Spawn) -> None:
    worker = start_worker(start_manager().port, 2, 0)
    assert worker.process.wait(TIMEOUT_S) == 69
    assert "slice 2 is not one of the 2 slices" in worker.log.read_text()


def test_without_the_token_nobody_comes_in(
    start_manager: Spawn, start_worker: Spawn, watch: Callable[..., Watcher], tmp_path: Path
) -> None:
    token_file = tmp_path / "token"
    token_file.write_text("secret\n")
    manager = start_manager("--host=0.0.0.0", f"--token_file={token_file}")
    with pytest.raises(link.RefusedError, match="token"):
        watch(manager.port, "Secret")
    assert start_worker(manager.port, 0, 0).port is None
    assert start_worker(manager.port, 0, 0, f"--token_file={token_file}").port is not None
    assert watch(manager.port, "secret").welcome.num_slices == 2


HELLO = {"kind": "hello", "version": 1, "role": "worker", "slice": 0, "host": 0, "token": ""}


NONSENSE = [
    b"\n",
    b"GET / HTTP/1.1\r\n",
    b"\xff\xfe\x00\n",
    b"[" * 9000 + b"\n",
    b"x" * 200_000,
    b"null\n",
    b'{"kind": "ping"}\n',
    b'{"kind": ["hello"]}\n',
    b'{"kind": "hello"}\n',
    json.dumps(HELLO | {"slice": -1}).encode() + b"\n",
    json.dumps(HELLO | {"slice": True}).encode() + b"\n",
    json.dumps(HELLO | {"host": 10**400}).encode() + b"\n",
    json.dumps(HELLO | {"role": "king"}).encode() + b"\n",
    json.dumps(HELLO | {"version": 2}).encode() + b"\n",
    json.dumps(HELLO | {"more": 1}).encode() + b"\n",
    json.dumps(HELLO).encode() + b"\n" + json.dumps(HELLO).encode() + b"\n",
]


def test_nonsense_ends_its_own_connection_and_nothing_else(
    start_manager: Spawn, start_worker: Spawn, watch: Callable[..., Watcher]
) -> None:
    manager = start_manager()
    start_slice(start_worker, manager.port, 1)
    watcher = watch(manager.port)
    assert watcher.next_state(1).up
    for line in NONSENSE:
        with socket.create_connection(("127.0.0.1", manager.port), timeout=TIMEOUT_S) as connection:
            connection.sendall(line)
            assert b'"refusal"' in read_to_the_end(connection), line[:80]
    after = watch(manager.port).next_state(1)
    assert (after.up, after.generation) == (True, 0)


def read_to_the_end(connection: socket.socket) -> bytes:
    answer = b""
    try:
        while data := connection.recv(4096):
            answer += data
    except ConnectionResetError:
        pass
    return answer


@given(st.binary())
def test_any_bytes_are_a_message_or_an_error_of_the_link(data: bytes) -> None:
    try:
        message = link.decode(data)
    except link.LinkError:
        return
    assert link.decode(link.encode(message)) == message


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(), lambda inner: st.lists(inner, max_size=3)
)


@given(st.dictionaries(st.sampled_from(["kind", *HELLO, "up", "generation", "reason", "message"]), json_values))
def test_any_json_is_a_message_or_an_error_of_the_link(values: dict[str, Any]) -> None:
    try:
        link.decode(json.dumps(values).encode())
    except link.LinkError:
        return


def test_a_proxy_sees_the_loss_of_the_resource_manager_and_follows_the_next_one(
    start_manager: Spawn, start_worker: Spawn
) -> None:
    manager = start_manager("--heartbeat_timeout_s=2")
    start_slice(start_worker, manager.port, 0)
    stop_reader, stop_writer = os.pipe()
    follower = Follower(("127.0.0.1", manager.port), "")
    topology = follower.connect(stop_reader)
    assert topology is not None
    slices = Slices(topology.num_slices)
    changes: queue.Queue[tuple[int, bool, str]] = queue.Queue()
    slices.subscribe(lambda *change: changes.put(change))
    thread = threading.Thread(target=follower.follow, args=(slices, stop_reader))
    thread.start()
    assert changes.get(timeout=TIMEOUT_S) == (0, True, "")
    stamp = slices.stamp([0])
    manager.process.kill()
    assert changes.get(timeout=TIMEOUT_S)[:2] == (0, False)
    start_manager("--heartbeat_timeout_s=2", port=manager.port)
    start_slice(start_worker, manager.port, 0)
    assert changes.get(timeout=TIMEOUT_S) == (0, True, "")
    assert slices.lost(stamp)
    os.write(stop_writer, b"x")
    thread.join(TIMEOUT_S)
    assert not thread.is_alive()
    os.close(stop_reader)
    os.close(stop_writer)
