"""Pathways reads and writes in Cloud Storage: here in what stands in for it, over HTTP."""

from __future__ import annotations

import http.server
import json
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, unquote, urlsplit

import pytest

TIMEOUT_S = 60.0

CLIENT = """
import datetime, sys
import numpy as np
import pathwaysutils
pathwaysutils.initialize()
import jax
from pathwaysutils import profiling
from pathwaysutils.persistence import helper

place, timeout = "gs://my-bucket/some folder", datetime.timedelta(seconds=30)
mesh = jax.sharding.Mesh(np.array(jax.devices()), ("chip",))
sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("chip"))
values = np.arange(8, dtype=np.float32)
profiling._start_pathways_trace_from_profile_request(profiling._create_profile_request(place))
helper.write_arrays(place, ["weights"], [jax.device_put(values, sharding)], timeout).result()
[found], done = helper.read_arrays(place, ["weights"], [values.dtype], [(8,)], [sharding], mesh.devices, timeout)
done.result()
profiling._profile_state.call_profile_executable()
sys.exit(not np.array_equal(np.asarray(found), values))
"""


class Bucket(http.server.ThreadingHTTPServer):
    """As much of Cloud Storage as takes and gives objects. Safe to read once the client has ended."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.objects: dict[str, bytes] = {}


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Bucket

    def do_GET(self) -> None:
        path = urlsplit(self.path).path
        if path == "/storage/v1/b/my-bucket/o":
            self._answer(200, b"{}")  # nothing is there before the test
        else:
            contents = self.server.objects.get(unquote(path.removeprefix("/storage/v1/b/my-bucket/o/")))
            self._answer(200 if contents is not None else 404, contents or b"")

    def do_POST(self) -> None:
        name = dict(parse_qsl(urlsplit(self.path).query))["name"]
        self.server.objects[name] = self.rfile.read(int(self.headers["Content-Length"]))
        self._answer(200, json.dumps({"name": name, "generation": "1"}).encode())

    def _answer(self, code: int, body: bytes) -> None:
        self.send_response(code)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("x-goog-generation", "1")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        """Says nothing."""


@pytest.fixture
def bucket() -> Iterator[Bucket]:
    with Bucket() as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


def test_arrays_and_profiles_go_to_a_bucket(
    spawn: Callable[..., Any], emulator: Any, bucket: Bucket, tmp_path: Path
) -> None:
    host = {"STORAGE_EMULATOR_HOST": f"http://127.0.0.1:{bucket.server_port}"}
    server = spawn(
        *("pathways_runtime.emulator", "--server_port=0", "--instance_type=tpuv6e:2x2", "--instance_count=1"),
        environment=host,
    )
    finished = subprocess.run(
        [sys.executable, "-c", CLIENT],
        env=emulator.client_environment | {"JAX_BACKEND_TARGET": f"grpc://127.0.0.1:{server.port}"},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert finished.returncode == 0, finished.stderr
    names = sorted(bucket.objects)
    assert names[1:] == [f"some folder/weights/{name}" for name in (".zarray", "0", "1", "2", "3")]
    assert names[0].startswith("some folder/plugins/profile/") and names[0].endswith("/pathways-proxy.xplane.pb")
