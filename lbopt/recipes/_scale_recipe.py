"""`scale_recipe`: a recipe for another batch size, and what that changes."""

from __future__ import annotations

import copy
import dataclasses
import fractions
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from lbopt import _scalars, errors
from lbopt.config import (
    OptimizerConfig,
    ScheduleConfig,
    TrainConfig,
    check_rule,
    config_to_json,
    optimizer_settings,
    scale_optimizer,
)
from lbopt.data.from_config import has_known_length, known_source
from lbopt.errors import EnvironmentProblem, UserError, require, require_choice
from lbopt.recipes._scaled_recipe import ScaledNumber, ScaledRecipe
from lbopt.schedules import (
    NUMBERS,
    Units,
    combine_rules,
    rule_changes,
    scale_learning_rate,
    scale_number,
)

_LEAST_B2 = 0.9
"""Floor of b2 in marin's AdamH recipe; a second moment of less memory is out of range."""
_OF_LENGTH = ("num_epochs", "num_steps", "warmup_steps", "decay_steps")
_LENGTHS = (*_OF_LENGTH, "stair_epochs")
_ROUNDOFF = 1e-9
"""Relative difference of two numbers that are the same, calculated in two ways."""
_ALSO_KEPT = ("trust_coefficient", "max_grad_norm")
"""Numbers of an optimizer that no rule changes and that users ask about."""
_PARTS_OF_LENGTHS = (
    ("warmup epochs", "num_epochs"),
    ("warmup_epochs", "num_epochs"),
    ("warmup steps", "num_steps"),
    ("schedule.warmup_steps", "steps"),
    ("schedule.warmup_steps", "num_steps"),
    ("warmup_steps", "num_steps"),
)
"""Names in a table of a warmup and of the run that has to be longer."""


def scale_recipe(
    recipe: TrainConfig | Mapping[str, float],
    *,
    global_batch_size: int,
    rule: str,
    duration: float = 1.0,
    noise_scale: float | None = None,
) -> ScaledRecipe:
    """Return a recipe for another batch size, with every number that a rule changes.

    Args:
      recipe: A `TrainConfig`; or the numbers of a loop of your own by name: `global_batch_size`,
        and any of `learning_rate`, `rest_learning_rate`, `warmup_epochs`, `b1`, `b2`, `momentum`,
        `eps`, `eps_root` (an eps under the root), `weight_decay`, `ema_decay`, `num_epochs`,
        `num_steps`, `warmup_steps` and `decay_steps`.
      global_batch_size: New number of examples per optimizer step.
      rule: "none", "linear", "sqrt", "legw", "sde", "sde_half_life", "token_half_life", "ema",
        "power_lines", "completed_p", "adamh" or "muonh"; several joined by "+", if they change
        different numbers.
      duration: New length of the run over the old one, in examples; completed_p, adamh and
        power_lines say what it changes.
      noise_scale: Gradient noise scale of the run in examples, to tell whether the rule holds;
        `math.inf` if the run saw no gradient above the noise, None if it is not known.

    Returns:
      The new recipe, and the table of what changed. In a config the numbers are those at the new
      batch, which becomes its base batch, and `schedule.scaling_rule` is the rule. A second phase
      whose optimizer has other numbers gets the base batch from which the rule gives them.

    Raises:
      UserError: Naming the argument or field: an unknown rule, two that contradict each other, one
        that the optimizer has no part in, one that cannot give two phases their numbers, or a
        number that leaves its range.

    >>> numbers = {"global_batch_size": 512, "learning_rate": 0.001, "b1": 0.9, "b2": 0.999}
    >>> scaled = scale_recipe(numbers, global_batch_size=2048, rule="sde")
    >>> scaled.recipe["learning_rate"], round(scaled.recipe["b2"], 6)
    (0.002, 0.996)

    References:
      The source of each rule stands in its table, `lbopt.schedules.RULES`.
    """
    size = _scalars.whole("global_batch_size", global_batch_size)
    duration = _scalars.checked("duration", duration, "a number > 0", lambda n: n > 0)
    noise_scale = _scalars.known(noise_scale)
    is_infinite = _scalars.is_number(noise_scale) and noise_scale == math.inf
    if noise_scale is not None and not is_infinite:
        fits = "a number of examples > 0"
        noise_scale = _scalars.checked("noise_scale", noise_scale, fits, lambda n: n > 0)
    rules = combine_rules(rule)
    fix = f"{rule!r} says nothing of the length; change num_epochs yourself, or add none"
    says = duration == 1 or any(one.has_duration for one in rules)
    require(says, "duration", duration, fix, code="conflict")
    if isinstance(recipe, Mapping):
        for name in recipe:
            require_choice("recipe", name, (*NUMBERS, *_OF_LENGTH, "global_batch_size"))
        fix = "say at which batch the numbers were tuned"
        require("global_batch_size" in recipe, "recipe", dict(recipe), fix, code="missing")
        before = _scalars.whole("global_batch_size", recipe["global_batch_size"])
        return _of_mapping(recipe, _BatchChange(rule, before, size, duration, noise_scale))

    fix = "give a TrainConfig or a mapping of numbers; a study has a scaling_rule in every arm"
    require(isinstance(recipe, TrainConfig), "recipe", recipe, fix, code="type")
    recipe.validate()
    growing = recipe.batch_schedule
    fix = "a rule scales one batch; scale the recipe with batch_schedule = None, and then its sizes"
    place = "config.batch_schedule.kind"
    require(growing is None, place, growing and growing.kind, fix, code="conflict")
    with errors.under("config", {"optimizer"}):
        check_rule(recipe.optimizer, rule, "rule")
        scaling = _BatchChange(rule, recipe.global_batch_size, size, duration, noise_scale)
        return _of_config(recipe, scaling)


