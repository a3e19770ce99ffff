"""How large a batch does a language model use, and does that grow with the number of tokens?

    scripts/data english
    lbopt prepare text --preset=english --from=FOLDER --name=english --vocab_size=4096
    lbopt sweep --config=configs/sweeps/lm_critical.py:tokens-2m --workdir=runs/lm_tokens_2m

Protocol. A decoder of 1 M parameters with windows of 128 tokens of English (addresses, a novel, the
Brown corpus, glosses, encyclopedia), from 4,096 tokens a step to 1 M. In the rows `tokens-` every
run sees the same tokens, less than one pass, so nothing repeats; the score is the loss on the test
split, and a limit allows one percent more. Every arm has the same search around its own rule at
every batch size: three rates, and up to four more where the best lies at an edge. All choices, and
the base rates at 8,192 tokens, were made on the validation split. The test split is read once, by
five fresh seeds. In the row `target` rates are constant, weights are averaged (half-life 69 updates
at 8,192 tokens, the same in tokens at every batch size), and the fewest steps to a validation loss
count; see Zhang et al., arXiv 2410.21676, whose 20 % overhead is reported.

Power, by `lbopt sweep` before it starts: POWER

Rows (`:ROW`):

    (none), tokens-2m, tokens-4m, tokens-8m  2, 4 or 8 M tokens (the last by default), six
               optimizers, and AdamW with b2 kept instead of its half-life in tokens
    target     steps to a loss of TARGET nats a token
    small      three optimizers, 0.5 M parameters, 0.5 M tokens; within 20 minutes on 2 CPU cores
    smoke      tiny, on Python's help topics
"""

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

TOKENS = {"tokens-2m": 0.25, "tokens-4m": 0.5, "tokens-8m": 1.0}
"""Passes over the 8.28 M tokens of the training split in each row."""
ROWS = ("", *TOKENS, "target", "small", "smoke")
LENGTH = 128
BATCH = 64
"""Sequences at which the base rates were tuned."""
SIZES = (32, 128, 512, 2048, 8192)
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
ARMS = {
    "AdamW + sqrt": (_ADAMW, _schedule(4e-3)),
    "AdamW, half-life of b2": (_ADAMW, _schedule(4e-3, "sqrt+token_half_life")),
    "LAMB + sqrt": (OptimizerConfig("lamb", weight_decay=0.1, b2=0.99), _schedule(0.02)),
    "AdamH + sqrt": (OptimizerConfig("adamh"), _schedule(0.02)),
    "Muon + sqrt": (OptimizerConfig("muon"), _schedule(0.02)),
    "MuonH + sqrt": (OptimizerConfig("muonh"), _schedule(0.02)),
    "SOAP + sqrt": (OptimizerConfig("soap"), _schedule(4e-3)),
}
"""Optimizer and rules of each arm, with the best rates of a coarse grid at `BATCH`."""


def get_config(arg: str = "") -> SweepConfig:
    """Return the study of the row."""
    if arg:
        require_choice("--config row", arg, ROWS[1:])

    config = SweepConfig(
        name=f"lm_critical{':' * bool(arg)}{arg}",
        about=About(
            paper="Zhang et al. 2410.21676, Muon 2505.02222, SOAP 2409.11321, Marek et al. "
            "2507.07101v2",
            note="Own choice: model, text, batch sizes, tokens, base rates, search, seeds.",
            status="not yet run",
        ),
        train=TrainConfig(
            name="lm_critical",
            num_epochs=TOKENS.get(arg, 1.0),
            data=DataConfig("text_lm", "english", sequence_length=LENGTH, vocab_size=4096),
            model=ModelConfig("decoder_lm", size="1m", max_length=LENGTH),
            eval_global_batch_size=64,
        ),
        arms=tuple(common.make_arm(name, optimizer) for name, optimizer in ARMS.items()),
        global_batch_sizes=SIZES,
        search=SearchConfig(learning_rate_factors=(0.5, 1.0, 2.0)),
        final_seeds=common.final_seeds(5),
        metric="eval/loss",
        measure=MeasureConfig(num_probes=4, probe_part_size=8),
        microstep_size=64,
    )

    if arg in ("small", "smoke"):
        config.train.num_epochs = 0.06
        config.train.model.size = "0.5m"
        config.arms = tuple(config.arms[place] for place in (0, 2, 5))
        config.global_batch_sizes = (32, 128, 512)
    if arg == "smoke":
        common.make_small(config, batches=(32, 128))
        config.train.num_epochs = 0.5
        config.train.data = DataConfig("pydoc_lm", sequence_length=32, vocab_size=256)
        config.train.model.width_coefficient = 1 / 3
        config.train.model.depth_coefficient = 1 / 3
        config.arms = config.arms[1:]
        config.search = SearchConfig(learning_rate_factors=(0.5, 1.0), widen_candidates=0)
        config.measure.num_probes = 1
    for arm in config.arms:
        arm.schedule.base_warmup_epochs = WARMUP * config.train.num_epochs
    if arg == "target":
        _to_target(config)
    return config


def _to_target(config: SweepConfig) -> None:
    train = config.train
    train.eval_every_epochs = 0.02
    train.target_metric = "eval/loss"
    train.target_value = 5.0
    train.stop_at_target = True
    for arm in config.arms:
        arm.schedule.decay = "constant"
        arm.schedule.end_factor = 0.0
        arm.optimizer.ema_decay = 0.99
        arm.schedule.scaling_rule += "+ema"
        arm.schedule.base_warmup_epochs = 0.02
