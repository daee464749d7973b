"""`pathways_runtime.initialize()` in processes of their own, since JAX's backends are made once in a process."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

import pathways_runtime
from pathways_runtime import _contract

Run = Callable[..., subprocess.CompletedProcess[str]]

INITIALIZE = "import pathways_runtime\nprint(pathways_runtime.initialize())\n"
COUNT_DEVICES = "import jax\nprint(len(jax.devices()), jax.process_index(), jax.local_devices() == jax.devices())\n"


def environment(**variables: str) -> dict[str, str]:
    """This process's environment, with these variables alone for JAX and Pathways."""
    prefixes = ("JAX_", "PATHWAYS_", "IFRT_PROXY_", "XLA_")
    return {k: v for k, v in os.environ.items() if not k.startswith(prefixes)} | variables


def run(script: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", script], env=environment(**variables), capture_output=True, text=True, timeout=60
    )


@pytest.fixture
def on_emulator(emulator: Any) -> Run:
    """Runs a script whose environment names the emulator, as the manifest does it."""

    def run_there(script: str, **variables: str) -> subprocess.CompletedProcess[str]:
        return run(script, **{"JAX_PLATFORMS": "proxy,cpu", "JAX_BACKEND_TARGET": emulator.target} | variables)

    return run_there


@pytest.fixture
def silence() -> Iterator[socket.socket]:
    """Holds a port at which nothing listens."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        yield held


def test_the_public_surface() -> None:
    public = {name for name in vars(pathways_runtime) if not name.startswith("_")} | {"__version__"}
    modules = {name for name in public if f"pathways_runtime.{name}" in sys.modules}
    assert set(pathways_runtime.__all__) == public - modules


def test_importing_the_runtime_imports_no_jax() -> None:
    result = run(
        "import sys, pathways_runtime\nprint([m for m in sys.modules if m.startswith(('jax', 'numpy', 'grpc'))])"
    )
    assert result.stdout == "[]\n"


def test_jax_sees_every_device_as_its_own(on_emulator: Run) -> None:
    result = on_emulator(INITIALIZE + COUNT_DEVICES)
    assert result.stdout == "True\n8 0 True\n", result.stderr


def test_jax_keeps_no_compilation_cache_of_its_own(on_emulator: Run) -> None:
    result = on_emulator(INITIALIZE + "import jax\nprint(jax.config.jax_enable_compilation_cache)\n")
    assert result.stdout == "True\nFalse\n", result.stderr


def test_a_second_call_does_nothing(on_emulator: Run) -> None:
    script = (
        "import jax\nbefore = jax.devices()\n"
        + INITIALIZE
        + "print(jax.devices() is not None, before == jax.devices())\n"
    )
    result = on_emulator(INITIALIZE + script)
    assert result.stdout == "True\nTrue\nTrue True\n", result.stderr


def test_the_end_of_a_script_is_quiet(on_emulator: Run) -> None:
    result = on_emulator(INITIALIZE + COUNT_DEVICES)
    assert not [word for word in ("disconnected", "Stack trace", "Traceback") if word in result.stderr]


def test_devices_come_back_after_jax_drops_its_backends(on_emulator: Run) -> None:
    drop = "import jax.extend.backend\njax.clear_caches()\njax.extend.backend.clear_backends()\n"
    result = on_emulator(INITIALIZE + COUNT_DEVICES + drop + COUNT_DEVICES)
    assert result.stdout == "True\n" + 2 * "8 0 True\n", result.stderr


@pytest.mark.parametrize("platforms", ["cpu", ""])
def test_without_a_proxy_it_warns_once_and_jax_is_as_it_was(platforms: str) -> None:
    result = run(INITIALIZE + INITIALIZE + COUNT_DEVICES, JAX_PLATFORMS=platforms, JAX_NUM_CPU_DEVICES="2")
    assert result.stdout == "False\nFalse\n2 0 True\n"
    assert result.stderr.count("not on Pathways") == 1
    assert "JAX_PLATFORMS=proxy" in result.stderr


def test_a_platform_that_is_only_named_alike_is_no_proxy() -> None:
    result = run("import pathways_runtime\nprint(pathways_runtime.is_pathways())", JAX_PLATFORMS="cpu,my_proxy")
    assert result.stdout == "False\n"


def test_a_variable_that_is_set_after_importing_jax_is_pointed_out() -> None:
    result = run("import os, jax\nos.environ['JAX_PLATFORMS'] = 'proxy'\n" + INITIALIZE, JAX_PLATFORMS="cpu")
    assert result.stdout == "False\n"
    assert "JAX_PLATFORMS=proxy was set too late: set it before jax is imported" in result.stderr


def test_a_call_after_jax_made_its_devices_is_an_error() -> None:
    late = "import jax\njax.devices()\njax.config.update('jax_platforms', 'proxy')\n"
    result = run(late + INITIALIZE, JAX_PLATFORMS="cpu", JAX_BACKEND_TARGET="grpc://127.0.0.1:1")
    assert result.returncode == 1
    assert "pathways_runtime.PathwaysError: JAX already made its devices, without Pathways" in result.stderr
    assert "before jax.devices()" in result.stderr


def test_a_missing_target_is_an_error() -> None:
    result = run(INITIALIZE, JAX_PLATFORMS="proxy")
    assert result.returncode == 1
    assert "JAX_BACKEND_TARGET is not set: set it to the proxy's address" in result.stderr


def test_malformed_targets_and_timeouts_are_errors_that_show_them() -> None:
    targets = "127.0.0.1:1 http://h:1 grpc:// grpc://h grpc://:1 grpc://h:0 grpc://h:x grpc://h:70000 grpc://h:1/p grpc://[::1:1"
    timeouts = "2x 0 -1 1.5"
    script = f"""
