"""What the flags of `python -m pathways_runtime.emulator` say. Standard library only.

`--node_type=resource_manager` asks for the resource manager, `--resource_manager_address` for a proxy server, and
neither of them for both, with a worker process for each host.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from pathways_runtime import _contract
from pathways_runtime.emulator import flags, link
from pathways_runtime.emulator.flags import FlagError
from pathways_runtime.emulator.resource_manager import DEFAULT_SILENCE_S
from pathways_runtime.emulator.slices import Topology

LOOPBACK: Final = "127.0.0.1"
_LOOPBACK_NAMES: Final = frozenset({LOOPBACK, "localhost", "::1"})
_DEFAULT_INSTANCE: Final = ("tpuv6e:2x4", 2)


@dataclass(frozen=True)
class Settings:
    """What the flags say. `topology` is None for a proxy, which learns it from `resource_manager`."""

    is_manager: bool
    host: str
    port: int
    topology: Topology | None
    resource_manager: tuple[str, int] | None
    silence_s: float
    token: str
    platform: str
    elastic_slices: int
    virtual_slices: tuple[str, ...]
    xla_flags: tuple[str, ...]
    without_effect: tuple[str, ...]


def parse(arguments: Sequence[str]) -> Settings:
    """FlagError for flags that are unknown, contradict each other, or lack one."""
    parser = _parser()
    known, others = parser.split(arguments)
    is_manager = known.node_type is not None
    _check_roles(known, is_manager)
    xla_flags, without_effect = _sort_flags(parser, others)
    default_port = _contract.RESOURCE_MANAGER_PORT if is_manager else _contract.PROXY_PORT
    return Settings(
        is_manager=is_manager,
        host=known.host,
        port=default_port if known.server_port is None else known.server_port,
        topology=None if known.resource_manager_address else _topology(known, needed=is_manager),
        resource_manager=_address(known.resource_manager_address),
        silence_s=known.heartbeat_timeout_s,
        token=flags.read_token(known.token_file),
        platform=known.platform,
        elastic_slices=known.num_elastic_slices,
        virtual_slices=tuple(known.virtual_slices.split(",")) if known.virtual_slices else (),
        xla_flags=xla_flags,
        without_effect=without_effect,
    )


def _parser() -> flags.Parser:
    parser = flags.Parser(
        "pathways_runtime.emulator", "Pathways on CPU devices: a resource manager, a proxy server, or both."
    )
    ports = f"resource manager: {_contract.RESOURCE_MANAGER_PORT}, proxy: {_contract.PROXY_PORT}"
    flags.add_common(parser, ports)
    default_type, default_count = _DEFAULT_INSTANCE
    parser.add_argument("--node_type", choices=[_contract.NODE_TYPE_RESOURCE_MANAGER], help="be a resource manager")
    parser.add_argument("--instance_type", metavar="TYPE", help=f"what each slice is ({default_type})")
    parser.add_argument("--instance_count", type=flags.at_least(1), metavar="N", help=f"slices ({default_count})")
    parser.add_argument("--first_device_id", type=flags.at_least(0), default=0, metavar="ID", help="the lowest id (0)")
    parser.add_argument("--platform", choices=["cpu", "tpu"], default="cpu", help="what device.platform says (cpu)")
    parser.add_argument("--num_elastic_slices", type=flags.at_least(0), default=0, metavar="N", help="that may be lost")
    parser.add_argument("--virtual_slices", default="", metavar="TYPE,...", help="the slices that this proxy asks for")
    parser.add_argument(
        "--sidecar_name", default="", metavar="NAME", help="taken as it is; colocated Python needs none"
    )
    parser.add_argument("--host", default=LOOPBACK, metavar="ADDRESS", help=f"to listen on ({LOOPBACK})")
    parser.add_argument(
        "--heartbeat_timeout_s",
        type=_seconds,
        default=DEFAULT_SILENCE_S,
        metavar="SECONDS",
        help=f"a worker that says nothing for so long is lost ({DEFAULT_SILENCE_S:g})",
    )
    return parser


def is_loopback(host: str) -> bool:
    """True for the names of this machine that no other machine can reach."""
    return host in _LOOPBACK_NAMES


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0.1 <= seconds <= 86400:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds from 0.1 to 86400")
    return seconds


def _check_roles(known: argparse.Namespace, is_manager: bool) -> None:
    if is_manager and known.resource_manager_address:
        raise FlagError("--node_type=resource_manager and --resource_manager_address contradict each other")
    if known.resource_manager_address and (known.instance_type or known.instance_count or known.first_device_id):
        raise FlagError("a proxy asks the resource manager what the slices are: give it --instance_type there")
    if is_manager and known.virtual_slices:
        raise FlagError("--virtual_slices is a flag of the proxy server, not of the resource manager")
    if not is_loopback(known.host) and not known.token_file:
        raise FlagError(f"--host {known.host!r} is not loopback: a --token_file is needed, which clients must know too")


def _sort_flags(parser: flags.Parser, others: Sequence[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The flags that XLA is to have, and those that have no effect. FlagError for any that is neither."""
    without_effect = tuple(flag for flag in others if flags.has_no_effect(flag) or _dumps_to_bucket(flag))
    xla_flags = tuple(flag for flag in others if flag not in without_effect)
    for flag in xla_flags:
        if not flag.startswith("--xla_"):
            raise parser.refuse(flag)
    if xla_flags:
        flags.check_xla_flags(parser, xla_flags)
    return xla_flags, without_effect


def _dumps_to_bucket(flag: str) -> bool:
    """XLA:CPU writes to folders only, and would make one that is called `gs:`."""
    return flag.startswith("--xla_dump_to=gs://")


def _topology(known: argparse.Namespace, *, needed: bool) -> Topology:
    if needed and (known.instance_type is None or known.instance_count is None):
        raise FlagError("a resource manager needs --instance_type=TYPE and --instance_count=N")
    default_type, default_count = _DEFAULT_INSTANCE
    try:
        return Topology(
            known.instance_type or default_type, known.instance_count or default_count, known.first_device_id
        )
    except ValueError as error:
        raise FlagError(f"--instance_type: {error}") from error


def _address(text: str | None) -> tuple[str, int] | None:
    if not text:
        return None
    try:
        return link.parse_address(text)
    except ValueError as error:
        raise FlagError(f"--{_contract.FLAG_RESOURCE_MANAGER}: {error}") from error
