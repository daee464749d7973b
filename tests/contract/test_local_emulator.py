"""A job as `plan` makes it, on the emulator: addresses, ports, slices. What JAX does with it is tests/emulator's."""

from __future__ import annotations

import os
import shlex
import signal
import socket
import sys
from collections.abc import Callable
from typing import Any

import psutil
import pytest

from pathways_runtime import _contract
from pw.backends.local import LocalBackend
from pw.backends.local.processes import LOCAL_CONTAINER
from pw.errors import BackendError
from pw.faults import HANG, Fault
from pw.specs import JobSpec
from pw.status import JobState, LogQuery, PodStatus

Saw = Callable[..., str]


def listens(address: str) -> bool:
    host, _, port = address.rpartition(":")
    with socket.socket() as probe:
        return probe.connect_ex((host, int(port))) == 0


def kill(pod: PodStatus, container: str) -> None:
    """SIGKILL to the main process of a container."""
    for process in psutil.process_iter():
        try:
            if process.environ().get(LOCAL_CONTAINER) == f"{pod.name}/{container}":
                os.kill(process.pid, signal.SIGKILL)
        except psutil.Error:
            continue


def test_a_job_finds_its_servers_and_a_lost_worker_returns(
    local: LocalBackend, saw: Saw, until: Callable[..., None]
) -> None:
    command = "echo target $JAX_BACKEND_TARGET; exec sleep 600"
    spec = JobSpec(name="emulated", compute_type="v6e:2x2", num_slices=2, command=command)
    ref = local.submit(local.plan(spec))
    target = saw(local, ref, "target ").removeprefix("target grpc://")
    with local.connect(ref, _contract.PROXY_PORT) as address:
        assert address == target
        assert listens(address)
    ready = _contract.LOG_SLICES_READY.format(ready=2, total=2)
    lines = local.logs(ref, LogQuery(follow=True, container=_contract.RESOURCE_MANAGER_CONTAINER))
    assert any(ready in line.text for line in lines)

    worker = next(pod for pod in local.get(ref).pods if pod.slice == 1)
    kill(worker, _contract.WORKER_CONTAINER)
    assert any(ready in line.text for line in lines)
    until(local, ref, lambda status: status.slices[1].state == "ready")
    assert [(slice.state, slice.restarts) for slice in local.get(ref).slices] == [("ready", 0), ("ready", 1)]
    local.cancel(ref)
    with pytest.raises(BackendError, match="is Cancelled"), local.connect(ref, _contract.PROXY_PORT):
        pass


def test_a_slice_that_hangs_longer_than_its_heartbeat_is_lost_and_returns(
    local: LocalBackend, until: Callable[..., None]
) -> None:
    flag = "--heartbeat_timeout_s=1"
    spec = JobSpec(name="hung", compute_type="v6e:1x1", pathways_headless=True, pathways_server_args=(flag,))
    ref = local.submit(local.plan(spec))
    until(local, ref, lambda status: status.slices[0].state == "ready")
    local.inject(ref, Fault(HANG, 0, 4))
    query = LogQuery(follow=True, container=_contract.RESOURCE_MANAGER_CONTAINER)
    assert any("slice 0 is down: host 0 is lost: no word for 1 s" in line.text for line in local.logs(ref, query))
    assert local.get(ref).slices[0].state == "hung"
    until(local, ref, lambda status: (status.slices[0].state, status.slices[0].restarts) == ("ready", 1))


def test_no_worker_of_a_job_that_has_succeeded_is_shown_as_failed(local: LocalBackend) -> None:
    spec = JobSpec(name="emulated", compute_type="v6e:1x1", num_slices=2, command="true")
    status = local.wait(local.submit(local.plan(spec)))
    assert status.state is JobState.SUCCEEDED
    assert [pod.phase for pod in status.pods] == ["Succeeded", "Stopped", "Stopped"]
    assert [(slice.state, slice.restarts) for slice in status.slices] == [("ended", 0), ("ended", 0)]


def test_a_killed_proxy_comes_back_at_its_address(local: LocalBackend, saw: Saw) -> None:
    spec = JobSpec(name="emulated", compute_type="v6e:1x1", command="exec sleep 600")
    ref = local.submit(local.plan(spec))
    query = LogQuery(follow=True, container=_contract.PROXY_CONTAINER)
    lines = (line for line in local.logs(ref, query) if _contract.LOG_PROXY_READY in line.text)
    next(lines)
    with local.connect(ref, _contract.PROXY_PORT) as before:
        kill(local.get(ref).pods[0], _contract.PROXY_CONTAINER)
        next(lines)
        assert listens(before)


def test_a_job_without_a_command_runs_until_it_is_cancelled(local: LocalBackend, saw: Saw) -> None:
    spec = JobSpec(name="headless", compute_type="v6e:1x1", pathways_headless=True)
    plan = local.plan(spec)
    assert any("headless" in note for note in plan.notes)
    ref = local.submit(plan)
    saw(local, ref, _contract.LOG_PROXY_READY, container=_contract.PROXY_CONTAINER)
    saw(local, ref, _contract.LOG_SLICES_READY.format(ready=1, total=1))
    local.cancel(ref)
    assert (local.get(ref).state, local.get(ref).exit_code) == (JobState.CANCELLED, None)


def test_a_scratch_folder_and_an_image_are_found_where_none_are_named(local: LocalBackend, settings: Any) -> None:
    plan = local.plan(JobSpec(name="plain", compute_type="v6e:1x1", command="true"))
    assert str(settings.state_dir / "jobs" / "plain" / "scratch") in str(plan.manifest)
    assert _contract.SHELL_IMAGE in str(plan.manifest)
    assert not settings.state_dir.exists()


COLOCATED = """
import pathways_runtime
pathways_runtime.initialize()
import jax, numpy
from jax.experimental import colocated_python

@colocated_python.colocated_python
def twice(x):
    return x * 2

host = colocated_python.colocated_cpu_devices(jax.devices())[0]
print("twice", numpy.asarray(twice(jax.device_put(numpy.arange(3), host))).tolist())
"""


def test_a_job_with_a_sidecar_image_runs_colocated_python(local: LocalBackend, saw: Saw) -> None:
    image = "registry.example/sidecar:1"
    command = f"{shlex.quote(sys.executable)} -c {shlex.quote(COLOCATED)}"
    spec = JobSpec(name="side", compute_type="v6e:1x1", command=command, pathways_colocated_python_sidecar_image=image)
    plan = local.plan(spec)
    assert any("colocated" in note and image in note for note in plan.notes)
    ref = local.submit(plan)
    assert saw(local, ref, "twice ") == "twice [0, 2, 4]"
    assert local.wait(ref, timeout_s=60).state == JobState.SUCCEEDED
    assert _contract.SIDECAR_CONTAINER not in {each.name for pod in local.get(ref).pods for each in pod.containers}
