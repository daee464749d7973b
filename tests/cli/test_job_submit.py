"""`pw job submit` up to the moment at which something starts."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

RunPw = Callable[..., Any]
BASE = ("job", "submit", "--name", "digits", "--compute-type", "v6e-8")
COMMAND = ("--", "true")
GKE = ("--backend", "gke", "--cluster", "c", "--location", "us-central1", "--project", "p")


def started(home: Path) -> bool:
    return any((home / "state").rglob("*"))


REFUSED = {
    "unknown shape": (["--compute-type", "v6e-7", *COMMAND], "v6e-7"),
    "unknown generation": (["--compute-type", "v9x-8", *COMMAND], "v9x"),
    "ambiguous shape": (["--compute-type", "v5p-8", *COMMAND], "v5p"),
    "unknown topology": (["--topology", "2x3", *COMMAND], "2x3"),
    "shape and topology": (["--compute-type", "v6e:4x4", "--topology", "2x2", *COMMAND], "2x2"),
    "long name": (["--name", "a" * 23, *COMMAND], "pathways-head"),
    "upper case": (["--name", "Digits", *COMMAND], "Digits"),
    "underscore": (["--name", "my_job", *COMMAND], "my_job"),
    "empty name": (["--name", "", *COMMAND], "name"),
    "broken gs path": (["--gcs-scratch-location", "gs:/bucket", *COMMAND], "gs:/bucket"),
    "gs path without bucket": (["--gcs-scratch-location", "gs://", *COMMAND], "gs://"),
    "headless with command": (["--pathways-headless", *COMMAND], "headless"),
    "unknown backend": (["--backend", "slurm", *COMMAND], "--backend 'slurm': want local or gke"),
    "our proxy flag": (["--pathways-proxy-arg=--server_port=1", *COMMAND], "server_port"),
    "our server flag": (["--pathways-server-args", "--node_type=x", *COMMAND], "node_type"),
    "our worker flag": (["--pathways-worker-args=--resource_manager_address=x", *COMMAND], "resource_manager_address"),
    "empty command": (["--command", ""], "command"),
    "blank command": (["--command", "  "], "command"),
    "nothing after dashes": (["--"], "command"),
    "no command": ([], "--command"),
    "two commands": (["--command", "true", *COMMAND], "--command"),
    "word without dashes": (["train.py"], "--"),
    "unknown option": (["--num-slice", "2", *COMMAND], "--num-slices"),
    "no number": (["--num-slices", "two", *COMMAND], "--num-slices"),
    "no slices": (["--num-slices", "0", *COMMAND], "--num-slices 0 is out of range: want 1 to"),
    "backwards": (["--restart-on-exit-codes", "5-3", *COMMAND], "range '5-3' is backwards: want 3-5"),
    "long grace": (["--grace-period", "1000h", *COMMAND], "--grace-period 1000h is too long: want at most 24h"),
    "endless grace": (["--grace-period", "9" * 30 + "h", *COMMAND], "--grace-period"),
    "endless time": (["--timeout", "99999999999h", *COMMAND], "--timeout '99999999999h': want at most 24855d"),
    "digest": (["--image", "gcr.io/x@sha256:12", *COMMAND], "@sha256:DIGEST, 64 hexadecimal digits"),
    "no output": (["-o", "", *COMMAND], "--dry-run-out '' names no file"),
    "too many restarts": (["--restarts", str(2**31), *COMMAND], "restarts"),
    "no duration": (["--grace-period", "soon", *COMMAND], "--grace-period"),
    "exit code 0": (["--restart-on-exit-codes", "0", *COMMAND], "--restart-on-exit-codes"),
    "unpaired quote": (
        ["--pathways-proxy-args", "'a", *COMMAND],
        '--pathways-proxy-args: quotes do not match in "\'a"',
    ),
    "mount without target": (["--mount", "gs://bucket", *COMMAND], "--mount"),
    "mounts of one target": (["--mount", "/a:/x", "--mount", "/b:/x", *COMMAND], "/x"),
    "env without equals": (["--env", "A", *COMMAND], "--env"),
    "reservation on spot": (
        ["--spot", "--gke-nap-provisioning=reservation", "--gke-nap-reservation=r", *COMMAND],
        "--spot",
    ),
    "unknown dry run": (["--dry-run=all", *COMMAND], "all"),
    "dry run that follows": (["--dry-run", "--follow", *COMMAND], "--follow"),
    "timeout": (["--timeout", "1y", *COMMAND], "--timeout"),
    "local with a cluster": (["--backend", "local", "--cluster", "c", *COMMAND], "--cluster"),
    "missing spec file": (["--spec", "no.yaml", *COMMAND], "no.yaml"),
    "missing env file": (["--env-file", "no.env", *COMMAND], "no.env"),
    "folder of output": (["-o", "no/job.yaml", *COMMAND], "no"),
    "image without registry on GKE": ([*GKE, "--image", "train:1", *COMMAND], "train:1"),
}


@pytest.mark.parametrize(("arguments", "named"), REFUSED.values(), ids=REFUSED.keys())
def test_bad_input_is_refused_before_anything_starts(
    run_pw: RunPw, home: Path, arguments: Sequence[str], named: str
) -> None:
    result = run_pw(*BASE, *arguments)
    assert result.code == 2, result.err
    assert result.out == ""
    assert result.err.count("error: ") == 1
    assert named in result.err
    assert not started(home)


def test_all_that_is_missing_is_named_at_once(run_pw: RunPw) -> None:
    result = run_pw("job", "submit")
    assert result.code == 2
    assert result.err.splitlines()[0] == "error: missing: --compute-type, --command"


def test_a_dry_run_prints_the_manifest_and_starts_nothing(run_pw: RunPw, home: Path) -> None:
    result = run_pw(*BASE, "--num-slices", "2", "--dry-run", *COMMAND)
    assert result.code == 0, result.err
    manifest = yaml.safe_load(result.out)
    assert manifest["kind"] == "JobSet"
    assert manifest["metadata"]["name"] == "digits"
    assert not started(home)


def test_the_words_after_dashes_are_the_command(run_pw: RunPw) -> None:
    result = run_pw(*BASE, "--dry-run=spec", "--", "python", "-c", "print('a b')", "--dry-run", "--lr", "1")
    assert yaml.safe_load(result.out)["command"] == """python -c 'print('"'"'a b'"'"')' --dry-run --lr 1"""


def test_a_job_without_a_name_is_named_after_its_command(run_pw: RunPw) -> None:
    result = run_pw("job", "submit", "--compute-type", "v6e-8", "--dry-run=spec", "--", "python", "train_x.py")
    assert yaml.safe_load(result.out)["name"].startswith("train-x-")


EVERYTHING = (
    *("--num-slices", "2", "--env", "A=1", "--env", "B=x=y", "--mount", "/data:/data:rw", "--restarts", "3"),
    *(
        "--restart-on-exit-codes",
        "42,128-130",
        "--grace-period",
        "90s",
        "--pathways-proxy-args",
        "--xla_a=1 '--xla_b=c d'",
    ),
    *("--pathways-proxy-arg=--xla_e=f g", "--verbose", "--spot", "--priority", "high", "-q", "main", "-o", "job.yaml"),
)


def test_a_spec_file_gives_the_same_job_again(run_pw: RunPw, home: Path) -> None:
    first = run_pw(*BASE, *EVERYTHING, "--dry-run=spec", *COMMAND)
    assert first.code == 0, first.err
    assert first.out == ""
    kept = (home / "job.yaml").read_text()
    again = run_pw("job", "submit", "--spec", "job.yaml", "--dry-run=spec")
    assert again.out == kept
    assert yaml.safe_load(kept)["pathways_proxy_args"] == ["--xla_a=1", "--xla_b=c d", "--xla_e=f g"]


def test_flags_win_over_the_spec_file(run_pw: RunPw, home: Path) -> None:
    (home / "job.yaml").write_text(
        "name: digits\ncompute_type: v6e-8\nnum_slices: 4\ncommand: 'false'\nspot: true\nenv: {A: 1, B: 2}\n"
        "mount: ['/a:/a', '/b:/b']\n"
    )
    flags = ("--num-slices", "2", "--no-spot", "--env", "B=3", "--mount", "/c:/c")
    result = run_pw("job", "submit", "--spec", "job.yaml", *flags, "--dry-run=spec", *COMMAND)
    spec = yaml.safe_load(result.out)
    assert spec["num_slices"] == 2
    assert spec["command"] == "true"
    assert "spot" not in spec
    assert spec["env"] == ["A=1", "B=3"]
    assert spec["mount"] == ["/c:/c:ro"]


def test_an_unknown_key_of_the_spec_file_is_refused_with_the_nearest(run_pw: RunPw, home: Path) -> None:
    (home / "job.yaml").write_text("name: digits\nnum_slice: 2\n")
    result = run_pw("job", "submit", "--spec", "job.yaml", "--dry-run")
    assert result.code == 2
    assert "job.yaml, line 2" in result.err
    assert "'num_slices'" in result.err


def test_env_wins_over_the_env_file(run_pw: RunPw, home: Path) -> None:
    (home / "job.env").write_text("# of the team\n\nA=1\nB= two words \nC=x=y\n")
    result = run_pw(*BASE, "--env-file", "job.env", "--env", "A=9", "--env", "D=4", "--dry-run=spec", *COMMAND)
    assert yaml.safe_load(result.out)["env"] == ["A=9", "B= two words ", "C=x=y", "D=4"]


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("export", "want NAME=VALUE"),
        ("export B=2", "this is no shell script: leave out 'export', as in B=VALUE"),
        ("B C=2", "'B C' is not the name of a variable"),
    ],
)
def test_a_bad_line_of_the_env_file_is_named(run_pw: RunPw, home: Path, line: str, why: str) -> None:
    (home / "job.env").write_text(f"A=1\n{line}\n")
    result = run_pw(*BASE, "--env-file", "job.env", "--dry-run", *COMMAND)
    assert result.code == 2
    assert "job.env, line 2: " in result.err and why in result.err


def test_an_env_file_may_begin_with_a_byte_order_mark(run_pw: RunPw, home: Path) -> None:
    (home / "job.env").write_text("A=1\n", encoding="utf-8-sig")
    result = run_pw(*BASE, "--env-file", "job.env", "--dry-run=spec", *COMMAND)
    assert yaml.safe_load(result.out)["env"] == ["A=1"]


def test_a_spec_file_whose_command_is_null_has_none(run_pw: RunPw, home: Path) -> None:
    (home / "job.yaml").write_text("name: digits\ncompute_type: v6e-8\ncommand: null\n")
    result = run_pw("job", "submit", "--spec", "job.yaml", "--dry-run")
    assert result.code == 2
    assert result.err.startswith("error: missing: --command\n")


def test_dry_run_out_alone_writes_the_manifest(run_pw: RunPw, home: Path) -> None:
    result = run_pw(*BASE, "-o", "job.yaml", *COMMAND)
    assert result.code == 0, result.err
    assert result.out == ""
    assert yaml.safe_load((home / "job.yaml").read_text())["kind"] == "JobSet"
    assert [path.name for path in home.iterdir()] == ["job.yaml"]


def test_dry_run_out_to_a_dash_is_stdout(run_pw: RunPw, home: Path) -> None:
    result = run_pw(*BASE, "-o", "-", *COMMAND)
    assert yaml.safe_load(result.out)["kind"] == "JobSet"
    assert list(home.iterdir()) == []


def test_dry_run_out_does_not_lose_a_file_that_is_there(run_pw: RunPw, home: Path) -> None:
    (home / "job.yaml").write_text("mine")
    result = run_pw(*BASE, "-o", "job.yaml", *COMMAND)
    assert result.code == 2
    assert "'job.yaml' is there already" in result.err
    assert (home / "job.yaml").read_text() == "mine"


def test_submit_says_that_it_is_local_because_no_cluster_is_configured(run_pw: RunPw) -> None:
    result = run_pw(*BASE, "--dry-run", *COMMAND)
    assert "backend local: no cluster is configured" in result.err


def test_submit_says_how_an_open_shape_was_read(run_pw: RunPw) -> None:
    result = run_pw(*BASE, "--dry-run", *COMMAND)
    assert "v6e-8 is taken as 2 hosts of 4 chips" in result.err


def test_a_job_that_does_not_use_pathways_is_told_so(run_pw: RunPw) -> None:
    told = "JAX_PLATFORMS=cpu: the command will not use Pathways"
    assert told in run_pw(*BASE, "--env", "JAX_PLATFORMS=cpu", "--dry-run", *COMMAND).err
    assert told not in run_pw(*BASE, "--env", "JAX_PLATFORMS=proxy,cpu", "--dry-run", *COMMAND).err


def test_a_dry_run_says_where_the_tag_of_the_images_is_from(run_pw: RunPw) -> None:
    said = run_pw(*BASE, "--dry-run", *COMMAND).err
    assert re.search(r"images are those of jax-[0-9.]+, the JAX that is installed here", said)
    named = run_pw(*BASE, "--pathways-proxy-server-image", "gcr.io/p/proxy:jax-0.9.1", "--dry-run", *COMMAND).err
    assert "images are those of" not in named


def test_a_gcluster_command_line_is_understood(run_pw: RunPw) -> None:
    result = run_pw(
        *("job", "submit", "--pathways", "-n", "digits", "-e", "python train.py", "-i", "gcr.io/p/i:1"),
        *("--compute-type", "v6e-16", "--num-slices", "2", "--pathways-gcs-location", "gs://bucket/tmp"),
        *("--pathways-proxy-args", "--xla_a=1 --xla_b=2", "--pathways-max-slice-restarts", "2", "--dry-run=spec"),
    )
    assert result.code == 0, result.err
    assert yaml.safe_load(result.out)["gcs_scratch_location"] == "gs://bucket/tmp"
