"""What a JobSpec refuses."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pw.specs import JobSpec


def check_job(spec: JobSpec) -> None:
    """Raises SpecError."""
