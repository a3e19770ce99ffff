"""The configuration of a search: which multiples of the rule's numbers are tried in a cell."""

# No `from __future__ import annotations` here: the flags read the fields' types.
import dataclasses
import itertools

from lbopt.config._checks import at_least, check_numbers, require_seed, require_seeds
from lbopt.config._fields import only, since
from lbopt.errors import require, require_choice

METHODS = ("grid", "log_uniform", "halton", "successive_halving", "hyperband", "optuna")
SAMPLERS = ("tpe", "random")
PRUNERS = ("none", "median", "successive_halving", "hyperband")
_SAMPLED = tuple(name for name in METHODS if name != "grid")
_IN_RUNGS = (
    {"method": ("successive_halving", "hyperband")},
    {"method": ("optuna",), "pruner": tuple(name for name in PRUNERS if name != "none")},
)
SHORTEST = 1e-5
"""The least `min_fidelity`: it also bounds Hyperband's first rung, at some 100,000 candidates."""


@dataclasses.dataclass
class SearchConfig:
    """The candidates that a cell of a study tries, and the length to which each is run.

    A candidate is three factors, by which the learning rate, the warmup and the weight decay that
    the arm's rules give at this batch size are multiplied. (1, 1, 1) is the rule itself. Every
    method but "grid" tries it first; where the ranges exclude it, its nearest point within them.
    Fidelity is the length of a run as a fraction of the full one.

    Attributes:
      method: "grid", "log_uniform", "halton", "successive_halving", "hyperband" or "optuna".
      learning_rate_factors: Factors of the grid; ascending, > 0.
      warmup_factors: Factors of the grid; ascending, 0 for no warmup.
      weight_decay_factors: Factors of the grid; ascending, 0 for no weight decay.
      learning_rate_range: (low, high) of the factor, sampled uniformly in its logarithm, so low is
        > 0; equal ends: not searched.
      warmup_range: (low, high) of the factor, sampled in the same way; (0, 0) for no warmup.
      weight_decay_range: (low, high) of the factor, sampled in the same way; (0, 0) for no weight
        decay.
      num_candidates: Number of candidates, for "successive_halving" in its first rung. The brackets
        of "hyperband" follow from `eta` and `min_fidelity`.
      eta: Factor >= 2 by which the length grows from rung to rung, and the number of candidates
        shrinks.
      min_fidelity: Smallest length of the first rung, as a fraction of the full run; in
        [1e-5, 1 / eta].
      sampler: Sampler of "optuna": "tpe" or "random".
      pruner: Pruner of "optuna", consulted after each rung: "none" (full runs only), "median",
        "successive_halving" or "hyperband".
      candidates_at_once: Number of candidates that "optuna" proposes before it is told the result
        of the first of them.
      seeds: Seeds with which every candidate is run.
      seed: Seed of the search itself.
      widen_candidates: Largest number of further candidates at each batch size, beyond the edges.
        While a factor of the best candidate lies at an edge of the search, that candidate runs at
        full length with the factor one step further: by the grid's own step, or by a tenth of the
        range. 0 to keep to the factors and ranges above.

    >>> search = SearchConfig("halton", num_candidates=8, learning_rate_range=(0.1, 10.0))
    >>> search.has_rungs
    False
    """

    method: str = "grid"
    learning_rate_factors: tuple[float, ...] = only((0.25, 0.5, 1.0, 2.0, 4.0), method=("grid",))
    warmup_factors: tuple[float, ...] = only((1.0,), method=("grid",))
    weight_decay_factors: tuple[float, ...] = only((1.0,), method=("grid",))
    learning_rate_range: tuple[float, float] = only((0.1, 10.0), method=_SAMPLED)
    warmup_range: tuple[float, float] = only((1.0, 1.0), method=_SAMPLED)
    weight_decay_range: tuple[float, float] = only((1.0, 1.0), method=_SAMPLED)
    num_candidates: int = only(16, method=tuple(name for name in _SAMPLED if name != "hyperband"))
    eta: int = only(3, *_IN_RUNGS)
    min_fidelity: float = only(1 / 27, *_IN_RUNGS)
    sampler: str = only("tpe", method=("optuna",))
    pruner: str = only("none", method=("optuna",))
    candidates_at_once: int = only(4, method=("optuna",))
    seeds: tuple[int, ...] = (0,)
    seed: int = only(0, method=_SAMPLED)
    widen_candidates: int = since(4, before=0)

    @property
    def has_rungs(self) -> bool:
        """Whether candidates are run at less than full length first.

        >>> [SearchConfig(name).has_rungs for name in ("hyperband", "optuna", "halton")]
        [True, False, False]
        """
        return self.method in ("successive_halving", "hyperband") or (
            self.method == "optuna" and self.pruner != "none"
        )


def check_search(search: SearchConfig) -> None:
    """Raise `UserError` for a value that no search takes."""
    check_numbers(search)
    require_choice("method", search.method, METHODS)
    require_choice("sampler", search.sampler, SAMPLERS)
    require_choice("pruner", search.pruner, PRUNERS)
    _check_grid(search)
    _check_ranges(search)
    at_least("num_candidates", search.num_candidates, 1)
    at_least("candidates_at_once", search.candidates_at_once, 1)
    at_least("widen_candidates", search.widen_candidates, 0)
    _check_rungs(search)
    require_seeds("seeds", search.seeds)
    require_seed("seed", search.seed)


def _check_grid(search: SearchConfig) -> None:
    rates = search.learning_rate_factors
    fix = "give at least one positive number, ascending, none twice"
    require(_ascending(rates) and rates[0] > 0, "learning_rate_factors", rates, fix)
    for name in ("warmup_factors", "weight_decay_factors"):
        values = getattr(search, name)
        fix = "give at least one number >= 0, ascending, none twice"
        require(_ascending(values) and values[0] >= 0, name, values, fix)


def _ascending(values: tuple[float, ...]) -> bool:
    steps = itertools.pairwise(values)
    return len(values) > 0 and all(low < high for low, high in steps)


def _check_ranges(search: SearchConfig) -> None:
    for name in ("learning_rate_range", "warmup_range", "weight_decay_range"):
        low, high = ends = getattr(search, name)
        require(low <= high, name, ends, "give (low, high) with low <= high")
        switched_off = low == high == 0 and name != "learning_rate_range"
        fix = "factors are sampled uniformly in their logarithm; give a lower end > 0"
        require(low > 0 or switched_off, name, ends, fix)
    ranges = (search.learning_rate_range, search.warmup_range, search.weight_decay_range)
    searched = search.method == "grid" or any(low < high for low, high in ranges)
    fix = "all three ranges have equal ends, so nothing is searched; widen one, or use a grid"
    require(searched, "learning_rate_range", search.learning_rate_range, fix)


def _check_rungs(search: SearchConfig) -> None:
    at_least("eta", search.eta, 2)
    shortest = search.min_fidelity
    fits = SHORTEST <= shortest <= 1
    require(fits, "min_fidelity", shortest, f"give a number in [{SHORTEST:g}, 1]")
    enough = not search.has_rungs or search.eta * shortest <= 1 + 1e-9
    fix = f"no run is shorter than the full one; give at most 1 / eta = {1 / search.eta:g}"
    require(enough, "min_fidelity", shortest, fix)
