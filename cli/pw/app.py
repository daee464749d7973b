"""The command line: assembles the Typer app, and is the only place that prints an error and picks an exit code.

A command's module is imported when the command is called, so that `pw --help` costs no more than Typer does.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import sys
from collections.abc import Sequence
from typing import Annotated, Any

try:
    import typer
    import typer.core
    import typer.main
except ModuleNotFoundError:
    # The plain install, which an image of a workload may have.
    sys.exit("error: pw needs the launcher's packages\n  pip install 'pathways-launcher[local]' (or [gke])")

from pw import console, streams
from pw.errors import PwError

# Exit code of a command whose reader has gone, as a shell gives it: 128 and the number of SIGPIPE.
_EXIT_OUTPUT_CLOSED = 141

# Command: (module whose `app` it is, help).
COMMANDS = {
    "job": ("pw.commands.job", "Submit, watch and stop jobs."),
    "tpus": ("pw.commands.tpus", "List TPU generations, machine types and topologies."),
}


class _LazyCommand(typer.core.TyperCommand):
    """Stands for a command until it is called; knows only its name and help."""

    def make_context(self, info_name: str | None, args: list[str], parent: Any = None, **extra: Any) -> Any:
        module, _ = COMMANDS[self.name or ""]
        command = typer.main.get_command(importlib.import_module(module).app)
        if isinstance(command, typer.core.TyperGroup) and not args:
            args = ["--help"]
        return command.make_context(info_name, args, parent=parent, **extra)


class _Root(typer.core.TyperGroup):
    """`pw` itself, whose commands are those of the table."""

    def __init__(self, **attributes: Any) -> None:
        super().__init__(**attributes)
        for name, (_, help) in COMMANDS.items():
            self.add_command(_LazyCommand(name, help=help), name)


def _version(wanted: bool) -> None:
    if wanted:
        console.out(f"pw {importlib.metadata.version('pathways-launcher')}")
        raise typer.Exit


app = typer.Typer(
    cls=_Root,
    name="pw",
    help="Run JAX jobs on Pathways: on emulated TPU slices on this machine, or on GKE.",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    pass


def run(arguments: Sequence[str]) -> int:
    """Runs one command and returns its exit code. Raises KeyboardInterrupt where Ctrl-C ended it."""
    streams.guard()
    try:
        code = typer.main.get_command(app).main(list(arguments) or ["--help"], prog_name="pw", standalone_mode=False)
        with streams.translated():
            sys.stdout.flush()
        return int(code or 0)
    except streams.OutputClosedError:
        streams.abandon_stdout()
        return _EXIT_OUTPUT_CLOSED
    except streams.OutputError as exc:
        streams.abandon_stdout()
        console.error(exc.message, exc.hints)
        return exc.exit_code
    except PwError as exc:
        console.error(exc.message, exc.hints)
        return exc.exit_code
    except typer.TyperException as exc:
        console.error(*_usage(exc))
        return exc.exit_code
    except typer.Abort:
        raise KeyboardInterrupt from None


def _usage(exc: typer.TyperException) -> tuple[str, tuple[str, ...]]:
    """Typer's message in the form of ours, and the help that answers it."""
    message = exc.format_message().rstrip(".")
    context = getattr(exc, "ctx", None)
    hints = () if context is None else (f"{context.command_path} --help",)
    return message[:1].lower() + message[1:], hints
