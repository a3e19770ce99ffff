"""The numbers of an optimizer that follow the batch, by the scaling rule of the schedule."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import jax

from lbopt import errors, types
from lbopt._scalars import is_number
from lbopt.config import _fields, _foreign
from lbopt.config._optimizer import OptimizerConfig, make_optimizer, variant_of
from lbopt.config._schedule import ScheduleConfig
from lbopt.errors import require
from lbopt.schedules import (
    combine_rules,
    rule_changes,
    scale_learning_rate,
    scale_number,
)
from lbopt.transforms import VARIANTS, MomentDecays, unknown_moments

if TYPE_CHECKING:
    from lbopt.config._train import TrainConfig

_OWN = ("b1", "b2", "momentum", "eps", "weight_decay", "ema_decay")
_OF_RMSPROP = {"rmsprop_decay": "b2", "decay": "b2"}
_UNDER_ROOT = ("rmsprop", "optax.rmsprop")
"""Optimizers whose `eps` stands under the root, the latter unless `eps_in_sqrt` says otherwise."""
_RATIO = "rest_learning_rate_ratio"
_OPTIONS = {
    **{name: name for name in ("b1", "b2", "momentum")},
    **{f"rest_{name}": name for name in ("b1", "b2", "eps")},
    **{f"{of}_b2": "b2" for of in ("adam", "graft", "neuron", "shampoo")},
    **_OF_RMSPROP,
    _RATIO: "rest_learning_rate",
}
"""Options of a matrix optimizer or of Optax -> the number that they are."""
_WITH_EPS = ("adamh", "soap", "soaph")
"""Our own optimizers with options whose `eps` stands in Adam's denominator."""

_BY_OPTIMIZER: dict[tuple[str, str], str | None] = {
    ("optax.lion", "b2"): None,
    ("optax.adan", "b2"): None,
    ("optax.adan", "b3"): "b2",
}
"""Option of one optimizer -> the number that it is; None for the decay of a first moment."""

_DEBIASED = ("b1", "b2", "rest_b1", "rest_b2", "adam_b2", "graft_b2")
"""The decays of moments with a bias correction, where the optimizer has one."""
_DEBIAS = {
    "debias": ("b1", "b2"),
    "bias_correction_mu": ("b1",),
    "bias_correction_nu": ("b2",),
}
"""Options that switch the bias correction -> the decays of its moments."""
_NOT_DEBIASED = {
    "optax.adamax": ("b2",),
    "optax.adamaxw": ("b2",),
    "optax.contrib.adopt": ("b1", "b2"),
}
"""Optimizers with the state of Adam that correct less than Adam -> those decays."""


@dataclasses.dataclass(frozen=True)
class Setting:
    """A number of an optimizer that a scaling rule may change.

    Attributes:
      field: Its field, "b2" or "options.rest_b2" for instance.
      number: The number that it is, one of `schedules.NUMBERS`.
      value: Its value.
    """

    field: str
    number: str
    value: float


def optimizer_settings(config: OptimizerConfig) -> list[Setting]:
    """Return the numbers of an optimizer that a scaling rule may change, of fields and options.

    Args:
      config: The optimizer.

    >>> [(one.field, one.value) for one in optimizer_settings(OptimizerConfig("momentum"))]
    [('weight_decay', 0.0), ('momentum', 0.9)]
    """
    return [*_of_fields(config), *_of_options(config)]


def _of_fields(config: OptimizerConfig) -> Iterator[Setting]:
    for field in dataclasses.fields(config):
        number = _OF_RMSPROP.get(field.name, field.name)
        value = getattr(config, field.name)
        if number not in _OWN or value is None or not _fields.applies(field, config):
            continue
        rooted = number == "eps" and config.name in _UNDER_ROOT
        yield Setting(field.name, "eps_root" if rooted else number, value)


