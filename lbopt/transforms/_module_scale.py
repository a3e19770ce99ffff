"""A factor for the update of each module, which the AGVM aggregator finds.

AGVM is adaptive gradient variance modulation; see `lbopt.agvm`.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import optax

from lbopt import errors, tree, types
from lbopt.errors import UserError, require
from lbopt.transforms import _arguments, _per_path

Labels = types.PyTree | Mapping[str, str] | Callable[[types.Params], types.PyTree]
"""The module of each parameter, in one of three forms.

{module: regular expression}, where the first expression that is found in the path decides; a pytree
of module names like the parameters; or a function params -> such a pytree.
"""


class ModuleScaleState(NamedTuple):
    """The factors of the last update.

    Attributes:
      scale: module -> fp32 scalar, its factor.
      phi: module -> fp32 scalar, disagreement of the two halves of the replicas, 1 - cos of the
        angle between their mean gradients, when it was last measured; 1 before.
    """

    scale: dict[str, jax.Array]
    phi: dict[str, jax.Array]


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class ModuleOf:
    """The module of each parameter, by which an aggregator found the factors.

    It is static, not an array, so it passes through any transformation of JAX.

    Attributes:
      pairs: (path, module) of each leaf.
    """

    pairs: tuple[tuple[str, str], ...]

    @classmethod
    def of(cls, modules: types.PyTree) -> ModuleOf:
        """Return the modules of a pytree of module names like the parameters."""
        return cls(tuple(zip(tree.leaf_names(modules), jax.tree.leaves(modules), strict=True)))

    def check(self, modules: types.PyTree) -> None:
        """Raise `UserError` unless `scale_by_agvm`, whose modules are given, has the same ones."""
        theirs = dict(self.pairs)
        for name, module in ModuleOf.of(modules).pairs:
            if theirs.get(name, module) != module:
                fix = (
                    f"the module of scale_by_agvm, but agvm has {theirs[name]!r} there; give both "
                    "the same labels"
                )
                raise UserError(f"labels/{name}", module, fix, code="mismatch")


def module_patterns(modules: Iterable[tuple[str, str]]) -> dict[str, str]:
    """Return (name, regular expression) of each module as `Labels`: name -> expression.

    Raises:
      UserError: Naming `modules`, if there is none, two have one name, or an expression is none.
    """
    modules = tuple(modules)
    fix = "name the modules of the model, for instance (('head', '^head/'), ('body', ''))"
    require(len(modules) > 0, "modules", modules, fix, code="missing")
    found = dict(modules)
    require(len(found) == len(modules), "modules", modules, "give each module a name of its own")
    with errors.about("modules", modules):
        tree.check_patterns(tuple(found.values()))
    return found


def resolve_labels(labels: Labels, params: types.Params) -> types.PyTree:
    """Return the module of each leaf, a pytree of strings like the parameters.

    Raises:
      UserError: If a leaf has no module, a module has no leaf, or the structure of a pytree differs
        from that of the parameters.

    >>> params = {"conv": {"kernel": 0}, "head": {"kernel": 0}}
    >>> resolve_labels({"head": "^head/", "body": ""}, params)
    {'conv': {'kernel': 'body'}, 'head': {'kernel': 'head'}}
    """
    if _are_patterns(labels, params):
        return _labels_of_patterns(cast(Mapping[str, str], labels), params)

    if tree.is_function(labels):
        does = "the parameters and returns a pytree of names"
        tree.check_takes(labels, 1, "labels", does)  # type: ignore[arg-type]
        labels = labels(params)  # type: ignore[operator]
    chosen = tree.spread(labels, params, "labels")
    for path, label in jax.tree_util.tree_leaves_with_path(chosen):
        if not isinstance(label, str):
            name = tree.path_name(path)
            raise UserError(f"labels/{name}", label, "give the name of a module", code="type")
    return chosen


def _labels_of_patterns(patterns: Mapping[str, str], params: types.Params) -> types.PyTree:
    tree.check_patterns(tuple(patterns.values()))

    def module(name: str, leaf: Any) -> str:
        del leaf
        for label, pattern in patterns.items():
            if re.search(pattern, name):
                return label
        fix = f"no pattern is found in {name!r}; add a module with pattern ''"
        raise UserError("labels", patterns, fix, code="missing")

    chosen = tree.map_with_name(module, params)
    unused = sorted(set(patterns) - set(jax.tree.leaves(chosen)))
    if unused:
        names = tree.some(tree.leaf_names(params))
        fix = f"module {unused[0]!r} has no parameter of {names}; correct its pattern, or remove it"
        raise UserError("labels", patterns, fix, code="unused")
    return chosen


def _are_patterns(labels: Labels, params: types.Params) -> bool:
    """Return whether labels are {module: pattern}, and not a flat pytree like the parameters."""
    flat = isinstance(labels, Mapping) and all(isinstance(value, str) for value in labels.values())
    return flat and tree.leaf_names(labels) != tree.leaf_names(params)


def scale_by_agvm(labels: Labels) -> optax.GradientTransformationExtraArgs:
    """Multiply the update of each module by the factor that `lbopt.agvm` found.

    Put it last in the chain. The updates of a module with more gradient noise than the anchor
    become smaller, as if its learning rate were. Before a trust ratio it has no effect, since that
    normalizes; `agvm` refuses such a chain.

    Args:
      labels: Module of each parameter (see `Labels`); the same as those of `lbopt.agvm`.

    Returns:
      A transform whose `update` takes `agvm_scale` and `agvm_phi` by name, each module -> scalar,
      and `agvm_modules`, a `ModuleOf` that is compared with the labels. `optimizer_metrics` shows
      the first two.

    Raises:
      UserError: For labels that do not fit the parameters or differ from those of `lbopt.agvm`, or
        if `update` misses its arguments.

    >>> import jax.numpy as jnp, optax
    >>> tx = optax.chain(optax.sgd(0.1), scale_by_agvm({"head": "^head/", "body": ""}))
    >>> state = tx.init({"conv": {"kernel": jnp.ones(2)}, "head": {"kernel": jnp.ones(2)}})
    >>> sorted(state[-1].scale)
    ['body', 'head']

    References:
      Xue et al., Large-batch Optimization for Dense Visual Predictions, arXiv:2210.11078v1;
      see `lbopt.agvm`.
    """

    def init_fn(params: types.Params) -> ModuleScaleState:
        if _per_path.is_placeholder(params):
            return ModuleScaleState(_per_path.UNKNOWN_PARAMS, _per_path.UNKNOWN_PARAMS)
        modules = dict.fromkeys(jax.tree.leaves(resolve_labels(labels, params)))

        # Arrays of their own for each field, as each is donated to the step.
        def ones() -> dict[str, jax.Array]:
            return {module: jnp.ones((), jnp.float32) for module in modules}

        return ModuleScaleState(ones(), ones())

    def update_fn(
        updates: optax.Updates,
        state: ModuleScaleState,
        params: types.Params | None = None,
        *,
        agvm_scale: Mapping[str, jax.Array] | None = None,
        agvm_phi: Mapping[str, jax.Array] | None = None,
        agvm_modules: ModuleOf | None = None,
        **extra_args: Any,
    ) -> tuple[optax.Updates, ModuleScaleState]:
        del params, extra_args
        tree.check_inexact(updates, "updates")
        _arguments.require_state(state, ModuleScaleState)
        if agvm_scale is None or agvm_phi is None or set(agvm_scale) != set(state.scale):
            fix = (
                f"update needs agvm_scale and agvm_phi of the modules {sorted(state.scale)}; use "
                "the aggregator lbopt.agvm with the same labels, which passes them"
            )
            raise UserError("agvm_scale", agvm_scale, fix, code="missing")

        # With other labels than the aggregator's, factors would scale the wrong modules.
        modules = resolve_labels(labels, updates)
        if agvm_modules is not None:
            agvm_modules.check(modules)

        def scale(u: jax.Array, module: str) -> jax.Array:
            wide = tree.wide_dtype(u.dtype)
            return (u.astype(wide) * jnp.asarray(agvm_scale[module], wide)).astype(u.dtype)

        new_state = ModuleScaleState(dict(agvm_scale), dict(agvm_phi))
        return jax.tree.map(scale, updates, modules), new_state

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)
