"""Training batches by step and process, and padded and masked batches for evaluation."""

import time

import numpy as np
import pytest
from refusal import refused

from lbopt.data import (
    ArrayDataset,
    Reading,
    TrainBatches,
    eval_batches,
    example_indices,
    read_batches,
    train_iterator,
)


def numbered(size):
    """Return a data set whose examples contain their own index."""
    return ArrayDataset(
        {
            "image": np.arange(size, dtype=np.float32)[:, None] * np.ones(3, np.float32),
            "label": np.arange(size, dtype=np.int32),
        }
    )


def labels(batches):
    return [batch["label"].tolist() for batch in batches]


@pytest.mark.parametrize(
    "shares", [[None], [[0], [1], [2], [3]], [[0, 1], [2, 3]], [[0, 3], [1, 2]], [[2], [0, 1, 3]]]
)
def test_the_parts_of_all_processes_are_the_global_batch(shares):
    """The batch is the same for any division of four devices among processes."""
    dataset = numbered(50)
    batches = [TrainBatches(dataset, 3, 12, 10, 4, share) for share in shares]
    for step in range(10):
        whole = np.full(12, -1)
        for share, each in zip(shares, batches, strict=True):
            batch = each[step]
            rows = [
                3 * part + row
                for part in (range(4) if share is None else share)
                for row in range(3)
            ]
            whole[rows] = batch["label"]
            np.testing.assert_array_equal(batch["image"][:, 0], batch["label"])
        np.testing.assert_array_equal(whole, example_indices(50, 3, step * 12, 12))


@pytest.mark.parametrize("shares", [[[0], [1], [2], [3]], [[0, 3], [1, 2]]])
def test_the_parts_of_all_processes_are_an_evaluation(shares):
    """The last batch of twelve has two examples."""
    found = np.full((5, 12), -1)
    for share in shares:
        rows = [3 * part + row for part in share for row in range(3)]
        for number, batch in enumerate(eval_batches(numbered(50), 12, 4, share)):
            found[number, rows] = np.where(batch["mask"], batch["label"], -2)
    assert found.ravel().tolist() == [*range(50), *[-2] * 10]


def test_devices_must_divide_the_batch():
    with refused("global_batch_size", 10, "value"):
        TrainBatches(numbered(50), 0, 10, 5, num_parts=4)


@pytest.mark.parametrize("start_step", [0, 1, 11, 19, 20])
def test_an_iterator_started_later_continues_the_full_one(start_step):
    batches = TrainBatches(numbered(50), 3, 12, 20)
    full = labels(train_iterator(batches))
    assert len(full) == 20
    assert labels(train_iterator(batches, start_step)) == full[start_step:]


def test_the_iterator_yields_the_batches_in_order():
    batches = TrainBatches(numbered(50), 3, 12, 20)
    got = list(train_iterator(batches))
    for step, batch in enumerate(got):
        assert set(batch) == {"image", "label"}
        np.testing.assert_array_equal(batch["label"], batches[step]["label"])
        np.testing.assert_array_equal(batch["image"], batches[step]["image"])


@pytest.mark.parametrize("size", [1, 7, 359, 360])
@pytest.mark.parametrize("global_batch_size", [1, 8, 100, 359, 360, 4096])
@pytest.mark.parametrize("multiple_of", [1, 4])
def test_evaluation_covers_each_example_once(size, global_batch_size, multiple_of):
    batches = list(eval_batches(numbered(size), global_batch_size, multiple_of))
    counted = np.concatenate([batch["label"][batch["mask"]] for batch in batches])
    np.testing.assert_array_equal(counted, np.arange(size))
    sizes = {len(array) for batch in batches for array in batch.values()}
    assert len(sizes) == 1
    assert sizes.pop() % multiple_of == 0
    assert all(batch["mask"].dtype == bool and batch["mask"].any() for batch in batches)


def test_evaluation_batches_are_no_larger_than_needed():
    assert [len(batch["mask"]) for batch in eval_batches(numbered(7), 4096)] == [7]
    assert [len(batch["mask"]) for batch in eval_batches(numbered(7), 4096, multiple_of=4)] == [8]
    assert [len(batch["mask"]) for batch in eval_batches(numbered(7), 3)] == [3, 3, 3]


def test_padding_repeats_the_last_example():
    *_, last = eval_batches(numbered(7), 4)
    assert last["label"].tolist() == [4, 5, 6, 6]
    assert last["mask"].tolist() == [True, True, True, False]


def test_an_empty_evaluation_batch_is_refused():
    with refused("global_batch_size", 0, "value"):
        next(eval_batches(numbered(7), 0))


@pytest.mark.parametrize("arrays", [{"a": np.zeros(3), "b": np.zeros(4)}, {"a": np.zeros(0)}])
def test_arrays_of_unequal_or_no_length_are_refused(arrays):
    with refused("arrays", {name: len(array) for name, array in arrays.items()}, "value"):
        ArrayDataset(arrays)


def test_a_data_set_takes_examples_by_index():
    dataset = numbered(7)
    assert len(dataset) == 7
    assert dataset.take(np.array([3, 0, 3]))["label"].tolist() == [3, 0, 3]


class Counted(ArrayDataset):
    """A data set that makes a file for every slice of a batch that is read, in any process."""

    def __init__(self, folder, reading):
        super().__init__({"number": np.arange(100_000)})
        self.folder = folder
        self.reading = reading

    def draw(self, indices, epochs, seed):
        (self.folder / str(indices[0])).touch()
        return super().draw(indices, epochs, seed)


@pytest.mark.parametrize(("threads", "processes"), [(2, 0), (2, 2)])
def test_what_is_read_ahead_is_bounded(threads, processes, tmp_path):
    slices = 50
    reading = Reading(threads, processes, examples_per_slice=10)
    batches = read_batches(TrainBatches(Counted(tmp_path, reading), 0, 10 * slices, 40))
    next(batches)
    made = -1
    before = -2
    while made != before:  # until reading has stopped
        time.sleep(0.5)
        before = made
        made = len(list(tmp_path.iterdir()))
    # One batch is joined and one is ahead. Each process has slices in its threads, and a few are on
    # the way to the training process.
    assert 2 * slices - threads <= made <= 2 * slices + (threads + 3) * max(processes, 1)
