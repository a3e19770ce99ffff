"""LEGW on LSTMs: MNIST row by row and Penn Treebank, at a small batch and a 32 or 64 times larger.

    lbopt train --config=configs/lstm_legw.py:mnist-8192 --workdir=runs/lstm_legw

Paper: You et al., arXiv 1901.08256v1. The rule: with k = batch / base batch the learning rate is
multiplied by sqrt(k) and the warmup *epochs* by k, so warmup steps are constant [recalled 97%]
(names and square root are in the abstract). The abstract promises 64 times the batch for LSTMs
"without losing accuracy and without tuning". Results and settings below were not read in a public
source: [recalled NN%] is our confidence. The sizes, epochs and batch of ptb-small-20 and
ptb-large-20 are those of tensorflow/models@086660faed00c84086b05bee6cfa1a2c9f801712:
tutorials/rnn/ptb/ptb_word_lm.py, which reports test perplexities of 115.91 and 78.29 for them.
GNMT, the paper's fourth application, is not offered.
Data: `lbopt prepare mnist`; `lbopt prepare ptb` prints how to get the files by hand. Hardware and
time are published for no row.

    row              result                            setting
    mnist-128        accuracy > 98 % [recalled 65%]    one layer of 128, momentum [recalled 65%]
    mnist-8192       the same                          the same, k = 64
    ptb-small-20     perplexity ~116 [recalled 50%]    2 layers of 200, 13 epochs, halving
    ptb-small-640    the same                          the same, k = 32 [recalled 50%]
    ptb-large-20     perplexity ~78 [recalled 50%]     2 of 1500, 55 epochs, power 2 [recalled 50%]
    ptb-large-640    the same                          the same, k = 32 [recalled 50%]
    smoke            a narrow ptb-small on Python's help topics, seconds on a CPU

The PTB rows follow ptb_word_lm.py: plain gradient descent with a clip, halving from epoch 4 on
(small), windows of 20 and 35 tokens, and the state carried over. Its rate of 1 and clip of 5 for
the sum over 20 steps become 20 and .25 for our mean.
Own choices: every other base learning rate and every base warmup; for MNIST the 25 epochs, the
constant rate, the clip and the 5000 validation images; for ptb-large power 2, rate and clip;
evaluation batch, intervals. Default row: mnist-8192.
Status: not yet run.
"""

import common

from lbopt.config import (
    About,
    CheckpointConfig,
    DataConfig,
    LossConfig,
    ModelConfig,
    OptimizerConfig,
    ScheduleConfig,
    TrainConfig,
)
from lbopt.errors import require_choice

RESULTS = {
    "mnist": "accuracy > 98 % [recalled 65%]",
    "ptb-small": "perplexity ~116 [recalled 50%]",
    "ptb-large": "perplexity ~78 [recalled 50%]",
}
ROWS = (
    "mnist-128",
    "mnist-8192",
    "ptb-small-20",
    "ptb-small-640",
    "ptb-large-20",
    "ptb-large-640",
    "smoke",
)
_PAPER = "LEGW 1901.08256v1"


def get_config(arg: str = "mnist-8192") -> TrainConfig:
    """Return the row `<application>-<global batch size>`, or `smoke`."""
    row = arg or "mnist-8192"
    require_choice("--config row", row, ROWS)
    if row == "smoke":
        return _smoke()

    application, batch = row.rsplit("-", 1)
    build = {"mnist": _mnist, "ptb-small": _ptb_small, "ptb-large": _ptb_large}[application]
    config = build(int(batch))
    config.name = f"lstm_legw:{row}"
    return config


def _mnist(batch: int) -> TrainConfig:
    about = About(
        paper=_PAPER,
        published_result=RESULTS["mnist"],
        note="Batch, optimizer, width [recalled 65%]. Own choice: learning rate, warmup, epochs, "
        "decay, clip, validation split, intervals.",
    )
    data = DataConfig(
        "images",
        builder="mnist",
        train_split="train[:55000]",
        validation_split="train[55000:]",
        test_split="test",
        train_crop="none",
        flip=False,
        pixel_mean=(0.0,),
        pixel_std=(1.0,),
    )

    return TrainConfig(
        about=about,
        global_batch_size=batch,
        num_epochs=25.0,
        data=data,
        model=ModelConfig("lstm", hidden=128),
        optimizer=OptimizerConfig("momentum", momentum=0.9, max_grad_norm=1.0),
        schedule=common.legw(0.05, batch=128, warmup_epochs=0.1, first_step=0, decay="constant"),
        checkpoint=CheckpointConfig(every_steps=5 * 55000 // batch),
        eval_global_batch_size=1000,
        eval_every_epochs=1.0,
        log_every_steps=10,
        target_metric="eval/accuracy",
        target_value=0.98,
    )


def _ptb_small(batch: int) -> TrainConfig:
    decay = {
        "decay": "step",
        "decay_rate": 0.5,
        "decay_from": "start",
        "stair_epochs": tuple(map(float, range(4, 13))),
    }
    return _ptb(
        "small",
        batch,
        13.0,
        20,
        common.legw(20.0, batch=20, warmup_epochs=0.05, first_step=0, **decay),
    )


def _ptb_large(batch: int) -> TrainConfig:
    return _ptb(
        "large",
        batch,
        55.0,
        35,
        common.legw(20.0, batch=20, warmup_epochs=0.05, first_step=0, power=2.0),
    )


def _ptb(
    size: str, batch: int, num_epochs: float, length: int, schedule: ScheduleConfig
) -> TrainConfig:
    about = About(
        paper=f"{_PAPER}, LSTM 1409.2329v5",
        published_result=RESULTS[f"ptb-{size}"],
        note="Large batch, its epochs and polynomial decay [recalled 50%]; sizes, windows, descent "
        "and small decay of ptb_word_lm.py. Own choice: warmup, power of the decay, intervals.",
    )

    return TrainConfig(
        about=about,
        global_batch_size=batch,
        num_epochs=num_epochs,
        data=DataConfig("ptb", carry_state=True, sequence_length=length, vocab_size=10000),
        model=ModelConfig("lstm_lm", size=size),
        loss=LossConfig(),
        optimizer=OptimizerConfig("momentum", momentum=0.0, max_grad_norm=0.25),
        schedule=schedule,
        checkpoint=CheckpointConfig(every_steps=max(50, 20000 // batch), best_metric="eval/loss"),
        eval_global_batch_size=20,
        eval_every_epochs=1.0,
        log_every_steps=10,
    )


def _smoke() -> TrainConfig:
    """Return the row ptb-small-640 with a narrow network, on Python's help topics."""
    config = get_config("ptb-small-640")
    common.make_tiny(config)
    config.about.paper = _PAPER
    config.num_steps = 8
    config.data = DataConfig("pydoc_lm", carry_state=True, sequence_length=16, vocab_size=256)
    config.model.width_coefficient = 0.1

    config.schedule.warmup_steps = 2
    config.schedule.base_learning_rate = 1.0
    config.eval_every_epochs = None
    config.eval_every_steps = 4
    return config
