"""The compiled step of a published network computes what its paper says."""

import pathlib

import pytest

from lbopt.cli.arguments import call_get_config
from lbopt.plan import topology
from lbopt.plan.make import make_plan

CONFIGS = pathlib.Path(__file__).parents[2] / "configs"


def test_operations_of_resnet_50_without_folding():
    """4.089 G multiply-adds an image and pass (He et al., arXiv 1512.03385, v1.5); folding computes more on purpose."""
    config = call_get_config(f"{CONFIGS}/resnet50_lars.py:official-32768")
    config.global_batch_size, config.schedule.warmup_rule = 16, "none"
    config.model.fold_columns, config.model.batch_norm_scope = False, "global"
    plan = make_plan(config, "resnet", topology.open_topology("v3:1x1"), with_evaluation=False)
    step = plan.phases[0].step
    wanted = 3 * 2 * 4.089e9 * 8
    assert step.flops == pytest.approx(wanted, rel=0.03)
    assert step.matrix_flops == pytest.approx(wanted, rel=0.03)
    assert step.matrix_flops < step.flops
