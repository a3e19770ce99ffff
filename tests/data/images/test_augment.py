"""Operations compared with formulas in NumPy; random choices with their probabilities."""

import collections

import numpy as np
import pytest
from PIL import Image
from refusal import refused

from lbopt.data.images import Policy, _augment
from lbopt.data.images._augment import OPERATIONS, V0, Reach, autoaugment, randaugment

REACH = Reach(translate=20, cutout=10)


class Drawn:
    """Generator that returns given numbers."""

    def __init__(self, random=0.0, integers=()):
        self._random = random
        self._integers = list(integers)

    def random(self):
        return self._random

    def integers(self, limit):
        return self._integers.pop(0)


@pytest.fixture(scope="module")
def image(photograph):
    return photograph(24, 30)


def apply(name, image, level, rng=None):
    return np.asarray(OPERATIONS[name](Image.fromarray(image), level, REACH, rng or Drawn()))


def moved(image, row_of, column_of):
    """Return the image with each pixel taken from another place; outside is grey."""
    out = np.full_like(image, 128)
    for row in range(image.shape[0]):
        for column in range(image.shape[1]):
            y = row_of(row, column)
            x = column_of(row, column)
            if 0 <= y < image.shape[0] and 0 <= x < image.shape[1]:
                out[row, column] = image[y, x]
    return out


@pytest.mark.parametrize(
    ("level", "bits"),
    [(0, 0), (2, 0), (2.5, 1), (5, 2), (7.4, 2), (7.5, 3), (10, 4), (20, 8), (30, 8)],
)
def test_posterize_keeps_the_highest_bits(level, bits, image):
    np.testing.assert_array_equal(
        apply("Posterize", image, level), (image.astype(int) >> (8 - bits)) << (8 - bits)
    )


@pytest.mark.parametrize(("level", "threshold"), [(0, 0), (1, 25), (5, 128), (10, 256), (15, 384)])
def test_solarize_inverts_from_a_threshold_on(level, threshold, image):
    expected = np.where(image < threshold, image, 255 - image.astype(int))
    np.testing.assert_array_equal(apply("Solarize", image, level), expected)


@pytest.mark.parametrize(("level", "added"), [(0, 0), (5, 55), (10, 110), (30, 330)])
def test_solarize_add_brightens_the_dark_half(level, added, image):
    expected = np.where(image < 128, np.minimum(image.astype(int) + added, 255), image)
    np.testing.assert_array_equal(apply("SolarizeAdd", image, level), expected)


def test_invert(image):
    np.testing.assert_array_equal(apply("Invert", image, 3), 255 - image)


def test_autocontrast_stretches_every_channel(image):
    low = image.min((0, 1)).astype(float)
    high = image.max((0, 1)).astype(float)
    expected = (image - low) * 255 / (high - low)
    assert np.abs(apply("AutoContrast", image, 3) - expected).max() <= 1


def test_equalize_makes_a_histogram_even(photograph):
    """Every value becomes the share of pixels below it."""
    image = photograph(250, 250)
    found = apply("Equalize", image, 3)
    for channel in range(3):
        values = image[..., channel]
        below = np.array([(values < value).mean() for value in range(256)])[values]
        assert np.abs(found[..., channel] - 255 * below).max() < 3
    flat = np.full((8, 8, 3), 77, np.uint8)
    np.testing.assert_array_equal(apply("Equalize", flat, 3), flat)


@pytest.mark.parametrize(("level", "factor"), [(0, 0.1), (5, 1.0), (10, 1.9), (20, 3.7)])
def test_enhancements_blend_with_less(level, factor, image):
    """The tolerance is one level for rounding the result and one for the blended image."""
    wide = image.astype(float)
    grey = (wide @ [0.299, 0.587, 0.114])[..., None]
    less = {"Brightness": 0.0, "Color": grey, "Contrast": round(float(grey.mean()))}
    for name, nothing in less.items():
        expected = np.clip(nothing + factor * (wide - nothing), 0, 255)
        assert np.abs(apply(name, image, level) - expected).max() <= 1 + abs(1 - factor), name


