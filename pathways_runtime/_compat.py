"""Every private name of jax and jaxlib that we use, each with the versions it was seen in."""

from __future__ import annotations


def backends_are_initialized() -> bool:
    """Whether JAX has made its devices; asks without making them. `jax._src.xla_bridge`, jax 0.8 to 0.10."""
    from jax._src import xla_bridge

    return bool(xla_bridge.backends_are_initialized())
