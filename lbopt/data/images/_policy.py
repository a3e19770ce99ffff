"""Rules of augmentation policies; no image library is needed for them."""

from __future__ import annotations

from lbopt.errors import require, require_choice

AUGMENTATIONS = ("none", "autoaugment", "randaugment")


def check_policy(name: str, num_layers: int, magnitude: float) -> None:
    """Raise `UserError` unless `Policy` takes these arguments.

    Recipes use magnitudes up to 30, at which images are sheared by 42 degrees.
    """
    require_choice("name", name, AUGMENTATIONS)
    require(num_layers >= 0, "num_layers", num_layers, "give a number >= 0")
    require(0 <= magnitude < 31, "magnitude", magnitude, "give a number in [0, 31)")