def test_sharpness_blends_with_a_smooth_image(image):
    wide = image.astype(float)
    kernel = np.array([[1, 1, 1], [1, 5, 1], [1, 1, 1]]) / 13
    smooth = sum(kernel[i, j] * wide[i : i + 22, j : j + 28] for i in range(3) for j in range(3))
    inner = wide[1:-1, 1:-1]
    for level, factor in ((0, 0.1), (10, 1.9)):
        expected = np.clip(smooth + factor * (inner - smooth), 0, 255)
        assert np.abs(apply("Sharpness", image, level)[1:-1, 1:-1] - expected).max() <= 1 + abs(
            1 - factor
        )
    np.testing.assert_array_equal(apply("Sharpness", image, 5), image)


@pytest.mark.parametrize(("random", "sign"), [(0.0, 1), (0.9, -1)])
def test_translations_move_whole_pixels_and_fill_with_grey(random, sign, image):
    for name, along in (("TranslateX", 1), ("TranslateY", 0)):
        found = apply(name, image, 3.5, Drawn(random))  # 7 pixels
        by = [0, 0]
        by[along] = 7 * sign
        expected = moved(
            image, lambda row, column, y=by[0]: row + y, lambda row, column, x=by[1]: column + x
        )
        np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize(("random", "sign"), [(0.0, 1), (0.9, -1)])
def test_shears_take_the_nearest_pixel(random, sign, image):
    """The shear of .3 at level 10 is evaluated at the centres of pixels."""
    by = 0.3 * sign
    along_x = moved(
        image,
        lambda row, column: row,
        lambda row, column: int(np.floor(column + 0.5 + by * (row + 0.5))),
    )
    np.testing.assert_array_equal(apply("ShearX", image, 10, Drawn(random)), along_x)
    along_y = moved(
        image,
        lambda row, column: int(np.floor(row + 0.5 + by * (column + 0.5))),
        lambda row, column: column,
    )
    np.testing.assert_array_equal(apply("ShearY", image, 10, Drawn(random)), along_y)


def test_a_rotation_turns_about_the_middle(image):
    square = image[:24, :24]
    # Level 30 is 90 degrees counterclockwise.
    np.testing.assert_array_equal(apply("Rotate", square, 30), np.rot90(square))
    np.testing.assert_array_equal(apply("Rotate", square, 30, Drawn(0.9)), np.rot90(square, -1))
    tilted = apply("Rotate", square, 10)
    np.testing.assert_array_equal(tilted[0, 0], _augment.GREY)
    assert np.array_equal(tilted[11:13, 11:13], square[11:13, 11:13])


def test_a_square_is_cut_out_where_it_was_drawn(image):
    found = apply("Cutout", image, 3, Drawn(integers=[10, 28]))
    expected = image.copy()
    expected[7:13, 25:30] = 128
    np.testing.assert_array_equal(found, expected)
    np.testing.assert_array_equal(apply("Cutout", image, 0, Drawn(integers=[10, 28])), image)


def test_every_operation_at_every_level_keeps_the_form(image):
    rng = np.random.default_rng(0)
    assert len(OPERATIONS) == 16
    for name in OPERATIONS:
        for level in (0, 0.3, 1, 5, 10, 17, 30):
            found = apply(name, image, level, rng)
            assert (found.dtype, found.shape) == (np.uint8, image.shape), (name, level)


@pytest.fixture
def recorded(monkeypatch):
    """Return the list of recorded (operation, level, reach); no operation is applied."""
    calls = []

    def record(name):
        return lambda image, level, reach, rng: calls.append((name, level, reach)) or image

    monkeypatch.setattr(_augment, "OPERATIONS", {name: record(name) for name in OPERATIONS})
    return calls


