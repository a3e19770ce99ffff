"""The shape in which an image is handed to a network."""

from __future__ import annotations


def image_shape(side: int, space_to_depth: bool) -> tuple[int, int, int]:
    """Return the shape of a coloured image of `side` x `side` pixels, with 2 x 2 of them folded into channels if asked.

    >>> image_shape(224, False), image_shape(224, True)
    ((224, 224, 3), (112, 112, 12))
    """
    return (side // 2, side // 2, 12) if space_to_depth else (side, side, 3)
