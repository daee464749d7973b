"""What a Kubernetes Job decides about its pods: which run, which are replaced, when it is complete or failed.

Pure: pods' ends come in, `pods_to_start` and `outcome` go out. Processes, clocks and back-off sleeps are the caller's.
The rules are those of the Job controller (kubernetes/pkg/controller/job) for Indexed and NonIndexed Jobs with
`completions`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

BACKOFF_LIMIT_EXCEEDED = "BackoffLimitExceeded"
POD_FAILURE_POLICY = "PodFailurePolicy"
MAX_FAILED_INDEXES_EXCEEDED = "MaxFailedIndexesExceeded"
FAILED_INDEXES = "FailedIndexes"

# Kubernetes' default of `backoffLimit`; with a limit per index it is as good as none.
DEFAULT_BACKOFF_LIMIT = 6
NO_LIMIT = 2**31 - 1


@dataclass(frozen=True, slots=True)
class Backoff:
    """Delays that double from `base_s` up to `cap_s`. Kubernetes has 10 and 300; a laptop wants less."""

    base_s: float = 1.0
    cap_s: float = 30.0

    def delay_s(self, failures: int) -> float:
        """The wait after `failures` failures in a row; none after none."""
        return min(self.base_s * 2.0 ** min(failures - 1, 62), self.cap_s) if failures > 0 else 0.0


@dataclass(frozen=True, slots=True)
class Exit:
    """How one container of a pod ended: `code` as Kubernetes reports it, 128 + N after signal N."""

    container: str
    code: int


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a Job ended. `reason` is that of the Job's Failed condition, empty when it is complete."""

    complete: bool
    reason: str = ""
    message: str = ""


class Job:
    """One Job of a JobSet. Call `pods_to_start` after each event until `outcome` is set."""

    def __init__(self, spec: Mapping[str, Any], *, backoff: Backoff) -> None:
        self.completions = int(spec.get("completions", 1))
        self.parallelism = int(spec.get("parallelism", 1))
        self.outcome: Outcome | None = None
        self._per_index: int | None = spec.get("backoffLimitPerIndex")
        self._max_failed_indexes: int | None = spec.get("maxFailedIndexes")
        default = DEFAULT_BACKOFF_LIMIT if self._per_index is None else NO_LIMIT
        self._limit = int(spec.get("backoffLimit", default))
        self._on_failure = spec["template"]["spec"]["restartPolicy"] == "OnFailure"
        self._rules: Sequence[Mapping[str, Any]] = spec.get("podFailurePolicy", {}).get("rules", ())
        self._backoff = backoff
        self._active: set[int] = set()
        self._ready: set[int] = set()
        self._succeeded: set[int] = set()
        self._failed_indexes: set[int] = set()
        self._failures: Counter[int] = Counter()
        self._in_a_row: Counter[int] = Counter()
        self._container_restarts: Counter[int] = Counter()

    @property
    def ready(self) -> bool:
        """Whether as many pods are ready or have succeeded as run at once, as JobSet's `InOrder` asks."""
        return len(self._ready | self._succeeded) >= min(self.parallelism, self.completions)

    def pods_to_start(self) -> list[tuple[int, float]]:
        """Indexes whose pods are to be created now, each with the seconds to wait first; counts them as active."""
        if self.outcome is not None:
            return []
        done = self._succeeded | self._failed_indexes | self._active
        free = self.parallelism - len(self._active)
        indexes = [index for index in range(self.completions) if index not in done][: max(free, 0)]
        self._active.update(indexes)
        return [(index, self._backoff.delay_s(self._in_a_row[index])) for index in indexes]

    def pod_ready(self, index: int, ready: bool) -> None:
        """A pod became ready, or is no longer."""
        if ready:
            self._ready.add(index)
        else:
            self._ready.discard(index)

    def container_restarts(self, index: int, restarts: int) -> None:
        """The containers of an `OnFailure` pod have restarted `restarts` times in all."""
        self._container_restarts[index] = restarts
        total = self._container_restarts.total()
        if self._on_failure and (total >= self._limit if self._limit else total > 0):
            self._fail(
                BACKOFF_LIMIT_EXCEEDED, f"containers restarted {total} times, the back-off limit is {self._limit}"
            )

    def pod_ended(self, index: int, *, succeeded: bool, exits: Iterable[Exit], pod: str) -> None:
        """A pod reached its end; `pod` is its name, for messages."""
        self._active.discard(index)
        self._ready.discard(index)
        del self._container_restarts[index]
        if self.outcome is not None:
            return
        if succeeded:
            self._succeeded.add(index)
            self._in_a_row.clear()
        else:
            self._pod_failed(index, exits, pod)
        self._finish_when_all_indexes_are_done()

    def _pod_failed(self, index: int, exits: Iterable[Exit], pod: str) -> None:
        self._in_a_row[index] += 1
        action, why = self._rule_for(exits, pod)
        if action == "FailJob":
            self._fail(POD_FAILURE_POLICY, why)
        elif action == "FailIndex":
            self._fail_index(index)
        elif action != "Ignore":
            self._count_failure(index)

    def _rule_for(self, exits: Iterable[Exit], pod: str) -> tuple[str, str]:
        failed = [exit for exit in exits if exit.code != 0]
        for number, rule in enumerate(self._rules):
            wanted = rule.get("onExitCodes")
            match = _first_match(wanted, failed) if wanted else None
            if match is not None:
                code = f"container {match.container} for pod {pod} failed with exit code {match.code}"
                return rule["action"], f"{code} matching {rule['action']} rule at index {number}"
        return "Count", ""

    def _count_failure(self, index: int) -> None:
        self._failures[index] += 1
        if self._per_index is not None and self._failures[index] > self._per_index:
            self._fail_index(index)
        if self._failures.total() > self._limit:
            self._fail(BACKOFF_LIMIT_EXCEEDED, f"{self._failures.total()} pods failed, the limit is {self._limit}")

    def _fail_index(self, index: int) -> None:
        self._failed_indexes.add(index)
        if self._max_failed_indexes is not None and len(self._failed_indexes) > self._max_failed_indexes:
            message = f"{len(self._failed_indexes)} indexes failed, at most {self._max_failed_indexes} may"
            self._fail(MAX_FAILED_INDEXES_EXCEEDED, message)

    def _fail(self, reason: str, message: str) -> None:
        if self.outcome is None:
            self.outcome = Outcome(False, reason, message)

    def _finish_when_all_indexes_are_done(self) -> None:
        if self.outcome is None and len(self._succeeded) >= self.completions:
            self.outcome = Outcome(True)
        elif self.outcome is None and len(self._succeeded | self._failed_indexes) >= self.completions:
            self._fail(FAILED_INDEXES, f"indexes {sorted(self._failed_indexes)} failed")


def _first_match(wanted: Mapping[str, Any], exits: Sequence[Exit]) -> Exit | None:
    name = wanted.get("containerName")
    values = set(wanted["values"])
    for exit in exits:
        named = name is None or exit.container == name
        if named and (exit.code in values) == (wanted["operator"] == "In"):
            return exit
    return None
