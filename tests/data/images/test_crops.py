"""Distributions of random boxes, and crops compared with Pillow's."""

import io
import math

import numpy as np
import pytest
from PIL import Image
from refusal import refused
from scipy import stats

from lbopt.data.images import _crops
from lbopt.data.images._boxes import SAMPLINGS, Box, central_box, random_box
from lbopt.data.images._crops import eval_crop, train_crop
from lbopt.data.images._decode import UnreadableImage, decode

DRAWS = 4000


def boxes(height, width, count=DRAWS, **options):
    rng = np.random.default_rng(0)
    return np.array([random_box(rng, height, width, **options) for _ in range(count)])


def is_uniform(values, low, high):
    """Apply the Kolmogorov-Smirnov test; the draws are the same in every run."""
    return stats.kstest(values, "uniform", (low, high - low)).pvalue > 0.01


@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize(
    ("height", "width"), [(375, 500), (500, 375), (40, 900), (224, 224), (7, 9), (1, 1)]
)
def test_boxes_lie_inside(sampling, height, width):
    top, left, box_height, box_width = boxes(height, width, 500, sampling=sampling).T
    assert np.all((top >= 0) & (left >= 0) & (box_height >= 1) & (box_width >= 1))
    assert np.all((top + box_height <= height) & (left + box_width <= width))
    assert np.array_equal(
        boxes(height, width, 50, sampling=sampling), boxes(height, width, 50, sampling=sampling)
    )


def test_by_area_draws_area_and_logarithm_of_the_ratio_uniformly():
    """The image is so large that every draw fits."""
    _, _, height, width = boxes(10000, 10000, area=(0.08, 0.5)).T
    assert is_uniform(height * width / 1e8, 0.08, 0.5)
    assert is_uniform(np.log(width / height), math.log(3 / 4), math.log(4 / 3))


def test_by_height_draws_ratio_and_height_uniformly():
    _, _, height, width = boxes(10000, 10000, ratio=(1, 1), sampling="by_height").T
    assert np.array_equal(height, width)
    assert is_uniform(height, 10000 * math.sqrt(0.1), 10000)
    _, _, height, width = boxes(10000, 10000, area=(0.08, 0.5), sampling="by_height").T
    assert is_uniform(width / height, 3 / 4, 4 / 3)


def test_the_two_differ():
    by_area, by_height = (boxes(1000, 1000, sampling=sampling) for sampling in SAMPLINGS)
    assert np.mean(by_height[:, 2] * by_height[:, 3]) < 0.9 * np.mean(by_area[:, 2] * by_area[:, 3])


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_positions_are_uniform(sampling):
    top, left, height, width = boxes(3000, 3000, area=(0.1, 0.2), sampling=sampling).T
    assert is_uniform(top / (3000 - height), 0, 1)
    assert is_uniform(left / (3000 - width), 0, 1)


def test_where_no_draw_fits():
    """torchvision takes the central box of an extreme image, Google's code the central square."""
    rng = np.random.default_rng(0)
    assert random_box(rng, 10, 1000, area=(0.9, 1.0)) == Box(0, 493, 10, 13)
    assert random_box(rng, 1000, 10, area=(0.9, 1.0)) == Box(493, 0, 13, 10)
    assert random_box(rng, 10, 1000, area=(0.9, 1.0), sampling="by_height") == Box(1, 496, 8, 8)


def test_a_draw_of_the_whole_image():
    """Google's code counts it as a failed attempt."""
    assert random_box(np.random.default_rng(0), 64, 64, (1, 1), (1, 1)) == Box(0, 0, 64, 64)
    assert random_box(np.random.default_rng(0), 64, 64, (1, 1), (1, 1), "by_height") == Box(
        4, 4, 56, 56
    )


def test_by_height_covers_a_tenth_of_the_image():
    _, _, height, width = boxes(1000, 1000, sampling="by_height").T
    assert 1e5 <= np.min(height * width) < 1.1e5
    _, _, height, width = boxes(1000, 1000).T
    assert 0.8e5 * 0.999 <= np.min(height * width) < 0.9e5


@pytest.mark.parametrize(
    ("height", "width", "fraction", "expected"),
    [
        (256, 256, 0.875, Box(16, 16, 224, 224)),
        (512, 768, 0.875, Box(32, 160, 448, 448)),
        (375, 500, 0.875, Box(24, 86, 328, 328)),
        (224, 224, 1.0, Box(0, 0, 224, 224)),
        (1, 5, 0.875, Box(0, 2, 1, 1)),
    ],
)
def test_central_boxes(height, width, fraction, expected):
    assert central_box(height, width, fraction) == expected


