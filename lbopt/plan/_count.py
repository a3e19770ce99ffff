"""Operations and layers of a network, counted in the program that JAX traces."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax.extend import core

_CALLS = ("jaxpr", "call_jaxpr", "fun_jaxpr")


@dataclasses.dataclass(frozen=True)
class LayerSizes:
    """A matrix product or convolution of activations with weights.

    Attributes:
      path: Path of the module, as JAX names it.
      flops: Number of multiplications and additions.
      inputs: Number of elements of the activations, the array that depends on the batch.
      weights: Number of elements of the weights, counted once if a loop uses them again.
      outputs: Number of elements of the result.
    """

    path: str
    flops: int
    inputs: int
    weights: int
    outputs: int

    @property
    def dp_limit(self) -> int:
        """The most devices for which cutting only the batch is communication-optimal.

        For a dense layer this is `lbopt.plan.dp_limit`. The same rule is used for a convolution:
        cutting its output channels multiplies the inputs that a device receives, and cutting its
        input channels multiplies the outputs.
        """
        return max(1, 2 * min(self.inputs, self.outputs) // self.weights)


@dataclasses.dataclass(frozen=True)
class OperationCount:
    """The operations of a function.

    Attributes:
      flops: Multiplications and additions of all matrix products and convolutions, with loops
        multiplied out.
      layers: The products and convolutions that have weights.
    """

    flops: int
    layers: tuple[LayerSizes, ...]


def count(fn: Callable[..., Any], weights: Any, batch: Any) -> OperationCount:
    """Trace `fn(*weights, batch)` and count its operations.

    Args:
      fn: The forward pass.
      weights: Shapes of the arguments that do not depend on the batch.
      batch: Shapes of the batch.
    """
    closed = jax.make_jaxpr(fn)(*weights, batch)
    num_weights = len(jax.tree.leaves(weights))
    depends = [number >= num_weights for number in range(len(closed.jaxpr.invars))]
    found = list(_products(closed.jaxpr, depends, 1, [False] * len(depends)))
    return OperationCount(
        sum(flops for flops, _ in found), tuple(layer for _, layer in found if layer is not None)
    )


def _products(
    jaxpr: core.Jaxpr, depends: Sequence[bool], times: int, repeated: Sequence[bool]
) -> Iterator[tuple[int, LayerSizes | None]]:
    """Yield the operations of every product, with its layer if it has weights.

    Args:
      jaxpr: The function.
      depends: Whether each argument depends on the batch.
      times: Number of times that the function runs.
      repeated: Whether each argument is the same in all of these runs.
    """
    known = dict(zip(jaxpr.invars, zip(depends, repeated, strict=True), strict=True))

    def flags_of(variable: Any) -> tuple[bool, bool]:
        if isinstance(variable, core.Literal):
            return False, True
        return known.get(variable, (False, True))

    for equation in jaxpr.eqns:
        inputs = [flags_of(variable) for variable in equation.invars]
        name = equation.primitive.name
        if name in ("dot_general", "conv_general_dilated"):
            yield _product(equation, inputs, times)
        elif name == "scan":
            yield from _scanned(equation, inputs, times)
        elif name == "while":
            yield from _called(
                equation.params["body_jaxpr"], inputs[equation.params["cond_nconsts"] :], times
            )
        elif name == "cond":
            # Only one branch runs; the plan assumes the most expensive one.
            branches = equation.params["branches"]
            counted = [list(_called(branch, inputs[1:], times)) for branch in branches]
            yield from max(counted, key=_total)
        else:
            for field in _CALLS:
                if field in equation.params:
                    yield from _called(equation.params[field], inputs, times)
                    break

        depends_on_batch = any(depend for depend, _ in inputs)
        is_same = all(same for _, same in inputs)
        known.update((variable, (depends_on_batch, is_same)) for variable in equation.outvars)


def _total(found: list[tuple[int, LayerSizes | None]]) -> int:
    return sum(flops for flops, _ in found)


def _called(
    inner: Any, inputs: Sequence[tuple[bool, bool]], times: int
) -> Iterator[tuple[int, LayerSizes | None]]:
    jaxpr = getattr(inner, "jaxpr", inner)
    inputs = list(inputs)[-len(jaxpr.invars) :] if jaxpr.invars else []
    yield from _products(
        jaxpr, [depend for depend, _ in inputs], times, [same for _, same in inputs]
    )


def _scanned(
    equation: Any, inputs: Sequence[tuple[bool, bool]], times: int
) -> Iterator[tuple[int, LayerSizes | None]]:
    """Yield the products of a scan's body.

    Its constants are the same in every iteration. Its carry depends on the batch if any input does.
    """
    params = equation.params
    if "ft_in" in params:  # since JAX 0.12
        constants, carried, _ = map(len, params["ft_in"].unpack())
    else:
        constants = params["num_consts"]
        carried = params["num_carry"]

    any_batch = any(depend for depend, _ in inputs)
    repeated = [number < constants for number in range(len(inputs))]
    depends = [
        depend or (constants <= number < constants + carried and any_batch)
        for number, (depend, _) in enumerate(inputs)
    ]
    body = getattr(params["jaxpr"], "jaxpr", params["jaxpr"])
    yield from _products(body, depends, times * params["length"], repeated)


def _product(
    equation: Any, inputs: Sequence[tuple[bool, bool]], times: int
) -> tuple[int, LayerSizes | None]:
    left, right = (variable.aval for variable in equation.invars)
    result = equation.outvars[0].aval
    if equation.primitive.name == "dot_general":
        (contracted, _), _ = equation.params["dimension_numbers"]
        flops = 2 * result.size * math.prod(left.shape[dim] for dim in contracted)
    else:
        flops = _convolution(equation, right, result)
    flops *= times

    (left_depends, left_same), (right_depends, right_same) = inputs
    # A layer multiplies a batch by weights; attention multiplies a batch by a batch.
    if left_depends == right_depends:
        return flops, None

    batch, weight, same = (left, right, right_same) if left_depends else (right, left, left_same)
    layer = LayerSizes(
        path=str(equation.source_info.name_stack),
        flops=flops,
        inputs=batch.size * times,
        weights=weight.size * (1 if same else times),
        outputs=result.size * times,
    )
    return flops, layer


def _convolution(equation: Any, kernel: Any, result: Any) -> int:
    """Return the operations of a convolution, padding included as in published counts."""
    numbers = equation.params["dimension_numbers"]
    each = math.prod(np.delete(kernel.shape, numbers.rhs_spec[0]).tolist())
    return 2 * result.size * each
