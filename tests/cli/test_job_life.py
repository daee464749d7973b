"""Jobs of the local backend through the command line, with real processes."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

RunPw = Callable[..., Any]
StartPw = Callable[..., "subprocess.Popen[str]"]

pytestmark = pytest.mark.usefixtures("stop_jobs")


def submit(name: str, script: str, *flags: str) -> tuple[str, ...]:
    """Arguments of a job of one small slice that runs a line of shell."""
    job = ("--name", name, "--compute-type", "v6e:1x1", "--restarts", "0", "--grace-period", "5s")
    return ("job", "submit", *job, *flags, "--command", script)


def test_a_job_from_submit_to_delete(run_pw: RunPw, home: Path) -> None:
    submitted = run_pw(*submit("life", 'echo "hello from $PWD"'))
    assert submitted.code == 0, submitted.err
    assert submitted.out == "local://life\n"
    assert "pw job logs -f local://life" in submitted.err

    waited = run_pw("job", "wait", "life")
    assert waited.code == 0
    assert re.search(r"^job 'life' succeeded after \d+s$", waited.err, re.MULTILINE)
    status = json.loads(run_pw("job", "status", "--json").out)
    assert (status["ref"], status["state"], status["exit_code"]) == ("local://life", "Succeeded", 0)
    assert [job["ref"] for job in json.loads(run_pw("job", "list", "--json").out)] == ["local://life"]
    assert json.loads(run_pw("job", "list", "--json", "--status", "running").out) == []

    logs = run_pw("job", "logs", "life", "--container", "main")
    assert logs.code == 0
    assert logs.out.rstrip().endswith(f"/main | hello from {home}")
    lines = [json.loads(line) for line in run_pw("job", "logs", "life", "--json").out.splitlines()]
    assert {"main", "pathways-proxy", "pathways-rm"} <= {line["container"] for line in lines}

    shown = run_pw("job", "status", "life")
    assert "Succeeded" in shown.out and "SLICE" in shown.out and "pathways-worker" in shown.out

    cancelled = run_pw("job", "cancel", "life")
    assert cancelled.code == 0
    assert "stopping" not in cancelled.err
    assert json.loads(run_pw("job", "status", "life", "--json").out)["state"] == "Succeeded"

    assert run_pw("job", "delete", "life").code == 0
    gone = run_pw("job", "status", "life")
    assert gone.code == 1
    assert "'life'" in gone.err


def test_a_failed_job_gives_its_exit_code_and_its_last_lines(run_pw: RunPw) -> None:
    followed = run_pw(*submit("fails", "echo one; echo 'no such file' >&2; exit 7", "--follow"))
    assert followed.code == 7
    assert followed.out.startswith("local://fails\n")
    assert "/main | one\n" in followed.out and "/main | no such file\n" in followed.out
    assert "job 'fails' failed" in followed.err
    assert "/main | no such file" in followed.err
    assert "pw job logs local://fails" in followed.err

    for arguments in (["wait"], ["logs", "-f", "--container", "pathways-rm"]):
        result = run_pw("job", *arguments)
        assert result.code == 7
        assert "/main | no such file" in result.err
    assert run_pw("job", "logs", "-f", "fails").code == 7
    assert run_pw("job", "logs", "fails").code == 0


def test_a_name_in_use_is_refused_and_replace_takes_only_a_finished_one_s(run_pw: RunPw) -> None:
    assert run_pw(*submit("taken", "sleep 600")).code == 0
    for flags in ([], ["--replace"]):
        refused = run_pw(*submit("taken", "true", *flags))
        assert refused.code == 2
        assert refused.out == ""
        assert "'taken'" in refused.err
    assert json.loads(run_pw("job", "cancel", "--json").out)["state"] == "Cancelled"
    assert run_pw("job", "wait", "taken").code != 0
    assert run_pw(*submit("taken", "true")).code == 2
    awaited = run_pw(*submit("taken", "true", "--replace", "--await-job-completion"))
    assert awaited.code == 0
    assert "job 'taken' succeeded after" in awaited.err


def test_delete_of_a_running_job_is_refused(run_pw: RunPw) -> None:
    assert run_pw(*submit("busy", "sleep 600")).code == 0
    refused = run_pw("job", "delete", "busy")
    assert refused.code == 2
    assert json.loads(run_pw("job", "list", "--json").out)[0]["state"] in ("Pending", "Running")


def test_ctrl_c_in_follow_leaves_the_job_running_and_says_how_to_get_back(run_pw: RunPw, start_pw: StartPw) -> None:
    following = start_pw(*submit("goes-on", "echo ready; exec sleep 600", "--follow"))
    assert following.stdout is not None and following.stderr is not None
    assert any("/main | ready" in line for line in following.stdout)
    following.send_signal(signal.SIGINT)
    _, talk = following.communicate(timeout=30)
    assert following.returncode == 130
    assert "pw job logs -f local://goes-on" in talk
    assert "Traceback" not in talk
    assert json.loads(run_pw("job", "status", "goes-on", "--json").out)["state"] == "Running"


# Presses Ctrl-C, as often as its argument says, at the moment at which the controller starts.
INTERRUPTED_SUBMIT = """
import os, signal, sys
presses = int(sys.argv.pop(1))
def press(event, arguments):
    if event == "subprocess.Popen" and "pw.backends.local.controller" in arguments[1]:
        for _ in range(presses):
            os.kill(os.getpid(), signal.SIGINT)
