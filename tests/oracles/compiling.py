"""XLA options for tests whose time goes to compilation."""

import jax


def _known(options):
    try:
        jax.jit(lambda: 0).lower().compile(options)
    except jax.errors.JaxRuntimeError:
        return {}
    return options


UNOPTIMIZED = {"xla_backend_optimization_level": 0}
"""Compile without optimizations."""
QUICKLY = UNOPTIMIZED | _known({"xla_cpu_use_fusion_emitters": False})
"""Also use XLA's older kernels for fusions, if this XLA still has them.

Many small fusions then compile in a third of the time. Sums are rounded in another order than in
functions that are not compiled.
"""
