"""What a training script imports to run on Pathways. Importing it imports no jax."""
