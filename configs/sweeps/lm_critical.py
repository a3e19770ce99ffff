"""How large a batch does a language model use, and does that grow with the number of tokens?

    scripts/data brown --to=data
    lbopt prepare text --preset=brown --from=data --name=brown --vocab_size=2048
    lbopt sweep --config=configs/sweeps/lm_critical.py:brown-250k --workdir=runs/lm_critical

Protocol. A decoder with windows of 128 tokens of English, from 4,096 tokens a step (256 in the rows
of the Brown corpus) up to the batch that leaves 7 steps or more, and 1 M tokens at most. All runs
of a row see the same tokens, less than one pass, so nothing repeats; the score is the loss on the
test split, and a limit allows one percent more. Rates warm up over a tenth of the tokens. Every arm
has the same search around its own rule at every batch size: three rates, and up to four more where
the best lies at an edge. The base rates, at 8,192 tokens a step, are our own choice after a few
runs on Brown. So is the ratio in Muon's arm: what is no matrix, the word embedding too, learns at
0.3 times the rate of the matrices, about AdamW's. The default is 0.015, as in Muon's public code;
in a run each, 0.1 had 5.36 nats at 1,024 tokens a step and 0.3 had 5.09. All choices were made on
the validation split. The test split is read once, by five fresh seeds (three in `small`).

In the rows with a target the rates are constant after 0.02 epochs and the weights are averaged
(arXiv 2410.21676), with the same half-life in tokens at every batch size: decay 0.99 at 8,192
tokens a step, and 0.9 in the shorter runs on Brown. The fewest steps to the target count, and the
batch with 20 % overhead is in the report. The critical batches of easier targets, which the same
runs reach on their way, show its growth with the tokens.

Power, by `lbopt check`: at one batch size 5 seeds show a difference of 3 % between two of 7 arms
with power 0.8, if seeds vary by 1 %, as they do in `small`; `--pilot=WORKDIR` measures that spread.

Rows (`:ROW`), with hours on 2 CPU cores, as `lbopt sweep` tells beforehand:

    (none)        English, 7 M tokens, 1 M parameters, seven arms; for a GPU, here 3.5 times the
                  tokens and a batch size more than `english-2m`
    english-2m    the same with 2 M tokens; 12 to 18 hours
    brown-1m      the Brown corpus, 1 M tokens, 1 M parameters; 8 to 12 hours
    brown-250k    the same with 0.25 M tokens; 2 to 4 hours
    target        English, steps to a validation loss of 5 nats a token, in up to 7 M tokens; for a
                  GPU
    brown-target  the Brown corpus, four arms, steps to 5.25 nats a token, in up to 1 M tokens; at
                  most 6 hours
    small         the Brown corpus, 0.25 M tokens, 0.5 M parameters, two arms; 15 minutes on 2 CPU
                  cores
    smoke         tiny, on Python's help topics

`scripts/data english` and `lbopt prepare text --preset=english --name=english --vocab_size=4096`
make the larger corpus.
"""

import copy

import common

from lbopt.config import (
    About,
    DataConfig,
    MeasureConfig,
    ModelConfig,
    OptimizerConfig,
    ScheduleConfig,
    SearchConfig,
    SweepConfig,
    TrainConfig,
)
from lbopt.errors import require_choice

ENGLISH = DataConfig("text_lm", "english", sequence_length=128, vocab_size=4096)
BROWN = DataConfig("text_lm", "brown", sequence_length=128, vocab_size=2048)
CORPUS_TOKENS = {"english": 8_277_331, "brown": 1_722_280}
"""Tokens of the training split of each corpus, as the commands of the head make it."""
TOKENS = {
    "": (ENGLISH, 7 * 2**20),
    "english-2m": (ENGLISH, 2**21),
    "brown-1m": (BROWN, 2**20),
    "brown-250k": (BROWN, 2**18),
    "target": (ENGLISH, 7 * 2**20),
    "brown-target": (BROWN, 2**20),
    "small": (BROWN, 2**18),
    "smoke": (DataConfig("pydoc_lm", sequence_length=32, vocab_size=256), 2**14),
}
"""Corpus of each row, and the tokens of a run: whole steps at every batch size."""
ROWS = tuple(TOKENS)
BATCH = 64
"""Sequences a step to which the base rates belong."""
SIZES = (2, 8, 32, 128, 512, 2048, 8192)
SMALLEST = {"english": 32}
"""Smallest batch of a corpus; else the least of `SIZES`."""
FEWEST_STEPS = 7
WARMUP = 0.1
"""Share of the tokens over which the learning rate warms up, at every batch size."""


