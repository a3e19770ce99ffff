"""Exact distributed evaluation."""
