"""What does it cost not to search again when the batch grows 16 and 64 times?

    lbopt prepare fashion_mnist
    lbopt sweep --config=configs/sweeps/rules_transfer.py --workdir=runs/rules_transfer

Protocol. AdamW's numbers belong to batch 64, where they were tuned on validation. One arm searches
its learning rate again at every batch size. Each of the others runs as its rule says: linear, the
square root with the same epochs of warmup, LEGW (the square root and the same steps of warmup), the
rule of the stochastic differential equation (in its form with half-lives, as 1 - b1 times 16 is
more than 1), and the square root with a half-life of b2 in tokens or examples. Five fresh seeds of
each; the loss against the arm that searches is the cost of the rule. A rule needs no search if the
95 % interval of that cost, at all batch sizes together, stays within the margin of the study.

Power, by `lbopt check`: at one batch size 5 seeds show a difference of 1.1 points between two of 6
arms with power 0.8, if seeds vary by 0.37 points.

Rows (`:ROW`):

    (none)  Fashion-MNIST, a perceptron of 128 hidden units, 20 epochs; margin one point
    small   the same in 5 epochs; within 20 minutes on 2 CPU cores
    smoke   tiny, on scikit-learn's digits
"""

import copy

import common
import fashion_limit

from lbopt.config import (
    About,
    Arm,
    DataConfig,
    OptimizerConfig,
    ScheduleConfig,
    SearchConfig,
    SweepConfig,
    TrainConfig,
)
from lbopt.errors import require_choice

ROWS = ("", "small", "smoke")
BATCH = 64
RULES = {
    "linear": ("linear", "epochs"),
    "sqrt": ("sqrt", "epochs"),
    "LEGW": ("sqrt", "legw"),
    "SDE, half-lives": ("sde_half_life", "epochs"),
    "sqrt, half-life of b2": ("sqrt+token_half_life", "epochs"),
}
"""Scaling rule and warmup rule of each arm without a search."""
AS_IT_IS = SearchConfig(learning_rate_factors=(1.0,))


def get_config(arg: str = "") -> SweepConfig:
    """Return the study of the row."""
    if arg:
        require_choice("--config row", arg, ROWS[1:])

    searched = _arm("searched", *RULES["sqrt"])
    kept = [_arm(f"as by {name}", *rules, search=AS_IT_IS) for name, rules in RULES.items()]
    config = SweepConfig(
        name=f"rules_transfer{':' * bool(arg)}{arg}",
        about=About(
            paper="LEGW 1901.08256v1, Malladi et al. 2205.10287v3, Marek et al. 2507.07101v2",
            note="Own choice: network, batch sizes, epochs, base numbers, margin, seeds.",
            status="not yet run",
        ),
        train=TrainConfig(
            name="rules_transfer",
            num_epochs=20.0,
            data=common.whole_images("fashion_mnist", "train[:50000]", validation="train[50000:]"),
            model=copy.deepcopy(fashion_limit.PERCEPTRON),
            eval_global_batch_size=10_000,
        ),
        arms=(searched, *kept),
        global_batch_sizes=(BATCH, 16 * BATCH, 64 * BATCH),
        search=SearchConfig(learning_rate_factors=(0.5, 1.0, 2.0)),
        final_seeds=common.final_seeds(5),
    )

    if arg in ("small", "smoke"):
        config.train.num_epochs = 5.0
    if arg == "smoke":
        common.make_small(config, batches=(64, 1024))
        config.train.data = DataConfig("digits")
        config.train.eval_global_batch_size = 256
        config.arms = config.arms[:2]
        config.search = SearchConfig(learning_rate_factors=(0.5, 1.0), widen_candidates=0)
    return config


def _arm(name: str, scaling_rule: str, warmup_rule: str, search: SearchConfig | None = None) -> Arm:
    schedule = ScheduleConfig(
        0.004,
        base_batch_size=BATCH,
        scaling_rule=scaling_rule,
        warmup_rule=warmup_rule,
        base_warmup_epochs=0.05,
    )
    optimizer = OptimizerConfig("adamw", weight_decay=0.01)
    return common.make_arm(name, (optimizer, schedule), search=search)
