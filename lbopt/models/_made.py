"""Models that a function of the user makes."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import nnx

from lbopt.errors import UserError, require, require_choice
from lbopt.models._equinox import from_equinox
from lbopt.models._haiku import from_haiku
from lbopt.models._seam import Model, from_linen, from_nnx, is_made_by

OUTPUTS = ("outputs", "num_classes", "num_outputs", "vocab_size", "out_features", "out_size")
"""Names of the argument of a maker that gets the number of outputs."""
_REMATS: dict[str, Any] = {
    "all": None,
    "dots": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
}


def make_model(
    make: Any,
    outputs: int,
    dtype: Any = jnp.float32,
    options: Mapping[str, Any] | None = None,
    remat: str = "none",
) -> Model:
    """Return the model that the user's code makes.

    Args:
      make: A class or a function that makes a module of Linen, NNX or Equinox, a pair of
        `haiku.transform` or `haiku.transform_with_state`, or a `Model`; or a Linen module, such a
        pair, or a `Model` itself. It gets those of these arguments that it has: the number of
        outputs as one of `OUTPUTS`, `dtype`, for NNX `rngs`, and for Equinox `key`. With `rngs` or
        `key` it is called anew for every initialization. What it makes is called as `from_linen`,
        `from_nnx`, `from_equinox` and `from_haiku` say.
      outputs: Number of outputs: classes, labels, numbers or tokens.
      dtype: Dtype of the computation. If `make` has no such argument, parameters and inputs are
        cast to it, and outputs to fp32.
      options: Other arguments of `make`.
      remat: Arrays that the backward pass computes again: "none", "dots" (all but the results of
        matrix products) or "all".

    Raises:
      UserError: Naming `model` or `options`.

    >>> import flax.linen as nn, jax, jax.numpy as jnp
    >>> model = make_model(lambda outputs, width: nn.Sequential([nn.Dense(width), nn.relu,
    ...     nn.Dense(outputs)]), outputs=10, options={"width": 32})
    >>> params, _ = jax.eval_shape(model.init, jax.random.key(0), jnp.ones((4, 3)))
    >>> params["layers_2"]["kernel"].shape
    (32, 10)
    """
    given = dict(options or {})
    taken: Mapping[str, inspect.Parameter] = {}
    if not _is_finished(make):
        _require_maker(make)
        taken = _taken(make)
    _check_options(taken, given)
    offered = {**dict.fromkeys(OUTPUTS, outputs), "dtype": jnp.dtype(dtype)}
    given = {**{name: value for name, value in offered.items() if name in taken}, **given}
    _check_complete(taken, given, options)

    model = _model(make, taken, given)
    if jnp.dtype(dtype) != jnp.float32 and "dtype" not in taken:
        model = with_precision(model, dtype)
    return with_remat(model, remat)


def _require_maker(make: Any) -> None:
    require(callable(make), "model", make, "no function; give one that makes a model")
    if isinstance(make, nnx.Module) or is_made_by("equinox", make, "Module"):
        fix = f"a {type(make).__name__} is finished; give what makes it, a class or a function"
        raise UserError("model", reason=fix, code="type")


def _taken(make: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    """Return the arguments of a maker by name; the metaclass of NNX hides those of its classes."""
    if not inspect.isclass(make):
        return inspect.signature(make).parameters
    return dict(list(inspect.signature(make.__init__).parameters.items())[1:])  # all but self


def _check_options(taken: Mapping[str, inspect.Parameter], options: Mapping[str, Any]) -> None:
    """Raise `UserError` for an option that the maker does not take."""
    if any(one.kind is inspect.Parameter.VAR_KEYWORD for one in taken.values()):
        return
    known = [name for name in taken if name not in ("rngs", "key", "parent", "name")]
    for option in options:
        require_choice("options", option, known)


def _check_complete(
    taken: Mapping[str, inspect.Parameter],
    given: Mapping[str, Any],
    options: Mapping[str, Any] | None,
) -> None:
    """Raise `UserError` for arguments without a default that the maker does not get."""
    variable = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    missing = [
        name
        for name, one in taken.items()
        if one.default is inspect.Parameter.empty
        and one.kind not in variable
        and name not in (*given, "rngs", "key")
    ]
    fix = f"the model needs {', '.join(missing)} too; give it a value, or a default"
    require(not missing, "options", dict(options or {}), fix, code="missing")


def _is_finished(make: Any) -> bool:
    """Return whether this is a model already, and not what makes one."""
    is_pair = is_made_by("haiku", make, "Transformed", "TransformedWithState")
    return is_pair or isinstance(make, nn.Module | Model)


def _model(make: Any, taken: Mapping[str, inspect.Parameter], given: Mapping[str, Any]) -> Model:
    if "rngs" in taken:
        return from_nnx(lambda rngs: make(rngs=rngs, **given))
    if "key" in taken:
        return from_equinox(lambda key: make(key=key, **given))
    made = make if _is_finished(make) else make(**given)
    if isinstance(made, Model):
        return made
    if isinstance(made, nn.Module):
        return from_linen(made)
    if _is_finished(made):
        return from_haiku(made)

    hint = "; let the function take rngs" if isinstance(made, nnx.Module) else ""
    hint = "; let the function take key" if is_made_by("equinox", made, "Module") else hint
    fix = (
        f"it makes an object of type {type(made).__name__}; make a module of Flax or Equinox, a "
        f"pair of hk.transform, or a lbopt.models.Model{hint}"
    )
    raise UserError("model", reason=fix, code="type")


def with_precision(model: Model, dtype: Any) -> Model:
    """Return a model that computes in a dtype: parameters and inputs are cast.

    Its outputs and its state are fp32.
    """

    def apply(params: Any, model_state: Any, inputs: Any, train: bool, rng: Any = None) -> Any:
        narrow = functools.partial(_cast, dtype=dtype)
        outputs, state = model.apply(narrow(params), model_state, narrow(inputs), train, rng)
        return _cast(outputs, jnp.float32), _cast(state, jnp.float32)

    return model._replace(apply=apply)


def _cast(tree: Any, dtype: Any) -> Any:
    """Return a tree with its floating-point leaves in a dtype."""
    return jax.tree.map(
        lambda x: x.astype(dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x, tree
    )


def with_remat(model: Model, remat: str) -> Model:
    """Return a model whose backward pass computes arrays again, see `make_model`."""
    if remat == "none":
        return model
    require_choice("remat", remat, _REMATS)
    policy = _REMATS[remat]

    def apply(params: Any, model_state: Any, inputs: Any, train: bool, rng: Any = None) -> Any:
        if not train:
            return model.apply(params, model_state, inputs, train=False)

        def training(params: Any, model_state: Any, inputs: Any, rng: Any) -> Any:
            return model.apply(params, model_state, inputs, train=True, rng=rng)

        return jax.checkpoint(training, policy=policy)(params, model_state, inputs, rng)

    return model._replace(apply=apply)


def checked(model: Model, naming: Callable[[], Any]) -> Model:
    """Return a model whose functions are called in a context that names errors of its code.

    A dict of one input is given to them as the array.
    """

    def only(inputs: Any) -> Any:
        single = isinstance(inputs, Mapping) and len(inputs) == 1
        return next(iter(inputs.values())) if single else inputs

    def init(key: jax.Array, inputs: Any) -> Any:
        with naming():
            return model.init(key, only(inputs))

    def apply(params: Any, model_state: Any, inputs: Any, train: bool, rng: Any = None) -> Any:
        with naming():
            return model.apply(params, model_state, only(inputs), train, rng)

    return model._replace(init=init, apply=apply)
