"""The configuration of a search: which multiples of the rule's numbers are tried in a cell."""

# No `from __future__ import annotations` here: the flags read the fields' types.
import dataclasses
import itertools

from lbopt.config._checks import LARGEST_INTEGER, at_least
from lbopt.config._train import require_seed
from lbopt.errors import require, require_choice

METHODS = ("grid", "log_uniform", "halton", "successive_halving", "hyperband", "optuna")
SAMPLERS = ("tpe", "random")
PRUNERS = ("none", "median", "successive_halving", "hyperband")
SHORTEST = 1e-5
"""The least `min_fidelity`: it also bounds Hyperband's first rung, at some 100,000 candidates."""


@dataclasses.dataclass
class SearchConfig:
    """Which candidates a cell of a study tries, and how far each is run.

    A candidate is three factors: multiples of the learning rate, the warmup and the weight decay that the arm's rules
    give at this batch size. (1, 1, 1) is the rule itself. Every method but "grid" tries it first, moved into the ranges
    where they leave it out. Fidelity is the length of a run as a fraction of the full one.

    Attributes:
      method: "grid", "log_uniform", "halton", "successive_halving", "hyperband" or "optuna".
      learning_rate_factors: of the grid; ascending, > 0.
      warmup_factors: of the grid; ascending, 0 for no warmup.
      weight_decay_factors: of the grid; ascending, 0 for no weight decay.
      learning_rate_range: (low, high) of the factor, for the other methods, which draw uniformly in its logarithm, so low is
        > 0; equal ends: not searched.
      warmup_range: likewise; (0, 0) for no warmup.
      weight_decay_range: likewise; (0, 0) for no weight decay.
      num_candidates: of "log_uniform", "halton", "successive_halving" (in its first rung) and "optuna"; the brackets of
        "hyperband" follow from `eta` and `min_fidelity`.
      eta: >= 2; from rung to rung the length grows so many times, and one of so many candidates stays (of "optuna", whom the
        pruner lets go on).
      min_fidelity: the first rung of "successive_halving", "hyperband", and "optuna" with a pruner, is not shorter; in
        [1e-5, 1 / eta] for these.
      sampler: of "optuna": "tpe" or "random".
      pruner: of "optuna", consulted after each rung: "none" (full runs only), "median", "successive_halving" or
        "hyperband".
      candidates_at_once: of "optuna": so many are asked for before the first of them is told.
      seeds: every candidate is run with each.
      seed: of the search itself.
    """

    method: str = "grid"
    learning_rate_factors: tuple[float, ...] = (0.25, 0.5, 1.0, 2.0, 4.0)
    warmup_factors: tuple[float, ...] = (1.0,)
    weight_decay_factors: tuple[float, ...] = (1.0,)
    learning_rate_range: tuple[float, float] = (0.1, 10.0)
    warmup_range: tuple[float, float] = (1.0, 1.0)
    weight_decay_range: tuple[float, float] = (1.0, 1.0)
    num_candidates: int = 16
    eta: int = 3
    min_fidelity: float = 1 / 27
    sampler: str = "tpe"
    pruner: str = "none"
    candidates_at_once: int = 4
    seeds: tuple[int, ...] = (0,)
    seed: int = 0

    @property
    def has_rungs(self) -> bool:
        """Whether candidates are run at less than full length first.

        >>> SearchConfig("hyperband").has_rungs, SearchConfig("optuna").has_rungs, SearchConfig("halton").has_rungs
        (True, False, False)
        """
        return self.method in ("successive_halving", "hyperband") or (
            self.method == "optuna" and self.pruner != "none"
        )


def validate_search(search: SearchConfig, prefix: str) -> None:
    """Check every field of a search.

    Args:
      search: the fields, of their declared types.
      prefix: what the message calls the search, for instance "config.search".

    Raises:
      UserError: naming the field, its value and the fix.
    """
    require_choice(f"{prefix}.method", search.method, METHODS)
    require_choice(f"{prefix}.sampler", search.sampler, SAMPLERS)
    require_choice(f"{prefix}.pruner", search.pruner, PRUNERS)
    _validate_grid(search, prefix)
    _validate_ranges(search, prefix)
    at_least(f"{prefix}.num_candidates", search.num_candidates, 1)
    at_least(f"{prefix}.candidates_at_once", search.candidates_at_once, 1)
    _validate_rungs(search, prefix)
    require_seeds(f"{prefix}.seeds", search.seeds)
    require_seed(f"{prefix}.seed", search.seed)


def require_seeds(field: str, values: tuple[int, ...]) -> None:
    """Check that there are seeds, all different.

    Args:
      field: what the message calls them, for instance "config.search.seeds".
      values: the seeds.

    Raises:
      UserError: naming the field, its value and the fix.
    """
    require(
        len(values) > 0 and len(set(values)) == len(values),
        field,
        values,
        "give at least one seed, none twice",
    )
    for seed in values:
        require_seed(field, seed)


def _validate_grid(search: SearchConfig, prefix: str) -> None:
    rates = search.learning_rate_factors
    fix = "give at least one positive number, ascending, none twice"
    require(_ascending(rates) and rates[0] > 0, f"{prefix}.learning_rate_factors", rates, fix)
    for name in ("warmup_factors", "weight_decay_factors"):
        values = getattr(search, name)
        fix = "give at least one number >= 0, ascending, none twice"
        require(_ascending(values) and values[0] >= 0, f"{prefix}.{name}", values, fix)


def _ascending(values: tuple[float, ...]) -> bool:
    steps = itertools.pairwise(values)
    return (
        len(values) > 0 and values[-1] < LARGEST_INTEGER and all(low < high for low, high in steps)
    )


def _validate_ranges(search: SearchConfig, prefix: str) -> None:
    for name in ("learning_rate_range", "warmup_range", "weight_decay_range"):
        low, high = ends = getattr(search, name)
        require(
            low <= high < LARGEST_INTEGER,
            f"{prefix}.{name}",
            ends,
            "give (low, high) with low <= high",
        )
        switched_off = low == high == 0 and name != "learning_rate_range"
        fix = "factors are drawn uniformly in their logarithm; give a lower end > 0"
        require(low > 0 or switched_off, f"{prefix}.{name}", ends, fix)
    ranges = search.learning_rate_range, search.warmup_range, search.weight_decay_range
    searched = search.method == "grid" or any(low < high for low, high in ranges)
    fix = "the ends of all three ranges are equal, so nothing is searched; widen one, or use method 'grid'"
    require(searched, f"{prefix}.learning_rate_range", search.learning_rate_range, fix)


def _validate_rungs(search: SearchConfig, prefix: str) -> None:
    at_least(f"{prefix}.eta", search.eta, 2)
    shortest = search.min_fidelity
    require(
        SHORTEST <= shortest <= 1,
        f"{prefix}.min_fidelity",
        shortest,
        f"give a number in [{SHORTEST:g}, 1]",
    )
    fix = f"there is no shorter run between it and the full one; give at most 1 / eta = {1 / search.eta:g}"
    enough = not search.has_rungs or search.eta * shortest <= 1 + 1e-9
    require(enough, f"{prefix}.min_fidelity", shortest, fix)
