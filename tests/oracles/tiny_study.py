"""A study small enough to run in seconds."""

from lbopt.config import (
    Arm,
    ModelConfig,
    OptimizerConfig,
    ScheduleConfig,
    SearchConfig,
    SweepConfig,
    TrainConfig,
)


def make_config(**changes):
    legw = {"base_batch_size": 64, "warmup_rule": "legw", "base_warmup_epochs": 0.125}
    config = SweepConfig(
        name="tiny",
        train=TrainConfig(num_epochs=3.0, model=ModelConfig("mlp", (16,))),
        arms=(
            Arm(
                "momentum",
                OptimizerConfig("momentum"),
                ScheduleConfig(0.05, scaling_rule="linear", warmup_rule="none"),
            ),
            Arm("lamb", OptimizerConfig("lamb", weight_decay=0.01), ScheduleConfig(0.02, **legw)),
        ),
        global_batch_sizes=(128, 1024),
        search=SearchConfig(learning_rate_factors=(0.5, 1.0, 2.0), widen_candidates=0),
        final_seeds=(7, 8),
        trials_per_program=3,
    )

    for name, value in changes.items():
        setattr(config, name, value)
    if config.trial_batching == "none" or config.trial_devices == "all":
        config.trials_per_program = SweepConfig.trials_per_program  # it has no effect there

    config.validate()
    return config
