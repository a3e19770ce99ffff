"""Optimizers of Optax by name, and optimizers of the user."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from lbopt import _user_code, masks, stacks, transforms, tree, types
from lbopt.config._checks import require_place_or_choice
from lbopt.errors import UserError, require, require_choice
from lbopt.transforms import MATRIX_VARIANTS, LearningRateState, rate_at

DECAY = "weight_decay"
MASKS = ("mask", "weight_decay_mask")
"""Names of arguments of optimizers for the leaves that are decayed."""
_MATRICES = "muon_weight_dimension_numbers"
"""Name of the argument of Optax's Muon for the leaves that it takes, and their axes."""
_OWN_MATRICES = "dimension_numbers"
"""Name of this argument of our own optimizers."""
_RATES = ("learning_rate", "max_learning_rate")
FILLED = (*_RATES, DECAY, *MASKS, "stacked")
"""Arguments that the config's own fields fill."""
_BASE = "base_optimizer"
"""Name of the argument for the optimizer inside another one."""
_PREFIX = "optax."
MATRIX_OPTIMIZERS = (*MATRIX_VARIANTS, "muloco")
"""Our own optimizers that treat matrices as such."""
LIBRARY = ("adamh", *MATRIX_OPTIMIZERS)
"""Our own optimizers whose numbers are arguments, in `options`, and not fields of the config."""


def is_foreign(name: str) -> bool:
    """Return whether a name means an optimizer whose numbers are in `options`.

    >>> [is_foreign(name) for name in ("optax.lion", "opt.py:make", "muonh", "lamb")]
    [True, True, True, False]
    """
    return name in LIBRARY or str(name).startswith(_PREFIX) or _user_code.is_place(name)


def variant_options(name: str, options: Mapping[str, Any]) -> Any:
    """Return the options of the variant of a matrix optimizer; None for others, and unknown ones.

    Args:
      name: Name of the optimizer.
      options: Its options, with the name of the variant if it is not the default.
    """
    if name not in MATRIX_VARIANTS:
        return None
    default = inspect.signature(getattr(transforms, name)).parameters["variant"].default
    row = MATRIX_VARIANTS[name].get(options.get("variant", default))
    return None if row is None else row.options


def may_take(name: str, *arguments: str) -> bool:
    """Return whether an optimizer may have one of these arguments.

    The user's own code is not read for it, so its optimizers may have all.

    >>> may_take("optax.lion", "weight_decay"), may_take("optax.sgd", "weight_decay")
    (True, False)
    """
    if _user_code.is_place(name):
        return True
    found = named(name)
    return found is not None and bool({*arguments} & {*inspect.signature(found).parameters})


def check_name(name: str, ours: Sequence[str]) -> None:
    """Raise `UserError` for a name that is none of ours, of Optax or of the user.

    Args:
      name: The name.
      ours: The names of our own optimizers.
    """
    if name in ours or _user_code.is_place(name) or named(name) is not None:
        return
    if name.startswith(_PREFIX):
        known = names_of_optax()
        fix = "it is no optimizer by itself; give a function that makes one, file.py:make"
        wraps = callable(_object_of_optax(name)) and name not in known
        require(not wraps, "name", name, fix, code="choice")
        require_choice("name", name, known)
    if named(_PREFIX + name) is not None:
        raise UserError("name", name, f"write {_PREFIX + name!r} for that of Optax", code="choice")
    require_place_or_choice("name", name, (*ours, *LIBRARY), "config.optimizer")


def named(name: str) -> Callable[..., Any] | None:
    """Return the function of a name of Optax or of `LIBRARY`; None if it has none."""
    if name in LIBRARY:
        return getattr(transforms, name)
    found = _object_of_optax(name) if str(name).startswith(_PREFIX) else None
    return found if _is_factory(found) else None


def _object_of_optax(name: str) -> Any:
    *modules, last = name.removeprefix(_PREFIX).split(".")
    module: Any = {(): optax, ("contrib",): optax.contrib}.get(tuple(modules))
    return getattr(module, last, None)


def names_of_optax() -> list[str]:
    """Return the names of Optax's optimizers."""
    of_module = {_PREFIX: optax, f"{_PREFIX}contrib.": optax.contrib}
    return [
        f"{prefix}{name}"
        for prefix, module in of_module.items()
        for name in vars(module)
        if not name.startswith(("_", "scale_by_")) and _is_factory(getattr(module, name))
    ]


def _is_factory(found: Any) -> bool:
    """Return whether an object of Optax is a function with a learning rate, or one inside."""
    arguments = {*inspect.signature(found).parameters} if inspect.isfunction(found) else set()
    return bool({*_RATES, _BASE} & arguments)


