"""Evaluation on many devices in which every example counts exactly once."""
