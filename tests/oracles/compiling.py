"""Options for XLA where a test compiles more than it computes."""

import jax


def _known(options):
    try:
        jax.jit(lambda: 0).lower().compile(options)
    except jax.errors.JaxRuntimeError:
        return {}
    return options


UNOPTIMIZED = {"xla_backend_optimization_level": 0}
"""Compiles in half the time."""
QUICKLY = UNOPTIMIZED | _known({"xla_cpu_use_fusion_emitters": False})
"""Where this XLA still has its older kernels for fusions: in a sixth. Their sums are rounded in another order than those of a function that is not compiled."""
