"""Optimizers that treat matrices in one way and the rest in another, split by role."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import optax

from lbopt import _scalars, errors, masks, stacks, tree, types
from lbopt.errors import UserError, require_choice
from lbopt.transforms import (
    _arguments,
    _layerwise_options,
    _learning_rate,
    _matrix_view,
    _moments,
    _per_path,
    _precision,
    _relative,
    _rounding,
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


@dataclasses.dataclass(frozen=True)
class MatrixOptions(RestOptions):
    """The options that all matrix optimizers have, and that a variant sets.

    Attributes:
      sphere: Whether matrices keep their norm and move by a relative step.
      weight_decay: Decoupled decay of the matrices.
      weight_decay_mask: The leaves that are decayed.
      cautious_weight_decay: Whether a weight is decayed only where its update has its sign.
    """

    sphere: bool = False
    weight_decay: float | jax.Array = 0.0
    weight_decay_mask: types.Mask = masks.weights_only
    cautious_weight_decay: bool = False

    def check(self) -> None:
        """Raise `UserError` for an option that is out of range."""
        super().check()
        _scalars.require_at_least("weight_decay", self.weight_decay, 0)
        _scalars.require_flag("cautious_weight_decay", self.cautious_weight_decay)


def _with_wide_state(inner: optax.GradientTransformation) -> optax.GradientTransformation:
    """Return Adam of Optax, with a state of fp32 or wider whatever the parameters are."""

    def init_fn(params: types.Params) -> optax.OptState:
        if _per_path.is_placeholder(params):
            return inner.init(params)
        wide = jax.tree.map(lambda p: jnp.zeros_like(p, tree.wide_dtype(p.dtype)), params)
        return inner.init(wide)

    def update_fn(
        updates: optax.Updates, state: optax.ScaleByAdamState, params: types.Params | None = None
    ) -> tuple[optax.Updates, optax.OptState]:
        _arguments.require_state(state, optax.ScaleByAdamState)
        tree.check_updates(updates, state.mu)
        wide = jax.tree.map(lambda u: u.astype(tree.wide_dtype(u.dtype)), updates)
        with jax.numpy_dtype_promotion("standard"):  # which Optax's code needs
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
      layers: `LayerAxes`, the axes that count matrices, or layers of other leaves.
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

        A box is taken out as a whole: what names its sharding needs an array inside.
        """
        return jax.tree.map(
            lambda node: jax.tree.leaves(node) == [name], self.labels, is_leaf=_is_box
        )

    def stacked(self, chosen: types.PyTree) -> types.Stacked:
        """Return the layers of the chosen leaves; None if they have none, which is refused."""
        has_layers = jax.tree.map(lambda axes, of: of and bool(axes), self.layers, chosen)
        return self.layers if any(jax.tree.leaves(has_layers)) else None


def _is_box(node: Any) -> bool:
    """Return whether a node is no plain container and holds one leaf."""
    return not isinstance(node, (dict, list, tuple)) and len(jax.tree.leaves(node)) == 1


@dataclasses.dataclass(frozen=True)
class _Part:
    """The leaves that one optimizer treats, and its links.

    Attributes:
      options: Options of the optimizer.
      groups: The groups of the parameters; None for a placeholder of them.
      name: Name of the optimizer of this group.
    """

    options: MatrixOptions
    groups: _Groups | None
    name: str

    def chain(
        self, *links: optax.GradientTransformation, relative: bool = False
    ) -> optax.GradientTransformation:
        """Return the chain of links on this group alone, with a relative update at its end."""
        mask = True if self.groups is None else self.groups.mask(self.name)
        if relative:
            layers = None if self.groups is None else self.groups.stacked(self.groups.of(self.name))
            links = (*links, _relative.relative_update("weight", None, stacked=layers))
        return optax.masked(optax.chain(*links), mask)

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
            number, decayed, cautious=self.options.cautious_weight_decay
        )


def build(
    name: str,
    variants: Mapping[str, _layerwise_options.Variant[Any]],
    directions: Callable[..., Sequence[optax.GradientTransformation]],
    given: Mapping[str, Any],
    *,
    has_rate: bool = False,
    **renamed: str,
) -> optax.GradientTransformation:
    """Return a matrix optimizer.

    Args:
      name: Its name, that of the public function.
      variants: Its variants.
      directions: (options, dimension numbers) -> the transforms that make the directions of
        matrices, without decay and learning rate. With `has_rate`, (options, dimension numbers,
        mask of the decayed leaves) -> those that make finished updates.
      given: The arguments of the public function by name; those that no variant sets go to
        `directions` by a closure.
      has_rate: Whether the updates of matrices are finished, learning rate and decay included.
      **renamed: Name of an argument of those transforms -> name of the option.

    Raises:
      UserError: For an unknown variant, or an option or a rate that is out of range.
    """
    known = {field.name for rows in variants.values() for field in dataclasses.fields(rows.options)}
    own = {option: value for option, value in given.items() if option in known}
    options = _layerwise_options.choose(variants, given["variant"], **own)
    options.check()
    if not callable(given["learning_rate"]):
        _scalars.require_at_least("learning_rate", given["learning_rate"], 0)
    with errors.under("", **renamed):
        directions(options, None, *([None] if has_rate else []))  # which checks the options
    return _MatrixOptimizer(
        name,
        functools.partial(directions, options),
        options,
        given["learning_rate"],
        _matrix_view.Matrices(given["dimension_numbers"], given["stacked"]),
        has_rate,
    ).build()


