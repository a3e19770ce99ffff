"""Type aliases that all packages share."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, TypeVar, cast

import jax

T = TypeVar("T")

PyTree = Any
Params = PyTree
"""A pytree of floating-point arrays, usually the `params` collection of a Flax model.

>>> import numpy as np
>>> params = {"dense": {"kernel": np.zeros((64, 10)), "bias": np.zeros(10)}}
"""

ModelState = Mapping[str, PyTree]
"""The other Flax collections of a model, `{"batch_stats": ...}` for instance; `{}` without any.

>>> import numpy as np
>>> model_state = {"batch_stats": {"norm": {"mean": np.zeros(64), "var": np.ones(64)}}}
"""

Batch = Mapping[str, Any]
"""Arrays whose leading axis is the batch: `{"image": [batch, 8, 8], "label": [batch]}`.

>>> import numpy as np
>>> batch = {"image": np.zeros((32, 8, 8), np.float32), "label": np.zeros(32, np.int32)}
"""

Metrics = dict[str, tuple[jax.Array, jax.Array]]
"""Name -> (sum over examples, number of examples), which adds up exactly over devices.

>>> import jax.numpy as jnp
>>> from lbopt.metrics import summed
>>> {name: (float(total), int(count)) for name, (total, count) in
...  {"correct": summed(jnp.array([1.0, 0.0, 1.0]))}.items()}
{'correct': (2.0, 3)}
"""

Mask = bool | None | PyTree | Callable[[Params], PyTree]
"""Leaves that a transform touches: None or True for all, False for none, a pytree of bools, or
params -> such a pytree.

>>> import jax.numpy as jnp, lbopt
>>> mask = {"kernel": True, "bias": False}
>>> optimizer = lbopt.lamb(0.01, weight_decay=0.1, weight_decay_mask=mask)
>>> state = optimizer.init({"kernel": jnp.ones((2, 2)), "bias": jnp.ones(2)})
"""

Stacked = None | PyTree | Callable[[str, Any], bool | int]
"""Leaves that are stacks of layers: None for none, (path, leaf) -> bool or number of leading layer
axes, or a pytree of these.

>>> import jax.numpy as jnp, lbopt
>>> optimizer = lbopt.lamb(0.01, stacked=lambda path, leaf: path.startswith("blocks/"))
>>> state = optimizer.init({"blocks": {"kernel": jnp.ones((12, 8, 8))}})
"""

AxisName = str | tuple[str, ...] | None
"""A mapped axis, or several, of `shard_map` or `pmap`; None outside of them.

>>> import lbopt
>>> optimizer = lbopt.lamb(0.01, axis_name="model")  # each device has a part of every leaf
"""

Loss = jax.Array | tuple[jax.Array, jax.Array]
"""A floating-point scalar, the mean over examples, or a pair of scalars (sum, weight).

>>> import jax.numpy as jnp
>>> each = jnp.array([0.5, 1.5])  # losses of the tokens
>>> counted = jnp.array([1.0, 0.0])
>>> loss = jnp.sum(each * counted), jnp.sum(counted)
"""

LossFn = Callable[[Params, ModelState, Batch, jax.Array], tuple[Loss, tuple[ModelState, Metrics]]]
"""(params, model_state, batch, rng) -> (loss, (new model_state, metrics)).

The loss of a batch is sum / weight. A step that splits the batch over microsteps or replicas
divides the sum of the slices' gradients by the sum of their weights, which is the gradient of the
whole batch. No gradient flows through the weight.

A mean alone is enough if every slice of a batch has the same weight: for a mean over examples, or a
sum divided by a constant. A mean over counted tokens, or over the examples that a mask leaves,
needs the pair.

>>> import jax.numpy as jnp
>>> def loss_fn(params, model_state, batch, rng):
...     error = batch["x"] @ params - batch["y"]
...     return jnp.mean(error**2), (model_state, {})
"""

MetricFn = Callable[[Params, ModelState, Batch], Metrics]
"""(params, model_state, batch) -> metrics, honouring `batch["mask"]`.

>>> from lbopt.metrics import summed
>>> def metric_fn(params, model_state, batch):
...     error = batch["x"] @ params - batch["y"]
...     return {"squared_error": summed(error**2, batch.get("mask"))}
"""


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
