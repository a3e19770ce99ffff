"""Models of lbopt train under JAX's strict settings, which a caller's program may have set."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import lbopt
from lbopt import losses, metrics
from lbopt.cli import load_config
from lbopt.config import TrainConfig
from lbopt.models import CNN, from_linen
from lbopt.recipes import build_run


def test_a_step_and_an_evaluation_promote_no_rank_and_no_dtype_implicitly():
    model = from_linen(CNN(widths=(4,), hidden=8))
    mesh = lbopt.make_mesh(4)
    rng = np.random.default_rng(0)
    batch = {"image": rng.normal(size=(16, 4, 4)).astype(np.float32), "label": np.arange(16) % 10}

    def loss_fn(params, model_state, batch, rng):
        logits, model_state = model.apply(params, model_state, batch["image"], train=True, rng=rng)
        each = losses.softmax_cross_entropy(logits, batch["label"])
        return jnp.mean(each), (model_state, metrics.classification(logits, batch["label"], each))

    def metric_fn(params, model_state, batch):
        logits, _ = model.apply(params, model_state, batch["image"], train=False)
        each = losses.softmax_cross_entropy(logits, batch["label"])
        return metrics.classification(logits, batch["label"], each)

    def run(rank, dtype):
        tx = optax.sgd(0.1)
        with jax.numpy_rank_promotion(rank), jax.numpy_dtype_promotion(dtype):
            state = lbopt.TrainState.create(*model.init(jax.random.key(0), batch["image"]), tx)
            state, _ = lbopt.make_train_step(loss_fn, tx, mesh, donate=False)(state, batch)
            found = lbopt.make_eval_step(metric_fn, mesh)(state.params, state.model_state, batch)
        return jax.device_get(jax.block_until_ready(found))

    jax.tree.map(np.testing.assert_array_equal, run("raise", "strict"), run("allow", "standard"))


NETWORKS = {
    "decoder_lm": ["dtype=bfloat16", "qk_norm=True", "init_std=0.1", "dropout_rate=0.1"],
    "digits_lstm": ["hidden=8"],
    "digits_resnet": ["width_coefficient=0.125", "batch_norm_scope=examples:16"],
    "digits_efficientnet": ["depth_coefficient=0.1"],
    "pydoc_bert": ["dtype=bfloat16"],
    "pydoc_lstm": ["width_coefficient=0.1"],
}


@pytest.mark.everyday("digits_lstm", "decoder_lm")
@pytest.mark.parametrize("name", NETWORKS)
def test_every_network_is_trained_and_evaluated_without_implicit_promotion_of_ranks(name):
    """It is looked at where a step is traced; nothing is compiled."""
    options = [f"--config.model.{option}" for option in NETWORKS[name]]
    config = load_config(
        f"configs/{name}.py:smoke", ["--config.parallel.num_devices=1", *options], TrainConfig
    )
    with jax.numpy_rank_promotion("raise"):
        run = build_run(config)
        run.lower()
        run.lower_evaluation()