class _Number(NamedTuple):
    """A number before it is scaled.

    Attributes:
      name: Its name in the table.
      kind: One of `NUMBERS` or of `_LENGTHS`; "" for one that always stays.
      value: Its value at the recipe's batch.
    """

    name: str
    kind: str
    value: float


class _BatchChange(NamedTuple):
    """A change of batch.

    Attributes:
      rule: The rule, or rules joined by "+".
      before: Examples per step before.
      after: Examples per step after.
      duration: New length over the old one, in examples.
      noise_scale: Noise scale of the run in examples, which may be infinite; None if it is not
        known.
    """

    rule: str
    before: int
    after: int
    duration: float
    noise_scale: float | None

    @property
    def ratio(self) -> float:
        """New batch over the old one."""
        return self.after / self.before

    def table(self, numbers: Sequence[_Number]) -> list[ScaledNumber]:
        """Return numbers before and after; the learning rate stands among them, or stays."""
        rates = [each.value for each in numbers if each.kind == "learning_rate"]
        base = rates[0] if rates and rates[0] else 1.0
        after = scale_number("learning_rate", base, self.rule, self.ratio, self.duration)
        return [self._scaled(each, after / base) for each in numbers]

    def _scaled(self, number: _Number, rate: float) -> ScaledNumber:
        name, kind, value = number
        if kind in _LENGTHS:
            return self._length(number)
        sources = {
            change.number: (change.formula, f"{one.name}: {one.source}")
            for one in combine_rules(self.rule)
            for change in one.changes
        }
        if kind == "rest_learning_rate" and kind not in sources and "learning_rate" in sources:
            return ScaledNumber(name, value, value * rate, *sources["learning_rate"], number=kind)
        if kind not in sources:
            return ScaledNumber(name, value, value, number=kind)
        with errors.under("", **{kind: name}):
            after = scale_number(kind, value, self.rule, self.ratio, self.duration, rate)
        return ScaledNumber(name, value, after, *sources[kind], number=kind)

    def _length(self, number: _Number) -> ScaledNumber:
        """Scale a length: the run has the same examples, times the duration."""
        name, kind, value = number
        if kind in ("num_epochs", "stair_epochs"):
            return ScaledNumber(name, value, value * self.duration, "x d")
        warmup = rule_changes(self.rule).get("warmup_epochs")
        if kind == "warmup_steps" and (warmup is None or warmup.batch):
            return ScaledNumber(name, value, value)
        after = value * self.duration / self.ratio
        if kind == "num_steps":
            return ScaledNumber(name, value, math.ceil(after - 3e-9), "x d / k")
        return ScaledNumber(name, value, after, "x d / k")

    def regime(self) -> Iterator[str]:
        """Yield where the rules are said to hold, and whether that is so by the noise scale."""
        for rule in combine_rules(self.rule):
            if rule.regime == "noise":
                yield (
                    f"{rule.name} holds where noise dominates the gradient of a batch"
                    + self._held()
                )
            elif rule.regime:
                yield f"{rule.name} holds below the critical batch" + self._held()

    def _held(self) -> str:
        scale = self.noise_scale
        if scale is None:
            return "; the noise scale is not known here"
        if math.isinf(scale):
            return (
                ": the noise scale is infinite (no gradient is seen above the noise), so it holds"
            )
        shares = [scale / (scale + size) for size in (self.before, self.after)]
        told = (
            f": by the noise scale of {scale:.4g} examples, noise is {shares[0]:.0%} of the mean "
            f"square of the gradient at batch {self.before} and {shares[1]:.0%} at {self.after}"
        )
        verdict = "so it holds" if min(shares) > 0.5 else "so it does not hold"
        return f"{told}, {verdict}"


