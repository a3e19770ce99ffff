"""The published rules by which the numbers of a run follow the batch size and the run's length."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, Literal

import jax.numpy as jnp

from lbopt import _scalars
from lbopt.errors import UserError, require, require_choice

NUMBERS = (
    "learning_rate",
    "rest_learning_rate",
    "warmup_epochs",
    "b1",
    "b2",
    "momentum",
    "eps",
    "eps_root",
    "weight_decay",
    "ema_decay",
)
"""Numbers that a rule may change.

The rest is what a matrix optimizer leaves to another one; eps_root is an eps under the root.
"""
_ADAM = ("adam", "adamw", "optax.adam", "optax.adamw")
_NOT_ADAM = ("lamb", "lans", "rmsprop", "optax.lamb", "optax.rmsprop")
_ADAPTIVE = (*_ADAM, *_NOT_ADAM)
_BEYOND_SDE = tuple(name for name in _NOT_ADAM if name != "optax.rmsprop")
"""It treats RMSProp, and ours has a momentum besides."""
_NO_MEMORY = 1e-9
"""A decay rate below this keeps nothing: the rule's linear form has left its range."""

Regime = Literal["noise", "below critical", ""]
Form = Literal["power", "half_life", "complement"]


@dataclasses.dataclass(frozen=True)
class Change:
    """How one number follows the batch.

    With k = new batch / batch, d = new length / length in examples and q = new learning rate /
    learning rate, the factor is f = k^batch d^duration q^rate.

    Attributes:
      number: One of `NUMBERS`.
      form: "power" (x f), "half_life" (x^f: a decay per step that keeps its half-life in examples
        for f = k) or "complement" (1 - f (1 - x), which agrees with x^f for x near 1).
      batch: Exponent of k.
      duration: Exponent of d.
      rate: Exponent of q.
      low: Floor in the source; for a base value below it, that value is the floor.
      high: Cap in the source; for a base value above it, that value is the cap.

    >>> change = Change("b2", "half_life", batch=1, low=0.9)
    >>> change.formula, change.apply(0.9999, batch=2), change.apply(0.9999, batch=10_000)
    ('x^k, at least 0.9', 0.9998000100000001, 0.9)
    """

    number: str
    form: Form = "power"
    batch: float = 0.0
    duration: float = 0.0
    rate: float = 0.0
    low: float = 0.0
    high: float = math.inf

    def apply(self, base: Any, batch: float, duration: float = 1.0, rate: float = 1.0) -> Any:
        """Return the number for another batch; a power may be applied to a traced base.

        Args:
          base: The number at the base batch.
          batch: New batch / base batch.
          duration: New length / base length, in examples.
          rate: New learning rate / base learning rate.
        """
        factor = batch**self.batch * duration**self.duration * rate**self.rate
        if self.form == "half_life":
            found = base**factor
        elif self.form == "complement":
            found = 1 - (1 - base) * factor
        else:
            found = base * factor
        if not self.low and self.high == math.inf:
            return found
        if _scalars.is_traced(base):
            return jnp.clip(found, jnp.minimum(self.low, base), jnp.maximum(self.high, base))
        return min(max(found, min(self.low, base)), max(self.high, base))

    @property
    def formula(self) -> str:
        """The change in mathematics, "x sqrt(k)" or "1 - (1 - x) k / d" for instance."""
        factor = _product({"k": self.batch, "d": self.duration, "q": self.rate})
        if self.form == "half_life":
            text = f"x^({factor})" if len(factor) > 1 else f"x^{factor}"
        elif self.form == "complement":
            text = f"1 - (1 - x) {factor}"
        else:
            text = " ".join(["x", *factor.removeprefix("1").split()])
        low = f", at least {self.low:g}" if self.low else ""
        high = f", at most {self.high:g}" if self.high < math.inf else ""
        return text + low + high


def _product(exponents: Mapping[str, float]) -> str:
    """Return powers as text.

    >>> _product({"k": 0.5, "d": -1.0}), _product({"k": 0, "d": 0.3})
    ('sqrt(k) / d', 'd^0.3')
    """
    spelled = {
        name: f"sqrt({name})"
        if abs(power) == 0.5
        else name + f"^{abs(power):g}" * (abs(power) != 1)
        for name, power in exponents.items()
        if power
    }
    above = " ".join(text for name, text in spelled.items() if exponents[name] > 0)
    below = " / ".join(text for name, text in spelled.items() if exponents[name] < 0)
    return " / ".join(filter(None, [above or "1", below]))


