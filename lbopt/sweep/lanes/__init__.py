"""Trials on devices: programs that many share, and the lanes they run in."""
