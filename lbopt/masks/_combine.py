"""Masks that combine: by role, by path, and by function."""

from __future__ import annotations

import abc
import dataclasses
import re
from collections.abc import Callable, Iterable
from typing import Any

import jax
import numpy as np

from lbopt import tree, types
from lbopt.errors import UserError, require
from lbopt.masks._names import ROLES, Role
from lbopt.masks._recording import record_choice
from lbopt.masks._roles import check_known_roles, resolve_known_roles, tree_roles


class LeafMask(abc.ABC):
    """A mask that combines with others: `&`, `|` and `~`, also with functions of the parameters.

    >>> import numpy as np
    >>> params = {"body": {"kernel": np.ones((2, 2))}, "head": {"kernel": np.ones((2, 2))}}
    >>> mask = weights_only & ~select_paths("^head/")
    >>> isinstance(mask, LeafMask), mask(params)
    (True, {'body': {'kernel': True}, 'head': {'kernel': False}})
    """

    @abc.abstractmethod
    def __call__(self, params: types.Params) -> types.PyTree:
        """Return a bool per leaf."""

    @abc.abstractmethod
    def __invert__(self) -> LeafMask:
        """Return the mask of all other leaves."""

    @property
    def only_excludes(self) -> bool:
        """Whether the mask only names leaves to leave out, and so selects every other leaf."""
        return False

    def __and__(self, other: MaskFn) -> LeafMask:
        return _combined(all, self, other)

    def __rand__(self, other: MaskFn) -> LeafMask:
        return _combined(all, other, self)

    def __or__(self, other: MaskFn) -> LeafMask:
        return _combined(any, self, other)

    def __ror__(self, other: MaskFn) -> LeafMask:
        return _combined(any, other, self)


MaskFn = LeafMask | Callable[[types.Params], types.PyTree]
"""(params) -> a bool per leaf."""


def _combined(rule: Callable[[Iterable[bool]], bool], *masks: MaskFn) -> LeafMask:
    if not all(callable(mask) for mask in masks):
        return NotImplemented
    named = (mask if isinstance(mask, LeafMask) else FunctionMask(mask) for mask in masks)
    return CombinedMask(rule, tuple(named))


@dataclasses.dataclass(frozen=True, repr=False)
class CombinedMask(LeafMask):
    """The leaves that all of several masks select (`&`), or any of them (`|`).

    Attributes:
      rule: `all` or `any`.
      masks: Two masks, which may be combinations themselves.
    """

    rule: Callable[[Iterable[bool]], bool]
    masks: tuple[LeafMask, ...]

    def __call__(self, params: types.Params) -> types.PyTree:
        """Return a bool per leaf."""
        choices = (tree.spread(mask(params), params, "mask") for mask in self.masks)
        return jax.tree.map(lambda *chosen: self.rule(map(bool, chosen)), *choices)

    def __invert__(self) -> LeafMask:
        """Return the mask of all other leaves: ~(a & b) = ~a | ~b, ~(a | b) = ~a & ~b."""
        return CombinedMask(any if self.rule is all else all, tuple(~mask for mask in self.masks))

    @property
    def only_excludes(self) -> bool:
        """Whether the mask only names leaves to leave out."""
        return self.rule(mask.only_excludes for mask in self.masks)

    def __repr__(self) -> str:
        def shown(mask: LeafMask) -> str:
            is_other = isinstance(mask, CombinedMask) and mask.rule is not self.rule
            return f"({mask!r})" if is_other else repr(mask)

        sign = " & " if self.rule is all else " | "
        return sign.join(map(shown, self.masks))


@dataclasses.dataclass(frozen=True, repr=False)
class FunctionMask(LeafMask):
    """A function of the parameters in a combination of masks.

    Attributes:
      function: (params) -> a bool per leaf or per subtree.
      chosen: False for the leaves that the function does not select.
    """

    function: Callable[[types.Params], types.PyTree]
    chosen: bool = True

    def __call__(self, params: types.Params) -> types.PyTree:
        """Return a bool per leaf."""
        selected = self.function(params)
        tree.map_with_name(lambda name, hit: check_bool(name, hit, "mask"), selected)
        return jax.tree.map(lambda hit: bool(hit) == self.chosen, selected)

    def __invert__(self) -> LeafMask:
        """Return the mask of all other leaves."""
        return FunctionMask(self.function, not self.chosen)

    def __repr__(self) -> str:
        name = getattr(self.function, "__name__", repr(self.function))
        return name if self.chosen else f"~{name}"


