"""JAX's own tests through the emulator, with plain CPU as the yardstick.

    python tests/conformance/run.py --jax-checkout DIR [--modules array,pjit] [--report FILE]

DIR is a checkout of JAX of the version that is installed; its tests need what JAX's own list names. Each module runs on
eight plain CPU devices, then the tests that passed through an emulator with one slice of eight devices. A test that
hangs, or with which a process ends, is told as such, and the rest of its module runs in new processes.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import importlib.metadata
import json
import os
import re
import select
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

import recorder

from pathways_runtime import _contract

HERE: Final = Path(__file__).parent
MODULES: Final = (
    "array,api,jax_jit,pjit,shard_map,shard_alike,memories,layout,aot,export,random,random_lax,lax,lax_control_flow,"
    "lax_numpy,linalg,fft,multi_device,pmap,dtypes,mutable_array,jaxpr_effects,python_callback,debugging_primitives,"
    "colocated_python,custom_partitioning,ffi,string_array,profiler"
)
NUM_DEVICES: Final = 8
EMULATOR: Final = ("--instance_type=tpuv6e:2x4", "--instance_count=1", "--server_port=0")
COLLECTION_S: Final = 600
# How long a server that a client has lost may take to be seen as ended.
END_S: Final = 5
LOST: Final = re.compile("UNAVAILABLE|CANCELLED|DATA_LOSS|[Cc]onnection|[Ss]ocket")


@dataclasses.dataclass(frozen=True)
class Outcome:
    """How a test ended: "passed", "failed", "skipped", "hang", "client crash" or "server crash"."""

    outcome: str
    error: str = ""


Outcomes = dict[str, Outcome]  # by test id


@dataclasses.dataclass(frozen=True)
class Rule:
    """What makes a failed test an impossible one."""

    why: str
    test: str = ""
    error: str = ""

    def covers(self, test: str, outcome: Outcome) -> bool:
        """Whether both patterns are found. A crash or a hang is never excused."""
        found = re.search(self.test, test) and re.search(self.error, outcome.error)
        return outcome.outcome in ("failed", "skipped") and found is not None


@dataclasses.dataclass(frozen=True)
class Run:
    """What the runs of all modules share."""

    checkout: Path
    cases: int
    every: int
    timeout_s: float
    logs: Path


class Process:
    """A pytest in a checkout, with the emulator that it talks to, if any."""

    def __init__(self, run: Run, module: str, selection: Path, emulator: subprocess.Popen[bytes] | None, target: str):
        reader, writer = os.pipe()
        environment = os.environ | {
            recorder.EVENTS_FD: str(writer),
            recorder.SELECTION: str(selection),
            "PYTHONPATH": os.pathsep.join(filter(None, (str(HERE), os.environ.get("PYTHONPATH")))),
            "JAX_NUM_CPU_DEVICES": str(NUM_DEVICES),
            "JAX_NUM_GENERATED_CASES": str(run.cases),
            _contract.JAX_PLATFORMS: f"{_contract.PROXY_PLATFORM},cpu" if target else "cpu",
        }
        if target:
            environment |= {_contract.JAX_BACKEND_TARGET: target, _contract.INSECURE_CREDENTIALS: "true"}
        name = f"{module}-{'emulator' if target else 'cpu'}.log"
        with open(run.logs / name, "ab") as log:
            self._pytest = subprocess.Popen(
                # -P: the checkout's own `jax` is not the one under test.
                [sys.executable, "-P", "-m", "pytest", "-q", "-p", "recorder", "-p", "no:cacheprovider", "-p",
                 "no:timeout", f"tests/{module}_test.py"],
                cwd=run.checkout, env=environment, stdout=log, stderr=log, pass_fds=[writer], start_new_session=True,
            )  # fmt: skip
        os.close(writer)
        self._emulator = emulator
        self._reader = reader
        self._unread = b""

    def close(self) -> None:
        """Leaves nothing running."""
        os.close(self._reader)
        end(self._pytest)

    def outcomes(self, timeout_s: float) -> Iterator[tuple[str, Outcome]]:
        """Each test as it ends. After the first that is no normal end nothing more comes."""
        present = ""
        while (event := self._next(timeout_s if present else COLLECTION_S)) is not None:
            present = event["test"]
            if "outcome" not in event:
                continue
            outcome = Outcome(event["outcome"], event["error"])
            if self._server_is_gone(outcome.error):
                yield present, Outcome("server crash", outcome.error)
                return
            yield present, outcome
            present = ""
        if present:
            yield present, self._abnormal_end()

    def _next(self, timeout_s: float) -> Any:
        """The next event; None at the end, and when it takes too long."""
        deadline = time.monotonic() + timeout_s
        while b"\n" not in self._unread:
            if not select.select([self._reader], [], [], max(0, deadline - time.monotonic()))[0]:
                return None
            data = os.read(self._reader, 1 << 16)
            if not data:
                return None
            self._unread += data
        line, _, self._unread = self._unread.partition(b"\n")
        return json.loads(line)

    def _server_is_gone(self, error: str) -> bool:
        if self._emulator is None:
            return False
        if LOST.search(error):
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._emulator.wait(END_S)
        return self._emulator.poll() is not None

    def _abnormal_end(self) -> Outcome:
        if self._emulator is not None and self._emulator.poll() is not None:
            return Outcome("server crash", f"the emulator ended with {self._emulator.returncode}")
        try:
            return Outcome("client crash", f"pytest ended with {self._pytest.wait(END_S)}")
        except subprocess.TimeoutExpired:
            return Outcome("hang")


def end(process: subprocess.Popen[bytes]) -> None:
    """Ends a process and its group, whatever state it is in."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


