"""Three steps of every kind end in the committed parameters of an earlier implementation.

`earlier_parameters.npz` holds a sample of each case's final parameters, computed on an x86-64 CPU
by the step before its rewrite. `python tests/parallel/test_same_numbers.py FILE` writes such a
file; two files from one machine must be equal bit for bit.
"""

import pathlib
import re
import sys

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import lbopt
from lbopt.aggregators import randk, sign, topk
from lbopt.cli import load_config
from lbopt.config import TrainConfig
from lbopt.data import example_indices, load_digits
from lbopt.models import from_linen
from lbopt.recipes import build_run

pytestmark = pytest.mark.usefixtures(
    "fusion_emitters"
)  # the committed numbers were computed with them
EARLIER = pathlib.Path(__file__).with_name("earlier_parameters.npz")
CONFIGS = pathlib.Path(__file__).parents[2] / "configs"
LABELS = {"head": "^Dense_1/", "body": ""}
PMAP = {"backend": "pmap"}
MICRO = {"num_microsteps": 2}
SHARDED = {"shard_update": True}


def clip(stage):
    return {"clip": lbopt.GradientClip(0.5, stage)}


def aggregate(*given, **options):
    return {"reduction": lbopt.Aggregate(*given, **options)}


BF16 = jnp.bfloat16
OPTIONS = {
    "plain": {},
    "pmap": PMAP,
    "micro": MICRO,
    "pmap_micro": PMAP | MICRO,
    "one_key": PMAP | {"key_per_replica": False},
    "bf16": {"compute_dtype": BF16},
    "clip_replica": clip("replica"),
    "clip_replica_micro": clip("replica") | MICRO,
    "clip_mean": clip("mean") | MICRO,
    "clip_mean_pmap": clip("mean") | PMAP | MICRO,
    "clip_accumulated": clip("accumulated") | MICRO,
    "noise": {"measure_noise": True},
    "noise_micro": {"measure_noise": True} | MICRO | clip("mean"),
    "noise_pmap": {"measure_noise": True} | PMAP | MICRO,
    "fp32_sum": {"reduction": lbopt.AllReduce(jnp.float32)},
    "bf16_sum_pmap": {"reduction": lbopt.AllReduce(BF16)} | PMAP,
    "bf16_sum_clip_mean": {"reduction": lbopt.AllReduce(BF16)} | clip("mean") | MICRO,
    "sharded": SHARDED,
    "sharded_micro_clip": SHARDED | MICRO | clip("accumulated"),
    "scattered": {"reduction": lbopt.ReduceScatter()},
    "scattered_bf16_clip": {"reduction": lbopt.ReduceScatter(BF16)} | clip("replica"),
    "aps": aggregate(lbopt.aps(4, 3)),
    "aps_pmap": {"reduction": lbopt.aps(4, 3)} | PMAP,
    "ef_rows_micro": aggregate(lbopt.ef(sign()), replicas_per_device=2) | MICRO,
    "ef21_over": aggregate(lbopt.ef21(topk(0.1)), over=2),
    "econtrol_clip": aggregate(lbopt.econtrol(randk(0.2))) | clip("replica"),
    "powersgd_sharded": aggregate(lbopt.powersgd(2, start=2)) | SHARDED,
    "agvm": aggregate(lbopt.agvm(LABELS, "body", 2, 0, alpha=0.5)),
    "agvm_pmap": aggregate(lbopt.agvm(LABELS, "body", 2, 0, alpha=0.5)) | PMAP,
}
"""Case -> arguments of `make_train_step`; four devices."""

SHORT = ["--config.global_batch_size=16", "--config.num_steps=4"]
SHORT += ["--config.schedule.warmup_steps=1.0"]
FAMILIES = {
    "digits_cnn": [*SHORT, "--config.model.widths=(4,)", "--config.model.hidden=8"],
    "digits_lstm": [*SHORT, "--config.model.hidden=8"],
    "digits_resnet": [
        *SHORT,
        "--config.model.width_coefficient=0.125",
        "--config.optimizer.name=lars",
        "--config.schedule.base_learning_rate=20.0",
    ],
    "digits_efficientnet": [*SHORT, "--config.model.depth_coefficient=0.1"],
    "pydoc_bert": SHORT,
    "pydoc_lstm": [
        *SHORT,
        "--config.model.width_coefficient=0.1",
        "--config.data.sequence_length=16",
    ],
}
"""Config file -> flags for its smoke recipe.

The ResNet has gradients so small that LAMB's first step is the sign of their rounding errors.
"""


