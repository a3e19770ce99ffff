"""Bytes between two slices of TPU v5e in a step: local steps beside the plain step.

The step is BERT-Base's with LAMB, compiled for two slices of 16 chips. The bytes are those that a
chip sends to the other slice, read from the compiled program: on average over a round of 32 steps
for local steps, whose exchange comes once in a round. The peer is the plain data-parallel step.
"""

import dataclasses
import functools
import sys
from collections.abc import Iterator

import pairs
from jax.experimental import topologies

from lbopt.cli import call_get_config
from lbopt.config import AggregatorConfig, DilocoConfig, ParallelConfig, TrainConfig
from lbopt.data.from_config import known_source
from lbopt.plan import HloProgram, bytes_between_slices
from lbopt.recipes import build_run

RECIPE = "configs/bert_large_lamb.py:32768"
SLICE = "v5e:4x4"
SLICES = 2
BATCH = 512
EVERY = 32
PADDING = 1.05
"""Bytes that are allowed beyond the promised ones: arrays are padded to tiles."""
CASES = {
    "mean": (AggregatorConfig("mean", over="slices"), DilocoConfig(EVERY)),
    "APS in 8 bits": (
        AggregatorConfig("aps", exponent_bits=5, mantissa_bits=2, over="slices"),
        DilocoConfig(EVERY),
    ),
    "PowerSGD of rank 4": (
        AggregatorConfig("powersgd", rank=4, start_step=0, over="slices"),
        DilocoConfig(EVERY, outer_learning_rate=1.0, outer_momentum=0.0),
    ),
}


def run() -> Iterator[dict]:
    """Compile every step and yield the rows."""
    plain, _ = _sent(AggregatorConfig(), DilocoConfig())
    for name, (aggregator, local) in CASES.items():
        sent, promised = _sent(aggregator, local)
        assert sent >= promised, f"the program of {name} is not read whole"
        title = f"{name}, exchanged every {EVERY} steps: sent to the other slice by a chip"
        aim = ("lbopt", "<=", PADDING * promised)
        yield pairs.row(title, "MB/step", sent, plain, "plain step", plain / sent, aim)


def _sent(aggregator: AggregatorConfig, local: DilocoConfig) -> tuple[float, float]:
    """Return the megabytes that a chip sends to the other slice, compiled and promised."""
    print(f"compiling {aggregator.name}, every {local.every} steps ...", file=sys.stderr)
    config = dataclasses.replace(_config(), aggregator=aggregator, diloco=local)
    training = build_run(config, _devices(), known_source)
    step = training.train_step
    program = HloProgram(training.lower().compile().as_text(), step.exchanges)
    promised = 0.0
    if step.aggregation is not None:
        promised = step.aggregation.wire_bytes(training.shapes().params).sent
    return bytes_between_slices(program, SLICES) / 1e6, promised / 1e6


def _config() -> TrainConfig:
    config = call_get_config(RECIPE)
    config.global_batch_size = BATCH
    config.model.size = "base"
    config.model.scan_layers = True
    config.parallel = ParallelConfig()
    config.phase2 = None
    return config


@functools.cache
def _devices() -> tuple:
    return tuple(topologies.get_topology_desc(SLICE, platform="tpu", num_slices=SLICES).devices)
