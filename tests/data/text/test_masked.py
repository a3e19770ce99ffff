"""Masked pairs of segments compared with BERT's paper, on text whose tokens are positions."""

import numpy as np
import pytest
from refusal import refused, troubled

from lbopt.data import TrainBatches, train_iterator
from lbopt.data.text import (
    MaskedLMDataset,
    StoreWriter,
    _masked,
    load_pydoc_topics,
    open_store,
    split_store,
)
from lbopt.data.text._masked import uniform_draws
from lbopt.data.text._pieces import CLS, MASK, PAD, SEP
from lbopt.data.text._tokens import gather_documents
from lbopt.data.text._wordpiece import Document, SpecialIds

LENGTH = 24
VOCABULARY = 70_000
PREDICTIONS = 4
SIZES = (400, 90, 1000, 2, 37)


def document(number, size):
    """Return tokens that count up from number * 10,000, with a sentence every seven."""
    return Document(np.arange(size, dtype=np.int32) + 10_000 * number + 100, np.arange(0, size, 7))


@pytest.fixture(scope="module")
def dataset():
    return MaskedLMDataset(
        [document(number, size) for number, size in enumerate(SIZES)],
        LENGTH,
        VOCABULARY,
        PREDICTIONS,
    )


@pytest.fixture(scope="module")
def many(dataset):
    """Return all examples of 60 epochs, and their tokens before masking."""
    indices = np.tile(np.arange(len(dataset)), 60)
    epochs = np.repeat(np.arange(60), len(dataset))
    batch = dataset.draw(indices, epochs, seed=3)
    return batch, restored(batch)


def restored(batch):
    ids = batch["input_ids"].copy()
    rows, columns = np.nonzero(batch["masked_weights"])
    ids[rows, batch["masked_positions"][rows, columns]] = batch["masked_labels"][rows, columns]
    return ids


def segments(ids):
    """Split an example at its special tokens."""
    (first, second) = np.flatnonzero(ids == SEP)
    return ids[1:first], ids[first + 1 : second]


def test_names_shapes_and_dtypes(dataset):
    batch = dataset.take(np.arange(5))
    shapes = {name: (array.shape[1:], str(array.dtype)) for name, array in batch.items()}
    row = ((LENGTH,), "int32")
    predictions = ((PREDICTIONS,), "int32")
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
    for row, types, mask in zip(
        ids[:500], batch["token_type_ids"], batch["attention_mask"], strict=False
    ):
        first, second = segments(row)
        assert len(first) >= 1
        assert len(second) >= 1
        used = len(first) + len(second) + 3
        assert types.tolist() == [0] * (len(first) + 2) + [1] * (len(second) + 1) + [0] * (
            LENGTH - used
        )
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
        assert (
            begins or not (inside % 10_000 % 7 == 0).any()
        )  # a single sentence may begin anywhere


def test_one_half_is_random(many):
    """The tolerance is five standard deviations."""
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
    for row, places, weights in zip(
        ids, batch["masked_positions"], batch["masked_weights"], strict=True
    ):
        used = places[weights > 0]
        assert (row[used] >= 5).all()
        assert len(set(used.tolist())) == len(used)
        assert used.tolist() == sorted(used.tolist())
        assert (places[weights == 0] == 0).all()


def test_labels_are_the_text(many):
    """The labels restore the text, and all other tokens are unchanged."""
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
    masked = shown == MASK
    kept = shown == labels
    for share, expected in (
        (masked.mean(), 0.8),
        (kept.mean(), 0.1),
        ((~masked & ~kept).mean(), 0.1),
    ):
        assert abs(share - expected) < 5 * np.sqrt(expected * (1 - expected) / len(shown))
    random = shown[~masked & ~kept]
    assert random.min() >= 5
    assert random.max() < VOCABULARY
    assert abs(random.mean() / VOCABULARY - 0.5) < 5 * np.sqrt(1 / 12 / len(random))


def test_every_token_is_hidden_as_often(many):
    """Full examples hide 4 of 21 tokens; the tolerance is five standard deviations per place."""
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
    assert (
        dataset.take(indices)["input_ids"].tobytes() == dataset.take(indices)["input_ids"].tobytes()
    )


def test_an_example_does_not_depend_on_its_neighbours(dataset):
    whole = dataset.draw(np.arange(30), np.arange(30) % 3, 5)
    for number in (0, 7, 29):
        alone = dataset.draw(np.asarray([number]), np.asarray([number % 3]), 5)
        for name, array in alone.items():
            np.testing.assert_array_equal(array[0], whole[name][number])


def test_batches_larger_than_a_block(dataset, many):
    batch = dataset.draw(
        np.tile(np.arange(len(dataset)), 60)[200:900],
        np.repeat(np.arange(60), len(dataset))[200:900],
        3,
    )
    for name, array in batch.items():
        np.testing.assert_array_equal(array, many[0][name][200:900])


