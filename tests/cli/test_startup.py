from __future__ import annotations

import subprocess
import sys

import pytest

# What costs more to import than a command line may take to answer.
HEAVY = ("jax", "jaxlib", "numpy", "grpc", "google.cloud", "google.auth", "kubernetes", "ray")
PROGRAM = """
import sys
from pw.__main__ import main
code = main(sys.argv[1:])
sys.stderr.write(" ".join(sys.modules))
sys.exit(code)
"""
JOB = ["job", "submit", "--backend", "local", "--command", "true", "--compute-type", "v6e-16", "--dry-run"]


def _imported(arguments: list[str], folder: str) -> set[str]:
    """The modules that a command had imported when it ended."""
    environ = {"HOME": folder, "PATH": ""}
    done = subprocess.run([sys.executable, "-c", PROGRAM, *arguments], env=environ, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return set(done.stderr.splitlines()[-1].split())


@pytest.mark.parametrize("arguments", [["--help"], ["job", "--help"], ["tpus"], JOB], ids=lambda words: " ".join(words))
def test_a_command_that_needs_no_cluster_imports_nothing_heavy(arguments: list[str], tmp_path: object) -> None:
    assert not _imported(arguments, str(tmp_path)) & set(HEAVY)


def test_help_imports_neither_the_table_of_tpus_nor_yaml_nor_jinja(tmp_path: object) -> None:
    assert not _imported(["--help"], str(tmp_path)) & {"pw.specs", "pathways_runtime._tpus", "yaml", "jinja2"}