def free_arguments(function: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    """Return the arguments of a function but those to which a `functools.partial` gave a value."""
    bound = function.keywords if isinstance(function, functools.partial) else {}
    arguments = inspect.signature(function).parameters
    return {name: one for name, one in arguments.items() if name not in bound}


class InjectedState(NamedTuple):
    """The state of an optimizer whose learning rate is filled in at each step.

    Attributes:
      rate: The step of the schedule, and the rate of the last update.
      inner: State of the optimizer.
    """

    rate: LearningRateState
    inner: Any


def make(
    name: str,
    options: Mapping[str, Any],
    learning_rate: optax.ScalarOrSchedule,
    weight_decay: float | jax.Array,
    mask: types.Mask,
    stacked: types.Stacked,
    known_roles: types.PyTree = None,
) -> optax.GradientTransformationExtraArgs:
    """Build an optimizer of Optax or of the user, with a learning rate from outside.

    Args:
      name: "optax.NAME", a name of `LIBRARY`, or a place of the user's code.
      options: Other arguments.
      learning_rate: Number or schedule. The optimizer is built anew in each step with the number of
        that step, so that the schedule, its restarts and the log are those of our own optimizers.
        The updates of a finished transformation, or of a function without this argument, are
        multiplied by it.
      weight_decay: Weight decay; may be traced.
      mask: The decayed leaves.
      stacked: The parameters that are stacks of layers; a mask sees one layer of each.
      known_roles: Roles that names need not tell, for Muon's matrices; None for none.

    Raises:
      UserError: Naming `name`, `options` or `weight_decay`, if the optimizer does not take them.
    """
    factory = named(name) or _user_code.load(name, "name")
    if isinstance(factory, optax.GradientTransformation):
        finished = factory
        factory = lambda: finished  # noqa: E731
    require(callable(factory), "name", name, "no function; give one that returns an optimizer")
    taken = free_arguments(factory)
    given = _arguments(name, taken, options, weight_decay, stacked)
    is_user = _user_code.is_place(name)
    rate_name = next((one for one in _RATES if one in taken), "")

    def with_rate(rate: Any, params: types.Params) -> optax.GradientTransformationExtraArgs:
        arguments = {rate_name: rate} if rate_name else {}
        arguments |= {key: _base(value, rate) for key, value in given.items()}
        of_leaves = _of_leaves(taken, mask, stacked, known_roles, params, is_user)
        # What Optax's own cannot be made of is told by `check_update`.
        with _user_code.naming_errors("name", name) if is_user else contextlib.nullcontext():
            made = factory(**{**of_leaves, **arguments})
        fix = f"it returns a {type(made).__name__}; return an optax.GradientTransformation"
        is_one = hasattr(made, "init") and hasattr(made, "update")
        require(is_one, "name", name, fix, code="type")
        # One that has a learning rate of its own: the schedule's number multiplies its updates.
        has_rate = rate_name or any(map(_names_optimizer, given.values()))
        whole = made if has_rate else optax.chain(made, optax.scale(rate))
        return optax.with_extra_args_support(whole)

    if name in LIBRARY:  # they read schedules, and log the rate
        return _of_params(functools.partial(with_rate, learning_rate))

    def init_fn(params: types.Params) -> InjectedState:
        start = LearningRateState(jnp.zeros((), jnp.int32), jnp.zeros((), jnp.float32))
        rate = rate_at(learning_rate, start.schedule_count)
        return InjectedState(start, with_rate(rate, params).init(params))

    def update_fn(
        updates: optax.Updates,
        state: InjectedState,
        params: types.Params | None = None,
        **extra: Any,
    ) -> tuple[optax.Updates, InjectedState]:
        rate = jnp.asarray(rate_at(learning_rate, state.rate.schedule_count), jnp.float32)
        count = optax.safe_increment(state.rate.schedule_count)
        tx = with_rate(rate, updates if params is None else params)
        # Muon's Adam decays all its leaves, biases too, and reads parameters for nothing else.
        if not is_user and _MATRICES in taken and params is not None:
            decayed = decayed_leaves(mask, stacked, params)
            params = jax.tree.map(lambda x, d: x if d else jnp.zeros_like(x), params, decayed)
        updates, inner = tx.update(updates, state.inner, params, **extra)
        return updates, InjectedState(LearningRateState(count, rate), inner)

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def _of_params(
    make_for: Callable[[types.Params], optax.GradientTransformationExtraArgs],
) -> optax.GradientTransformationExtraArgs:
    """Return a transformation that is made anew for the parameters of each call."""

    def update_fn(
        updates: optax.Updates,
        state: Any,
        params: types.Params | None = None,
        **extra: Any,
    ) -> tuple[optax.Updates, Any]:
        tx = make_for(updates if params is None else params)
        return tx.update(updates, state, params, **extra)

    return optax.GradientTransformationExtraArgs(lambda p: make_for(p).init(p), update_fn)


def _of_leaves(
    taken: Mapping[str, inspect.Parameter],
    mask: types.Mask,
    stacked: types.Stacked,
    known_roles: types.PyTree,
    params: types.Params,
    is_user: bool,
) -> dict[str, Any]:
    """Return the arguments of an optimizer with a value per leaf.

    They are trees: a function would be called by Muon on some of the leaves, and roles and patterns
    look at all. The user's own code gets the mask itself, which combines with others.
    """
    found: dict[str, Any] = {}
    if DECAY in taken and {*MASKS} & taken.keys():
        decayed = mask if is_user else decayed_leaves(mask, stacked, params)
        found |= {argument: decayed for argument in MASKS if argument in taken}
    for argument in (_MATRICES, *([] if is_user else [_OWN_MATRICES])):
        if argument in taken:
            found[argument] = masks.matrix_dimension_numbers(params, stacked, known_roles)
    if "sphere_mask" in taken and not is_user and known_roles is not None:
        default = masks.with_known_roles(taken["sphere_mask"].default, known_roles)
        found["sphere_mask"] = decayed_leaves(default, stacked, params)
    return found


def decayed_leaves(mask: types.Mask, stacked: types.Stacked, params: types.Params) -> types.PyTree:
    """Return a bool per leaf, from a mask that sees one layer of each stack."""
    if callable(mask) and tree.is_function(mask):
        mask = mask(stacks.one_layer(params, stacks.resolve_stacked(stacked, params)))
    return tree.spread(True if mask is None else mask, params, DECAY)


def _arguments(
    name: str,
    taken: Mapping[str, inspect.Parameter],
    options: Mapping[str, Any],
    weight_decay: float | jax.Array,
    stacked: types.Stacked,
) -> dict[str, Any]:
    """Return the arguments of an optimizer but the learning rate and those of `_of_leaves`."""
    for option in options:
        fix = f"{option!r} comes from the schedule or the fields of weight decay; leave it out"
        require(option not in FILLED, "options", dict(options), fix, code="conflict")
        _require_argument(name, taken, option)
    if not (isinstance(weight_decay, float | int) and weight_decay == 0):
        fix = f"{{name}} = {name!r} takes no weight decay; leave it 0"
        require(DECAY in taken, DECAY, weight_decay, fix, code="unused", also=["name"])

    needed = [
        argument
        for argument, one in taken.items()
        if one.default is one.empty and one.kind not in (one.VAR_POSITIONAL, one.VAR_KEYWORD)
    ]
    for argument in needed:
        fix = f"{{name}} = {name!r} needs {argument!r} too; give it a value"
        known = argument in (*FILLED, *options)
        require(known, "options", dict(options), fix, code="missing", also=["name"])

    filled: dict[str, Any] = {DECAY: weight_decay, "stacked": stacked}
    if DECAY in taken:
        filled["adam_weight_decay"] = weight_decay  # muon's, for the leaves that are no matrices
    given = {argument: value for argument, value in filled.items() if argument in taken}
    return given | {option: _option(option, value) for option, value in options.items()}


def _require_argument(name: str, taken: Mapping[str, inspect.Parameter], option: str) -> None:
    """Raise `UserError` unless an optimizer has an argument of this name."""
    if any(one.kind is inspect.Parameter.VAR_KEYWORD for one in taken.values()):
        return
    with_field = (*FILLED, "adam_weight_decay")
    known = [argument for argument in taken if argument not in with_field]
    require_choice(f"options.{option}", option, known)


def _option(option: str, value: Any) -> Any:
    """Return the value of an argument: a dtype for the name of one."""
    return jnp.dtype(value) if option.endswith("dtype") and isinstance(value, str) else value


def _base(value: Any, rate: Any) -> Any:
    """Return the value of an option, or the optimizer that it names (base of schedule-free)."""
    if not _names_optimizer(value):
        return value
    options = {"learning_rate": rate, **(value if isinstance(value, dict) else {})}
    factory = named(options.pop("name", value))
    assert factory is not None
    return factory(**options)


def _names_optimizer(value: Any) -> bool:
    """Return whether an option is "optax.NAME", or a dict with that `name` and its arguments."""
    name = value.get("name") if isinstance(value, dict) else value
    return isinstance(name, str) and named(name) is not None


def check_update(
    name: str,
    options: Mapping[str, Any],
    tx: optax.GradientTransformation,
    params: types.Params,
) -> None:
    """Raise `UserError` if a training step cannot use an optimizer.

    It names "options" if there are some, which may be wrong, and "name" otherwise.

    Args:
      name: Name of the optimizer.
      options: Its options.
      tx: The optimizer.
      params: The parameters, or their shapes.
    """
    tx = optax.with_extra_args_support(tx)

    def update(grads: types.Params, params: types.Params, loss: jax.Array) -> types.Params:
        return tx.update(grads, tx.init(params), params, value=loss)[0]

    loss = jax.ShapeDtypeStruct((), jnp.float32)
    try:
        updates = jax.eval_shape(update, params, params, loss)
    except UserError:
        raise
    except (AttributeError, TypeError, ValueError) as error:
        # Optax has no other way to say that an update needs the objective function, for instance.
        cause = " ".join(str(error).split())[:200]
        fix = f"a training step gives it gradients, parameters and the loss ({cause}); use another"
        if options:
            fix = f"{{name}} = {name!r} does not work with them ({cause}); correct them"
            shown = dict(options)
            raise UserError("options", shown, fix, code="conflict", also=["name"]) from error
        raise UserError("name", name, fix, code="conflict") from error
    shapes, wanted = (jax.tree.map(lambda x: x.shape, one) for one in (updates, params))
    fix = "its updates have other shapes than the parameters; use another optimizer"
    require(shapes == wanted, "name", name, fix, code="mismatch")