@pytest.mark.parametrize("process_count", [2, 4])
def test_the_parts_of_all_processes_are_the_global_batch(dataset, process_count):
    """The batches cross two ends of an epoch."""
    whole = TrainBatches(dataset, 3, 32, 6)
    parts = [
        TrainBatches(dataset, 3, 32, 6, process_count, [index]) for index in range(process_count)
    ]
    for step in range(6):
        batches = [part[step] for part in parts]
        for name, array in whole[step].items():
            np.testing.assert_array_equal(np.concatenate([batch[name] for batch in batches]), array)


def test_resuming_in_the_middle_of_an_epoch(dataset):
    batches = TrainBatches(dataset, 3, 32, 6)
    full = [batch["input_ids"].tolist() for batch in train_iterator(batches)]
    assert [batch["input_ids"].tolist() for batch in train_iterator(batches, 1)] == full[1:]


def test_batch_sizes_see_the_same_stream(dataset):
    small = TrainBatches(dataset, 3, 16, 6)
    large = TrainBatches(dataset, 3, 48, 2)
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
    with refused("sequence_length", 4, "value"):
        MaskedLMDataset(two, 4, VOCABULARY, 1)
    assert len(MaskedLMDataset(two, 5, VOCABULARY, 1)) == 8
    with refused("documents", 1, "value"):
        MaskedLMDataset(two[:1], 10, VOCABULARY, 1)


def test_tokens_that_are_in_no_vocabulary_are_damage():
    documents = [
        Document(np.array([7, 8, 65535]), np.array([0])),
        Document(np.array([7, 8]), np.array([0])),
    ]
    with troubled("token", 65535, "damaged"):
        MaskedLMDataset(documents, LENGTH, 60_000, PREDICTIONS).take(np.arange(2))


def cut_in_lists(documents, room):
    """Return the chunks of documents in plain Python: (start, stop, places to cut, document)."""
    chunks = []
    offset = 0
    for number, document in enumerate(documents):
        size = len(document.tokens)
        for start in range(0, size - 1, room):
            stop = min(start + room, size)
            inside = document.sentences[(document.sentences > start) & (document.sentences < stop)]
            places = inside if len(inside) else np.arange(start + 1, stop)
            chunks.append((offset + start, offset + stop, offset + places, number))
        offset += size
    return chunks


def one_by_one(documents, length, vocab_size, most, indices, epochs, seed):
    """Return examples made in plain Python.

    An example is (`input_ids`, `masked_positions`, `masked_labels`, `next_sentence_label`).
    """
    documents = [document for document in documents if len(document.tokens) >= 2]
    tokens = np.concatenate([document.tokens for document in documents])
    chunks = cut_in_lists(documents, length - 3)

    examples = []
    for index, draws in zip(
        indices, uniform_draws(indices, epochs, seed, 3 + length + 2 * most), strict=True
    ):
        start, stop, places, document = chunks[index]
        cut = places[int(draws[0] * len(places))]
        others = [chunk for chunk in chunks if chunk[3] != document]
        other = others[int(draws[2] * len(others))]
        second = (
            tokens[other[0] : min(other[1], other[0] + stop - cut)]
            if draws[1] < 0.5
            else tokens[cut:stop]
        )

        row = [CLS, *tokens[start:cut], SEP, *second, SEP]
        wanted = round(0.15 * len(row))
        row = np.asarray(row + [PAD] * (length - len(row)))

        order = sorted(np.flatnonzero(row >= 5), key=lambda place: draws[3 + place])
        chosen = sorted(order[: min(max(wanted, 1), most)])
        changes, random = np.split(draws[3 + length :], 2)
        shown = row.copy()
        for number, place in enumerate(chosen):
            if changes[number] < 0.8:
                shown[place] = MASK
            elif changes[number] < 0.9:
                shown[place] = 5 + int(random[number] * (vocab_size - 5))

        unused = [0] * (most - len(chosen))
        examples.append((shown, [*chosen, *unused], [*row[chosen], *unused], int(draws[1] < 0.5)))

    return examples


def assert_same(dataset, expected, indices, epochs, seed):
    batch = dataset.draw(indices, epochs, seed)
    for number, (ids, positions, labels, random) in enumerate(expected):
        np.testing.assert_array_equal(batch["input_ids"][number], ids)
        np.testing.assert_array_equal(batch["masked_positions"][number], positions)
        np.testing.assert_array_equal(batch["masked_labels"][number], labels)
        assert batch["next_sentence_label"][number] == random


@pytest.fixture(scope="module")
def awkward():
    """Return topics, and documents of awkward lengths or with a single sentence."""
    odd = [document(number, size) for number, size in enumerate((1, 22, 43, 2, 0, 3, 64))]
    topics = load_pydoc_topics(1024).train
    long = Document(topics[1].tokens, topics[1].sentences[:1])
    return [odd[0], *topics[:12], *odd[1:], long]