def _of_mapping(recipe: Mapping[str, float], scaling: _BatchChange) -> ScaledRecipe:
    """Scale the numbers of somebody's own loop."""
    for one in combine_rules(scaling.rule):
        named = {change.number for change in one.changes}
        fix = f"{one.name!r} scales {' and '.join(sorted(named))}; give at least one of them"
        require(not named or named & {*recipe}, "recipe", dict(recipe), fix, code="missing")
        of_sgd = "momentum" in recipe and "b2" not in recipe
        fix = f"{one.name!r} is for optimizers with b2; give b2, or "
        fix += one.without or "take another rule"
        fits = not (of_sgd and one.optimizers and "b2" in named)
        require(fits, "recipe", dict(recipe), fix, code="conflict")
    names = [name for name in recipe if name != "global_batch_size"]
    table = scaling.table([_Number(name, name, recipe[name]) for name in names])
    scaled = {**recipe, "global_batch_size": scaling.after}
    scaled |= {one.name: one.after for one in table}
    return _result(scaled, scaling, table, [*_out_of_range(table)], (), ())


def _of_config(config: TrainConfig, scaling: _BatchChange) -> ScaledRecipe:
    """Scale a config, with both of its phases."""
    new = copy.deepcopy(config)
    new.global_batch_size = scaling.after
    phases = config.phases()
    num_examples = _known_examples(phases[0])
    table = _phase_table(phases[0], scaling, num_examples)
    after = {one.name: one.after for one in table}
    _fill(new, new.schedule, after, scaling, scaling.after)
    _fill_optimizer(new.optimizer, after)
    outside = [*_too_large(scaling.after, num_examples), *_out_of_range(table)]

    if new.phase2 is not None:
        second = _second_change(phases[1], scaling)
        num_examples = _known_examples(phases[1])
        numbers = _phase_table(phases[1], second, num_examples)
        _fill_second(new, phases, numbers, second)
        own = _own_numbers(numbers, table)
        found = [*_too_large(second.after, num_examples), *_out_of_range(own)]
        outside += [f"phase2: {line}" for line in found]
        table += [dataclasses.replace(one, name=f"phase2: {one.name}") for one in own]
    flags = tuple(_flags(config_to_json(config), config_to_json(new)))
    beyond = tuple(
        f"the source of {one.name} does not treat {config.optimizer.name}"
        for one in combine_rules(scaling.rule)
        if config.optimizer.name in one.beyond
    )
    return _result(new, scaling, table, outside, beyond, flags)


