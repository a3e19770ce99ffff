"""The interface of a model: two functions, so that train steps depend on no framework."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import nnx

from lbopt import types
from lbopt.errors import UserError


class Model(NamedTuple):
    """A model as a pair of functions, independent of its framework.

    Attributes:
      init: (key, example inputs) -> (params, model_state).
      apply: (params, model_state, inputs, train, rng) -> (outputs, new model_state).
      module: The NNX or Equinox module that was wrapped, with `jax.ShapeDtypeStruct` in place of
        arrays; the types of its layers tell the roles of parameters. None for other models, whose
        layers are no objects.

    >>> import jax.numpy as jnp, jax
    >>> def init(key, inputs):
    ...     return {"kernel": jax.random.normal(key, (inputs.shape[-1], 2))}, {}
    >>> def apply(params, model_state, inputs, train, rng=None):
    ...     return inputs @ params["kernel"], model_state
    >>> model = Model(init, apply)
    >>> params, state = model.init(jax.random.key(0), jnp.ones((4, 3)))
    >>> model.apply(params, state, jnp.ones((4, 3)), train=False)[0].shape
    (4, 2)
    """

    init: Callable[[jax.Array, Any], tuple[types.Params, types.ModelState]]
    apply: Callable[..., tuple[Any, types.ModelState]]
    module: Any = None


def from_linen(module: nn.Module) -> Model:
    """Wrap a Linen module called as `module(inputs, train=...)`.

    Instead of `train` its call may take `training`, `is_training`, or `deterministic` or
    `inference` (the opposite), or none of them. Inputs are one array, or a dict of arrays; a call
    that names all keys of the dict gets them by name.

    It gets two random streams, both from the step's key: "dropout" for Flax's own layers, and
    "example" for those of lbopt's networks, whose numbers depend on each example's place in the
    global batch.

    Args:
      module: The module; its parameters are made by the model's `init`.

    >>> import flax.linen as nn, jax, jax.numpy as jnp
    >>> model = from_linen(nn.Dense(2))
    >>> params, state = jax.eval_shape(model.init, jax.random.key(0), jnp.ones((4, 3)))
    >>> params["kernel"].shape, state
    ((3, 2), {})
    """

    def called(
        method: Callable[..., Any], variables: Any, inputs: Any, train: bool, **options: Any
    ):
        positional, named, modes = call_arguments(_taken(module), inputs, train)
        return method(variables, *positional, **named, **modes, **options)

    def init(key: jax.Array, inputs: Any) -> tuple[types.Params, types.ModelState]:
        variables = dict(called(module.init, key, inputs, train=True))
        return variables.pop("params", {}), variables

    def apply(
        params: types.Params,
        model_state: types.ModelState,
        inputs: Any,
        train: bool,
        rng: jax.Array | None = None,
    ):
        variables = {"params": params, **model_state}
        if not train:
            return called(module.apply, variables, inputs, train=False), model_state

        rngs = None if rng is None else {"dropout": rng, "example": rng}
        outputs, updated = called(
            module.apply, variables, inputs, train=True, mutable=list(model_state), rngs=rngs
        )
        return outputs, {**model_state, **updated}

    return Model(init, apply)


def from_nnx(build: Callable[[nnx.Rngs], nnx.Module]) -> Model:
    """Wrap the NNX module that `build(rngs)` makes, called as `module(inputs, train, rngs=...)`.

    Its call may take other arguments, as in `from_linen`. One that takes no such argument is set to
    its mode by `module.train()` and `module.eval()`.

    Variables other than parameters, such as batch statistics, become the model's state. Random
    streams that the module holds (`nnx.Dropout(rate, rngs=rngs)`) do not: each call restarts them
    from the step's key, so their numbers differ on each replica, in each microstep and after a
    restart. A module that takes no `rngs` is called without them.

    NNX's layers work on the local batch, which under `pmap` is that of one replica. Dropout needs a
    different key on each replica: train with `make_train_step(key_per_replica=True)`, the default.
    `nnx.BatchNorm` normalizes over the local batch, and its running statistics are averaged over
    replicas.

    Args:
      build: Function of random streams that returns the module. It is called for each `init`.

    >>> import jax, jax.numpy as jnp
    >>> from flax import nnx
    >>> model = from_nnx(lambda rngs: nnx.Linear(3, 2, rngs=rngs))
    >>> params, state = jax.eval_shape(model.init, jax.random.key(0), jnp.ones((4, 3)))
    >>> params["kernel"].shape
    (3, 2)
    """
    if isinstance(build, nnx.Module):
        fix = f"{type(build).__name__}(...) is a module; give what makes it, lambda rngs: ..."
        raise UserError("build", reason=fix, code="type")

    abstract = nnx.eval_shape(lambda: build(nnx.Rngs(0)))
    graph, _, streams, _ = nnx.split(abstract, nnx.Param, nnx.RngState, ...)
    blank = nnx.to_pure_dict(streams)
    takes_rngs = any(
        name == "rngs" or each.kind is each.VAR_KEYWORD for name, each in _taken(abstract).items()
    )

    def init(key: jax.Array, inputs: Any) -> tuple[types.Params, types.ModelState]:
        del inputs  # NNX modules get their shapes when they are built.
        _, params, _, rest = nnx.split(build(nnx.Rngs(key)), nnx.Param, nnx.RngState, ...)
        return nnx.to_pure_dict(params), nnx.to_pure_dict(rest)

    def apply(
        params: types.Params,
        model_state: types.ModelState,
        inputs: Any,
        train: bool,
        rng: jax.Array | None = None,
    ):
        module = nnx.merge(
            graph, params, _streams(blank, jax.random.key(0) if rng is None else rng), model_state
        )
        options = {"rngs": None if rng is None else nnx.Rngs(dropout=rng)} if takes_rngs else {}
        taken = _taken(module)
        positional, named, modes = call_arguments(taken, inputs, train, ["rngs"])
        if not modes:
            module.train() if train else module.eval()
        outputs = module(*positional, **named, **modes, **options)
        return outputs, nnx.to_pure_dict(
            nnx.split(module, nnx.Param, nnx.RngState, ...)[3]
        ) if train else model_state

    return Model(init, apply, abstract)


MODES = {
    "train": True,
    "training": True,
    "is_training": True,
    "deterministic": False,
    "inference": False,
}
"""Arguments that say whether a module trains, and their values where it does."""


def signature(call: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    """Return the arguments of a call by name."""
    return inspect.signature(call).parameters


def call_arguments(
    taken: Mapping[str, inspect.Parameter], inputs: Any, train: bool, given: Sequence[str] = ()
) -> tuple[tuple[Any, ...], dict[str, Any], dict[str, bool]]:
    """Return the arguments of a model's call: inputs by position, inputs by name, and its mode.

    Args:
      taken: The arguments that it has.
      inputs: One array, or a dict of arrays; a call that has all its keys gets them by name.
      train: Whether it trains.
      given: Names of other arguments, which the caller adds.

    Raises:
      UserError: If the call needs an argument that lbopt does not give.
    """
    modes = {name: train == trains for name, trains in MODES.items() if name in taken}
    if not modes and any(one.kind is one.VAR_KEYWORD for one in taken.values()):
        modes = {"train": train}
    by_name = isinstance(inputs, Mapping) and inputs.keys() <= taken.keys()
    positional = () if by_name else (inputs,)
    named = dict(inputs) if by_name else {}

    needed = [
        name
        for name, one in taken.items()
        if one.default is one.empty and one.kind not in (one.VAR_POSITIONAL, one.VAR_KEYWORD)
    ]
    known = {*named, *modes, *given}
    missing = [name for name in needed[len(positional) :] if name not in known]
    if missing or not (taken or by_name):
        others = "".join(f"{name}, " for name in given)
        fix = (
            f"its call needs {', '.join(missing) or 'an argument'}; let it take the inputs, and "
            f"perhaps {others}one of {', '.join(MODES)}"
        )
        raise UserError("model", reason=fix, code="type")
    return positional, named, modes


def is_made_by(framework: str, value: Any, *names: str) -> bool:
    """Return whether a value is of one of these classes of a framework, without importing it.

    No value is, if nobody has imported the framework.
    """
    module = sys.modules.get(framework)
    return module is not None and isinstance(value, tuple(getattr(module, name) for name in names))


def _taken(module: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    """Return the arguments of a module's call; a sequence's go to its first layer."""
    if isinstance(module, nn.Sequential | nnx.Sequential) and len(module.layers):
        return _taken(module.layers[0])
    return signature(module)


def _streams(blank: Any, key: jax.Array) -> Any:
    """Return the initial state of a module's random streams, each with different keys.

    Args:
      blank: Pytree of shapes and dtypes of the streams' keys and counters.
      key: Random key from which the keys are derived.
    """
    structure: Any = jax.tree.structure(blank)
    leaves = jax.tree.leaves(blank)
    # The module's call gets `key` itself as `rngs`, so the streams must not start from it.
    key = jax.random.fold_in(key, len(leaves))
    return structure.unflatten(
        [_stream(leaf, jax.random.fold_in(key, number)) for number, leaf in enumerate(leaves)]
    )


def _stream(leaf: Any, key: jax.Array) -> jax.Array:
    if not jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return jnp.zeros(leaf.shape, leaf.dtype)
    return jax.random.split(key, leaf.shape) if leaf.shape else key
