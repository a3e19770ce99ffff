"""An exponential moving average of the parameters, kept in the optimizer's state."""

from __future__ import annotations

import warnings
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from lbopt import _scalars, tree, types
from lbopt.errors import UserError
from lbopt.transforms import _arguments, _per_path, _precision


class EmaState(NamedTuple):
    """The averaged parameters.

    Attributes:
      count: int32 scalar, number of updates so far.
      ema: Pytree shaped like the parameters, fp32 or wider, or `ema_dtype`.

    >>> import jax.numpy as jnp
    >>> state = track_ema().init({"w": jnp.ones(2, jnp.bfloat16)})
    >>> int(state.count), state.ema["w"].dtype.name
    (0, 'float32')
    """

    count: jax.Array  # type: ignore[assignment]
    ema: types.PyTree


def track_ema(
    decay: float | jax.Array = 0.9999, ramp: bool = True, ema_dtype: Any = None
) -> optax.GradientTransformation:
    r"""Keep an average of the parameters; updates pass unchanged. Put it last in the chain.

        ema <- d ema + (1 - d) (params + updates)
        d = min(decay, (1 + t) / (10 + t)) with ramp, else decay;   t = number of updates so far

    The average starts at the parameters that `init` gets, so they must be arrays. One update is one
    step of the average: for microsteps put `optax.MultiSteps` around the whole chain. `ema_params`
    reads the average for evaluation.

    Args:
      decay: Decay rate in [0, 1). The default is EfficientNet's.
      ramp: Whether the decay rises with the number of updates, as `num_updates` makes it in
        TensorFlow's ExponentialMovingAverage,
        tensorflow/tensorflow@0004ac98864da68d6a90d96385bd55c86e04a8c1:
        tensorflow/python/training/moving_averages.py.
      ema_dtype: Dtype of the average of real leaves; None for fp32, or the leaf's dtype if that is
        wider. In bf16 the average would stand still.

    Returns:
      A transform whose state is `EmaState`.

    Raises:
      UserError: For an argument that is out of range, or parameters that are shapes.

    >>> import jax.numpy as jnp
    >>> tx = optax.chain(optax.sgd(1.0), track_ema(0.9, ramp=False))
    >>> params = {"w": jnp.zeros(1)}
    >>> _, state = tx.update({"w": -jnp.ones(1)}, tx.init(params), params)
    >>> round(float(ema_params(state)["w"][0]), 6)
    0.1

    Note:
      `optax.ema` averages updates, not parameters.
    """
    _arguments.refuse_transformation("track_ema", decay)
    _scalars.require_decay_rate("decay", decay)
    _arguments.require_float_dtype("ema_dtype", ema_dtype)
    ramp = _scalars.require_flag("ramp", ramp)

    def init_fn(params: types.Params) -> EmaState:
        _arguments.require_arrays(params, "the average starts at the parameters")
        return EmaState(jnp.zeros((), jnp.int32), jax.tree.map(start, params))

    def start(p: jax.Array) -> jax.Array:
        # A copy, as the parameters' own buffers may be donated to the first step.
        return jnp.array(p, _averaged_dtype(p.dtype, ema_dtype), copy=True)

    def update_fn(
        updates: optax.Updates, state: EmaState, params: types.Params | None = None
    ) -> tuple[optax.Updates, EmaState]:
        _arguments.require_params(params, "track_ema")
        tree.check_updates(updates, params)
        _arguments.require_state(state, EmaState)
        tree.check_updates(updates, state.ema)

        t = state.count.astype(jnp.float32)
        d = jnp.minimum(decay, (1 + t) / (10 + t)) if ramp else decay

        def average(ema: jax.Array, p: jax.Array, u: jax.Array) -> jax.Array:
            wide = tree.wide_dtype(ema.dtype)
            new = _precision.applied(p, u).astype(wide)
            return (tree.scaled(ema.astype(wide), d) + tree.scaled(new, 1 - d)).astype(ema.dtype)

        ema = jax.tree.map(average, state.ema, params, updates)
        return updates, EmaState(optax.safe_increment(state.count), ema)

    return optax.GradientTransformation(init_fn, update_fn)


def _averaged_dtype(dtype: Any, ema_dtype: Any) -> Any:
    """Return the dtype of the average of a leaf; complex leaves stay complex."""
    wide = tree.wide_dtype(dtype)
    return wide if ema_dtype is None or jnp.issubdtype(dtype, jnp.complexfloating) else ema_dtype


