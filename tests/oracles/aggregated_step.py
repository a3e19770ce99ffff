"""A small step with an aggregator: weights 64 x 256 and 256 x 16, 256 biases, any devices."""

import jax
import jax.numpy as jnp
import optax

import lbopt
from lbopt.aggregators import cast, plain_mean, randk, sign, topk
from lbopt.parallel import with_shardings

LABELS = {"out": "^out", "hidden": ""}
AGGREGATORS = {
    "mean": plain_mean(),
    "agvm": lbopt.agvm(LABELS, "hidden", 5, 500),
    "aps e5m2": lbopt.aps(5, 2),
    "aps e4m3 kahan": lbopt.aps(4, 3, "kahan"),
    "aps bf16": lbopt.aps(8, 7, "same", shift=False),
    "ef topk": lbopt.ef(topk(0.01)),
    "ef21 randk": lbopt.ef21(randk(0.01)),
    "econtrol sign": lbopt.econtrol(sign()),
    "ef cast": lbopt.ef(cast(5, 2)),
    "powersgd": lbopt.powersgd(2, start=0),
    "powersgd later": lbopt.powersgd(2),
}


def params(width=256):
    return {
        "hidden": {"kernel": jnp.zeros((64, width)), "bias": jnp.zeros(width)},
        "out": {"kernel": jnp.zeros((width, 16))},
    }


def loss_fn(params, model_state, batch, rng):
    del rng
    hidden = jax.nn.relu(batch["x"] @ params["hidden"]["kernel"] + params["hidden"]["bias"])
    each = jnp.square(hidden @ params["out"]["kernel"] - batch["y"]).sum(-1)
    return each.mean(), (model_state, {"loss": (each.sum(), jnp.float32(len(each)))})


def compiled(name, mesh, width=256, over="replicas", **options):
    """Return (step, text of the compiled program)."""
    tx = (
        optax.chain(optax.sgd(0.1), lbopt.scale_by_agvm(LABELS))
        if name == "agvm"
        else optax.sgd(0.1)
    )
    reduction = lbopt.Aggregate(AGGREGATORS[name], over=over)
    step = lbopt.make_train_step(loss_fn, tx, mesh, reduction=reduction, **options)
    state = jax.eval_shape(
        lambda: step.with_aggregator_state(lbopt.TrainState.create(params(width), {}, tx))
    )
    if options.get("backend") != "pmap":
        state = with_shardings(state, step.state_sharding(state))
    shape = lambda size: jax.ShapeDtypeStruct((4 * mesh.size, size), jnp.float32)  # noqa: E731
    return step, step.lower(state, {"x": shape(64), "y": shape(16)}).compile().as_text()