class Net(nn.Module):
    """A network with statistics and random draws, large enough for a sharded update."""

    stats_scope: str = "global"

    @nn.compact
    def __call__(self, x, train=False):
        x = nn.Dense(256)(x.reshape(len(x), -1))
        x = jnp.tanh(
            lbopt.BatchNorm(stats_scope=self.stats_scope)(x, use_running_average=not train)
        )
        x = nn.Dropout(0.1, deterministic=not train)(x)
        return nn.Dense(10)(x)


def loss_of(model):
    def loss_fn(params, model_state, batch, rng):
        logits, model_state = model.apply(params, model_state, batch["image"], train=True, rng=rng)
        each = lbopt.losses.softmax_cross_entropy(logits.astype(jnp.float32), batch["label"])
        metrics = lbopt.metrics.classification(logits, batch["label"], each)
        return jnp.mean(each), (model_state, metrics)

    return loss_fn


# Batch norm subtracts what the bias before it adds. That bias has no gradient but what rounding
# leaves, which LAMB scales to a whole step, and the running mean follows the bias.
NOISE = r"\['Dense_0'\]\['bias'\]|\['batch_stats'\].*\['mean'\]"


def sample(params, noise=r"$^"):
    """Return at most 100 numbers, evenly spaced over all parameters; NaN in leaves of noise."""
    flat = []
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        is_noise = re.search(noise, jax.tree_util.keystr(path))
        flat.append(np.full(leaf.size, np.nan) if is_noise else np.ravel(leaf))
    numbers = np.concatenate(flat)
    return numbers[:: -(-len(numbers) // 100)]


def of_options(name):
    options = OPTIONS[name]
    train = load_digits().train
    # Two examples that are normalized together are always as far apart: their gradient is noise.
    size = 128 if "rows" in name else 32
    batches = [train.take(example_indices(len(train), 3, size * step, size)) for step in range(3)]
    model = from_linen(Net("local" if "rows" in name else "global"))
    params, model_state = jax.jit(model.init)(jax.random.key(0), jnp.zeros((2, 8, 8)))
    tx = lbopt.lamb(0.02, weight_decay=0.01)
    if name.startswith("agvm"):
        tx = optax.chain(tx, lbopt.scale_by_agvm(LABELS))
    step = lbopt.make_train_step(loss_of(model), tx, lbopt.make_mesh(4), **options)
    state = step.place(lbopt.TrainState.create(params, model_state, tx, seed=7))
    for batch in batches:
        state, _ = jax.block_until_ready(step(state, batch))
    return sample((state.params, state.model_state), NOISE)


def of_family(name):
    config = load_config(f"{CONFIGS / name}.py:smoke", FAMILIES[name], TrainConfig)
    run = build_run(config)
    state = run.init()
    for number in range(3):
        state, _ = jax.block_until_ready(run.train_step(state, run.batches[number]))
    return sample(state.params)


CASES = dict.fromkeys(OPTIONS, of_options) | dict.fromkeys(FAMILIES, of_family)


@pytest.mark.everyday("noise_pmap", "scattered_bf16_clip", "ef_rows_micro", "agvm", "digits_cnn")
@pytest.mark.parametrize("name", CASES)
def test_it_ends_in_the_earlier_parameters(name):
    with np.load(EARLIER) as earlier:
        found = CASES[name](name)
        compared = ~np.isnan(found)
        np.testing.assert_allclose(found[compared], earlier[name][compared], rtol=1e-5, atol=1e-6)


if __name__ == "__main__":
    np.savez_compressed(sys.argv[1], **{name: find(name) for name, find in CASES.items()})