def test_autoaugment_draws_pairs_uniformly_and_applies_with_their_probabilities(recorded, image):
    rng = np.random.default_rng(0)
    draws = 20000
    for _ in range(draws):
        autoaugment(image, rng)
    assert {reach for _, _, reach in recorded} == {Reach(250, 100)}
    found = collections.Counter((name, level) for name, level, _ in recorded)
    expected = collections.Counter()
    for pair in V0:
        for name, probability, level in pair:
            expected[name, level] += probability * draws / len(V0)
    assert set(found) == {key for key, count in expected.items() if count}
    for key, count in found.items():
        assert abs(count - expected[key]) < 5 * np.sqrt(expected[key]), key


PUBLISHED_V0 = """
    Equalize .8 1 ShearY .8 4 | Color .4 9 Equalize .6 3 | Color .4 1 Rotate .6 8
    Solarize .8 3 Equalize .4 7 | Solarize .4 2 Solarize .6 2 | Color .2 0 Equalize .8 8
    Equalize .4 8 SolarizeAdd .8 3 | ShearX .2 9 Rotate .6 8 | Color .6 1 Equalize 1 2
    Invert .4 9 Rotate .6 0 | Equalize 1 9 ShearY .6 3 | Color .4 7 Equalize .6 0
    Posterize .4 6 AutoContrast .4 7 | Solarize .6 8 Color .6 9 | Solarize .2 4 Rotate .8 9
    Rotate 1 7 TranslateY .8 9 | ShearX 0 0 Solarize .8 4 | ShearY .8 0 Color .6 4
    Color 1 0 Rotate .6 2 | Equalize .8 4 Equalize 0 8 | Equalize 1 4 AutoContrast .6 2
    ShearY .4 7 SolarizeAdd .6 7 | Posterize .8 2 Solarize .6 10 | Solarize .6 8 Equalize .6 1
    Color .8 6 Rotate .4 5
"""
"""Pairs of (operation, probability, level): policy_v0 in tensorflow/tpu@181b860b,
models/official/efficientnet/autoaugment.py."""


def test_the_policy_is_the_published_one():
    words = PUBLISHED_V0.replace("|", " ").split()
    triples = [
        (words[at], float(words[at + 1]), int(words[at + 2])) for at in range(0, len(words), 3)
    ]
    assert [operation for pair in V0 for operation in pair] == triples


def test_the_policy_is_whole():
    assert len(V0) == 25
    assert {len(pair) for pair in V0} == {2}
    assert {name for pair in V0 for name, _, _ in pair} <= set(OPERATIONS)


def test_randaugment_draws_operations_uniformly(recorded, image):
    rng = np.random.default_rng(0)
    draws = 4000
    for _ in range(draws):
        randaugment(image, rng, num_layers=2, magnitude=15)
    assert len(recorded) == 2 * draws
    assert {(level, reach) for _, level, reach in recorded} == {(15, Reach(100, 40))}
    counts = collections.Counter(name for name, _, _ in recorded)
    assert set(counts) == set(OPERATIONS)
    assert all(abs(count - draws / 8) < 5 * np.sqrt(draws / 8) for count in counts.values())


def test_the_same_generator_gives_the_same_image(image):
    for function in (autoaugment, randaugment):
        first, second, other = (
            [function(image, rng) for _ in range(20)]
            for rng in map(np.random.default_rng, (1, 1, 2))
        )
        assert np.array_equal(first, second)
        assert not np.array_equal(first, other)


def test_what_no_policy_has_is_refused(image):
    rng = np.random.default_rng(0)
    with refused("num_layers", -1, "value"):
        randaugment(image, rng, num_layers=-1)
    with refused("magnitude", -0.5, "value"):
        randaugment(image, rng, magnitude=-0.5)
    with refused("magnitude", 31.0, "value"):
        Policy("randaugment", magnitude=31.0)
    with refused("name", "randaug", "choice"):
        Policy("randaug")
