"""`pw job submit`: the options of `JobSpec`'s table, and a few that say what to do with the job."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated, Any

import typer
import typer.core

from pw import backends, config, console, envfile, files, jobs, names, notes, render, specfile
from pw.backends import Backend
from pw.commands import _options, _shared
from pw.commands._shared import Where, placed
from pw.config import Settings
from pw.errors import SpecError
from pw.specs import JobSpec, Plan
from pw.status import JobRef, LogQuery
from pw.streams import OutputClosedError, OutputError

_MANIFEST = "manifest"
_SPEC = "spec"
# Where the words after `--` are kept in Typer's context, which knows no such argument.
_WORDS = "pw.words"


class SubmitCommand(typer.core.TyperCommand):
    """Takes the job's command after `--`, and `--dry-run` without a value."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if "--" in args:
            dashes = args.index("--")
            ctx.meta[_WORDS] = args[dashes + 1 :]
            args = args[:dashes]
        rest = super().parse_args(ctx, [f"--dry-run={_MANIFEST}" if arg == "--dry-run" else arg for arg in args])
        if rest:
            raise SpecError(f"{rest[0]!r} belongs to no option: the job's command goes behind --, as in -- {rest[0]}")
        return rest


@placed
@_options.from_table
def submit(
    *,
    ctx: typer.Context,
    where: Where,
    spec: Annotated[
        Path | None, typer.Option("--spec", metavar="FILE", help="YAML of these fields; flags win.")
    ] = None,
    env_file: Annotated[
        Path | None, typer.Option("--env-file", metavar="FILE", help="Lines of NAME=VALUE; --env wins.")
    ] = None,
    dry_run: Annotated[
        str | None, typer.Option(metavar="[=manifest|spec]", help="Print what would be sent, or its spec file.")
    ] = None,
    dry_run_out: Annotated[
        str | None, typer.Option("--dry-run-out", "-o", metavar="FILE", help="Write that to a new file; - is stdout.")
    ] = None,
    replace: Annotated[bool, typer.Option("--replace", help="Delete a finished job of this name first.")] = False,
    follow: Annotated[bool, typer.Option("--follow", help="Show the job's log until it ends.")] = False,
    await_job_completion: Annotated[
        bool, typer.Option("--await-job-completion", help="Wait until the job ends.")
    ] = False,
    timeout: Annotated[
        str | None, typer.Option(metavar="DURATION", help="Wait until the job ends, or for this long.")
    ] = None,
    pathways: Annotated[
        bool, typer.Option("--pathways", show_default=False, help="Accepted and not needed: all jobs are.")
    ] = True,
    **typed: Any,
) -> None:
    """Submit a job and print its reference.

    The job's command is given with --command, or word by word after `--`.
    """
    stays = follow or await_job_completion or timeout is not None
    form = _dry_run_form(dry_run, dry_run_out, stays=stays)
    out = Path(dry_run_out) if dry_run_out and dry_run_out != "-" else None
    if out is not None:
        files.check_new(out)
    timeout_s = _shared.seconds("--timeout", timeout)
    job = _job(typed, spec, env_file, ctx.meta.get(_WORDS))
    settings = where.settings()
    chosen = backends.get(config.default_backend(settings), settings)
    plan = chosen.plan(job)
    _tell_plan(plan, settings)
    if form:
        _show(plan, form, out)
        return
    ref, interrupted = _submit(chosen, plan, replace=replace)
    with _shared.left_running(ref):
        if interrupted:
            raise KeyboardInterrupt
        _tell_how(ref, follow=follow)
        if follow:
            _shared.follow(chosen, ref, LogQuery(follow=True), timeout_s=timeout_s)
        elif stays:
            _shared.end(chosen, _shared.wait(chosen, ref, timeout_s=timeout_s))


def _submit(backend: Backend, plan: Plan, *, replace: bool) -> tuple[JobRef, bool]:
    """Starts the job and prints its reference; also whether Ctrl-C came meanwhile. A job of which the user cannot be
    told on stdout is told of on stderr."""
    with _shared.interrupts_held() as noted:
        try:
            ref = jobs.submit(backend, plan, replace=replace)
        except KeyboardInterrupt:
            console.say(f"\njob {plan.spec.name!r} may have started\n  pw job status {plan.spec.name}")
            raise
        try:
            console.out(str(ref))
        except (OutputError, OutputClosedError):
            console.say(f"job {ref} goes on")
            raise
    return ref, bool(noted)


def _job(typed: dict[str, Any], spec: Path | None, env_file: Path | None, words: list[str] | None) -> JobSpec:
    """The job that the flags, the words after `--` and the files ask for."""
    given = _options.typed_fields(typed)
    if words is not None:
        if "command" in given:
            raise SpecError("--command and a command after -- contradict each other: leave one out")
        given["command"] = shlex.join(words)
    if env_file is not None:
        given = _options.merged({"env": envfile.read(env_file)}, given)
    if spec is not None:
        given = _options.merged(specfile.read(spec), given)
    missing = _options.missing(given)
    if missing:
        raise SpecError(
            f"missing: {', '.join(option.flags[0] for option in missing)}",
            hints=tuple(f"{option.flags[0]}: {option.help}" for option in missing),
        )
    given.setdefault("name", names.generate(given.get("command", "")))
    return JobSpec(**given)


def _dry_run_form(dry_run: str | None, out: str | None, *, stays: bool) -> str | None:
    """What to print instead of submitting, None to submit."""
    form = dry_run or (_MANIFEST if out else None)
    if form not in (None, _MANIFEST, _SPEC):
        raise SpecError(f"--dry-run={form!r} is unknown: want {_MANIFEST} or {_SPEC}")
    if form and stays:
        raise SpecError(
            "a dry run starts nothing to wait for: leave out --follow, --await-job-completion and --timeout"
        )
    if out == "":
        raise SpecError("--dry-run-out '' names no file: want one, or - for stdout")
    return form


def _show(plan: Plan, form: str, out: Path | None) -> None:
    if form == _MANIFEST and plan.backend == "local" and (note := notes.image_tag(plan.spec)):
        console.say(note)  # no image is run here, but the manifest may be taken elsewhere
    text = specfile.write(plan.spec) if form == _SPEC else render.to_yaml(plan.manifest)
    if out is None:
        console.out(text, end="")
    else:
        files.write_new(out, text)
        console.say(f"wrote {out}")


def _tell_plan(plan: Plan, settings: Settings) -> None:
    why = ""
    if plan.backend == "local" and not settings.backend:
        why = ": no cluster is configured (--cluster, PW_CLUSTER or --backend)"
    elif plan.backend == "gke" and settings.cluster:
        why = f": cluster {settings.cluster}, from {settings.sources['cluster']}"
    console.say(f"backend {plan.backend}{why}")
    for note in plan.notes:
        console.say(note)


def _tell_how(ref: JobRef, *, follow: bool) -> None:
    if not follow:
        console.say(f"  pw job logs -f {ref}")
    console.say(f"  pw job cancel {ref}")
