"""Which Pathways images go with which JAX. Client and server must be of one JAX, and both servers of one build."""

from __future__ import annotations

import re

# Published as `jax-0.10.0`; used where no JAX is installed beside the launcher.
DEFAULT_JAX = "0.10.0"
_RELEASE = re.compile(r"[0-9]+\.[0-9]+\.[0-9]+")
_JAX_IN_TAG = re.compile(rf"jax[-_](?P<version>{_RELEASE.pattern})")


def installed_jax() -> str | None:
    """The release of the JAX beside the launcher, without importing it; None where there is none."""
    from importlib import metadata  # 10 ms that `pw --help` need not spend

    try:
        release = _RELEASE.match(metadata.version("jax"))
    except metadata.PackageNotFoundError:
        return None
    return release[0] if release else None


def image_tag(jax_version: str | None = None) -> str:
    """The tag of the Pathways images for this JAX; without one, for the installed JAX or `DEFAULT_JAX`."""
    return f"jax-{jax_version or installed_jax() or DEFAULT_JAX}"


def tag_of(image: str) -> str:
    """The tag in an image's name, "" where it has none or is named by its digest."""
    last = image.rpartition("/")[2]
    return "" if "@" in last else last.partition(":")[2]


def jax_of(image: str) -> str:
    """The JAX that an image's tag names, as in `jax-0.10.0` and `20260423-python_3.12-jax_0.10.0`; "" for none."""
    named = _JAX_IN_TAG.search(tag_of(image))
    return named["version"] if named else ""