import os, jax, pathways_runtime
def attempt():
    try:
        print(pathways_runtime.initialize())
    except pathways_runtime.PathwaysError as error:
        print(error)
for target in {targets.split()!r}:
    jax.config.update("jax_backend_target", target)
    attempt()
jax.config.update("jax_backend_target", "grpc://127.0.0.1:1")
for timeout in {timeouts.split()!r}:
    os.environ["PATHWAYS_PROXY_CONNECTION_TIMEOUT_SECS"] = timeout
    attempt()
"""
    result = run(script, JAX_PLATFORMS="proxy")
    expected = [f"JAX_BACKEND_TARGET={target!r} is not grpc://HOST:PORT" for target in targets.split()]
    expected += [f"PATHWAYS_PROXY_CONNECTION_TIMEOUT_SECS={timeout!r} is not a whole" for timeout in timeouts.split()]
    for line, beginning in zip(result.stdout.splitlines(), expected, strict=True):
        assert line.startswith(beginning)


def test_a_proxy_that_does_not_answer_is_an_error_and_the_next_call_can_succeed(
    on_emulator: Run, silence: socket.socket
) -> None:
    first = f"grpc://127.0.0.1:{silence.getsockname()[1]}"
    script = f"""
import os, jax, pathways_runtime
good = os.environ["JAX_BACKEND_TARGET"]
jax.config.update("jax_backend_target", {first!r})
for target in ({first!r}, {first!r}, good, good):
    jax.config.update("jax_backend_target", target)
    try:
        print(pathways_runtime.initialize())
    except pathways_runtime.PathwaysError as error:
        print(error)
