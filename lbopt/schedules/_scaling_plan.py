"""Learning rate, warmup and run length at each batch size under given scaling rules."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Literal

from lbopt import _scalars
from lbopt._shown import show
from lbopt.errors import UserError, require, require_choice
from lbopt.schedules import _rules, _scaling, _units

WarmupRule = Literal["legw", "epochs", "none"]
WARMUP_RULES = ("legw", "epochs", "none")


@dataclasses.dataclass(frozen=True)
class ScaledBatch:
    """Schedule settings at one batch size.

    Attributes:
      global_batch_size: Examples per optimizer step.
      learning_rate: Peak learning rate.
      warmup_epochs: Length of the warmup in epochs.
      warmup_steps: Length of the warmup in optimizer steps, rounded to the nearest.
      total_steps: Optimizer steps of the run, rounded up.

    >>> batch = scale_batch(1024, 0.01, 256, 0.1, num_examples=50_000, num_epochs=10)
    >>> batch.learning_rate, batch.warmup_epochs, batch.warmup_steps, batch.total_steps
    (0.02, 0.4, 20, 489)
    """

    global_batch_size: int
    learning_rate: float
    warmup_epochs: float
    warmup_steps: int
    total_steps: int


def scale_batch(
    global_batch_size: int,
    base_learning_rate: float,
    base_batch_size: int,
    base_warmup_epochs: float,
    num_examples: int,
    num_epochs: float,
    rule: str = "sqrt",
    warmup_rule: WarmupRule = "legw",
) -> ScaledBatch:
    """Apply the rules at one batch size; the arguments are those of `scaling_plan`.

    The caller checks that the warmup ends before training does.

    Args:
      global_batch_size: Examples per optimizer step.
      base_learning_rate: Peak learning rate at `base_batch_size`.
      base_batch_size: Batch size that the base values belong to.
      base_warmup_epochs: Length of the warmup in epochs at `base_batch_size`.
      num_examples: Number of examples in the training set.
      num_epochs: Length of the run in epochs.
      rule: Scaling rule of the learning rate, see `scale_learning_rate`.
      warmup_rule: "legw" (warmup epochs grow with the batch), "epochs" (constant) or "none".

    Raises:
      UserError: If an argument is out of range; names the argument.

    >>> batch = scale_batch(32768, 0.005, 512, 0.3125, num_examples=1_281_167, num_epochs=90)
    >>> batch.learning_rate, batch.warmup_epochs, batch.warmup_steps, batch.total_steps
    (0.04, 20.0, 782, 3519)
    """
    require_choice("warmup_rule", warmup_rule, WARMUP_RULES)

    base_warmup_epochs = _scalars.checked("base_warmup_epochs", base_warmup_epochs)
    num_epochs = _scalars.checked("num_epochs", num_epochs, "a finite number > 0", lambda n: n > 0)
    base_batch_size = _scalars.whole("base_batch_size", base_batch_size)
    global_batch_size = _scalars.whole("global_batch_size", global_batch_size)

    rate = _scaling.scale_learning_rate(
        base_learning_rate, base_batch_size, global_batch_size, rule
    )
    here, base = (_units.Units(num_examples, size) for size in (global_batch_size, base_batch_size))
    epochs = {
        "legw": base_warmup_epochs * global_batch_size / base_batch_size,
        "epochs": base_warmup_epochs,
        "none": 0.0,
    }
    # LEGW (linear-epoch gradual warmup) keeps warmup steps constant. Computing them at the base
    # batch gives the same number at every batch size; scaled epochs could round differently.
    steps = (
        base.warmup_steps(base_warmup_epochs)
        if warmup_rule == "legw"
        else here.warmup_steps(epochs[warmup_rule])
    )
    total = here.steps(num_epochs)
    return ScaledBatch(global_batch_size, rate, epochs[warmup_rule], steps, total)


def check_warmup_rule(rule: str, warmup_rule: str) -> None:
    """Raise `UserError` for a rule of the warmup that contradicts the scaling rule.

    Args:
      rule: Scaling rule, or rules joined by "+".
      warmup_rule: "legw" or "epochs".

    >>> check_warmup_rule("sde", "legw")
    Traceback (most recent call last):
    lbopt.errors.UserError: warmup_rule = 'legw': the scaling rule 'sde' has 'epochs'; use that, \
