"""Boxes that crops cut out of an image, and interpolations; no image library is needed for them."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from lbopt.errors import require, require_choice

SAMPLINGS = ("by_area", "by_height")
LEAST_COVERED = 0.1
"""Least fraction of an image in a box that is drawn "by_height".

It is `min_object_covered` in Google's code, whose object is the whole image.
"""
INTERPOLATIONS = {"bilinear": "INTER_LINEAR", "bicubic": "INTER_CUBIC"}
"""Interpolation -> name of OpenCV's constant."""


class Box(NamedTuple):
    """A rectangle in an image, in pixels."""

    top: int
    left: int
    height: int
    width: int


def random_box(
    rng: np.random.Generator,
    height: int,
    width: int,
    area: tuple[float, float] = (0.08, 1.0),
    ratio: tuple[float, float] = (3 / 4, 4 / 3),
    sampling: str = "by_area",
    attempts: int = 10,
) -> Box:
    """Return a random box for a random-resized crop (Szegedy et al., arXiv 1409.4842v1, section 6).

    Args:
      rng: Source of the random numbers.
      height: Height of the image.
      width: Width of the image.
      area: Least and largest fraction of the image's area in the box.
      ratio: Least and largest width / height of the box.
      sampling: "by_area" samples the area and the logarithm of the ratio uniformly, as torchvision
        does. "by_height" samples the ratio uniformly, then the height uniformly among those that
        the area allows, as TensorFlow's sample_distorted_bounding_box and thus Google's ResNet and
        EfficientNet do; boxes that cover less than `LEAST_COVERED` of the image are rejected.
      attempts: Maximum number of samples. If none of them fits, the result is the largest central
        box within `ratio`, or with "by_height" the central square of evaluation. A "by_height" box
        that is the whole image is replaced by the central square, too.

    Returns:
      A box inside the image.

    Raises:
      UserError: If `area`, `ratio` or `sampling` is no such value.

    References:
      tensorflow/tpu@e380f765021a8853abfbfd53af727604039a7d8c:
      models/official/resnet/resnet_preprocessing.py and
      models/official/efficientnet/preprocessing.py.
      pytorch/vision@6247d96d3ce658d553e4e2ceea5cedd77f715b29:torchvision/transforms/transforms.py,
      RandomResizedCrop.get_params, for "by_area".
      tensorflow/tensorflow@27b00cb6ae84b1f8ca5d54c6dac7d37067be46bb:tensorflow/core/kernels/image/
      sample_distorted_bounding_box_op.cc, GenerateRandomCrop, for "by_height".

    Note:
      TensorFlow's kernel adds or takes one row where rounding puts the area outside its range, and
      never puts a box that is smaller than the image at its last row or column. Neither is so here.
    """
    check_boxes(area, ratio, sampling)
    size_of = _by_area if sampling == "by_area" else _by_height
    for first, second, down, across in rng.random((attempts, 4)).tolist():
        size = size_of(first, second, height, width, area, ratio)
        if size is None:
            continue
        if sampling == "by_height" and size == (height, width):
            break
        top = int(down * (height - size[0] + 1))
        left = int(across * (width - size[1] + 1))
        return Box(top, left, *size)
    return _largest(height, width, ratio) if sampling == "by_area" else central_box(height, width)


def check_boxes(area: tuple[float, float], ratio: tuple[float, float], sampling: str) -> None:
    """Raise `UserError` unless `random_box` takes these arguments."""
    require_choice("sampling", sampling, SAMPLINGS)
    fix = "give (low, high) with 0 < low <= high <= 1"
    require(0 < area[0] <= area[1] <= 1, "area", area, fix)
    fix = "give (low, high) with 0 < low <= high < 100"
    require(0 < ratio[0] <= ratio[1] < 100, "ratio", ratio, fix)


def check_interpolation(interpolation: str) -> None:
    """Raise `UserError` unless `train_crop` takes this interpolation."""
    require_choice("interpolation", interpolation, INTERPOLATIONS)


def _by_area(first, second, height, width, area, ratio) -> tuple[int, int] | None:
    """Return (height, width) of a box from two numbers in [0, 1); None if it does not fit."""
    pixels = height * width * _between(area[0], area[1], first)
    box_ratio = math.exp(_between(math.log(ratio[0]), math.log(ratio[1]), second))
    box_height = round(math.sqrt(pixels / box_ratio))
    box_width = round(math.sqrt(pixels * box_ratio))
    return (box_height, box_width) if 0 < box_height <= height and 0 < box_width <= width else None


def _by_height(first, second, height, width, area, ratio) -> tuple[int, int] | None:
    """Return (height, width) of a box from two numbers in [0, 1); None if it does not fit."""
    box_ratio = _between(ratio[0], ratio[1], first)
    least, most = (round(math.sqrt(height * width * part / box_ratio)) for part in area)
    # At most the height whose width still rounds to that of the image.
    most = min(most, height, math.floor((width + 0.499) / box_ratio))
    box_height = least if least >= most else least + int(second * (most + 1 - least))
    box_width = round(box_height * box_ratio)
    fits = 0 < box_height <= height and 0 < box_width <= width
    covers = box_height * box_width >= LEAST_COVERED * height * width
    return (box_height, box_width) if fits and covers else None


def _between(low: float, high: float, fraction: float) -> float:
    return low + (high - low) * fraction


def _largest(height: int, width: int, ratio: tuple[float, float]) -> Box:
    """Return the largest central box whose ratio is allowed."""
    box_height = min(height, round(width / ratio[0]))
    box_width = min(width, round(height * ratio[1]))
    return Box((height - box_height) // 2, (width - box_width) // 2, box_height, box_width)


def central_box(height: int, width: int, fraction: float = 0.875) -> Box:
    """Return the central square that is used in evaluation.

    The default of 7/8 is the central 224 x 224 of an image whose shorter side is resized to 256, as
    in Google's ResNet code. Its EfficientNet code uses that fraction at every size, up to rounding.

    Args:
      height: Height of the image.
      width: Width of the image.
      fraction: Side of the square over the shorter side of the image, in (0, 1].

    >>> central_box(512, 768)
    Box(top=32, left=160, height=448, width=448)
    """
    require(0 < fraction <= 1, "fraction", fraction, "give a number in (0, 1]")
    side = max(1, int(min(height, width) * fraction))
    return Box((height - side + 1) // 2, (width - side + 1) // 2, side, side)
