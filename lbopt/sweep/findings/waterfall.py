"""What each ingredient of a recipe adds, in the order in which the study names them."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from lbopt.sweep.findings.differences import advantage
from lbopt.sweep.findings.metric import Metric, spread
from lbopt.sweep.findings.points import Index


def measure_waterfall(
    config: Mapping[str, Any], index: Index, metric: Metric
) -> dict[str, Any] | None:
    """Return the arms of `config["waterfall"]` at the largest batch, each with what it gains over the one before it.

    A gain is told apart from seed noise if the 95 % interval of the difference of the two means does not contain none.

    Args:
      config: the study's config as JSON data.
      index: rows by cell.
      metric: what the study is judged by.

    Returns:
      `{"global_batch_size", "steps": [{"arm", "mean", "std", "gain", "gain_low", "gain_high", "gain_spread", "told_apart"}]}`;
      mean and std are of the test accuracy in [0, 1] or of the perplexity. Gains are positive for the better, in percentage
      points of accuracy or percent of the perplexity, and null for the first. `gain_low` and `gain_high` are the ends of the
      interval (`lbopt.sweep.findings.differences.advantage`); where there is none, they and whether the gain is told apart
      are null. `gain_spread` is the standard deviation of the difference of two single seeds, sqrt(s1^2 + s2^2), null where
      either arm has one seed only. None if the study has no waterfall, or if an arm of it has no result there.
    """
    largest = config["global_batch_sizes"][-1]
    cells = [index.get((arm, largest)) for arm in config.get("waterfall") or ()]
    if len(cells) < 2 or any(cell is None or not cell.final for cell in cells):
        return None
    scores = [metric.scores(cell.final, "test") for cell in cells if cell is not None]
    found = [spread(metric, one) for one in scores]
    if any(one["mean"] is None for one in found):
        return None
    gains = [_gain(metric, *pair) for pair in itertools.pairwise(scores)]
    steps = [
        {"arm": arm, "mean": one["mean"], "std": one["std"], **gain}
        for arm, one, gain in zip(config["waterfall"], found, [_FIRST, *gains], strict=True)
    ]
    return {"global_batch_size": largest, "steps": steps}


_FIRST: dict[str, Any] = dict.fromkeys(
    ("gain", "gain_low", "gain_high", "gain_spread", "told_apart")
)


def _gain(metric: Metric, before: Sequence[float], after: Sequence[float]) -> dict[str, Any]:
    base = metric.centre(before)
    gain = {**_FIRST, "gain": 0.0 - metric.worse_by(base, metric.centre(after))}
    if min(len(before), len(after)) > 1:
        both = math.hypot(statistics.stdev(before), statistics.stdev(after))
        gain["gain_spread"] = abs(metric.worse_by(base, base - both))
    interval = advantage(metric, after, before)
    if interval is None:
        return gain
    low, high = interval
    return {**gain, "gain_low": low, "gain_high": high, "told_apart": low > 0 or high < 0}
