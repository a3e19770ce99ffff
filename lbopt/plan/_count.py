"""Operations and layers of a network, counted in the program that JAX traces; no compiler involved."""

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
class Layer:
    """A matrix product or convolution of what depends on the batch with what does not.

    Attributes:
      path: of the module, as JAX names it.
      flops: multiplications and additions.
      inputs: elements of the batch's side.
      weights: elements of the other side, counted once if a loop takes them again.
      outputs: elements.
    """

    path: str
    flops: int
    inputs: int
    weights: int
    outputs: int

    @property
    def dp_limit(self) -> int:
        """Up to how many devices cutting the batch alone is communication-optimal.

        For a dense layer this is `lbopt.plan.dp_limit`. A convolution is taken alike: cutting its output channels
        multiplies the inputs that a device receives, cutting its input channels the outputs.
        """
        return max(1, min(self.inputs, self.outputs) // self.weights)


@dataclasses.dataclass(frozen=True)
class Count:
    """What a function computes.

    Attributes:
      flops: multiplications and additions of all matrix products and convolutions, loops multiplied out.
      layers: those with weights.
    """

    flops: int
    layers: tuple[Layer, ...]


def count(fn: Callable[..., Any], weights: Any, batch: Any) -> Count:
    """Trace `fn(*weights, batch)` and count.

    Args:
      fn: the forward pass.
      weights: arguments that do not depend on the batch, as shapes.
      batch: as shapes.
    """
    closed = jax.make_jaxpr(fn)(*weights, batch)
    num_weights = len(jax.tree.leaves(weights))
    depends = [number >= num_weights for number in range(len(closed.jaxpr.invars))]
    found = list(_products(closed.jaxpr, depends, 1, [False] * len(depends)))
    return Count(
        sum(flops for flops, _ in found), tuple(layer for _, layer in found if layer is not None)
    )


def _products(
    jaxpr: core.Jaxpr, depends: Sequence[bool], times: int, repeated: Sequence[bool]
) -> Iterator[tuple[int, Layer | None]]:
    """Yield (operations, layer) of every product.

    Args:
      jaxpr: of the function.
      depends: which arguments depend on the batch.
      times: how often the function runs.
      repeated: which arguments are the same every time it does.
    """
    known = dict(zip(jaxpr.invars, zip(depends, repeated, strict=True), strict=True))

    def of(variable: Any) -> tuple[bool, bool]:
        return (
            (False, True)
            if isinstance(variable, core.Literal)
            else known.get(variable, (False, True))
        )

    for equation in jaxpr.eqns:
        inputs = [of(variable) for variable in equation.invars]
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
            yield from max(
                (
                    list(_called(branch, inputs[1:], times))
                    for branch in equation.params["branches"]
                ),
                key=_total,
            )
        else:
            for field in _CALLS:
                if field in equation.params:
                    yield from _called(equation.params[field], inputs, times)
                    break
        flags = any(depend for depend, _ in inputs), all(same for _, same in inputs)
        known.update((variable, flags) for variable in equation.outvars)


def _total(found: list[tuple[int, Layer | None]]) -> int:
    return sum(flops for flops, _ in found)


def _called(
    inner: Any, inputs: Sequence[tuple[bool, bool]], times: int
) -> Iterator[tuple[int, Layer | None]]:
    jaxpr = getattr(inner, "jaxpr", inner)
    inputs = list(inputs)[-len(jaxpr.invars) :] if jaxpr.invars else []
    yield from _products(
        jaxpr, [depend for depend, _ in inputs], times, [same for _, same in inputs]
    )


def _scanned(
    equation: Any, inputs: Sequence[tuple[bool, bool]], times: int
) -> Iterator[tuple[int, Layer | None]]:
    """Constants are the same in every turn; what is carried depends on the batch if anything does."""
    params = equation.params
    constants, carried = params["num_consts"], params["num_carry"]
    any_batch = any(depend for depend, _ in inputs)
    repeated = [number < constants for number in range(len(inputs))]
    depends = [
        depend or (constants <= number < constants + carried and any_batch)
        for number, (depend, _) in enumerate(inputs)
    ]
    yield from _products(params["jaxpr"].jaxpr, depends, times * params["length"], repeated)


def _product(
    equation: Any, inputs: Sequence[tuple[bool, bool]], times: int
) -> tuple[int, Layer | None]:
    left, right = (variable.aval for variable in equation.invars)
    result = equation.outvars[0].aval
    if equation.primitive.name == "dot_general":
        (contracted, _), _ = equation.params["dimension_numbers"]
        flops = 2 * result.size * math.prod(left.shape[dim] for dim in contracted)
    else:
        flops = _convolution(equation, right, result)
    flops *= times
    (left_depends, left_same), (right_depends, right_same) = inputs
    if left_depends == right_depends:
        return flops, None
    batch, weight, same = (left, right, right_same) if left_depends else (right, left, left_same)
    path = str(equation.source_info.name_stack)
    layer = Layer(
        path, flops, batch.size * times, weight.size * (1 if same else times), result.size * times
    )
    return flops, layer


def _convolution(equation: Any, kernel: Any, result: Any) -> int:
    """Count as if every place of the kernel met an element: padding is part of the usual count."""
    numbers = equation.params["dimension_numbers"]
    each = math.prod(np.delete(kernel.shape, numbers.rhs_spec[0]).tolist())
    return 2 * result.size * each
