"""The protocol of a search: ask for proposals, run them, tell their scores."""

from __future__ import annotations

import math
from collections.abc import Generator, Sequence
from typing import NamedTuple, Protocol, TypeAlias


class Factors(NamedTuple):
    """A candidate: multiples of the values that the arm's rules give at this batch size.

    Attributes:
      learning_rate: Factor of the peak learning rate, > 0.
      warmup: Factor of the length of the warmup, >= 0.
      weight_decay: Factor of the weight decay, >= 0.
    """

    learning_rate: float
    warmup: float
    weight_decay: float


class Proposal(NamedTuple):
    """A run that a search asks for.

    Attributes:
      factors: The candidate.
      fidelity: Length of the run as a fraction of the full one, in (0, 1].
    """

    factors: Factors
    fidelity: float


class Score(NamedTuple):
    """The score of a candidate on validation; lower is better.

    Attributes:
      value: Score over the candidate's seeds, see `lbopt.sweep._drive.score`; infinite if a run
        diverged, with an error rate of 1 instead for a run judged by accuracy.
      tie: Loss, which decides between equal values; infinite if a run diverged.
      learned: Whether every run learned, see `lbopt.sweep.is_learned`.
    """

    value: float
    tie: float
    learned: bool = True


class Searcher(Protocol):
    """A search whose proposals depend on its config and the scores so far, and on nothing else.

    So a search that was killed resumes: a new one is told the saved scores, and asks for the same
    runs.
    """

    def ask(self) -> tuple[Proposal, ...]:
        """Return the next proposals, which can run side by side; () if the search is over."""

    def tell(self, scores: Sequence[Score]) -> None:
        """Take the scores of the last proposals, in their order."""


Rounds: TypeAlias = Generator[tuple[Proposal, ...], Sequence[Score], None]
"""A search as a generator: it yields proposals, and the yield returns their scores."""


class Turns:
    """A searcher around a generator, which yields proposals and is sent their scores.

    Args:
      rounds: The generator.

    >>> def twice():
    ...     scores = yield (Proposal(Factors(1.0, 1.0, 1.0), 0.5),)
    ...     yield (Proposal(Factors(2.0 if scores[0].value < 1 else 0.5, 1.0, 1.0), 1.0),)
    >>> search = Turns(twice())
    >>> search.ask()[0].fidelity
    0.5
    >>> search.tell([Score(0.3, 0.0)])
    >>> search.ask()[0].factors.learning_rate
    2.0
    >>> search.tell([Score(0.2, 0.0)])
    >>> search.ask()
    ()
    """

    def __init__(self, rounds: Rounds) -> None:
        self._rounds = rounds
        self._scores: Sequence[Score] | None = None
        self._asked: tuple[Proposal, ...] = ()

    def ask(self) -> tuple[Proposal, ...]:
        """Return the next proposals, which can run side by side; () if the search is over.

        Raises:
          RuntimeError: If the scores of the last proposals were not told.
        """
        if self._asked:
            raise RuntimeError(
                f"the scores of the last {len(self._asked)} proposals have not been told"
            )
        try:
            self._asked = (
                next(self._rounds) if self._scores is None else self._rounds.send(self._scores)
            )
        except StopIteration:
            return ()
        return self._asked

    def tell(self, scores: Sequence[Score]) -> None:
        """Take the scores of the last proposals, in their order.

        Args:
          scores: One score for each proposal; infinite numbers are allowed.

        Raises:
          RuntimeError: If nothing was asked for.
          ValueError: If the numbers of scores and proposals differ, or a score is NaN.
        """
        if not self._asked:
            raise RuntimeError("scores were told, and nothing was asked for")
        if len(scores) != len(self._asked):
            raise ValueError(f"{len(scores)} scores for {len(self._asked)} proposals")
        if any(math.isnan(number) for score in scores for number in score):
            raise ValueError("a score is not a number; give infinity for a run that diverged")
        self._scores = tuple(scores)
        self._asked = ()
