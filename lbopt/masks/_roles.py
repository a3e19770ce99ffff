"""The roles of the leaves of a tree: known, told from classes, names and neighbours, or shapes."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from lbopt import tree, types
from lbopt.errors import UserError, require_choice
from lbopt.masks._names import ROLES, LeafRole, Role, named_parts, role_by_name
from lbopt.masks._types import module_class, role_by_type


def leaf_role(name: str, leaf: Any) -> Role:
    """Return the role of a leaf: `bias`, `embedding`, `norm`, `vector` or `weight`.

    Only its name and shape are used. In this order:

    - A matrix called `kernel` is a weight wherever it is, one called `embedding` or `embeddings` an
      embedding.
    - A last part `scale` or `gamma`, or a direct parent that is a normalization module
      (`BatchNorm_0`, `layernorm_before`, `bn_init`, ...), makes a leaf a norm. Not so a matrix of a
      layer beside a norm (`norm_proj`) or of an adaptive norm.
    - A last part `bias`, `b`, `beta` or `offset`, or one with the word bias in it
      (`gate_up_proj_bias`, `bias_ih`), makes it a bias.
    - A `weight` of one dimension is a norm, other leaves of one dimension are vectors: in practice
      a shift or a gain under another name.
    - A table such as `embed_tokens/weight` or `pos_embed` is an embedding, another leaf with two
      dimensions or more a weight.

    An embedding is a kind of weight: masks of weights select it.

    `tree_roles` sees the whole tree and knows more: the classes of modules (Equinox, NNX), that
    `b1` is the bias of `w1`, and that a gain and a shift of one shape belong to a norm, as in a
    list of layers.

    Args:
      name: Path of the leaf, with slashes.
      leaf: The leaf, or its shape as a `jax.ShapeDtypeStruct`.

    >>> import numpy as np
    >>> leaf_role("Dense_0/kernel", np.zeros((3, 3))), leaf_role("Dense_0/bias", np.zeros(3))
    ('weight', 'bias')
    >>> leaf_role("BatchNorm_0/scale", np.zeros(3)), leaf_role("prelu/slope", np.zeros(3))
    ('norm', 'vector')
    """
    return role_by_name(named_parts(name), jnp.shape(leaf), {}).role


def tree_roles(params: types.Params, known_roles: types.PyTree = None) -> types.PyTree:
    """Return the role of every leaf, from names, shapes, neighbours and classes of modules.

    Args:
      params: The parameters.
      known_roles: Roles that are known, as in `with_known_roles`; None for none.

    >>> import numpy as np
    >>> tree_roles({"dense": {"kernel": np.ones((2, 3)), "bias": np.ones(3)}})
    {'dense': {'bias': 'bias', 'kernel': 'weight'}}
    """
    structure: Any = jax.tree.structure(params)
    return structure.unflatten(found.role for found in explain_roles(params, known_roles).values())


def explain_roles(params: types.Params, known_roles: types.PyTree = None) -> dict[str, LeafRole]:
    """Return {path: (role, rule)} of all leaves, in leaf order.

    The rule is "by type" (classes of modules and known roles), "by name" or "by shape".

    Args:
      params: The parameters.
      known_roles: Roles that are known, as in `with_known_roles`; None for none.

    >>> import numpy as np
    >>> tuple(explain_roles({"mixer": np.zeros((3, 3))})["mixer"])
    ('weight', 'by shape')
    """
    leaves = jax.tree_util.tree_leaves_with_path(params)
    names = [tree.path_name(path) for path, _ in leaves]
    parts = [named_parts(name) for name in names]
    known = {} if known_roles is None else resolve_known_roles(known_roles, params)

    siblings: dict[tuple[str, ...], dict[str, tuple[int, ...]]] = {}
    for (*parents, last), (_, leaf) in zip(parts, leaves, strict=True):
        siblings.setdefault(tuple(parents), {})[last] = jnp.shape(leaf)

    found = {}
    for name, part, (path, leaf) in zip(names, parts, leaves, strict=True):
        shape = jnp.shape(leaf)
        told = known.get(name) or role_by_type(module_class(params, path), part[-1], shape)
        by_name = role_by_name(part, shape, siblings[tuple(part[:-1])])
        found[name] = by_name if told is None else LeafRole(told, "by type")
    return found


def check_known_roles(known_roles: types.PyTree) -> dict[str, Role]:
    """Return {path: role} of known roles in any form.

    Raises:
      UserError: For a value that is no role.
    """
    known = tree.by_name(known_roles)
    for name, role in known.items():
        require_choice(f"known_roles/{name}", role, ROLES)
    return known


def resolve_known_roles(known_roles: types.PyTree, params: types.Params) -> dict[str, Role]:
    """Return {path: role} of the leaves whose role is known, by their own path or their module's.

    Raises:
      UserError: For a path that is neither a leaf nor the path of a module.
    """
    given = check_known_roles(known_roles)
    names = tree.leaf_names(params)
    found = {}
    used = set()
    for name in names:
        parts = name.split("/")
        # A value for a module stands for all its leaves, as in a mask.
        places = ("/".join(parts[:n]) for n in range(len(parts), -1, -1))
        place = next((place for place in places if place in given), None)
        if place is not None:
            found[name] = given[place]
            used.add(place)

    for place in tree.outside(given.keys() - used, params):
        fix = (
            f"none of the {len(names)} parameters ({tree.some(names)}) is there; correct the path, "
            "or leave it out"
        )
        raise UserError(f"known_roles/{place}", given[place], fix, code="mismatch")
    return found
