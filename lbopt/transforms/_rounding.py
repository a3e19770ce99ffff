"""Rounding to bfloat16: by chance, so that small changes count on average, or with a carry."""

from __future__ import annotations

import contextlib
import contextvars
import warnings
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from lbopt import _scalars, tree, types
from lbopt.transforms import _arguments, _per_path, _precision

_cured: contextvars.ContextVar[bool] = contextvars.ContextVar("_cured", default=False)


class RoundingState(NamedTuple):
    """The state of an optimizer whose steps are rounded by chance.

    Attributes:
      rounding_count: int32 scalar, number of updates so far; noise is made of it and the seed.
      inner: State of the optimizer.
    """

    rounding_count: jax.Array
    inner: Any


class CompensationState(NamedTuple):
    """The state of an optimizer whose rounding errors are carried.

    Attributes:
      carry: What rounding left out so far, a pytree shaped like the parameters and of their dtypes;
        zeros for leaves of 32 bits and more.
      inner: State of the optimizer.
    """

    carry: types.PyTree
    inner: Any


def round_stochastically(
    inner: optax.GradientTransformation, seed: int | jax.Array = 0
) -> optax.GradientTransformationExtraArgs:
    r"""Let bfloat16 parameters take small steps: round each weight up or down by chance.

        w <- the number of its dtype below or above w + u, with mean w + u

    bfloat16 has 8 bits. A step below 1/512 to 1/256 of a weight is lost when it is rounded to the
    nearest: at a learning rate of 1e-3, LAMB (layerwise adaptive moments) goes less than half of
    its way in 40 steps. Rounded by chance, each step counts on average.

    Args:
      inner: The whole optimizer, learning rate included.
      seed: Seed of the noise. Runs with the same seed are equal, also after a restart.

    Returns:
      A transform whose state is `RoundingState` and whose `update` needs `params`. Its output keeps
      the dtype of the inner updates. Leaves of 32 bits and more pass unchanged.

    Raises:
      UserError: For a seed that is not a whole number.

    >>> import jax.numpy as jnp
    >>> params = {"kernel": jnp.ones((64, 64), jnp.bfloat16)}
    >>> grads = {"kernel": jnp.ones((64, 64), jnp.bfloat16)}
    >>> def mean_after(tx):
    ...     updates, _ = tx.update(grads, tx.init(params), params)
    ...     return float(optax.apply_updates(params, updates)["kernel"].astype(float).mean())
    >>> mean_after(optax.sgd(1e-3)), round(mean_after(round_stochastically(optax.sgd(1e-3))), 3)
    (1.0, 0.999)

    References:
      Gupta et al., Deep Learning with Limited Numerical Precision, arXiv:1502.02551, section 3.

    Note:
      A number takes 32 random bits, from JAX's default generator (`jax_default_prng_impl`).
      Inside `shard_map` the shards of a leaf share their noise.
    """
    _arguments.require_transformation("inner", inner)
    seed = _scalars.seed("seed", seed)
    through = optax.with_extra_args_support(inner)

    def init_fn(params: types.Params) -> RoundingState:
        with without_warning():
            return RoundingState(jnp.zeros((), jnp.int32), inner.init(params))

    def update_fn(
        updates: optax.Updates,
        state: RoundingState,
        params: types.Params | None = None,
        **extra_args: Any,
    ) -> tuple[optax.Updates, RoundingState]:
        _arguments.require_params(params, "round_stochastically")
        _arguments.require_state(state, RoundingState)
        updates, inner_state = through.update(updates, state.inner, params, **extra_args)
        noise = noise_of(seed, state.rounding_count)

        def rounded(p: jax.Array, u: jax.Array) -> jax.Array:
            if not _is_narrow(p):
                return u
            wide = p.astype(jnp.float32)
            new = rounded_by_chance(wide + u.astype(jnp.float32), p.dtype, next(noise))
            return (new - wide).astype(u.dtype)

        count = optax.safe_increment(state.rounding_count)
        return jax.tree.map(rounded, params, updates), RoundingState(count, inner_state)

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def compensate_rounding(
    inner: optax.GradientTransformation,
) -> optax.GradientTransformationExtraArgs:
    r"""Let bfloat16 parameters take small steps: carry what rounding leaves out to the next step.

        t = w + u + c ;   w' = bf16(t) ;   c' = bf16(t - w')

    The weight and its carry together have 16 bits. The carry takes 2 bytes a parameter;
    `round_stochastically` takes none, and adds noise.

    Args:
      inner: The whole optimizer, learning rate included.

    Returns:
      A transform whose state is `CompensationState` and whose `update` needs `params`. Its output
      keeps the dtype of the inner updates. Leaves of 32 bits and more pass unchanged.

    Raises:
      UserError: For an `inner` that is no transformation.

    >>> import jax.numpy as jnp
    >>> params = {"kernel": jnp.ones((2, 2), jnp.bfloat16)}
    >>> tx = compensate_rounding(optax.sgd(1e-3))
    >>> state = tx.init(params)
    >>> for _ in range(16):
    ...     updates, state = tx.update({"kernel": jnp.ones((2, 2))}, state, params)
    ...     params = optax.apply_updates(params, updates)
    >>> float(params["kernel"][0, 0])
    0.984375

    References:
      Kahan, Further remarks on reducing truncation errors, 1965. Zamirai et al., Revisiting
      BFloat16 Training, arXiv:2010.06192, section 3.2.
    """
    _arguments.require_transformation("inner", inner)
    through = optax.with_extra_args_support(inner)

    def init_fn(params: types.Params) -> CompensationState:
        with without_warning():
            inner_state = inner.init(params)
        if _per_path.is_placeholder(params):
            return CompensationState(params, inner_state)
        tree.check_inexact(params, "params")
        return CompensationState(jax.tree.map(jnp.zeros_like, params), inner_state)

    def update_fn(
        updates: optax.Updates,
        state: CompensationState,
        params: types.Params | None = None,
        **extra_args: Any,
    ) -> tuple[optax.Updates, CompensationState]:
        _arguments.require_params(params, "compensate_rounding")
        _arguments.require_state(state, CompensationState)
        updates, inner_state = through.update(updates, state.inner, params, **extra_args)

        def step(p: jax.Array, u: jax.Array, carry: jax.Array) -> tuple[jax.Array, jax.Array]:
            if not _is_narrow(p):
                return u, carry
            wide = p.astype(jnp.float32)
            total = wide + (u.astype(jnp.float32) + carry.astype(jnp.float32))
            new = _precision.rounded_to(total, p.dtype)
            return (new - wide).astype(u.dtype), (total - new).astype(carry.dtype)

        pairs = jax.tree.map(step, params, updates, state.carry)
        updates, carry = tree.unzip_pairs(updates, pairs)
        return updates, CompensationState(carry, inner_state)

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def rounded_by_chance(x: jax.Array, dtype: Any, key: jax.Array) -> jax.Array:
    """Return fp32 numbers with the bits of bfloat16 or float16: the ones below or above `x`.

    Their mean is `x`. The smallest numbers of float16, below 6e-5, have more bits than it keeps.
    """
    where = jax.typeof(x).sharding
    explicit = {"out_sharding": where} if any(getattr(where, "spec", ())) else {}
    dropped = 23 - jnp.finfo(dtype).nmant
    mask = jnp.uint32((1 << dropped) - 1)
    noise = jax.random.bits(key, x.shape, jnp.uint32, **explicit) & mask
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32) + noise
    rounded = jax.lax.bitcast_convert_type(bits & ~mask, jnp.float32)
    return jnp.where(jnp.isfinite(x), rounded, x)


