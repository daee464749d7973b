"""Pathways on CPU devices: a server that speaks JAX's IFRT proxy protocol to the unmodified client."""
