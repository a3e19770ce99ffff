"""Text read as parallel streams; each step has one window of every stream."""

import numpy as np
import pytest
from refusal import refused

from lbopt.data.text import EvalTextStreams, TextStreams, join_documents
from lbopt.data.text._pieces import SEP
from lbopt.data.text._tokens import gather_documents
from lbopt.data.text._wordpiece import Document


def read_step(streams, step):
    """Return the windows of all streams in a step, counted over passes."""
    return streams.take(
        np.arange(streams.num_streams) + step % streams.num_steps * streams.num_streams
    )


@pytest.mark.parametrize(
    ("size", "streams", "length"), [(101, 4, 5), (100, 4, 5), (21, 4, 5), (1000, 7, 12), (50, 1, 7)]
)
def test_a_stream_is_text_and_the_text_one_later(size, streams, length):
    text = np.arange(1000, 1000 + size)
    found = TextStreams(text, streams, length)
    steps = [read_step(found, step) for step in range(found.num_steps)]
    read = np.concatenate([step["tokens"] for step in steps], 1)
    following = np.concatenate([step["next_tokens"] for step in steps], 1)
    np.testing.assert_array_equal(read.ravel(), text[: read.size])
    np.testing.assert_array_equal(following, read + 1)
    assert read.shape == (streams, found.num_steps * length)
    assert found.num_left_out == size - 1 - read.size
    assert 0 <= found.num_left_out < streams * length
    assert (read.dtype, following.dtype) == (np.int32, np.int32)


def test_the_state_is_dropped_where_a_pass_begins():
    found = TextStreams(np.arange(101), 4, 5)
    assert found.num_steps == 5
    for step in range(12):
        batch = read_step(found, step)
        assert batch["is_first"].dtype == bool
        assert batch["is_first"].tolist() == [step % 5 == 0] * 4
        np.testing.assert_array_equal(batch["tokens"], read_step(found, step % 5)["tokens"])


def test_examples_in_natural_order_are_steps():
    found = TextStreams(np.arange(101), 4, 5)
    assert len(found) == 20
    whole = found.take(np.arange(20))
    drawn = found.draw(np.arange(20), np.full(20, 3), 1)
    for name in whole:
        np.testing.assert_array_equal(whole[name], drawn[name])
        np.testing.assert_array_equal(
            whole[name], np.concatenate([read_step(found, step)[name] for step in range(5)])
        )


def test_documents_are_joined():
    documents = [Document(np.arange(10, 20, dtype=np.int32), np.zeros(1, int)) for _ in range(3)]
    for text in (documents, gather_documents(documents)):
        found = TextStreams(join_documents(text), 2, 4)
        np.testing.assert_array_equal(
            read_step(found, 0)["tokens"][0], join_documents(documents)[:4]
        )
    assert join_documents(documents[:1], separator=102).tolist() == [102, *range(10, 20), 102]
    assert join_documents(documents)[[0, 11, 22, 33]].tolist() == [SEP] * 4


def test_too_little_text_for_the_batch():
    assert TextStreams(np.arange(41), 8, 5).num_steps == 1
    with refused("num_streams", 8, "mismatch") as caught:
        TextStreams(np.arange(40), 8, 5)
    assert "41" in str(caught.value)
    assert caught.value.also == {"sequence_length": "sequence_length"}


def test_windows_without_tokens():
    with refused("sequence_length", 0):
        TextStreams(np.arange(41), 8, 0)
    with refused("sequence_length", 0):
        EvalTextStreams(np.arange(41), 0)
