"""The scaling of the steps to a target, in words."""

from __future__ import annotations

import math

from lbopt.report.study._arm_limit import interval_text
from lbopt.report.study._limit import CannotTell, Limit, Reason
from lbopt.report.study._steps_to_target import Saving, Scaling

_WHY: dict[Reason, str] = {
    "few_batch_sizes": "no larger batch was measured",
    "few_seeds": "too few seeds",
    "no_plateau": "the small batches themselves differ by more",
    "coarse_batch_sizes": "the batch sizes lie too far apart",
    "target_missed": "the median run did not reach the target at every batch up to there",
    "wide_interval": "the interval is too wide; more seeds are needed",
}


def perfect_text(scaling: Scaling) -> str:
    """Return the largest batch of perfect scaling, with its interval."""
    until = scaling.perfect_until
    if until is None:
        return "not told, the batch grows"
    if isinstance(until, CannotTell):
        return f"cannot be told ({_WHY[until.reason]})"
    interval = interval_text(until)
    interval_words = f" (95 % interval {interval})" if interval else ""
    if isinstance(until, Limit):
        return f"up to batch {until.global_batch_size:.0f}{interval_words}"
    return f"up to the largest batch, {until.fit.global_batch_sizes[-1]}{interval_words}"


def saving_text(saving: Saving) -> str:
    """Return the exponent a of steps ~ batch^-a, with its interval."""
    if math.isnan(saving.exponent):
        return "not told"
    if math.isnan(saving.low):
        return f"{saving.exponent:.2f}"
    return f"{saving.exponent:.2f} (95 % interval {saving.low:.2f} to {saving.high:.2f})"
