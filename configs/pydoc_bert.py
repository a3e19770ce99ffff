"""BERT-tiny on Python's help topics, which need no download: masked tokens and next sentences.

    lbopt train --config=configs/pydoc_bert.py:lamb-512 --workdir=runs/pydoc_bert

Rows (`:ROW`): <optimizer>-<global batch size>, the optimizer is lamb; `smoke` is tiny.
Hardware and time: about ten minutes of CPU time per run. `scripts/families` runs all rows, and
writes their scores to docs/results/families.json, beside the baseline of counting
(`python -m lbopt.data.baselines`).
"""

import common

from lbopt.config import DataConfig, ModelConfig, OptimizerConfig, TrainConfig

WARMUP_EPOCHS = 1.0
OPTIMIZERS = {
    "lamb": (
        OptimizerConfig("lamb", weight_decay=0.01),
        common.legw(0.01, warmup_epochs=WARMUP_EPOCHS),
    ),
}
PAPER = "BERT 1810.04805v2, LAMB 1904.00962v5, LEGW 1901.08256v1"
MEASURED = ("64", "512")
"""The batch sizes that scripts/families runs."""
ROWS = common.rows_of(OPTIMIZERS, MEASURED)


def get_config(arg: str = "lamb-256") -> TrainConfig:
    """Return the row `<optimizer>-<global batch size>`, or `smoke`."""
    if arg == "smoke":
        config = common.shorten(get_config("lamb-128"), num_epochs=1.0)
        config.schedule.base_warmup_epochs = 0.1
        return config

    config = common.measured_row("pydoc_bert", arg or "lamb-256", PAPER, OPTIMIZERS, MEASURED)
    config.num_epochs = 100.0
    config.data = DataConfig("pydoc_mlm")
    config.model = ModelConfig(
        "bert", size="tiny", max_length=64, dropout_rate=0.0, attention_dropout_rate=0.0
    )
    common.set_intervals(config, steps=200, log_steps=20)
    return config
