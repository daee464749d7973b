"""What a user should know of a job before it is sent, whatever runs it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from pathways_runtime import _contract
from pw import versions

if TYPE_CHECKING:
    from pw.specs import JobSpec


def platforms(containers: Iterable[Mapping[str, Any]]) -> Iterator[str]:
    """A note for a command that is given a JAX_PLATFORMS without the proxy."""
    for container in containers:
        for variable in container.get("env", ()):
            value = variable.get("value", "")
            if (container["name"], variable["name"]) != (_contract.USER_CONTAINER, _contract.JAX_PLATFORMS):
                continue
            if _contract.PROXY_PLATFORM not in value.split(","):
                yield (
                    f"{_contract.JAX_PLATFORMS}={value}: the command will not use Pathways, which is platform "
                    f"{_contract.PROXY_PLATFORM!r}"
                )


def image_tag(spec: JobSpec) -> str:
    """Where the tag of Pathways' images is from, "" where the user gave it in one of them."""
    given = (spec.pathways_proxy_server_image, spec.pathways_server_image)
    if any(map(versions.tag_of, given)) or versions.jax_of(spec.pathways_colocated_python_sidecar_image):
        return ""
    installed = versions.installed_jax()
    why = "the JAX that is installed here" if installed else "as no JAX is installed here"
    return f"Pathways' images are those of {versions.image_tag()}, {why}; others with --pathways-proxy-server-image"
