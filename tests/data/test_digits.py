"""The digits and their fixed split."""

import hashlib

import numpy as np
import pytest
import sklearn.datasets

from lbopt.data import load_digits
from lbopt.data._digits import NUM_CLASSES

SIZES = {"train": 1024, "validation": 386, "test": 387}
DIGESTS = {
    "train": "ec501c6cf6073f22",
    "validation": "d417ab11b79e0290",
    "test": "1823e6e05f60e56c",
}


@pytest.mark.parametrize("part", SIZES)
def test_sizes_dtypes_and_ranges(part):
    arrays = getattr(load_digits(), part).arrays
    assert arrays["image"].shape == (SIZES[part], 8, 8)
    assert arrays["label"].shape == (SIZES[part],)
    assert arrays["image"].dtype == np.float32
    assert arrays["label"].dtype == np.int32
    assert arrays["image"].min() == 0
    assert arrays["image"].max() == 1
    assert np.all(arrays["image"] * 16 == np.round(arrays["image"] * 16))
    assert set(arrays["label"].tolist()) == set(range(NUM_CLASSES))


def test_the_parts_are_disjoint_and_complete():
    """The three parts together are the scans of scikit-learn, no two of which are equal."""
    source = sklearn.datasets.load_digits()
    expected = sorted(
        (int(label), image.astype(np.uint8).tobytes())
        for label, image in zip(source.target, source.images, strict=True)
    )
    assert len(set(expected)) == 1797
    got = []
    for split in load_digits():
        images = np.round(split.arrays["image"] * 16).astype(np.uint8)
        got += [
            (int(label), image.tobytes())
            for label, image in zip(split.arrays["label"], images, strict=True)
        ]
    assert sorted(got) == expected


@pytest.mark.parametrize("part", SIZES)
def test_classes_are_balanced(part):
    """Each class has a tenth of a part, give or take four standard deviations."""
    labels = getattr(load_digits(), part).arrays["label"]
    counts = np.bincount(labels, minlength=NUM_CLASSES)
    assert np.abs(counts - len(labels) / 10).max() < 4 * np.sqrt(len(labels) * 0.1 * 0.9)


@pytest.mark.parametrize("part", SIZES)
def test_the_split_is_pinned(part):
    """A changed digest is a changed split, and every published figure with it."""
    labels = getattr(load_digits(), part).arrays["label"]
    assert hashlib.sha256(labels.astype("<i4").tobytes()).hexdigest()[:16] == DIGESTS[part]


def test_the_split_is_not_the_order_of_the_source():
    source = sklearn.datasets.load_digits().target
    assert load_digits().train.arrays["label"].tolist() != source[:1024].tolist()


@pytest.mark.parametrize("image_size", [16, 32])
def test_larger_images_repeat_every_pixel(image_size):
    factor = image_size // 8
    for small, large in zip(load_digits(), load_digits(image_size), strict=True):
        np.testing.assert_array_equal(small.arrays["label"], large.arrays["label"])
        images = large.arrays["image"]
        assert (images.shape[1:], images.dtype) == ((image_size, image_size), np.float32)
        for row in range(factor):
            for column in range(factor):
                np.testing.assert_array_equal(
                    images[:, row::factor, column::factor], small.arrays["image"]
                )
