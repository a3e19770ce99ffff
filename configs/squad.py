"""Fine-tuning of a pre-trained BERT on SQuAD v1.1, as for the F1 of the LAMB paper's table.

    lbopt train --config=configs/squad.py:large-lamb --workdir=runs/squad --config.init_from=DIR

`--config.init_from` takes a workdir of lbopt train or a folder of Transformers. The vocabulary is
that of the folder, with the case that its tokenizer_config.json gives. The rows name
checkpoints/bert_large and checkpoints/bert_base, places of our own choice. The activation must be
that of the pre-training: "gelu_tanh" for large-lamb, as in configs/bert_large_lamb.py, and "gelu"
for the others, as in folders of Transformers. Data: `lbopt prepare squad`.

    row            F1 to reach                             settings
    large-lamb     that of configs/bert_large_lamb.py      LAMB 3e-4 .. 5e-4 at batch 64
    large-adamw    -                                       AdamW 3e-5 .. 5e-5, also after LAMB
    base-adamw     88.5 (BERT 1810.04805v2, Table 2)       the same
    smoke          BERT-tiny on questions about Python, seconds on a CPU

Source of the settings: google-research/albert@6ca4dfd0d13495a0a0ed7931f452018e08f93ced:
optimization.py, its comments and both optimizers; each replica's own gradient is clipped. Hardware
and time are published for no row. Default row: large-lamb.

Own choices: rates within those ranges, two epochs, a tenth of them for warmup, a linear decay
counted from step 0 (the code's form), batch 32 for AdamW, windows of 384 tokens every 128, the
evaluation batch, intervals.
Status: not yet run.
"""

import common

from lbopt.config import (
    About,
    CheckpointConfig,
    DataConfig,
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
    TrainConfig,
)
from lbopt.errors import require_choice

ROWS = ("large-lamb", "large-adamw", "base-adamw", "smoke")
OPTIMIZERS = {"lamb": (64, 4e-4), "adamw": (32, 3e-5)}
"""Batch size and learning rate of each optimizer."""
RESULTS = {
    "large-lamb": "F1 91.460 after pre-training at 32768 (arXiv 1904.00962v1, Table 1)",
    "base-adamw": "F1 88.5 (arXiv 1810.04805v2, Table 2)",
}


def get_config(arg: str = "large-lamb") -> TrainConfig:
    """Return the row `<size>-<optimizer>`, or `smoke`."""
    row = arg or "large-lamb"
    require_choice("--config row", row, ROWS)
    if row == "smoke":
        return _smoke()

    size, name = row.split("-")
    batch, rate = OPTIMIZERS[name]
    return TrainConfig(
        name=f"squad:{row}",
        about=About(
            paper="SQuAD 1606.05250v3, LAMB 1904.00962v1, google-research/albert@6ca4dfd",
            published_result=RESULTS.get(row, "-"),
            note="Own choice: rate within the published range, epochs, warmup, windows, evaluation "
            f"batch, intervals, place of the checkpoint{'' if name == 'lamb' else ', batch'}.",
        ),
        global_batch_size=batch,
        num_epochs=2.0,
        data=DataConfig(
            "squad",
            builder="squad/v1.1",
            train_split="train",
            validation_split="validation",
            test_split="validation",
            sequence_length=384,
            doc_stride=128,
            max_query_length=64,
            vocab_size=30522,
        ),
        # large-lamb starts from runs of configs/bert_large_lamb.py, whose GELU is the tanh
        # approximation; the others start from folders of Transformers, whose GELU is exact.
        model=ModelConfig(
            "bert",
            size=size,
            dtype="bfloat16",
            activation="gelu_tanh" if row == "large-lamb" else "gelu",
        ),
        optimizer=_optimizer(name),
        schedule=common.unscaled(
            rate, batch=batch, warmup_rule="epochs", base_warmup_epochs=0.2, decay_from="start"
        ),
        parallel=ParallelConfig(reduce_dtype="float32"),
        checkpoint=CheckpointConfig(every_steps=500, best_metric="eval/f1"),
        eval_global_batch_size=256,
        eval_every_epochs=0.5,
        log_every_steps=20,
        init_from=f"checkpoints/bert_{size}",
    )


def _optimizer(name: str) -> OptimizerConfig:
    if name == "lamb":
        return OptimizerConfig("lamb", "albert", weight_decay=0.01, clip_stage="replica")
    return OptimizerConfig("adamw", weight_decay=0.01, eps=1e-6, max_grad_norm=1.0)


def _smoke() -> TrainConfig:
    """Return the row large-lamb with BERT-tiny on questions about Python, from fresh parameters."""
    config = get_config("large-lamb")
    common.make_tiny(config, batch=8)
    config.num_epochs = 1.0
    config.num_steps = 6
    config.init_from = None
    config.data.builder = "pydoc_squad"
    config.data.vocab_size = 1024
    config.data.vocab_file = None
    config.data.sequence_length = 64
    config.data.doc_stride = 16
    config.data.max_query_length = 16
    config.model = ModelConfig("bert", size="tiny", max_length=64)

    config.schedule.warmup_steps = 2
    config.eval_every_epochs = None
    config.eval_every_steps = 3
    return config
