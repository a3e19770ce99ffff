"""`lbopt.run_plan`: a plan of a problem that is in no file."""

import flax.linen as nn
import jax
import numpy as np
import pytest
from refusal import refused

import lbopt

pytestmark = pytest.mark.tpu_compiler


class Net(nn.Module):
    outputs: int

    @nn.compact
    def __call__(self, x):
        return nn.Dense(self.outputs)(x)


def test_a_plan_is_that_of_the_step_and_leaves_the_program_as_it_was():
    problem = lbopt.Problem({"x": np.zeros((64, 3)), "label": np.arange(64) % 2}, Net)
    cached = jax.config.values["jax_enable_compilation_cache"]
    fields = {"global_batch_size": 32, "num_steps": 5, "evaluation": False}
    plan = lbopt.run_plan(problem, "lamb", topology="v5e:2x4", **fields)
    assert plan.fits
    assert plan.num_devices == 8
    assert "fits: needs" in str(plan)
    assert jax.config.values["jax_enable_compilation_cache"] is cached
    with refused("topology"):
        lbopt.run_plan(problem, "lamb", topology="v9:2x4", **fields)