@dataclasses.dataclass(frozen=True)
class ScalingRule:
    """A published rule.

    Attributes:
      name: Its name in `rule` and in `schedule.scaling_rule`.
      about: What it keeps, or who found it, in a few words.
      source: Public source.
      changes: What follows the batch. A change with all exponents 0 says that the number stays; a
        number that no change names is not the rule's matter.
      optimizers: Names of the optimizers that it is for; () for any.
      beyond: Those of them that its source does not treat.
      regime: "noise" if it needs gradients whose noise dominates, "below critical" if it needs a
        batch below the critical one, "" if it needs neither.
      without: Rule for the optimizers that have no part in this one, in words.

    >>> RULES["power_lines"].source
    'Bergsma et al., arXiv 2505.13738v2, eq. 2'
    """

    name: str
    about: str
    source: str
    changes: tuple[Change, ...] = ()
    optimizers: tuple[str, ...] = ()
    beyond: tuple[str, ...] = ()
    regime: Regime = ""
    without: str = ""

    @property
    def has_duration(self) -> bool:
        """Whether the rule says what another length of the run changes."""
        return any(change.duration for change in self.changes)


_ROOT = Change("learning_rate", batch=0.5)
_SAME_WARMUP = Change("warmup_epochs")
_SAME_SHARE = Change("warmup_epochs", duration=1)
_SDE = (
    _ROOT,
    _SAME_WARMUP,
    Change("b1", "complement", batch=1),
    Change("b2", "complement", batch=1),
    Change("eps", batch=-0.5),
    Change("eps_root", batch=-1),
)
_SDE_SOURCE = "Malladi et al., arXiv 2205.10287v3, square-root scaling rule"
_FOR_SGD = "take another rule; for SGD the same argument gives 'linear'"
_ROWS = (
    ScalingRule("none", "the base values at every batch", "-"),
    ScalingRule(
        "linear",
        "the learning rate grows with the batch",
        "Goyal et al., arXiv 1706.02677v2, linear scaling rule",
        (Change("learning_rate", batch=1),),
        regime="noise",
    ),
    ScalingRule(
        "sqrt",
        "the learning rate grows with the root of the batch",
        "You et al., arXiv 1904.00962v5, square root learning rate scaling",
        (_ROOT,),
        regime="noise",
    ),
    ScalingRule(
        "legw",
        "sqrt, and as many steps of warmup at every batch",
        "You et al., arXiv 1901.08256v1, linear-epoch gradual warmup and sqrt scaling",
        (_ROOT, Change("warmup_epochs", batch=1)),
        regime="noise",
    ),
    ScalingRule(
        "sde",
        "one stochastic differential equation at every batch",
        _SDE_SOURCE,
        _SDE,
        _ADAPTIVE,
        _BEYOND_SDE,
        "noise",
        _FOR_SGD,
    ),
    ScalingRule(
        "sde_half_life",
        "sde, with decays that keep their half-lives: valid at any batch",
        f"{_SDE_SOURCE}; x^k agrees with its 1 - (1 - x) k to first order",
        tuple(
            dataclasses.replace(one, form="half_life") if one.form == "complement" else one
            for one in _SDE
        ),
        _ADAPTIVE,
        _ADAPTIVE,
        "noise",
        _FOR_SGD,
    ),
    ScalingRule(
        "token_half_life",
        "the half-life of the second moment in tokens; b1 stays",
        "Marek et al., arXiv 2507.07101v2, b2 of a half-life in tokens; "
        "martin-marek/batch-size@32700f0:pretraining/utils.py",
        (Change("b2", "half_life", batch=1),),
    ),
    ScalingRule(
        "ema",
        "the half-life of averaged parameters in examples",
        "Busbridge et al., arXiv 2307.13813v3, EMA scaling rule",
        (Change("ema_decay", "half_life", batch=1),),
    ),
    ScalingRule(
        "power_lines",
        "AdamW's time scale in epochs, batch / (rate x decay x length)",
        "Bergsma et al., arXiv 2505.13738v2, eq. 2",
        (Change("weight_decay", batch=1, duration=-1, rate=-1),),
        regime="below critical",
    ),
    ScalingRule(
        "completed_p",
        "Complete(d)P in batch and length",
        "Complete(d)P, arXiv 2512.22382v1, Table 1",
        (
            Change("learning_rate", batch=0.5, duration=-0.5),
            _SAME_SHARE,
            Change("b1", "complement", batch=1, duration=-1),
            Change("b2", "complement", batch=1, duration=-1),
            Change("eps", batch=-0.5, duration=0.5),
            Change("eps_root", batch=-1, duration=1),
            Change("weight_decay", batch=0.5, duration=-0.5),
        ),
        _ADAPTIVE,
        _NOT_ADAM,
        "noise",
    ),
    ScalingRule(
        "adamh",
        "marin's AdamH recipe",
        "marin-community/marin@054a715:experiments/scaling_law_sweeps/completed_adamh.py",
        (
            Change("learning_rate", batch=0.5, duration=-0.3, high=0.01),
            Change("rest_learning_rate", batch=0.5, duration=-0.5, high=0.01),
            _SAME_SHARE,
            Change("b1"),
            Change("b2", "half_life", batch=1, low=0.9, high=0.9999),
            Change("eps", batch=-0.5, duration=0.5),
        ),
        ("adamh",),
        regime="noise",
    ),
    ScalingRule(
        "muonh",
        "marin's MuonH recipe, whose rate never rises above 0.01",
        "marin-community/marin@be6f3c6:experiments/scaling_law_sweeps/muonh.py",
        (
            Change("learning_rate", batch=0.5, high=0.01),
            Change("rest_learning_rate", batch=0.5),
            _SAME_WARMUP,
            Change("momentum"),
            Change("b1"),
            Change("b2", "half_life", batch=1, low=0.95),
        ),
        ("muonh",),
        regime="noise",
    ),
)
RULES: dict[str, ScalingRule] = {rule.name: rule for rule in _ROWS}