def _second_change(phase: TrainConfig, scaling: _BatchChange) -> _BatchChange:
    """Return the change of the second phase's batch, in the same ratio."""
    size = phase.global_batch_size * scaling.after / scaling.before
    fix = f"the second phase would have batch {size:g}; give a whole multiple of its ratio"
    require(size == int(size), "global_batch_size", scaling.after, fix, code="conflict")
    return scaling._replace(before=phase.global_batch_size, after=int(size))


def _own_numbers(
    second: Sequence[ScaledNumber], first: Sequence[ScaledNumber]
) -> list[ScaledNumber]:
    """Return the numbers of a second phase, without those of the optimizer that are the first's."""
    known = {one.name: one for one in first if one.name.startswith("optimizer.")}
    return [one for one in second if one.name not in known or not _alike(one, known[one.name])]


def _alike(one: ScaledNumber, other: ScaledNumber) -> bool:
    return _is_close(one.before, other.before) and _is_close(one.after, other.after)


def _is_close(value: float, other: float) -> bool:
    return math.isclose(value, other, rel_tol=_ROUNDOFF)


def _phase_table(
    config: TrainConfig, scaling: _BatchChange, num_examples: int | None
) -> list[ScaledNumber]:
    """Return the numbers of a phase, at its own batch and at the new one.

    Args:
      config: The phase as a run of its own.
      scaling: The change of its batch.
      num_examples: Size of its training set; None if it is not known.
    """
    schedule = config.schedule
    size = config.global_batch_size
    rate = scale_learning_rate(
        schedule.base_learning_rate, schedule.base_batch_size, size, schedule.scaling_rule
    )
    numbers = [_Number("learning rate", "learning_rate", rate)]
    epochs = schedule.base_warmup_epochs
    if schedule.warmup_rule == "legw":
        epochs *= size / schedule.base_batch_size
    if schedule.warmup_steps is None and schedule.warmup_rule != "none" and epochs:
        numbers.append(_Number("warmup epochs", "warmup_epochs", epochs))

    optimizer = scale_optimizer(config.optimizer, schedule, size)
    for setting in optimizer_settings(optimizer):
        if setting.number == "rest_learning_rate":
            numbers.append(_Number("rest learning rate", setting.number, rate * setting.value))
        else:
            numbers.append(_Number(f"optimizer.{setting.field}", setting.number, setting.value))
    for name in _ALSO_KEPT:
        value = getattr(optimizer, name)
        numbers += [] if value is None else [_Number(f"optimizer.{name}", "", value)]

    for name in ("warmup_steps", "decay_steps"):
        value = getattr(schedule, name)
        numbers += [] if value is None else [_Number(f"schedule.{name}", name, value)]
    stairs = schedule.stair_epochs if schedule.decay in ("exponential", "step") else ()
    for place, epochs in enumerate(stairs):
        numbers.append(_Number(f"schedule.stair_epochs[{place}]", "stair_epochs", epochs))
    name = "num_epochs" if config.num_steps is None else "num_steps"
    numbers.append(_Number(name, name, getattr(config, name)))

    table = scaling.table(numbers)
    if schedule.start_step:
        table.append(_start_step(schedule.start_step, table, scaling))
    return [*table, *_in_steps(table, scaling, num_examples)]


def _start_step(start: int, table: Sequence[ScaledNumber], scaling: _BatchChange) -> ScaledNumber:
    """Scale the step at which the warmup begins, in proportion to its steps."""
    lengths = {one.name: one for one in table}
    ratio = scaling.duration / scaling.ratio
    formula = "x d / k"
    for name, steps in (("schedule.warmup_steps", 1.0), ("warmup epochs", 1 / scaling.ratio)):
        if name in lengths and lengths[name].before:
            ratio = steps * lengths[name].after / lengths[name].before
            formula = "as the steps of warmup"
    return ScaledNumber("schedule.start_step", start, round(start * ratio), formula)


def _known_examples(config: TrainConfig) -> int | None:
    """Return the size of the training set; None if it is neither known nor on this machine."""
    if not has_known_length(config.data):
        return None
    try:
        return len(known_source(config.data, config.global_batch_size).splits.train)
    except EnvironmentProblem:
        return None


