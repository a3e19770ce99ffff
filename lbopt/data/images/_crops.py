"""Crops of an image, resized for the network."""

from __future__ import annotations

import math

import cv2
import numpy as np
from PIL import Image

from lbopt.data.images import _decode
from lbopt.data.images._boxes import INTERPOLATIONS, Box, central_box, check_interpolation


def train_crop(
    data: bytes, box: Box, size: int, interpolation: str = "bilinear", out: np.ndarray | None = None
) -> np.ndarray:
    """Decode a box of an image and resize it, fast.

    The decoder scales down as far as it can, then OpenCV interpolates.

    Args:
      data: Bytes of the image file.
      box: The box, in pixels of the unscaled image.
      size: Side of the result.
      interpolation: "bilinear" or "bicubic": 2 x 2 or 4 x 4 neighbours, at any scale.
      out: uint8 [size, size, 3], contiguous, for the result; None for a new array.

    Returns:
      uint8 [size, size, 3].

    Raises:
      UserError: If the interpolation is unknown.
      UnreadableImage: If the bytes are no whole image.
    """
    check_interpolation(interpolation)
    height, width = _decode.read_size(data)
    shrink = _power_of_two(min(box.height, box.width) / size)
    bottom_row = box.top + box.height + shrink  # rounding may need one row below the box
    image = _decode.decode(data, shrink, bottom_row)

    # The decoder may have ignored `shrink`. It may also have left out rows below the box, so the
    # vertical scale is computed from it.
    across = image.shape[1] / width
    down = across if across == 1 else -(-height // shrink) / height
    top = round(box.top * down)
    left = round(box.left * across)
    bottom = round((box.top + box.height) * down)
    right = round((box.left + box.width) * across)
    part = image[top : max(bottom, top + 1), left : max(right, left + 1)]
    flag = getattr(cv2, INTERPOLATIONS[interpolation])
    return cv2.resize(part, (size, size), dst=out, interpolation=flag)


def _power_of_two(shrink: float) -> int:
    """Return the largest power of two that is at most `shrink` and at most 8.

    JPEGs are decoded fast at 1/2, 1/4 and 1/8 of their size; 7/8 to 5/8 take longer than the whole.
    """
    return 2 ** min(max(0, math.floor(math.log2(shrink))), 3)


def mirror(image: np.ndarray) -> None:
    """Exchange left and right in place, far faster than NumPy copies a reversed view."""
    cv2.flip(image, 1, dst=image)


def eval_crop(
    data: bytes,
    size: int,
    fraction: float = 0.875,
    resampling: Image.Resampling = Image.Resampling.BICUBIC,
) -> np.ndarray:
    """Decode the whole image, and resize its central square with Pillow's antialiased resampling.

    Args:
      data: Bytes of the image file.
      size: Side of the result.
      fraction: Side of the square over the shorter side of the image, see `central_box`.
      resampling: Filter of Pillow.

    Returns:
      uint8 [size, size, 3].

    Raises:
      UnreadableImage: If the bytes are no whole image.
    """
    image = _decode.decode(data)
    top, left, side, _ = central_box(image.shape[0], image.shape[1], fraction)
    part = Image.fromarray(image[top : top + side, left : left + side])
    return np.asarray(part.resize((size, size), resampling))
