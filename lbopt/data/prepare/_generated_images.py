"""Photographs that nobody took, in the form of ImageNet: striped JPEGs of various sizes, whose stripes and colour say the class."""

from __future__ import annotations

import io
from typing import Any

import numpy as np

from lbopt.data.prepare._source import Examples, GeneratedDataset
from lbopt.errors import EnvironmentProblem

NUM_CLASSES = 10
SIZES = {"train": 96, "validation": 40}
GREY, CMYK = 5, 16
"""The training images that are stored without colour and in the colours of print, as a few of ImageNet's are."""

_COLOURS = np.asarray(
    [[220, 60, 50], [60, 180, 70], [60, 80, 220], [220, 190, 50], [170, 70, 200]], np.float32
)
_SMALLEST, _LARGEST = 64, 96
_NOISE = 24.0


def _examples(split: str) -> Examples:
    for number in range(SIZES[split]):
        label = number % NUM_CLASSES
        name = f"{split}_{number:03d}.JPEG"
        mode = {GREY: "L", CMYK: "CMYK"}.get(number, "RGB") if split == "train" else "RGB"
        yield (
            name,
            {
                "image": _jpeg(_pixels(label, split, number), mode),
                "label": label,
                "file_name": name,
            },
        )


def _pixels(label: int, split: str, number: int) -> np.ndarray:
    """Draw [height, width, 3] uint8: the colour is `label // 2`, and odd labels have upright stripes.

    Cutting, resizing and mirroring leave the class what it is.
    """
    generator = np.random.Philox(key=[list(SIZES).index(split), number])
    high, wide, period, phase = (float(word) / 2**64 for word in generator.random_raw(4))
    height, width = (_SMALLEST + int(part * (_LARGEST + 1 - _SMALLEST)) for part in (high, wide))
    along = np.arange(width)[None, :] if label % 2 else np.arange(height)[:, None]
    stripes = 0.6 + 0.4 * np.sin(2 * np.pi * (along / (8 + 8 * period) + phase))
    noise = generator.random_raw(height * width * 3) / 2**64 - 0.5
    pixels = stripes[..., None] * _COLOURS[label // 2] + 2 * _NOISE * noise.reshape(
        height, width, 3
    )
    return np.clip(pixels, 0, 255).astype(np.uint8)


def _jpeg(pixels: np.ndarray, mode: str) -> bytes:
    try:
        from PIL import Image
    except ImportError as error:
        raise EnvironmentProblem(
            "images are written by Pillow, which is not installed: pip install 'lbopt[images]'"
        ) from error
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
    "Striped JPEGs of 10 classes in the form of ImageNet, to try a recipe for images without a download.",
    _features,
    {"train": lambda: _examples("train"), "validation": lambda: _examples("validation")},
)
