"""Decoder language models of our own sizes on Python's help topics, which need no download.

    lbopt train --config=configs/decoder_lm.py:1m-adamw-64 --workdir=runs/decoder_lm

Rows (`:ROW`): <size>-<optimizer>-<batch>: a size of ours ("0.5m", "1m", "4m", "20m"), adamw, lamb
or muon, and a number of sequences of 256 tokens; `smoke` is tiny. Their numbers are our own
starting points: none has been searched for. Muon's are those of KellerJordan/Muon's README, the
moments, decay and clip of AdamW those of karpathy/nanoGPT at 3adf61e, train.py. Decay: all matrices
and embeddings, no biases and norms.
Status: no row has been run here.
"""

import copy

import common

from lbopt.config import (
    About,
    DataConfig,
    ModelConfig,
    OptimizerConfig,
    TrainConfig,
    parse_row,
)
from lbopt.errors import require_choice

ADAMW = OptimizerConfig("adamw", weight_decay=0.1, b2=0.95, eps=1e-8, max_grad_norm=1.0)
MUON = OptimizerConfig("muon", weight_decay=0.01)
LAMB = OptimizerConfig("lamb", weight_decay=0.1, b2=0.95)
SMALL_SIZES = ("0.5m", "1m", "4m", "20m")
SMALL_OPTIMIZERS = {
    "adamw": (ADAMW, common.legw(1e-3, warmup_epochs=0.5)),
    "lamb": (LAMB, common.legw(1e-2, warmup_epochs=0.5)),
    "muon": (MUON, common.legw(2e-2, warmup_epochs=0.5)),
}
SMALL_ROWS = tuple(
    f"{size}-{optimizer}-{batch}"
    for size in ("1m", "4m")
    for optimizer in SMALL_OPTIMIZERS
    for batch in ("16", "64")
)
ROWS = (*SMALL_ROWS, "smoke")


def get_config(arg: str = "1m-adamw-64") -> TrainConfig:
    """Return a row `<size>-<optimizer>-<sequences>`, or `smoke`."""
    row = arg or "1m-adamw-64"
    if row == "smoke":
        return _smoke()
    size, _, rest = row.partition("-")
    require_choice("--config row", size, (*SMALL_SIZES, "smoke"))
    return _small(size, rest)


def _small(size: str, rest: str) -> TrainConfig:
    name, batch = parse_row(rest, SMALL_OPTIMIZERS)
    optimizer, schedule = copy.deepcopy(SMALL_OPTIMIZERS[name])
    config = TrainConfig(
        name=f"decoder_lm:{size}-{name}-{batch}",
        about=About(note="Our own choice throughout."),
        global_batch_size=batch,
        num_epochs=20.0,
        data=DataConfig("pydoc_lm", sequence_length=256, vocab_size=2048),
        model=ModelConfig("decoder_lm", size=size),
        optimizer=optimizer,
        schedule=schedule,
    )
    config.checkpoint.best_metric = "eval/loss"
    common.set_intervals(config, steps=100, log_steps=10)
    return config


def _smoke() -> TrainConfig:
    """Return the row 1m-adamw-16 at half of its size, for a part of an epoch."""
    config = common.shorten(_small("0.5m", "adamw-16"), num_epochs=0.5)
    config.name = "decoder_lm:smoke"
    config.data.vocab_size = 256
    config.data.sequence_length = 64
    config.schedule.base_warmup_epochs = 0.1
    return config