def _in_steps(
    table: Sequence[ScaledNumber], scaling: _BatchChange, num_examples: int | None
) -> Iterator[ScaledNumber]:
    """Yield the lengths that a table gives in epochs in steps too, if the data set is known."""
    if num_examples is None:
        return
    units = [Units(num_examples, size) for size in (scaling.before, scaling.after)]
    for one in table:
        if one.name == "num_epochs":
            before = units[0].steps(one.before)
            after = units[1].steps(one.after)
            yield ScaledNumber("steps", before, after, f"num_epochs x {num_examples} / batch")
        elif one.name == "warmup epochs":
            before = units[0].warmup_steps(one.before)
            after = units[1].warmup_steps(one.after)
            formula = f"warmup epochs x {num_examples} / batch"
            yield ScaledNumber("warmup steps", before, after, formula)


def _fill(
    phase: Any,
    schedule: ScheduleConfig,
    after: Mapping[str, float],
    scaling: _BatchChange,
    base: int,
) -> None:
    """Write the length and the schedule of a phase into a config.

    Args:
      phase: The config that has the length.
      schedule: The config of the schedule.
      after: The numbers at the new batch, by their names in the table.
      scaling: The change of the phase's batch.
      base: The base batch to which the schedule's numbers are written.
    """
    ratio = base / scaling.after
    schedule.scaling_rule = scaling.rule
    schedule.base_batch_size = base
    changes = rule_changes(scaling.rule)
    power = changes["learning_rate"].batch if "learning_rate" in changes else 0.0
    schedule.base_learning_rate = after["learning rate"] * ratio**power
    if "warmup epochs" in after:
        change = changes.get("warmup_epochs")
        if change is not None:
            schedule.warmup_rule = "legw" if change.batch else "epochs"
        grows = schedule.warmup_rule == "legw"
        schedule.base_warmup_epochs = after["warmup epochs"] * (ratio if grows else 1)

    for name in ("warmup_steps", "decay_steps", "start_step"):
        if f"schedule.{name}" in after:
            setattr(schedule, name, after[f"schedule.{name}"])
    stairs = [name for name in after if name.startswith("schedule.stair_epochs[")]
    if stairs:
        schedule.stair_epochs = tuple(after[name] for name in stairs)
    for name in ("num_epochs", "num_steps"):
        if name in after:
            setattr(phase, name, after[name])


def _fill_optimizer(optimizer: OptimizerConfig, after: Mapping[str, float]) -> None:
    """Write the numbers at the new batch into an optimizer."""
    for setting in optimizer_settings(optimizer):
        value = after.get(f"optimizer.{setting.field}", setting.value)
        # The rest's rate is kept as a multiple of the matrices'.
        if setting.number == "rest_learning_rate" and after["learning rate"]:
            ratio = after["rest learning rate"] / after["learning rate"]
            value = setting.value if _is_close(ratio, setting.value) else ratio
        if value == setting.value:
            continue
        group, _, name = setting.field.rpartition(".")
        if group:
            optimizer.options[name] = value
        else:
            setattr(optimizer, name, value)


def _fill_second(
    new: TrainConfig,
    phases: Sequence[TrainConfig],
    numbers: Sequence[ScaledNumber],
    scaling: _BatchChange,
) -> None:
    """Write the second phase into a config whose optimizer has the numbers of the first.

    Both phases have one optimizer, so the base batch of the second is one from which the rule leads
    from the first phase's numbers to its own.

    Args:
      new: The config.
      phases: Both phases before the change.
      numbers: The numbers of the second phase.
      scaling: The change of its batch.
    """
    second = new.phase2
    assert second is not None
    second.global_batch_size = scaling.after
    after = {one.name: one.after for one in numbers}
    wanted = copy.deepcopy(_optimizer_of(phases[1]))
    _fill_optimizer(wanted, after)

    differing = []
    for base in _second_bases(phases, scaling):
        _fill(second, second.schedule, after, scaling, base)
        found = list(_differing(new, wanted, after["learning rate"]))
        if not found:
            return
        differing += found
    fix = f"no base batch of the second phase gives it {differing[0]} from the optimizer of the "
    fix += "first; scale each phase as a run of its own, or take another rule"
    raise UserError("rule", scaling.rule, fix, code="conflict")


