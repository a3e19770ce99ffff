"""The example stream: a permutation per epoch, and a pure function of (seed, position)."""

import numpy as np
import pytest

from lbopt.data import _order, example_indices

PINNED = [[0, 2, 9, 1, 8, 5, 4, 3, 6, 7], [0, 6, 5, 3, 4, 9, 7, 8, 2, 1]]


@pytest.mark.parametrize("num_examples", [1, 2, 7, 1024])
@pytest.mark.parametrize("epoch", [0, 1, 5])
def test_every_epoch_is_a_permutation(num_examples, epoch):
    got = example_indices(num_examples, seed=3, start=epoch * num_examples, count=num_examples)
    np.testing.assert_array_equal(np.sort(got), np.arange(num_examples))


def test_raw_values():
    """These numbers are published: a change alters every figure of every run."""
    assert example_indices(10, seed=0, start=0, count=10).tolist() == PINNED[0]
    assert example_indices(10, seed=1, start=10, count=10).tolist() == PINNED[1]


def test_same_arguments_same_indices():
    first = example_indices(100, 5, 37, 150)
    _order._cached_permutation.cache_clear()
    np.testing.assert_array_equal(first, example_indices(100, 5, 37, 150))


def test_random_access_agrees_with_reading_in_order():
    whole = example_indices(50, 2, 0, 500)
    for start in (499, 0, 250, 49, 50, 51):
        np.testing.assert_array_equal(example_indices(50, 2, start, 1), whole[start : start + 1])


@pytest.mark.parametrize("batch_size", [1, 7, 16, 50, 64, 175])
def test_the_stream_does_not_depend_on_the_batch_size(batch_size):
    whole = example_indices(50, 2, 0, 350)
    batches = [
        example_indices(50, 2, start, batch_size)
        for start in range(0, 350 - batch_size + 1, batch_size)
    ]
    stream = np.concatenate(batches)
    np.testing.assert_array_equal(stream, whole[: len(stream)])
    assert len(stream) > 350 - batch_size


def test_a_batch_runs_on_across_an_epoch_end():
    first = example_indices(10, 4, 0, 10)
    second = example_indices(10, 4, 10, 10)
    np.testing.assert_array_equal(
        example_indices(10, 4, 7, 6), np.concatenate([first[7:], second[:3]])
    )


def test_a_batch_may_be_larger_than_the_data_set():
    got = example_indices(10, 4, 5, 40)
    np.testing.assert_array_equal(np.bincount(got[5:35], minlength=10), np.full(10, 3))


def test_seeds_and_epochs_differ():
    orders = {
        tuple(example_indices(64, seed, epoch * 64, 64).tolist())
        for seed in range(8)
        for epoch in range(8)
    }
    assert len(orders) == 64


def test_seed_and_epoch_do_not_trade_places():
    assert example_indices(64, 1, 2 * 64, 64).tolist() != example_indices(64, 2, 64, 64).tolist()


def test_every_place_is_equally_likely():
    """In 2,000 epochs of 8 examples each example comes first about 250 times.

    The tolerance of 74 is five standard deviations.
    """
    first = np.array([example_indices(8, 0, 8 * epoch, 1)[0] for epoch in range(2000)])
    counts = np.bincount(first, minlength=8)
    assert np.abs(counts - 250).max() < 74


def test_dtype_and_count():
    got = example_indices(10, 0, 3, 5)
    assert got.dtype == np.int64
    assert got.shape == (5,)


def test_the_caller_cannot_change_the_stream():
    before = example_indices(10, 0, 0, 10).copy()
    example_indices(10, 0, 0, 10)[:] = 0
    np.testing.assert_array_equal(example_indices(10, 0, 0, 10), before)
