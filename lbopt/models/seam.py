"""The thin seam between models and everything else: two functions, so that steps know no framework."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import flax.linen as nn
import jax

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
