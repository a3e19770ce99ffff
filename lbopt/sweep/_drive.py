"""The way of a cell: search, choose on validation, run the chosen candidate with fresh seeds."""

from __future__ import annotations

import math
from collections.abc import Generator, Mapping, Sequence
from typing import Any

from lbopt.config import SweepConfig
from lbopt.sweep._trials import FINAL, SEARCH, Cell, Trial
from lbopt.sweep.search import Factors, Proposal, Score, make_searcher

Row = Mapping[str, Any]


def drive(cell: Cell, config: SweepConfig) -> Generator[list[Trial], list[Row], None]:
    """Yield trials that can run side by side, again and again; send their rows back in the same order.

    What comes next depends on the config and on the rows alone. So a study that was killed goes on where it was if the rows
    it finished are sent again.

    Args:
      cell: an arm at a batch size.
      config: of the study that the cell belongs to.

    Yields:
      The trials of each round of the search, and at last the final ones. Every yield returns their rows, as in `results.jsonl`.

    Raises:
      EnvironmentProblem: if the search needs a package that is not installed.
    """
    search = config.arm_search(cell.index)
    searcher, searched, seeds = make_searcher(search), [], search.seeds
    while proposals := searcher.ask():
        rows = yield [
            cell.trial(SEARCH, proposal, seed) for proposal in proposals for seed in seeds
        ]
        of_each = [rows[start : start + len(seeds)] for start in range(0, len(rows), len(seeds))]
        searcher.tell([score(found) for found in of_each])
        searched += rows
    chosen = Proposal(choose(searched), 1.0)
    yield [cell.trial(FINAL, chosen, seed) for seed in config.final_seeds]


def score(rows: Sequence[Row]) -> Score:
    """Return how good a candidate is on validation, lower is better: the mean over its seeds.

    That is the error rate (of language models the loss); a trial that diverged counts as all wrong (infinite). With a target it is the
    part of the run's steps that was needed for it, and 1 plus the error where it was not reached. Ties go to the lower mean validation loss.

    Args:
      rows: of `results.jsonl`, the search trials of one candidate at one fidelity, one for each seed; at least one.

    Returns:
      That mean, and as the tie the mean validation loss, infinite if a trial diverged.
    """
    values, losses = zip(*map(_score_of_one, rows), strict=True)
    return Score(sum(values) / len(values), sum(losses) / len(losses))


def _score_of_one(row: Row) -> tuple[float, float]:
    if row["diverged"]:
        error, loss = (math.inf if "validation_perplexity" in row else 1.0), math.inf
    else:
        loss = row["validation_loss"]
        error = loss if "validation_perplexity" in row else 1.0 - row["validation_accuracy"]
    if "steps_to_target" in row:
        reached = None if row["diverged"] else row["steps_to_target"]
        return (1.0 + error if reached is None else reached / row["steps"]), loss
    return error, loss


def choose(rows: Sequence[Row]) -> Factors:
    """Return the best candidate of those that were run over the whole length, by `score`; then the smallest factors.

    Only validation numbers of search trials are looked at. If no trial had the whole length, those of the greatest fidelity
    are compared.

    Args:
      rows: of `results.jsonl`, of one cell, with a search trial at least; final trials are passed over.

    Returns:
      Its factors.
    """
    searched = [row for row in rows if row["phase"] == SEARCH]
    longest = max(row["fidelity"] for row in searched)
    found: dict[Factors, list[Row]] = {}
    for row in searched:
        if row["fidelity"] == longest:
            found.setdefault(factors_of(row), []).append(row)
    return min(found, key=lambda factors: (score(found[factors]), factors))


def factors_of(row: Row) -> Factors:
    """Return the candidate of a row of `results.jsonl`."""
    return Factors(row["learning_rate_factor"], row["warmup_factor"], row["weight_decay_factor"])
