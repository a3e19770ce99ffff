"""The compiled program: groups that lie within a replica need no collective; wider groups reduce and do nothing else."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import lbopt
from lbopt import replicas
from lbopt.parallel import mesh as meshes

COLLECTIVE = re.compile(
    r"= \S.*? (all-reduce|all-gather|all-to-all|reduce-scatter|collective-\w+|ragged-all-to-all)(?:-start)?\("
)


def collectives(scope):
    """Compile outputs and input gradients for a batch that is spread over four devices."""
    module, split = lbopt.BatchNorm(scope), meshes.sharded(lbopt.make_mesh(4))

    def loss(x):
        variables = {
            "params": {"scale": jnp.ones(2), "bias": jnp.zeros(2)},
            "batch_stats": {"mean": jnp.zeros(2), "var": jnp.ones(2)},
        }
        y, _ = module.apply(variables, x, use_running_average=False, mutable=["batch_stats"])
        return jnp.sum(jnp.tanh(y) ** 2), y

    def whole(x):
        with replicas.tracing_for(4):
            return jax.grad(loss, has_aux=True)(x)

    compiled = jax.jit(whole, in_shardings=split, out_shardings=split).lower(np.zeros((16, 3, 2), np.float32)).compile()
    return set(COLLECTIVE.findall(compiled.as_text()))


@pytest.mark.parametrize("scope", ["local", "replicas:1", "examples:2", "examples:4"])
def test_groups_within_a_replica_need_no_collective(scope):
    assert collectives(scope) == set()


@pytest.mark.parametrize("scope", ["global", "replicas:2", "examples:8"])
def test_groups_of_whole_replicas_need_only_reductions(scope):
    assert collectives(scope) == {"all-reduce"}