@contextlib.contextmanager
def emulator(log: Path) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    """(an emulator of one slice, what goes into JAX_BACKEND_TARGET). RuntimeError where it does not start."""
    reader, writer = os.pipe()
    with log.open("ab") as output, open(reader, encoding="utf-8") as ready:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "pathways_runtime.emulator", *EMULATOR],
            stdout=output,
            stderr=output,
            env=os.environ | {_contract.READY_FD: str(writer)},
            pass_fds=[writer],
            start_new_session=True,
        )
        os.close(writer)
        line = ready.readline()
    try:
        if not line:
            raise RuntimeError(f"the emulator ended with {process.wait()}: see {log}")
        yield process, f"grpc://127.0.0.1:{json.loads(line)['port']}"
    finally:
        end(process)


def run_side(run: Run, module: str, *, through: bool, only: Sequence[str] | None) -> Outcomes:
    """All outcomes of a module on one side; new processes after each abnormal end."""
    done: Outcomes = {}
    while True:
        before = len(done)
        with tempfile.NamedTemporaryFile("w", encoding="utf-8") as selection, contextlib.ExitStack() as stack:
            json.dump([only, list(done), run.every], selection)
            selection.flush()
            server, target = None, ""
            if through:
                server, target = stack.enter_context(emulator(run.logs / f"{module}-server.log"))
            process = Process(run, module, Path(selection.name), server, target)
            stack.callback(process.close)
            last = Outcome("passed")
            for test, last in process.outcomes(run.timeout_s):
                done[test] = last
        if len(done) == before or last.outcome in ("passed", "failed", "skipped"):
            return done


def compare(run: Run, module: str, yardstick: Outcomes | None) -> dict[str, Outcomes]:
    """The outcomes of both sides; that of the emulator for tests that pass on plain CPU."""
    cpu = yardstick if yardstick is not None else run_side(run, module, through=False, only=None)
    passed = [test for test, outcome in cpu.items() if outcome.outcome == "passed"]
    through = run_side(run, module, through=True, only=passed) if passed else {}
    missing = {test: Outcome("failed", "it did not run") for test in passed if test not in through}
    result = {"cpu": cpu, "emulator": through | missing}
    say(f"{module}: {len(passed)} passed on plain CPU, {_passed(result['emulator'])} through the emulator")
    return result


def _passed(outcomes: Outcomes) -> int:
    return sum(outcome.outcome == "passed" for outcome in outcomes.values())


def read_rules(path: Path) -> list[Rule]:
    """The rules of `impossible.toml`."""
    return [Rule(**rule) for rule in tomllib.loads(path.read_text(encoding="utf-8")).get("impossible", [])]


def table(results: dict[str, dict[str, Outcomes]], rules: Sequence[Rule]) -> str:
    """A line for each module and one for all: how many passed, how many cannot, and how many abnormal ends."""
    rows, total = [], Counter[str]()
    for module, sides in results.items():
        counts = _count(sides["emulator"], rules)
        total.update(counts)
        rows.append((module, counts))
    header = (
        f"{'module':24}{'plain CPU':>10}{'through':>9}{'%':>8}{'impossible':>12}{'% of rest':>11}{'crash/hang':>12}"
    )
    return "\n".join([header, *(_row(name, counts) for name, counts in [*rows, ("all", total)])])


def _count(outcomes: Outcomes, rules: Sequence[Rule]) -> Counter[str]:
    counts = Counter({"cpu": len(outcomes), "passed": _passed(outcomes)})
    for test, outcome in outcomes.items():
        counts["impossible"] += any(rule.covers(test, outcome) for rule in rules)
        counts["ended"] += outcome.outcome not in ("passed", "failed", "skipped")
    return counts


