"""Everything a training step carries from one update to the next."""

from __future__ import annotations

from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import optax

from lbopt import tree, types
from lbopt.errors import UserError, require
from lbopt.transforms import require_transformation, warn_of_microsteps


class TrainState(flax.struct.PyTreeNode):
    """The state of a run; a pytree of arrays, all of which are checkpointed.

    Attributes:
      step: Number of optimizer updates so far, int32 scalar.
      params: The parameters.
      model_state: The model's other collections, batch statistics for instance.
      opt_state: The optimizer's state.
      rng: Key data, uint32, from which each step's key is derived together with `step`.
      aggregator_state: State of the step's aggregator (see `Step.place`); () without one.

    >>> import jax.numpy as jnp, optax
    >>> state = TrainState.create(
    ...     params={"w": jnp.zeros(2)}, model_state={}, tx=optax.sgd(0.1), seed=0
    ... )
    >>> int(state.step), sorted(state.params)
    (0, ['w'])
    """

    step: jax.Array
    params: types.Params
    model_state: types.ModelState
    opt_state: Any
    rng: jax.Array
    aggregator_state: Any = ()

    @classmethod
    def create(
        cls,
        params: types.Params,
        model_state: types.ModelState,
        tx: optax.GradientTransformation,
        seed: int | jax.Array = 0,
    ) -> TrainState:
        """Build the state before the first update; jit-able, and `seed` may be traced.

        Args:
          params: The parameters.
          model_state: The model's other collections; {} or None if there are none.
          tx: The step's optimizer.
          seed: A number or a random key (`jax.random.key` or `jax.random.PRNGKey`), from which the
            keys of the steps are derived.

        Raises:
          UserError: For a seed that is neither, a key not of JAX's default kind, or a leaf that is
            not an array of numbers or keys.
        """
        require_transformation("tx", tx)
        _, step_root = split_seed(seed)
        params = tree.map_with_name(lambda name, x: _strong(f"params/{name}", x), params)
        model_state = tree.map_with_name(
            lambda name, x: _strong(f"model_state/{name}", x), model_state
        )
        arrays = apart((params, model_state, tx.init(params)))
        warn_of_microsteps(arrays[2])
        return cls(jnp.zeros((), jnp.int32), *arrays, jax.random.key_data(step_root))

    def step_key(self) -> jax.Array:
        """Return the random key of the coming step."""
        return jax.random.fold_in(_key(self.rng), self.step)


def apart(arrays: Any) -> Any:
    """Copy arrays that occur more than once, because a step donates each array.

    Tied weights are an example; another is an average that starts at the parameters.
    """
    seen: set[int] = set()

    def own(x: Any) -> Any:
        again = isinstance(x, jax.Array) and not isinstance(x, jax.core.Tracer) and id(x) in seen
        seen.add(id(x))
        return x.copy() if again else x

    return jax.tree.map(own, arrays)


def _strong(name: str, x: Any) -> Any:
    """Give a Python number, or an array made from one, a strong dtype.

    An update would do so too, and the step would then be compiled twice.
    """
    if isinstance(x, jax.ShapeDtypeStruct):
        return x
    try:
        jax.typeof(x)
    except (TypeError, ValueError) as error:
        fix = "not an array that JAX takes; leave it out, or give it to the model otherwise"
        raise UserError(name, x, fix, code="type") from error
    weak = isinstance(x, bool | int | float | complex) or getattr(x, "weak_type", False)
    return jnp.array(x, jnp.result_type(x)) if weak else x


def split_seed(seed: int | jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return two independent keys: one to initialise parameters, one to derive each step's key.

    Args:
      seed: A number, or a random key of JAX's default kind.

    >>> import jax
    >>> of_params, of_steps = split_seed(0)
    >>> jax.random.key_data(of_params).shape
    (2,)
    """
    init_key, step_root = jax.random.split(_key(seed))
    return init_key, step_root


def _key(seed: Any) -> jax.Array:
    dtype = getattr(seed, "dtype", None)
    shape = getattr(seed, "shape", ())
    if dtype == jnp.uint32 and shape == jax.random.key_data(jax.random.key(0)).shape:
        return jax.random.wrap_key_data(seed)
    typed = dtype is not None and jnp.issubdtype(dtype, jax.dtypes.prng_key)
    number = isinstance(seed, int) or (dtype is not None and jnp.issubdtype(dtype, jnp.integer))
    fix = "give a whole number, or one random key (jax.random.key)"
    require(not shape and (typed or number), "seed", seed, fix, code="type")
    if not typed:
        return jax.random.key(seed)
    kind, default = (jax.random.key_impl(key) for key in (seed, jax.random.key(0)))
    fix = f"a key of {kind}, and those of steps are of JAX's default kind, {default}; give a number"
    require(kind == default, "seed", seed, fix, code="mismatch")
    return seed
