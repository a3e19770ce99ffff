"""Optax gradient transformations for large batches."""
