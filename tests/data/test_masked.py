"""Masked pairs of segments: what BERT's paper says of them, on text whose tokens know where they come from."""

import numpy as np
import pytest

from lbopt.data.batches import TrainBatches, train_iterator
from lbopt.data.masked import MaskedLMDataset, uniform_draws
from lbopt.data.pieces import CLS, MASK, PAD, SEP
from lbopt.data.text import Document
from lbopt.errors import UserError

LENGTH, VOCABULARY, PREDICTIONS = 24, 50_000, 4
SIZES = (400, 90, 1000, 2, 37)


def document(number, size):
    """Return tokens that count up from number * 10,000, with a sentence every seven."""
    return Document(np.arange(size, dtype=np.int32) + 10_000 * number + 100, np.arange(0, size, 7))


@pytest.fixture(scope="module")
def dataset():
    return MaskedLMDataset(
        [document(number, size) for number, size in enumerate(SIZES)], LENGTH, VOCABULARY, PREDICTIONS
    )


@pytest.fixture(scope="module")
def many(dataset):
    """Return all examples in 60 epochs, and the tokens before any was hidden."""
    indices, epochs = np.tile(np.arange(len(dataset)), 60), np.repeat(np.arange(60), len(dataset))
    batch = dataset.draw(indices, epochs, seed=3)
    return batch, restored(batch)


def restored(batch):
    ids = batch["input_ids"].copy()
    rows, columns = np.nonzero(batch["masked_weights"])
    ids[rows, batch["masked_positions"][rows, columns]] = batch["masked_labels"][rows, columns]
    return ids


def segments(ids):
    """Split a row at its special tokens."""
    (first, second) = np.flatnonzero(ids == SEP)
    return ids[1:first], ids[first + 1 : second]


def test_names_shapes_and_dtypes(dataset):
    batch = dataset.take(np.arange(5))
    shapes = {name: (array.shape[1:], str(array.dtype)) for name, array in batch.items()}
    row, predictions = ((LENGTH,), "int32"), ((PREDICTIONS,), "int32")
    assert shapes == {
        "input_ids": row,
        "token_type_ids": row,
        "attention_mask": row,
        "masked_positions": predictions,
        "masked_labels": predictions,
        "masked_weights": ((PREDICTIONS,), "float32"),
        "next_sentence_label": ((), "int32"),
    }


def test_the_form_of_an_example(many):
    batch, ids = many
    assert (ids[:, 0] == CLS).all()
    for row, types, mask in zip(ids[:500], batch["token_type_ids"], batch["attention_mask"], strict=False):
        first, second = segments(row)
        assert len(first) >= 1
        assert len(second) >= 1
        used = len(first) + len(second) + 3
        assert types.tolist() == [0] * (len(first) + 2) + [1] * (len(second) + 1) + [0] * (LENGTH - used)
        assert mask.tolist() == [1] * used + [0] * (LENGTH - used)
        assert (row[used:] == PAD).all()


def test_segments_are_text_and_the_label_says_whether_they_follow(many):
    batch, ids = many
    for row, label in zip(ids, batch["next_sentence_label"], strict=True):
        first, second = segments(row)
        assert (np.diff(first) == 1).all()
        assert (np.diff(second) == 1).all()
        follows = second[0] == first[-1] + 1
        assert follows == (label == 0)
        same_document = second[0] // 10_000 == first[0] // 10_000
        assert same_document == (label == 0)


def test_cuts_are_at_the_beginnings_of_sentences(many):
    batch, ids = many
    for row in ids[batch["next_sentence_label"] == 0]:
        first, second = segments(row)
        begins = (second[0] - 100) % 10_000 % 7 == 0
        inside = np.concatenate([first, second])[1:] - 100
        assert begins or not (inside % 10_000 % 7 == 0).any()  # one sentence: anywhere


def test_one_half_is_random(many):
    """Five standard deviations."""
    label = many[0]["next_sentence_label"]
    assert abs(label.mean() - 0.5) < 5 * 0.5 / np.sqrt(len(label))


