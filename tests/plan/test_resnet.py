"""The compiled step of a published network computes what its paper says."""

import pathlib

import pytest

from lbopt.cli import call_get_config
from lbopt.config import ScheduleConfig
from lbopt.plan import make_plan, open_topology

pytestmark = pytest.mark.tpu_compiler

CONFIGS = pathlib.Path(__file__).parents[2] / "configs"


def taps(side, channels_in, channels, size=3, stride=1):
    """Multiply-adds of a convolution to side x side outputs whose padding is not multiplied."""
    pad = max(0, size - stride)
    left = pad // 2
    right = pad - pad // 2
    outside = sum(
        max(0, left - stride * place) + max(0, right - stride * place) for place in range(side)
    )
    return (size * side - outside) ** 2 * channels_in * channels


STEM = taps(112, 3, 64, 7, 2)
MULTIPLY_ADDS = STEM + 4 * taps(56, 64, 64) + 512 * 1000
for side, channels in ((28, 128), (14, 256), (7, 512)):
    half = channels // 2
    MULTIPLY_ADDS += (
        taps(side, half, channels, 3, 2)
        + 3 * taps(side, channels, channels)
        + side**2 * half * channels
    )


@pytest.mark.slow
def test_operations_of_resnet_18_without_folding():
    """The backward pass takes twice the forward pass, except for the gradient of the images.

    The number of multiply-adds is that of He et al., arXiv 1512.03385v1.
    """
    assert round(MULTIPLY_ADDS / 1e9, 1) == 1.7  # the paper's 1.8e9 with the padding
    config = call_get_config(f"{CONFIGS}/resnet50_lars.py:official-32768")
    config.model.size = "18"
    config.model.zero_init_residual = False
    config.global_batch_size = 16
    config.schedule = ScheduleConfig(warmup_rule="none")
    config.model.fold_columns = False
    config.model.batch_norm_scope = "global"
    plan = make_plan(config, "resnet", open_topology("v3:1x1"), with_evaluation=False)
    step = plan.phases[0].step
    wanted = 2 * (3 * MULTIPLY_ADDS - STEM) * 8
    assert step.matrix_flops == pytest.approx(wanted, rel=0.03)
    assert step.matrix_flops < step.flops < 1.05 * wanted
