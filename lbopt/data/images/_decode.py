"""RGB images from bytes, no larger than they are needed."""

from __future__ import annotations

import contextlib
import io
import re
from collections.abc import Iterator, Mapping
from typing import Any, NoReturn

import numpy as np
import simplejpeg
from PIL import Image, UnidentifiedImageError

_JPEG = b"\xff\xd8"
_DIRECT = ("Gray", "YCbCr", "RGB")
"""Colour spaces in which libjpeg-turbo itself turns pixels into RGB."""
_SEQUENTIAL, _SCAN = (0xC0, 0xC1), 0xDA
"""What begins frames in baseline and extended Huffman coding, and what begins their pixels."""
_TABLES = (*range(0xE0, 0xF0), 0xC4, 0xDB, 0xFE)
"""What may come between them: tables, applications' data, comments; not the interval of restarts."""

_BEHIND_THE_LAST_ROW = "extraneous bytes before marker 0xd9"
_HARMLESS = re.compile(
    f"{_BEHIND_THE_LAST_ROW}$|unknown JFIF revision|Unknown Adobe color|Invalid SOS parameters"
)
"""What a decoder remarks on whole images. It says no more than one thing, so Pillow, which refuses files cut short, reads on."""

_AS_RGB = frozenset(
    ("1", "L", "LA", "P", "PA", "RGB", "RGBA", "RGBX", "CMYK", "YCbCr", "LAB", "HSV")
)
"""Modes of at most 8 bits a channel, which Pillow itself turns into RGB."""
_GREY_16 = frozenset(
    (("PNG", "I"), ("PPM", "I"), *((kind, "I;16") for kind in ("PNG", "TIFF", "JPEG2000", "IM")))
)
"""(format, mode) of grey in 16 bits: 0 is black and 65535 white. Pillow calls a TIFF of 12 bits so too."""
_BITS_PER_SAMPLE, _COMPRESSION, _PHOTOMETRIC, _PLANAR, _SAMPLE_FORMAT = 258, 259, 262, 284, 339
_RAW, _WHITE_IS_ZERO, _APART, _SIGNED = 1, 0, 2, 2
"""Tags of a TIFF, and values of the last four (TIFF 6.0, sections 8 and 19)."""
_CODESTREAM, _DEPTH_BEHIND = b"\xff\x4f\xff\x51", 42
"""What begins the pixels of a JPEG 2000, and where behind it the first channel's bits are (ITU T.800, annex A.5.1)."""


class UnreadableImage(ValueError):
    """Bytes that are not one whole image, or an image whose black and white are not known."""


def read_size(data: bytes) -> tuple[int, int]:
    """Return (height, width) from the header alone.

    Raises:
      UnreadableImage: if there is no header, or more pixels than Pillow allows (twice `PIL.Image.MAX_IMAGE_PIXELS`).
    """
    if data[:2] != _JPEG:
        return _open(data).size[::-1]
    try:
        height, width, _ = _jpeg_header(data)
    except ValueError as error:
        if _HARMLESS.search(str(error)):
            return _open(data).size[::-1]
        raise UnreadableImage(str(error)) from error
    return height, width


