"""Aggregators on one and on eight devices: the largest parameter gap relative to the movement."""

import json
import pathlib
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax

import lbopt
from lbopt.aggregators import randk, sign, topk

LABELS = {"out": "^out", "hidden": ""}
AGGREGATORS = {
    "ef": lbopt.ef(topk(0.1)),
    "ef21": lbopt.ef21(randk(0.2), 0.5),
    "econtrol": lbopt.econtrol(sign(), 0.3),
    "aps": lbopt.aps(4, 3),
    "aps stochastic": lbopt.aps(5, 2, rounding="stochastic"),
    "powersgd": lbopt.powersgd(1, start=1, min_rate=1.0),
    "agvm": lbopt.agvm(LABELS, "hidden", 1, 0, alpha=0.5),
}


def loss_fn(params, model_state, batch, rng):
    del rng
    hidden = jax.nn.relu(batch["x"] @ params["hidden"]["kernel"] + params["hidden"]["bias"])
    each = jnp.square(hidden @ params["out"]["kernel"] - batch["y"]).sum(-1)
    return each.mean(), (model_state, {"loss": (each.sum(), jnp.float32(len(each)))})


def params():
    rng = np.random.default_rng(0)
    draw = lambda *shape: jnp.asarray(rng.normal(size=shape) / 4, jnp.float32)  # noqa: E731
    return {"hidden": {"kernel": draw(12, 16), "bias": draw(16)}, "out": {"kernel": draw(16, 6)}}


def trained(aggregator, devices):
    tx = (
        optax.chain(lbopt.lamb(0.02), lbopt.scale_by_agvm(LABELS))
        if aggregator.name.startswith("agvm")
        else lbopt.lamb(0.02)
    )
    mesh = lbopt.make_mesh(devices)
    rows = 8 // devices
    step = lbopt.make_train_step(loss_fn, tx, mesh, reduction=lbopt.Aggregate(aggregator, rows))
    state = step.place(lbopt.TrainState.create(params(), {}, tx))
    rng = np.random.default_rng(1)
    for _ in range(3):
        batch = {
            "x": rng.normal(size=(16, 12)).astype(np.float32),
            "y": rng.normal(size=(16, 6)).astype(np.float32),
        }
        state, _ = jax.block_until_ready(step(state, batch))
    return np.concatenate([np.ravel(x) for x in jax.tree.leaves(state.params)])


if __name__ == "__main__":
    start = np.concatenate([np.ravel(x) for x in jax.tree.leaves(params())])
    gaps = {}
    for name, aggregator in AGGREGATORS.items():
        one = trained(aggregator, 1)
        eight = trained(aggregator, 8)
        gaps[name] = float(np.abs(one - eight).max() / np.linalg.norm(one - start))
    pathlib.Path(sys.argv[1]).write_text(json.dumps(gaps))
