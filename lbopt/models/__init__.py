"""Flax modules."""
