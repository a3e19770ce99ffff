"""The thin seam between models and everything else: two functions, so that steps know no framework."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import flax.linen as nn
import jax
from flax import nnx

from lbopt import types


class Model(NamedTuple):
    """A model as the rest of lbopt sees it.

    Attributes:
      init: (key, example inputs) -> (params, model_state).
      apply: (params, model_state, inputs, train, rng) -> (outputs, new model_state).
    """

    init: Callable[[jax.Array, Any], tuple[types.Params, types.ModelState]]
    apply: Callable[..., tuple[Any, types.ModelState]]


def from_linen(module: nn.Module) -> Model:
    """Wrap a Linen module called as `module(inputs, train=...)`.

    Its random streams, both from the step's key: "dropout" for Flax's own layers, "example" for those of
    `lbopt.models.randomness`.
    """

    def init(key: jax.Array, inputs: Any) -> tuple[types.Params, types.ModelState]:
        variables = dict(module.init(key, inputs, train=True))
        return variables.pop("params"), variables

    def apply(
        params: types.Params, model_state: types.ModelState, inputs: Any, train: bool, rng: jax.Array | None = None
    ):
        variables = {"params": params, **model_state}
        if not train:
            return module.apply(variables, inputs, train=False), model_state
        rngs = None if rng is None else {"dropout": rng, "example": rng}
        outputs, updated = module.apply(variables, inputs, train=True, mutable=list(model_state), rngs=rngs)
        return outputs, {**model_state, **updated}

    return Model(init, apply)


def from_nnx(build: Callable[[nnx.Rngs], nnx.Module]) -> Model:
    """Wrap the NNX module that `build(rngs)` makes, called as `module(inputs, train, rngs=...)`.

    Variables that are not parameters (batch statistics) are the model's state; the module holds no random streams of its
    own (`nnx.Dropout(rate)` without `rngs`). NNX's dropout draws for the batch it sees: train with
    `make_train_step(key_per_replica=True)`, the default.
    """
    graph, _, _ = nnx.split(nnx.eval_shape(lambda: build(nnx.Rngs(0))), nnx.Param, ...)

    def init(key: jax.Array, inputs: Any) -> tuple[types.Params, types.ModelState]:
        del inputs  # NNX modules are told their shapes
        _, params, rest = nnx.split(build(nnx.Rngs(key)), nnx.Param, ...)
        return nnx.to_pure_dict(params), nnx.to_pure_dict(rest)

    def apply(
        params: types.Params, model_state: types.ModelState, inputs: Any, train: bool, rng: jax.Array | None = None
    ):
        module = nnx.merge(graph, params, model_state)
        outputs = module(inputs, train, rngs=None if rng is None else nnx.Rngs(dropout=rng))
        return outputs, nnx.to_pure_dict(nnx.state(module, nnx.Not(nnx.Param))) if train else model_state

    return Model(init, apply)
