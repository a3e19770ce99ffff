"""Known shapes and sizes of data sets equal those of the data sets themselves."""

import dataclasses

import jax
import numpy as np
import pytest
from refusal import refused

from lbopt.config import DataConfig
from lbopt.data.from_config import _known, load_source
from lbopt.data.images import image_shape
from lbopt.data.squad import EvaluationWindows, Question, TrainingWindows
from lbopt.data.text import load_pydoc_topics


def of_examples(dataset, mask=True):
    """Return name -> (shape, dtype) of two examples, in training and in evaluation."""
    indices = np.arange(2)
    batches = [dataset.draw(indices, np.zeros(2, int), 0), dataset.take(indices)]

    def shapes(batch):
        return {
            name: (x.shape, x.dtype)
            for name, x in batch.items()
            if isinstance(x, np.ndarray) and name != "mask"
        }

    return [shapes(batch) for batch in batches]


def test_masked_text_is_shaped_as_the_topics_are():
    embedded = load_source(DataConfig("pydoc_mlm", sequence_length=64, max_predictions=9))
    blank = _known.known_source(
        DataConfig(
            "text_mlm",
            builder="nowhere",
            sequence_length=64,
            max_predictions=9,
            vocab_size=embedded.outputs,
        )
    )
    assert of_examples(blank.splits.train) == of_examples(embedded.splits.train)
    assert blank.outputs == embedded.outputs


@pytest.mark.parametrize("carry_state", [False, True])
def test_running_text_is_shaped_as_the_topics_are(carry_state):
    fields = {"sequence_length": 16, "carry_state": carry_state}
    embedded = load_source(DataConfig("pydoc_lm", **fields), 8)
    blank = _known.known_source(DataConfig("ptb", vocab_size=10000, **fields), 8)
    for ours, theirs in zip(blank.splits, embedded.splits, strict=True):
        assert of_examples(ours) == of_examples(theirs)
    assert blank.num_streams == embedded.num_streams
    assert len(blank.splits.train) == 929_588 // (16 * 8) * 8 if carry_state else (929_588 // 16)


@pytest.mark.parametrize(
    ("fields", "global_batch_size", "named"),
    [
        ({"carry_state": True}, 10**6, "global_batch_size"),
        ({"sequence_length": 2 * 10**6}, 8, "data.sequence_length"),
    ],
)
def test_what_does_not_fit_is_named_as_where_data_are_loaded(fields, global_batch_size, named):
    with refused(named):
        _known.known_source(DataConfig("ptb", **fields), global_batch_size)


def test_questions_are_shaped_as_windows_are():
    data = DataConfig(
        "squad",
        builder="squad/v1.1",
        test_split="validation",
        sequence_length=64,
        max_query_length=16,
    )

    context = "Ada Byron wrote the first program, and nobody ran it."
    questions = [
        Question(str(number), "Who wrote it?", context, ("Ada Byron",), (0,)) for number in range(3)
    ]
    sizes = (
        load_pydoc_topics(1024).pieces,
        data.sequence_length,
        data.doc_stride,
        data.max_query_length,
    )

    blank = _known.known_source(data)
    assert of_examples(blank.splits.train) == of_examples(TrainingWindows(questions, *sizes))
    assert of_examples(blank.splits.validation) == of_examples(EvaluationWindows(questions, *sizes))
    assert tuple(map(len, blank.splits)) == (87_599, 10_570, 10_570)


@pytest.mark.parametrize(
    ("changes", "shape", "classes"),
    [
        ({"builder": "imagenet2012", "image_size": 224}, (224, 224, 3), 1000),
        (
            {"builder": "imagenet2012:5.1.0", "image_size": 224, "space_to_depth": True},
            (112, 112, 12),
            1000,
        ),
        (
            {"builder": "cifar10", "train_crop": "padded", "validation_split": "train[45000:]"},
            (32, 32, 3),
            10,
        ),
        (
            {"builder": "mnist", "train_crop": "none", "validation_split": "train[90%:]"},
            (28, 28),
            10,
        ),
        (
            {
                "builder": "fashion_mnist",
                "train_crop": "none",
                "train_split": "train[:50000]",
                "validation_split": "train[50000:]",
            },
            (28, 28),
            10,
        ),
    ],
)
def test_images(changes, shape, classes):
    found = _known.known_source(DataConfig("images", **changes))
    assert of_examples(found.splits.train)[0] == {
        "image": ((2, *shape), np.uint8),
        "label": ((2,), np.int32),
    }
    assert found.outputs == classes
    lengths = {
        "imagenet2012": (1_281_167, 50_000),
        "cifar10": (50_000, 5_000),
        "fashion_mnist": (50_000, 10_000),
        "mnist": (60_000, 6_000),
    }
    assert tuple(map(len, found.splits[:2])) == lengths[changes["builder"].split(":")[0]]


def test_what_is_not_known_is_loaded(monkeypatch):
    asked = []
    monkeypatch.setattr(
        _known, "load_source", lambda data, *_: asked.append(data.builder or data.name)
    )
    for data in (
        DataConfig("images", builder="mine"),
        DataConfig("images", builder="mnist", train_split="tr"),
        DataConfig(),
    ):
        _known.known_source(data)
    assert asked == ["mine", "mnist", "digits"]


def test_a_corpus_takes_no_memory():
    """A shuffled order of its nominal number of examples would fill the memory."""
    data = DataConfig("text_mlm", builder="nowhere", sequence_length=8, max_predictions=1)
    train = _known.known_source(data).splits.train
    assert len(train) == _known.NOMINAL
    assert train.reading.in_order
    assert jax.tree.map(np.shape, train.take(np.arange(3)))["input_ids"] == (3, 8)


def test_folded_images_are_those_of_the_data_set():
    assert image_shape(32, True) == (16, 16, 12)
    assert dataclasses.asdict(DataConfig())["space_to_depth"] is None