def test_other_documents_are_drawn_by_their_size(dataset, many):
    """Chunks 0 to 19 are document 0's: from there, document 2 has 48 of the 55 others."""
    batch, ids = many
    rows = (ids[:, 1] // 10_000 == 0) & (batch["next_sentence_label"] == 1)
    others = np.asarray([segments(row)[1][0] // 10_000 for row in ids[rows]])
    chunks = np.asarray([len(range(0, size - 1, LENGTH - 3)) for size in SIZES])
    chunks[0] = 0
    expected = chunks / chunks.sum()
    shares = np.bincount(others, minlength=5) / len(others)
    assert np.abs(shares - expected).max() < 5 * 0.5 / np.sqrt(len(others))


def test_fifteen_percent_are_predicted(many):
    batch, _ = many
    lengths = batch["attention_mask"].sum(1)
    expected = np.clip(np.round(0.15 * lengths), 1, PREDICTIONS)
    np.testing.assert_array_equal(batch["masked_weights"].sum(1), np.minimum(expected, lengths - 3))
    assert set(batch["masked_weights"].ravel().tolist()) == {0.0, 1.0}


def test_no_special_token_is_hidden_and_none_twice(many):
    batch, ids = many
    for row, places, weights in zip(ids, batch["masked_positions"], batch["masked_weights"], strict=True):
        used = places[weights > 0]
        assert (row[used] >= 5).all()
        assert len(set(used.tolist())) == len(used)
        assert used.tolist() == sorted(used.tolist())
        assert (places[weights == 0] == 0).all()


def test_labels_are_the_text(many):
    """What is put back makes the text whole again; everything else was never touched."""
    batch, ids = many
    changed = batch["input_ids"] != ids
    allowed = np.zeros((len(ids), LENGTH), bool)
    rows, columns = np.nonzero(batch["masked_weights"])
    allowed[rows, batch["masked_positions"][rows, columns]] = True
    assert not (changed & ~allowed).any()
    for row in ids:
        for part in segments(row):
            assert (np.diff(part) == 1).all()
    assert (batch["masked_labels"][batch["masked_weights"] == 0] == PAD).all()


def test_eighty_ten_ten(many):
    batch, _ = many
    rows, columns = np.nonzero(batch["masked_weights"])
    shown = batch["input_ids"][rows, batch["masked_positions"][rows, columns]]
    labels = batch["masked_labels"][rows, columns]
    masked, kept = shown == MASK, shown == labels
    for share, expected in ((masked.mean(), 0.8), (kept.mean(), 0.1), ((~masked & ~kept).mean(), 0.1)):
        assert abs(share - expected) < 5 * np.sqrt(expected * (1 - expected) / len(shown))
    random = shown[~masked & ~kept]
    assert random.min() >= 5
    assert random.max() < VOCABULARY
    assert abs(random.mean() / VOCABULARY - 0.5) < 5 * np.sqrt(1 / 12 / len(random))


def test_every_token_is_hidden_as_often(many):
    """Of full examples, 4 of 21 tokens; five standard deviations at each place."""
    batch, ids = many
    full = batch["attention_mask"].sum(1) == LENGTH
    places = batch["masked_positions"][full][batch["masked_weights"][full] > 0]
    tokens = (ids[full] >= 5).sum(0)
    hidden = np.bincount(places, minlength=LENGTH)
    expected = 4 / 21 * tokens
    assert (np.abs(hidden - expected) <= 5 * np.sqrt(expected * 17 / 21)).all()


def test_epochs_and_seeds_differ_and_evaluation_does_not(dataset):
    indices = np.arange(20)

    def drawn(epoch, seed):
        return dataset.draw(indices, np.full(20, epoch), seed)["input_ids"].tobytes()

    assert len({drawn(epoch, seed) for epoch in range(3) for seed in range(3)}) == 9
    assert drawn(1, 2) == drawn(1, 2)
    assert dataset.take(indices)["input_ids"].tobytes() == dataset.take(indices)["input_ids"].tobytes()


def test_an_example_does_not_depend_on_its_neighbours(dataset):
    whole = dataset.draw(np.arange(30), np.arange(30) % 3, 5)
    for number in (0, 7, 29):
        alone = dataset.draw(np.asarray([number]), np.asarray([number % 3]), 5)
        for name, array in alone.items():
            np.testing.assert_array_equal(array[0], whole[name][number])


@pytest.mark.parametrize("process_count", [2, 4])
def test_the_parts_of_all_processes_are_the_global_batch(dataset, process_count):
    """Over two ends of an epoch."""
    whole = TrainBatches(dataset, 3, 32, 6)
    parts = [TrainBatches(dataset, 3, 32, 6, index, process_count) for index in range(process_count)]
    for step in range(6):
        batches = [part[step] for part in parts]
        for name, array in whole[step].items():
            np.testing.assert_array_equal(np.concatenate([batch[name] for batch in batches]), array)


def test_resuming_in_the_middle_of_an_epoch(dataset):
    batches = TrainBatches(dataset, 3, 32, 6)
    full = [batch["input_ids"].tolist() for batch in train_iterator(batches)]
    assert [batch["input_ids"].tolist() for batch in train_iterator(batches, 1)] == full[1:]


def test_batch_sizes_see_the_same_stream(dataset):
    small, large = TrainBatches(dataset, 3, 16, 6), TrainBatches(dataset, 3, 48, 2)
    for name in small[0]:
        np.testing.assert_array_equal(
            np.concatenate([small[step][name] for step in range(6)]),
            np.concatenate([large[step][name] for step in range(2)]),
        )


def test_the_mean_number_of_predictions(dataset):
    weights = dataset.take(np.arange(len(dataset)))["masked_weights"]
    assert dataset.mean_predictions == pytest.approx(weights.sum() / len(dataset))
    assert 2 < dataset.mean_predictions <= PREDICTIONS


def test_draws_are_uniform_and_do_not_follow_the_order_of_examples():
    draws = uniform_draws(np.arange(2000), np.zeros(2000, int), 0, 16)
    assert draws.min() >= 0
    assert draws.max() < 1
    counts, _ = np.histogram(draws, 20, (0, 1))
    assert np.abs(counts - 1600).max() < 5 * np.sqrt(1600)
    assert abs(np.corrcoef(draws[:-1, 0], draws[1:, 0])[0, 1]) < 0.1
    order = np.random.Philox(key=[0, 0]).random_raw(16) >> np.uint64(11)
    assert not np.isin((draws * 2.0**53).astype(np.uint64), order).any()


def test_what_does_not_fit_is_refused():
    two = [document(0, 9), document(1, 9)]
    with pytest.raises(UserError, match=r"config.data.sequence_length = 4: .* use at least 5"):
        MaskedLMDataset(two, 4, VOCABULARY, 1)
    assert len(MaskedLMDataset(two, 5, VOCABULARY, 1)) == 8
    with pytest.raises(UserError, match="at least two"):
        MaskedLMDataset(two[:1], 10, VOCABULARY, 1)
