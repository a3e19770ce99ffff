"""RGB images from bytes, no larger than they are needed."""

from __future__ import annotations

import io
import re

import numpy as np
import simplejpeg
from PIL import Image

_JPEG = b"\xff\xd8"
_DIRECT = ("Gray", "YCbCr", "RGB")
"""Colour spaces in which libjpeg-turbo itself turns pixels into RGB."""
_SEQUENTIAL, _SCAN = (0xC0, 0xC1), 0xDA
"""What begins frames in baseline and extended Huffman coding, and what begins their pixels."""
_TABLES = (*range(0xE0, 0xF0), 0xC4, 0xDB, 0xFE)
"""What may come between them: tables, applications' data, comments; not the interval of restarts."""

_BEHIND_THE_LAST_ROW = "extraneous bytes before marker 0xd9"
_HARMLESS = re.compile(f"{_BEHIND_THE_LAST_ROW}$|unknown JFIF revision|Unknown Adobe color|Invalid SOS parameters")
"""What a decoder remarks on whole images. It says no more than one thing, so Pillow, which refuses files cut short, reads on."""


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
        if _HARMLESS.search(str(error)):
            return _open(data).size[::-1]
        raise UnreadableImage(str(error)) from error
    return height, width


def decode(data: bytes, shrink: int = 1, rows: int | None = None) -> np.ndarray:
    """Decode an image of any kind that Pillow reads: grey, CMYK and palettes become RGB.

    Args:
      data: a JPEG, PNG, ... file.
      shrink: 1, 2, 4 or 8, by which a JPEG comes out smaller (rounded up), which its decoder has for little. Other kinds,
        JPEGs in CMYK, and those about which the decoder has a remark, come as they are.
      rows: of the unshrunk image; those below them may be missing, and damage there may go unseen. All by default.

    Returns:
      uint8 [height, width, 3]; unshrunk the same numbers as Pillow's.

    Raises:
      UnreadableImage: if it is cut short or no image.
    """
    if data[:2] != _JPEG:
        return _by_pillow(data)
    try:
        height, width, space, _ = simplejpeg.decode_jpeg_header(data)
        if space not in _DIRECT:
            return _by_pillow(data)
        if rows is not None and (image := _upper_rows(data, height, width, shrink, rows)) is not None:
            return image
        return simplejpeg.decode_jpeg(data, "RGB", **_scale(height, width, shrink))
    except ValueError as error:
        if _HARMLESS.search(str(error)):
            return _by_pillow(data)
        raise UnreadableImage(str(error)) from error


def _upper_rows(data: bytes, height: int, width: int, shrink: int, rows: int) -> np.ndarray | None:
    """Return at least the upper `rows` as the whole JPEG has them, without decoding the others; None if that cannot be.

    The header is made to say that the image ends there. The decoder then finds that the file goes on, which it says only
    after the last row, and only if there was nothing else to say: so a file that is cut short is noticed all the same.
    """
    rows = (-(-rows // shrink) + 1) * shrink  # one more than asked for: its colours are mixed into the last one
    place = _place_of_height(data)
    if rows >= height or place is None:
        return None
    shortened = bytearray(data)
    shortened[place : place + 2] = rows.to_bytes(2, "big")
    image = np.empty((rows // shrink, -(-width // shrink), 3), np.uint8)
    try:
        simplejpeg.decode_jpeg(shortened, "RGB", buffer=image, **_scale(rows, width, shrink))
    except ValueError as error:
        return image if str(error).endswith(_BEHIND_THE_LAST_ROW) else None
    return image


def _scale(height: int, width: int, shrink: int) -> dict[str, int]:
    return {"min_height": -(-height // shrink), "min_width": -(-width // shrink)} if shrink > 1 else {}


def _place_of_height(data: bytes) -> int | None:
    """Return where a JPEG says how high it is (ITU T.81, annex B), if it is stored row by row without restarts."""
    place, found = 2, None
    while data[place : place + 1] == b"\xff":
        marker = data[place + 1]
        if marker == _SCAN:
            return found
        if marker in _SEQUENTIAL:
            found = place + 5
        elif marker not in _TABLES:
            return None
        place += 2 + int.from_bytes(data[place + 2 : place + 4], "big")
    return None


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
