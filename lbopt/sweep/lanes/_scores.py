"""Scores of trials on the splits of their problem, each example counted once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from lbopt import metrics
from lbopt.data import ArrayDataset, Dataset, Reading, Splits, eval_batches, example_indices
from lbopt.recipes import LoadedProblem
from lbopt.sweep.lanes._program import TrialBatching

SPLITS = ("train", "validation", "test")
WHOLE_UP_TO = 4
"""A training set of up to this multiple of the scored part is scored as a whole."""
_FEWEST = 1000
"""Least number of training examples in that part, where the validation set is smaller."""
_CHOSEN = 0
"""Seed of the choice of the training examples that are scored."""

Pairs = Mapping[str, tuple[np.ndarray, np.ndarray]]
"""Sums and counts of each metric on each example of a split, [examples] in its order."""


class Tested(NamedTuple):
    """Scores of a trial on the test split.

    Attributes:
      means: Means over the split by metric.
      examples: The metrics on each example; None if they were not recorded.
    """

    means: dict[str, float]
    examples: Pairs | None


class Scorer:
    """Evaluates the trials of all lanes on a split; the last batch is padded and masked.

    Args:
      problem: The problem.
      batching: Lanes of the program.
      global_batch_size: Number of examples in a call, the same ones for every lane.
    """

    def __init__(self, problem: LoadedProblem, batching: TrialBatching, global_batch_size: int):
        self._datasets = {split: scored_split(problem.splits, split) for split in SPLITS}
        self._size = global_batch_size
        self._put = batching.put
        self._width = batching.width
        each = metrics.of_each_example(problem.metric_fn)
        self._score = batching.jit(
            lambda batch, params, state: each(params, state, batch), num_shared=1
        )
        self._kept: dict[str, list[Any]] = {}

    def __call__(self, split: str, params: Any, model_state: Any) -> list[dict[str, float]]:
        """Return the means of each lane.

        Args:
          split: "train", "validation" or "test".
          params: Parameters, with a leading lane axis.
          model_state: Model state, with a leading lane axis.

        Returns:
          Means by metric for each lane, summed in float64; NaN or infinite for a trial that has
          diverged.
        """
        pairs = self.examples(split, params, model_state)
        return [means(pairs_of_lane) for pairs_of_lane in pairs]

    def examples(self, split: str, params: Any, model_state: Any) -> list[Pairs]:
        """Return the metrics of each lane on each example; the arguments are those of a call."""
        batches = [
            jax.device_get(self._score(batch, params, model_state))
            for batch in self._batches(split)
        ]
        # The last batch is padded.
        count = len(self._datasets[split])
        joined = jax.tree.map(lambda *each: np.concatenate(each, axis=1)[:, :count], *batches)
        return [_lane(joined, lane) for lane in range(self._width)]

    def _batches(self, split: str) -> Sequence[Any] | Any:
        dataset = self._datasets[split]
        if not isinstance(dataset, ArrayDataset):
            return eval_batches(dataset, self._size)
        if split not in self._kept:
            self._kept[split] = [self._put(batch) for batch in eval_batches(dataset, self._size)]
        return self._kept[split]


def scored_split(splits: Splits, split: str) -> Dataset:
    """Return the examples of a split that trials are scored on.

    A training set is scored on a fixed random subset as large as the validation set, of 1,000
    examples at least, as all of it would cost more than many a trial; as a whole if it has no more
    than `WHOLE_UP_TO` times as many.

    Args:
      splits: The splits of a problem.
      split: "train", "validation" or "test".
    """
    dataset: Dataset = getattr(splits, split)
    count = max(len(splits.validation), _FEWEST)
    if split != "train" or len(dataset) <= WHOLE_UP_TO * count:
        return dataset
    subset = Subset(dataset, count)
    return subset.in_memory() if isinstance(dataset, ArrayDataset) else subset


def means(pairs: Pairs) -> dict[str, float]:
    """Return the means over examples by metric, summed in float64."""
    totals: Any = {
        name: (np.sum(sums, dtype=np.float64), np.sum(counts, dtype=np.float64))
        for name, (sums, counts) in pairs.items()
    }
    return metrics.means([totals])


def _lane(pairs: Pairs, lane: int) -> Pairs:
    return {name: (sums[lane], counts[lane]) for name, (sums, counts) in pairs.items()}


class Subset:
    """A fixed random subset of a data set.

    Args:
      dataset: The data set.
      count: Number of examples in the subset, at most that of the data set.

    Attributes:
      reading: The data set's settings for reading.
      damaged: The data set's count of damaged records; None if it has none.
    """

    reading: Reading

    def __init__(self, dataset: Dataset, count: int):
        self._dataset = dataset
        self.reading = dataset.reading
        self.damaged = getattr(dataset, "damaged", None)
        # In order, so that a data set on disk is read from front to back.
        self._chosen = np.sort(example_indices(len(dataset), _CHOSEN, 0, count))

    def __len__(self) -> int:
        return len(self._chosen)

    def take(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        """Return the examples of the subset at `indices`, int [count]."""
        return self._dataset.take(self._chosen[indices])

    def in_memory(self) -> ArrayDataset:
        """Return a copy of the examples."""
        return ArrayDataset(self._dataset.take(self._chosen))

    def draw(self, indices: np.ndarray, epochs: np.ndarray, seed: int) -> dict[str, np.ndarray]:
        """Return the examples as training sees them in `epochs`, int [count]."""
        return self._dataset.draw(self._chosen[indices], epochs, seed)
