"""Clients that nobody asked in, that want too much, or that vanish: the emulator as a process, and who it serves."""

from __future__ import annotations

import resource
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import grpc
import pytest

from pathways_runtime import _contract
from pathways_runtime.emulator import schema, wire
from pathways_runtime.emulator.status import CODES

SERVICE: Final = "/xla.ifrt.proxy.GrpcIfrtService/"
SESSION_METADATA: Final = "ifrt-proxy-grpc-ifrt-session-metadata-bin"
STORE_METADATA: Final = "ifrt-proxy-grpc-host-buffer-store-metadata-bin"
TIMEOUT_S: Final = 30
TOKEN: Final = "open-sesame"
StoreRequest: Final = schema.load().message("xla.ifrt.proxy.GrpcHostBufferStoreRequest")

# Without the token, with a wrong one, and with the right one, in one process.
SCRIPT: Final = """
import logging, os, time
import pathways_runtime
for token in [None, "wrong-secret", "open-sesame\\n"]:
    os.environ.pop("PATHWAYS_PROXY_TOKEN", None)
    if token is not None:
        os.environ["PATHWAYS_PROXY_TOKEN"] = token
    started = time.monotonic()
    try:
        pathways_runtime.initialize()
    except pathways_runtime.PathwaysError as error:
        print("refused" if time.monotonic() - started < 10 else "late", error)
import jax
print(jax.numpy.arange(3) + 1)
"""


@pytest.fixture(scope="module")
def guarded(start_emulator: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """An emulator on loopback that asks for a token all the same."""
    token_file: Path = tmp_path_factory.mktemp("token") / "token"
    token_file.write_text(TOKEN + "\n")
    return start_emulator("--instance_type=tpuv6e:1x1", "--instance_count=1", f"--token_file={token_file}")


@pytest.fixture(scope="module")
def lonely(start_emulator: Any) -> Any:
    """An emulator that asks for none, and that other tests do not use."""
    return start_emulator("--instance_type=tpuv6e:1x1", "--instance_count=1")


@pytest.fixture
def channel(lonely: Any) -> Iterator[grpc.Channel]:
    with connect(lonely) as channel:
        yield channel


def connect(emulator: Any) -> grpc.Channel:
    # A channel of its own: others of this process would share the connection.
    options = [("grpc.use_local_subchannel_pool", 1)]
    return grpc.insecure_channel(emulator.target.removeprefix("grpc://"), options=options)


def ask_init(channel: grpc.Channel, token: bytes | None = None) -> Any:
    metadata = wire.SessionMetadata()
    if token is not None:
        metadata.initialization_data.attributes[_contract.TOKEN_ATTRIBUTE].string_value = token
    requests = iter([wire.Request(init_request={}).SerializeToString()])
    call = channel.stream_stream(SERVICE + "IfrtSession")
    answers = call(requests, metadata=((SESSION_METADATA, metadata.SerializeToString()),), timeout=TIMEOUT_S)
    return wire.Response.FromString(next(answers))


def store(channel: grpc.Channel, session_id: int, size: int, data: bytes) -> None:
    metadata = wire.StoreMetadata(session_id=session_id, handle=1, buffer_size=size).SerializeToString()
    messages = iter([StoreRequest(data=data).SerializeToString()])
    call = channel.stream_unary(SERVICE + "HostBufferStore")
    call(messages, metadata=((STORE_METADATA, metadata),), timeout=TIMEOUT_S)


def test_initialize_sends_the_token_and_is_told_at_once_where_it_is_wrong(guarded: Any) -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        env=guarded.client_environment,
        capture_output=True,
        text=True,
        timeout=100,
        check=True,
    )
    missing, wrong, result = done.stdout.splitlines()
    assert missing.startswith("refused") and "has no token: set PATHWAYS_PROXY_TOKEN" in missing
    assert wrong.startswith("refused") and "has the wrong token: set PATHWAYS_PROXY_TOKEN" in wrong
    assert result == "[1 2 3]"
    said = done.stdout + done.stderr + guarded.log.read_text()
    assert TOKEN not in said
    assert "wrong-secret" not in said


@pytest.mark.parametrize("token", [None, b"", b"open-sesam", b"open-sesame\0", b"\xff"])
def test_a_session_without_the_token_gets_an_answer_that_says_so(guarded: Any, token: bytes | None) -> None:
    with connect(guarded) as channel:
        status = ask_init(channel, token).response_metadata.status
        assert status.code == CODES["UNAUTHENTICATED"]
        assert ask_init(channel, TOKEN.encode()).response_metadata.status.code == 0


def test_who_does_not_know_a_sessions_id_cannot_reach_its_buffers(lonely: Any, channel: grpc.Channel) -> None:
    ids = {ask_init(channel).init_response.session_id for _ in range(20)}
    assert len(ids) == 20
    assert min(ids) > 1 << 40, "an id can be guessed"
    assert not [session_id for session_id in ids if str(session_id) in lonely.log.read_text()]
    for guess in (0, 1, 20, (1 << 64) - 1):
        with pytest.raises(grpc.RpcError) as refused:
            store(channel, guess, 4, b"1234")
        assert refused.value.code() == grpc.StatusCode.NOT_FOUND
        with pytest.raises(grpc.RpcError) as refused:
            request = wire.LookupRequest(session_id=guess, handle=1).SerializeToString()
            next(channel.unary_stream(SERVICE + "HostBufferLookup")(request, timeout=TIMEOUT_S))
        assert refused.value.code() == grpc.StatusCode.NOT_FOUND


def test_a_thousand_sessions_at_once(channel: grpc.Channel) -> None:
    request = wire.Request(init_request={}).SerializeToString()
    open_session = channel.stream_stream(SERVICE + "IfrtSession")
    ends = threading.Event()

    def requests() -> Iterator[bytes]:
        yield request
        ends.wait()

    answers = [open_session(requests(), timeout=TIMEOUT_S) for _ in range(1000)]
    assert len({wire.Response.FromString(next(answer)).init_response.session_id for answer in answers}) == 1000
    assert ask_init(channel).response_metadata.status.code == 0
    ends.set()
    assert [list(answer) for answer in answers] == [[]] * 1000


def test_connections_beyond_the_processs_limit_keep_nobody_out_for_long(start_emulator: Any) -> None:
    emulator = start_emulator("--instance_type=tpuv6e:1x1", "--instance_count=1")
    with connect(emulator) as channel:
        assert ask_init(channel).response_metadata.status.code == 0  # jax has opened all its files
    resource.prlimit(emulator.process.pid, resource.RLIMIT_NOFILE, (100, 100))
    host, _, port = emulator.target.removeprefix("grpc://").rpartition(":")
    peers = [socket.create_connection((host, int(port)), timeout=TIMEOUT_S) for _ in range(200)]
    with connect(emulator) as channel:
        assert ask_init(channel).response_metadata.status.code == 0
    assert "could not be accepted" in emulator.log.read_text()
    for peer in peers:
        peer.close()
    with connect(emulator) as channel:
        assert ask_init(channel).response_metadata.status.code == 0