@dataclasses.dataclass(frozen=True)
class _MatrixOptimizer:
    """The parts of an optimizer with a group of matrices; `build` makes the transformation.

    Attributes:
      name: Name of the optimizer of the matrices.
      directions: (dimension numbers) -> the transforms that make their directions, without decay
        and learning rate; or finished updates, as in `build`.
      options: Sphere, decay and the options of the rest.
      learning_rate: Number or schedule.
      matrices: The choice of matrices.
      has_rate: Whether the updates of matrices are finished.
    """

    name: str
    directions: Callable[..., Sequence[optax.GradientTransformation]]
    options: MatrixOptions
    learning_rate: optax.ScalarOrSchedule
    matrices: _matrix_view.Matrices
    has_rate: bool

    @property
    def _rest_name(self) -> str:
        return self.options.rest if isinstance(self.options.rest, str) else "rest"

    def _groups(self, params: types.Params) -> _Groups:
        numbers = self.matrices.numbers(params)
        views = self.matrices.views(params)
        axes = stacks.resolve_stacked(self.matrices.stacked, params)
        roles = masks.tree_roles(stacks.one_layer(params, axes))
        rest = self._rest_name

        def label(given: _matrix_view.Given, role: str) -> str:
            if given.numbers is not None:
                return self.name
            # Embeddings, biases and norms are no weights on spheres.
            return "adamw" if rest == "adamh" and role != "weight" else rest

        labels = jax.tree.map(label, numbers, roles)
        mask = self.options.weight_decay_mask
        decayed = masks.resolve_mask(mask, params, "weight_decay_mask", axes)
        spheres = {self.name} if self.options.sphere else set()
        spheres |= {"adamh"} if rest == "adamh" else set()
        on_sphere = jax.tree.map(lambda name: name in spheres, labels)
        # Each matrix of a leaf has a norm of its own.
        layers = jax.tree.map(
            lambda view, axes: axes if view is None else stacks.LayerAxes(view.batch),
            views,
            axes,
            is_leaf=lambda node: node is None,
        )
        return _Groups(labels, numbers, decayed, on_sphere, layers)

    def _inner(self, groups: _Groups | None) -> optax.GradientTransformation:
        """Return the chain for one tree of parameters; None for a placeholder of them.

        Its state has the same structure for both.
        """
        rest = self._rest_name
        plain = "adamw" if rest == "adamh" else rest
        options = self.options
        own_decay = options.rest_weight_decay
        own_decay = options.weight_decay if own_decay is None else own_decay
        ratio = options.rest_learning_rate_ratio
        slow = [] if _scalars.is_number(ratio) and ratio == 1 else [optax.scale(ratio)]

        group = _Part(options, groups, self.name)
        numbers = None if groups is None else groups.numbers
        if self.has_rate:
            decayed = None if groups is None else groups.decayed
            links = [group.chain(*self.directions(numbers, decayed))]
        else:
            decay = group.decay(options.weight_decay)
            links = [group.chain(*self.directions(numbers), decay, relative=options.sphere)]
        group = _Part(options, groups, plain)
        links.append(group.chain(options.direction(), group.decay(own_decay), *slow))
        if rest == "adamh":
            links.append(_Part(options, groups, rest).chain(options.direction(), relative=True))

        if self.has_rate:
            others: Any = True
            if groups is not None:
                others = jax.tree.map(lambda own: not own, groups.mask(self.name))
            # Without a state that is logged: that of the matrices has the rate.
            rate = optax.scale_by_learning_rate(self.learning_rate)
            links.append(optax.masked(rate, others))
        else:
            links.append(_learning_rate.scale_by_learning_rate(self.learning_rate))
        if options.sphere or rest == "adamh":
            mask: Any = None if groups is None else groups.on_sphere
            layers = None if groups is None else groups.stacked(mask)
            # No leaf may be on a sphere: with "adamh" for an output head that is not there.
            mask = mask if mask is None or any(jax.tree.leaves(mask)) else False
            links.append(_relative.hyperball(mask=mask, stacked=layers))
        return optax.chain(*links)

    def build(self) -> optax.GradientTransformation:
        """Return the optimizer, which resolves the groups of the parameters it is given."""

        def init_fn(params: types.Params) -> optax.OptState:
            if _per_path.is_placeholder(params):
                return self._inner(None).init(params)
            _arguments.require_float_leaves(params)
            if self.has_rate:
                _arguments.require_arrays(params, f"{self.name} starts at their values")
            groups = self._groups(params)
            masks.record_choice("optimizer", groups.labels)
            self.matrices.record(params)
            _rounding.warn_of_lost_steps(params)
            with _rounding.without_warning():  # the parts would warn of theirs
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
