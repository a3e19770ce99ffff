"""Parameters in containers that record their sharding, as Linen, NNX and Haliax have them."""

import flax.linen
import jax
from flax import nnx
from jax.sharding import PartitionSpec


class Named:
    """An array with named axes, as in Haliax."""

    def __init__(self, array, names):
        self.array = array
        self.names = names

    def spec(self):
        return PartitionSpec(*self.names)


jax.tree_util.register_pytree_node(
    Named, lambda node: ((node.array,), node.names), lambda names, children: Named(*children, names)
)
AXES = ("a", "b", "c")
_BOXES = {
    "Partitioned": lambda leaf: flax.linen.Partitioned(leaf, AXES[: leaf.ndim]),
    "LogicallyPartitioned": lambda leaf: flax.linen.LogicallyPartitioned(leaf, AXES[: leaf.ndim]),
    "nnx.Param": lambda leaf: nnx.Param(leaf, out_sharding=AXES[: leaf.ndim]),
    "Named": lambda leaf: Named(leaf, AXES[: leaf.ndim]),
}
KINDS = tuple(_BOXES)


def _specs_of_named(shapes):
    is_named = lambda node: isinstance(node, Named)  # noqa: E731
    return jax.tree.map(
        lambda node: node.spec() if is_named(node) else PartitionSpec(), shapes, is_leaf=is_named
    )


def boxed(kind, params):
    with nnx.use_eager_sharding(False):
        return jax.tree.map(_BOXES[kind], params)


def check_ranks(kind, shapes):
    """Check that containers give no leaf of a state more axes than it has."""
    specs_of = {"nnx.Param": nnx.get_partition_spec, "Named": _specs_of_named}
    specs = specs_of.get(kind, flax.linen.get_partition_spec)(shapes)
    for spec, leaf in zip(jax.tree.leaves(specs), jax.tree.leaves(shapes), strict=True):
        assert len(spec) <= leaf.ndim
