"""Synthetic photographs, and image files of them."""

import io

import numpy as np
import pytest
from PIL import Image


@pytest.fixture(scope="session")
def photograph():
    """Return a function (height, width, seed=0) -> smooth uint8 RGB with some detail."""

    def make(height, width, seed=0):
        rng = np.random.default_rng(seed)
        coarse = Image.fromarray(rng.integers(0, 256, (8, 8, 3), dtype=np.uint8)).resize(
            (width, height), Image.BICUBIC
        )
        return np.clip(np.asarray(coarse) + rng.normal(0, 4, (height, width, 3)), 0, 255).astype(
            np.uint8
        )

    return make


@pytest.fixture(scope="session")
def encoded():
    """Return a function (uint8 array, format="JPEG", mode="RGB", **options) -> bytes."""

    def encode(array, kind="JPEG", mode="RGB", **options):
        stream = io.BytesIO()
        Image.fromarray(array).convert(mode).save(stream, kind, **options)
        return stream.getvalue()

    return encode
