"""An LSTM language model on Python's help topics, which need no download.

    lbopt train --config=configs/pydoc_lstm.py:lamb-256 --workdir=runs/pydoc_lstm

Rows (`:ROW`): <optimizer>-<global batch size>, the optimizer is lamb; `smoke` is tiny.
Hardware and time: about eight minutes of CPU time per run. Test perplexity of one run each (2-core
CPU, Python 3.11, JAX 0.10.2):

    batch        64       256    interpolated trigram (python -m lbopt.data.baselines)
    lamb      14.18     13.89    18.11
"""

import copy

from lbopt.config import (
    About,
    CheckpointConfig,
    DataConfig,
    ModelConfig,
    OptimizerConfig,
    ScheduleConfig,
    TrainConfig,
    parse_row,
)

LEGW = {
    "base_batch_size": 64,
    "scaling_rule": "sqrt",
    "warmup_rule": "legw",
    "base_warmup_epochs": 0.5,
}
OPTIMIZERS = {
    "lamb": (OptimizerConfig("lamb", weight_decay=0.01, b2=0.99), ScheduleConfig(0.02, **LEGW)),
}
MEASURED = ("64", "256")
"""The batch sizes of the table above."""
ROWS = (*(f"{name}-{size}" for name in OPTIMIZERS for size in MEASURED), "smoke")


def get_config(arg: str = "lamb-64") -> TrainConfig:
    """Return the row `<optimizer>-<global batch size>`, or `smoke`."""
    if arg == "smoke":
        config = get_config("lamb-128")
        config.num_epochs = 1.0
        config.log_every_steps = 2
        config.eval_every_steps = 8
        config.schedule.base_warmup_epochs = 0.1
        config.checkpoint.every_steps = 4
        return config

    name, size = parse_row(arg or "lamb-64", OPTIMIZERS)
    optimizer, schedule = copy.deepcopy(OPTIMIZERS[name])
    return TrainConfig(
        name=f"pydoc_lstm:{name}-{size}",
        about=About(
            paper="LSTM 1409.2329v5, LEGW 1901.08256v1, LAMB 1904.00962v5",
            status="measured here" if str(size) in MEASURED else "not yet run",
        ),
        global_batch_size=size,
        num_epochs=36.0,
        data=DataConfig("pydoc_lm", sequence_length=64, vocab_size=256),
        model=ModelConfig("lstm_lm", size="small", dropout_rate=0.3),
        optimizer=optimizer,
        schedule=schedule,
        checkpoint=CheckpointConfig(every_steps=200, best_metric="eval/loss"),
        eval_every_steps=200,
        log_every_steps=20,
    )
