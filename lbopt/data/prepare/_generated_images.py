"""Synthetic images in the format of ImageNet: JPEGs of various sizes with coloured stripes.

The class is the colour and the direction of the stripes.
"""

from __future__ import annotations

import io
from typing import Any

import numpy as np

from lbopt.data.prepare._generated import Examples, GeneratedDataset
from lbopt.errors import MissingPackage

NUM_CLASSES = 10
SIZES = {"train": 96, "validation": 40}
GREY = 5
"""Number of the training image that is grey, as a few of ImageNet's are."""
CMYK = 16
"""Number of the training image in CMYK, as a few of ImageNet's are."""

_COLOURS = np.asarray(
    [[220, 60, 50], [60, 180, 70], [60, 80, 220], [220, 190, 50], [170, 70, 200]], np.float32
)
_SMALLEST = 64
_LARGEST = 96
_NOISE = 24.0


def _examples(split: str) -> Examples:
    for number in range(SIZES[split]):
        label = number % NUM_CLASSES
        name = f"{split}_{number:03d}.JPEG"
        mode = {GREY: "L", CMYK: "CMYK"}.get(number, "RGB") if split == "train" else "RGB"
        image = _jpeg(_pixels(label, split, number), mode)
        yield name, {"image": image, "label": label, "file_name": name}


def _pixels(label: int, split: str, number: int) -> np.ndarray:
    """Return the pixels of an image, uint8 [height, width, 3].

    The colour is `label // 2`. The stripes are vertical for odd labels and horizontal for even
    ones. Crops, resizing and mirroring keep the class.
    """
    generator = np.random.Philox(key=[list(SIZES).index(split), number])
    high, wide, period, phase = (float(word) / 2**64 for word in generator.random_raw(4))
    height = _SMALLEST + int(high * (_LARGEST + 1 - _SMALLEST))
    width = _SMALLEST + int(wide * (_LARGEST + 1 - _SMALLEST))

    along = np.arange(width)[None, :] if label % 2 else np.arange(height)[:, None]
    stripes = 0.6 + 0.4 * np.sin(2 * np.pi * (along / (8 + 8 * period) + phase))
    noise = generator.random_raw(height * width * 3).reshape(height, width, 3) / 2**64 - 0.5
    pixels = stripes[..., None] * _COLOURS[label // 2] + 2 * _NOISE * noise
    return np.clip(pixels, 0, 255).astype(np.uint8)


def _jpeg(pixels: np.ndarray, mode: str) -> bytes:
    try:
        from PIL import Image
    except ImportError as error:
        fix = "it writes the images, and is not installed: pip install 'lbopt[images]'"
        raise MissingPackage("Pillow", reason=fix) from error
    stream = io.BytesIO()
    Image.fromarray(pixels).convert(mode).save(stream, "JPEG", quality=90)
    return stream.getvalue()


def _features(kinds: Any) -> dict[str, Any]:
    return {
        "image": kinds.Image(encoding_format="jpeg"),
        "label": kinds.ClassLabel(num_classes=NUM_CLASSES),
        "file_name": kinds.Text(),
    }


GENERATED_IMAGES = GeneratedDataset(
    "generated_images",
    "Striped JPEGs of 10 classes in the format of ImageNet, to try a recipe for images without a "
    "download.",
    _features,
    {"train": lambda: _examples("train"), "validation": lambda: _examples("validation")},
)