or another scaling rule
    """
    change = _rules.rule_changes(rule).get("warmup_epochs")
    if change is not None:
        own = "legw" if change.batch else "epochs"
        fix = f"the scaling rule {rule!r} has {own!r}; use that, or another scaling rule"
        require(warmup_rule == own, "warmup_rule", warmup_rule, fix, code="conflict")


def scaling_plan(
    global_batch_sizes: Sequence[int],
    base_learning_rate: float,
    base_batch_size: int,
    base_warmup_epochs: float,
    num_examples: int,
    num_epochs: float,
    rule: str = "sqrt",
    warmup_rule: WarmupRule = "legw",
) -> tuple[ScaledBatch, ...]:
    """Print and return the learning rate, warmup and run length for a list of batch sizes.

    LEGW is the linear-epoch gradual warmup of You et al., arXiv 1901.08256v1.

    Args:
      global_batch_sizes: Batch sizes, in examples; the table has one line for each.
      base_learning_rate: Peak learning rate tuned at `base_batch_size`.
      base_batch_size: Batch size at which the base values were tuned.
      base_warmup_epochs: Length of the warmup at the base batch size, in epochs.
      num_examples: Size of the training set.
      num_epochs: Length of the run at every batch size.
      rule: Scaling rule of the learning rate, see `scale_learning_rate`.
      warmup_rule: "legw" (warmup epochs grow with the batch, so warmup steps are constant),
        "epochs" (constant epochs) or "none".

    Returns:
      The settings at each batch size, in the order given.

    Raises:
      UserError: If an argument is out of range, if the warmup rule contradicts the scaling rule, or
        if a warmup does not end before training does; names the argument.

    >>> _ = scaling_plan(
    ...     (512, 4096, 32768), 0.005, 512, 0.3125, num_examples=1_281_167, num_epochs=90
    ... )
     batch  learning rate  warmup epochs  warmup steps  total steps
       512          0.005         0.3125           782       225206
      4096      0.0141421            2.5           782        28151
     32768           0.04             20           782         3519

    References:
      The example is LAMB on ResNet-50 with 782 warmup steps at every batch size:
      NUS-HPC-AI-Lab/pytorch-lamb@638a309ec1d64adeffe901bb64c7f009aae6c1ab:README.md.
    """
    if not isinstance(global_batch_sizes, Sequence) or not global_batch_sizes:
        raise UserError("global_batch_sizes", global_batch_sizes, "give a list of batch sizes")
    if warmup_rule != "none":
        check_warmup_rule(rule, warmup_rule)

    batches = tuple(
        scale_batch(
            size,
            base_learning_rate,
            base_batch_size,
            base_warmup_epochs,
            num_examples,
            num_epochs,
            rule,
            warmup_rule,
        )
        for size in global_batch_sizes
    )

    # Check all batch sizes before printing, so that a refused plan prints no partial table.
    for batch in batches:
        if batch.warmup_steps >= batch.total_steps:
            fix = (
                f"the rule {warmup_rule!r} makes {batch.warmup_steps} warmup steps at batch "
                f"{batch.global_batch_size}, where training has {batch.total_steps}; warm up for "
                "less, train for longer, or stop at a smaller batch"
            )
            raise UserError("base_warmup_epochs", base_warmup_epochs, fix, code="conflict")

    show(" batch  learning rate  warmup epochs  warmup steps  total steps")
    for batch in batches:
        show(
            f"{batch.global_batch_size:>6}  {batch.learning_rate:>13.6g}  "
            f"{batch.warmup_epochs:>13.6g}  {batch.warmup_steps:>12}  {batch.total_steps:>11}"
        )
    return batches