def ema_params(opt_state: Any, like: types.Params | None = None) -> types.Params:
    """Return the averaged parameters from any optimizer state that holds them.

    Warns if `optax.MultiSteps` or `optax.apply_every` is beside the average instead of around it:
    the average then takes a step with every microstep.

    Args:
      opt_state: State of a chain, `masked`, `MultiSteps`, ... with `track_ema` in it; also as
        `nnx.state(optimizer)`.
      like: Parameters whose containers and dtypes the result gets, `nnx.state(model)` for an NNX
        model. Leaves that `optax.masked` kept out of the average are taken from it. None returns
        the average as the state holds it.

    Raises:
      UserError: If the state holds no average or several, or one of other parameters than `like`.

    >>> import jax.numpy as jnp, optax
    >>> tx = optax.chain(optax.sgd(0.1), track_ema())
    >>> params = {"w": jnp.ones(2, jnp.bfloat16)}
    >>> state = tx.init(params)
    >>> ema_params(state)["w"].dtype.name, ema_params(state, like=params)["w"].dtype.name
    ('float32', 'bfloat16')
    """
    found = list(_per_path.find_states(opt_state, (EmaState,)))
    if len(found) != 1:
        fix = (
            f"it holds {len(found)} averages of the parameters; put one lbopt.track_ema last in "
            "the chain"
        )
        raise UserError("opt_state", reason=fix, code="missing" if not found else "conflict")
    warn_of_microsteps(opt_state)
    ema = found[0].ema

    if like is None:
        # A copy, as later updates change the variables of Flax NNX that hold the state.
        return jax.tree.map(lambda average: average, ema)

    names = tree.leaf_names(ema)
    averages = tree.by_name(ema)
    if len(averages) < len(names):
        twice = next(name for name in averages if names.count(name) > 1)
        fix = f"two of the averages are called {twice!r}; call ema_params without like"
        raise UserError("like", reason=fix, code="conflict")
    unknown = sorted(averages.keys() - set(tree.leaf_names(like)))
    if unknown:
        fix = f"it has no parameter at {tree.some(unknown)}; give the parameters that are averaged"
        raise UserError("like", reason=fix, code="mismatch")

    def average(name: str, p: Any) -> Any:
        if name not in averages:
            return p
        if jnp.shape(p) != averages[name].shape:
            fix = (
                f"its shape is {jnp.shape(p)}, that of the average {averages[name].shape}; give "
                "the parameters that are averaged"
            )
            raise UserError(f"like/{name}", reason=fix, code="mismatch")
        return averages[name].astype(p.dtype)

    return tree.map_with_name(average, like)


def evaluated_params(opt_state: Any, params: types.Params) -> types.Params:
    """Return the parameters to evaluate: an average that `track_ema` keeps, or schedule-free ones.

    Args:
      opt_state: State of the optimizer, with one of them.
      params: The parameters that are trained.

    >>> import jax.numpy as jnp, optax
    >>> params = {"w": jnp.zeros(1)}
    >>> tx = optax.chain(optax.sgd(1.0), track_ema(0.9, ramp=False))
    >>> updates, state = tx.update({"w": -jnp.ones(1)}, tx.init(params), params)
    >>> params = optax.apply_updates(params, updates)
    >>> print(params["w"], evaluated_params(state, params)["w"].round(3))
    [1.] [0.1]

    References:
      Defazio et al., The Road Less Scheduled, arXiv 2405.15682v4; `optax.contrib.schedule_free`.
    """
    if any(_per_path.find_states(opt_state, (EmaState,))):
        return ema_params(opt_state, like=params)
    (state,) = _per_path.find_states(opt_state, (optax.contrib.ScheduleFreeState,))
    return optax.contrib.schedule_free_eval_params(state, params)


def has_evaluated_params(opt_state: Any) -> bool:
    """Return whether a state, or its shapes, has parameters to evaluate, see `evaluated_params`.

    Args:
      opt_state: State of the optimizer, or its shapes from `jax.eval_shape`.

    >>> import jax.numpy as jnp, optax
    >>> params = {"w": jnp.zeros(1)}
    >>> has_evaluated_params(track_ema().init(params))
    True
    >>> has_evaluated_params(optax.sgd(0.1).init(params))
    False
    """
    return any(_per_path.find_states(opt_state, (EmaState, optax.contrib.ScheduleFreeState)))


def warn_of_microsteps(opt_state: Any) -> None:
    """Warn if microsteps are accumulated beside an average of the parameters, not around it.

    The average then takes a step with each microstep.
    """
    accumulating = list(_per_path.find_states(opt_state, (optax.MultiStepsState, optax.ApplyEvery)))
    inner = [getattr(state, "inner_opt_state", ()) for state in accumulating]
    averages = list(_per_path.find_states(opt_state, (EmaState,)))
    averages_inside = list(_per_path.find_states(inner, (EmaState,)))
    if accumulating and len(averages_inside) < len(averages):
        warnings.warn(
            "track_ema: microsteps are accumulated beside it, so its decay is per microstep; put "
            "optax.MultiSteps around the whole chain",
            stacklevel=3,
        )