def combine_rules(names: str, field: str = "rule") -> tuple[ScalingRule, ...]:
    """Return the rules of a text such as "sqrt+token_half_life+ema".

    Args:
      names: Names of rules, joined by "+".
      field: Name of the argument, for errors.

    Raises:
      UserError: If a rule is not known, or if two give one number different values.

    >>> [rule.name for rule in combine_rules("sqrt+ema")]
    ['sqrt', 'ema']
    >>> combine_rules("linear+sde")
    Traceback (most recent call last):
    lbopt.errors.UserError: rule = 'linear+sde': 'linear' and 'sde' give two values of \
learning_rate; take one of them
    """
    require(isinstance(names, str), field, names, f"give one of {', '.join(RULES)}", code="choice")
    parts = [part.strip() for part in names.split("+")]
    for part in parts:
        require_choice(field, part, RULES)
    require(len(set(parts)) == len(parts), field, names, "name each rule once")

    found: dict[str, tuple[str, Change]] = {}
    for rule in (RULES[part] for part in parts):
        for change in rule.changes:
            other, former = found.setdefault(change.number, (rule.name, change))
            fix = (
                f"{other!r} and {rule.name!r} give two values of {change.number}; take one of them"
            )
            require(change == former, field, names, fix, code="conflict")
    return tuple(RULES[part] for part in parts)


def rule_changes(names: str, field: str = "rule") -> dict[str, Change]:
    """Return what the rules of a text change, by number.

    Args:
      names: Names of rules, joined by "+".
      field: Name of the argument, for errors.

    Raises:
      UserError: As `combine_rules` does.

    >>> {name: change.formula for name, change in rule_changes("legw").items()}
    {'learning_rate': 'x sqrt(k)', 'warmup_epochs': 'x k'}
    """
    rules = combine_rules(names, field)
    return {change.number: change for rule in rules for change in rule.changes}


def scale_number(
    number: str,
    base: float,
    rule: str,
    batch: float,
    duration: float = 1.0,
    rate: float = 1.0,
) -> float:
    """Return one number for another batch; the same if the rule does not change it.

    Args:
      number: One of `NUMBERS`.
      base: Its value at the base batch.
      rule: The rule, or rules joined by "+".
      batch: New batch / base batch.
      duration: New length / base length, in examples.
      rate: New learning rate / base learning rate; some rules for the weight decay need it.

    Raises:
      UserError: Naming the number, if a decay rate leaves [0, 1).

    >>> scale_number("b2", 0.999, "sde", batch=4)
    0.996
    """
    change = rule_changes(rule).get(number)
    if change is None:
        return base
    found = change.apply(base, batch, duration, rate)
    if change.form == "complement" and not _NO_MEMORY <= found < 1 and 0 < base < 1:
        factor = batch**change.batch * duration**change.duration
        shrunk = " (counted over the length)" if duration != 1 and change.duration else ""
        fix = (
            f"the rule {rule!r} makes it {found:.3g} at {factor:g} x the batch{shrunk}, and holds "
            f"below {1 / (1 - base):.4g} x; stay below that, or take 'sde_half_life'"
        )
        raise UserError(number, base, fix, code="conflict")
    return found
