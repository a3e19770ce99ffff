"""Optimizers that treat matrices in one way and the rest in another, split by role."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import optax

from lbopt import _scalars, masks, stacks, tree, types
from lbopt.errors import UserError, require_choice
from lbopt.transforms import (
    _arguments,
    _learning_rate,
    _matrix_view,
    _moments,
    _per_path,
    _precision,
    _relative,
    _weight_decay,
)

Rest = Literal["adamw", "nadamw", "adamh", "sign"]
RESTS = ("adamw", "nadamw", "adamh", "sign")


@dataclasses.dataclass(frozen=True)
class RestOptions:
    """The optimizer of the leaves that are no matrices.

    Attributes:
      rest: "adamw", "nadamw" (with Nesterov's momentum, as `optax.contrib.muon`), "adamh" (weights
        among the rest, such as an output head, keep their norm), "sign" (the sign of an average of
        gradients, with `rest_b1`), or a transformation that gives directions before the learning
        rate.
      rest_learning_rate_ratio: Its learning rate, as a multiple of that of the matrices.
      rest_b1: Decay rate of the first moment.
      rest_b2: Decay rate of the second moment.
      rest_eps: Constant added to the root of the second moment.
      rest_weight_decay: Its weight decay; None for that of the matrices.
    """

    rest: Any = "adamw"
    rest_learning_rate_ratio: float | jax.Array = 1.0
    rest_b1: float | jax.Array = 0.9
    rest_b2: float | jax.Array = 0.95
    rest_eps: float | jax.Array = 1e-8
    rest_weight_decay: float | jax.Array | None = None

    def check(self) -> None:
        """Raise `UserError` for an option that is out of range."""
        if isinstance(self.rest, str):
            require_choice("rest", self.rest, RESTS)
        elif not _arguments.is_transformation(self.rest):
            fix = f"use one of {', '.join(RESTS)}, or give an Optax transformation"
            raise UserError("rest", self.rest, fix, code="type")
        _scalars.require_at_least("rest_learning_rate_ratio", self.rest_learning_rate_ratio, 0)
        _scalars.require_decay_rate("rest_b1", self.rest_b1)
        _scalars.require_decay_rate("rest_b2", self.rest_b2)
        _scalars.require_at_least("rest_eps", self.rest_eps, 0)
        if self.rest_weight_decay is not None:
            _scalars.require_at_least("rest_weight_decay", self.rest_weight_decay, 0)

    def direction(self) -> optax.GradientTransformation:
        """Return the transform that makes directions, without decay and learning rate."""
        if not isinstance(self.rest, str):
            return self.rest
        if self.rest == "nadamw":
            return _with_wide_state(
                optax.scale_by_adam(self.rest_b1, self.rest_b2, self.rest_eps, nesterov=True)
            )
        if self.rest == "sign":
            average = _moments.scale_by_lars_momentum(self.rest_b1)
            return optax.chain(average, optax.scale_by_sign())
        return _moments.scale_by_lamb_moments(self.rest_b1, self.rest_b2, self.rest_eps)


def _with_wide_state(inner: optax.GradientTransformation) -> optax.GradientTransformation:
    """Return a transform of Optax, whose state is fp32 or wider whatever the parameters are."""

    def init_fn(params: types.Params) -> optax.OptState:
        if _per_path.is_placeholder(params):
            return inner.init(params)
        wide = jax.tree.map(lambda p: jnp.zeros_like(p, tree.wide_dtype(p.dtype)), params)
        return inner.init(wide)

    def update_fn(
        updates: optax.Updates, state: optax.OptState, params: types.Params | None = None
    ) -> tuple[optax.Updates, optax.OptState]:
        wide = jax.tree.map(lambda u: u.astype(tree.wide_dtype(u.dtype)), updates)
        directions, state = inner.update(wide, state, params)
        return jax.tree.map(lambda d, u: d.astype(u.dtype), directions, updates), state

    return optax.GradientTransformation(init_fn, update_fn)


@dataclasses.dataclass(frozen=True)
class _Groups:
    """The groups of one tree of parameters; each field is a pytree like it.

    Attributes:
      labels: Name of the optimizer of each leaf.
      numbers: Dimension numbers of each matrix.
      decayed: Whether the leaf is decayed.
      on_sphere: Whether the leaf keeps its norm.
      layers: `LayerAxes`, the axes that count layers.
    """

    labels: types.PyTree
    numbers: types.PyTree
    decayed: types.PyTree
    on_sphere: types.PyTree
    layers: types.PyTree

    def of(self, name: str) -> types.PyTree:
        """Return a bool for each leaf, whether its optimizer has this name."""
        return jax.tree.map(lambda label: label == name, self.labels)

    def mask(self, name: str) -> types.PyTree:
        """Return `of` for `optax.masked`, with one bool for a box, such as `nn.Partitioned`.

        A box is taken out as a whole: an empty one would still claim the sharding of an array.
        """
        return jax.tree.map(
            lambda node: jax.tree.leaves(node) == [name], self.labels, is_leaf=_is_box
        )


def _is_box(node: Any) -> bool:
    """Return whether a node is no plain container and holds one leaf."""
    return not isinstance(node, (dict, list, tuple)) and len(jax.tree.leaves(node)) == 1


@dataclasses.dataclass(frozen=True)
class _Part:
    """The leaves that one optimizer treats, and its links.

    Attributes:
      optimizer: The optimizer as a whole.
      groups: The groups of the parameters; None for a placeholder of them.
      name: Name of the optimizer of this group.
    """

    optimizer: MatrixOptimizer
    groups: _Groups | None
    name: str

    def chain(
        self, *links: optax.GradientTransformation, relative: bool = False
    ) -> optax.GradientTransformation:
        """Return the chain of links on this group alone, with a relative update at its end."""
        mask = True if self.groups is None else self.groups.mask(self.name)
        if relative:
            stacked = self._stacked()
            links = (*links, _relative.relative_update("weight", None, stacked=stacked))
        return optax.masked(optax.chain(*links), mask)

    def _stacked(self) -> types.Stacked:
        """Return the stacks of this group; a transform refuses stacks of which there are none."""
        if self.groups is None:
            return None
        own = self.groups.of(self.name)
        stacked = jax.tree.map(lambda axes, is_own: is_own and bool(axes), self.groups.layers, own)
        return self.groups.layers if any(jax.tree.leaves(stacked)) else None

    def decay(self, number: float | jax.Array) -> optax.GradientTransformation:
        """Return the decay of this group, and the identity if it has no decayed leaves."""
        if self.groups is None or (_scalars.is_number(number) and number == 0):
            return optax.identity()
        decayed = jax.tree.map(
            lambda decayed, own: decayed and own, self.groups.decayed, self.groups.of(self.name)
        )
        if not any(jax.tree.leaves(decayed)):
            return optax.identity()
        return _weight_decay.add_weight_decay(
            number, decayed, cautious=self.optimizer.cautious_weight_decay
        )


@dataclasses.dataclass(frozen=True)
class MatrixOptimizer:
    """The parts of an optimizer with a group of matrices; `build` makes the transformation.

    Attributes:
      name: Name of the optimizer of the matrices.
      directions: (dimension numbers) -> the transforms that make their directions, without decay
        and learning rate.
      learning_rate: Number or schedule.
      weight_decay: Decoupled decay of the matrices.
      weight_decay_mask: The leaves that are decayed.
      cautious_weight_decay: Whether a weight is decayed only where its update has its sign.
      sphere: Whether matrices keep their norm and move by a relative step.
      rest: Options of the rest.
      dimension_numbers: The axes of each matrix.
      stacked: Leaves that are stacks of layers.
    """

    name: str
    directions: Callable[[Any], Sequence[optax.GradientTransformation]]
    learning_rate: optax.ScalarOrSchedule
    weight_decay: float | jax.Array
    weight_decay_mask: types.Mask
    cautious_weight_decay: bool
    sphere: bool
    rest: RestOptions
    dimension_numbers: _matrix_view.DimensionNumbers
    stacked: types.Stacked

    def __post_init__(self) -> None:
        self.rest.check()
        _scalars.require_at_least("weight_decay", self.weight_decay, 0)
        _scalars.require_flag("cautious_weight_decay", self.cautious_weight_decay)

    @property
    def _rest_name(self) -> str:
        return self.rest.rest if isinstance(self.rest.rest, str) else "rest"

    def _groups(self, params: types.Params) -> _Groups:
        matrices = _matrix_view.Matrices(self.dimension_numbers, self.stacked)
        matrices.views(params)
        numbers = matrices.numbers(params)
        axes = stacks.resolve_stacked(self.stacked, params)
        layers = stacks.one_layer(params, axes)
        roles = masks.tree_roles(layers)
        rest = self._rest_name

        def label(given: _matrix_view.Given, role: str) -> str:
            if given.numbers is not None:
                return self.name
            # Embeddings, biases and norms are no weights on spheres.
            return "adamw" if rest == "adamh" and role != "weight" else rest

        labels = jax.tree.map(label, numbers, roles)
        decayed = masks.resolve_mask(self.weight_decay_mask, params, "weight_decay_mask", axes)
        spheres = {self.name} if self.sphere else set()
        spheres |= {"adamh"} if rest == "adamh" else set()
        on_sphere = jax.tree.map(lambda name: name in spheres, labels)
        return _Groups(labels, numbers, decayed, on_sphere, axes)

    def _record(self, params: types.Params, groups: _Groups) -> None:
        masks.record_choice("optimizer", groups.labels)
        masks.record_choice("stacked", stacks.resolve_stacked(self.stacked, params))
        if any(jax.tree.leaves(groups.on_sphere)):
            masks.record_choice("trust_ratio_mask", groups.on_sphere)

    def _inner(self, groups: _Groups | None) -> optax.GradientTransformation:
        """Return the chain for one tree of parameters; None for a placeholder of them.

        Its state has the same structure for both.
        """
        rest = self._rest_name
        plain = "adamw" if rest == "adamh" else rest
        own_decay = self.rest.rest_weight_decay
        own_decay = self.weight_decay if own_decay is None else own_decay
        ratio = self.rest.rest_learning_rate_ratio
        slow = [] if _scalars.is_number(ratio) and ratio == 1 else [optax.scale(ratio)]

        group = _Part(self, groups, self.name)
        directions = self.directions(None if groups is None else groups.numbers)
        links = [group.chain(*directions, group.decay(self.weight_decay), relative=self.sphere)]
        group = _Part(self, groups, plain)
        links.append(group.chain(self.rest.direction(), group.decay(own_decay), *slow))
        if rest == "adamh":
            links.append(_Part(self, groups, rest).chain(self.rest.direction(), relative=True))

        links.append(_learning_rate.scale_by_learning_rate(self.learning_rate))
        if self.sphere or rest == "adamh":
            on_sphere = None if groups is None else groups.on_sphere
            links.append(_relative.hyperball(mask=on_sphere, stacked=self.stacked))
        return optax.chain(*links)

    def build(self) -> optax.GradientTransformation:
        """Return the optimizer, which resolves the groups of the parameters it is given."""

        def init_fn(params: types.Params) -> optax.OptState:
            if _per_path.is_placeholder(params):
                return self._inner(None).init(params)
            _arguments.require_float_leaves(params)
            groups = self._groups(params)
            self._record(params, groups)
            return self._inner(groups).init(params)

        def update_fn(
            updates: optax.Updates,
            state: optax.OptState,
            params: types.Params | None = None,
            **extra_args: Any,
        ) -> tuple[optax.Updates, optax.OptState]:
            _arguments.require_params(params, self.name)
            tree.check_updates(updates, params)
            _arguments.require_state(state, tuple)
            inner = optax.with_extra_args_support(self._inner(self._groups(params)))
            return inner.update(updates, state, params, **extra_args)

        return _precision.chain_in_wide_precision(
            optax.GradientTransformationExtraArgs(init_fn, update_fn)
        )
