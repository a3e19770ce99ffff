"""The trials of a cell: search, choose on validation, run the choice with fresh seeds."""

from __future__ import annotations

import math
from collections.abc import Generator, Mapping, Sequence
from typing import Any

from lbopt.config import SweepConfig
from lbopt.sweep._finished_trial import FINAL, SEARCH
from lbopt.sweep._trials import Cell, Trial
from lbopt.sweep.search import Factors, Proposal, Score, make_searcher

Record = Mapping[str, Any]


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
        searcher = make_searcher(search)
    seeds = search.seeds
    searched: list[Record] = []
    while proposals := searcher.ask():
        records = yield [
            cell.trial(SEARCH, proposal, seed) for proposal in proposals for seed in seeds
        ]
        of_candidates = [
            records[start : start + len(seeds)] for start in range(0, len(records), len(seeds))
        ]
        searcher.tell([score(found) for found in of_candidates])
        searched += records

    chosen = Proposal(choose(searched), 1.0)
    yield [cell.trial(FINAL, chosen, seed) for seed in config.final_seeds]


def score(records: Sequence[Record]) -> Score:
    """Return the score of a candidate on validation, the mean over its seeds; lower is better.

    The score of a trial is its error rate, or the loss of a language model; a trial that diverged
    has an error rate of 1 or an infinite loss. In a study with a target it is the fraction of the
    run's steps up to the target, or 1 plus the error if the target was not reached.

    Args:
      records: Records of the search trials of one candidate at one fidelity, one for each seed; at
        least one.

    Returns:
      The mean score, and the mean validation loss that decides between equal scores; it is infinite
      if a trial diverged.
    """
    values, losses = zip(*map(_score_of_trial, records), strict=True)
    return Score(sum(values) / len(values), sum(losses) / len(losses))


def _score_of_trial(record: Record) -> tuple[float, float]:
    """Return the score of one trial, and its validation loss."""
    is_language_model = "validation_perplexity" in record
    if record["diverged"]:
        loss = math.inf
        error = math.inf if is_language_model else 1.0
    else:
        loss = record["validation_loss"]
        error = loss if is_language_model else 1.0 - record["validation_accuracy"]
    if "steps_to_target" in record:
        reached = None if record["diverged"] else record["steps_to_target"]
        return (1.0 + error if reached is None else reached / record["steps"]), loss
    return error, loss


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
    return min(found, key=lambda factors: (score(found[factors]), factors))


def factors_of(record: Record) -> Factors:
    """Return the factors of a trial."""
    return Factors(
        record["learning_rate_factor"], record["warmup_factor"], record["weight_decay_factor"]
    )
