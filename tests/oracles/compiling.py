"""Options for XLA where a test compiles more than it computes."""

import jax


def _known(options):
    try:
        jax.jit(lambda: 0).lower().compile(options)
    except jax.errors.JaxRuntimeError:
        return {}
    return options


UNOPTIMIZED = {"xla_backend_optimization_level": 0}
"""Of what is compiled, nothing is made fast."""
QUICKLY = UNOPTIMIZED | _known({"xla_cpu_use_fusion_emitters": False})
"""The older kernels for fusions besides, where this XLA still has them: many small fusions compile in a third of the time. Their sums
are rounded in another order than those of a function that is not compiled."""
