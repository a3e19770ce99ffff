"""Scores of trials on the splits of their problem, each example counted once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from lbopt import metrics
from lbopt.data import ArrayDataset, Dataset, eval_batches
from lbopt.recipes import LoadedProblem
from lbopt.sweep.lanes._program import TrialBatching

SPLITS = ("train", "validation", "test")

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
        self._splits = problem.splits
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
        count = len(getattr(self._splits, split))
        joined = jax.tree.map(lambda *each: np.concatenate(each, axis=1)[:, :count], *batches)
        return [_lane(joined, lane) for lane in range(self._width)]

    def _batches(self, split: str) -> Sequence[Any] | Any:
        dataset: Dataset = getattr(self._splits, split)
        if not isinstance(dataset, ArrayDataset):
            return eval_batches(dataset, self._size)
        if split not in self._kept:
            self._kept[split] = [self._put(batch) for batch in eval_batches(dataset, self._size)]
        return self._kept[split]


def means(pairs: Pairs) -> dict[str, float]:
    """Return the means over examples by metric, summed in float64."""
    totals: Any = {
        name: (np.sum(sums, dtype=np.float64), np.sum(counts, dtype=np.float64))
        for name, (sums, counts) in pairs.items()
    }
    return metrics.means([totals])


def _lane(pairs: Pairs, lane: int) -> Pairs:
    return {name: (sums[lane], counts[lane]) for name, (sums, counts) in pairs.items()}
