"""Data-parallel meshes and step functions."""
