"""A recipe of configs/ with some fields changed, trained to its end on one device."""

import functools
import pathlib

import jax

from lbopt.cli import call_get_config
from lbopt.recipes import build_run

CONFIGS = pathlib.Path(__file__).parents[2] / "configs"


def trained(row, **changes):
    """Return the test metrics of a run on one device."""
    config = call_get_config(str(CONFIGS / row))
    config.parallel.num_devices = 1
    for path, value in changes.items():
        *parts, field = path.split("__")
        part = functools.reduce(getattr, parts, config)
        assert hasattr(part, field)
        setattr(part, field, value)
    run = build_run(config)
    state = run.init()
    for step in range(run.num_steps):
        state, metrics = run.train_step(state, run.batches[step])
        jax.block_until_ready(metrics)
    return run.evaluate_test(state), config