def decode(data: bytes, shrink: int = 1, rows: int | None = None) -> np.ndarray:
    """Decode an image of any kind that Pillow reads: grey, CMYK and palettes become RGB, without transparency.

    Channels of 16 bits are scaled to 8; grey of 12 bits too. Floating point runs from 0 (black) to 1 (white). Of several
    frames this is the first; where an Exif orientation is obeyed, Pillow does so (it does in TIFF).

    Args:
      data: a JPEG, PNG, ... file.
      shrink: 1, 2, 4 or 8, by which a JPEG comes out smaller (rounded up), which its decoder has for little. Other kinds,
        JPEGs in CMYK, and those about which the decoder has a remark, come as they are.
      rows: of the unshrunk image; those below them may be missing, and damage there may go unseen. All by default.

    Returns:
      uint8 [height, width, 3]; unshrunk the same numbers as Pillow's.

    Raises:
      UnreadableImage: if it is cut short or no image, if it has more pixels than Pillow allows, if Pillow is known to
        read such wrongly, or if nothing says which of its numbers are black and white: whole numbers with a sign or of
        32 bits, floating point beyond [0, 1].
    """
    if data[:2] != _JPEG:
        return _by_pillow(data)
    try:
        height, width, space = _jpeg_header(data)
        if space not in _DIRECT:
            return _by_pillow(data)
        if (
            rows is not None
            and (image := _upper_rows(data, height, width, shrink, rows)) is not None
        ):
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
    rows = (
        -(-rows // shrink) + 1
    ) * shrink  # one more than asked for: its colours are mixed into the last one
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
    return (
        {"min_height": -(-height // shrink), "min_width": -(-width // shrink)} if shrink > 1 else {}
    )


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


def _jpeg_header(data: bytes) -> tuple[int, int, str]:
    """Return (height, width, colour space); raise `ValueError` as Pillow does where there is no room for the pixels."""
    height, width, space, _ = simplejpeg.decode_jpeg_header(data)
    most = Image.MAX_IMAGE_PIXELS
    if most is not None and height * width > 2 * most:
        raise UnreadableImage(f"it has {height * width} pixels, more than {2 * most}")
    return height, width, space


@contextlib.contextmanager
def _unreadable() -> Iterator[None]:
    """Turn what Pillow raises for damaged files, which can be anything, into `UnreadableImage`."""
    try:
        yield
    except UnreadableImage:
        raise
    except UnidentifiedImageError as error:
        raise UnreadableImage("it is no image that Pillow reads") from error
    except Exception as error:
        raise UnreadableImage((str(error).splitlines() or [type(error).__name__])[0]) from error


def _open(data: bytes) -> Image.Image:
    with _unreadable():
        return Image.open(io.BytesIO(data))


def _by_pillow(data: bytes) -> np.ndarray:
    image = _open(data)
    with _unreadable():
        if _SIGNED in _tags(image).get(_SAMPLE_FORMAT, ()):
            _refuse(image, "numbers with a sign")
        if misread := _misread(image, data):
            _refuse(image, f"{misread}, which Pillow reads wrongly", "save it as PNG")
        image.load()
        if image.mode in _AS_RGB:
            image.info.pop("transparency", None)  # left out anyway, and Pillow would warn
            return np.asarray(image.convert("RGB"))
        return np.repeat(_grey(image)[..., None], 3, -1)


def _grey(image: Image.Image) -> np.ndarray:
    """Return an image whose channel has more than 8 bits as uint8 [height, width]."""
    values, tags = np.asarray(image), _tags(image)
    if image.mode == "F":
        if not (values.min() >= 0 and values.max() <= 1):  # nor if one is NaN
            _refuse(
                image, f"floating point from {values.min():g} to {values.max():g}, not from 0 to 1"
            )
        white = 1.0
    elif (image.format, image.mode[:4]) in _GREY_16:
        white = 4095.0 if 12 in tags.get(_BITS_PER_SAMPLE, ()) else 65535.0
    else:
        _refuse(image, "numbers whose black and white are not known")
    grey = np.rint(values.astype(np.float32) * np.float32(255 / white)).astype(np.uint8)
    return 255 - grey if tags.get(_PHOTOMETRIC) == _WHITE_IS_ZERO else grey


def _misread(image: Image.Image, data: bytes) -> str:
    """Return what makes Pillow (13.0 for one) give wrong numbers for an image without a word; "" if nothing does."""
    tags = _tags(image)
    if image.format == "JPEG2000" and image.mode not in ("L", "I;16"):
        place = data.find(_CODESTREAM) + _DEPTH_BEHIND
        return (
            "colours of more than 8 bits" if (data[place] & 0x7F) + 1 > 8 else ""
        )  # white comes out black
    raw = tags.get(_COMPRESSION, _RAW) == _RAW
    if raw and tags.get(_PLANAR) == _APART and max(tags.get(_BITS_PER_SAMPLE, (1,))) > 8:
        return "channels apart of more than 8 bits"
    if not raw and image.mode == "F" and data[:2] == b"MM":
        return "compressed floating point of big-endian bytes"
    return ""


def _refuse(image: Image.Image, what: str, fix: str = "save it in 8 or 16 bits") -> NoReturn:
    raise UnreadableImage(f"its {image.format} (mode {image.mode}) has {what}; {fix}")


def _tags(image: Image.Image) -> Mapping[int, Any]:
    """Return the tags of a TIFF; none of other formats."""
    return getattr(image, "tag_v2", {})