"""
    result = on_emulator(script + COUNT_DEVICES, PATHWAYS_PROXY_CONNECTION_TIMEOUT_SECS="1")
    lines = result.stdout.splitlines()
    assert all(f"no Pathways proxy answers at {first} (JAX_BACKEND_TARGET) within 1 s" in line for line in lines[:2])
    assert lines[2:] == ["True", "True", "8 0 True"], result.stderr


def test_it_waits_for_a_proxy_that_comes_later(start_emulator: Any, silence: socket.socket) -> None:
    port = silence.getsockname()[1]
    variables = {"JAX_PLATFORMS": "proxy", "JAX_BACKEND_TARGET": f"grpc://127.0.0.1:{port}"}
    with subprocess.Popen(
        [sys.executable, "-c", INITIALIZE + COUNT_DEVICES],
        env=environment(**variables),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as client:
        assert client.stderr is not None
        assert any("waiting up to 120 s for the Pathways proxy" in line for line in client.stderr)
        silence.close()
        start_emulator("--instance_type=tpuv6e:1x1", "--instance_count=1", port=port)
        output, errors = client.communicate(timeout=60)
    assert output == "True\n1 0 True\n", errors


def test_refused_credentials_are_explained_at_once(on_emulator: Run) -> None:
    result = on_emulator(INITIALIZE, IFRT_PROXY_USE_INSECURE_GRPC_CREDENTIALS="false")
    assert result.returncode == 1
    assert (
        "refused this client: Invalid credentials. Set IFRT_PROXY_USE_INSECURE_GRPC_CREDENTIALS=true" in result.stderr
    )


def test_a_proxy_that_is_not_the_first_platform_is_a_warning(on_emulator: Run) -> None:
    result = on_emulator(INITIALIZE + COUNT_DEVICES, JAX_PLATFORMS="cpu,proxy", JAX_NUM_CPU_DEVICES="3")
    assert result.stdout == "True\n3 0 True\n"
    assert "the first of its platforms (cpu,proxy) unless told otherwise: put proxy first" in result.stderr


def test_a_server_of_another_jax_version_is_a_warning(on_emulator: Run) -> None:
    result = on_emulator(
        "import jax\nactual, jax.__version__ = jax.__version__, '0.1.2'\n" + INITIALIZE + "print(actual)"
    )
    answer, actual = result.stdout.split()
    assert answer == "True"
    assert f"the Pathways proxy is of jax {actual}, this client of jax 0.1.2" in result.stderr
    assert "images tagged jax-0.1.2" in result.stderr


@pytest.fixture(params=["INVALID_ARGUMENT", "FAILED_PRECONDITION"])
def proxy_of_the_future(request: pytest.FixtureRequest) -> Iterator[str]:
    """The address of a server that, like Pathways, refuses to talk to a client whose protocol it no longer knows."""
    import grpc

    code = grpc.StatusCode[request.param]

    def refuse(message: bytes, context: Any) -> bytes:
        context.abort(code, "no common protocol version; client: 16 to 25, server: 90 to 99")
        return b""

    handlers = {"GetVersion": grpc.unary_unary_rpc_method_handler(refuse)}
    with ThreadPoolExecutor(2) as pool:
        server = grpc.server(pool)
        service = grpc.method_handlers_generic_handler("xla.ifrt.proxy.GrpcIfrtService", handlers)
        server.add_generic_rpc_handlers((service,))
        port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        yield f"grpc://127.0.0.1:{port}"
        server.stop(None).wait()


def test_a_protocol_that_does_not_fit_is_an_error_at_once_with_both_versions(proxy_of_the_future: str) -> None:
    result = run(
        "import jax\nprint(jax.__version__, flush=True)\n" + INITIALIZE,
        JAX_PLATFORMS="proxy",
        JAX_BACKEND_TARGET=proxy_of_the_future,
    )
    version = result.stdout.strip()
    assert "pathways_runtime.VersionMismatchError" in result.stderr
    assert f"this client (jax {version})" in result.stderr
    assert "client: 16 to 25, server: 90 to 99" in result.stderr
    assert f"Use images tagged jax-{version}" in result.stderr


PATHWAYSUTILS = "import pathwaysutils\npathwaysutils.initialize()\n"


@pytest.mark.parametrize(
    "script",
    [
        INITIALIZE + PATHWAYSUTILS + COUNT_DEVICES,
        PATHWAYSUTILS + INITIALIZE + COUNT_DEVICES,
        PATHWAYSUTILS + "import jax\njax.devices()\n" + INITIALIZE + COUNT_DEVICES,
    ],
    ids=["before", "after", "after first use"],
)
def test_it_goes_together_with_pathwaysutils(on_emulator: Run, script: str) -> None:
    result = on_emulator(script, **{_contract.INSECURE_CREDENTIALS: "true"})
    assert result.stdout == "True\n8 0 True\n", result.stderr


def test_only_one_session_is_left_when_pathwaysutils_takes_over(on_emulator: Run) -> None:
    script = INITIALIZE + PATHWAYSUTILS + "import os\nos.write(2, b'now\\n')\nos._exit(0)\n"
    result = on_emulator(script, **{_contract.INSECURE_CREDENTIALS: "true"})
    assert "IFRT proxy server disconnected" in result.stderr.partition("now\n")[0]
