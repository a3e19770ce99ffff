"""Decoding of image files to RGB, at reduced size where that is enough."""

from __future__ import annotations

import contextlib
import io
import re
from collections.abc import Iterator, Mapping
from typing import Any, NoReturn

import numpy as np
import simplejpeg
from PIL import Image, UnidentifiedImageError

from lbopt.data._damaged import DamagedRecord

_JPEG = b"\xff\xd8"
_DIRECT = ("Gray", "YCbCr", "RGB")
"""Colour spaces that libjpeg-turbo itself converts to RGB."""
_SEQUENTIAL = (0xC0, 0xC1)
"""Markers of a frame in baseline and in extended Huffman coding."""
_SCAN = 0xDA
"""Marker of the pixels of a frame."""
_TABLES = (*range(0xE0, 0xF0), 0xC4, 0xDB, 0xFE)
"""Markers that may come before a scan: tables, data of applications, comments. The marker of
restart intervals is not among them."""

_BYTES_AFTER_LAST_ROW = "extraneous bytes before marker 0xd9"
_HARMLESS = re.compile(
    f"{_BYTES_AFTER_LAST_ROW}$|unknown JFIF revision|Unknown Adobe color|Invalid SOS parameters"
)
"""Warnings of the decoder about intact images. It gives one warning at most, which may hide that
the file is cut short; so Pillow decodes such files, and refuses them if they are."""

_AS_RGB = frozenset(
    ("1", "L", "LA", "P", "PA", "RGB", "RGBA", "RGBX", "CMYK", "YCbCr", "LAB", "HSV")
)
"""Modes of at most 8 bits a channel, which Pillow itself converts to RGB."""
_GREY_16 = frozenset(
    (("PNG", "I"), ("PPM", "I"), *((kind, "I;16") for kind in ("PNG", "TIFF", "JPEG2000", "IM")))
)
"""(format, mode) of grey images with 16 bits, where 0 is black and 65535 white. Pillow gives TIFFs
of 12 bits the same mode."""
_BITS_PER_SAMPLE = 258
_COMPRESSION = 259
_PHOTOMETRIC = 262
_PLANAR = 284
_SAMPLE_FORMAT = 339
"""Tags of a TIFF (TIFF 6.0, sections 8 and 19)."""
_RAW = 1
_WHITE_IS_ZERO = 0
_SEPARATE_CHANNELS = 2
_SIGNED = 2
"""Values of the last four of these tags."""
_CODESTREAM = b"\xff\x4f\xff\x51"
_DEPTH_OFFSET = 42
"""First bytes of the pixels of a JPEG 2000, and the offset from there of the number of bits of the
first channel (ITU T.800, annex A.5.1)."""


class UnreadableImage(ValueError):
    """Bytes that are no whole image, or an image whose black and white are not known."""


@contextlib.contextmanager
def damaged_if_unreadable(record: Mapping[str, Any]) -> Iterator[None]:
    """Turn `UnreadableImage` into `DamagedRecord`, with a record's `file_name` if it has one."""
    try:
        yield
    except UnreadableImage as error:
        name = record.get("file_name", "")
        file = name.decode(errors="replace") if isinstance(name, bytes) else name
        of_file = f" {file}" if file else ""
        raise DamagedRecord(f"its image{of_file} is unreadable: {error}") from error


