"""Backends with nothing in them, and JobSets of shell commands for them to run."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from pathways_runtime import _contract
from pw.backends import Backend
from pw.backends.local import LocalBackend
from pw.backends.local.events import watch
from pw.config import Settings
from pw.expansion import escape
from pw.specs import JobSpec, Plan
from pw.status import JobRef, JobStatus, LogQuery

Object = dict[str, Any]
BACKOFF_S = 0.02
PLACES = (("state.json", "event_port"), ("job.json", "uid"))


@dataclasses.dataclass(frozen=True)
class Make:
    """JobSets in a few words."""

    @staticmethod
    def sh(script: str, name: str = "main", **fields: Any) -> Object:
        """A container that runs a shell script."""
        return {"name": name, "image": _contract.SHELL_IMAGE, "command": ["bash", "-c", escape(script)], **fields}

    @classmethod
    def sidecar(cls, script: str, name: str, **fields: Any) -> Object:
        return cls.sh(script, name, restartPolicy="Always", **fields)

    @staticmethod
    def job(
        *containers: Object,
        name: str = "main",
        init: tuple[Object, ...] = (),
        policy: str = "Never",
        replicas: int = 1,
        hosts: int = 1,
        grace_s: int = 5,
        **fields: Any,
    ) -> Object:
        """A replicated job of Indexed Jobs."""
        pod: Object = {"restartPolicy": policy, "terminationGracePeriodSeconds": grace_s}
        pod |= {"containers": list(containers)} | ({"initContainers": list(init)} if init else {})
        job = {"completionMode": "Indexed", "completions": hosts, "parallelism": hosts, "backoffLimit": 0} | fields
        return {"name": name, "replicas": replicas, "template": {"spec": job | {"template": {"spec": pod}}}}

    @staticmethod
    def jobset(*jobs: Object, name: str = "job", **spec: Any) -> Plan:
        """A plan whose manifest has these replicated jobs."""
        manifest = {
            "apiVersion": "jobset.x-k8s.io/v1alpha2",
            "kind": "JobSet",
            "metadata": {"name": name},
            "spec": {"replicatedJobs": list(jobs), **spec},
        }
        spec_of_job = JobSpec(name=name, compute_type="v6e-8", command="true")
        return Plan(backend="local", spec=spec_of_job, manifest=manifest)

    @classmethod
    def command(cls, script: str, name: str = "job", **fields: Any) -> Plan:
        """A plan with one container that runs a shell script."""
        return cls.jobset(cls.job(cls.sh(script), **fields), name=name)


@pytest.fixture
def make() -> Make:
    return Make()


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return Settings(state_dir=tmp_path / "state", local_backoff_s=BACKOFF_S)


@pytest.fixture
def local(settings: Settings) -> Iterator[LocalBackend]:
    """A local backend. Whatever a test leaves running is ended, and a process that survives that is an error."""
    backend = LocalBackend(settings)
    yield backend
    for status in backend.list():
        backend.cancel(status.ref)
        backend.wait(status.ref)
    assert not strays(settings.state_dir)


def strays(state_dir: Path) -> list[str]:
    """Command lines of live processes of any job under `state_dir`."""
    uids = {path.read_text() for path in state_dir.glob("jobs/*/job.json")}
    found = []
    for process in psutil.process_iter():
        try:
            uid = process.environ().get(_contract.LOCAL_JOB_UID)
            if uid and any(uid in text for text in uids):
                found.append(" ".join(process.cmdline()))
        except psutil.Error:
            continue
    return found


@pytest.fixture(params=["local"])
def backend(request: pytest.FixtureRequest) -> Backend:
    """Each backend that can run shell commands."""
    chosen: Backend = request.getfixturevalue(request.param)
    return chosen


@pytest.fixture
def saw() -> Callable[..., str]:
    """`saw(backend, ref, text)` waits for a line that contains `text`, and returns it."""

    def wait(backend: Backend, ref: JobRef, text: str, **query: Any) -> str:
        for line in backend.logs(ref, LogQuery(follow=True, **query)):
            if text in line.text:
                return line.text
        pytest.fail(f"{ref} ended without a line with {text!r}: {backend.get(ref)}")

    return wait


@pytest.fixture
def until(settings: Settings) -> Callable[..., None]:
    """`until(backend, ref, is_so)` waits until `is_so(status)` holds, looking at each change of the local job."""

    def wait(backend: Backend, ref: JobRef, is_so: Callable[[JobStatus], bool]) -> None:
        folder = settings.state_dir / "jobs" / ref.name
        port, uid = (json.loads((folder / name).read_text())[key] for name, key in PLACES)
        with watch(port, uid) as changes:
            while not is_so(backend.get(ref)):
                assert changes is not None and changes.wait(), backend.get(ref)

    return wait
