"""Profiles as pathwaysutils asks for them: the file of the proxy server's side."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from pathwaysutils import profiling
from pathwaysutils.plugin_executable import PluginExecutable

from pathways_runtime.emulator.profiles import Profile

# pathwaysutils 0.1.13 uses names that jax 0.10 is about to drop.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")
FILE = "pathways-proxy.xplane.pb"


def options_of(session_id: str) -> jax.profiler.ProfileOptions:
    options = jax.profiler.ProfileOptions()
    options.session_id = session_id
    options.host_tracer_level = 3
    return options


def start(folder: Path, options: jax.profiler.ProfileOptions | None = None) -> None:
    """As `pathwaysutils.profiling.start_trace` does, which wants a bucket for the client's own file."""
    profiling._start_pathways_trace_from_profile_request(profiling._create_profile_request(folder, options))


def stop() -> None:
    try:
        profiling._profile_state.call_profile_executable()
    finally:
        profiling._profile_state.reset()


def compute(devices: list[jax.Device]) -> None:
    function = jax.jit(lambda x: jnp.sin(x).sum())
    function(jax.device_put(jnp.arange(1000.0), devices[-1])).block_until_ready()


def test_a_profile_shows_what_the_server_computed(devices: list[jax.Device], tmp_path: Path) -> None:
    start(tmp_path, options_of("the_run"))
    compute(devices)
    stop()
    [file] = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert file == tmp_path / "plugins" / "profile" / "the_run" / FILE
    assert b"Execute" in file.read_bytes()


def test_a_run_without_a_name_is_named_after_its_time(devices: list[jax.Device], tmp_path: Path) -> None:
    for _ in range(2):
        start(tmp_path)
        stop()
    assert {path.name for path in tmp_path.rglob("*") if path.is_file()} == {FILE}


def test_one_profile_at_a_time(devices: list[jax.Device], tmp_path: Path) -> None:
    request = json.dumps({"profileRequest": profiling._create_profile_request(tmp_path / "second")})
    start(tmp_path / "first")
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"FAILED_PRECONDITION.*only one"):
        PluginExecutable(request).call()[1].result()
    stop()
    assert [path.name for path in tmp_path.iterdir()] == ["first"]


def test_a_profile_that_nobody_ends_is_not_in_the_way_of_the_next(devices: list[jax.Device], tmp_path: Path) -> None:
    request = json.dumps({"profileRequest": profiling._create_profile_request(tmp_path / "forgotten")})
    PluginExecutable(request).call()[1].result()  # the client lets go of it at once
    start(tmp_path / "kept")
    stop()
    assert [path.name for path in tmp_path.iterdir()] == ["kept"]


def test_a_profile_ends_by_itself_after_its_longest_time(tmp_path: Path) -> None:
    profile = Profile({"traceLocation": str(tmp_path), "maxDurationSecs": 0.01})
    profile.start()
    for thread in threading.enumerate():
        if isinstance(thread, threading.Timer):
            thread.join()
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == [FILE]
    profile.stop()


@pytest.mark.parametrize(("folder", "session"), [("relative", "run"), ("/tmp", "../up"), ("/tmp", "a/b")])
def test_a_profile_elsewhere_is_refused(devices: list[jax.Device], folder: str, session: str) -> None:
    with pytest.raises(jax.errors.JaxRuntimeError, match="INVALID_ARGUMENT"):
        start(Path(folder), options_of(session))