@dataclasses.dataclass(frozen=True, repr=False)
class RoleMask(LeafMask):
    """A mask by role; see `select_roles`, `exclude_roles` and `weights_only`.

    Attributes:
      roles: The selected roles. An embedding is a kind of weight, and stands beside it here.
      known: Pairs (path, role) from `with_known_roles`; None for none.
    """

    roles: tuple[str, ...]
    known: tuple[tuple[str, Role], ...] | None = None

    def __call__(self, params: types.Params) -> types.PyTree:
        """Return a bool per leaf."""
        _require_names(self, params)
        known = None
        if self.known is not None:
            known = resolve_known_roles(dict(self.known), params)
            record_choice("known_roles", known)
        return jax.tree.map(lambda role: role in self.roles, tree_roles(params, known))

    def __invert__(self) -> RoleMask:
        """Return the mask of the other roles."""
        return RoleMask(_other_roles(self.roles), self.known)

    def __repr__(self) -> str:
        if self.known is not None:
            return f"with_known_roles({RoleMask(self.roles)!r}, <{len(self.known)} roles>)"
        if self.roles in (_WEIGHTS, ROLES):
            return "all_leaves" if self.roles == ROLES else "weights_only"
        if "weight" in self.roles and "embedding" not in self.roles:
            return f"exclude_roles({_quoted(_other_roles(self.roles))})"
        shown = [role for role in self.roles if role != "embedding" or "weight" not in self.roles]
        return f"select_roles({_quoted(shown)})"


_WEIGHTS = ("embedding", "weight")


def _other_roles(roles: Iterable[str]) -> tuple[str, ...]:
    return tuple(role for role in ROLES if role not in roles)


def _quoted(roles: Iterable[str]) -> str:
    return ", ".join(repr(role) for role in roles)


def with_known_roles(mask: types.Mask, known_roles: types.PyTree) -> types.Mask:
    """Return the mask with known roles instead of those that names tell.

    Masks by role inside a combination get them; the others have none, and stay as they are.

    Args:
      mask: The mask, or None, True or False, which are returned.
      known_roles: Roles: `lbopt.masks.module_roles(model)`, a dict from path to role, or a tree
        like the parameters, with a value per leaf or per module. Names decide where it has none.

    Raises:
      UserError: For a value that is no role, or a leaf whose role the mask knows differently. The
        mask itself raises it for a path that the parameters lack.

    >>> import numpy as np
    >>> params = {"mixer": np.zeros((2, 2)), "gate": {"weight": np.zeros((2, 2))}}
    >>> with_known_roles(weights_only, {"gate/weight": "norm"})(params)
    {'gate': {'weight': False}, 'mixer': True}
    """
    known = check_known_roles(known_roles)
    if isinstance(mask, CombinedMask):
        inside = (with_known_roles(one, known) for one in mask.masks)
        return CombinedMask(mask.rule, tuple(inside))  # type: ignore[arg-type]
    if not isinstance(mask, RoleMask):
        return mask

    before = dict(mask.known or ())
    for name in before.keys() & known.keys():
        fix = f"the mask knows it as {before[name]!r}; give one role"
        same = before[name] == known[name]
        require(same, f"known_roles/{name}", known[name], fix, code="conflict")
    return RoleMask(mask.roles, tuple(sorted((before | known).items())))


def _require_names(mask: LeafMask, params: types.Params) -> None:
    if tree.leaf_names(params) == [""]:
        fix = (
            "it needs a tree of named parameters; inside optax.inject_hyperparams, name the mask "
            "in static_args, or it is taken for a schedule"
        )
        raise UserError("mask", mask, fix, code="type")


def check_bool(name: str, chosen: Any, argument: str) -> None:
    """Raise `UserError` unless a mask's value for a leaf is a bool."""
    if not isinstance(chosen, (bool, np.bool_)):
        raise UserError(f"{argument}/{name}", chosen, "give True or False", code="type")


def select_roles(*roles: Role) -> RoleMask:
    """Return a mask that selects leaves by their role for an optimizer (see `leaf_role`).

    Args:
      *roles: One or more of "weight", "embedding", "bias", "norm" and "vector". Embeddings are
        weights, so "weight" selects them too; `exclude_roles("embedding")` takes them out.

    Raises:
      UserError: For an unknown role or none.

    >>> import numpy as np
    >>> params = {"kernel": np.zeros((2, 2)), "bias": np.zeros(2), "scale": np.zeros(2)}
    >>> select_roles("weight", "bias")(params)
    {'bias': True, 'kernel': True, 'scale': False}
    """
    if not roles or not all(isinstance(role, str) and role in ROLES for role in roles):
        fix = f"give one or more of {', '.join(ROLES)}"
        raise UserError("roles", roles, fix, code="choice")
    chosen = {*roles, *(_WEIGHTS if "weight" in roles else ())}
    return RoleMask(tuple(role for role in ROLES if role in chosen))


def exclude_roles(*roles: Role) -> RoleMask:
    """Return a mask that selects all leaves except those of these roles; see `select_roles`.

    Args:
      *roles: Roles that are left out, in the form of `select_roles`.

    >>> import numpy as np
    >>> table = {"embedding": np.zeros((5, 2))}
    >>> (weights_only & exclude_roles("embedding"))({"embed": table, "kernel": np.zeros((2, 2))})
    {'embed': {'embedding': False}, 'kernel': True}
    """
    others = ~select_roles(*roles)
    if not others.roles:
        raise UserError("roles", roles, "no leaf is left; exclude fewer roles", code="choice")
    return others


