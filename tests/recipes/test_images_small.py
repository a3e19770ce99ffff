"""The shipped CIFAR-10 recipes, on forty images of noise with cifar10's schema."""

import io
import math
import pathlib

import jax
import numpy as np
import pytest
from PIL import Image
from tfds_sets import write_images

from lbopt.cli import load_config
from lbopt.config import TrainConfig
from lbopt.data.from_config import _images
from lbopt.recipes import build_run

FILE = pathlib.Path(__file__).parents[2] / "configs" / "cifar10.py"
NUM_TRAIN = 24
NUM_VALIDATION = 6
NUM_TEST = 10
PARTS = ("--config.data.train_split=train[:24]", "--config.data.validation_split=train[24:]")
"""Splits of thirty images in place of the recipe's 45,000 and 5,000."""


@pytest.fixture(scope="module")
def pictures():
    """Return split -> uint8 [images, 32, 32, 3] without black pixels."""
    rng = np.random.default_rng(0)
    sizes = {"train": NUM_TRAIN + NUM_VALIDATION, "test": NUM_TEST}
    return {
        split: rng.integers(1, 256, (size, 32, 32, 3), dtype=np.uint8)
        for split, size in sizes.items()
    }


@pytest.fixture(scope="module")
def data_dir(pictures, tmp_path_factory):
    """Return a folder with cifar10: 32 x 32 colour PNGs; image n has class n % 10."""
    folder = tmp_path_factory.mktemp("data")

    def file(picture):
        stream = io.BytesIO()
        Image.fromarray(picture).save(stream, "PNG")
        return stream.getvalue()

    sets = {
        split: [(file(one), n % 10) for n, one in enumerate(whole)]
        for split, whole in pictures.items()
    }
    write_images(folder, "cifar10", sets, 10, shape=(32, 32, 3), encoding="png", version="3.0.2")
    return folder


@pytest.fixture(scope="module")
def config(data_dir):
    """Return a function from overrides to the recipe lamb-4096 at a small size."""
    return lambda *overrides: load_config(
        f"{FILE}:lamb-4096", [*PARTS, f"--config.data.data_dir={data_dir}", *overrides], TrainConfig
    )


@pytest.fixture(scope="module")
def splits(config):
    found, class_names = _images.load_images(config().data)
    assert len(class_names) == 10
    return found


def test_the_parts_of_the_training_set_are_what_the_notation_says(splits, pictures):
    expected = {
        "train": pictures["train"][:NUM_TRAIN],
        "validation": pictures["train"][NUM_TRAIN:],
        "test": pictures["test"],
    }
    first = {"train": 0, "validation": NUM_TRAIN, "test": 0}
    for split, whole in expected.items():
        found = getattr(splits, split).take(np.arange(len(whole)))
        assert len(getattr(splits, split)) == len(whole)
        assert found["image"].dtype == np.uint8
        np.testing.assert_array_equal(found["image"], whole)  # evaluation uses the whole image
        np.testing.assert_array_equal(found["label"], (first[split] + np.arange(len(whole))) % 10)


def test_a_training_draw_is_a_place_in_the_padded_image_or_its_mirror_image(splits, pictures):
    index = 5
    count = 64

    drawn = splits.train.draw(np.full(count, index), np.arange(count), seed=3)
    assert drawn["image"].shape == (count, 32, 32, 3)
    assert drawn["image"].dtype == np.uint8
    assert set(drawn["label"].tolist()) == {index}

    padded = np.zeros((40, 40, 3), np.uint8)
    padded[4:36, 4:36] = pictures["train"][index]

    found = set()
    for image in drawn["image"]:
        fits = [
            (top, left, mirrored)
            for top in range(9)
            for left in range(9)
            for mirrored in (False, True)
            if np.array_equal(
                image[:, ::-1] if mirrored else image, padded[top : top + 32, left : left + 32]
            )
        ]
        assert len(fits) == 1
        found.add(fits[0])

    tops, lefts, mirrored = (set(values) for values in zip(*found, strict=True))
    # 64 draws of 9 places miss a given place with probability 1 in 1900. The draws are always the
    # same.
    assert (tops, lefts, mirrored) == (set(range(9)), set(range(9)), {False, True})


@pytest.mark.slow
def test_one_step_of_the_recipe(config):
    small = config(
        "--config.model.width_coefficient=0.125",
        "--config.global_batch_size=8",
        "--config.eval_global_batch_size=8",
        "--config.parallel.num_devices=1",
        "--config.parallel.num_microsteps=1",
    )
    run = build_run(small)
    state, metrics = jax.block_until_ready(run.train_step(run.init(), run.batches[0]))
    assert int(state.step) == 1
    total, weight = map(float, metrics["loss"])
    assert weight == 8
    assert 0 < total / weight < 10 * math.log(10)
