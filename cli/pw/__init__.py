"""The launcher: renders, submits, watches and debugs JAX jobs that run on Pathways. It never imports jax."""