def _row(name: str, counts: Counter[str]) -> str:
    passed, possible = counts["passed"], counts["cpu"] - counts["impossible"]
    shares = [f"{100 * passed / of:.1f}" if of else "-" for of in (counts["cpu"], possible)]
    return (
        f"{name:24}{counts['cpu']:>10}{passed:>9}{shares[0]:>8}{counts['impossible']:>12}{shares[1]:>11}"
        f"{counts['ended']:>12}"
    )


def failures(results: dict[str, dict[str, Outcomes]], rules: Sequence[Rule]) -> str:
    """What failed and is possible, by the first line of the error, most frequent first; three tests of each."""
    groups: dict[str, list[str]] = {}
    for sides in results.values():
        for test, outcome in sides["emulator"].items():
            if outcome.outcome != "passed" and not any(rule.covers(test, outcome) for rule in rules):
                groups.setdefault(_first_line(outcome), []).append(test)
    lines = []
    for error, tests in sorted(groups.items(), key=lambda group: -len(group[1])):
        lines += [f"{len(tests):5} {error}", *(f"        {test}" for test in tests[:3])]
    return "\n".join(lines)


def _first_line(outcome: Outcome) -> str:
    """The first line of the error, without the numbers that differ from test to test."""
    line = outcome.error.strip().partition("\n")[0]
    return re.sub(r"0x[0-9a-f]+|\d+", "N", f"{outcome.outcome}: {line}"[:200])


def read_report(path: Path) -> dict[str, dict[str, Outcomes]]:
    """The outcomes in a report, by module and side."""
    modules = json.loads(path.read_text(encoding="utf-8"))["modules"]
    return {
        module: {side: {test: Outcome(*pair) for test, pair in tests.items()} for side, tests in sides.items()}
        for module, sides in modules.items()
    }


def write_report(path: Path, results: dict[str, dict[str, Outcomes]]) -> None:
    """The outcomes as JSON: for each test, by module and side, its outcome and error."""
    modules = {
        module: {side: {test: [o.outcome, o.error] for test, o in tests.items()} for side, tests in sides.items()}
        for module, sides in results.items()
    }
    report = {"jax": importlib.metadata.version("jax"), "modules": modules}
    temporary = path.with_name(path.name + ".part")
    temporary.write_text(json.dumps(report, indent=1), encoding="utf-8")
    os.replace(temporary, path)


def say(line: str) -> None:
    """Progress, on stderr."""
    print(line, file=sys.stderr, flush=True)  # noqa: T201


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """The flags, of which modules that the checkout does not have are refused."""
    parser = argparse.ArgumentParser(description="JAX's own tests through the emulator.", allow_abbrev=False)
    parser.add_argument("--jax-checkout", type=Path, required=True, metavar="DIR", help="of the installed version")
    parser.add_argument("--modules", default=MODULES, metavar="NAME,...", help="tests/NAME_test.py")
    parser.add_argument("--cases", type=int, default=10, metavar="N", help="generated cases of a test (10)")
    parser.add_argument("--every", type=int, default=1, metavar="N", help="take every Nth test only (1)")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="modules at a time (1)")
    parser.add_argument("--timeout-s", type=float, default=120, metavar="S", help="after which a test hangs (120)")
    parser.add_argument("--report", type=Path, metavar="FILE", help="to write, as JSON, after each module")
    parser.add_argument("--yardstick", type=Path, metavar="FILE", help="a report whose outcomes on plain CPU to take")
    parser.add_argument("--logs", type=Path, metavar="DIR", help="for what the processes print")
    flags = parser.parse_args(arguments)
    flags.modules = flags.modules.split(",")
    missing = [name for name in flags.modules if not (flags.jax_checkout / f"tests/{name}_test.py").is_file()]
    if missing:
        parser.error(f"{flags.jax_checkout}/tests has no {', '.join(f'{name}_test.py' for name in missing)}")
    return flags


def main(arguments: Sequence[str]) -> int:
    """Runs all and prints; 0 whatever the outcomes are."""
    flags = parse(arguments)
    yardstick = read_report(flags.yardstick) if flags.yardstick else {}
    logs = flags.logs or Path(tempfile.mkdtemp(prefix="jax-conformance-"))
    logs.mkdir(parents=True, exist_ok=True)
    say(f"logs: {logs}")
    run = Run(flags.jax_checkout.absolute(), flags.cases, flags.every, flags.timeout_s, logs.absolute())
    results: dict[str, dict[str, Outcomes]] = {}
    with ThreadPoolExecutor(flags.jobs) as pool:
        known = [yardstick.get(module, {}).get("cpu") for module in flags.modules]
        for module, sides in zip(
            flags.modules, pool.map(lambda m, y: compare(run, m, y), flags.modules, known), strict=True
        ):
            results[module] = sides
            if flags.report:
                write_report(flags.report, results)
    rules = read_rules(HERE / "impossible.toml")
    print(table(results, rules), failures(results, rules), sep="\n\n")  # noqa: T201
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
