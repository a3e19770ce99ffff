"""A factor for each module's update, found by whoever saw the replicas' gradients."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import optax

from lbopt import tree, types
from lbopt.transforms import _arguments, _per_path

Labels = types.PyTree | Mapping[str, str] | Callable[[types.Params], types.PyTree]
"""The module of each parameter: {module: regular expression} (the first that is found in the path), a pytree of strings like the
parameters, or params -> such a pytree."""


class ModuleScaleState(NamedTuple):
    """The last update's factors.

    Attributes:
      scale: module -> fp32 scalar.
      phi: module -> fp32 scalar, the disagreement of the replicas' halves when it was last measured; 1 before.
    """

    scale: dict[str, jax.Array]
    phi: dict[str, jax.Array]


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class ModuleOf:
    """The module of each parameter as whoever found the factors had it; no array, so it passes through any transformation of JAX.

    Attributes:
      pairs: (path, module) of each leaf.
    """

    pairs: tuple[tuple[str, str], ...]

    @classmethod
    def of(cls, modules: types.PyTree) -> ModuleOf:
        """Take them from a pytree of strings like the parameters."""
        return cls(tuple(zip(tree.leaf_names(modules), jax.tree.leaves(modules), strict=True)))

    def check(self, modules: types.PyTree) -> None:
        """Raise ValueError, naming the parameter, unless these modules are the same."""
        there = dict(self.pairs)
        for name, module in ModuleOf.of(modules).pairs:
            if there.get(name, module) != module:
                raise ValueError(
                    f"labels: {name!r} belongs to {module!r} for scale_by_agvm and to {there[name]!r} for agvm; give both the same labels"
                )


def resolve_labels(labels: Labels, params: types.Params) -> types.PyTree:
    """Return the module of each leaf, a pytree of strings like the parameters.

    Raises:
      ValueError: if a leaf has no module, a module no leaf, or a pytree another structure.

    >>> resolve_labels({"head": "^head/", "body": ""}, {"conv": {"kernel": 0}, "head": {"kernel": 0}})
    {'conv': {'kernel': 'body'}, 'head': {'kernel': 'head'}}
    """
    if _are_patterns(labels, params):
        patterns = cast(Mapping[str, str], labels)
        tree.check_patterns(tuple(patterns.values()))

        def module(name: str, leaf: Any) -> str:
            del leaf
            matching = (label for label, p in patterns.items() if re.search(p, name))
            found = next(matching, None)
            if found is None:
                raise ValueError(
                    f"labels: no pattern of {labels!r} is found in {name!r}; add a module with pattern ''"
                )
            return found

        chosen = tree.map_with_name(module, params)
        unused = set(labels) - set(jax.tree.leaves(chosen))  # type: ignore[arg-type]
        if unused:
            raise ValueError(
                f"labels: module {sorted(unused)[0]!r} has no parameter of {tree.some(tree.leaf_names(params))}"
            )
        return chosen
    if tree.is_function(labels):
        tree.check_takes(labels, 1, "labels", "the parameters and returns a pytree of names")  # type: ignore[arg-type]
        labels = labels(params)  # type: ignore[operator]
    chosen = tree.spread(labels, params, "labels")
    for name, label in zip(tree.leaf_names(chosen), jax.tree.leaves(chosen), strict=True):
        if not isinstance(label, str):
            raise ValueError(f"labels at {name!r} is {tree.said(label)}: give the name of a module")
    return chosen


def _are_patterns(labels: Labels, params: types.Params) -> bool:
    flat = isinstance(labels, Mapping) and all(isinstance(value, str) for value in labels.values())
    return flat and tree.leaf_names(labels) != tree.leaf_names(params)


def scale_by_agvm(labels: Labels) -> optax.GradientTransformationExtraArgs:
    """Multiply each module's update by the factor that the aggregator `lbopt.agvm` found. Put it last in the chain.

    The updates of a module with more noise than the anchor's become smaller, as if its learning rate were. Before a trust ratio it has
    no effect, since that normalises; `agvm` refuses such a chain.

    Args:
      labels: the same as those of `lbopt.agvm`.

    Returns:
      A transform whose `update` takes `agvm_scale` and `agvm_phi` by name, each module -> scalar, and `agvm_modules`, a `ModuleOf` that is
      compared with the labels. `optimizer_metrics` shows the first two.

    Raises:
      ValueError: for labels that do not fit (see `resolve_labels`) or that differ from those of `lbopt.agvm`, or if `update` misses its
        arguments.

    References:
      Large-batch Optimization for Dense Visual Predictions, arXiv 2210.11078; see `lbopt.agvm`.
    """

    def init_fn(params: types.Params) -> ModuleScaleState:
        if _per_path.is_placeholder(params):
            return ModuleScaleState(_per_path.UNKNOWN_PARAMS, _per_path.UNKNOWN_PARAMS)
        modules = dict.fromkeys(jax.tree.leaves(resolve_labels(labels, params)))
        scale, phi = (
            {module: jnp.ones((), jnp.float32) for module in modules} for _ in range(2)
        )  # donated apart
        return ModuleScaleState(scale, phi)

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
        tree.check_inexact(updates, "the gradient")
        _arguments.require_state(state, ModuleScaleState, "scale_by_agvm")
        if agvm_scale is None or agvm_phi is None or set(agvm_scale) != set(state.scale):
            raise ValueError(
                f"scale_by_agvm: update needs agvm_scale and agvm_phi of the modules {sorted(state.scale)}; "
                "the aggregator lbopt.agvm with the same labels passes them"
            )
        modules = resolve_labels(labels, updates)
        if agvm_modules is not None:
            agvm_modules.check(modules)

        def scale(u: jax.Array, module: str) -> jax.Array:
            wide = tree.wide_dtype(u.dtype)
            return (u.astype(wide) * jnp.asarray(agvm_scale[module], wide)).astype(u.dtype)

        return jax.tree.map(scale, updates, modules), ModuleScaleState(
            dict(agvm_scale), dict(agvm_phi)
        )

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)
