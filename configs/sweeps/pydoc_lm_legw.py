"""LEGW on a language model: its Penn Treebank application on the text that ships with Python.

    lbopt sweep --config=configs/sweeps/pydoc_lm_legw.py --workdir=runs/pydoc_lm_legw

Two LSTM layers as in PTB-small, a quarter as wide (50) and on Python's help topics (256 tokens in
the vocabulary, 4,269 windows of 32 tokens): plain gradient descent with a clip, 5 epochs, a linear
decay (LEGW's PTB: 13 or 55 epochs, exponential or polynomial decay, batch 20 to 640 [recalled 50%:
see configs/lstm_legw.py]); LAMB as in configs/pydoc_lstm.py. Perplexities are per token. Learning
rate and warmup are searched together, both as multiples of the values by each arm's rules. The
largest multiple of the rate is 2, because at 4 plain gradient descent at batch 16 stays at a
perplexity of 146 with three of five seeds.

Rows (`:ROW`): (none); `smoke`, tiny.
"""

import common
import pydoc_lstm

from lbopt.config import (
    About,
    Arm,
    DataConfig,
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

    descent = OptimizerConfig("momentum", momentum=0.0, max_grad_norm=0.25)
    lamb = pydoc_lstm.get_config().optimizer

    config = SweepConfig(
        name="pydoc_lm_legw",
        about=About(paper="LEGW 1901.08256v1, LSTM 1409.2329v5", status="measured here"),
        train=TrainConfig(
            name="pydoc_lm_legw",
            num_epochs=5.0,
            data=DataConfig("pydoc_lm", sequence_length=32, vocab_size=256),
            model=ModelConfig("lstm_lm", size="small", width_coefficient=0.25),
        ),
        arms=(
            Arm("SGD + LEGW", descent, common.legw(16.0, batch=16, warmup_epochs=0.05)),
            Arm("SGD + linear", descent, common.linear(16.0, batch=16, warmup_epochs=0.5)),
            Arm("LAMB + LEGW", lamb, common.legw(0.02, batch=16, warmup_epochs=0.05)),
        ),
        global_batch_sizes=(16, 32, 64, 128, 256),
        search=SearchConfig(
            learning_rate_factors=(0.25, 0.5, 1.0, 2.0),
            warmup_factors=(0.25, 0.5, 1.0, 2.0, 4.0),
            widen_candidates=0,  # as its committed results were searched
        ),
        final_seeds=common.final_seeds(5),
        limit_points=5.0,
        measure=MeasureConfig(num_probes=4, probe_parts=8),
    )

    if arg == "smoke":
        common.make_small(config, batches=(64, 128))
        config.train.num_epochs = 0.25
        config.train.model.width_coefficient = 0.02
        config.arms = config.arms[::2]
        config.search = SearchConfig(
            "successive_halving",
            learning_rate_range=(0.25, 4.0),
            num_candidates=3,
            min_fidelity=1 / 3,
            widen_candidates=1,
        )
        config.measure.num_probes = 1
        for arm in config.arms:
            arm.schedule.base_warmup_epochs = 0.01
    return config
