"""How long `pw` takes to start against an empty Typer program, and how many manifests it renders in a second.

    python benchmarks/cli_startup.py [ROUNDS]

Every round starts each program once, one after the other, so that a busy machine slows all of them; the ratios are of
medians. An empty program's start is Python's and Typer's own, which `pw` cannot go below.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence

EMPTY = "import typer; app = typer.Typer(); app.command()(lambda: None); app()"
JOB = ("--name", "bench", "--command", "python train.py", "--compute-type", "v6e-16", "--num-slices", "2")
HELP = "pw --help"
HELP_LIMIT = 1.5
PROGRAMS: Mapping[str, Sequence[str]] = {
    "empty Typer program --help": ("-c", EMPTY, "--help"),
    HELP: ("-m", "pw", "--help"),
    "pw job submit --dry-run": ("-m", "pw", "job", "submit", *JOB, "--dry-run"),
}
BASE = "empty Typer program --help"
RENDER_S = 1.0


def start_s(arguments: Sequence[str], environ: Mapping[str, str]) -> float:
    """Seconds from the start of a Python with `arguments` to its end. Raises CalledProcessError if it fails."""
    begin_s = time.perf_counter()
    subprocess.run([sys.executable, *arguments], env=environ, check=True, capture_output=True)
    return time.perf_counter() - begin_s


def starts(rounds: int) -> dict[str, float]:
    """The median start of each program in seconds, without a configuration of the user's."""
    with tempfile.TemporaryDirectory() as home:
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("PW_", "XDG_"))}
        environ = kept | {"HOME": home}
        for arguments in PROGRAMS.values():  # compiles what is not, and warms the page cache
            start_s(arguments, environ)
        times_s = [{name: start_s(arguments, environ) for name, arguments in PROGRAMS.items()} for _ in range(rounds)]
    return {name: statistics.median(one[name] for one in times_s) for name in PROGRAMS}


def manifests_per_second() -> float:
    """Manifests as YAML text from one spec, over at least `RENDER_S` seconds."""
    from pw import render
    from pw.specs import JobSpec

    spec = JobSpec(name="bench", command="python train.py", compute_type="v6e-16", num_slices=2)
    count, begin_s = 0, time.perf_counter()
    while (spent_s := time.perf_counter() - begin_s) < RENDER_S:
        render.to_yaml(render.render(spec))
        count += 1
    return count / spent_s


def main(rounds: int = 15) -> int:
    """Prints the table. The exit code is 1 if `pw --help` takes more than `HELP_LIMIT` of an empty program's time."""
    medians_s = starts(rounds)
    ratios = {name: median_s / medians_s[BASE] for name, median_s in medians_s.items()}
    print(f"{'start':<28}  {'median':>8}  {'ratio':>6}")
    for name, median_s in medians_s.items():
        print(f"{name:<28}  {median_s * 1e3:>5.0f} ms  {ratios[name]:>5.2f}x")
    print(f"{'manifests rendered':<28}  {manifests_per_second():>6.0f}/s")
    return int(ratios[HELP] > HELP_LIMIT)


if __name__ == "__main__":
    sys.exit(main(*(int(argument) for argument in sys.argv[1:2])))
