"""Photographs: from compressed bytes to arrays of one size."""
