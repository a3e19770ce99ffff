"""Which part of an image is looked at, and that part at the size of the network."""

from __future__ import annotations

import math
from typing import NamedTuple

import cv2
import numpy as np
from PIL import Image

from lbopt.data.images import _decode
from lbopt.errors import require, require_choice

SAMPLINGS = ("by_area", "by_height")
LEAST_COVERED = 0.1
"""Of an image, by boxes drawn "by_height": the `min_object_covered` of Google's code, where the object is the whole image."""
INTERPOLATIONS = {"bilinear": cv2.INTER_LINEAR, "bicubic": cv2.INTER_CUBIC}


class Box(NamedTuple):
    """A part of an image, in pixels."""

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
    """Draw a box for a random-resized crop (Szegedy et al., arXiv 1409.4842, section 6).

    Args:
      rng: from which it is drawn.
      height: of the image.
      width: of the image.
      area: least and largest part of the image's area.
      ratio: least and largest width / height.
      sampling: "by_area" draws the area and the logarithm of the ratio uniformly, as torchvision does. "by_height" draws the
        ratio uniformly, then the height uniformly among those that the area allows, as TensorFlow's
        sample_distorted_bounding_box does, and so Google's ResNet and EfficientNet; boxes that cover less than
        `LEAST_COVERED` of the image are drawn again.
      attempts: after so many that do not fit, the largest central box within `ratio` is taken; "by_height" the central
        square of evaluation, also in the place of a whole image.

    Returns:
      A box inside the image.

    References:
      tensorflow/tpu, models/official/resnet/resnet_preprocessing.py and models/official/efficientnet/preprocessing.py;
      the sampling itself is that of TensorFlow's kernel and of torchvision's RandomResizedCrop
      [recalled 90%: neither was read].
    """
    require_choice("sampling", sampling, SAMPLINGS)
    size_of = _by_area if sampling == "by_area" else _by_height
    for one, other, down, across in rng.random((attempts, 4)).tolist():
        size = size_of(one, other, height, width, area, ratio)
        if size is not None:
            if sampling == "by_height" and size == (height, width):
                break
            return Box(
                int(down * (height - size[0] + 1)), int(across * (width - size[1] + 1)), *size
            )
    return _largest(height, width, ratio) if sampling == "by_area" else central_box(height, width)


def _by_area(one, other, height, width, area, ratio) -> tuple[int, int] | None:
    """Return (height, width) of a box from two numbers in [0, 1); None if it does not fit."""
    pixels = height * width * _between(area[0], area[1], one)
    drawn = math.exp(_between(math.log(ratio[0]), math.log(ratio[1]), other))
    box_height, box_width = round(math.sqrt(pixels / drawn)), round(math.sqrt(pixels * drawn))
    return (box_height, box_width) if 0 < box_height <= height and 0 < box_width <= width else None


def _by_height(one, other, height, width, area, ratio) -> tuple[int, int] | None:
    drawn = _between(ratio[0], ratio[1], one)
    least, most = (round(math.sqrt(height * width * part / drawn)) for part in area)
    most = min(most, height, math.floor((width + 0.499) / drawn))
    box_height = least if least >= most else least + int(other * (most + 1 - least))
    box_width = round(box_height * drawn)
    fits = 0 < box_height <= height and 0 < box_width <= width
    return (
        (box_height, box_width)
        if fits and box_height * box_width >= LEAST_COVERED * height * width
        else None
    )


def _between(low: float, high: float, part: float) -> float:
    return low + (high - low) * part


def _largest(height: int, width: int, ratio: tuple[float, float]) -> Box:
    box_height, box_width = (
        min(height, round(width / ratio[0])),
        min(width, round(height * ratio[1])),
    )
    return Box((height - box_height) // 2, (width - box_width) // 2, box_height, box_width)


def central_box(height: int, width: int, fraction: float = 0.875) -> Box:
    """Return the central square that evaluation looks at.

    7/8 is what remains of an image resized to a shorter side of 256 when its central 224 x 224 are cut out. Google's
    ResNet code takes that part, and its EfficientNet code at every size, up to rounding.

    Args:
      height: of the image.
      width: of the image.
      fraction: side of the square over the shorter side of the image, in (0, 1].

    >>> central_box(512, 768)
    Box(top=32, left=160, height=448, width=448)
    """
    require(0 < fraction <= 1, "fraction", fraction, "give a number in (0, 1]")
    side = max(1, int(min(height, width) * fraction))
    return Box((height - side + 1) // 2, (width - side + 1) // 2, side, side)


def train_crop(
    data: bytes, box: Box, size: int, interpolation: str = "bilinear", out: np.ndarray | None = None
) -> np.ndarray:
    """Decode a box at `size` x `size`, fast: the decoder scales down as far as it can, then OpenCV interpolates.

    Args:
      data: the image file.
      box: in pixels of the unscaled image.
      size: of the result.
      interpolation: "bilinear" or "bicubic", of 2 x 2 or 4 x 4 neighbours however small the result.
      out: uint8 [size, size, 3] to write into, contiguous.

    Returns:
      uint8 [size, size, 3].

    Raises:
      UnreadableImage: if the bytes are no whole image.
    """
    require_choice("interpolation", interpolation, tuple(INTERPOLATIONS))
    height, width = _decode.read_size(data)
    shrink = _power_of_two(min(box.height, box.width) / size)
    image = _decode.decode(
        data, shrink, box.top + box.height + shrink
    )  # a row more: rounding may ask for it
    across = image.shape[1] / width
    down = across if across == 1 else -(-height // shrink) / height
    top, left = round(box.top * down), round(box.left * across)
    bottom, right = round((box.top + box.height) * down), round((box.left + box.width) * across)
    part = image[top : max(bottom, top + 1), left : max(right, left + 1)]
    return cv2.resize(part, (size, size), dst=out, interpolation=INTERPOLATIONS[interpolation])


def _power_of_two(shrink: float) -> int:
    """Return the largest power of two up to a factor and to 8: JPEGs shrink fast by these, and by 7/8 to 5/8 more slowly than not at all."""
    return 2 ** min(max(0, math.floor(math.log2(shrink))), 3)


def mirror(image: np.ndarray) -> None:
    """Exchange left and right in place: NumPy takes far longer to copy its view."""
    cv2.flip(image, 1, dst=image)


def eval_crop(
    data: bytes,
    size: int,
    fraction: float = 0.875,
    resampling: Image.Resampling = Image.Resampling.BICUBIC,
) -> np.ndarray:
    """Decode the central square at `size` x `size`, exactly: the whole image decoded, then Pillow's antialiased resampling.

    Args:
      data: the image file.
      size: of the result.
      fraction: see `central_box`.
      resampling: one of Pillow's.

    Returns:
      uint8 [size, size, 3].

    Raises:
      UnreadableImage: if the bytes are no whole image.
    """
    image = _decode.decode(data)
    top, left, side, _ = central_box(image.shape[0], image.shape[1], fraction)
    part = Image.fromarray(image[top : top + side, left : left + side])
    return np.asarray(part.resize((size, size), resampling))
