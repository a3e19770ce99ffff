"""LAMB on BERT-Large at batches of 512 to 65536: You et al., "BERT in 76 minutes".

    lbopt train --config=configs/bert_large_lamb.py:mixed --workdir=runs/bert_large_lamb

Results: arXiv 1904.00962v1, Table 1, SQuAD v1.1 dev F1 after fine-tuning (configs/squad.py).
Learning rates, warmup and lengths of the single-batch rows: the untuned table of v5 [recalled 90%];
its F1 column is another one and is not quoted here. Optimizer and form of the schedule:
google-research/albert at 6ca4dfd. tests/configs/published.json names the file of each number;
`[recalled NN%]`: believed with that confidence, not read in a public source.
Data: `lbopt prepare text --name=wikipedia_books --folder=...` (or --tfds=...) makes the corpus.

    row             steps       F1        time         TPUs
    512             1000000     90.720    82.8 h       16
    1024            500000      90.377    43.2 h       32
    2048            250000      90.751    21.4 h       64
    4096            125000      90.548    693.6 min    128
    8192            62500       90.556    390.5 min    256
    16384           31250       90.679    200.0 min    512
    32768           15625       91.460    101.2 min    1024
    mixed           8599        90.584    76.19 min    1024 v3   65536 x 128, then 32768 x 512
    nvidia-mixed    8601        -         -            -         the same shape, NVIDIA's numbers
    adamh-32768     15625       -         -            -         AdamH for LAMB, our own choice
    muonh-32768     15625       -         -            -         MuonH for LAMB, our own choice
    smoke           7           BERT-tiny on Python's help topics in two phases, seconds on a CPU

Steps of 8192, 16384 and 32768 [recalled 90%] (v1 prints 62k, 31k, 15.6k). The baseline at 512 has
F1 90.395.

Single-batch rows: learning rate 5/(2^k x 1000), k = 0 at 32768 and 3 at 512, 3125 steps of warmup,
then the line (1 - t/T) counted from step 0 as in google-research/albert, so the rate jumps down at
the end of warmup. Nine tenths of the steps at sequence 128, the rest at 512 on the same line: 14063
+ 1562 at 32768 [recalled 80%]; the same share at other batches is our own choice, rounded up.
`mixed`: 7037 + 1562 steps [recalled 95%] (their sum is published), ramp from 0 in both phases
[recalled 80%]. The authors' learning rates and warmups are not known: 6e-3 and 4e-3 after 2000 and
200 steps, NVIDIA's, are our starting point.
`nvidia-mixed`: NVIDIA/DeepLearningExamples at 2de2945, PyTorch/LanguageModeling/BERT.
`adamh-32768` and `muonh-32768`: the row 32768 with weights that keep their norm. The rate of all
three is a share of the norm of a weight, so it is the same; there is no decay and no clip, and
biases and norms follow Adam at a fifth of the rate, 1e-3.
As in google-research/albert, each replica's own gradient is clipped, and there is no bias
correction (Algorithm 2 of the paper has one). Default row: 32768.

Own choices: 80 predictions at 512 tokens and 20 at 128 (NVIDIA's, and what `scripts/bench models`
compiles), the moments kept between the phases, evaluation batch, intervals.
Status: every row but nvidia-mixed is planned (configs/plans/); no row has been run here.
"""

import math

import common

from lbopt.config import (
    About,
    CheckpointConfig,
    DataConfig,
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
    PhaseConfig,
    ScheduleConfig,
    TrainConfig,
)
from lbopt.errors import require_choice

