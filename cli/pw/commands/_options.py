"""The options of `pw job submit` that come from `JobSpec`'s table: their declarations, and what was typed."""

from __future__ import annotations

import inspect
import shlex
from collections.abc import Callable, Mapping
from typing import Annotated, Any

import typer

from pw import fields, specs
from pw.errors import SpecError
from pw.fields import Option

_METAVARS = {
    fields.INTEGER: "N",
    fields.DURATION: "DURATION",
    fields.QUANTITY: "SIZE",
    fields.PAIRS: "NAME=VALUE",
    fields.MOUNTS: "SOURCE:TARGET",
    fields.EXIT_CODES: "CODES",
    fields.COMMA_LIST: "NAMES",
    fields.ARGUMENTS: "ARGS",
}


def from_table(command: Callable[..., None]) -> Callable[..., None]:
    """`command` with an option for each way to type a field, None where it was not typed, instead of its `**typed`."""
    signature = inspect.signature(command, eval_str=True)
    own = [each for each in signature.parameters.values() if each.kind is not inspect.Parameter.VAR_KEYWORD]
    command.__signature__ = signature.replace(parameters=[*own, *_parameters()])  # type: ignore[attr-defined]
    return command


def _parameters() -> list[inspect.Parameter]:
    found: list[inspect.Parameter] = []
    for option in specs.options():
        found.append(_parameter(option.name, _kind(option), option.flags, option, _help(option)))
        if option.single:
            help = f"One argument more, taken as it is, as in {option.single}=--name=VALUE."
            found.append(_parameter(_single_name(option), list[str] | None, (option.single,), option, help, "ARG"))
    return found


def typed_fields(typed: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a JobSpec that were typed, by their names. Raises SpecError with the flag and what it wants."""
    found: dict[str, Any] = {}
    for option in specs.options():
        value = typed[option.name]
        if option.single and typed[_single_name(option)]:
            value = [*(value or ()), *map(shlex.quote, typed[_single_name(option)])]
        if isinstance(value, bool):
            found[option.name] = value
        elif value is not None:
            found[option.name] = _read(option, [value] if isinstance(value, str) else value)
    return found


def merged(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of both: those of `over` win. NAME=VALUE fields are joined name by name."""
    found = {**base, **over}
    for option in specs.options():
        if option.text is fields.PAIRS and option.name in base and option.name in over:
            found[option.name] = tuple({**dict(base[option.name]), **dict(over[option.name])}.items())
    return found


def missing(given: Mapping[str, Any]) -> list[Option]:
    """The rows without which there is no job, and that were not given."""
    needed = [option for option in specs.options() if option.required and option.name != "name"]
    if not given.get("pathways_headless"):
        needed += [option for option in specs.options() if option.name == "command"]
    return [option for option in needed if option.name not in given]


def _parameter(
    name: str, kind: Any, flags: tuple[str, ...], option: Option, help: str, metavar: str | None = None
) -> inspect.Parameter:
    declaration = typer.Option(
        *_declarations(flags, kind),
        help=help,
        metavar=metavar or _METAVARS.get(option.text, "TEXT" if option.text is not fields.FLAG else None),
        rich_help_panel=option.panel,
        show_default=False,
    )
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[kind, declaration]
    )


def _declarations(flags: tuple[str, ...], kind: Any) -> tuple[str, ...]:
    if kind == bool | None:
        return (f"{flags[0]}/--no-{flags[0].removeprefix('--')}", *flags[1:])
    return flags


def _kind(option: Option) -> Any:
    if option.text is fields.FLAG:
        return bool | None
    return list[str] | None if option.text.repeatable else str | None


def _single_name(option: Option) -> str:
    return (option.single or "").removeprefix("--").replace("-", "_")


def _help(option: Option) -> str:
    note = "needed" if option.required else f"default {_default(option)}" if _default(option) else ""
    if option.name == "name":
        note = "made from the command if left out"
    return f"{option.help} ({note})" if note else option.help


def _default(option: Option) -> str:
    """The default as it would be typed, "" where that is nothing."""
    if option.text is fields.FLAG or option.default in ("", ()):
        return ""
    return " ".join(option.text.write(option.default))


def _read(option: Option, texts: list[str]) -> Any:
    try:
        return option.text.read(texts)
    except ValueError as exc:
        what = option.flags[0] if option.text.repeatable else f"{option.flags[0]} {texts[-1]!r}"
        raise SpecError(f"{what}: {exc}") from exc
