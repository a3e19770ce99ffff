"""Exact scores of trials on the splits of their problem."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from lbopt import metrics as metric_pairs
from lbopt.data.arrays import ArrayDataset, Dataset
from lbopt.data.batches import eval_batches
from lbopt.recipes.problem import Problem
from lbopt.sweep.lanes.program import Spread

SPLITS = ("train", "validation", "test")


class Scorer:
    """Mean metrics of each lane over every example of a split, padded and masked.

    Args:
      problem: what is learned.
      spread: how trials share a program.
      global_batch_size: examples at a time, of every lane the same ones.
    """

    def __init__(self, problem: Problem, spread: Spread, global_batch_size: int):
        self._splits, self._size = problem.splits, global_batch_size
        self._put, self._width = spread.put, spread.width
        self._score = spread.jit(
            lambda batch, params, state: problem.metric_fn(params, state, batch), num_shared=1
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
        pairs = [
            jax.device_get(self._score(batch, params, model_state))
            for batch in self._batches(split)
        ]
        return [metric_pairs.means(_lane(pairs, lane)) for lane in range(self._width)]

    def _batches(self, split: str) -> Sequence[Any] | Any:
        dataset: Dataset = getattr(self._splits, split)
        if not isinstance(dataset, ArrayDataset):
            return eval_batches(dataset, self._size)
        if split not in self._kept:
            self._kept[split] = [self._put(batch) for batch in eval_batches(dataset, self._size)]
        return self._kept[split]


def _lane(pairs: Sequence[Any], lane: int) -> list[Any]:
    return [jax.tree.map(lambda x: np.asarray(x)[lane], batch) for batch in pairs]
