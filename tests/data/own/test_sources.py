"""Random-access sources that a function of the user returns."""

import datasets
import grain
import numpy as np
import pytest

from lbopt.data.own import as_splits

COUNT = 10


def record(number):
    return {"x": np.asarray([number, 1], np.float32), "y": np.int32(number % 2)}


class Source:
    """Records with the two methods of Grain's protocol."""

    def __len__(self):
        return COUNT

    def __getitem__(self, index):
        return record(index)


def of_hugging_face():
    rows = {"x": [[float(n), 1.0] for n in range(COUNT)], "y": [n % 2 for n in range(COUNT)]}
    return datasets.Dataset.from_dict(rows)


@pytest.mark.parametrize(
    "make",
    [
        Source,
        lambda: grain.MapDataset.source(Source()),
        lambda: grain.MapDataset.range(COUNT).map(record),
        of_hugging_face,
    ],
    ids=["protocol", "grain-source", "grain-map", "hugging-face"],
)
def test_the_records_of_a_source_are_those_of_the_batches(make):
    splits = as_splits((make(), make(), make()), "name", "data.py:load")
    assert len(splits.train) == COUNT
    indices = np.asarray([7, 0, 7])
    for batch in (splits.train.take(indices), splits.test.draw(indices, indices, 1)):
        assert batch["x"].tolist() == [[7, 1], [0, 1], [7, 1]]
        assert batch["y"].tolist() == [1, 0, 1]
