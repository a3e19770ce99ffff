"""The trials of a cell: search, choose on validation, run the choice with fresh seeds."""

from __future__ import annotations

import math
from collections.abc import Generator, Mapping, Sequence
from typing import Any

from lbopt.config import SweepConfig
from lbopt.sweep._finished_trial import FINAL, SEARCH, is_learned, metric_of, worst_score
from lbopt.sweep._trials import Cell, Trial
from lbopt.sweep.search import Factors, Proposal, Score, make_searcher
from lbopt.train import lower_is_better

Record = Mapping[str, Any]
_ERROR_FROM_ZERO = ("accuracy", "exact_match", "perplexity", "r2")
"""Metrics whose error is never below 0."""


def drive(cell: Cell, config: SweepConfig) -> Generator[list[Trial], list[Record], None]:
    """Yield rounds of trials that can run side by side; send back their records in the same order.

    The next round depends on the config and the records alone. So a study that was killed resumes
    if the records of its finished trials are sent again.

    Args:
      cell: An arm at a batch size.
      config: The config of the study.

    Yields:
      The trials of each round of the search, and at last the final ones. Every yield returns their
      records, as in `results.jsonl`.

    Raises:
      EnvironmentProblem: If the search needs a package that is not installed.
    """
    search = config.arm_search(cell.index)
    with config.naming_search(cell.index):
        searcher = make_searcher(search, cell.longest_warmup)
    seeds = search.seeds
    searched: list[Record] = []
    while proposals := searcher.ask():
        records = yield [
            cell.trial(SEARCH, proposal, seed) for proposal in proposals for seed in seeds
        ]
        of_candidates = [
            records[start : start + len(seeds)] for start in range(0, len(records), len(seeds))
        ]
        searcher.tell([score(found, cell.problem.trivial_loss) for found in of_candidates])
        searched += records

    chosen = Proposal(choose(searched), 1.0)
    yield [cell.trial(FINAL, chosen, seed) for seed in config.final_seeds]


def score(records: Sequence[Record], trivial_loss: float | None = None) -> Score:
    """Return the score of a candidate on validation, the mean over its seeds; lower is better.

    The score of a trial is its error: the error rate, the logarithm of the perplexity, another
    metric that is better the lower it is, or 1 minus one that is better the higher it is. A trial
    that diverged has an error rate of 1, or an infinite error. In a study with a target the score
    is the fraction of the run's steps up to the target, or more than 1, and the more the larger the
    error, if the target was not reached.

    Args:
      records: Records of the search trials of one candidate at one fidelity, one for each seed; at
        least one.
      trivial_loss: Loss of outputs that do not look at the input; None if unknown.

    Returns:
      The mean score, the mean validation loss that decides between equal scores, infinite if a
      trial diverged, and whether all trials learned, by their training losses.
    """
    values, losses = zip(*map(_score_of_trial, records), strict=True)
    learned = not any(_is_trivial(record.get("train_loss"), trivial_loss) for record in records)
    return Score(sum(values) / len(values), sum(losses) / len(losses), learned)


def _is_trivial(loss: float | None, trivial_loss: float | None) -> bool:
    return loss is not None and trivial_loss is not None and not is_learned(loss, trivial_loss)


def _score_of_trial(record: Record) -> tuple[float, float]:
    """Return the score of one trial, and its validation loss."""
    loss = math.inf if record["diverged"] else record["validation_loss"]
    error = _error(record, loss)
    if "steps_to_target" not in record:
        return error, loss
    if record["diverged"] or record["steps_to_target"] is None:
        known = metric_of(record) in _ERROR_FROM_ZERO
        return 1.0 + (error if known else _above_zero(error)), loss
    return record["steps_to_target"] / record["steps"], loss


def _error(record: Record, loss: float) -> float:
    """Return the error of one trial on validation; lower is better."""
    metric = metric_of(record)
    score = None if record["diverged"] else record[f"validation_{metric}"]
    if metric == "perplexity":  # that of a large loss is infinite
        return loss if score is None else math.log(score)
    score = worst_score(metric) if score is None else score
    return score if lower_is_better(metric) else 1.0 - score


def _above_zero(error: float) -> float:
    """Return a number above 0 that keeps the order of errors, which may be below 0.

    >>> _above_zero(0.25), _above_zero(0.0), _above_zero(-1.0)
    (1.25, 1.0, 0.5)
    """
    return 1.0 + error if error >= 0 else 1.0 / (1.0 - error)


def choose(records: Sequence[Record]) -> Factors:
    """Return the factors of the best candidate by `score`; of equal ones, the smallest factors.

    Only search trials of the full length are compared, or those of the greatest fidelity if none
    had the full length.

    Args:
      records: Records of one cell, with at least one search trial.
    """
    searched = [record for record in records if record["phase"] == SEARCH]
    longest = max(record["fidelity"] for record in searched)
    found: dict[Factors, list[Record]] = {}
    for record in searched:
        if record["fidelity"] == longest:
            found.setdefault(factors_of(record), []).append(record)
    return min(found, key=lambda factors: (score(found[factors])[:2], factors))


def factors_of(record: Record) -> Factors:
    """Return the factors of a trial."""
    return Factors(
        record["learning_rate_factor"], record["warmup_factor"], record["weight_decay_factor"]
    )