def test_an_unknown_way_is_refused():
    with refused("sampling", "by_aria", "choice"):
        random_box(np.random.default_rng(0), 9, 9, sampling="by_aria")
    with refused("fraction", 1.5, "value"):
        central_box(9, 9, 1.5)
    for option, bad in (("area", (0.0, 1.0)), ("area", (0.9, 0.1)), ("ratio", (2.0, 1.0))):
        with refused(option, bad, "value"):
            random_box(np.random.default_rng(0), 9, 9, **{option: bad})
    with refused("interpolation", "cubic", "choice"):
        train_crop(b"", Box(0, 0, 1, 1), 9, "cubic")


@pytest.mark.parametrize("shape", [(375, 500), (500, 333), (90, 100)])
@pytest.mark.parametrize("mode", ["RGB", "L", "CMYK"])
def test_evaluation_is_pillow_to_the_pixel(shape, mode, photograph, encoded):
    data = encoded(photograph(*shape), mode=mode)
    image = Image.open(io.BytesIO(data)).convert("RGB")
    side = int(min(shape) * 0.875)
    left = (image.width - side + 1) // 2
    top = (image.height - side + 1) // 2
    theirs = image.crop((left, top, left + side, top + side)).resize((64, 64), Image.BICUBIC)
    np.testing.assert_array_equal(eval_crop(data, 64), np.asarray(theirs))


def test_evaluation_is_a_central_crop_of_the_resized_image(photograph, encoded):
    """The shorter side is resized to 256; the central 224 x 224 agree up to rounding and edges."""
    data = encoded(photograph(512, 768), quality=95)
    resized = Image.open(io.BytesIO(data)).resize((384, 256), Image.BICUBIC)
    theirs = np.asarray(resized.crop((80, 16, 304, 240))).astype(float)
    assert np.abs(eval_crop(data, 224) - theirs).mean() < 0.1


def test_a_box_of_the_right_size_is_cut_out(photograph, encoded):
    data = encoded(photograph(80, 90))
    whole = np.asarray(Image.open(io.BytesIO(data)))
    np.testing.assert_array_equal(train_crop(data, Box(11, 7, 64, 64), 64), whole[11:75, 7:71])


@pytest.mark.parametrize(
    "box", [Box(0, 0, 480, 640), Box(37, 81, 300, 400), Box(5, 3, 40, 30), Box(100, 200, 130, 130)]
)
def test_training_shows_what_pillow_shows(box, photograph, encoded):
    """It is a few levels of 255 from a careful resize, whether the decoder scales or not."""
    data = encoded(photograph(480, 640), quality=95)
    top, left, height, width = box
    image = Image.open(io.BytesIO(data))
    careful = image.resize((64, 64), Image.BILINEAR, box=(left, top, left + width, top + height))
    gap = np.abs(train_crop(data, box, 64).astype(float) - np.asarray(careful))
    assert gap.mean() < 3
    moved = Box(min(top + 40, 480 - height) if top < 40 else top - 40, left, height, width)
    if moved != box:
        other = np.abs(train_crop(data, moved, 64).astype(float) - np.asarray(careful))
        assert other.mean() > 2 * gap.mean()


def test_a_box_of_one_pixel(photograph, encoded):
    data = encoded(photograph(20, 20))
    pixel = np.asarray(Image.open(io.BytesIO(data)))[3, 4]
    np.testing.assert_array_equal(
        train_crop(data, Box(3, 4, 1, 1), 8), np.broadcast_to(pixel, (8, 8, 3))
    )


def test_broken_bytes_are_refused(photograph, encoded):
    data = encoded(photograph(80, 90))[:700]
    for cut in (lambda: eval_crop(data, 64), lambda: train_crop(data, Box(0, 0, 80, 90), 64)):
        with pytest.raises(UnreadableImage):
            cut()


@pytest.mark.parametrize("subsampling", ["4:2:0", "4:4:4"])
def test_a_box_is_cut_out_of_the_whole_image_or_its_upper_rows_alike(
    subsampling, photograph, encoded, monkeypatch
):
    data = encoded(photograph(375, 501), quality=90, subsampling=subsampling)
    rng = np.random.default_rng(0)
    drawn = [random_box(rng, 375, 501, sampling="by_height") for _ in range(60)]
    upper = [train_crop(data, box, size) for box in drawn for size in (31, 224)]
    monkeypatch.setattr(_crops._decode, "decode", lambda data, shrink, rows: decode(data, shrink))
    whole = [train_crop(data, box, size) for box in drawn for size in (31, 224)]
    for one, other in zip(upper, whole, strict=True):
        np.testing.assert_array_equal(one, other)