PUBLISHED = {
    "512": (1_000_000, "90.720", "82.8 h", 16),
    "1024": (500_000, "90.377", "43.2 h", 32),
    "2048": (250_000, "90.751", "21.4 h", 64),
    "4096": (125_000, "90.548", "693.6 min", 128),
    "8192": (62_500, "90.556", "390.5 min", 256),
    "16384": (31_250, "90.679", "200.0 min", 512),
    "32768": (15_625, "91.460", "101.2 min", 1024),
}
"""Steps, F1, time and number of TPUs of each batch size."""
TOPOLOGIES = {
    16: "v3:4x4",
    32: "v3:4x8",
    64: "v3:8x8",
    128: "v3:8x16",
    256: "v3:16x16",
    512: "v3:16x32",
    1024: "v3:32x32",
}
"""Slice of a v3 pod with each number of chips."""
WARMUP_STEPS = 3125
ON_SPHERES = ("adamh-32768", "muonh-32768")
"""Rows with weights that keep their norm."""
ROWS = (*PUBLISHED, "mixed", "nvidia-mixed", *ON_SPHERES, "smoke")
_PAPER = "LAMB 1904.00962v1, Table 1"


def get_config(arg: str = "32768") -> TrainConfig:
    """Return a row: a global batch size, `mixed`, `nvidia-mixed`, one on spheres, or `smoke`."""
    row = arg or "32768"
    require_choice("--config row", row, ROWS)

    if row in ON_SPHERES:
        return _on_spheres(row)
    special = {"mixed": _mixed, "nvidia-mixed": _nvidia_mixed, "smoke": _smoke}
    return special[row]() if row in special else _single(row)


def _single(row: str) -> TrainConfig:
    batch = int(row)
    total, f1, time, cores = PUBLISHED[row]

    config = _bert(
        row,
        batch,
        steps=math.ceil(0.9 * total),
        then=total - math.ceil(0.9 * total),
        then_batch=batch,
    )
    config.schedule = ScheduleConfig(
        5e-3,
        base_batch_size=32768,
        scaling_rule="sqrt",
        warmup_rule="none",
        warmup_steps=WARMUP_STEPS,
        decay_from="start",
        decay_steps=total,
        first_step=0,
    )
    assert config.phase2 is not None
    assert config.num_steps is not None
    config.phase2.schedule = _rest_of_the_line(
        5e-3 * math.sqrt(batch / 32768), config.num_steps, total
    )

    split = "[recalled 80%]" if row == "32768" else "our own choice"
    config.about = About(
        paper=_PAPER,
        published_result=f"SQuAD v1.1 dev F1 {f1}",
        hardware=f"{cores} TPUs",
        time=time,
        topology=TOPOLOGIES[cores],
        status="planned by the TPU compiler",
        note="Learning rate, warmup, steps of v5 [recalled 90%]; decay, clip, no bias correction "
        f"as in google-research/albert; split over 128 and 512 tokens {split}. Own choice: "
        "predictions, evaluation batch, intervals.",
    )
    return config


def _on_spheres(row: str) -> TrainConfig:
    name, batch = row.split("-")
    config = _single(batch)
    config.name = f"bert_large_lamb:{row}"
    config.optimizer = OptimizerConfig(name, options={"rest_learning_rate_ratio": 0.2})
    config.about = About(
        topology="v3:32x32",
        status="planned by the TPU compiler",
        note=f"{name} in place of LAMB: our own choice, as are its rate, the row's, and the rate "
        "of the rest. Batch, steps and schedule of the row 32768.",
    )
    return config


def _rest_of_the_line(peak: float, begun: int, total: int) -> ScheduleConfig:
    """Return the schedule peak (1 - t / total) from step `begun` on; its step 0 is `begun`."""
    return ScheduleConfig(
        peak * (1 - begun / total),
        scaling_rule="none",
        warmup_rule="none",
        decay_steps=total - begun,
        first_step=0,
    )


def _mixed() -> TrainConfig:
    config = _bert("mixed", 65536, steps=7037, then=1562, then_batch=32768)
    assert config.phase2 is not None
    config.schedule = _ramp(6e-3, 65536, 2000)
    config.phase2.schedule = _ramp(4e-3, 32768, 200)

    config.about = About(
        paper=_PAPER,
        published_result="SQuAD v1.1 dev F1 90.584",
        hardware="1024 TPU v3",
        time="76.19 min",
        topology="v3:32x32",
        status="planned by the TPU compiler",
        note="Learning rates and warmups of both phases are OURS (NVIDIA's numbers as a starting "
        "point): the authors' are not known. Split of the 8599 steps [recalled 95%]; batches of "
        "the phases, lengths, second ramp [recalled 80%]; decay, clip, no bias correction as in "
        "google-research/albert. Own choice: predictions, moments kept, evaluation batch, "
        "intervals.",
    )
    return config