def _of_options(config: OptimizerConfig) -> Iterator[Setting]:
    """Yield the options of a foreign optimizer, with the defaults of its function if it is known.

    Of the user's own function only the options that the config has are read.
    """
    if not _foreign.is_foreign(config.name):
        return
    values = _defaults(config) | config.options
    adaptive = bool({"b2", "decay"} & {*values}) and config.name not in _foreign.LIBRARY
    names = {**_OPTIONS}
    if adaptive or config.name in _WITH_EPS:
        rooted = config.name in _UNDER_ROOT and values.get("eps_in_sqrt", True)
        names |= {"eps": "eps_root" if rooted else "eps", "eps_root": "eps_root"}
    for name, value in values.items():
        number = _BY_OPTIMIZER.get((config.name, name), names.get(name))
        if number is not None and is_number(value):
            yield Setting(f"options.{name}", number, float(value))


def _defaults(config: OptimizerConfig) -> dict[str, Any]:
    """Return the defaults of an optimizer's function, those of its variant first."""
    function = _foreign.named(config.name)
    if function is None:
        return {}
    of_variant = _foreign.variant_options(config.name, config.options)
    defaults = {}
    for name, argument in inspect.signature(function).parameters.items():
        value = argument.default
        value = value.value if isinstance(value, types.Default) else value
        defaults[name] = getattr(of_variant, name, value)
    return defaults


def scale_optimizer(
    optimizer: OptimizerConfig,
    schedule: ScheduleConfig,
    global_batch_size: int,
) -> OptimizerConfig:
    """Return an optimizer with the numbers that the schedule's rule gives at a batch size.

    Args:
      optimizer: The optimizer, with the numbers at `schedule.base_batch_size`.
      schedule: The schedule with the rule.
      global_batch_size: Examples per step.

    Raises:
      UserError: Naming "optimizer.b1" for instance, if the rule has no value for it at that batch.

    >>> schedule = ScheduleConfig(0.001, scaling_rule="sde", warmup_rule="epochs")
    >>> scaled = scale_optimizer(OptimizerConfig("adamw", b2=0.99), schedule, 256)
    >>> round(scaled.b1, 9), round(scaled.b2, 9), scaled.eps
    (0.6, 0.96, 5e-07)
    """
    rule = schedule.scaling_rule
    changes = rule_changes(rule)
    if not {*changes} - {"learning_rate", "warmup_epochs"}:
        return optimizer
    ratio = global_batch_size / schedule.base_batch_size
    base_rate = schedule.base_learning_rate
    rate = scale_number("learning_rate", base_rate, rule, ratio)
    rate_ratio = rate / base_rate if base_rate else 1.0

    fields: dict[str, Any] = {}
    options: dict[str, Any] = dict(optimizer.options)
    for setting in optimizer_settings(optimizer):
        place = f"optimizer.{setting.field}"
        base = setting.value
        # The rest's rate is kept as a multiple of the matrices', and follows it without a rule.
        if setting.number == "rest_learning_rate":
            if setting.number not in changes or not rate:
                continue
            found = scale_number(setting.number, base_rate * base, rule, ratio) / rate
        else:
            with errors.under("", **{setting.number: place}):
                found = scale_number(setting.number, base, rule, ratio, rate=rate_ratio)
        if found == base:
            continue
        group, _, name = setting.field.rpartition(".")
        (options if group else fields)[name] = found
    return dataclasses.replace(optimizer, options=options, **fields)


@dataclasses.dataclass(frozen=True)
class BatchRatios:
    """The numbers of a run at a batch size over those at another.

    Attributes:
      learning_rate: Ratio of the peak learning rates.
      weight_decay: Ratio of the weight decays.
    """

    learning_rate: float = 1.0
    weight_decay: float = 1.0


def batch_ratios(config: TrainConfig, before: int, after: int) -> BatchRatios:
    """Return the numbers of a run at a batch size over those at another.

    Args:
      config: The run, with its numbers at `schedule.base_batch_size`.
      before: The other batch size.
      after: The batch size.
    """
    schedule = config.schedule
    rates = [
        scale_learning_rate(
            schedule.base_learning_rate, schedule.base_batch_size, size, schedule.scaling_rule
        )
        for size in (before, after)
    ]
    decays = [
        scale_optimizer(config.optimizer, schedule, size).weight_decay for size in (before, after)
    ]
    return BatchRatios(
        rates[1] / rates[0] if rates[0] else 1.0,
        decays[1] / decays[0] if decays[0] else 1.0,
    )


