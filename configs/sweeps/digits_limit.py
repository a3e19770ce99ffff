"""How far does the batch size go on scikit-learn's digits?

    lbopt sweep --config=configs/sweeps/digits_limit.py --workdir=runs/digits_limit

Five optimizers, each with its usual scaling and warmup rules, run 20 epochs at batches of 16 to
1,024, the whole training set: 1,280 to 20 optimizer steps. The gradient noise of the final runs is
measured.

Rows (`:ROW`): (none); `target`, the fewest steps to 97 % validation accuracy, at constant rates, in
up to 40 epochs; `smoke`, tiny.
"""

from lbopt.config import (
    About,
    Arm,
    MeasureConfig,
    ModelConfig,
    OptimizerConfig,
    ScheduleConfig,
    SearchConfig,
    SweepConfig,
    TrainConfig,
)
from lbopt.errors import require_choice

ROWS = ("", "target", "smoke")


def get_config(arg: str = "") -> SweepConfig:
    """Return the study: of accuracy, of steps to a target (`target`), or a tiny one (`smoke`)."""
    if arg:
        require_choice("--config row", arg, ROWS[1:])

    epochs = {"base_batch_size": 64, "warmup_rule": "epochs", "base_warmup_epochs": 1.0}
    legw = {
        "base_batch_size": 64,
        "warmup_rule": "legw",
        "base_warmup_epochs": 0.25,
        "scaling_rule": "sqrt",
    }

    config = SweepConfig(
        name="digits_limit",
        about=About(
            paper="LEGW 1901.08256v1, The Limit of the Batch Size 2006.08517v1",
            status="measured here",
        ),
        train=TrainConfig(
            name="digits_limit",
            num_epochs=20.0,
            model=ModelConfig("cnn", (16, 32), 64, batch_norm_momentum=0.8),
        ),
        arms=(
            Arm(
                "Momentum + linear",
                OptimizerConfig("momentum", weight_decay=1e-4),
                ScheduleConfig(0.05, scaling_rule="linear", **epochs),
            ),
            Arm(
                "Adam + sqrt",
                OptimizerConfig("adam"),
                ScheduleConfig(0.008, scaling_rule="sqrt", **epochs),
            ),
            Arm(
                "AdamW + sqrt",
                OptimizerConfig("adamw", weight_decay=0.01),
                ScheduleConfig(0.008, scaling_rule="sqrt", **epochs),
            ),
            Arm(
                "LARS + LEGW",
                OptimizerConfig("lars", weight_decay=1e-4),
                ScheduleConfig(4.0, **legw),
            ),
            Arm(
                "LAMB + LEGW",
                OptimizerConfig("lamb", weight_decay=0.01),
                ScheduleConfig(0.02, **legw),
            ),
        ),
        global_batch_sizes=(16, 32, 64, 128, 256, 512, 1024),
        search=SearchConfig(learning_rate_factors=(0.125, 0.25, 0.5, 1.0, 2.0, 4.0), seeds=(0, 1)),
        final_seeds=(100, 101, 102, 103, 104, 105),
        measure=MeasureConfig(num_probes=6),
    )

    if arg == "target":
        config.name = "digits_limit:target"
        train = config.train
        train.num_epochs = 40.0
        train.eval_every_epochs = 0.25
        train.target_metric = "eval/accuracy"
        train.target_value = 0.97
        train.stop_at_target = True
        for arm in config.arms:
            arm.schedule.decay = "constant"

    if arg == "smoke":
        config.name = "digits_limit:smoke"
        config.train.num_epochs = 8.0
        config.about.status = "not yet run"
        config.arms = config.arms[-2:]
        config.global_batch_sizes = (128, 1024)
        config.search = SearchConfig(learning_rate_factors=(0.5, 1.0))
        config.final_seeds = (100, 101)
        config.measure.num_probes = 2
    return config
