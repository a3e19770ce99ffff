"""Trials batched over the chips of a slice beside trials one by one, by the TPU compiler."""

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from lbopt.config import Arm, ModelConfig, OptimizerConfig, ScheduleConfig, SweepConfig, TrainConfig
from lbopt.plan import HloProgram, estimated_cycles, open_topology
from lbopt.sweep import make_cells, make_problems
from lbopt.sweep.lanes import TRIALS_AXIS, Program, TrialBatching, most_lanes

TRIALS_AT_ONCE = 64
MODELS = {"cnn": ModelConfig("cnn", patch_convolutions=False), "mlp": ModelConfig("mlp", (128,))}
CASES = [("mlp", 64), ("mlp", 512), ("cnn", 64), ("cnn", 512), ("cnn", 1024)]


def run() -> list[tuple[str, float, float]]:
    """Return tuples of a case and two numbers of cycles.

    The first is of one step of 64 trials on four chips, the second 64 times that of one trial on
    one chip. If `most_lanes` allows fewer than 64 trials in a call, the first counts several calls.
    """
    devices = open_topology("v5e:2x2").devices
    found = []
    for model, batch_size in CASES:
        width = min(TRIALS_AT_ONCE, most_lanes(batch_size, len(devices)))
        together = TRIALS_AT_ONCE // width * _cycles(model, batch_size, "vmap", devices, width)
        alone = _cycles(model, batch_size, "none", devices[:1], 1)
        found.append((f"{model} batch {batch_size}", together, TRIALS_AT_ONCE * alone))
    return found


def _cycles(model: str, batch_size: int, mode: str, devices, width: int) -> float:
    """Return the cycles of one step; the compiler counts the body of the sweep's loop once."""
    schedule = ScheduleConfig(0.05, warmup_rule="none")
    config = SweepConfig(
        train=TrainConfig(num_epochs=20.0, model=MODELS[model]),
        arms=(Arm("momentum", OptimizerConfig("momentum"), schedule),),
        global_batch_sizes=(batch_size,),
        trials_per_program=TRIALS_AT_ONCE,
        trial_batching=mode,
    )
    config.validate()

    (cell,) = make_cells(config, make_problems(config))
    batching = TrialBatching(config, devices, width)
    program = Program(cell, False, config, batching)
    shapes = [
        jax.tree.map(
            lambda x, place=place: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), part
        )
        for part, place in zip(program.shapes(), _places(batching), strict=True)
    ]
    return estimated_cycles(HloProgram(program.lower(*shapes).compile().as_text()))


def _places(batching: TrialBatching) -> list:
    if len(batching.devices) == 1:
        return [SingleDeviceSharding(batching.devices[0])] * 4
    mesh = Mesh(np.array(batching.devices), (TRIALS_AXIS,))
    return [
        NamedSharding(mesh, spec)
        for spec in (PartitionSpec(),) * 2 + (PartitionSpec(TRIALS_AXIS),) * 2
    ]
