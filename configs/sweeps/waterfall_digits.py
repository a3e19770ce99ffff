"""What does each part of a large-batch recipe add? Scikit-learn's digits at two batch sizes.

    lbopt sweep --config=configs/sweeps/waterfall_digits.py --workdir=runs/waterfall_digits

The study has the form of the step-by-step recipe of "The Limit of the Batch Size" (arXiv
2006.08517v1), whose increments are not known here. It starts from momentum with linear scaling, no
warmup and a constant rate, and adds one ingredient after another. Only the last ingredient is a
search; before it every arm runs at the rate that its rule gives from rates tuned at batch 64, those
of configs/digits_cnn.py, which also gives the network and the optimizers. Every run has 20 epochs:
320 steps at batch 64 and 20 at 1,024.

Rows (`:ROW`): other orders of the ingredients, because an ingredient adds less after another one
that has the same effect. A row may also name its order: `:legw-decay-adam-trust-smoothing-tuned`.

    (none)       decay, legw, adam, trust, smoothing, tuned
    trust-first  adam, trust, legw, decay, smoothing, tuned
    searched     the first order with the whole search in every arm
    smoke        tiny
"""

import copy

import common
import digits_cnn

from lbopt.config import (
    About,
    Arm,
    LossConfig,
    MeasureConfig,
    ScheduleConfig,
    SearchConfig,
    SweepConfig,
    TrainConfig,
)
from lbopt.errors import UserError

ORDERS = {
    "": ("decay", "legw", "adam", "trust", "smoothing", "tuned"),
    "trust-first": ("adam", "trust", "legw", "decay", "smoothing", "tuned"),
}
ROWS = (*ORDERS, "searched", "smoke")
SEARCH = SearchConfig(
    learning_rate_factors=(0.125, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0),
    seeds=(0, 1),
    widen_candidates=0,  # as its committed results were searched
)
AS_IT_IS = SearchConfig(learning_rate_factors=(1.0,))
NAMES = {
    "decay": "+ polynomial decay",
    "legw": "+ LEGW",
    "adam": "+ Adam's moments",
    "trust": "+ trust ratio",
    "smoothing": "+ label smoothing",
    "tuned": "+ tuned",
}


def get_config(arg: str = "") -> SweepConfig:
    """Return the study with the ingredients in the order of the row."""
    order = ORDERS.get("" if arg in ("searched", "smoke") else arg, tuple(arg.split("-")))
    if sorted(order) != sorted(NAMES):
        fix = f"use one of {', '.join(ROWS[1:])}, or all of {'-'.join(NAMES)} in any order"
        raise UserError("--config row", arg, fix, code="choice")

    arms = _arms(order)

    if arg == "searched":
        arms = [arm for arm in arms if arm.name != NAMES["tuned"]]
        for arm in arms:
            arm.search = None

    config = SweepConfig(
        name=f"waterfall_digits{':' * bool(arg)}{arg}",
        about=About(
            paper="The Limit of the Batch Size 2006.08517v1",
            status="measured here" if arg in ROWS[:3] else "not yet run",
        ),
        train=TrainConfig(
            name="waterfall_digits", num_epochs=20.0, model=digits_cnn.get_config().model
        ),
        arms=tuple(arms),
        global_batch_sizes=(64, 1024),
        search=SEARCH,
        final_seeds=common.final_seeds(10),
        waterfall=tuple(arm.name for arm in arms),
        measure=MeasureConfig(num_probes=0),
    )

    if arg == "smoke":
        common.make_small(config, batches=(512, 1024))
        config.train.num_epochs = 6.0
        config.arms[-1].search = SearchConfig(learning_rate_factors=(1.0, 2.0), widen_candidates=0)
    return config


def _arms(order: tuple[str, ...]) -> list[Arm]:
    momentum, linear = digits_cnn.OPTIMIZERS["momentum"]
    plain = ScheduleConfig(
        linear.base_learning_rate,
        base_batch_size=linear.base_batch_size,
        scaling_rule="linear",
        warmup_rule="none",
        decay="constant",
    )
    first = common.make_arm(
        "momentum, linear", (momentum, plain), loss=LossConfig(), search=AS_IT_IS
    )
    arms = [first]

    for name in order:
        arm = copy.deepcopy(arms[-1])
        arm.name = NAMES[name]
        _INGREDIENTS[name](arm)
        arms.append(arm)
    return arms


def _decay(arm: Arm) -> None:
    arm.schedule.decay = "polynomial"


def _legw(arm: Arm) -> None:
    arm.schedule.scaling_rule = "sqrt"
    arm.schedule.warmup_rule = "legw"
    arm.schedule.base_warmup_epochs = 0.25


def _adam(arm: Arm) -> None:
    _set_optimizer(arm, "adamw" if arm.optimizer.name == "momentum" else "lamb")


def _trust(arm: Arm) -> None:
    _set_optimizer(arm, "lars" if arm.optimizer.name == "momentum" else "lamb")


def _set_optimizer(arm: Arm, name: str) -> None:
    optimizer, schedule = digits_cnn.OPTIMIZERS[name]
    arm.optimizer = copy.deepcopy(optimizer)
    arm.schedule.base_learning_rate = schedule.base_learning_rate


def _smoothing(arm: Arm) -> None:
    arm.loss = LossConfig(label_smoothing=0.1)


def _tuned(arm: Arm) -> None:
    arm.search = None


_INGREDIENTS = {
    "decay": _decay,
    "legw": _legw,
    "adam": _adam,
    "trust": _trust,
    "smoothing": _smoothing,
    "tuned": _tuned,
}
