"""Is a constant number of warmup steps the right transfer? LEGW's MNIST-LSTM, on digits.

    lbopt sweep --config=configs/sweeps/digits_lstm_legw.py --workdir=runs/digits_lstm_legw

LEGW (arXiv 1901.08256v1): batch x k means learning rate x sqrt(k) and warmup epochs x k, so a
constant number of warmup steps [recalled 97%: the abstract has the names and the square root]. One
LSTM layer reads an image of scikit-learn's digits row by row, with momentum as in the paper
[recalled 65%: not read there] and a clip. Learning rate and warmup are searched together, both as
multiples of LEGW's values. If constant steps are the right transfer, the best warmup stays at one
multiple; with constant epochs the multiple would halve with each doubling of the batch. The runs
have 40 epochs at batches of 16 to 1,024, the whole training set: 2,560 to 40 steps.

Rows (`:ROW`): (none); `smoke`, tiny.
"""

import common

from lbopt.config import (
    About,
    Arm,
    MeasureConfig,
    ModelConfig,
    OptimizerConfig,
    SearchConfig,
    SweepConfig,
    TrainConfig,
)
from lbopt.errors import require_choice

ROWS = ("", "smoke")


def get_config(arg: str = "") -> SweepConfig:
    """Return the study, or a tiny one (`smoke`)."""
    if arg:
        require_choice("--config row", arg, ROWS[1:])

    momentum = OptimizerConfig("momentum", max_grad_norm=1.0)
    lamb = OptimizerConfig("lamb", weight_decay=0.01)

    config = SweepConfig(
        name="digits_lstm_legw",
        about=About(paper="LEGW 1901.08256v1", status="measured here"),
        train=TrainConfig(
            name="digits_lstm_legw", num_epochs=40.0, model=ModelConfig("lstm", hidden=64)
        ),
        arms=(
            Arm("Momentum + LEGW", momentum, common.legw(0.4, warmup_epochs=0.5)),
            Arm("Momentum + linear", momentum, common.linear(0.3, warmup_epochs=2.0)),
            Arm("LAMB + LEGW", lamb, common.legw(0.02, warmup_epochs=0.5)),
        ),
        global_batch_sizes=(16, 32, 64, 128, 256, 512, 1024),
        search=SearchConfig(
            learning_rate_factors=(0.25, 0.5, 1.0, 2.0, 4.0),
            warmup_factors=(0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0),
            seeds=(0, 1),
            widen_candidates=0,  # as its committed results were searched
        ),
        final_seeds=common.final_seeds(5),
        measure=MeasureConfig(num_probes=12, probe_parts=8),
    )

    if arg == "smoke":
        common.make_small(config, batches=(256, 1024))
        config.train.num_epochs = 4.0
        config.train.model.hidden = 8
        config.search = SearchConfig(
            learning_rate_factors=(1.0,), warmup_factors=(0.5, 1.0), widen_candidates=0
        )
        config.measure.num_probes = 2
        config.arms = config.arms[::2]
        for arm in config.arms:
            arm.schedule.base_warmup_epochs = 0.125
    return config