@pytest.fixture(scope="module")
def mapped(awkward, tmp_path_factory):
    folder = tmp_path_factory.mktemp("stores") / "awkward"
    with StoreWriter(folder, [f"p{number}" for number in range(70_000)], "a test") as writer:
        for one in awkward:
            writer.append(one)
    return open_store(folder)


@pytest.mark.parametrize("length", [5, 24, 25, 128, 512])
def test_examples_are_those_of_chunks_kept_in_lists(awkward, mapped, length):
    chunks = cut_in_lists([one for one in awkward if len(one.tokens) >= 2], length - 3)
    most = max(1, length // 6)
    datasets = [
        MaskedLMDataset(documents, length, VOCABULARY, most) for documents in (awkward, mapped)
    ]
    assert [len(dataset) for dataset in datasets] == [len(chunks)] * 2
    indices = np.unique(np.linspace(0, len(chunks) - 1, 150).astype(int))
    expected = one_by_one(awkward, length, VOCABULARY, most, indices, indices % 3, 7)
    for dataset in datasets:
        assert_same(dataset, expected, indices, indices % 3, 7)


def test_long_sequences_are_masked_by_the_same_rule(awkward):
    indices = np.arange(6)
    expected = one_by_one(awkward, 3000, VOCABULARY, 400, indices, indices, 7)
    assert_same(MaskedLMDataset(awkward, 3000, VOCABULARY, 400), expected, indices, indices, 7)


def test_small_tokens_make_the_same_examples():
    documents = [document(number, 300) for number in range(4)]
    store = gather_documents(documents)
    assert store.tokens.dtype == np.uint16
    indices = np.arange(40)
    expected = one_by_one(documents, LENGTH, VOCABULARY, 3, indices, indices, 1)
    assert_same(MaskedLMDataset(store, LENGTH, VOCABULARY, 3), expected, indices, indices, 1)
    assert (
        MaskedLMDataset(store, LENGTH, VOCABULARY, 3).take(indices)["input_ids"].dtype == np.int32
    )


def test_a_view_makes_the_examples_of_its_documents():
    documents = [document(number, 40 + 17 * number) for number in range(6)]
    parts = split_store(gather_documents(documents), 3, 3)
    for part, numbers in zip(parts, ([0, 3], [2, 5], [1, 4]), strict=True):
        view = MaskedLMDataset(part, LENGTH, 70_000, 4)
        copied = MaskedLMDataset([documents[number] for number in numbers], LENGTH, 70_000, 4)
        indices = np.tile(np.arange(len(view)), 3)
        assert len(view) == len(copied)
        for name, array in view.draw(indices, np.arange(len(indices)), 2).items():
            np.testing.assert_array_equal(
                array, copied.draw(indices, np.arange(len(indices)), 2)[name]
            )


BERT = SpecialIds(pad=0, unk=100, cls=101, sep=102, mask=103)


def test_special_tokens_are_where_the_vocabulary_has_them():
    """In BERT's order tokens 1 to 99 are text. A random token is any but the five special ones."""
    random = np.random.default_rng(0)
    documents = [
        Document(random.integers(1, 99, 5000).astype(np.int32), np.arange(0, 5000, 9))
        for _ in range(4)
    ]

    for one in documents:
        one.tokens[::11] = BERT.unk

    dataset = MaskedLMDataset(documents, 64, 110, 10, BERT)
    indices = np.tile(np.arange(len(dataset)), 20)
    batch = dataset.draw(indices, np.arange(len(indices)), 0)
    ids = restored(batch)

    assert (ids[:, 0] == BERT.cls).all()
    assert ((ids == BERT.sep).sum(1) == 2).all()
    assert (ids[batch["attention_mask"] == 0] == BERT.pad).all()

    used = batch["masked_weights"] > 0
    assert batch["masked_labels"][used].min() == 1
    assert batch["masked_labels"][used].max() == 98

    shown = np.take_along_axis(batch["input_ids"], batch["masked_positions"], 1)
    masked_share = (shown[used] == BERT.mask).mean()
    assert abs(masked_share - 0.8) < 5 * 0.4 / np.sqrt(used.sum())

    random = shown[used & (shown != BERT.mask) & (shown != batch["masked_labels"])]
    assert set(random.tolist()) == set(range(110)) - set(BERT)


def test_the_mean_number_of_predictions_of_many_examples_is_that_of_a_sample(monkeypatch, dataset):
    exact = dataset.mean_predictions
    monkeypatch.setattr(_masked, "MEAN_OVER", 30)
    indices = [number * len(dataset) // 30 for number in range(30)]
    sample = dataset.take(np.asarray(indices))["masked_weights"].sum() / 30
    assert dataset.mean_predictions == pytest.approx(sample)
    assert sample == pytest.approx(exact, rel=0.1)
