"""Shape of an image as a network gets it."""

from __future__ import annotations


def image_shape(side: int, space_to_depth: bool) -> tuple[int, int, int]:
    """Return the shape of a colour image.

    Args:
      side: Height and width in pixels.
      space_to_depth: Whether 2 x 2 pixels are folded into channels.

    >>> image_shape(224, False), image_shape(224, True)
    ((224, 224, 3), (112, 112, 12))
    """
    return (side // 2, side // 2, 12) if space_to_depth else (side, side, 3)