weights_only = RoleMask(_WEIGHTS)
"""The default mask of lbopt: True on weights, embeddings among them, and False on biases,
normalization leaves and vectors.

The LAMB and LARS codes that exclude by role (ALBERT, TensorFlow Addons, MLPerf) follow this rule:
a leaf that is not decayed is not adapted either.

>>> import numpy as np
>>> weights_only({"kernel": np.zeros((2, 2)), "bias": np.zeros(2)})
{'bias': False, 'kernel': True}
"""


all_leaves = RoleMask(ROLES)
"""Every leaf. `all_leaves & exclude_paths("embed")` says that biases and norms are meant too.

>>> import numpy as np
>>> table = {"kernel": np.zeros((2, 2))}
>>> all_leaves({"embed": table, "bias": np.zeros(2)})
{'bias': True, 'embed': {'kernel': True}}
"""


@dataclasses.dataclass(frozen=True, repr=False)
class PathMask(LeafMask):
    """A mask by regular expressions on paths; see `select_paths` and `exclude_paths`."""

    patterns: tuple[str, ...]
    chosen: bool

    def __call__(self, params: types.Params) -> types.PyTree:
        """Return a bool per leaf."""
        _require_names(self, params)
        names = tree.leaf_names(params)
        # A pattern without a match is a typo, or names a module that was renamed since.
        for pattern in self.patterns:
            if not any(re.search(pattern, name) for name in names):
                fix = (
                    f"{pattern!r} matches none of the {len(names)} parameters "
                    f"({tree.some(names)}); correct the pattern, or leave it out"
                )
                raise UserError("mask", self, fix)

        def selects(name: str, leaf: Any) -> bool:
            del leaf
            matches = any(re.search(pattern, name) for pattern in self.patterns)
            return matches == self.chosen

        selected = tree.map_with_name(selects, params)
        different = set(jax.tree.leaves(selected))
        if len(different) == 1:
            number = "every" if different == {True} else "no"
            fix = (
                f"it selects {number} parameter of {tree.some(names)}; if that is meant, pass None "
                "for every leaf, False for no leaf"
            )
            raise UserError("mask", self, fix)
        return selected

    def __invert__(self) -> PathMask:
        """Return the mask of all other leaves."""
        return PathMask(self.patterns, not self.chosen)

    @property
    def only_excludes(self) -> bool:
        """Whether the patterns name leaves to leave out."""
        return not self.chosen

    def __repr__(self) -> str:
        name = "select_paths" if self.chosen else "exclude_paths"
        return f"{name}({', '.join(repr(pattern) for pattern in self.patterns)})"


def select_paths(*patterns: str) -> PathMask:
    r"""Return a mask that selects the leaves whose path matches one of the regular expressions.

    Args:
      *patterns: Regular expressions, searched (`re.search`) in the full path of each leaf, for
        instance `encoder/layer_0/Dense_0/kernel`.

    Returns:
      A mask. Applied to parameters it raises `UserError` if a pattern matches nothing, or if all
      leaves or none are selected: a renamed module must not silently change what is decayed or
      adapted.

    Raises:
      UserError: If no pattern is given or one is not a regular expression.

    >>> import numpy as np
    >>> kernel = {"kernel": np.zeros((2, 2))}
    >>> select_paths(r"^head/")({"head": kernel, "body": kernel})
    {'body': {'kernel': False}, 'head': {'kernel': True}}
    """
    return PathMask(tree.check_patterns(patterns), True)


def exclude_paths(*patterns: str) -> PathMask:
    """Return `~select_paths(*patterns)`: the leaves whose path matches none of the expressions.

    Alone it selects biases and normalization leaves too. Where lbopt's default leaves those out,
    write `weights_only & exclude_paths(...)`, or `all_leaves & exclude_paths(...)` if they are
    meant; `weight_decay_mask` and `trust_ratio_mask` warn of an exclusion alone.

    Args:
      *patterns: Regular expressions, searched (`re.search`) in the full path of each leaf.

    >>> import numpy as np
    >>> kernel = np.zeros((2, 2))
    >>> params = {"embed": {"kernel": kernel}, "head": {"kernel": kernel, "bias": np.zeros(2)}}
    >>> (weights_only & exclude_paths("embed"))(params)
    {'embed': {'kernel': False}, 'head': {'bias': False, 'kernel': True}}
    """
    return PathMask(tree.check_patterns(patterns), False)


def without(*patterns: str, default: types.Mask = weights_only) -> types.Mask:
    """Return a default mask minus the leaves whose path matches a pattern, as a config lists them.

    Args:
      *patterns: Regular expressions, as in `select_paths`; none gives the default itself.
      default: `weights_only`, or the mask of a variant: a mask, a function, None or True (every
        leaf), False (no leaf).

    Raises:
      UserError: For a pattern that is no regular expression, or a default that is a tree.

    >>> without(), without("embed", "^head/")
    (weights_only, weights_only & exclude_paths('embed', '^head/'))
    >>> without("embed", default=None)
    all_leaves & exclude_paths('embed')
    """
    if not patterns or default is False:
        return default
    if default is None or default is True:
        default = all_leaves
    if not tree.is_function(default):
        fix = "give a function of the parameters, None, True or False"
        raise UserError("default", default, fix, code="type")
    return default & exclude_paths(*patterns)
