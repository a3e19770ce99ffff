"""LAMB on BERT-Large as MLPerf v0.7 and v1.0 ran it: to a masked-LM accuracy of .712 or .720.

    lbopt train --config=configs/bert_mlperf.py:8192 --workdir=runs/bert --config.init_from=FOLDER

Source: mlcommons/training_results_v0.7 at c664061 and _v1.0 at 8200377, folder Google: code, run
scripts and logs; tests/configs/published.json names the file of each number. Time is from run_start
to run_stop. The run starts from MLPerf's checkpoint: `--config.init_from` takes a workdir, a file
of `lbopt export`, or a folder of Transformers; the rows name checkpoints/bert_large_mlperf, a place
of our own choice. Data: `lbopt prepare text --name=wikipedia --tfds=...`. `--config.mllog=True`
prints MLPerf's log lines.

    row     round and system           accuracy    reached at step      time, s
    256     v0.7 v4-16                 .712        11718 of 13700       2734
    448     v0.7 v3-32 TF2             .712        ~6-7 evaluations     3100-3700
    440     v0.7 gpu-8                 .712        ~6-7 evaluations     11600-13800
    3072    v0.7 v4-128                .712        978-1141 of 1141     324-378
    8192    v0.7 v3-8192 JAX and TF    .712        496 of 560           JAX 23.7-26.9, TF 23.3-23.9
    6144    v1.0 v4-4096               .720        ~528-561 of 700      18.6-19.8
    6912    v1.0 v4-6912               .720        462-561 of 700       13.2-19.6
    smoke   BERT-tiny on Python's help topics, seconds on a CPU

At 8192 the warmup begins 76 steps before the run and the decay is counted from step 0: the rate
rises to 286/287 of its base at step 210 and drops to .623 of it at step 211. v1.0 has no warmup.
One of the ten JAX runs at 8192 stopped at step 558. Default row: 8192.

Own choices: the corpus's name (wikipedia), evaluation batch, intervals, rematerialisation of
attention at 3072 (without it 48 examples per chip need 31.6 GiB of 30.7 by the TPU compiler).
Variants: mlperf_jax at 8192 (the TensorFlow code adapts no bias and no layer norm:
`--config.optimizer.variant=mlperf_tf`), mlperf_tf in the other rows. Each replica's gradient is
clipped, cast to bf16 and averaged. All sources but TF2's sum in bf16 and do not divide; this
changes LAMB's update only through eps. The source of 440 clips each of its 11 microsteps.
Status: the rows with a TPU system are planned (configs/plans/); no row has been run here.
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

_REACHED = "masked-LM accuracy"
TABLE = {
    # Learning rate, b1, b2, weight decay, warmup steps, first step of the warmup, steps, steps
    # between evaluations, target, result, hardware and time of each batch size.
    "256": (
        3.5e-4,
        0.9,
        0.999,
        0.01,
        0,
        0,
        13700,
        1953,
        0.712,
        "step 11718 of 13700",
        "TPU v4-16",
        "2734 s",
    ),
    "448": (
        4e-4,
        0.9,
        0.999,
        0.01,
        0,
        0,
        8103,
        1116,
        0.712,
        "~6-7 evaluations",
        "TPU v3-32",
        "3100-3700 s",
    ),
    "440": (
        4e-4,
        0.9,
        0.999,
        0.01,
        0,
        0,
        8103,
        1136,
        0.712,
        "~6-7 evaluations",
        "gpu-8",
        "11600-13800 s",
    ),
    "3072": (
        1.5e-3,
        0.9,
        0.999,
        0.01,
        100,
        0,
        1141,
        163,
        0.712,
        "step 978-1141 of 1141",
        "TPU v4-128",
        "324-378 s",
    ),
    "8192": (
        2.88293e-3,
        0.88,
        0.88,
        0.0166629,
        287,
        -76,
        560,
        62,
        0.712,
        "step 496 of 560",
        "TPU v3-8192",
        "JAX 23.7-26.9, TensorFlow 23.3-23.9 s",
    ),
    "6144": (
        2.9293e-3,
        0.7206,
        0.78921,
        0.001,
        0,
        -700,
        700,
        33,
        0.72,
        "step ~528-561 of 700",
        "TPU v4-4096",
        "18.6-19.8 s",
    ),
    "6912": (
        2.9293e-3,
        0.7206,
        0.78921,
        0.001,
        0,
        -700,
        700,
        33,
        0.72,
        "step 462-561 of 700",
        "TPU v4-6912",
        "13.2-19.6 s",
    ),
}
ROWS = (*TABLE, "smoke")


def get_config(arg: str = "8192") -> TrainConfig:
    """Return a row: a global batch size, or `smoke`."""
    row = arg or "8192"
    require_choice("--config row", row, ROWS)

    return _smoke() if row == "smoke" else _row(row)


def _row(row: str) -> TrainConfig:
    settings = TABLE[row]
    rate, b1, b2, decay, warmup, start, steps, evaluation = settings[:8]
    target, result, hardware, time = settings[8:]
    batch = int(row)
    topology = common.MLPERF_TOPOLOGIES.get(hardware, "")

    return TrainConfig(
        name=f"bert_mlperf:{row}",
        about=About(
            paper=f"MLPerf BERT {'v0.7' if target == 0.712 else 'v1.0'}, LAMB 1904.00962v5",
            published_result=f"{_REACHED} {f'{target:.3f}'.lstrip('0')}, {result}",
            hardware=hardware,
            time=time,
            topology=topology,
            status="planned by the TPU compiler" if topology else "not yet run",
            note="Own choice: corpus, place of the checkpoint, evaluation batch, intervals"
            + ("" if row == "8192" else ", variant")
            + (", rematerialisation" if row == "3072" else "")
            + ". The mean of gradients is taken, of sums in bf16; the source keeps the sum.",
        ),
        global_batch_size=batch,
        num_steps=steps,
        data=DataConfig(
            "text_mlm",
            builder="wikipedia",
            sequence_length=512,
            max_predictions=76,
            vocab_size=30522,
        ),
        model=ModelConfig(
            "bert",
            size="large",
            dtype="bfloat16",
            activation="gelu_tanh",
            remat="attention" if row == "3072" else "none",
        ),
        optimizer=OptimizerConfig(
            "lamb",
            "mlperf_jax" if row == "8192" else "mlperf_tf",
            weight_decay=decay,
            b1=b1,
            b2=b2,
            eps=1e-6,
            clip_stage="replica",
        ),
        schedule=common.unscaled(
            rate,
            batch=batch,
            warmup_steps=warmup,
            start_step=start,
            # Without a warmup the decay has one origin only.
            decay_from="start" if warmup or start else "warmup_end",
        ),
        parallel=ParallelConfig(shard_update=True, reduce_dtype="bfloat16"),
        checkpoint=CheckpointConfig(every_steps=max(100, steps // 10)),
        eval_global_batch_size=min(batch, 4096),
        eval_every_steps=evaluation,
        log_every_steps=10,
        target_metric="eval/accuracy",
        target_value=target,
        stop_at_target=True,
        init_from="checkpoints/bert_large_mlperf",
    )


def _smoke() -> TrainConfig:
    """Return the row 8192 with BERT-tiny on Python's help topics, from fresh parameters."""
    config = get_config("8192")
    common.make_tiny(config, keep_target=True)
    config.num_steps = 6
    config.init_from = None
    config.data = DataConfig("pydoc_mlm", sequence_length=32, max_predictions=5)
    config.model = ModelConfig("bert", size="tiny", max_length=64)

    config.schedule.warmup_steps = 3
    config.schedule.start_step = -1
    config.eval_every_steps = 3
    return config
