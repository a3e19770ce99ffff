"""An LSTM language model on Python's help topics, which need no download.

    lbopt train --config=configs/pydoc_lstm.py:lamb-256 --workdir=runs/pydoc_lstm

Rows (`:ROW`): <optimizer>-<global batch size>, the optimizer is lamb; `smoke` is tiny.
Hardware and time: about eight minutes of CPU time per run. `scripts/families` runs all rows, and
writes their scores to docs/results/families.json, beside the perplexity of an interpolated trigram
(`python -m lbopt.data.baselines`).
"""

import common

from lbopt.config import DataConfig, ModelConfig, OptimizerConfig, TrainConfig

WARMUP_EPOCHS = 0.5
OPTIMIZERS = {
    "lamb": (
        OptimizerConfig("lamb", weight_decay=0.01, b2=0.99),
        common.legw(0.02, warmup_epochs=WARMUP_EPOCHS),
    ),
}
PAPER = "LSTM 1409.2329v5, LEGW 1901.08256v1, LAMB 1904.00962v5"
MEASURED = ("64", "256")
"""The batch sizes that scripts/families runs."""
ROWS = common.rows_of(OPTIMIZERS, MEASURED)


def get_config(arg: str = "lamb-64") -> TrainConfig:
    """Return the row `<optimizer>-<global batch size>`, or `smoke`."""
    if arg == "smoke":
        config = common.shorten(get_config("lamb-128"), num_epochs=1.0)
        config.schedule.base_warmup_epochs = 0.1
        return config

    config = common.measured_row("pydoc_lstm", arg or "lamb-64", PAPER, OPTIMIZERS, MEASURED)
    config.num_epochs = 36.0
    config.data = DataConfig("pydoc_lm", sequence_length=64, vocab_size=256)
    config.model = ModelConfig("lstm_lm", size="small", dropout_rate=0.3)
    config.checkpoint.best_metric = "eval/loss"
    common.set_intervals(config, steps=200, log_steps=20)
    return config
