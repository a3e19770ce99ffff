"""Optuna as the asker: candidates that learn from the scores so far, and pruners between rungs."""

from __future__ import annotations

import math
from collections.abc import Generator, Sequence
from typing import Any, NamedTuple, TypeAlias

from lbopt.config import SearchConfig
from lbopt.errors import EnvironmentProblem
from lbopt.sweep.search._halving import num_halvings
from lbopt.sweep.search._protocol import Factors, Proposal, Rounds, Score
from lbopt.sweep.search._space import Space, make_space

_STUDY_NAME = "search"
"""Optuna's Hyperband deals trials to its brackets by a hash of this name and the trial's number."""

_Climb: TypeAlias = Generator[tuple[Proposal, ...], Sequence[Score], bool]


class _Candidate(NamedTuple):
    trial: Any  # optuna.Trial
    factors: Factors


def adaptive(config: SearchConfig) -> Rounds:
    """Ask Optuna for candidates, a generation of `candidates_at_once` after another.

    Without a pruner each is run once, at full length. With one, a generation climbs the rungs eta^-k ... 1 together,
    and the pruner decides after each rung who goes on. A rung is a run of its own, with its schedule rescaled: a
    candidate that is never pruned costs 1 + 1/eta + 1/eta^2 + ... full runs. If nobody reaches full length, because all
    scores are infinite, the rule itself is run there at last, so that there is something to choose.

    Note:
      Optuna is told the first number of a score only, and compares equal ones by age.
      A run of infinite score, as a language model's that diverged has, is told as pruned, without a value: the pruners
      compare others with complete or finite runs only, and TPE ranks it by the longest run of it that was finite, below
      all other candidates if there was none. Told as infinite it could turn the median pruner's percentile into NaN; told
      as failed it would be forgotten, and TPE would come back. While nothing but such runs is known, the oldest of them
      is what TPE takes for good. A classifier's that diverged has a finite score, all wrong, and is told like any other.
      Optuna's Hyperband shows the sampler only the trials of the bracket that the new one is dealt to, so TPE needs
      several times as many candidates to learn there.

    Args:
      config: the search.

    Returns:
      A round for each generation and rung.

    Raises:
      EnvironmentProblem: naming `config.search.method`, if Optuna is not installed.
    """
    steps = num_halvings(config.eta, 1 / config.min_fidelity) if config.has_rungs else 0
    return _generations(config, _make_study(config, steps), steps)


def _generations(config: SearchConfig, study: Any, steps: int) -> Rounds:
    space = make_space(config)
    study.enqueue_trial({name: getattr(space.rule, name) for name in space.searched})
    finished = False
    eta = config.eta if config.has_rungs else 1
    for start in range(0, config.num_candidates, config.candidates_at_once):
        count = min(config.candidates_at_once, config.num_candidates - start)
        candidates = [_suggest(study, space) for _ in range(count)]
        finished |= yield from _climb(study, candidates, eta, steps)
    if not finished:
        yield (Proposal(space.rule, 1.0),)


def _suggest(study: Any, space: Space) -> _Candidate:
    trial = study.ask()
    values = {
        name: trial.suggest_float(name, *ends, log=True) for name, ends in space.searched.items()
    }
    return _Candidate(trial, space.with_values(values))


def _climb(study: Any, candidates: Sequence[_Candidate], eta: int, steps: int) -> _Climb:
    """Run one generation from the lowest rung to full length, or until nobody is left; return whether somebody was.

    Resources are whole numbers to Optuna: 1 at the lowest rung, and eta times as much at each further one.
    """
    for rung in range(steps):
        scores = yield _proposals(candidates, 1 / eta ** (steps - rung))
        passed = {
            index
            for index in _best_first(scores)
            if _passes(study, candidates[index], scores[index], eta**rung)
        }
        candidates = [one for index, one in enumerate(candidates) if index in passed]
        if not candidates:
            return False
    scores = yield _proposals(candidates, 1.0)
    for one, score in zip(candidates, scores, strict=True):
        _finish(study, one, score)
    return True


def _proposals(candidates: Sequence[_Candidate], fidelity: float) -> tuple[Proposal, ...]:
    return tuple(Proposal(one.factors, fidelity) for one in candidates)


def _best_first(scores: Sequence[Score]) -> list[int]:
    """Return the places from the best score to the worst.

    Optuna's halving compares a trial with those judged before it and lets the best so far pass: judged from the worst
    to the best, a whole generation would.
    """
    return sorted(range(len(scores)), key=lambda index: scores[index])


def _passes(study: Any, candidate: _Candidate, score: Score, step: int) -> bool:
    """Report a rung, and return whether the candidate goes on; if not, Optuna is told."""
    if _is_sound(score):
        candidate.trial.report(score.value, step)
        if not candidate.trial.should_prune():
            return True
    _prune(study, candidate)
    return False


def _is_sound(score: Score) -> bool:
    """Return whether no run of a candidate diverged: then its mean loss, the tie, is finite too."""
    return math.isfinite(score.value) and math.isfinite(score.tie)


def _finish(study: Any, candidate: _Candidate, score: Score) -> None:
    """Tell the score of a full run."""
    if _is_sound(score):
        study.tell(candidate.trial, score.value)
    else:
        _prune(study, candidate)


def _prune(study: Any, candidate: _Candidate) -> None:
    from optuna.trial import TrialState

    study.tell(candidate.trial, state=TrialState.PRUNED)


def _make_study(config: SearchConfig, steps: int) -> Any:
    try:
        import optuna
    except ImportError as error:
        raise EnvironmentProblem(
            "config.search.method = 'optuna': optuna is not installed: pip install 'lbopt[search]'"
        ) from error
    verbosity = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.WARNING)  # it prints a line for every new study
    try:
        return optuna.create_study(
            study_name=_STUDY_NAME,
            sampler=_make_sampler(config, optuna),
            pruner=_make_pruner(config, steps, optuna),
        )
    finally:
        optuna.logging.set_verbosity(verbosity)


def _make_sampler(config: SearchConfig, optuna: Any) -> Any:
    """Return the sampler; TPE keeps the candidates of one generation apart by taking those still out for bad ones."""
    if config.sampler == "random":
        return optuna.samplers.RandomSampler(seed=config.seed)
    return optuna.samplers.TPESampler(
        seed=config.seed,
        multivariate=True,
        constant_liar=True,
        n_startup_trials=_quarter(config.num_candidates, 10),
    )


def _make_pruner(config: SearchConfig, steps: int, optuna: Any) -> Any:
    """Return the pruner, for steps 1, eta ... eta^steps."""
    kinds = optuna.pruners
    if config.pruner == "none":
        return kinds.NopPruner()
    if config.pruner == "median":
        return kinds.MedianPruner(n_startup_trials=_quarter(config.num_candidates, 5))
    if config.pruner == "successive_halving":
        return kinds.SuccessiveHalvingPruner(min_resource=1, reduction_factor=config.eta)
    # Optuna takes the floor of a computed logarithm, which is off by one at 3^5: one more step puts it above.
    return kinds.HyperbandPruner(
        min_resource=1, max_resource=config.eta**steps + 1, reduction_factor=config.eta
    )


def _quarter(num_candidates: int, most: int) -> int:
    """Return after how many candidates to begin learning: Optuna's own number, but a quarter of a small search.

    >>> _quarter(16, 10), _quarter(100, 10)
    (4, 10)
    """
    return min(most, max(1, num_candidates // 4))
