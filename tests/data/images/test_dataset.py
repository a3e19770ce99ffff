"""Images on disk and in memory for training and evaluation, and damaged records."""

import numpy as np
import pytest
from PIL import Image
from refusal import names_in, numbers_in, troubled

from lbopt.data import (
    DamagedCount,
    EvalBatches,
    Reading,
    TrainBatches,
    eval_batches,
    read_batches,
    train_iterator,
)
from lbopt.data.images import (
    ImageDataset,
    Policy,
    Preparation,
    SmallImages,
    central_box,
    load_image_arrays,
)
from lbopt.data.images._decode import decode
from lbopt.models import space_to_depth

CLASSES = 7
SIDE = 24
READING = Reading(threads=3, examples_per_slice=4)


@pytest.fixture(scope="module")
def files(photograph, encoded):
    """Return 40 JPEGs of several sizes; among them a grey one and a CMYK one."""
    sizes = [(40 + 3 * number, 70 - number) for number in range(40)]
    modes = {3: "L", 4: "CMYK"}
    return [
        encoded(photograph(*size, seed), mode=modes.get(seed, "RGB"), quality=90)
        for seed, size in enumerate(sizes)
    ]


@pytest.fixture(scope="module")
def whole(files):
    return [{"image": file, "label": number % CLASSES} for number, file in enumerate(files)]


@pytest.fixture(scope="module")
def damaged(whole):
    """Return the records with four damaged: cut short, no image, label too high or too low."""
    records = [dict(record) for record in whole]
    records[5]["image"] = records[5]["image"][:400]
    records[6]["image"] = b"not an image"
    records[39]["label"] = CLASSES
    records[20]["label"] = -1
    return records


BAD = {5, 6, 20, 39}


def dataset(records, limit=0, **preparation):
    return ImageDataset(
        records, CLASSES, Preparation(SIDE, **preparation), DamagedCount("here", limit), READING
    )


def test_evaluation_sees_the_central_part_as_pillow_resizes_it(whole, files):
    batch = dataset(whole).take(np.arange(40))
    for image, file in zip(batch["image"], files, strict=True):
        picture = Image.fromarray(decode(file))
        top, left, side, _ = central_box(picture.height, picture.width)
        wanted = picture.crop((left, top, left + side, top + side)).resize(
            (SIDE, SIDE), Image.BICUBIC
        )
        np.testing.assert_array_equal(image, np.asarray(wanted))
    assert batch["label"].tolist() == [number % CLASSES for number in range(40)]
    assert batch["mask"].all()


def test_an_example_of_training_depends_on_seed_epoch_and_number_only(whole):
    images = dataset(whole, policy=Policy("randaugment"))
    one = images.draw(np.asarray([3, 8]), np.asarray([1, 2]), seed=5)["image"]
    other = images.draw(np.asarray([8, 9, 3]), np.asarray([2, 2, 1]), seed=5)["image"]
    np.testing.assert_array_equal(one, other[[2, 0]])
    for index, epoch, seed in ((4, 1, 5), (3, 2, 5), (3, 1, 6)):
        assert np.any(
            one[0] != images.draw(np.asarray([index]), np.asarray([epoch]), seed)["image"][0]
        )


def test_half_of_the_images_are_mirrored_unless_nothing_is_to_be(whole):
    same = {"crop_area": (1.0, 1.0), "crop_ratio": (1.0, 1.0)}
    square = [{"image": whole[0]["image"], "label": 0}]
    plain = dataset(square, flip=False, **same).draw(np.zeros(1, int), np.zeros(1, int), 0)[
        "image"
    ][0]
    epochs = np.arange(400)
    seen = dataset(square, **same).draw(np.zeros(400, int), epochs, 0)["image"]
    as_it_is = np.all(seen == plain, (1, 2, 3))
    mirrored = np.all(seen == plain[:, ::-1], (1, 2, 3))
    assert np.all(as_it_is ^ mirrored)
    assert abs(mirrored.mean() - 0.5) < 3 * 0.025