def read_size(data: bytes) -> tuple[int, int]:
    """Return (height, width) from the header alone.

    Raises:
      UnreadableImage: If there is no header, or if there are more pixels than Pillow allows, twice
        `PIL.Image.MAX_IMAGE_PIXELS`.
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
    """Decode an image file of any kind that Pillow reads.

    Grey, CMYK and palettes become RGB, without transparency. Channels of 16 bits and grey of 12
    bits are scaled to 8 bits. Floating point runs from 0 (black) to 1 (white). Of several frames
    the first is decoded. An Exif orientation is applied where Pillow does so, in TIFF.

    Args:
      data: Bytes of a JPEG, PNG or other image file.
      shrink: Divisor of a JPEG's sides, rounded up: 1, 2, 4 or 8. The decoder does this at little
        cost. Other formats, JPEGs in CMYK, and files that the decoder warns about keep their size.
      rows: Number of rows of the unshrunk image that are needed; None for all. Rows below them may
        be missing, and damage there may go unseen.

    Returns:
      uint8 [height, width, 3]; without `shrink` equal to Pillow's result.

    Raises:
      UnreadableImage: If the bytes are cut short or no image, if there are more pixels than Pillow
        allows, if Pillow is known to decode the format wrongly, or if black and white are not
        known: signed integers, integers of 32 bits, floating point beyond [0, 1].
    """
    if data[:2] != _JPEG:
        return _by_pillow(data)
    try:
        height, width, space = _jpeg_header(data)
        if space not in _DIRECT:
            return _by_pillow(data)
        if rows is not None:
            upper = _upper_rows(data, height, width, shrink, rows)
            if upper is not None:
                return upper
        return simplejpeg.decode_jpeg(data, "RGB", **_scale(height, width, shrink))
    except ValueError as error:
        if _HARMLESS.search(str(error)):
            return _by_pillow(data)
        raise UnreadableImage(str(error)) from error


def _upper_rows(data: bytes, height: int, width: int, shrink: int, rows: int) -> np.ndarray | None:
    """Return at least the upper `rows` of a JPEG without decoding the others.

    A smaller height is written into the header. The decoder then warns, after the last row, about
    the bytes that follow. It does so only if it had no other warning, so a file that is cut short
    is still noticed.

    Returns:
      uint8 [rows, width, 3], both sides divided by `shrink`, with the values that decoding the
      whole image gives; None if this way is not possible.
    """
    # One more row than asked for, because its colours are mixed into the last one.
    rows = (-(-rows // shrink) + 1) * shrink
    height_offset = _offset_of_height(data)
    if rows >= height or height_offset is None:
        return None
    shortened = bytearray(data)
    shortened[height_offset : height_offset + 2] = rows.to_bytes(2, "big")
    image = np.empty((rows // shrink, -(-width // shrink), 3), np.uint8)
    try:
        simplejpeg.decode_jpeg(shortened, "RGB", buffer=image, **_scale(rows, width, shrink))
    except ValueError as error:
        return image if str(error).endswith(_BYTES_AFTER_LAST_ROW) else None
    return image


def _scale(height: int, width: int, shrink: int) -> dict[str, int]:
    """Return the arguments that make simplejpeg shrink an image."""
    if shrink == 1:
        return {}
    return {"min_height": -(-height // shrink), "min_width": -(-width // shrink)}


def _offset_of_height(data: bytes) -> int | None:
    """Return the offset of a JPEG's height in its bytes (ITU T.81, annex B).

    None if the image is not stored row by row, or if it has restarts.
    """
    offset = 2
    height_offset = None
    while data[offset : offset + 1] == b"\xff":
        marker = data[offset + 1]
        if marker == _SCAN:
            return height_offset
        if marker in _SEQUENTIAL:
            height_offset = offset + 5
        elif marker not in _TABLES:
            return None
        offset += 2 + int.from_bytes(data[offset + 2 : offset + 4], "big")
    return None


def _jpeg_header(data: bytes) -> tuple[int, int, str]:
    """Return (height, width, colour space).

    Raises:
      ValueError: If the header is damaged, or if there are more pixels than Pillow allows.
    """
    height, width, space, _ = simplejpeg.decode_jpeg_header(data)
    most = Image.MAX_IMAGE_PIXELS
    if most is not None and height * width > 2 * most:
        raise UnreadableImage(f"it has {height * width} pixels, more than {2 * most}")
    return height, width, space


@contextlib.contextmanager
def _unreadable() -> Iterator[None]:
    """Turn errors of Pillow into `UnreadableImage`; for damaged files they can be of any type."""
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
            _refuse(image, "signed numbers")
        if misread := _misread(image, data):
            _refuse(image, f"{misread}, which Pillow decodes wrongly", "save it as PNG")
        image.load()
        if image.mode in _AS_RGB:
            image.info.pop("transparency", None)  # it is dropped anyway, and Pillow would warn
            return np.asarray(image.convert("RGB"))
        return np.repeat(_grey(image)[..., None], 3, -1)


def _grey(image: Image.Image) -> np.ndarray:
    """Return a grey image of more than 8 bits as uint8 [height, width]."""
    values = np.asarray(image)
    tags = _tags(image)
    if image.mode == "F":
        low = values.min()
        high = values.max()
        if not (low >= 0 and high <= 1):  # a NaN is refused, too
            _refuse(image, f"floating point from {low:g} to {high:g}, not from 0 to 1")
        white = 1.0
    elif (image.format, image.mode[:4]) in _GREY_16:
        white = 4095.0 if 12 in tags.get(_BITS_PER_SAMPLE, ()) else 65535.0
    else:
        _refuse(image, "numbers whose black and white are not known")
    grey = np.rint(values.astype(np.float32) * np.float32(255 / white)).astype(np.uint8)
    return 255 - grey if tags.get(_PHOTOMETRIC) == _WHITE_IS_ZERO else grey


def _misread(image: Image.Image, data: bytes) -> str:
    """Return the property of an image that Pillow (13.0, for example) decodes wrongly; "" for none.

    Pillow gives no warning about it.
    """
    tags = _tags(image)
    if image.format == "JPEG2000" and image.mode not in ("L", "I;16"):
        offset = data.find(_CODESTREAM) + _DEPTH_OFFSET
        bits = (data[offset] & 0x7F) + 1
        return "colours of more than 8 bits" if bits > 8 else ""  # white becomes black

    raw = tags.get(_COMPRESSION, _RAW) == _RAW
    separate = tags.get(_PLANAR) == _SEPARATE_CHANNELS
    if raw and separate and max(tags.get(_BITS_PER_SAMPLE, (1,))) > 8:
        return "separate channels of more than 8 bits"
    if not raw and image.mode == "F" and data[:2] == b"MM":
        return "compressed floating point of big-endian bytes"
    return ""


def _refuse(image: Image.Image, what: str, fix: str = "save it in 8 or 16 bits") -> NoReturn:
    raise UnreadableImage(f"its {image.format} (mode {image.mode}) has {what}; {fix}")


def _tags(image: Image.Image) -> Mapping[int, Any]:
    """Return the tags of a TIFF; no tags for other formats."""
    return getattr(image, "tag_v2", {})