def _optimizer_of(phase: TrainConfig) -> OptimizerConfig:
    """Return the optimizer of a phase, with the numbers at its batch."""
    return scale_optimizer(phase.optimizer, phase.schedule, phase.global_batch_size)


def _second_bases(phases: Sequence[TrainConfig], scaling: _BatchChange) -> Iterator[int]:
    """Yield the base batches at which the first phase's numbers may be those of the second."""
    yield scaling.after
    # Where both follow the rule, their numbers differ as those of two batches do.
    base = fractions.Fraction(scaling.after)
    for phase, power in zip(phases, (1, -1), strict=True):
        schedule = phase.schedule
        common = {*rule_changes(schedule.scaling_rule)} & {*rule_changes(scaling.rule)}
        if common - {"learning_rate", "warmup_epochs"}:
            base *= fractions.Fraction(phase.global_batch_size, schedule.base_batch_size) ** power
    if base.denominator == 1 and base != scaling.after:
        yield int(base)


def _differing(new: TrainConfig, wanted: OptimizerConfig, rate: float) -> Iterator[str]:
    """Yield the numbers that the second phase of a config would not have, with their values."""
    phase = new.phases()[1]
    schedule = phase.schedule
    size = phase.global_batch_size
    try:
        found = {one.field: one.value for one in optimizer_settings(_optimizer_of(phase))}
    except errors.UserError as error:  # the rule does not reach that far
        yield f"{error.field}"
        return
    for one in optimizer_settings(wanted):
        if not _is_close(found[one.field], one.value):
            yield f"optimizer.{one.field} = {one.value:.6g}"
    here = scale_learning_rate(
        schedule.base_learning_rate, schedule.base_batch_size, size, schedule.scaling_rule
    )
    if not _is_close(here, rate):
        yield f"the learning rate {rate:.6g}"


def _result(
    recipe: Any,
    scaling: _BatchChange,
    table: Sequence[ScaledNumber],
    outside: Sequence[str],
    beyond: tuple[str, ...],
    flags: tuple[str, ...],
) -> ScaledRecipe:
    sizes = (scaling.before, scaling.after)
    regime = (*scaling.regime(), *beyond)
    return ScaledRecipe(recipe, scaling.rule, sizes, tuple(table), regime, tuple(outside), flags)


def _too_large(size: int, num_examples: int | None) -> Iterator[str]:
    """Yield that a batch is larger than its training set, if it is."""
    if num_examples is not None and size > num_examples:
        yield f"batch {size} is larger than the training set, of {num_examples} examples"


def _out_of_range(table: Sequence[ScaledNumber]) -> Iterator[str]:
    """Yield what leaves its usual range."""
    after = {one.name: one.after for one in table}
    for one in table:
        if one.number == "b2" and one.after < min(_LEAST_B2, one.before):
            yield f"{one.name} = {one.after:.4g} is below {_LEAST_B2}: the second moment is noise"
    steps = next((one for one in table if one.name == "warmup steps"), None)
    if steps is not None and steps.before and not steps.after:
        yield "warmup steps = 0: the warmup is shorter than half a step"
    for warmup, whole in _PARTS_OF_LENGTHS:
        if {warmup, whole} <= {*after} and after[warmup] >= after[whole]:
            yield (
                f"{warmup} = {after[warmup]:.6g} is not shorter than {whole} = {after[whole]:.6g}: "
                "the warmup would not end"
            )
            break


def _flags(before: Any, after: Any, place: str = "config") -> Iterator[str]:
    """Yield the flags that change one config, as JSON data, to another."""
    if isinstance(before, dict) and isinstance(after, dict) and not place.endswith(".options"):
        for name in before:
            yield from _flags(before[name], after[name], f"{place}.{name}")
    elif before != after:
        yield f"--{place}={after}"
