"""An exponential moving average of the parameters, kept in the optimizer's state."""

from __future__ import annotations

import warnings
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from lbopt import tree, types
from lbopt.transforms import _arguments, _per_path, _precision


class EmaState(NamedTuple):
    """The averaged parameters.

    Attributes:
      count: int32 scalar, updates so far.
      ema: shaped like the parameters, fp32 (or wider).
    """

    count: jax.Array  # type: ignore[assignment]
    ema: types.PyTree


def track_ema(
    decay: float | jax.Array = 0.9999, ramp: bool = True, ema_dtype: Any = None
) -> optax.GradientTransformation:
    r"""Keep an average of the parameters; updates pass unchanged. Put it last in the chain.

        ema <- d ema + (1 - d) (params + updates) ,   d = min(decay, (1 + t) / (10 + t)) with ramp, t = updates so far

    The average starts at the parameters that `init` gets, so they must be arrays. One update is one step of the average: around
    microsteps put `optax.MultiSteps` outside of the whole chain. `ema_params` reads the average for evaluation.

    Args:
      decay: in [0, 1); .9999 for EfficientNet.
      ramp: let the decay rise with the number of updates, as `num_updates` of TensorFlow's
        ExponentialMovingAverage does, tensorflow/tensorflow@0004ac98864da68d6a90d96385bd55c86e04a8c1:
        tensorflow/python/training/moving_averages.py.
      ema_dtype: of the average of real leaves; None for fp32 (or wider, for wider leaves). In bf16 the average would stand still.

    Returns:
      A transform whose state is `EmaState`.

    Raises:
      ValueError: naming the argument that is out of range, or the parameter that is a shape.

    >>> import jax.numpy as jnp
    >>> tx = optax.chain(optax.sgd(1.0), track_ema(0.9, ramp=False))
    >>> params = {"w": jnp.zeros(1)}
    >>> _, state = tx.update({"w": -jnp.ones(1)}, tx.init(params), params)
    >>> round(float(ema_params(state)["w"][0]), 6)
    0.1

    Note:
      `optax.ema` averages updates, not parameters.
    """
    _arguments.require_decay_rate("decay", decay)
    _arguments.require_float_dtype("ema_dtype", ema_dtype)
    ramp = _arguments.require_flag("ramp", ramp)

    def init_fn(params: types.Params) -> EmaState:
        tree.check_inexact(params, "track_ema: the parameter")
        return EmaState(jnp.zeros((), jnp.int32), tree.map_with_name(start, params))

    def start(name: str, p: Any) -> jax.Array:
        if isinstance(p, jax.ShapeDtypeStruct):
            raise ValueError(
                f"track_ema: the parameter at {name!r} is a shape, and the average starts at the parameters: call tx.init(params) "
                "with arrays, or jax.eval_shape(tx.init, shapes) for the shapes of the state"
            )
        dtype = _averaged_dtype(p.dtype, ema_dtype)
        return jnp.array(
            p, dtype, copy=True
        )  # the parameters' own buffers may be donated to the first step

    def update_fn(
        updates: optax.Updates, state: EmaState, params: types.Params | None = None
    ) -> tuple[optax.Updates, EmaState]:
        _arguments.require_params(params, "track_ema")
        tree.check_updates(updates, params)
        _arguments.require_state(state, EmaState, "track_ema")
        tree.check_updates(updates, state.ema)
        t = state.count.astype(jnp.float32)
        d = jnp.minimum(decay, (1 + t) / (10 + t)) if ramp else decay

        def average(ema: jax.Array, p: jax.Array, u: jax.Array) -> jax.Array:
            wide = tree.wide_dtype(ema.dtype)
            new = _precision.applied(p, u).astype(wide)
            return (tree.scaled(ema.astype(wide), d) + tree.scaled(new, 1 - d)).astype(ema.dtype)

        return updates, EmaState(
            optax.safe_increment(state.count), jax.tree.map(average, state.ema, params, updates)
        )

    return optax.GradientTransformation(init_fn, update_fn)


def _averaged_dtype(dtype: Any, ema_dtype: Any) -> Any:
    """Return the dtype of the average of a leaf; complex leaves stay complex."""
    wide = tree.wide_dtype(dtype)
    return wide if ema_dtype is None or jnp.issubdtype(dtype, jnp.complexfloating) else ema_dtype


def ema_params(opt_state: Any, like: types.Params | None = None) -> types.Params:
    """Return the averaged parameters out of any optimizer state that holds them.

    Args:
      opt_state: the state of a chain, `masked`, `MultiSteps`, ... with `track_ema` in it; also as `nnx.state(optimizer)`.
      like: parameters whose containers and dtypes the result gets, and whose leaves it takes where `optax.masked` kept them
        out of the average; `nnx.state(model)` for an NNX model. None leaves the result as it is kept.

    Raises:
      ValueError: if the state holds no average, or several, or one of other parameters or shapes than `like`.

    Warns where `optax.MultiSteps` or `optax.apply_every` is beside the average and not around it: it then takes a step with every microstep.
    """
    found = list(_per_path.find_states(opt_state, (EmaState,)))
    if len(found) != 1:
        raise ValueError(
            f"opt_state holds {len(found)} averages of the parameters: put one lbopt.track_ema last in the chain"
        )
    warn_of_microsteps(opt_state)
    ema = found[0].ema
    if like is None:  # a copy: later updates change the variables of Flax NNX that hold the state
        return jax.tree.map(lambda average: average, ema)
    names = tree.leaf_names(ema)
    averages = dict(zip(names, jax.tree.leaves(ema), strict=True))
    if len(averages) < len(names):
        twice = next(name for name in averages if names.count(name) > 1)
        raise ValueError(
            f"like: two of the averages are called {twice!r}; call ema_params without like"
        )
    unknown = sorted(averages.keys() - set(tree.leaf_names(like)))
    if unknown:
        raise ValueError(
            f"like has no parameter at {tree.some(unknown)}: give the parameters that are averaged"
        )

    def average(name: str, p: Any) -> Any:
        if name not in averages:
            return p
        if jnp.shape(p) != averages[name].shape:
            raise ValueError(
                f"like at {name!r} has shape {jnp.shape(p)}, the average has {averages[name].shape}: give the parameters that are averaged"
            )
        return averages[name].astype(p.dtype)

    return tree.map_with_name(average, like)


def warn_of_microsteps(opt_state: Any) -> None:
    """Warn if microsteps are gathered beside an average of the parameters, which then takes a step with each of them."""
    gathers = list(_per_path.find_states(opt_state, (optax.MultiStepsState, optax.ApplyEvery)))
    around = [getattr(state, "inner_opt_state", ()) for state in gathers]
    averages, inside = (
        list(_per_path.find_states(states, (EmaState,))) for states in (opt_state, around)
    )
    if gathers and len(inside) < len(averages):
        warnings.warn(
            "track_ema: microsteps are gathered beside it, so its decay is that of a microstep: put optax.MultiSteps around the whole chain",
            stacklevel=3,
        )
