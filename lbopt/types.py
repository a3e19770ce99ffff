"""Type aliases that all packages share."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, TypeVar, cast

import jax

T = TypeVar("T")

PyTree = Any
Params = PyTree
"""A pytree of floating-point arrays, usually the `params` collection of a Flax model."""

ModelState = Mapping[str, PyTree]
"""The other Flax collections of a model, `{"batch_stats": ...}` for instance; `{}` without any."""

Batch = Mapping[str, Any]
"""Arrays whose leading axis is the batch: `{"image": [batch, 8, 8], "label": [batch]}`."""

Metrics = dict[str, tuple[jax.Array, jax.Array]]
"""Name -> (sum over examples, number of examples), which adds up exactly over devices."""

Mask = bool | None | PyTree | Callable[[Params], PyTree]
"""Leaves that a transform touches: None or True for all, False for none, a pytree of bools, or
params -> such a pytree."""

Stacked = None | PyTree | Callable[[str, Any], bool | int]
"""Leaves that are stacks of layers: None for none, (path, leaf) -> bool or number of leading layer
axes, or a pytree of these."""

AxisName = str | tuple[str, ...] | None
"""A mapped axis, or several, of `shard_map` or `pmap`; None outside of them."""

Loss = jax.Array | tuple[jax.Array, jax.Array]
"""A floating-point scalar, the mean over examples, or a pair of scalars (sum, weight)."""

LossFn = Callable[[Params, ModelState, Batch, jax.Array], tuple[Loss, tuple[ModelState, Metrics]]]
"""(params, model_state, batch, rng) -> (loss, (new model_state, metrics)).

The loss of a batch is sum / weight. A step that splits the batch over microsteps or replicas
divides the sum of the slices' gradients by the sum of their weights, which is the gradient of the
whole batch. No gradient flows through the weight.

A mean alone is enough if every slice of a batch has the same weight: for a mean over examples, or a
sum divided by a constant. A mean over counted tokens, or over the examples that a mask leaves,
needs the pair.
"""

MetricFn = Callable[[Params, ModelState, Batch], Metrics]
"""(params, model_state, batch) -> metrics, honouring `batch["mask"]`."""


@dataclasses.dataclass(frozen=True, repr=False)
class Default:
    """A default argument, told apart from the same value given by a caller; see `default`."""

    value: Any

    def __repr__(self) -> str:
        return repr(self.value)


def default(value: T) -> T:
    """Mark a value as the default of an argument.

    `help` shows the value and its type. The function can tell that the caller gave nothing, so that
    something else, an optimizer's variant, may choose. `optax.inject_hyperparams` neither injects
    the value nor takes a mask for a schedule: a `Default` is no number and cannot be called.

    >>> default(0.9), isinstance(default(0.9), Default)
    (0.9, True)
    """
    return cast(T, Default(value))
