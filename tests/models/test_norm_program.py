"""In the compiled program, groups within a replica need no collective; wider ones reduce only."""

import re

import jax
import numpy as np
import pytest

import lbopt
from lbopt import replicas
from lbopt.parallel import batch_sharding

COLLECTIVE = re.compile(
    r"= \S.*? (all-reduce|all-gather|all-to-all|reduce-scatter|collective-\w+|ragged-all-to-all)"
    r"(?:-start)?\("
)
DEVICES = 4


def collectives(scopes):
    """Compile outputs and input gradients over every scope, with the batch over four devices."""
    modules = [lbopt.BatchNorm(scope, use_scale=False, use_bias=False) for scope in scopes]
    split = batch_sharding(lbopt.make_mesh(DEVICES))
    stats = {"mean": np.zeros(2, np.float32), "var": np.ones(2, np.float32)}

    def differentiated(module, x):
        def outputs(x):
            return module.apply(
                {"batch_stats": stats}, x, use_running_average=False, mutable=["batch_stats"]
            )[0]

        y, pull = jax.vjp(outputs, x)
        return y, pull(y * y)

    def whole(x):
        with replicas.tracing_for(DEVICES):
            return [differentiated(module, x) for module in modules]

    compiled = (
        jax.jit(whole, in_shardings=split, out_shardings=split)
        .lower(np.zeros((16, 3, 2), np.float32))
        .compile()
    )
    return COLLECTIVE.findall(compiled.as_text())


@pytest.mark.parametrize(
    "scopes", [["local", "replicas:1", "examples:2", "examples:4", "tiles:1x1@2x2"]]
)
def test_groups_within_a_replica_need_no_collective(scopes):
    assert collectives(scopes) == []


@pytest.mark.parametrize(
    "scope", ["global", "replicas:2", "examples:8", "tiles:2x1@2x2", "tiles:1x2@2x2"]
)
def test_groups_of_whole_replicas_need_only_reductions(scope):
    """Both moments share one reduction, and so do the sums for their gradients."""
    assert collectives([scope]) == ["all-reduce"] * 2
