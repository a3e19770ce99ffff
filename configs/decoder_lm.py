"""Decoder language models: GPT-2 and Llama at their published batches, and small ones at any.

    lbopt train --config=configs/decoder_lm.py:1m-adamw-64 --workdir=runs/decoder_lm

Small rows (`:SIZE-OPTIMIZER-BATCH`): a size of ours ("0.5m", "1m", "4m", "20m"), adamw, lamb or
muon, and a number of sequences of 256 tokens, on Python's help topics, which need no download;
`smoke` is tiny. Their numbers are our own starting points: none has been searched for. Muon's are
those of KellerJordan/Muon's README, AdamW's moments and decay those of nanoGPT.

    row           sequences   tokens   steps     learning rate   slice
    gpt2          480         1024     600000    6e-4            v5e:4x4    nanoGPT's run
    gpt2-muon     480         1024     600000    2e-2            v5e:4x4    Muon for AdamW
    gpt2-lamb     3840        1024     75000     1e-2            v5e:8x8    LAMB at 8 x the batch
    gpt2-medium   512         1024     600000    3e-4            v5e:8x8
    gpt2-large    512         1024     600000    2.5e-4          v4:4x4x4
    gpt2-xl       1024        1024     300000    2e-4            v4:4x4x4
    llama2-7b     1024        4096     476837    3e-4            v5p:8x8x8
    llama3-8b     1024        8192     1788140   3e-4            v5p:8x8x8

`gpt2`: karpathy/nanoGPT at 3adf61e, train.py and config/train_gpt2.py (AdamW 0.9, 0.95, decay 0.1,
norm clipped at 1, 2000 steps of warmup, a cosine to a tenth); the shape has GPT-2's biases, which
nanoGPT leaves out. Learning rates and batches of the three larger GPT-2s: the models of the same
sizes in arXiv 2005.14165v4, Table 2.1 [recalled 95%]; they take 314.6 B tokens, those there 300 B.
`gpt2-muon`: KellerJordan/Muon's README (0.02, decay 0.01). `gpt2-lamb`: our own choice throughout.
`llama2-7b`: arXiv 2307.09288v2, section 2.2 and Table 1: 4 M tokens a step, 2 T tokens, 3e-4, AdamW
(0.9, 0.95, eps 1e-5), 2000 steps of warmup, a cosine to a tenth, decay 0.1, norm clipped at 1.
`llama3-8b`: arXiv 2407.21783v3, Table 3: 3e-4 and the shape; the rest is as in `llama2-7b`, with
15 T tokens in batches of 8 M, since the report gives the batches of its largest model alone.
Decay: all matrices and embeddings, no biases and norms.

Data: `lbopt prepare text --for=text_lm --vocab_size=50257` makes a corpus of a folder of text. It
holds all documents in memory, about 35 times their size (docs/reference/data.md): most machines
cannot make OpenWebText. It learns its vocabulary: GPT-2's and Llama's tokenizers cannot be used.
Own choices: slices, microsteps, rematerialisation, evaluation batch, intervals.
Status: the large rows are planned (configs/plans/); none has been run here. A layer is compiled
once and looped over. Every device holds all parameters: `llama2-7b` fits so, `llama3-8b` does not.
"""

import copy

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
from lbopt.errors import require

