"""Bytes become the pixels that Pillow reads, or one exception says that they are no image."""

import io

import numpy as np
import pytest
from PIL import Image

from lbopt.data.images.decode import UnreadableImage, decode, read_size

KINDS = {
    "jpeg": {},
    "progressive jpeg": {"progressive": True},
    "jpeg, colours at full resolution": {"subsampling": 0},
    "grey jpeg": {"mode": "L"},
    "cmyk jpeg": {"mode": "CMYK"},
    "png": {"kind": "PNG"},
    "grey png": {"kind": "PNG", "mode": "L"},
    "png with a palette": {"kind": "PNG", "mode": "P"},
    "png with transparency": {"kind": "PNG", "mode": "RGBA"},
}


@pytest.mark.parametrize("kind", KINDS)
def test_pixels_are_pillows(kind, photograph, encoded):
    data = encoded(photograph(61, 83), **KINDS[kind])
    found = decode(data)
    assert (found.dtype, found.shape) == (np.uint8, (61, 83, 3))
    np.testing.assert_array_equal(found, np.asarray(Image.open(io.BytesIO(data)).convert("RGB")))
    assert read_size(data) == (61, 83)


@pytest.mark.parametrize(
    ("least", "expected"),
    [
        ((400, 600), (400, 600)),
        ((350, 1), (350, 525)),
        ((200, 300), (200, 300)),
        ((201, 300), (250, 375)),
        ((1, 225), (150, 225)),
        ((1, 1), (50, 75)),
        ((500, 700), (400, 600)),
    ],
)
def test_a_scaled_jpeg_is_the_smallest_that_suffices(least, expected, photograph, encoded):
    """In eighths; an image that is too small stays as it is."""
    found = decode(encoded(photograph(400, 600)), *least, scaled=True)
    assert found.shape == (*expected, 3)


def test_a_scaled_jpeg_shows_the_same(photograph, encoded):
    data = encoded(photograph(400, 600), quality=95)
    small = decode(data, 100, 150, scaled=True).astype(float)
    assert small.shape == (100, 150, 3)
    boxes = decode(data).reshape(100, 4, 150, 4, 3).mean((1, 3))
    assert np.abs(small - boxes).mean() < 1


@pytest.mark.parametrize("kind", ["jpeg", "grey jpeg", "cmyk jpeg", "png"])
def test_a_file_cut_short_is_refused(kind, photograph, encoded):
    data = encoded(photograph(61, 83), **KINDS[kind])
    for size in (len(data) // 2, 30, 3):
        with pytest.raises(UnreadableImage):
            decode(data[:size])


@pytest.mark.parametrize("data", [b"", b"no image", b"\xff\xd8", b"\xff\xd8\xff\xe0" + bytes(100)])
def test_what_is_no_image_is_refused(data):
    for function in (decode, read_size):
        with pytest.raises(UnreadableImage):
            function(data)
