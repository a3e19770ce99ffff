"""Search by Optuna: samplers that learn from the scores so far, and pruners between rungs."""

from __future__ import annotations

import math
from collections.abc import Generator, Sequence
from typing import Any, NamedTuple, TypeAlias

from lbopt.config import SearchConfig
from lbopt.errors import MissingPackage
from lbopt.sweep.search._halving import num_halvings
from lbopt.sweep.search._searcher import Factors, Proposal, Rounds, Score
from lbopt.sweep.search._space import Space, make_space

_STUDY_NAME = "search"
"""Name of Optuna's study; its Hyperband hashes the name to assign trials to brackets."""

_Climb: TypeAlias = Generator[tuple[Proposal, ...], Sequence[Score], bool]


class _OptunaCandidate(NamedTuple):
    trial: Any  # optuna.Trial
    factors: Factors


def adaptive(config: SearchConfig) -> Rounds:
    """Ask Optuna for candidates, in generations of `candidates_at_once`.

    Without a pruner each candidate is run once, at full length. With one, a generation runs at the
    rungs eta^-k ... 1, a round for each, and the pruner decides after each rung which candidates
    remain. Every rung is a run of its own, with its schedule rescaled: a candidate that is never
    pruned costs 1 + 1/eta + 1/eta^2 + ... full runs. If no candidate reaches full length, because
    all scores are infinite, the rule itself is run at full length as the choice.

    Note:
      Optuna is told only the value of a score, and compares equal ones by age.

      A candidate that diverged is told as pruned, without a value. Then the pruners compare others
      with complete or finite runs only, and TPE ranks it by its longest finite run, or below all
      other candidates. An infinite value could turn the median pruner's percentile into NaN; a
      failed trial would be forgotten, and TPE would propose it again. If all candidates so far
      diverged, TPE takes the oldest for the best.

      Optuna's Hyperband shows the sampler only trials of the bracket that the new one belongs to,
      so TPE needs several times as many candidates to learn there.

    Args:
      config: The config of the search.

    Raises:
      EnvironmentProblem: Naming `method`, if Optuna is not installed.
    """
    steps = num_halvings(config.eta, 1 / config.min_fidelity) if config.has_rungs else 0
    return _generations(config, _make_study(config, steps), steps)


def _generations(config: SearchConfig, study: Any, steps: int) -> Rounds:
    space = make_space(config)
    # The rule itself is the first candidate, as with every method but the grid.
    study.enqueue_trial({name: getattr(space.rule, name) for name in space.searched})
    finished = False
    eta = config.eta if config.has_rungs else 1
    for start in range(0, config.num_candidates, config.candidates_at_once):
        count = min(config.candidates_at_once, config.num_candidates - start)
        candidates = [_suggest(study, space) for _ in range(count)]
        finished |= yield from _climb(study, candidates, eta, steps)
    if not finished:
        yield (Proposal(space.rule, 1.0),)


def _suggest(study: Any, space: Space) -> _OptunaCandidate:
    trial = study.ask()
    values = {
        name: trial.suggest_float(name, *ends, log=True) for name, ends in space.searched.items()
    }
    return _OptunaCandidate(trial, space.with_values(values))


def _climb(study: Any, candidates: Sequence[_OptunaCandidate], eta: int, steps: int) -> _Climb:
    """Run a generation from the lowest rung to full length; return whether a candidate got there.

    Optuna counts resources in whole numbers: 1 at the lowest rung, eta times as many at each next.
    """
    for rung in range(steps):
        scores = yield _proposals(candidates, 1 / eta ** (steps - rung))
        passed = {
            index
            for index in _best_first(scores)
            if _passes(study, candidates[index], scores[index], eta**rung)
        }
        candidates = [candidate for index, candidate in enumerate(candidates) if index in passed]
        if not candidates:
            return False
    scores = yield _proposals(candidates, 1.0)
    for one, score in zip(candidates, scores, strict=True):
        _finish(study, one, score)
    return True


def _proposals(candidates: Sequence[_OptunaCandidate], fidelity: float) -> tuple[Proposal, ...]:
    return tuple(Proposal(one.factors, fidelity) for one in candidates)


def _best_first(scores: Sequence[Score]) -> list[int]:
    """Return the indices of scores from the best to the worst.

    Optuna's halving compares a trial with the earlier ones, and the best so far passes: from the
    worst to the best, a whole generation would pass.
    """
    return sorted(range(len(scores)), key=lambda index: scores[index][:2])


def _passes(study: Any, candidate: _OptunaCandidate, score: Score, step: int) -> bool:
    """Report the score of a rung, and return whether the candidate remains."""
    if _is_finite(score):
        candidate.trial.report(score.value, step)
        if not candidate.trial.should_prune():
            return True
    _prune(study, candidate)
    return False


def _is_finite(score: Score) -> bool:
    """Return whether no run of a candidate diverged, so that its mean loss is finite too."""
    return math.isfinite(score.value) and math.isfinite(score.tie)


def _finish(study: Any, candidate: _OptunaCandidate, score: Score) -> None:
    """Tell the score of a full run."""
    if _is_finite(score):
        study.tell(candidate.trial, score.value)
    else:
        _prune(study, candidate)


def _prune(study: Any, candidate: _OptunaCandidate) -> None:
    from optuna.trial import TrialState

    study.tell(candidate.trial, state=TrialState.PRUNED)


def _make_study(config: SearchConfig, steps: int) -> Any:
    try:
        import optuna
    except ImportError as error:
        fix = "optuna is not installed; run pip install 'lbopt[search]'"
        raise MissingPackage("method", "optuna", fix) from error

    # Optuna prints a line for every new study.
    verbosity = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    try:
        return optuna.create_study(
            study_name=_STUDY_NAME,
            sampler=_make_sampler(config, optuna),
            pruner=_make_pruner(config, steps, optuna),
        )
    finally:
        optuna.logging.set_verbosity(verbosity)


def _make_sampler(config: SearchConfig, optuna: Any) -> Any:
    """Return the sampler; TPE counts running trials as bad, which spreads a generation out."""
    if config.sampler == "random":
        return optuna.samplers.RandomSampler(seed=config.seed)
    return optuna.samplers.TPESampler(
        seed=config.seed,
        multivariate=True,
        constant_liar=True,
        n_startup_trials=_quarter(config.num_candidates, 10),
    )


def _make_pruner(config: SearchConfig, steps: int, optuna: Any) -> Any:
    """Return the pruner, for resources 1, eta ... eta^steps."""
    kinds = optuna.pruners
    if config.pruner == "none":
        return kinds.NopPruner()
    if config.pruner == "median":
        return kinds.MedianPruner(n_startup_trials=_quarter(config.num_candidates, 5))
    if config.pruner == "successive_halving":
        return kinds.SuccessiveHalvingPruner(min_resource=1, reduction_factor=config.eta)
    # Optuna takes the floor of a computed logarithm, which is one too low at 3^5: add 1.
    return kinds.HyperbandPruner(
        min_resource=1, max_resource=config.eta**steps + 1, reduction_factor=config.eta
    )


def _quarter(num_candidates: int, most: int) -> int:
    """Return the number of candidates before learning starts: Optuna's, or a quarter of a few.

    >>> _quarter(16, 10), _quarter(100, 10)
    (4, 10)
    """
    return min(most, max(1, num_candidates // 4))
