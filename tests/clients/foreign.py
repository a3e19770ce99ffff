"""Shared code of scripts that run other projects' programs: package stand-ins and a recorder."""

import contextlib
import sys
import types
from unittest import mock

# flax looks for TensorFlow when it is imported, which must be before a stand-in takes its place.
import flax.training.checkpoints  # noqa: F401
import jax
import numpy as np
import optax


@contextlib.contextmanager
def stand_in(*names):
    """Make packages that read data or write metrics importable; the stand-ins do nothing."""
    for name in names:
        parent, _, last = name.rpartition(".")
        sys.modules[name] = (
            getattr(sys.modules[parent], last) if parent else mock.MagicMock(name=name)
        )
    yield
    for name in names:
        del sys.modules[name]  # Flax and Orbax ask whether TensorFlow is installed


def module(name, **members):
    """Replace the program's module of that name with ours."""
    made = sys.modules[name] = types.ModuleType(name)
    vars(made).update(members)


class Tensor(np.ndarray):
    """An array with the method that converts a TensorFlow tensor to NumPy."""

    def _numpy(self):
        return np.asarray(self)


def tensors(tree):
    """Return a batch in the form that TensorFlow's data sets yield."""
    return jax.tree.map(lambda x: np.asarray(x).view(Tensor), tree)


class Scalars:
    """A metrics writer that keeps step -> name -> number in memory."""

    def __init__(self):
        self.kept = {}

    def write_scalars(self, step, scalars):
        """Keep the metrics. This waits for the step; queued steps on fake devices can deadlock."""
        self.kept.setdefault(int(step), {}).update(
            {name: float(value) for name, value in scalars.items()}
        )

    def of(self, name):
        """Return the values of one name, in the order of steps."""
        return [scalars[name] for _, scalars in sorted(self.kept.items()) if name in scalars]

    def __getattr__(self, name):
        return lambda *arguments, **named: None


def check_inherited(ours, theirs):
    """Check that moments are sharded as the program's own Adam's and all else is replicated."""
    moments = []
    for name in ("mu", "nu"):
        mine, its = (optax.tree_utils.tree_get(state, name) for state in (ours, theirs))
        assert places(mine) == places(its), name
        moments += [id(leaf) for leaf in jax.tree.leaves(mine)]
    assert all(
        x.sharding.is_fully_replicated for x in jax.tree.leaves(ours) if id(x) not in moments
    )


def places(tree):
    """Return each device's shard of each leaf, by the leaf's path."""

    def parts(x):
        return sorted((d.id, str(i)) for d, i in x.sharding.devices_indices_map(x.shape).items())

    return {
        jax.tree_util.keystr(path): parts(leaf)
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    }


def keep(file, losses, **trees):
    """Write the losses by step, and all leaves of some trees by path, to an `.npz` for the test."""
    leaves = jax.tree_util.tree_leaves_with_path(trees)
    np.savez(
        file,
        losses=losses,
        **{jax.tree_util.keystr(path): np.asarray(leaf) for path, leaf in leaves},
    )
