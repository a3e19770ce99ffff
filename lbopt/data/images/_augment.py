"""AutoAugment and RandAugment, as in Google's EfficientNet code.

An operation has a level from 0 to 10 (RandAugment allows more). Each operation has its own scale
from levels to degrees, pixels, thresholds or factors. Geometric operations take the nearest pixel,
fill with grey, and choose their direction at random.

References:
  Cubuk et al., AutoAugment, arXiv 1805.09501v3; Cubuk et al., RandAugment, arXiv 1909.13719v2;
  tensorflow/tpu@e380f765021a8853abfbfd53af727604039a7d8c:
  models/official/efficientnet/autoaugment.py.

Note:
  The operations are Pillow's. The source computes "Contrast" around the number of pixels over 256
  (white from 256 x 256 pixels on), Pillow around the mean brightness. The AutoAugment policy does
  not contain it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from PIL import Image, ImageEnhance, ImageOps

from lbopt.data.images._policy import check_policy

GREY = (128, 128, 128)
_TOP = 10.0
"""The level for which the scales of the operations are given."""


class Reach(NamedTuple):
    """Distances in pixels at level 10.

    Attributes:
      translate: Distance by which an image is moved.
      cutout: Half the side of the square that is cut out.
    """

    translate: float
    cutout: float


ImageOperation = Callable[[Image.Image, float, Reach, np.random.Generator], Image.Image]
"""(image, level, reach, rng) -> image."""


def _signed(value: float, rng: np.random.Generator) -> float:
    return value if rng.random() < 0.5 else -value


def _affine(image: Image.Image, coefficients: tuple[float, ...]) -> Image.Image:
    return image.transform(
        image.size, Image.Transform.AFFINE, coefficients, Image.Resampling.NEAREST, fillcolor=GREY
    )


def _rotate(image, level, reach, rng):
    degrees = _signed(30 * level / _TOP, rng)
    return image.rotate(degrees, Image.Resampling.NEAREST, fillcolor=GREY)


def _shear_x(image, level, reach, rng):
    return _affine(image, (1, _signed(0.3 * level / _TOP, rng), 0, 0, 1, 0))


def _shear_y(image, level, reach, rng):
    return _affine(image, (1, 0, 0, _signed(0.3 * level / _TOP, rng), 1, 0))


def _translate_x(image, level, reach, rng):
    return _affine(image, (1, 0, _signed(reach.translate * level / _TOP, rng), 0, 1, 0))


def _translate_y(image, level, reach, rng):
    return _affine(image, (1, 0, 0, 0, 1, _signed(reach.translate * level / _TOP, rng)))


def _posterize(image, level, reach, rng):
    bits = min(int(4 * level / _TOP), 8)
    return Image.fromarray(np.asarray(image) & np.uint8(256 - (1 << (8 - bits))))


def _solarize(image, level, reach, rng):
    return ImageOps.solarize(image, int(256 * level / _TOP))


def _solarize_add(image, level, reach, rng):
    values = np.asarray(image)
    brighter = np.minimum(values.astype(np.int16) + int(110 * level / _TOP), 255).astype(np.uint8)
    return Image.fromarray(np.where(values < 128, brighter, values))


def _cutout(image, level, reach, rng):
    half = int(reach.cutout * level / _TOP)
    row = int(rng.integers(image.height))
    column = int(rng.integers(image.width))
    values = np.array(image)
    values[max(0, row - half) : row + half, max(0, column - half) : column + half] = GREY
    return Image.fromarray(values)


def _enhanced(enhancer: Callable[[Image.Image], Any]) -> ImageOperation:
    return lambda image, level, reach, rng: enhancer(image).enhance(1.8 * level / _TOP + 0.1)


OPERATIONS: dict[str, ImageOperation] = {
    "AutoContrast": lambda image, level, reach, rng: ImageOps.autocontrast(image),
    "Equalize": lambda image, level, reach, rng: ImageOps.equalize(image),
    "Invert": lambda image, level, reach, rng: ImageOps.invert(image),
    "Rotate": _rotate,
    "Posterize": _posterize,
    "Solarize": _solarize,
    "Color": _enhanced(ImageEnhance.Color),
    "Contrast": _enhanced(ImageEnhance.Contrast),
    "Brightness": _enhanced(ImageEnhance.Brightness),
    "Sharpness": _enhanced(ImageEnhance.Sharpness),
    "ShearX": _shear_x,
    "ShearY": _shear_y,
    "TranslateX": _translate_x,
    "TranslateY": _translate_y,
    "Cutout": _cutout,
    "SolarizeAdd": _solarize_add,
}

V0 = (
    (("Equalize", 0.8, 1), ("ShearY", 0.8, 4)),
    (("Color", 0.4, 9), ("Equalize", 0.6, 3)),
    (("Color", 0.4, 1), ("Rotate", 0.6, 8)),
    (("Solarize", 0.8, 3), ("Equalize", 0.4, 7)),
    (("Solarize", 0.4, 2), ("Solarize", 0.6, 2)),
    (("Color", 0.2, 0), ("Equalize", 0.8, 8)),
    (("Equalize", 0.4, 8), ("SolarizeAdd", 0.8, 3)),
    (("ShearX", 0.2, 9), ("Rotate", 0.6, 8)),
    (("Color", 0.6, 1), ("Equalize", 1.0, 2)),
    (("Invert", 0.4, 9), ("Rotate", 0.6, 0)),
    (("Equalize", 1.0, 9), ("ShearY", 0.6, 3)),
    (("Color", 0.4, 7), ("Equalize", 0.6, 0)),
    (("Posterize", 0.4, 6), ("AutoContrast", 0.4, 7)),
    (("Solarize", 0.6, 8), ("Color", 0.6, 9)),
    (("Solarize", 0.2, 4), ("Rotate", 0.8, 9)),
    (("Rotate", 1.0, 7), ("TranslateY", 0.8, 9)),
    (("ShearX", 0.0, 0), ("Solarize", 0.8, 4)),
    (("ShearY", 0.8, 0), ("Color", 0.6, 4)),
    (("Color", 1.0, 0), ("Rotate", 0.6, 2)),
    (("Equalize", 0.8, 4), ("Equalize", 0.0, 8)),
    (("Equalize", 1.0, 4), ("AutoContrast", 0.6, 2)),
    (("ShearY", 0.4, 7), ("SolarizeAdd", 0.6, 7)),
    (("Posterize", 0.8, 2), ("Solarize", 0.6, 10)),
    (("Solarize", 0.6, 8), ("Equalize", 0.6, 1)),
    (("Color", 0.8, 6), ("Rotate", 0.4, 5)),
)
"""The policy "v0" of the source: 25 pairs of (operation, probability, level).

