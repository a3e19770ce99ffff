"""Exact scores of trials on the splits of their problem."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from lbopt import metrics
from lbopt.data import ArrayDataset, Dataset, eval_batches
from lbopt.recipes import Problem
from lbopt.sweep.lanes._program import Spread

SPLITS = ("train", "validation", "test")

Pairs = Mapping[str, tuple[np.ndarray, np.ndarray]]
"""Metric -> (sums, counts) of each example of a split [examples], in its order."""


class Tested(NamedTuple):
    """What a trial scored on the test split.

    Attributes:
      means: Metric -> mean over the split.
      examples: The same of each example; None if they were not recorded.
    """

    means: dict[str, float]
    examples: Pairs | None


class Scorer:
    """Metrics of each lane on every example of a split, padded and masked.

    Args:
      problem: what is learned.
      spread: how trials share a program.
      global_batch_size: examples at a time, of every lane the same ones.
    """

    def __init__(self, problem: Problem, spread: Spread, global_batch_size: int):
        self._splits, self._size = problem.splits, global_batch_size
        self._put, self._width = spread.put, spread.width
        each = metrics.of_each_example(problem.metric_fn)
        self._score = spread.jit(
            lambda batch, params, state: each(params, state, batch), num_shared=1
        )
        self._kept: dict[str, list[Any]] = {}

    def __call__(self, split: str, params: Any, model_state: Any) -> list[dict[str, float]]:
        """Return the means of each lane.

        Args:
          split: "train", "validation" or "test".
          params: with a leading lane axis.
          model_state: likewise.

        Returns:
          For each lane: metric -> mean over the split, added up in float64; NaN or infinite where the lane has diverged.
        """
        pairs = self.examples(split, params, model_state)
        return [means(pairs_of_lane) for pairs_of_lane in pairs]

    def examples(self, split: str, params: Any, model_state: Any) -> list[Pairs]:
        """Return the metrics of each lane on each example; the arguments are those of a call."""
        batches = [
            jax.device_get(self._score(batch, params, model_state))
            for batch in self._batches(split)
        ]
        # What lies behind the last example is padding.
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
    """Return metric -> mean over examples, added up in float64."""
    totals: Any = {
        name: (np.sum(sums, dtype=np.float64), np.sum(counts, dtype=np.float64))
        for name, (sums, counts) in pairs.items()
    }
    return metrics.means([totals])


def _lane(pairs: Pairs, lane: int) -> Pairs:
    return {name: (sums[lane], counts[lane]) for name, (sums, counts) in pairs.items()}
