"""Generated data sets: images of distinguishable classes, and questions with their answers."""

import hashlib
import io

import numpy as np
import pytest
from PIL import Image

from lbopt.config import DataConfig
from lbopt.data import TfdsFolder
from lbopt.data.from_config import _images
from lbopt.data.prepare import GENERATED_IMAGES, _pydoc_squad, prepare_source
from lbopt.data.squad import EvaluationWindows, TrainingWindows, _examples
from lbopt.data.text import load_pydoc_topics


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory):
    """Return a folder with both data sets; tests must not change it."""
    folder = tmp_path_factory.mktemp("data")
    for source in (GENERATED_IMAGES, _pydoc_squad.PYDOC_SQUAD):
        made = prepare_source(source, str(folder))
        assert (made.name, made.made) == (source.name, True)
    return folder


def records(split):
    return [record for _, record in GENERATED_IMAGES.splits[split]()]


def test_a_recipe_reads_the_images(data_dir):
    config = DataConfig(
        "images",
        builder="generated_images",
        data_dir=str(data_dir),
        test_split="validation",
        image_size=32,
    )
    splits, class_names = _images.load_images(config)
    assert (len(class_names), [len(split) for split in splits]) == (10, [96, 40, 40])
    seen = [
        splits.train.draw(np.arange(96), np.zeros(96, int), seed=0),
        splits.validation.take(np.arange(40)),
    ]
    for batch, size in zip(seen, (96, 40), strict=True):
        assert batch["image"].shape == (size, 32, 32, 3)
        assert batch.get("mask", np.ones(1)).all()
        assert set(np.bincount(batch["label"], minlength=10)) <= {size // 10, size // 10 + 1}


def test_the_files_are_the_same_every_time_and_of_every_kind():
    def digests(split):
        return [hashlib.sha256(record["image"]).digest() for record in records(split)]

    assert digests("train") == digests("train")
    assert len({*digests("train"), *digests("validation")}) == 136
    pictures = [Image.open(io.BytesIO(record["image"])) for record in records("train")]
    assert sorted(picture.mode for picture in pictures if picture.mode != "RGB") == ["CMYK", "L"]
    sides = {side for picture in pictures for side in picture.size}
    assert 64 <= min(sides) < 70 < 90 < max(sides) <= 96
    assert len({picture.size for picture in pictures}) > 50


def test_a_few_numbers_of_an_image_say_its_class():
    """They are the colour and the direction of the stripes, which mirroring keeps."""

    def described(record):
        pixels = np.asarray(Image.open(io.BytesIO(record["image"])).convert("RGB"), np.float64)
        colour = pixels.mean((0, 1)) / pixels.mean()
        across, down = (np.abs(np.diff(pixels.mean(axis), axis=0)).mean() for axis in (0, 1))
        return [*colour, across / (across + down)]

    train = np.asarray([described(record) for record in records("train")])
    labels = np.asarray([record["label"] for record in records("train")])
    centres = np.stack([np.median(train[labels == label], 0) for label in range(10)])
    right = 0
    for record in records("validation"):
        right += np.abs(centres - described(record)).sum(1).argmin() == record["label"]
    assert right == 40


@pytest.fixture(scope="module")
def questions(data_dir):
    folder = TfdsFolder("pydoc_squad", str(data_dir))
    opened = {split: folder.open(split, "split") for split in ("train", "validation")}
    return {
        split: _examples.questions_from_records(part[number] for number in range(len(part)))
        for split, part in opened.items()
    }


def test_every_answer_stands_where_it_should_and_is_the_only_one(questions):
    assert {split: len(part) for split, part in questions.items()} == {
        "train": 400,
        "validation": 60,
    }
    marks = dict(zip(_pydoc_squad.QUESTIONS, ('""', "()"), strict=True))
    for question in (*questions["train"], *questions["validation"]):
        start, stop = question.span()
        assert question.context[start:stop] == question.answers[0] != ""
        opening, closing = marks[question.question]
        assert question.context[:start].rstrip().endswith(opening)
        assert question.context[stop:].lstrip().startswith(closing)
        assert sum(map(question.context.count, {opening, closing})) == 2


def test_both_questions_are_asked_and_no_topic_is_in_both_parts(questions):
    for part in questions.values():
        asked = [question.question for question in part]
        assert min(asked.count(question) for question in _pydoc_squad.QUESTIONS) > len(asked) / 4
    assert len({question.id for part in questions.values() for question in part}) == 460
    assert not {q.context for q in questions["train"]} & {
        q.context for q in questions["validation"]
    }


def test_windows_can_be_made_of_the_questions(questions):
    pieces = load_pydoc_topics(1024).pieces
    train = TrainingWindows(questions["train"], pieces, 128, 64, 16)
    assert train.num_dropped == 0
    assert len(train) <= 440, "most contexts fit into one window"
    batch = train.take(np.arange(len(train)))
    assert (batch["start_position"] > 0).mean() > 0.9
    assert len(EvaluationWindows(questions["validation"], pieces, 128, 64, 16)) >= 60
