"""What a recipe costs on a pod that nobody here owns."""

from lbopt.plan.bounds import Grid, Tile, dp_limit, grid, tile

__all__ = ["Grid", "Tile", "dp_limit", "grid", "tile"]
