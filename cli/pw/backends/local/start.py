"""Starting the controller of a job whose folder is there and whose lock is held."""

from __future__ import annotations

import os
import subprocess
import sys

from pathways_runtime import _contract
from pw.backends.local.cleanup import CONTROLLER_MODULE
from pw.backends.local.state import JobDir
from pw.errors import BackendError

_LAST_LINES = 5


def start_controller(job: JobDir, *, lock_fd: int, uid: str) -> None:
    """Starts it and returns once it has reported; from then on it holds the lock of `lock_fd`.

    Raises BackendError, with the last lines of its log, when it ends instead.
    """
    report_fd, its_report_fd = os.pipe()
    with open(report_fd, "rb") as report:
        try:
            _spawn(job, lock_fd, its_report_fd, uid)
        finally:
            os.close(its_report_fd)
        if report.read() != b"ok":
            raise BackendError(
                f"the controller of job {job.name!r} did not start", hints=(*_last_lines(job), str(job.controller_log))
            )


def _spawn(job: JobDir, lock_fd: int, report_fd: int, uid: str) -> None:
    arguments = [str(job.path.absolute()), str(lock_fd), str(report_fd)]
    # Not that of a job that this command may run in: its end is not this job's.
    env = os.environ | {_contract.LOCAL_JOB_UID: uid}
    env.pop(_contract.READY_FD, None)
    with job.controller_log.open("ab") as log:
        # The folder of the job, so that nothing in the user's folder is imported in place of a module.
        subprocess.run(
            [sys.executable, "-m", CONTROLLER_MODULE, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            cwd=job.path,
            env=env,
            pass_fds=(lock_fd, report_fd),
            start_new_session=True,
            check=False,
        )


def _last_lines(job: JobDir) -> list[str]:
    return job.controller_log.read_text(encoding="utf-8", errors="replace").splitlines()[-_LAST_LINES:]
