"""What the scripts that run other people's programs share: stand-ins for packages, and a record of what the program said."""

import contextlib
import sys
import types
from unittest import mock

import flax.training.checkpoints  # noqa: F401  (it looks whether TensorFlow is there, before anything stands in its place)
import jax
import numpy as np
import optax


@contextlib.contextmanager
def stand_in(*names):
    """Let packages that read data or write metrics be imported here, whether they are installed or not; they do nothing."""
    for name in names:
        parent, _, last = name.rpartition(".")
        sys.modules[name] = (
            getattr(sys.modules[parent], last) if parent else mock.MagicMock(name=name)
        )
    yield
    for name in names:
        del sys.modules[name]  # Flax and Orbax ask whether TensorFlow is installed


def module(name, **members):
    """Put a module of ours in the place of the program's own of that name."""
    made = sys.modules[name] = types.ModuleType(name)
    vars(made).update(members)


class Tensor(np.ndarray):
    """An array with the method by which programs take one out of TensorFlow."""

    def _numpy(self):
        return np.asarray(self)


def tensors(tree):
    """Return a batch as TensorFlow's data sets would give it."""
    return jax.tree.map(lambda x: np.asarray(x).view(Tensor), tree)


class Scalars:
    """A writer of metrics that keeps them: step -> name -> number."""

    def __init__(self):
        self.kept = {}

    def write_scalars(self, step, scalars):
        """Keep them, which waits for the step: a queue of steps on fake devices can deadlock."""
        self.kept.setdefault(int(step), {}).update(
            {name: float(value) for name, value in scalars.items()}
        )

    def of(self, name):
        """Return the values of one name, by step."""
        return [scalars[name] for _, scalars in sorted(self.kept.items()) if name in scalars]

    def __getattr__(self, name):
        return lambda *arguments, **named: None


def check_inherited(ours, theirs):
    """Check that moments lie over the devices as those of the program's own Adam, and that nothing else is split."""
    moments = []
    for name in ("mu", "nu"):
        mine, its = (optax.tree_utils.tree_get(state, name) for state in (ours, theirs))
        assert places(mine) == places(its), name
        moments += [id(leaf) for leaf in jax.tree.leaves(mine)]
    assert all(
        x.sharding.is_fully_replicated for x in jax.tree.leaves(ours) if id(x) not in moments
    )


def places(tree):
    """Return where each leaf lies, by its path: each device's part."""

    def parts(x):
        return sorted((d.id, str(i)) for d, i in x.sharding.devices_indices_map(x.shape).items())

    return {
        jax.tree_util.keystr(path): parts(leaf)
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    }


def keep(file, losses, **trees):
    """Leave what a test compares in an `.npz`: the losses by step, and every number of some trees by its path."""
    leaves = jax.tree_util.tree_leaves_with_path(trees)
    np.savez(
        file,
        losses=losses,
        **{jax.tree_util.keystr(path): np.asarray(leaf) for path, leaf in leaves},
    )
