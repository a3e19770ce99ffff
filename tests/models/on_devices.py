"""Batch norm on a given number of fake devices, over many scopes at once.

The number of devices is fixed when a process starts. Run as a program, `python on_devices.py INPUT
OUTPUT`, this file works through a pickled list of jobs on the devices that XLA_FLAGS asks for.
"""

import pickle
import re
import sys
from pathlib import Path

import jax
import jax.numpy as jnp

import lbopt
from lbopt import replicas
from lbopt.parallel import batch_sharding, make_mesh, replicated_sharding

MOMENTUM = 0.75
COLLECTIVE = re.compile(
    r"= \S.*? (all-reduce|all-gather|all-to-all|reduce-scatter|collective-\w+|ragged-all-to-all)"
    r"(?:-start)?\("
)


def differentiated(scope, options):
    """Return a function for outputs, gradients of sum(weights * tanh(y)) and running statistics."""
    module = lbopt.BatchNorm(scope, momentum=MOMENTUM, **options)

    def loss(x, scale, bias, weights):
        features = x.shape[-1]
        variables = {
            "params": {"scale": scale, "bias": bias},
            "batch_stats": {"mean": jnp.full(features, 5.0), "var": jnp.full(features, 3.0)},
        }
        y, updated = module.apply(variables, x, use_running_average=False, mutable=["batch_stats"])
        return jnp.sum(weights * jnp.tanh(y.astype(jnp.float32))), (y, updated["batch_stats"])

    def everything(x, scale, bias, weights):
        (dx, dscale, dbias), (y, stats) = jax.grad(loss, argnums=(0, 1, 2), has_aux=True)(
            x, scale, bias, weights
        )
        return {"y": y, "dx": dx}, {"dscale": dscale, "dbias": dbias}, stats

    return everything


def run(backend, devices, scopes, arrays, grid=None, **options):
    """Normalize the global batch over every scope, in one program.

    Args:
      backend: "jit" or "pmap".
      devices: number of devices.
      scopes: scopes of `lbopt.BatchNorm`.
      arrays: x [batch, ..., features], scale, bias, weights (shaped like x).
      grid: grid of replicas, in the form that a TPU's mesh gives it.
      options: further options of `lbopt.BatchNorm`.

    Returns:
      Scope -> y, dx, dscale, dbias, mean and var; and the kinds of collectives in the program.
    """
    of_scopes = {scope: differentiated(scope, options) for scope in scopes}
    mesh = make_mesh(devices)
    axis = "data" if backend == "pmap" else None

    def part(*arguments):
        with replicas.tracing_for(devices, axis, grid):
            results = {scope: everything(*arguments) for scope, everything in of_scopes.items()}
        if axis:
            results = {
                scope: (by_example, jax.lax.psum(by_feature, axis), jax.lax.pmean(stats, axis))
                for scope, (by_example, by_feature, stats) in results.items()
            }
        return {name: result[0] for name, result in results.items()}, {
            name: result[1:] for name, result in results.items()
        }

    x, scale, bias, weights = arrays
    if axis:
        mapped = jax.pmap(
            part,
            axis,
            in_axes=(0, None, None, 0),
            out_axes=(0, None),
            devices=list(mesh.devices.flat),
        )
        split = lambda array: array.reshape(devices, -1, *array.shape[1:])  # noqa: E731
        arguments = (split(x), scale, bias, split(weights))
        compiled = mapped.lower(*arguments).compile()
    else:
        split = batch_sharding(mesh)
        same = replicated_sharding(mesh)
        jitted = jax.jit(part, in_shardings=(split, same, same, split), out_shardings=(split, same))
        arguments = jax.device_put((x, scale, bias, weights), (split, same, same, split))
        compiled = jitted.lower(*arguments).compile()
    by_example, summed = jax.device_get(jax.block_until_ready(compiled(*arguments)))
    numbers = {
        scope: {name: array.reshape(x.shape) for name, array in by_example[scope].items()}
        | summed[scope][0]
        | summed[scope][1]
        for scope in scopes
    }
    return numbers, set(COLLECTIVE.findall(compiled.as_text()))


if __name__ == "__main__":
    jobs = pickle.loads(Path(sys.argv[1]).read_bytes())
    Path(sys.argv[2]).write_bytes(
        pickle.dumps([run(*arguments, **options) for arguments, options in jobs])
    )