def noise_of(seed: int | jax.Array, count: jax.Array) -> Iterator[jax.Array]:
    """Yield keys for the leaves of one update."""
    key = jax.random.fold_in(jax.random.key(seed), count)
    leaf = 0
    while True:
        yield jax.random.fold_in(key, leaf)
        leaf += 1


def warn_of_lost_steps(params: types.Params) -> None:
    """Warn of bf16 parameters, unless the optimizer is wrapped in one that keeps small steps."""
    if _cured.get() or _per_path.is_placeholder(params):
        return
    names = [name for name, leaf in tree.by_name(params).items() if _is_narrow(leaf)]
    if names:
        warnings.warn(
            f"{tree.some(names)}: in 16 bits a step below 1/512 of a weight is lost (float16: "
            "1/4096). Keep the parameters in float32, or wrap the optimizer: "
            "lbopt.round_stochastically(...) or lbopt.compensate_rounding(...).",
            stacklevel=2,
        )


@contextlib.contextmanager
def without_warning() -> Iterator[None]:
    """Suppress the warning of 16-bit parameters."""
    token = _cured.set(True)
    try:
        yield
    finally:
        _cured.reset(token)


def _is_narrow(p: jax.Array) -> bool:
    return getattr(p, "dtype", None) in (jnp.bfloat16, jnp.float16)
