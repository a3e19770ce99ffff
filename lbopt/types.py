"""Type aliases that every room shares."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax

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


class Unset:
    """The value of an argument that was not given, where None already means something."""

    def __repr__(self) -> str:
        return "<from the variant>"

    def __reduce__(self) -> str:
        return "UNSET"  # the one of the process that reads it, which arguments are compared with


UNSET = Unset()
