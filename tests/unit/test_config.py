from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from pw import backends, config
from pw.errors import ConfigError


def _write(home: Path, text: str) -> Path:
    path = home / ".config" / "pw" / "config.toml"
    path.parent.mkdir(parents=True)
    path.write_text(text)
    return path


def _write_context(home: Path, text: str) -> Path:
    path = home / ".gcluster" / "context.json"
    path.parent.mkdir()
    path.write_text(text)
    return path


def _refusal(home: Path, overrides: dict[str, str | None] | None = None, environ: dict[str, str] | None = None) -> str:
    with pytest.raises(ConfigError) as caught:
        config.load(overrides, environ or {}, home)
    return str(caught.value)


def test_defaults(tmp_path: Path) -> None:
    settings = config.load({}, {}, tmp_path)
    assert (settings.project, settings.location, settings.cluster, settings.namespace) == ("", "", "", "default")
    assert settings.state_dir == tmp_path / ".local" / "state" / "pw"
    assert settings.emulator_python == sys.executable
    assert set(settings.sources.values()) == {"default"}
    assert config.default_backend(settings) == "local"


def test_a_flag_wins_over_a_variable_over_the_file_over_gcluster(tmp_path: Path) -> None:
    file = _write(tmp_path, 'project = "of-file"\nlocation = "of-file"\nnamespace = "of-file"\n')
    values = {"project": "of-gcluster", "location": "of-gcluster", "cluster": "of-gcluster"}
    context = _write_context(tmp_path, json.dumps(values))
    environ = {"PW_PROJECT": "of-variable", "PW_LOCATION": "of-variable", "PW_NAMESPACE": ""}
    settings = config.load({"project": "of-flag", "location": None}, environ, tmp_path)
    found = (settings.project, settings.location, settings.namespace, settings.cluster)
    assert found == ("of-flag", "of-variable", "of-file", "of-gcluster")
    sources = [settings.sources[name] for name in ("project", "location", "namespace", "cluster", "backend")]
    assert sources == ["--project", "PW_LOCATION", str(file), str(context), "default"]


def test_a_configured_cluster_makes_gke_the_backend_unless_one_is_named(tmp_path: Path) -> None:
    environ = {"PW_CLUSTER": "c1"}
    assert config.default_backend(config.load({}, environ, tmp_path)) == "gke"
    assert config.default_backend(config.load({"backend": "local"}, environ, tmp_path)) == "local"


def test_xdg_folders_are_followed_if_absolute(tmp_path: Path) -> None:
    (tmp_path / "xdg" / "pw").mkdir(parents=True)
    (tmp_path / "xdg" / "pw" / "config.toml").write_text('cluster = "c1"\n')
    environ = {"XDG_CONFIG_HOME": str(tmp_path / "xdg"), "XDG_STATE_HOME": "relative"}
    settings = config.load({}, environ, tmp_path)
    assert settings.cluster == "c1"
    assert settings.state_dir == tmp_path / ".local" / "state" / "pw"
    environ["XDG_STATE_HOME"] = str(tmp_path / "state")
    assert config.load({}, environ, tmp_path).state_dir == tmp_path / "state" / "pw"


def test_values_become_what_their_setting_is(tmp_path: Path) -> None:
    _write(tmp_path, 'local_backoff_s = 0.25\nstate_dir = "~/jobs"\n')
    settings = config.load({}, {}, tmp_path)
    assert settings.local_backoff_s == 0.25
    assert settings.state_dir == tmp_path / "jobs"


def test_an_unknown_key_in_the_file_is_refused_with_the_nearest(tmp_path: Path) -> None:
    file = _write(tmp_path, 'cluter = "c1"\n')
    assert _refusal(tmp_path) == f"setting 'cluter' in {file} is unknown: did you mean 'cluster'?"


def test_a_key_like_no_setting_is_refused_with_the_list(tmp_path: Path) -> None:
    _write(tmp_path, "[zzz]\nx = 1\n")
    assert "is unknown: want one of backend, project, location, cluster" in _refusal(tmp_path)


@pytest.mark.parametrize(
    ("name", "value", "want"),
    [
        ("backend", "docker", "want local or gke"),
        ("local_backoff_s", "soon", "want seconds, 0 or more"),
        ("local_backoff_s", "-1", "want seconds, 0 or more"),
        ("local_backoff_s", "inf", "want seconds, 0 or more"),
        ("state_dir", "jobs", "want an absolute path"),
        ("cluster", "a b", "want a cluster's name"),
        ("namespace", "My_Space", "want a namespace's name"),
        ("project", "p; rm", "want a project's id"),
    ],
)
def test_a_bad_value_is_refused_with_key_value_and_source(tmp_path: Path, name: str, value: str, want: str) -> None:
    file = _write(tmp_path, f'{name} = "{value}"\n')
    variable = f"PW_{name.upper()}"
    flag = {"namespace": "--gke-namespace"}.get(name, f"--{name.replace('_', '-')}")
    assert _refusal(tmp_path) == f"setting {name} {value!r} in {file}: {want}"
    assert _refusal(tmp_path, environ={variable: value}) == f"{variable} {value!r}: {want}"
    assert _refusal(tmp_path, {name: value}) == f"{flag} {value!r}: {want}"


@pytest.mark.parametrize("value", ["true", "[1]", "{ a = 1 }"])
def test_a_value_of_another_type_is_refused(tmp_path: Path, value: str) -> None:
    file = _write(tmp_path, f"cluster = {value}\n")
    assert _refusal(tmp_path).startswith(f"setting cluster in {file} is ")


def test_files_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    file = _write(tmp_path, "cluster = \n")
    assert _refusal(tmp_path).startswith(f"{file} is not TOML: ")
    file.write_bytes(b'cluster = "\xff"\n')
    assert _refusal(tmp_path).startswith(f"{file} cannot be read: ")
    file.unlink()
    file.mkdir()
    assert _refusal(tmp_path).startswith(f"{file} cannot be read: ")


@pytest.mark.parametrize(("text", "what"), [("{", "is not JSON"), ("[]", "holds no object")])
def test_a_broken_context_of_gcluster_is_named(tmp_path: Path, text: str, what: str) -> None:
    context = _write_context(tmp_path, text)
    assert _refusal(tmp_path).startswith(f"{context}, which gcluster wrote, {what}")


def test_the_backends_that_can_be_set_are_those_that_exist() -> None:
    assert set(config.BACKENDS) == set(backends.BACKENDS)
