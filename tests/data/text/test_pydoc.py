"""Disjoint splits of the help topics, and consecutive windows."""

from pydoc_data.topics import topics

import numpy as np
import pytest
from refusal import refused

from lbopt.data.text import (
    TextWindows,
    join_documents,
    load_pydoc_masked_lm,
    load_pydoc_topics,
    make_windows,
    split_pydoc_topics,
)
from lbopt.data.text._pieces import SEP, UNK
from lbopt.data.text._pydoc import load_language_model
from lbopt.data.text._wordpiece import Document, split_paragraphs

SIZE = 1024


def sentences(part):
    return [sentence for topic in part for sentence in topic]


def test_parts_have_their_share_of_the_text():
    sizes = [sum(map(len, sentences(part))) for part in split_pydoc_topics()]
    shares = np.asarray(sizes) / sum(sizes)
    assert 0.75 < shares[0] < 0.87
    assert min(shares[1:]) > 0.05
    assert sum(sizes) > 300_000


def test_every_paragraph_is_in_one_part_once():
    """Topics quote each other: what training has seen must not be in the test."""
    expected = {paragraph for text in topics.values() for paragraph in split_paragraphs(text)}
    joined = [" ".join(topic) for part in split_pydoc_topics() for topic in part]
    assert sum(map(len, joined)) == pytest.approx(
        sum(map(len, expected)) + len(expected), abs=2 * len(expected)
    )
    training, *others = ([" ".join(topic) for topic in part] for part in split_pydoc_topics())
    long = [paragraph for paragraph in expected if len(paragraph) > 200]
    assert len(long) > 300
    for paragraph in long:
        inside = any(paragraph in topic for topic in training)
        assert not (inside and any(paragraph in topic for part in others for topic in part))


def test_the_split_is_the_same_every_time():
    split_pydoc_topics.cache_clear()
    first = split_pydoc_topics()
    split_pydoc_topics.cache_clear()
    assert split_pydoc_topics() == first
    names = [topic[0] for part in first for topic in part]
    assert names != sorted(names)


def test_the_vocabulary_is_of_the_training_part():
    corpus = load_pydoc_topics(SIZE)
    assert len(corpus.pieces.pieces) == SIZE
    counts = [sum(int((document.tokens == UNK).sum()) for document in part) for part in corpus[1:]]
    assert counts[0] == 0
    sizes = [sum(len(document.tokens) for document in part) for part in corpus[1:]]
    assert all(count < 0.01 * size for count, size in zip(counts, sizes, strict=True))
    text = corpus.pieces.decode(corpus.train[0].tokens)
    assert text.split()[:2] == " ".join(split_pydoc_topics()[0][0]).lower().split()[:2]


def test_windows_are_the_text_and_the_text_one_later():
    text = join_documents(load_pydoc_topics(SIZE).train)
    arrays = load_language_model(SIZE, 32).train.arrays
    count = (len(text) - 1) // 32
    assert arrays["tokens"].shape == arrays["next_tokens"].shape == (count, 32)
    np.testing.assert_array_equal(arrays["tokens"].ravel(), text[: count * 32])
    np.testing.assert_array_equal(arrays["next_tokens"].ravel(), text[1 : count * 32 + 1])
    assert (arrays["tokens"].dtype, arrays["next_tokens"].dtype) == (np.int32, np.int32)


def test_documents_are_kept_apart():
    documents = [
        Document(np.asarray(tokens, np.int32), np.zeros(1, int)) for tokens in ([7, 8], [9])
    ]
    assert join_documents(documents).tolist() == [SEP, 7, 8, SEP, 9, SEP]
    windows = make_windows(documents, 2).arrays
    assert windows["tokens"].tolist() == [[SEP, 7], [8, SEP]]
    assert windows["next_tokens"].tolist() == [[7, 8], [SEP, 9]]


@pytest.mark.parametrize("length", [4, 0, -1])
def test_windows_longer_than_the_text_or_empty_are_refused(length):
    documents = [Document(np.asarray([7, 8], np.int32), np.zeros(1, int))]
    with refused("sequence_length", length, "value"):
        make_windows(documents, length)
    with refused("sequence_length", length, "value"):
        TextWindows(join_documents(documents), length)
    if length < 1:
        with refused("sequence_length", length, "value"):
            TextWindows(join_documents(documents), length, partial=True)


def test_loading_twice_is_loading_once():
    assert load_pydoc_masked_lm(SIZE, 32, 5) is load_pydoc_masked_lm(SIZE, 32, 5)
    assert load_language_model(SIZE, 32) is load_language_model(SIZE, 32)
