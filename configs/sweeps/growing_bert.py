"""Does a batch that grows keep the loss of a constant one? BERT-tiny on Python's help topics.

    lbopt sweep --config=configs/sweeps/growing_bert.py --workdir=runs/growing_bert

Every run starts with batch 32 and sees the same 16 epochs, in fewer steps where the batch grows to
256. AdamW follows the rule of its stochastic differential equation (arXiv 2205.10287v3) from batch
to batch, so learning rate, b1, b2 and eps change with it. `seesaw` (arXiv 2510.14717) doubles the
batch where the cosine has halved the learning rate. `steps` doubles it early: at 2, 4 and 8 epochs.
`ramp` grows it by 32 at a time over half of the run. Each arm has its own learning rate, by the
same search. The score is the loss on the test split, and 1 % of it is the margin.

Rows (`:ROW`): (none); `smoke`, tiny.
"""

import common

from lbopt.config import (
    About,
    Arm,
    BatchScheduleConfig,
    DataConfig,
    ModelConfig,
    OptimizerConfig,
    ScheduleConfig,
    SearchConfig,
    SweepConfig,
    TrainConfig,
)
from lbopt.errors import require_choice

ROWS = ("", "smoke")
BATCH = 32
FINAL_BATCH = 256
EPOCHS = 16.0


def get_config(arg: str = "") -> SweepConfig:
    """Return the study, or a tiny one (`smoke`)."""
    if arg:
        require_choice("--config row", arg, ROWS[1:])
    steps = tuple((EPOCHS / 2**k, FINAL_BATCH // 2 ** (k - 1)) for k in (3, 2, 1))
    growing = {
        "constant": None,
        "seesaw": BatchScheduleConfig("seesaw", final_batch_size=FINAL_BATCH),
        "steps": BatchScheduleConfig("steps", changes=steps),
        "ramp": BatchScheduleConfig(
            "ramp", increment=BATCH, length=EPOCHS / 2, final_batch_size=FINAL_BATCH
        ),
    }

    config = SweepConfig(
        name=f"growing_bert{':' * bool(arg)}{arg}",
        about=About(paper="Seesaw 2510.14717, Malladi et al. 2205.10287v3", status="measured here"),
        train=TrainConfig(
            name="growing_bert",
            data=DataConfig("pydoc_mlm"),
            model=ModelConfig(
                "bert", size="tiny", max_length=64, dropout_rate=0.0, attention_dropout_rate=0.0
            ),
            num_epochs=EPOCHS,
        ),
        arms=tuple(_arm(name, changes) for name, changes in growing.items()),
        global_batch_sizes=(BATCH,),
        search=SearchConfig(
            learning_rate_factors=(0.5, 1.0, 2.0, 4.0),
            seeds=(0,),
            widen_candidates=0,  # as its committed results were searched
        ),
        final_seeds=common.final_seeds(5),
        metric="eval/loss",
    )

    if arg == "smoke":
        config.train.num_epochs = 0.5
        for arm in config.arms:
            arm.schedule.base_warmup_epochs = 0.05
        config.arms = (config.arms[0], config.arms[3])
        config.arms[1].batch_schedule.length = 0.25
        config.arms[1].batch_schedule.increment = 112
        config.search = SearchConfig(learning_rate_factors=(0.5, 1.0), widen_candidates=0)
        config.final_seeds = config.final_seeds[:1]
    return config


def _arm(name: str, growing: BatchScheduleConfig | None) -> Arm:
    schedule = ScheduleConfig(
        0.001,
        base_batch_size=BATCH,
        scaling_rule="sde_half_life",
        warmup_rule="epochs",
        base_warmup_epochs=1.0,
        decay="cosine",
    )
    optimizer = OptimizerConfig("adamw", weight_decay=0.01, b2=0.99)
    return Arm(name, optimizer, schedule, batch_schedule=growing)
