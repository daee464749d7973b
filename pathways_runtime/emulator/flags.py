"""The flags of the emulator's processes: those of Pathways' binaries, and what each means here. Standard library only.

Every flag of the real proxy server, resource manager and worker is taken, so that a manifest needs no change. One that
is about TPU hardware is reported as without effect; one that nobody knows is refused with the nearest name.
"""

from __future__ import annotations

import argparse
import difflib
import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Final, NoReturn

from pathways_runtime import _contract

# About TPU hardware, or parts of Pathways that this emulator has no need of.
_WITHOUT_EFFECT_PREFIXES: Final = ("xla_tpu_", "xla_sc_", "xla_jf_", "xla_vf_", "xla_msa_", "megascale_", "tpu_")
_WITHOUT_EFFECT: Final = frozenset(
    {
        "cloud_pathways_sidecar_shm_directory",
        "enable_gcs_olm",
        "enable_metrics_collection",
        "enforce_kernel_ipv6_support",
        "xla_enable_async_all_gather",
        "xla_enable_async_collective_permute",
        "xla_latency_hiding_scheduler_rerun",
        "xla_max_concurrent_async_all_gathers",
    }
)
# Reads XLA_FLAGS as the server will, and ends with an error for a flag or value that this jaxlib does not take.
_TRIAL: Final = "from jaxlib import xla_client; xla_client.CompileOptions()"


class FlagError(Exception):
    """A flag or variable that is wrong; the process ends with `_contract.EXIT_BAD_FLAGS`."""


class Parser(argparse.ArgumentParser):
    """`argparse` that takes no abbreviations, as absl has none, and raises FlagError."""

    def __init__(self, module: str, description: str) -> None:
        super().__init__(prog=f"python -m {module}", description=description, allow_abbrev=False)

    def error(self, message: str) -> NoReturn:
        raise FlagError(message)

    def split(self, arguments: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
        """What this parser knows, and the other flags as they stand. FlagError for an argument that is no flag."""
        known, others = self.parse_known_args(list(arguments))
        for other in others:
            if not other.startswith("--"):
                raise FlagError(f"argument {other!r} is not a flag: write --NAME=VALUE")
        return known, others

    def refuse(self, flag: str, more_names: Iterable[str] = ()) -> FlagError:
        """The error for a flag that nobody knows, with the nearest names of those that exist."""
        names = {option.lstrip("-") for action in self._actions for option in action.option_strings}
        near = difflib.get_close_matches(name_of(flag), sorted({*names, *_WITHOUT_EFFECT, *more_names}), n=3)
        hint = f"; did you mean {', '.join('--' + name for name in near)}?" if near else ""
        return FlagError(f"flag {flag!r} is unknown{hint}")


def add_common(parser: argparse.ArgumentParser, default_port: str) -> None:
    """The flags that each process has."""
    parser.add_argument("--server_port", type=port_number, help=f"port to listen on, 0 for any ({default_port})")
    parser.add_argument("--resource_manager_address", metavar="HOST:PORT", help="the resource manager to register with")
    parser.add_argument("--gcs_scratch_location", default="", metavar="URL", help="gs:// bucket or folder for caches")
    parser.add_argument("--token_file", metavar="FILE", help="holds the token that servers ask for, also on loopback")


def name_of(flag: str) -> str:
    """`--name=value` without its dashes and value."""
    return flag.lstrip("-").partition("=")[0]


def has_no_effect(flag: str) -> bool:
    """True for a flag of the real binaries that means nothing on CPU devices."""
    name = name_of(flag)
    return (
        name.startswith(_WITHOUT_EFFECT_PREFIXES)
        or name in _WITHOUT_EFFECT
        or name.removeprefix("no") in _WITHOUT_EFFECT
    )


def read_token(path: str | None) -> str:
    """The token in a file, without the white space around it; "" for no file. FlagError for an empty one."""
    if path is None:
        return ""
    try:
        token = Path(path).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise FlagError(f"--token_file {path!r} cannot be read: {error}") from error
    if not token:
        raise FlagError(f"--token_file {path!r} is empty")
    return token


def port_number(text: str) -> int:
    """For argparse: a port, 0 included."""
    if not text.isascii() or not text.isdigit() or int(text) > 65535:
        raise argparse.ArgumentTypeError(f"{text!r} is not a port: 0 to 65535")
    return int(text)


def at_least(least: int) -> Callable[[str], int]:
    """For argparse: takes a whole number that is not below `least`."""

    def number(text: str) -> int:
        if not text.isascii() or not text.isdigit() or len(text) > 9 or int(text) < least:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from {least}")
        return int(text)

    return number


def check_xla_flags(parser: Parser, flags: Sequence[str]) -> None:
    """Asks the installed jaxlib whether it takes these `--xla_*` flags (0.2 s). FlagError names the one it does not."""
    if _jaxlib_takes(flags):
        return
    from pathways_runtime.emulator import schema

    known = frozenset(schema.load().message("xla.DebugOptions").DESCRIPTOR.fields_by_name)
    for flag in flags:
        if not _jaxlib_takes([flag]):
            if name_of(flag) in known:
                raise FlagError(f"flag {flag!r}: this jaxlib does not take the value")
            raise parser.refuse(flag, known)
    raise FlagError(f"this jaxlib does not take these flags together: {' '.join(flags)}")


def _jaxlib_takes(flags: Sequence[str]) -> bool:
    environment = {**os.environ, "XLA_FLAGS": xla_flags_variable(flags)}
    trial = subprocess.run([sys.executable, "-c", _TRIAL], env=environment, capture_output=True, check=False)
    return trial.returncode == 0


def xla_flags_variable(flags: Sequence[str]) -> str:
    """The value of XLA_FLAGS that says these flags, each quoted where it must be.

    FlagError for a value with both kinds of quotes, which XLA cannot read.
    """
    return " ".join(map(_quoted, flags))


def _quoted(flag: str) -> str:
    if not any(character in flag for character in " \t\n'\""):
        return flag
    name, _, value = flag.partition("=")
    for quote in ("'", '"'):
        if quote not in value:
            return f"{name}={quote}{value}{quote}"
    raise FlagError(f"flag {flag!r}: XLA cannot read a value with both ' and \"")


def fail(error: Exception) -> int:
    """Prints a FlagError as the last words of the process; returns its exit code."""
    sys.stderr.write(f"error: {error}\n")
    return _contract.EXIT_BAD_FLAGS
