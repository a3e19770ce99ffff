"""How far does the batch size go on scikit-learn's digits?

    lbopt sweep --config=configs/sweeps/digits_limit.py --workdir=runs/digits_limit

Five optimizers, each with its usual scaling and warmup rules, run 20 epochs at batches of 16 to
1,024, the whole training set: 1,280 to 20 optimizer steps. Network, optimizers and rules are those
of configs/digits_cnn.py. The gradient noise of the final runs is measured.

Rows (`:ROW`): (none); `target`, the fewest steps to 97 % validation accuracy, at constant rates, in
up to 40 epochs; `smoke`, tiny.
"""

import common
import digits_cnn

from lbopt.config import About, MeasureConfig, SearchConfig, SweepConfig, TrainConfig
from lbopt.errors import require_choice

ROWS = ("", "target", "smoke")
ARMS = {
    "Momentum + linear": "momentum",
    "Adam + sqrt": "adam",
    "AdamW + sqrt": "adamw",
    "LARS + LEGW": "lars",
    "LAMB + LEGW": "lamb",
}
"""Optimizer of configs/digits_cnn.py that each arm runs."""


def get_config(arg: str = "") -> SweepConfig:
    """Return the study: of accuracy, of steps to a target (`target`), or a tiny one (`smoke`)."""
    if arg:
        require_choice("--config row", arg, ROWS[1:])

    recipe = digits_cnn.get_config()
    config = SweepConfig(
        name="digits_limit",
        about=About(
            paper="LEGW 1901.08256v1, The Limit of the Batch Size 2006.08517v1",
            status="measured here",
        ),
        train=TrainConfig(name="digits_limit", num_epochs=recipe.num_epochs, model=recipe.model),
        arms=tuple(
            common.make_arm(name, digits_cnn.OPTIMIZERS[optimizer])
            for name, optimizer in ARMS.items()
        ),
        global_batch_sizes=(16, 32, 64, 128, 256, 512, 1024),
        search=SearchConfig(learning_rate_factors=(0.125, 0.25, 0.5, 1.0, 2.0, 4.0), seeds=(0, 1)),
        final_seeds=common.final_seeds(6),
        measure=MeasureConfig(num_probes=6),
    )

    if arg == "target":
        config.name = "digits_limit:target"
        config.search.widen_candidates = 0  # as its committed results were searched
        train = config.train
        train.num_epochs = 40.0
        train.eval_every_epochs = 0.25
        train.target_metric = "eval/accuracy"
        train.target_value = 0.97
        train.stop_at_target = True
        for arm in config.arms:
            arm.schedule.decay = "constant"

    if arg == "smoke":
        common.make_small(config, batches=(128, 1024))
        config.train.num_epochs = 8.0
        config.arms = config.arms[-2:]
        config.search = SearchConfig(learning_rate_factors=(0.5, 1.0), widen_candidates=1)
        config.measure.num_probes = 2
    return config
