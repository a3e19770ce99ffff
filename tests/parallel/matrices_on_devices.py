"""Matrix optimizers from one mesh to another, through a checkpoint; print the gaps if run."""

import functools
import json
import pathlib
import sys
import tempfile

import jax
import numpy as np
import optax
import orbax.checkpoint as ocp
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

import lbopt

SHAPES = {
    "layers": {"up": {"kernel": (3, 16, 32)}, "down": {"kernel": (3, 32, 16)}},
    "query": {"kernel": (16, 4, 4)},
    "mixer": {"kernel": (16, 16), "bias": (16,)},
    "embed": {"embedding": (8, 16)},
}
STACKED = lbopt.stacked_paths("^layers/")
AXES = optax.contrib.MuonDimensionNumbers
SQUARES = {
    "layers": {"up": {"kernel": None}, "down": {"kernel": None}},
    "query": {"kernel": AXES((0,), (1, 2))},
    "mixer": {"kernel": AXES((0,), (1,)), "bias": None},
    "embed": {"embedding": None},
}
"""The eigenvectors of a longer side are not determined in the first updates."""
FP32 = {"products_dtype": None, "stacked": STACKED}
MAKE = {
    "muon": lambda: lbopt.muon(0.02, weight_decay=0.1, **FP32),
    "normuon": lambda: lbopt.normuon(0.02, **FP32),
    "muonh": lambda: lbopt.muonh(0.02, stacked=STACKED),
    "muown": lambda: lbopt.muown(0.02, **FP32),
    "scion": lambda: lbopt.scion(0.02, **FP32),
    "dion": lambda: lbopt.dion(0.02, rank=4, stacked=STACKED),
    "muloco": lambda: lbopt.muloco(0.02, sync_steps=2, **FP32),
    "soap": lambda: lbopt.soap(0.02, every_steps=1, dimension_numbers=SQUARES),
    "soaph": lambda: lbopt.soaph(0.02, every_steps=1, dimension_numbers=SQUARES),
    "shampoo": lambda: lbopt.shampoo(0.02, every_steps=1, dimension_numbers=SQUARES),
    "kron": lambda: lbopt.kron(0.02, dimension_numbers=SQUARES),
}


def tree_of(seed):
    rng = np.random.default_rng(seed)
    return jax.tree.map(
        lambda shape: np.float32(rng.normal(size=shape)),
        SHAPES,
        is_leaf=lambda node: isinstance(node, tuple),
    )


PARAMS = tree_of(0)
GRADS = [tree_of(seed) for seed in (1, 2, 3)]


def walk(tx, params, state, grads):
    """Return the parameters and the state after updates."""
    for gradient in grads:
        updates, state = tx.update(gradient, state, params)
        params = optax.apply_updates(params, updates)
    return params, state


def mesh_of(count, kind=AxisType.Auto):
    return jax.make_mesh((count,), ("x",), (kind,), devices=jax.devices()[:count])


def placed(mesh, tree):
    """Return shapes and shardings: matrices split by rows, if those divide."""

    def place(shape):
        splits = len(shape) > 1 and shape[-2] % mesh.size == 0
        return NamedSharding(mesh, P(*[None] * (len(shape) - 2), "x") if splits else P())

    shapes = jax.eval_shape(lambda: tree)
    return place, jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place(x.shape)), shapes
    )


@functools.cache
def alone(name):
    """Return the parameters and the state after all updates on one device."""
    tx = MAKE[name]()
    return jax.device_get(jax.jit(functools.partial(walk, tx))(PARAMS, tx.init(PARAMS), GRADS))


def gaps(name, counts):
    """Return the relative gap of each array to `alone`, by path.

    Each update is on another number of devices, and reads a checkpoint from the one before.
    """
    reached = (PARAMS, MAKE[name]().init(PARAMS))
    with tempfile.TemporaryDirectory() as folder, ocp.StandardCheckpointer() as checkpointer:
        for index, count in enumerate(counts):
            mesh = mesh_of(count)
            place, wanted = placed(mesh, reached)
            if index:
                reached = checkpointer.restore(pathlib.Path(folder) / str(index), wanted)
            where = jax.tree.map(lambda x: x.sharding, wanted)
            tx = lbopt.shard_matrices(MAKE[name](), mesh, param_shardings=place)
            one = jax.jit(functools.partial(walk, tx), out_shardings=where)
            gradient = jax.device_put(GRADS[index], where[0])
            reached = one(*jax.device_put(reached, where), [gradient])
            checkpointer.save(pathlib.Path(folder) / str(index + 1), reached)
            checkpointer.wait_until_finished()

    def gap(mine, theirs):
        return float(np.linalg.norm(mine - theirs) / max(np.linalg.norm(theirs), 1e-30))

    found = jax.tree.map(gap, jax.device_get(reached), alone(name))
    return {
        jax.tree_util.keystr(path): number
        for path, number in jax.tree_util.tree_leaves_with_path(found)
    }


if __name__ == "__main__":
    counts = [int(count) for count in sys.argv[1:]]
    print(json.dumps({name: gaps(name, counts) for name in MAKE}))
