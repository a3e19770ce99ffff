"""Image files are decoded to the pixels that Pillow reads, or refused with one exception."""

import io
import struct
import zlib

import cv2
import numpy as np
import PIL
import pytest
import simplejpeg
from PIL import Image, TiffImagePlugin
from refusal import numbers_in, raised

from lbopt.data.images._decode import UnreadableImage, decode, read_size

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
    ("shrink", "expected"), [(1, (401, 603)), (2, (201, 302)), (4, (101, 151)), (8, (51, 76))]
)
def test_a_jpeg_shrinks_and_its_sides_are_rounded_up(shrink, expected, photograph, encoded):
    assert decode(encoded(photograph(401, 603)), shrink).shape == (*expected, 3)


def test_a_small_jpeg_shows_the_same(photograph, encoded):
    data = encoded(photograph(400, 600), quality=95)
    boxes = decode(data).reshape(100, 4, 150, 4, 3).mean((1, 3))
    assert np.abs(decode(data, 4).astype(float) - boxes).mean() < 1


STORED = {
    "at half resolution": ({}, True),
    "at half resolution across": ({"subsampling": "4:2:2"}, True),
    "at full resolution": ({"subsampling": "4:4:4"}, True),
    "grey": ({"mode": "L"}, True),
    "with other tables and a comment": ({"optimize": True, "comment": b"nobody took it"}, True),
    "progressive": ({"progressive": True}, False),
    "with restarts": ({"restart_marker_blocks": 3}, False),
}
"""Name -> (options of the encoder, whether the lower rows can be left out)."""