An image gets one pair, chosen at random, in this order.
"""
AUTOAUGMENT_REACH = Reach(250, 100)
RANDAUGMENT_REACH = Reach(100, 40)


def autoaugment(image: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Return an image after a random pair of `V0`, each operation with its probability.

    Args:
      image: uint8 [height, width, 3].
      rng: Source of the random choices.
    """
    picture = Image.fromarray(image)
    for name, probability, level in V0[int(rng.integers(len(V0)))]:
        if rng.random() < probability:
            picture = OPERATIONS[name](picture, level, AUTOAUGMENT_REACH, rng)
    return np.asarray(picture)


def randaugment(
    image: np.ndarray, rng: np.random.Generator, num_layers: int = 2, magnitude: float = 9
) -> np.ndarray:
    """Return an image after `num_layers` operations, each chosen at random, all at one level.

    Args:
      image: uint8 [height, width, 3].
      rng: Source of the random choices.
      num_layers: Number of operations, N in the paper, >= 0.
      magnitude: Level of the operations, M in the paper, in [0, 31). Scales extend beyond level
        10.

    Raises:
      UserError: If one of the two numbers is out of range.
    """
    check_policy("randaugment", num_layers, magnitude)
    picture = Image.fromarray(image)
    operations = tuple(OPERATIONS.values())
    for _ in range(num_layers):
        operation = operations[int(rng.integers(len(operations)))]
        picture = operation(picture, magnitude, RANDAUGMENT_REACH, rng)
    return np.asarray(picture)


@dataclasses.dataclass(frozen=True)
class Policy:
    """An augmentation with its strength.

    Attributes:
      name: "none", "autoaugment" or "randaugment".
      num_layers: Number of RandAugment's operations, >= 0.
      magnitude: Level of RandAugment's operations, in [0, 31).

    Raises:
      UserError: If a field has no such value.
    """

    name: str = "none"
    num_layers: int = 2
    magnitude: float = 9.0

    def __post_init__(self) -> None:
        """Check the fields."""
        check_policy(self.name, self.num_layers, self.magnitude)

    @property
    def changes(self) -> bool:
        """Whether it changes images."""
        return self.name != "none"

    def apply(self, image: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        """Return a uint8 image [height, width, 3] augmented."""
        if self.name == "autoaugment":
            return autoaugment(image, rng)
        if self.name == "randaugment":
            return randaugment(image, rng, self.num_layers, self.magnitude)
        return image