GPT2_VOCABULARY = 50257
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
_NANO = "GPT-2; karpathy/nanoGPT@3adf61e"
_GPT3 = "GPT-2; GPT-3 2005.14165v4, Table 2.1"
_LLAMA2 = "Llama 2 2307.09288v2"
_LLAMA3 = "Llama 3 2407.21783v3"
_SIZED = "Learning rate and batch of a model of this size [recalled 95%]; the rest as nanoGPT's."
_PLAIN = "Biases, as in GPT-2; nanoGPT has none."
# Size, sequences, length, steps, learning rate, slice, microsteps, paper and note of each row.
LARGE = {
    "gpt2": ("gpt2", 480, 1024, 600_000, 6e-4, "v5e:4x4", 5, _NANO, _PLAIN),
    "gpt2-muon": (
        "gpt2",
        480,
        1024,
        600_000,
        0.02,
        "v5e:4x4",
        5,
        "Muon, KellerJordan/Muon README",
        "Muon in place of AdamW in the row gpt2, our own choice.",
    ),
    "gpt2-lamb": (
        "gpt2",
        3840,
        1024,
        75_000,
        0.01,
        "v5e:8x8",
        10,
        "LAMB 1904.00962v5",
        "LAMB in place of AdamW at eight times the batch of the row gpt2, our own choice.",
    ),
    "gpt2-medium": ("gpt2-medium", 512, 1024, 600_000, 3e-4, "v5e:8x8", 2, _GPT3, _SIZED),
    "gpt2-large": ("gpt2-large", 512, 1024, 600_000, 2.5e-4, "v4:4x4x4", 2, _GPT3, _SIZED),
    "gpt2-xl": ("gpt2-xl", 1024, 1024, 300_000, 2e-4, "v4:4x4x4", 4, _GPT3, _SIZED),
    "llama2-7b": (
        "llama2-7b",
        1024,
        4096,
        476_837,
        3e-4,
        "v5p:8x8x8",
        2,
        _LLAMA2,
        "Every device holds all parameters.",
    ),
    "llama3-8b": (
        "llama3-8b",
        1024,
        8192,
        1_788_140,
        3e-4,
        "v5p:8x8x8",
        2,
        _LLAMA3,
        "Does not fit: every device holds all parameters. Batch and optimizer as Llama 2's.",
    ),
}
VOCABULARIES = {"llama2-7b": 32000, "llama3-8b": 128256}
ROWS = (*LARGE, *SMALL_ROWS, "smoke")


def get_config(arg: str = "1m-adamw-64") -> TrainConfig:
    """Return a row of the table, `<size>-<optimizer>-<sequences>`, or `smoke`."""
    row = arg or "1m-adamw-64"
    if row in LARGE:
        return _large(row)
    if row == "smoke":
        return _smoke()
    size, _, rest = row.partition("-")
    name, _, batch = rest.partition("-")
    known = size in SMALL_SIZES and name in SMALL_OPTIMIZERS and batch.isdecimal()
    fix = (
        f"use one of {', '.join(LARGE)}, smoke, or SIZE-OPTIMIZER-SEQUENCES, for instance "
        f"1m-adamw-64, of {', '.join(SMALL_SIZES)} and of {', '.join(SMALL_OPTIMIZERS)}"
    )
    require(known, "--config row", row, fix, code="choice")
    return _small(size, name, int(batch))


def _small(size: str, name: str, batch: int) -> TrainConfig:
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


def _large(row: str) -> TrainConfig:
    size, batch, length, steps, rate, topology, microsteps, paper, note = LARGE[row]
    optimizer = {"gpt2-muon": MUON, "gpt2-lamb": LAMB}.get(row, ADAMW)
    llama = row in VOCABULARIES

    schedule = common.unscaled(rate, batch=batch, warmup_steps=2000, decay="cosine", end_factor=0.1)
    config = TrainConfig(
        name=f"decoder_lm:{row}",
        about=About(
            paper=paper,
            topology=topology,
            status="planned by the TPU compiler",
            note=f"{note} Own choice: slice, microsteps, evaluation batch, intervals.",
        ),
        global_batch_size=batch,
        num_steps=steps,
        data=DataConfig(
            "text_lm",
            builder="llama_text" if llama else "openwebtext",
            sequence_length=length,
            vocab_size=VOCABULARIES.get(row, GPT2_VOCABULARY),
        ),
        model=ModelConfig(
            "decoder_lm",
            size=size,
            max_length=length,
            dtype="bfloat16",
            scan_layers=True,
            remat="layer" if llama else "attention",
        ),
        parallel=ParallelConfig(
            shard_update=True, reduce_dtype="float32", num_microsteps=microsteps
        ),
        optimizer=copy.deepcopy(optimizer),
        schedule=schedule,
        checkpoint=CheckpointConfig(every_steps=1000),
        eval_global_batch_size=128,
        eval_every_steps=1000,
        log_every_steps=10,
    )
    if llama:
        config.optimizer.eps = 1e-5
    return config


def _smoke() -> TrainConfig:
    """Return the row 1m-adamw-16 at half of its size, for a part of an epoch."""
    config = common.shorten(_small("0.5m", "adamw", 16), num_epochs=0.5)
    config.name = "decoder_lm:smoke"
    config.data.vocab_size = 256
    config.data.sequence_length = 64
    config.schedule.base_warmup_epochs = 0.1
    return config