@pytest.mark.parametrize("kind", STORED)
@pytest.mark.parametrize("shrink", [1, 2, 8])
def test_the_upper_rows_are_those_of_the_whole_jpeg(kind, shrink, photograph, encoded):
    """Blocks are 8 or 16 rows high, and colours are mixed across their edges."""
    options, leaves_out = STORED[kind]
    data = encoded(photograph(75, 83), quality=90, **options)
    whole = decode(data, shrink)
    for rows in range(1, 76):
        upper = decode(data, shrink, rows)
        wanted = -(-rows // shrink)
        np.testing.assert_array_equal(upper[:wanted], whole[:wanted])
        assert len(upper) == (min(wanted + 1, len(whole)) if leaves_out else len(whole))


def test_the_upper_rows_with_colours_at_half_resolution_down(photograph):
    """Pillow does not write this way of storing colours."""
    data = simplejpeg.encode_jpeg(photograph(75, 83), colorsubsampling="440")
    for shrink in (1, 2, 4):
        whole = decode(data, shrink)
        for rows in range(1, 76):
            wanted = -(-rows // shrink)
            np.testing.assert_array_equal(decode(data, shrink, rows)[:wanted], whole[:wanted])


REMARKS = {
    "bytes behind the last row": lambda data: data[:-2] + b"abc" + data[-2:],
    "an unknown version of JFIF": lambda data: data.replace(b"JFIF\0\1\1", b"JFIF\0\0\0"),
}


@pytest.mark.parametrize("kind", REMARKS)
def test_a_whole_jpeg_with_something_odd_is_read(kind, photograph, encoded):
    """It is read as Pillow reads it, for any number of rows; cut short, it is refused."""
    data = encoded(photograph(200, 83))
    odd = REMARKS[kind](data)
    assert odd != data
    assert read_size(odd) == (200, 83)
    np.testing.assert_array_equal(decode(odd), decode(data))
    np.testing.assert_array_equal(decode(odd, 1, 150)[:150], decode(data)[:150])
    with pytest.raises(UnreadableImage):
        decode(odd[:-400])


@pytest.mark.parametrize("kind", ["png", "cmyk jpeg"])
def test_the_upper_rows_of_other_kinds_are_the_whole(kind, photograph, encoded):
    data = encoded(photograph(61, 83), **KINDS[kind])
    np.testing.assert_array_equal(decode(data, 2, 10), decode(data))


def test_a_jpeg_cut_short_is_refused_though_the_upper_rows_are_there(photograph, encoded):
    data = encoded(photograph(200, 83))
    assert decode(data, 1, 20).shape == (21, 83, 3)
    for lost in (1, 2, len(data) // 3):
        with pytest.raises(UnreadableImage):
            decode(data[:-lost], 1, 20)


def test_damage_among_the_upper_rows_is_refused(photograph, encoded):
    """The file has a marker in a wrong place."""
    data = bytearray(encoded(photograph(200, 83)))
    pixels = data.index(b"\xff\xda") + 200
    data[pixels : pixels + 2] = b"\xff\xd9"
    with pytest.raises(UnreadableImage):
        decode(bytes(data), 1, 100)


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


SHADES = np.linspace(0, 255, 12 * 10).round().astype(np.uint8).reshape(12, 10)
GREY = Image.fromarray(SHADES)
COLOURS = Image.fromarray(np.stack([SHADES, SHADES[::-1], SHADES[:, ::-1]], -1))
PAPER = Image.fromarray(SHADES.astype(np.uint16) * 257)


def saved(image, kind, **options):
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def of_opencv(array):
    done, data = cv2.imencode(".png", array)
    assert done
    return data.tobytes()


SCALED = {
    "1": (saved(GREY.convert("1"), "PNG"), GREY.convert("1")),
    "L": (saved(GREY, "PNG"), GREY),
    "LA": (saved(GREY.convert("LA"), "PNG"), GREY),
    "P": (saved(COLOURS.quantize(16), "PNG"), COLOURS.quantize(16)),
    "P with a clear colour": (
        saved(COLOURS.quantize(16), "PNG", transparency=3),
        COLOURS.quantize(16),
    ),
    "RGBA": (saved(COLOURS.convert("RGBA"), "PNG"), COLOURS),
    "CMYK": (saved(COLOURS.convert("CMYK"), "TIFF"), COLOURS.convert("CMYK")),
    "YCbCr": (saved(COLOURS.convert("YCbCr"), "TIFF"), COLOURS.convert("YCbCr")),
    "16 bits, PNG": (saved(PAPER, "PNG"), GREY),
    "16 bits, TIFF": (saved(PAPER, "TIFF"), GREY),
    "16 bits, colours": (
        of_opencv(np.asarray(COLOURS)[..., ::-1].astype(np.uint16) * 257),
        COLOURS,
    ),
    "floating point": (saved(Image.fromarray(SHADES.astype(np.float32) / 255), "TIFF"), GREY),
}
NOT_KNOWN = {
    "32 bits": saved(Image.fromarray(SHADES.astype(np.int32) * 1000), "TIFF"),
    "floating point to 255": saved(Image.fromarray(SHADES.astype(np.float32)), "TIFF"),
    "floating point with NaN": saved(
        Image.fromarray(np.where(SHADES < 9, np.nan, 0.5).astype(np.float32)), "TIFF"
    ),
}


NUMBERS = {tag.name: number for number, tag in TiffImagePlugin.TiffTags.TAGS_V2.items()}


def tiff(channels, **tags):
    """Return a big-endian TIFF with separate planes per channel, as bytes."""
    sizes = [len(channel) for channel in channels]
    directory = TiffImagePlugin.ImageFileDirectory_v2(prefix=b"MM")
    starts = tuple(8 + sum(sizes[:number]) for number in range(len(sizes)))
    fixed = {"ImageWidth": 10, "ImageLength": 12, "RowsPerStrip": 12, "SamplesPerPixel": len(sizes)}
    fixed |= {"StripOffsets": starts, "StripByteCounts": tuple(sizes)}
    for name, value in (fixed | tags).items():
        directory[NUMBERS[name]] = value
    end = 8 + sum(sizes)
    return b"MM\0*" + struct.pack(">I", end) + b"".join(channels) + directory.tobytes(end)


@pytest.mark.parametrize("name", SCALED)
def test_every_mode_is_scaled_to_eight_bits(name):
    if name == "YCbCr" and int(PIL.__version__.partition(".")[0]) < 13:
        pytest.skip("Pillow does not read what it has written")
    data, original = SCALED[name]
    np.testing.assert_array_equal(decode(data), np.asarray(original.convert("RGB")))


@pytest.mark.parametrize("name", NOT_KNOWN)
def test_numbers_whose_white_is_not_known_are_unreadable(name):
    with raised(UnreadableImage, names={"TIFF"}) as caught:
        decode(NOT_KNOWN[name])
    assert {8, 16} <= set(numbers_in(caught))  # the bits that can be read


def of_sixteen_bits(data):
    """Return an 8-bit JPEG 2000 whose header claims 16 bits."""
    place = data.index(b"\xff\x4f\xff\x51") + 42
    return data[:place] + b"\x0f" + data[place + 1 :]


CHANNELS = [channel.astype(">u2").tobytes() for channel in np.moveaxis(np.asarray(COLOURS), -1, 0)]
BLACK_AND_WHITE = zlib.compress((SHADES > 99).astype(">f4").tobytes())
MISREAD = {
    "separate channels of more than 8 bits": tiff(
        CHANNELS,
        BitsPerSample=(16,) * 3,
        Compression=1,
        PhotometricInterpretation=2,
        PlanarConfiguration=2,
    ),
    "floating point of big-endian": tiff(
        [BLACK_AND_WHITE],
        BitsPerSample=32,
        Compression=8,
        PhotometricInterpretation=1,
        SampleFormat=3,
    ),
    "colours of more than 8 bits": of_sixteen_bits(saved(COLOURS, "JPEG2000")),
}
"""Properties of images that Pillow decodes wrongly: bytes of channels become pixels, all numbers
become zero, white becomes black."""


@pytest.mark.parametrize("name", MISREAD)
def test_what_pillow_reads_wrongly_is_unreadable(name):
    with pytest.raises(UnreadableImage, match=name):
        decode(MISREAD[name])


@pytest.mark.filterwarnings("ignore:Image size")
def test_a_picture_that_declares_more_pixels_than_it_has_room_for_is_unreadable():
    header = struct.pack(">IIBBBBB", 178_956_970, 1, 16, 6, 0, 0, 0)
    chunks = [(b"IHDR", header), (b"IDAT", zlib.compress(bytes(1000))), (b"IEND", b"")]
    data = b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))
        for kind, body in chunks
    )
    with pytest.raises(UnreadableImage):
        decode(data)