def _schedule(rate: float, scaling_rule: str = "sqrt") -> ScheduleConfig:
    return ScheduleConfig(
        rate,
        base_batch_size=BATCH,
        scaling_rule=scaling_rule,
        warmup_rule="epochs",
        decay="cosine",
        end_factor=0.1,
    )


_ADAMW = OptimizerConfig("adamw", weight_decay=0.1, b2=0.99, max_grad_norm=1.0)
_MUON = OptimizerConfig("muon", options={"rest_learning_rate_ratio": 0.3})
ARMS = {
    "AdamW + sqrt": (_ADAMW, _schedule(8e-3)),
    "AdamW, half-life of b2": (_ADAMW, _schedule(8e-3, "sqrt+token_half_life")),
    "LAMB + sqrt": (OptimizerConfig("lamb", weight_decay=0.1, b2=0.99), _schedule(0.04)),
    "AdamH + sqrt": (OptimizerConfig("adamh"), _schedule(0.06)),
    "Muon + sqrt": (_MUON, _schedule(0.06)),
    "MuonH + sqrt": (OptimizerConfig("muonh"), _schedule(0.12)),
    "SOAP + sqrt": (OptimizerConfig("soap"), _schedule(0.016)),
}
"""Optimizer and rules of each arm, with its rate at `BATCH`."""


def get_config(arg: str = "") -> SweepConfig:
    """Return the study of the row."""
    if arg:
        require_choice("--config row", arg, ROWS[1:])

    data, tokens = TOKENS[arg]
    largest = tokens // (FEWEST_STEPS * data.sequence_length)
    smallest = SMALLEST.get(data.builder, SIZES[0])
    sizes = tuple(size for size in SIZES if smallest <= size <= largest)
    config = SweepConfig(
        name=f"lm_critical{':' * bool(arg)}{arg}",
        about=About(
            paper="Zhang et al. 2410.21676, Muon 2505.02222, SOAP 2409.11321, Marek et al. "
            "2507.07101v2",
            note="Own choice: model, text, batch sizes, tokens, search, seeds.",
            status="measured here" if arg == "small" else "not yet run",
        ),
        train=TrainConfig(
            name="lm_critical",
            # A little less, as the steps of a run are rounded up.
            num_epochs=0.9999 * tokens / CORPUS_TOKENS.get(data.builder, 100_000),
            data=copy.deepcopy(data),
            model=ModelConfig("decoder_lm", size="1m", max_length=data.sequence_length),
            eval_global_batch_size=64,
        ),
        arms=tuple(common.make_arm(name, optimizer) for name, optimizer in ARMS.items()),
        global_batch_sizes=sizes,
        search=SearchConfig(learning_rate_factors=(0.5, 1.0, 2.0)),
        final_seeds=common.final_seeds(5),
        metric="eval/loss",
        measure=MeasureConfig(num_probes=3, probe_part_size=2),
        microstep_size=16,
    )

    if arg in ("small", "smoke"):
        config.train.model.size = "0.5m"
        config.arms = tuple(arm for arm in config.arms if arm.name.split()[0] in _SMALL)
        config.final_seeds = common.final_seeds(3)
    if arg == "smoke":
        common.make_small(config, batches=(32, 64))
        config.train.model.width_coefficient = 1 / 3
        config.train.model.depth_coefficient = 1 / 3
        config.search = SearchConfig(learning_rate_factors=(0.5, 1.0), widen_candidates=0)
        config.measure.num_probes = 1
    for arm in config.arms:
        arm.schedule.base_warmup_epochs = WARMUP * config.train.num_epochs
    if arg == "target":
        _to_target(config, loss=5.0, ema_decay=0.99)
    if arg == "brown-target":
        config.arms = tuple(arm for arm in config.arms if arm.name in _TO_TARGET)
        config.global_batch_sizes = sizes[:4]
        _to_target(config, loss=5.25, ema_decay=0.9)
    return config


_SMALL = ("AdamW", "MuonH")
_TO_TARGET = ("AdamW + sqrt", "Muon + sqrt", "MuonH + sqrt", "SOAP + sqrt")


def _to_target(config: SweepConfig, *, loss: float, ema_decay: float) -> None:
    train = config.train
    train.eval_every_epochs = 0.02
    train.target_metric = "eval/loss"
    train.target_value = loss
    train.stop_at_target = True
    for arm in config.arms:
        arm.schedule.decay = "constant"
        arm.schedule.end_factor = 0.0
        arm.optimizer.ema_decay = ema_decay
        arm.schedule.scaling_rule += "+ema"
        arm.schedule.base_warmup_epochs = 0.02
