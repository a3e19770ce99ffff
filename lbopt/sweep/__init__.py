"""Batch-size-limit studies."""