def moment_decays(before: OptimizerConfig, after: OptimizerConfig) -> MomentDecays | None:
    """Return the decays of the moments whose bias is corrected; None if all stay.

    Args:
      before: The optimizer.
      after: The same one with other numbers.

    >>> moment_decays(OptimizerConfig("adamw", b2=0.99), OptimizerConfig("adamw", b2=0.98))
    {'b1': (0.9, 0.9), 'b2': (0.99, 0.98)}
    """
    first, second = map(_debiased_decays, (before, after))
    return None if first == second else {name: (first[name], second[name]) for name in first}


def _debiased_decays(config: OptimizerConfig) -> dict[str, float]:
    """Return the decays of the moments whose bias the optimizer corrects, by name."""
    options = _defaults(config) | config.options
    if config.name in VARIANTS:
        options["debias"] = getattr(variant_of(config), "debias", True) is True
    without = {*_NOT_DEBIASED.get(config.name, ())}
    for option, names in _DEBIAS.items():
        without |= set() if options.get(option, True) else {*names}
    if options.get("graft", "adam") != "adam":
        without.add("graft_b2")

    found = {}
    for setting in optimizer_settings(config):
        name = setting.field.rpartition(".")[2]
        # b2 of RMSProp and of Adan has other names.
        name = name if name in _OPTIONS and name not in _OF_RMSPROP else setting.number
        if name in _DEBIASED and name not in without:
            found[name] = setting.value
    return found


def check_moments(
    optimizer: OptimizerConfig,
    decays: MomentDecays,
    params: types.Params,
    stacked: types.Stacked = None,
    known_roles: types.PyTree = None,
) -> None:
    """Raise `UserError` if moments whose decays change are those of an unknown optimizer.

    Args:
      optimizer: The optimizer.
      decays: The decays, from `moment_decays`.
      params: Parameters or their shapes.
      stacked: The parameters that are stacks of layers.
      known_roles: Known roles, as in `make_optimizer`.
    """
    alone = OptimizerConfig(optimizer.name, options=optimizer.options)
    tx = make_optimizer(alone, 1.0, stacked=stacked, known_roles=known_roles)
    unknown = unknown_moments(jax.eval_shape(tx.init, params))
    changed = " and ".join(name for name, (before, after) in decays.items() if before != after)
    fix = f"its state {unknown} is unknown, so its moments cannot be suited to another {changed}; "
    fix += f"take a {{rule}} that keeps {changed}"
    also = {"rule": "schedule.scaling_rule"}
    require(unknown is None, "optimizer.name", optimizer.name, fix, code="conflict", also=also)


def check_rule(optimizer: OptimizerConfig, names: str, field: str) -> None:
    """Raise `UserError` for a rule that an optimizer has no part in.

    Args:
      optimizer: The optimizer.
      names: The rule, or rules joined by "+".
      field: Field or argument that holds it, for errors.
    """
    there = {setting.number for setting in optimizer_settings(optimizer) if setting.value}
    for rule in combine_rules(names, field):
        fix = f"{rule.name!r} is for {', '.join(rule.optimizers)}, and {{name}} = "
        fix += f"{optimizer.name!r}; {rule.without or 'take another rule'}"
        also = {"name": "optimizer.name"}
        fits = not rule.optimizers or optimizer.name in rule.optimizers
        require(fits, field, names, fix, code="conflict", also=also)

        changed = {change.number for change in rule.changes}
        idle = changed and not changed & {"learning_rate", "warmup_epochs", *there}
        fix = f"{rule.name!r} scales {' and '.join(changed)}, and this optimizer has none; set it, "
        fix += "or leave the rule out"
        require(not idle, field, names, fix, code="conflict")


def check_scaling(
    optimizer: OptimizerConfig, schedule: ScheduleConfig, global_batch_size: int
) -> None:
    """Raise `UserError` for a rule that the optimizer has no part in, or that ends before a batch.

    Args:
      optimizer: The optimizer.
      schedule: The schedule with the rule.
      global_batch_size: Examples per step.
    """
    check_rule(optimizer, schedule.scaling_rule, "schedule.scaling_rule")
    scale_optimizer(optimizer, schedule, global_batch_size)
