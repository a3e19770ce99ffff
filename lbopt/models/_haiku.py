"""The seam to Haiku."""

from __future__ import annotations

from typing import Any

import jax

from lbopt import types
from lbopt.errors import UserError
from lbopt.models._seam import MODES, Model, call_arguments, is_made_by, signature


def from_haiku(transformed: Any) -> Model:
    """Wrap what `haiku.transform` or `haiku.transform_with_state` returns.

    Its function is called as `function(inputs, is_training=...)`; instead of `is_training` it may
    have another argument, and inputs may be a dict, as in `from_linen`. Parameters keep Haiku's
    names, `{"net/~/linear": {"w": ..., "b": ...}}`. Haiku's state, such as batch statistics, is the
    entry "state" of the model's state.

    Random numbers come from the step's key, and `haiku.without_apply_rng` is allowed. Haiku draws
    for the whole batch that the function sees. In evaluation a function that is told its mode gets
    a fixed key, which it should not use for its outputs; one that is not told gets no key, and is
    refused if it draws.

    Args:
      transformed: The pair of functions.

    >>> import haiku as hk, jax, jax.numpy as jnp  # doctest: +SKIP
    >>> model = from_haiku(hk.transform(lambda x: hk.Linear(2)(x)))  # doctest: +SKIP
    >>> params, state = model.init(jax.random.key(0), jnp.ones((4, 3)))  # doctest: +SKIP
    >>> params["linear"]["w"].shape  # doctest: +SKIP
    (3, 2)
    """
    fix = f"a {type(transformed).__name__} is no pair of hk.transform or hk.transform_with_state"
    if not is_made_by("haiku", transformed, "Transformed", "TransformedWithState"):
        raise UserError("transformed", reason=fix, code="type")
    # Haiku puts rng before the function's own arguments in `init`; params, and perhaps state and
    # rng, in `apply`.
    taken = dict(list(signature(transformed.init).items())[1:])
    has_state = is_made_by("haiku", transformed, "TransformedWithState")
    takes_rng = len(signature(transformed.apply)) == len(taken) + has_state + 2

    def init(key: jax.Array, inputs: Any) -> tuple[types.Params, types.ModelState]:
        positional, named, modes = call_arguments(taken, inputs, train=True)
        found = transformed.init(key, *positional, **named, **modes)
        params, state = found if has_state else (found, {})
        return _plain(params), {"state": _plain(state)} if state else {}

    def apply(
        params: types.Params,
        model_state: types.ModelState,
        inputs: Any,
        train: bool,
        rng: jax.Array | None = None,
    ):
        positional, named, modes = call_arguments(taken, inputs, train)
        if not train:
            rng = jax.random.key(0) if modes else None
        first = [params, model_state.get("state", {})] if has_state else [params]
        first += [rng] if takes_rng else []

        try:
            result = transformed.apply(*first, *positional, **named, **modes)
        except ValueError as error:
            if train or type(error).__name__ != "MissingRNGError":
                raise
            fix = "it draws random numbers in evaluation; let it take one of "
            raise UserError("model", reason=f"{fix}{', '.join(MODES)}", code="type") from error
        outputs, state = result if has_state else (result, {})
        return outputs, {**model_state, "state": _plain(state)} if train and state else model_state

    return Model(init, apply)


def _plain(two_levels: Any) -> dict[str, dict[str, Any]]:
    return {module: dict(arrays) for module, arrays in two_levels.items()}
