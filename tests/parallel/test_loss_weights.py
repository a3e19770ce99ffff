"""A loss of the form (sum, weight) has the whole batch's gradient under any split.

Expected values come from NumPy in float64.
"""

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import lbopt
from lbopt.aggregators import identity, plain_mean

rng = np.random.default_rng(0)
X = rng.normal(size=(16, 4)).astype(np.float32)
TOKENS = np.array([9, 1, 9, 1, 9, 1, 9, 1, 0, 0, 0, 0, 5, 2, 0, 7], np.int32)
"""Tokens of each example; the third of four replicas has none."""
BATCH = {"x": X, "tokens": TOKENS}
GRADIENT = (X.astype(np.float64) * TOKENS[:, None]).sum(0) / TOKENS.sum()
LABELS = {"all": ""}
EXACT = {
    "mean": plain_mean(),
    "agvm": lbopt.agvm(LABELS, "all", 100, 100),
    "aps": lbopt.aps(8, 23, shift=False),
    "ef": lbopt.ef(identity()),
    "ef21": lbopt.ef21(identity()),
    "econtrol": lbopt.econtrol(identity()),
    "powersgd": lbopt.powersgd(2, start=5),
}
"""Each aggregator with options under which its first update is the mean."""


def loss_fn(params, model_state, batch, rng):
    """Return a loss whose gradient is the mean of x over tokens."""
    each = (batch["x"] @ params["w"]["kernel"])[:, 0]
    total = (each * batch["tokens"]).sum()
    weight = batch["tokens"].sum()
    return (total, weight), (model_state, {"loss": (total, weight)})


def one_step(devices, backend="jit", tx=None, loss_fn=loss_fn, batch=BATCH, **options):
    """Return the negated update of SGD with rate 1, the metrics, and the state."""
    tx = tx or optax.sgd(1.0)
    step = lbopt.make_train_step(loss_fn, tx, lbopt.make_mesh(devices), backend, **options)
    state = lbopt.TrainState.create({"w": {"kernel": jnp.zeros((4, 1))}}, {}, tx)
    state, metrics = step(step.place(state), batch)
    return -np.asarray(state.params["w"]["kernel"])[:, 0], metrics, state


def close(found, expected):
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("num_microsteps", [1, 2, 4])
@pytest.mark.parametrize(("devices", "backend"), [(1, "jit"), (4, "jit"), (4, "pmap")])
def test_microsteps_and_devices(devices, backend, num_microsteps):
    found, metrics, _ = one_step(devices, backend, num_microsteps=num_microsteps)
    close(found, GRADIENT)
    assert float(metrics["loss"][1]) == TOKENS.sum()


@pytest.mark.parametrize(
    "options",
    [
        {"reduction": lbopt.AllReduce(jnp.float32)},
        {"reduction": lbopt.ReduceScatter(), "num_microsteps": 2},
        {"clip": lbopt.GradientClip(1e6, "replica"), "num_microsteps": 2},
        {"clip": lbopt.GradientClip(1e6, "mean"), "reduction": lbopt.AllReduce()},
        {"shard_update": True, "clip": lbopt.GradientClip(1e6), "num_microsteps": 4},
    ],
)
def test_reductions(options):
    close(one_step(4, **options)[0], GRADIENT)


@pytest.mark.everyday("*-4-jit-how1", "*-4-pmap-how3")
@pytest.mark.parametrize(
    ("devices", "backend", "how"),
    [
        (1, "jit", {"replicas_per_device": 4}),
        (4, "jit", {}),
        (4, "jit", {"over": 2}),
        (4, "pmap", {}),
    ],
)
@pytest.mark.filterwarnings("ignore:.*on the wire")
@pytest.mark.parametrize("name", EXACT)
def test_aggregators(name, devices, backend, how):
    pair = optax.chain(optax.sgd(1.0), lbopt.scale_by_agvm(LABELS)) if name == "agvm" else None
    reduction = lbopt.Aggregate(EXACT[name], **how)
    found, _, _ = one_step(devices, backend, pair, reduction=reduction, num_microsteps=2)
    close(found, GRADIENT)


def parts_of(num_replicas, num_microsteps):
    """Return [replica][microstep] -> examples, in the order in which the step deals them."""
    blocks = np.arange(len(X)).reshape(num_replicas, -1)
    return [[block[i::num_microsteps] for i in range(num_microsteps)] for block in blocks]


def mean_of(examples):
    """Return (gradient, weight) of some examples; zero if they have no tokens."""
    weight = TOKENS[examples].sum()
    total = (X[examples].astype(np.float64) * TOKENS[examples, None]).sum(0)
    return total / max(weight, 1), weight


def clipped(g, most=0.3):
    return g * min(1, most / max(np.linalg.norm(g), 1e-12))


def weighted(pairs):
    """Return the weighted mean of (gradient, weight) pairs."""
    return sum(g * w for g, w in pairs) / sum(w for _, w in pairs)


@pytest.mark.parametrize("backend", ["jit", "pmap"])
def test_a_clip_of_each_part_is_of_its_own_mean(backend):
    parts = [mean_of(part) for row in parts_of(4, 2) for part in row]
    expected = weighted([(clipped(g), w) for g, w in parts])
    assert np.linalg.norm(expected - GRADIENT) > 0.01
    clip = lbopt.GradientClip(0.3, "replica")
    close(one_step(4, backend, clip=clip, num_microsteps=2)[0], expected)


@pytest.mark.parametrize("backend", ["jit", "pmap"])
def test_a_clip_of_each_mean_weighs_the_microsteps(backend):
    # "jit" splits the global batch; under "pmap" each replica splits its own examples.
    rows = parts_of(1 if backend == "jit" else 4, 2)
    microsteps = [mean_of(np.concatenate([row[i] for row in rows])) for i in range(2)]
    expected = weighted([(clipped(g), w) for g, w in microsteps])
    assert np.linalg.norm(expected - GRADIENT) > 0.01
    clip = lbopt.GradientClip(0.3, "mean")
    close(one_step(4, backend, clip=clip, num_microsteps=2)[0], expected)


def test_noise_is_measured_by_weight():
    """The weighted mean of |G_microbatch|^2 replaces the unweighted mean."""
    parts = [mean_of(part) for row in parts_of(4, 2) for part in row]
    small = sum(w * g @ g for g, w in parts) / TOKENS.sum()
    big = GRADIENT @ GRADIENT
    tx = optax.chain(lbopt.track_noise_scale(16), optax.sgd(1.0))
    _, _, state = one_step(4, "pmap", tx, measure_noise=True, num_microsteps=2)
    noise = state.opt_state[0]
    np.testing.assert_allclose(noise.square_norm, (8 * big - small) / 7, rtol=1e-4)


def test_a_batch_without_weight_has_a_gradient_of_zero():
    empty = {"x": X, "tokens": np.zeros_like(TOKENS)}
    for options in ({}, {"num_microsteps": 2}, {"backend": "pmap"}):
        assert not one_step(4, batch=empty, **options)[0].any()


def test_nothing_is_learned_through_the_weight():
    def through(params, model_state, batch, rng):
        (total, weight), rest = loss_fn(params, model_state, batch, rng)
        return (total, weight * (1 + params["w"]["kernel"].sum())), rest

    close(one_step(1, loss_fn=through)[0], GRADIENT)
