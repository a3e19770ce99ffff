"""Type aliases that every room shares."""

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
"""The other Flax collections of a model, for instance `{"batch_stats": ...}`; `{}` if it has none."""

Batch = Mapping[str, Any]
"""Arrays whose leading axis is the batch, for instance `{"image": [batch, 8, 8], "label": [batch]}`."""

Metrics = dict[str, tuple[jax.Array, jax.Array]]
"""Name -> (sum over examples, number of examples): the only form that adds up exactly over devices."""

Mask = bool | None | PyTree | Callable[[Params], PyTree]
"""Which leaves a transform touches: None or True all, False none, a pytree of bools, or params -> pytree."""

Stacked = None | PyTree | Callable[[str, Any], bool | int]
"""Which leaves are stacks of layers: None for none, (path, leaf) -> bool or number of leading layer axes, or a pytree."""

AxisName = str | tuple[str, ...] | None
"""A mapped axis, or several, of `shard_map` or `pmap`; None outside of them."""

LossFn = Callable[
    [Params, ModelState, Batch, jax.Array], tuple[jax.Array, tuple[ModelState, Metrics]]
]
"""(params, model_state, batch, rng) -> (mean loss, (new model_state, metrics))."""

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
