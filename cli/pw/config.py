"""The settings of `pw`: one table, and where each value came from.

A setting is taken from its flag, else from its `PW_*` variable, else from `~/.config/pw/config.toml`, else (project,
location and cluster) from what gcluster was told last, else from its default.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import math
import os
import re
import sys
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pw.errors import ConfigError

BACKENDS = ("local", "gke")
DEFAULT = "default"


def _setting(read: Callable[[str], Any], help: str, default: Any = dataclasses.MISSING) -> Any:
    return dataclasses.field(default=default, metadata={"read": read, "help": help})


def _matching(pattern: str, want: str) -> Callable[[str], str]:
    def read(text: str) -> str:
        if not re.fullmatch(pattern, text):
            raise ValueError(f"want {want}")
        return text

    return read


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf:
        raise ValueError("want seconds, 0 or more")
    return value


def _path(text: str) -> Path:
    path = Path(text)
    if not path.is_absolute():
        raise ValueError("want an absolute path")
    return path


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """All settings. `backend` is "" where none was named: see `default_backend`. `sources` says in words where each
    came from, such as `PW_CLUSTER` or the path of a file."""

    backend: str = _setting(_matching("|".join(BACKENDS), " or ".join(BACKENDS)), "What runs the jobs.", "")
    project: str = _setting(_matching(r"[a-z0-9.:-]+", "a project's id"), "Google Cloud project.", "")
    location: str = _setting(_matching(r"[a-z0-9-]+", "a region or zone"), "Region or zone of the cluster.", "")
    cluster: str = _setting(_matching(r"[a-z0-9-]+", "a cluster's name"), "GKE cluster.", "")
    namespace: str = _setting(
        _matching(r"[a-z0-9](?:[a-z0-9-]{0,61}[a-z0-9])?", "a namespace's name"), "Namespace of the jobs.", "default"
    )
    state_dir: Path = _setting(_path, "Where local jobs keep their state.")
    local_backoff_s: float = _setting(_seconds, "First wait before a local container restarts; it doubles.", 1.0)
    emulator_python: str = _setting(str, "Python that runs the emulator.", sys.executable)
    sources: Mapping[str, str] = dataclasses.field(default_factory=dict, compare=False)


@dataclass(frozen=True, slots=True)
class _Source:
    """Values as text, by setting, and what to call this source in a message about one of them."""

    values: Mapping[str, str]
    title: Callable[[str], str]


def rows() -> tuple[dataclasses.Field[Any], ...]:
    """The rows of the table; `metadata["help"]` says what each is."""
    return tuple(field for field in dataclasses.fields(Settings) if field.metadata)


def variable(name: str) -> str:
    """The environment variable of a setting."""
    return f"PW_{name.upper()}"


def flag(name: str) -> str:
    """The flag of a setting."""
    return "--gke-namespace" if name == "namespace" else f"--{name.replace('_', '-')}"


def load(
    overrides: Mapping[str, str | None] | None = None,
    environ: Mapping[str, str] = os.environ,
    home: Path | None = None,
) -> Settings:
    """The settings as they hold now. `overrides` are the flags as typed, None for one that was not given.

    Raises ConfigError for an unknown key in the file, and for a value that its setting cannot be, with its source.
    """
    home = home or Path.home()
    given = {name: value for name, value in (overrides or {}).items() if value is not None}
    sources = (
        _Source(given, flag),
        _Source({row.name: environ[variable(row.name)] for row in rows() if environ.get(variable(row.name))}, variable),
        _file(config_path(environ, home)),
        _gcluster(home / ".gcluster" / "context.json"),
    )
    values: dict[str, Any] = {"state_dir": _state_dir(environ, home)}
    titles: dict[str, str] = {}
    for row in rows():
        source = next((source for source in sources if row.name in source.values), None)
        titles[row.name] = source.title(row.name) if source else DEFAULT
        if source:
            values[row.name] = _read(row, source, home)
    return Settings(**values, sources=titles)


def config_path(environ: Mapping[str, str], home: Path) -> Path:
    """Where the user's file of settings is, or would be."""
    return _xdg(environ, "XDG_CONFIG_HOME", home / ".config") / "pw" / "config.toml"


def default_backend(settings: Settings) -> str:
    """The backend that was named; else gke where a cluster is configured, and local where none is."""
    return settings.backend or ("gke" if settings.cluster else "local")


def _state_dir(environ: Mapping[str, str], home: Path) -> Path:
    return _xdg(environ, "XDG_STATE_HOME", home / ".local" / "state") / "pw"


def _xdg(environ: Mapping[str, str], name: str, default: Path) -> Path:
    # The XDG base directory specification has a relative path ignored.
    path = Path(environ.get(name, ""))
    return path if path.is_absolute() else default


def _read(row: dataclasses.Field[Any], source: _Source, home: Path) -> Any:
    text = source.values[row.name]
    if row.type == "Path" and text.startswith("~/"):
        text = str(home / text[2:])
    try:
        return row.metadata["read"](text)
    except ValueError as exc:
        title = source.title(row.name)
        what = (
            f"{title} {text!r}"
            if title in (flag(row.name), variable(row.name))
            else f"setting {row.name} {text!r} in {title}"
        )
        raise ConfigError(f"{what}: {exc}") from exc


def _file(path: Path) -> _Source:
    content = _content(path)
    try:
        table = tomllib.loads(content)
    except tomllib.TOMLDecodeError as exc:
        raise ConfigError(f"{path} is not TOML: {exc}") from exc
    known = [row.name for row in rows()]
    for key, value in table.items():
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"want one of {', '.join(known)}"
            raise ConfigError(f"setting {key!r} in {path} is unknown: {hint}")
        if not isinstance(value, str | int | float) or isinstance(value, bool):
            raise ConfigError(f"setting {key} in {path} is {value!r}: want a string or a number")
    return _Source({key: str(value) for key, value in table.items()}, lambda _name: str(path))


def _gcluster(path: Path) -> _Source:
    content = _content(path)
    try:
        context = json.loads(content) if content else {}
    except ValueError as exc:
        raise ConfigError(f"{path}, which gcluster wrote, is not JSON: {exc}") from exc
    if not isinstance(context, dict):
        raise ConfigError(f"{path}, which gcluster wrote, holds no object")
    values = {name: context.get(name) for name in ("project", "location", "cluster")}
    return _Source(
        {name: value for name, value in values.items() if value and isinstance(value, str)}, lambda _: str(path)
    )


def _content(path: Path) -> str:
    """The text of a file, "" where there is none."""
    try:
        return path.read_text(encoding="utf-8")
    except (FileNotFoundError, NotADirectoryError):
        return ""
    except (OSError, UnicodeDecodeError) as exc:
        raise ConfigError(f"{path} cannot be read: {exc}") from exc