def test_folded_images_are_those_the_stem_would_fold(whole):
    pick = np.arange(5)
    for see in (lambda images: images.take(pick), lambda images: images.draw(pick, pick, 1)):
        plain, folded = (
            see(dataset(whole, space_to_depth=flag))["image"] for flag in (False, True)
        )
        assert folded.shape == (5, SIDE // 2, SIDE // 2, 12)
        np.testing.assert_array_equal(folded, np.asarray(space_to_depth(plain)))


def test_training_takes_the_next_good_record_and_counts(damaged, whole):
    images = dataset(damaged, limit=4)
    drawn = list(read_batches(TrainBatches(images, seed=3, global_batch_size=10, num_steps=4)))
    assert len(images.damaged) == 4
    labels = np.concatenate([batch["label"] for batch in drawn])
    indices = np.concatenate([np.arange(40)[order(step)] for step in range(4)])
    stand_in = {5: 7, 6: 7, 20: 21, 39: 0}
    assert labels.tolist() == [stand_in.get(index, index) % CLASSES for index in indices.tolist()]
    assert all(set(batch) == {"image", "label"} for batch in drawn)


def order(step):
    from lbopt.data import example_indices

    return example_indices(40, 3, 10 * step, 10)


def test_evaluation_leaves_damaged_records_out_and_counts(damaged):
    images = dataset(damaged, limit=4)
    batches = list(eval_batches(images, 16))
    mask, image = (np.concatenate([batch[name] for batch in batches]) for name in ("mask", "image"))
    assert not image[:40][~mask[:40]].any()
    assert image[:40][mask[:40]].any((1, 2, 3)).all()
    assert set(np.flatnonzero(~mask[:40])) == BAD
    assert not mask[40:].any()
    assert len(images.damaged) == 4
    list(eval_batches(images, 7))
    assert len(images.damaged) == 4  # each counts once


@pytest.mark.parametrize("limit", [0, 3])
def test_one_damaged_record_too_many_ends_the_run(damaged, limit):
    with troubled("max_damaged_records", limit, "damaged") as caught:
        list(eval_batches(dataset(damaged, limit), 16))
    assert numbers_in(caught)
    assert "here" in names_in(caught)  # the data set


def test_a_data_set_without_a_good_record_says_so(damaged):
    images = ImageDataset(
        damaged[5:7], CLASSES, Preparation(SIDE), DamagedCount("here", 9), READING
    )
    with troubled("records", 2, "damaged"):
        images.draw(np.zeros(1, int), np.zeros(1, int), 0)


@pytest.mark.parametrize("count", [1, 2, 4])
def test_processes_share_the_batches_of_one(damaged, count):
    alone = list(read_batches(TrainBatches(dataset(damaged, 4), 3, 12, 5)))
    shares = np.split(np.arange(4), count)
    parts = [
        list(read_batches(TrainBatches(dataset(damaged, 4), 3, 12, 5, 4, share)))
        for share in shares
    ]
    for step, batch in enumerate(alone):
        for name, array in batch.items():
            np.testing.assert_array_equal(
                array, np.concatenate([part[step][name] for part in parts])
            )
    alone = list(read_batches(EvalBatches(dataset(damaged, 4), 12, 4)))
    parts = [list(read_batches(EvalBatches(dataset(damaged, 4), 12, 4, share))) for share in shares]
    for number, batch in enumerate(alone):
        for name, array in batch.items():
            np.testing.assert_array_equal(
                array, np.concatenate([part[number][name] for part in parts])
            )


def test_reading_resumes_in_the_middle_of_an_epoch(whole):
    batches = TrainBatches(dataset(whole), 3, 12, 9)
    straight = list(train_iterator(batches))
    for batch, wanted in zip(train_iterator(batches, 5), straight[5:], strict=True):
        np.testing.assert_array_equal(batch["image"], wanted["image"])


def test_processes_that_decode_give_what_threads_give(damaged):
    images = dataset(damaged, 4)
    wanted = list(read_batches(TrainBatches(images, 3, 12, 3)))
    images = dataset(damaged, 4)
    images.reading = READING._replace(processes=2)
    found = list(read_batches(TrainBatches(images, 3, 12, 3)))
    for batch, other in zip(found, wanted, strict=True):
        np.testing.assert_array_equal(batch["image"], other["image"])
    assert len(images.damaged) == 4


@pytest.fixture(scope="module")
def thumbnails(encoded):
    rng = np.random.default_rng(0)
    pixels = rng.integers(0, 256, (6, 8, 8), dtype=np.uint8)
    return pixels, [
        {"image": encoded(one, "PNG", "L"), "label": label} for label, one in enumerate(pixels)
    ]


def test_small_images_are_held_as_they_are(thumbnails):
    pixels, records = thumbnails
    arrays = load_image_arrays(records, (8, 8, 1), 10, DamagedCount("here", 0))
    np.testing.assert_array_equal(arrays["image"], pixels)
    assert arrays["label"].tolist() == list(range(6))
    images = SmallImages(arrays, 0, False, Policy(), DamagedCount("here", 0))
    np.testing.assert_array_equal(
        images.draw(np.asarray([4]), np.asarray([3]), 1)["image"][0], pixels[4]
    )


def test_a_small_image_is_cut_out_of_its_padded_self(thumbnails):
    pixels, records = thumbnails
    arrays = load_image_arrays(records, (8, 8, 1), 10, DamagedCount("here", 0))
    images = SmallImages(arrays, 2, True, Policy(), DamagedCount("here", 0))
    padded = np.pad(pixels[1], 2)
    allowed = {}
    for top in range(5):
        for left in range(5):
            part = padded[top : top + 8, left : left + 8]
            allowed[part.tobytes()] = (top, left, False)
            allowed[part[:, ::-1].tobytes()] = (top, left, True)
    seen = images.draw(np.ones(500, int), np.arange(500), 0)["image"]
    found = [allowed[image.tobytes()] for image in seen]  # KeyError for any other image
    assert len(set(found)) == 50
    np.testing.assert_array_equal(seen, images.draw(np.ones(500, int), np.arange(500), 0)["image"])


def test_a_small_image_in_colour_depends_on_seed_epoch_and_number_only(encoded):
    pixels = np.random.default_rng(0).integers(0, 256, (6, 8, 8, 3), dtype=np.uint8)
    records = [
        {"image": encoded(one, "PNG"), "label": 9 - number} for number, one in enumerate(pixels)
    ]
    arrays = load_image_arrays(records, (8, 8, 3), 10, DamagedCount("here", 0))
    np.testing.assert_array_equal(arrays["image"], pixels)
    images = SmallImages(arrays, 2, True, Policy("autoaugment"), DamagedCount("here", 0))
    one = images.draw(np.asarray([3, 1]), np.asarray([1, 2]), seed=5)
    other = images.draw(np.asarray([1, 0, 3]), np.asarray([2, 2, 1]), seed=5)
    np.testing.assert_array_equal(one["image"], other["image"][[2, 0]])
    assert (one["image"].dtype, one["image"].shape) == (np.uint8, (2, 8, 8, 3))
    assert (one["label"].tolist(), other["label"].tolist()) == ([6, 8], [8, 9, 6])
    for index, epoch, seed in ((4, 1, 5), (3, 2, 5), (3, 1, 6)):
        assert np.any(
            one["image"][0]
            != images.draw(np.asarray([index]), np.asarray([epoch]), seed)["image"][0]
        )
    np.testing.assert_array_equal(images.take(np.arange(6))["image"], pixels)


def test_small_records_that_are_damaged_are_left_out(thumbnails, encoded):
    pixels, records = thumbnails
    wrong = [
        {"image": encoded(np.zeros((9, 8), np.uint8), "PNG", "L"), "label": 0},
        {"image": b"", "label": 1},
        {"image": records[0]["image"], "label": 10},
    ]
    count = DamagedCount("here", 3)
    arrays = load_image_arrays([*records[:2], *wrong, *records[2:]], (8, 8, 1), 10, count)
    np.testing.assert_array_equal(arrays["image"], pixels)
    assert len(count) == 3
    with troubled("max_damaged_records", 0, "damaged") as caught:
        load_image_arrays([*records, wrong[0]], (8, 8, 1), 10, DamagedCount("here", 0))
    assert "9 x 8" in caught.value.reason
