"""RGB images from bytes, no larger than they are needed."""

from __future__ import annotations

import io

import numpy as np
import simplejpeg
from PIL import Image

_JPEG = b"\xff\xd8"
_DIRECT = ("Gray", "YCbCr", "RGB")
"""Colour spaces in which libjpeg-turbo itself turns pixels into RGB."""


class UnreadableImage(ValueError):
    """Bytes that are not one whole image."""


def read_size(data: bytes) -> tuple[int, int]:
    """Return (height, width) from the header alone.

    Raises:
      UnreadableImage: if there is no header.
    """
    if data[:2] != _JPEG:
        return _open(data).size[::-1]
    try:
        height, width, _, _ = simplejpeg.decode_jpeg_header(data)
    except ValueError as error:
        raise UnreadableImage(str(error)) from error
    return height, width


def decode(data: bytes, least_height: int = 1, least_width: int = 1, scaled: bool = False) -> np.ndarray:
    """Decode an image of any kind that Pillow reads: grey, CMYK and palettes become RGB.

    Args:
      data: a JPEG, PNG, ... file.
      least_height: with `scaled`, how high the result has to be at least.
      least_width: with `scaled`, how wide.
      scaled: let a JPEG come out smaller, by a factor n / 8 that its decoder has for little: both sides scale alike.

    Returns:
      uint8 [height, width, 3]; unscaled the same numbers as Pillow's.

    Raises:
      UnreadableImage: if it is cut short or no image.
    """
    if data[:2] != _JPEG:
        return _by_pillow(data)
    try:
        _, _, space, _ = simplejpeg.decode_jpeg_header(data)
        if space not in _DIRECT:
            return _by_pillow(data)
        least = {"min_height": least_height, "min_width": least_width, "min_factor": 1.0} if scaled else {}
        return simplejpeg.decode_jpeg(data, "RGB", **least)
    except ValueError as error:
        raise UnreadableImage(str(error)) from error


def _open(data: bytes) -> Image.Image:
    try:
        return Image.open(io.BytesIO(data))
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise UnreadableImage(_first_line(error)) from error


def _by_pillow(data: bytes) -> np.ndarray:
    image = _open(data)
    try:
        return np.asarray(image.convert("RGB"))
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise UnreadableImage(_first_line(error)) from error


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
