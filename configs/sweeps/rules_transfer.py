"""What does it cost not to search again when the batch grows 16 and 64 times?

    lbopt prepare fashion_mnist
    lbopt sweep --config=configs/sweeps/rules_transfer.py --workdir=runs/rules_transfer

Protocol. Each rule gets AdamW's numbers at batch 64 and runs as it says at 16 and 64 times that:
linear, the square root with the same epochs of warmup, LEGW (the square root and the same steps of
warmup), the rule of the stochastic differential equation (in its form with half-lives, as 1 - b1
times 16 is more than 1), and the square root with a half-life of b2 in examples. Two arms search
the learning rate at every batch size, one with each kind of warmup, and up to four rates more where
the best lies at an edge. Six fresh seeds of each; the loss against the arm that searches, with the
same warmup if there is one, is the cost of the rule. It needs no search if the 95 % intervals of
that cost, at all batch sizes together, stay within the margin of the study. The rate at batch 64 is
our own choice; the arms that search show at batch 64 what is left to gain.

Power. If seeds vary by 0.37 points, the intervals of six seeds reach 0.61 points to either side, so
a rule whose measured cost is 0.39 points or less is found to need no search. By
`lbopt.report.study.detectable_difference(6, 0.371, 3)`, a cost of 0.84 points at one of 3 batch
sizes is told apart from none with power 0.8. In `lm` the intervals of five seeds reach 1.9 standard
deviations to either side: at a measured cost of 0, seeds have to vary by less than half a percent
of the loss.

Rows (`:ROW`):

    (none)  Fashion-MNIST, a perceptron of 128 hidden units, 19.99 epochs; margin one point; 12
            minutes on 2 CPU cores
    lm      a decoder of 1 M parameters on the Brown corpus, 0.25 M tokens, at 256, 4,096 and 16,384
            tokens a step; five seeds, margin one percent of the loss; an hour on 2 CPU cores, as
            `lbopt sweep` tells beforehand. Its rate at 256 tokens is the best one of
            configs/sweeps/lm_critical.py:brown-250k there
    small   Fashion-MNIST in 4.9 epochs, four seeds; 3 minutes on 2 CPU cores
    smoke   tiny, on scikit-learn's digits
"""

import copy

import common
import fashion_limit
import lm_critical

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

ROWS = ("", "lm", "small", "smoke")
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

    searched = [_arm(f"{name}, searched", *RULES[name]) for name in ("sqrt", "LEGW")]
    kept = [_arm(f"as by {name}", *rules, search=AS_IT_IS) for name, rules in RULES.items()]
    config = SweepConfig(
        name=f"rules_transfer{':' * bool(arg)}{arg}",
        about=About(
            paper="LEGW 1901.08256v1, Malladi et al. 2205.10287v3, Marek et al. 2507.07101v2",
            note="Own choice: network, batch sizes, epochs, base numbers, margin, seeds.",
            status="measured here" if arg in ("", "small") else "not yet run",
        ),
        train=TrainConfig(
            name="rules_transfer",
            num_epochs=fashion_limit.IMAGES / 50_000,
            data=common.fashion_mnist(),
            model=copy.deepcopy(fashion_limit.PERCEPTRON),
            eval_global_batch_size=10_000,
        ),
        arms=(*searched, *kept),
        global_batch_sizes=(BATCH, 16 * BATCH, 64 * BATCH),
        search=copy.deepcopy(fashion_limit.SEARCH),
        final_seeds=common.final_seeds(6),
    )

    if arg == "lm":
        _use_text(config)
    if arg in ("small", "smoke"):
        config.train.num_epochs = 15 * 16384 / 50_000
        config.final_seeds = common.final_seeds(4)
    if arg == "smoke":
        common.make_small(config, batches=(64, 1024))
        config.train.data = DataConfig("digits")
        config.train.eval_global_batch_size = 256
        config.arms = config.arms[::2][:2]
        config.search = SearchConfig(learning_rate_factors=(0.5, 1.0), widen_candidates=0)
    return config


def _use_text(config: SweepConfig) -> None:
    """Train the model of configs/sweeps/lm_critical.py on its corpus of the row `brown-250k`."""
    study = lm_critical.get_config("brown-250k")
    for name in ("data", "model", "num_epochs", "eval_global_batch_size"):
        setattr(config.train, name, getattr(study.train, name))
    config.global_batch_sizes = (2, 32, 128)
    config.metric = study.metric
    config.microstep_size = study.microstep_size
    config.final_seeds = study.final_seeds
    for arm in config.arms:
        arm.schedule.base_learning_rate = 0.0028
        arm.schedule.base_batch_size = 2
        arm.schedule.base_warmup_epochs = 0.0015
        arm.optimizer.weight_decay = 0.1


def _arm(name: str, scaling_rule: str, warmup_rule: str, search: SearchConfig | None = None) -> Arm:
    schedule = ScheduleConfig(
        0.002,
        base_batch_size=BATCH,
        scaling_rule=scaling_rule,
        warmup_rule=warmup_rule,
        base_warmup_epochs=0.05,
    )
    optimizer = OptimizerConfig("adamw", weight_decay=0.01)
    return common.make_arm(name, (optimizer, schedule), search=search)
