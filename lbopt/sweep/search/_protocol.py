"""How a search is spoken with: it is asked what to run, and told how that went."""

from __future__ import annotations

import math
from collections.abc import Generator, Sequence
from typing import NamedTuple, Protocol, TypeAlias


class Factors(NamedTuple):
    """A candidate: multiples of what the arm's rules give at this batch size.

    Attributes:
      learning_rate: of the peak learning rate, > 0.
      warmup: of the length of the warmup, >= 0.
      weight_decay: of the weight decay, >= 0.
    """

    learning_rate: float
    warmup: float
    weight_decay: float


class Proposal(NamedTuple):
    """A run that a search wants.

    Attributes:
      factors: the candidate.
      fidelity: length of the run as a fraction of the full one, in (0, 1].
    """

    factors: Factors
    fidelity: float


class Score(NamedTuple):
    """How a run went, from validation data alone; lower is better, the second number decides between equal first ones.

    Attributes:
      value: of a candidate's runs together, see `lbopt.sweep._drive.score`; infinite where a language model diverged, and for a
        classifier that did it counts as all wrong.
      tie: what decides between equal values; infinite where a run diverged.
    """

    value: float
    tie: float


class Searcher(Protocol):
    """A deterministic function of its configuration and of the scores it was told, in the order of what it asked for.

    So a search that was killed is built anew, told the saved scores, and asks for the very same runs.
    """

    def ask(self) -> tuple[Proposal, ...]:
        """Return what to run next, all at once; () when the search is over."""

    def tell(self, scores: Sequence[Score]) -> None:
        """Take the scores of what was asked for last, one for each proposal, in its order."""


Rounds: TypeAlias = Generator[tuple[Proposal, ...], Sequence[Score], None]
"""A search written as one function: it yields proposals, and the yield returns their scores."""


class Turns:
    """Ask and tell in turns what a generator yields and receives.

    Args:
      rounds: the search.

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
        """Return what to run next, all at once; () when the search is over.

        Raises:
          RuntimeError: if what was asked for last has not been told.
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
        """Take the scores of what was asked for last, in its order.

        Args:
          scores: one for each proposal; infinite numbers are allowed.

        Raises:
          RuntimeError: if nothing was asked for.
          ValueError: if there are not as many scores as proposals, or one of them is not a number.
        """
        if not self._asked:
            raise RuntimeError("scores were told, and nothing was asked for")
        if len(scores) != len(self._asked):
            raise ValueError(f"{len(scores)} scores for {len(self._asked)} proposals")
        if any(math.isnan(number) for score in scores for number in score):
            raise ValueError("a score is not a number; give infinity for a run that diverged")
        self._scores, self._asked = tuple(scores), ()
