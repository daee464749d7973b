"""How long a local job takes from `pw job submit` to its first line, against a Python that only imports jax.

    python benchmarks/first_line.py [ROUNDS]

The job prints one line and ends, so this is what `pw`, the controller, the emulator's start and the way of a line back
to the terminal cost; a second job imports jax before its line. Every round takes each in turn; ratios are of medians.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

ROUNDS = 5
IMPORT = "import jax; print('line')"
JOB = ("job", "submit", "--compute-type", "v6e-8", "--num-slices", "2", "--restarts", "0", "--follow")
BASE = "python -c 'import jax'"
PROGRAMS: Mapping[str, Sequence[str]] = {
    BASE: ("-c", IMPORT),
    "job that prints a line": ("-m", "pw", *JOB, "--", "echo", "line"),
    "job that imports jax first": ("-m", "pw", *JOB, "--", sys.executable, "-c", IMPORT),
}


def line_s(arguments: Sequence[str], environ: Mapping[str, str]) -> float:
    """Seconds from the start of a Python with `arguments` to the line that ends in `line`; then waits for its end."""
    begin_s = time.perf_counter()
    command = [sys.executable, *arguments]
    with subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        took_s = next((time.perf_counter() - begin_s for line in process.stdout if line.endswith("line\n")), None)
        _, talk = process.communicate()
    if took_s is None or process.returncode:
        raise SystemExit(f"{' '.join(command)} ended with {process.returncode}:\n{talk}")
    return took_s


def main() -> None:
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else ROUNDS
    taken_s: dict[str, list[float]] = {name: [] for name in PROGRAMS}
    with tempfile.TemporaryDirectory() as home:
        environ = {name: value for name, value in os.environ.items() if not name.startswith(("PW_", "XDG_"))}
        environ |= {"XDG_STATE_HOME": str(Path(home, "state")), "XDG_CONFIG_HOME": str(Path(home, "config"))}
        for _ in range(rounds):
            for name, arguments in PROGRAMS.items():
                taken_s[name].append(line_s(arguments, {**environ, "PW_BACKEND": "local"}))
    medians_s = {name: statistics.median(values) for name, values in taken_s.items()}
    print(f"{'start to first line':<30} {'median':>9} {'ratio':>7}")
    for name, median_s in medians_s.items():
        print(f"{name:<30} {median_s * 1000:6.0f} ms {median_s / medians_s[BASE]:6.2f}x")


if __name__ == "__main__":
    main()