sys.addaudithook(press)
from pw.__main__ import main
sys.exit(main())
"""


def test_ctrl_c_while_a_job_starts_is_held_back_until_its_reference_is_there(run_pw: RunPw) -> None:
    command = [sys.executable, "-c", INTERRUPTED_SUBMIT, "1", *submit("early", "sleep 600")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (130, "local://early\n")
    assert "job 'early' goes on" in done.stderr and "pw job cancel local://early" in done.stderr
    assert json.loads(run_pw("job", "status", "early", "--json").out)["state"] in ("Pending", "Running")


def test_a_second_ctrl_c_is_not_held_back(run_pw: RunPw) -> None:
    command = [sys.executable, "-c", INTERRUPTED_SUBMIT, "2", *submit("eager", "sleep 600")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (130, "")
    assert "job 'eager' may have started\n  pw job status eager" in done.stderr
    assert run_pw("job", "status", "eager").code in (0, 1)


def test_a_job_whose_reference_cannot_be_printed_is_told_of(run_pw: RunPw) -> None:
    with open("/dev/full", "w") as full:
        command = [sys.executable, "-m", "pw", *submit("untold", "sleep 600")]
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 1
    assert "job local://untold goes on" in done.stderr
    assert "error: cannot write to stdout" in done.stderr


def test_last_lines_that_were_just_seen_are_not_shown_again(run_pw: RunPw) -> None:
    assert run_pw(*submit("seen", "echo 'no such file'; exit 7", "--await-job-completion")).code == 7
    ours, its = pty.openpty()
    command = [sys.executable, "-m", "pw", "job", "logs", "-f", "seen"]
    with subprocess.Popen(command, stdout=its, stderr=its, env=os.environ | {"TERM": "dumb"}) as following:
        os.close(its)
        shown = b""
        with contextlib.suppress(OSError):  # EIO once nothing has the terminal open
            while more := os.read(ours, 1024):
                shown += more
        assert following.wait() == 7
    os.close(ours)
    assert shown.count(b"no such file") == 1
    assert b"job 'seen' failed" in shown


def test_sigterm_gives_the_terminal_its_cursor_back(run_pw: RunPw) -> None:
    assert run_pw(*submit("watched", "sleep 600")).code == 0
    ours, its = pty.openpty()
    command = [sys.executable, "-m", "pw", "job", "wait", "watched"]
    with subprocess.Popen(command, stdout=its, stderr=its, env=os.environ | {"TERM": "xterm"}) as waiting:
        os.close(its)
        shown = b""
        while b"\x1b[?25l" not in shown:
            shown += os.read(ours, 1024)
        waiting.terminate()
        with contextlib.suppress(OSError):  # EIO once nothing has the terminal open
            while more := os.read(ours, 1024):
                shown += more
        assert waiting.wait() == 128 + signal.SIGTERM
    os.close(ours)
    assert shown.rindex(b"\x1b[?25h") > shown.rindex(b"\x1b[?25l")


def test_a_timeout_ends_the_command_and_not_the_job(run_pw: RunPw) -> None:
    for flags in (["--timeout", "1s"], ["--timeout", "1s", "--follow", "--replace"]):
        name = f"slow-{len(flags)}"
        late = run_pw(*submit(name, "sleep 600", *flags))
        assert late.code == 124
        assert late.out.startswith(f"local://{name}\n")
        assert f"error: job '{name}' has not ended after 1s; it goes on" in late.err
        assert json.loads(run_pw("job", "status", name, "--json").out)["state"] in ("Pending", "Running")


@pytest.mark.parametrize("verb", ["status", "logs", "cancel", "wait", "delete"])
def test_without_any_job_the_newest_is_not_found(run_pw: RunPw, verb: str) -> None:
    result = run_pw("job", verb)
    assert result.code == 1
    assert result.err.startswith("error: there is no job")


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["list", "--status", "Done"], "Succeeded"),
        (["logs", "--since", "1y"], "--since"),
        (["logs", "--tail", "-1"], "--tail '-1': want a whole number, 0 or more"),
        (["logs", "--slice", "x"], "--slice 'x': want a whole number, 0 or more"),
        (["wait", "--timeout", "soon"], "--timeout"),
        (["status", "ssh://host/x"], "ssh"),
        (["status", "local://"], "local://"),
        (["status", "--backend", "gke", "local://x"], "--backend"),
        (["status", "../../etc"], "'../../etc'"),
    ],
)
def test_bad_input_of_the_other_verbs_is_refused(run_pw: RunPw, arguments: list[str], named: str) -> None:
    result = run_pw("job", *arguments)
    assert result.code == 2, result.err
    assert result.out == ""
    assert named in result.err
    assert result.err.count("error: ") == 1


@pytest.mark.parametrize("verb", ["status", "logs", "cancel", "wait", "delete"])
def test_a_reference_with_more_than_a_name_is_no_local_job(run_pw: RunPw, verb: str) -> None:
    result = run_pw("job", verb, "local://a/b")
    assert (result.code, result.out) == (2, "")
    assert "'local://a/b' is no local job" in result.err


def test_an_empty_list_is_empty(run_pw: RunPw) -> None:
    assert json.loads(run_pw("job", "list", "--json").out) == []
    assert run_pw("job", "list").err == "no jobs\n"
