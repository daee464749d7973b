"""The wheel: what is in it, what it asks for, and that the command works from it."""

from __future__ import annotations

import ast
import email.parser
import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The unpacked wheel of this checkout."""
    folder = tmp_path_factory.mktemp("wheel")
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    subprocess.run(build, cwd=ROOT, check=True, capture_output=True)
    (archive,) = folder.glob("*.whl")
    zipfile.ZipFile(archive).extractall(folder / "site")
    return folder / "site"


def requirements(wheel: Path) -> list[str]:
    (metadata,) = wheel.glob("*.dist-info/METADATA")
    return email.parser.Parser().parsestr(metadata.read_text(encoding="utf-8")).get_all("Requires-Dist", [])


@pytest.mark.parametrize(
    ("folder", "packed"), [("cli/pw", "pw"), ("pathways_runtime", "pathways_runtime"), ("templates", "pw/templates")]
)
def test_every_file_of_the_packages_is_in_it(wheel: Path, folder: str, packed: str) -> None:
    files = [path.relative_to(ROOT / folder) for path in (ROOT / folder).rglob("*") if path.is_file()]
    wanted = {path for path in files if "__pycache__" not in path.parts}
    assert wanted
    assert wanted <= {path.relative_to(wheel / packed) for path in (wheel / packed).rglob("*")}


def test_the_plain_install_and_the_runtime_bring_nothing_of_the_launcher_s(wheel: Path) -> None:
    assert [line for line in requirements(wheel) if "extra ==" not in line] == []
    runtime = [line for line in requirements(wheel) if "extra == 'runtime'" in line]
    assert [line.split(">")[0] for line in runtime] == ["jax"]


def test_the_launcher_asks_for_no_jax(wheel: Path) -> None:
    for extra in ("cli", "gke"):
        lines = [line for line in requirements(wheel) if f"extra == '{extra}'" in line]
        assert lines
        assert not any("jax" in line or "[local]" in line or "[emulator]" in line for line in lines)


def test_the_command_renders_from_the_wheel(wheel: Path, tmp_path: Path) -> None:
    command = "import pw, sys; from pw.__main__ import main; print(pw.__file__, file=sys.stderr); sys.exit(main())"
    job = ["job", "submit", "--name", "digits", "--compute-type", "v6e-8", "--dry-run", "--", "true"]
    environ = os.environ | {"PYTHONPATH": str(wheel), "HOME": str(tmp_path), "XDG_STATE_HOME": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", command, *job], cwd=tmp_path, env=environ, capture_output=True, text=True, check=True
    )
    assert done.stderr.splitlines()[0].startswith(str(wheel))
    assert 'kind: "JobSet"' in done.stdout


# Packages whose distribution has another name.
DISTRIBUTIONS = {
    "google.auth": "google-auth",
    "google.cloud": "google-cloud-storage",
    "google.protobuf": "protobuf",
    "jaxlib": "jax",
    "ml_dtypes": "ml-dtypes",
    "websocket": "websocket-client",
    "yaml": "pyyaml",
}


def imported(folder: Path) -> set[str]:
    """The distributions whose packages the modules of a folder import, at any level."""
    nodes = [node for path in folder.rglob("*.py") for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))]
    names = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    names += [node.module for node in nodes if isinstance(node, ast.ImportFrom) and node.module and not node.level]
    own = sys.stdlib_module_names | {"pw", "pathways_runtime"}
    return {_distribution(name) for name in names if name.partition(".")[0] not in own}


def _distribution(name: str) -> str:
    top = name.partition(".")[0]
    return next((found for prefix, found in DISTRIBUTIONS.items() if f"{name}.".startswith(f"{prefix}.")), top)


@pytest.mark.parametrize(
    ("folder", "extras"), [("pathways_runtime/emulator", ("runtime", "emulator")), ("cli/pw", ("cli", "gke"))]
)
def test_an_extra_asks_for_all_that_its_code_imports(wheel: Path, folder: str, extras: tuple[str, ...]) -> None:
    lines = [line for line in requirements(wheel) if any(f"extra == '{extra}'" in line for extra in extras)]
    assert imported(ROOT / folder) <= {re.split(r"[^\w-]", line)[0] for line in lines}
