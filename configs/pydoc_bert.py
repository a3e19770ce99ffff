"""BERT-tiny on Python's help topics, which need no download: masked tokens and next sentences.

    lbopt train --config=configs/pydoc_bert.py:lamb-512 --workdir=runs/pydoc_bert

Rows (`:ROW`): <optimizer>-<global batch size>, the optimizer is lamb; `smoke` is tiny.
Hardware and time: about ten minutes of CPU time per run. Test accuracy of one run each, in %
(2-core CPU, Python 3.11, JAX 0.10.2):

    batch                  64    512    counting (python -m lbopt.data.baselines)
    masked tokens        36.2   27.3     7.1
    next sentence        71.2   67.5    50
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
    "base_warmup_epochs": 1.0,
}
OPTIMIZERS = {
    "lamb": (OptimizerConfig("lamb", weight_decay=0.01), ScheduleConfig(0.01, **LEGW)),
}
MEASURED = ("64", "512")
"""The batch sizes of the table above."""
ROWS = (*(f"{name}-{size}" for name in OPTIMIZERS for size in MEASURED), "smoke")


def get_config(arg: str = "lamb-256") -> TrainConfig:
    """Return the row `<optimizer>-<global batch size>`, or `smoke`."""
    if arg == "smoke":
        config = get_config("lamb-128")
        config.num_epochs = 1.0
        config.log_every_steps = 2
        config.eval_every_steps = 8
        config.schedule.base_warmup_epochs = 0.1
        config.checkpoint.every_steps = 4
        return config

    name, size = parse_row(arg or "lamb-256", OPTIMIZERS)
    optimizer, schedule = copy.deepcopy(OPTIMIZERS[name])
    return TrainConfig(
        name=f"pydoc_bert:{name}-{size}",
        about=About(
            paper="BERT 1810.04805v2, LAMB 1904.00962v5, LEGW 1901.08256v1",
            status="measured here" if str(size) in MEASURED else "not yet run",
        ),
        global_batch_size=size,
        num_epochs=100.0,
        data=DataConfig("pydoc_mlm"),
        model=ModelConfig(
            "bert", size="tiny", max_length=64, dropout_rate=0.0, attention_dropout_rate=0.0
        ),
        optimizer=optimizer,
        schedule=schedule,
        checkpoint=CheckpointConfig(every_steps=200),
        eval_every_steps=200,
        log_every_steps=20,
    )
