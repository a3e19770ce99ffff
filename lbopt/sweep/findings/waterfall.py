"""What each ingredient of a recipe adds, in the order in which the study names them."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from typing import Any

from lbopt.sweep.findings.metric import Metric, spread
from lbopt.sweep.findings.points import Index


def measure_waterfall(config: Mapping[str, Any], index: Index, metric: Metric) -> dict[str, Any] | None:
    """Return the arms of `config["waterfall"]` at the largest batch, each with what it gains over the one before it.

    The spread of a gain is the standard deviation of the difference of two seeds, one of each arm: sqrt(s1^2 + s2^2). A
    gain smaller than that is not told apart from seed noise.

    Args:
      config: the study's config as JSON data.
      index: rows by cell.
      metric: what the study is judged by.

    Returns:
      `{"global_batch_size", "steps": [{"arm", "mean", "std", "gain", "gain_spread", "told_apart"}]}`; mean and std are of the
      test accuracy in [0, 1] or of the perplexity. Gains are positive for the better, in percentage points of accuracy or
      percent of the perplexity, and null for the first. The spread and whether a gain is told apart are null where either arm
      has fewer than two seeds. None if the study has no waterfall, or if an arm of it has no result there.
    """
    largest = config["global_batch_sizes"][-1]
    cells = [index.get((arm, largest)) for arm in config.get("waterfall") or ()]
    if len(cells) < 2 or any(cell is None or not cell.final for cell in cells):
        return None
    found = [
        {**spread(metric, metric.scores(cell.final, "test")), "seeds": len(cell.final)}
        for cell in cells
        if cell is not None
    ]
    if any(one["mean"] is None for one in found):
        return None
    gains = [_gain(metric, before, after) for before, after in itertools.pairwise(found)]
    steps = [
        {"arm": arm, "mean": one["mean"], "std": one["std"], **gain}
        for arm, one, gain in zip(config["waterfall"], found, [_FIRST, *gains], strict=True)
    ]
    return {"global_batch_size": largest, "steps": steps}


_FEWEST_SEEDS = 2
_FIRST: dict[str, Any] = {"gain": None, "gain_spread": None, "told_apart": None}


def _gain(metric: Metric, before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, Any]:
    gain = -metric.worse_by(before["mean"], after["mean"])
    if min(before["seeds"], after["seeds"]) < _FEWEST_SEEDS:
        return {**_FIRST, "gain": gain}
    noise = abs(metric.worse_by(before["mean"], before["mean"] - math.hypot(before["std"], after["std"])))
    return {"gain": gain, "gain_spread": noise, "told_apart": abs(gain) > noise}
