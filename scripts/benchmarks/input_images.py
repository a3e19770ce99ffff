"""Synthetic photographs of ImageNet's usual size, in a data set like ImageNet's in tfds."""

from __future__ import annotations

import io
import logging
import pathlib

import cv2
import numpy as np
from PIL import Image

HEIGHT = 375
"""Height of the images; 375 x 500 is the most common size in ImageNet."""
WIDTH = 500
NUM_CLASSES = 10
QUALITIES = (90, 91, 92, 93, 94, 95)
BUILDER = "photographs"
_LEAVES = 420
_SMALLEST = 3.0
"""Half the width of the smallest ellipse."""


def jpegs(count: int) -> list[bytes]:
    """Return JPEG files with chroma at half resolution (4:2:0), as in nearly all of ImageNet."""
    return [
        _encoded(_picture(number), QUALITIES[number % len(QUALITIES)]) for number in range(count)
    ]


def _picture(number: int) -> np.ndarray:
    """Draw overlapping ellipses with the noise of a sensor, uint8 [height, width, 3].

    Ellipses whose sizes follow an inverse cube law have the edges and the spectrum of photographs
    (Lee, Mumford and Huang, Occlusion models for natural images, IJCV 41, 2001).
    """
    rng = np.random.default_rng([7, number])
    picture = np.zeros((HEIGHT, WIDTH, 3), np.float32)
    picture[:] = rng.uniform(40, 200, 3)
    hue = rng.uniform(-30, 30, 3)

    for size in np.sort(_SMALLEST / np.sqrt(rng.uniform(1e-4, 1, _LEAVES)))[::-1]:
        centre = (int(rng.integers(WIDTH)), int(rng.integers(HEIGHT)))
        axes = (int(size) + 1, int(size * rng.uniform(0.4, 1)) + 1)
        colour = rng.uniform(20, 235) + hue + rng.normal(0, 18, 3)
        angle = float(rng.uniform(0, 180))
        fill = colour.tolist()
        cv2.ellipse(picture, centre, axes, angle, 0, 360, fill, cv2.FILLED, cv2.LINE_AA)

    picture = cv2.GaussianBlur(picture, (0, 0), 0.7)
    picture += _texture(rng)[..., None] * rng.uniform(5, 11)
    picture += rng.normal(0, rng.uniform(0.5, 3.0), (HEIGHT, WIDTH, 1))
    return np.clip(picture, 0, 255).astype(np.uint8)


def _texture(rng: np.random.Generator) -> np.ndarray:
    """Return noise of variance 1 whose amplitude falls as 1 / frequency."""
    down = np.fft.fftfreq(HEIGHT)[:, None]
    across = np.fft.rfftfreq(WIDTH)[None, :]
    frequency = np.maximum(np.hypot(down, across), 1 / WIDTH)
    waves = np.exp(2j * np.pi * rng.random(frequency.shape)) / frequency
    texture = np.fft.irfft2(waves, (HEIGHT, WIDTH))
    return texture / texture.std()


def _encoded(picture: np.ndarray, quality: int) -> bytes:
    stream = io.BytesIO()
    Image.fromarray(picture).save(stream, "JPEG", quality=quality, subsampling="4:2:0")
    return stream.getvalue()


def write(files: list[bytes], data_dir: pathlib.Path) -> None:
    """Write the data set `BUILDER` with the split "train" and the fields of imagenet2012.

    Args:
      files: The JPEG files.
      data_dir: Folder of the data sets.
    """
    import tensorflow_datasets as tfds

    class Photographs(tfds.core.GeneratorBasedBuilder, skip_registration=True):
        name = BUILDER
        VERSION = tfds.core.Version("1.0.0")

        def _info(self):
            kinds = {
                "image": tfds.features.Image(encoding_format="jpeg"),
                "label": tfds.features.ClassLabel(num_classes=NUM_CLASSES),
                "file_name": tfds.features.Text(),
            }
            return tfds.core.DatasetInfo(builder=self, features=tfds.features.FeaturesDict(kinds))

        def _split_generators(self, dl_manager):
            return {"train": self._generate_examples()}

        def _generate_examples(self):
            for number, file in enumerate(files):
                name = f"n{number:08d}.JPEG"
                yield name, {"image": file, "label": number % NUM_CLASSES, "file_name": name}

    logging.getLogger("absl").setLevel(logging.ERROR)
    tfds.disable_progress_bar()
    Photographs(data_dir=str(data_dir), file_format="array_record").download_and_prepare()