def _ramp(rate: float, batch: int, warmup_steps: int) -> ScheduleConfig:
    """Return a linear warmup from 0, then a linear decay to 0 at the end of the phase."""
    return common.unscaled(rate, batch=batch, warmup_steps=warmup_steps, decay_from="start")


def _nvidia_mixed() -> TrainConfig:
    config = _bert("nvidia-mixed", 65536, steps=7038, then=1563, then_batch=32768)
    assert config.phase2 is not None
    config.optimizer = OptimizerConfig("lamb", "apex", weight_decay=0.01)

    # (1 - t/T)^.5, t from 1 at the first update: PolyWarmUpScheduler in NVIDIA's schedulers.py.
    config.schedule = _ramp(6e-3, 65536, 2000)
    config.phase2.schedule = _ramp(4e-3, 32768, 200)
    for schedule, steps in ((config.schedule, 7038), (config.phase2.schedule, 1563)):
        schedule.power = 0.5
        schedule.first_step = 1
        schedule.decay_steps = steps

    config.about = About(
        paper=f"{_PAPER}, NVIDIA/DeepLearningExamples@2de2945 PyTorch BERT",
        note="Own choice: moments kept, evaluation batch, intervals.",
    )
    return config


def _bert(row: str, batch: int, steps: int, then: int, then_batch: int) -> TrainConfig:
    """Return the settings that all rows share.

    Args:
      row: Name of the row.
      batch: Global batch size of the first phase, with sequences of 128 tokens.
      steps: Steps of the first phase.
      then: Steps of the second phase, with sequences of 512 tokens.
      then_batch: Global batch size of the second phase.
    """
    data = DataConfig(
        "text_mlm",
        builder="wikipedia_books",
        sequence_length=128,
        max_predictions=20,
        vocab_size=30522,
    )
    phase2 = PhaseConfig(
        num_steps=then,
        global_batch_size=then_batch,
        eval_global_batch_size=min(then_batch, 4096),
        sequence_length=512,
        max_predictions=80,
        optimizer_state="keep",
    )

    return TrainConfig(
        name=f"bert_large_lamb:{row}",
        global_batch_size=batch,
        num_steps=steps,
        data=data,
        model=ModelConfig("bert", size="large", dtype="bfloat16", activation="gelu_tanh"),
        parallel=ParallelConfig(shard_update=batch >= 8192, reduce_dtype="float32"),
        optimizer=OptimizerConfig("lamb", "albert", weight_decay=0.01, clip_stage="replica"),
        phase2=phase2,
        checkpoint=CheckpointConfig(every_steps=max(200, steps // 100)),
        eval_global_batch_size=min(batch, 8192),
        eval_every_steps=max(500, steps // 50),
        log_every_steps=50,
    )


def _smoke() -> TrainConfig:
    """Return the row 32768 with BERT-tiny on Python's help: 4 steps of 32 tokens, then 3 of 64."""
    config = get_config("32768")
    common.make_tiny(config)
    config.num_steps = 4
    config.data = DataConfig("pydoc_mlm", sequence_length=32, max_predictions=5)
    config.model = ModelConfig("bert", size="tiny", max_length=64)

    config.schedule.warmup_steps = 2
    config.schedule.decay_steps = 7
    config.phase2 = PhaseConfig(
        num_steps=3,
        global_batch_size=8,
        eval_global_batch_size=16,
        sequence_length=64,
        max_predictions=9,
        schedule=_rest_of_the_line(5e-3, 4, 7),
    )

    config.checkpoint.every_steps = 1
    config.eval_every_steps = 4
    return config
