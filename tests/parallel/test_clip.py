"""Clipping at each stage, and the noise measurement, against gradients of each microbatch."""

import flax.linen as nn
import jax
import numpy as np
import optax
import pytest
from refusal import refused

import lbopt
from lbopt.config import OptimizerConfig, TrainConfig, step_options
from lbopt.models import CNN
from lbopt.parallel._clip import clip_at

MAX_NORM = 1.5
MICROSTEPS = 2
REPLICAS = 4


class Perceptron(nn.Module):
    @nn.compact
    def __call__(self, images, train):
        return nn.Dense(10)(nn.tanh(nn.Dense(16)(images.reshape(images.shape[0], -1))))


def flat(tree):
    return np.concatenate([np.ravel(leaf).astype(np.float64) for leaf in jax.tree.leaves(tree)])


def gradient(loss_fn, state, batch, examples):
    part = {name: array[examples] for name, array in batch.items()}
    grads = jax.grad(lambda params: loss_fn(params, {}, part, jax.random.key(0))[0])(state.params)
    return flat(grads)


def parts_of(size, replicas, microsteps):
    """Return [replica][microstep] -> examples.

    Replicas hold contiguous blocks; microstep m of n has examples m, m + n, ... of its block.
    """
    blocks = np.arange(size).reshape(replicas, -1)
    return [[block[i::microsteps] for i in range(microsteps)] for block in blocks]


def clip(g):
    return g * min(1.0, MAX_NORM / np.linalg.norm(g))


def expected_step(stage, grads):
    """Return (step gradient, mean norm before the clip) from gradients [replica][microstep]."""
    grads = np.array(grads)
    if stage == "replica":
        return np.mean([clip(g) for row in grads for g in row], 0), np.mean(
            np.linalg.norm(grads, axis=-1)
        )
    if stage == "mean":
        means = grads.mean(0)
        return np.mean([clip(g) for g in means], 0), np.mean(np.linalg.norm(means, axis=-1))
    whole = grads.mean((0, 1))
    return clip(whole), np.linalg.norm(whole)


@pytest.fixture(scope="module")
def start(problem, batches):
    """Return (loss_fn, function that makes the first state, a batch of unequal examples)."""
    loss_fn, create = problem(Perceptron())
    batch = dict(batches[0])
    scale = np.repeat([0.02, 1.0, 3.0, 10.0], 8).astype(
        np.float32
    )  # replicas whose gradients differ in size
    batch["image"] = batch["image"] * scale.reshape(-1, 1, 1)
    return loss_fn, create, batch


def one_step(loss_fn, state, batch, **options):
    before = flat(state.params)
    state, metrics = lbopt.make_train_step(
        loss_fn, optax.sgd(1.0), lbopt.make_mesh(REPLICAS), **options
    )(state, batch)
    return before - flat(jax.block_until_ready(state).params), metrics


@pytest.mark.everyday(
    "replica-pmap-2", "mean-jit-2", "mean-pmap-1", "accumulated-jit-2", "accumulated-pmap-1"
)
@pytest.mark.parametrize("microsteps", [1, MICROSTEPS])
@pytest.mark.parametrize("backend", ["jit", "pmap"])
@pytest.mark.parametrize("stage", ["replica", "mean", "accumulated"])
def test_gradient_is_clipped_at_the_stage_that_is_named(stage, backend, microsteps, start):
    loss_fn, create, batch = start
    state = create(optax.sgd(1.0))
    mapped = backend == "pmap" or stage == "replica"
    examples = parts_of(32, REPLICAS if mapped else 1, microsteps)
    expected, norm = expected_step(
        stage, [[gradient(loss_fn, state, batch, part) for part in row] for row in examples]
    )
    moved, metrics = one_step(
        loss_fn,
        state,
        batch,
        backend=backend,
        num_microsteps=microsteps,
        clip=lbopt.GradientClip(MAX_NORM, stage),
    )
    assert np.linalg.norm(moved - expected) <= 1e-5 * np.linalg.norm(expected)
    total, count = metrics[f"gradient_norm/{stage}"]
    assert np.isclose(total / count, norm, rtol=1e-5)


def test_a_constant_is_added_to_the_norm():
    grads = {"w": np.float32([3.0, 4.0])}
    clipped, norms = clip_at("mean", lbopt.GradientClip(1.0, "mean", eps=5.0), grads)
    np.testing.assert_allclose(clipped["w"], [0.3, 0.4], rtol=1e-6)
    assert norms["gradient_norm/mean"][0] == 5.0
    with refused("eps", -1.0, "value"):
        lbopt.GradientClip(1.0, eps=-1.0)


@pytest.mark.parametrize("stage", ["replica", "mean"])
def test_a_config_clips_with_the_constant_of_its_variant(stage):
    optimizer = OptimizerConfig("lamb", "nus", clip_stage=stage)
    assert step_options(TrainConfig(optimizer=optimizer)).clip.eps == 1e-6


def test_the_stages_differ(start):
    loss_fn, create, batch = start
    state = create(optax.sgd(1.0))
    examples = parts_of(32, REPLICAS, MICROSTEPS)
    grads = [[gradient(loss_fn, state, batch, part) for part in row] for row in examples]
    steps = [expected_step(stage, grads)[0] for stage in ("replica", "mean", "accumulated")]
    for one, other in ((0, 1), (0, 2), (1, 2)):
        assert np.linalg.norm(steps[one] - steps[other]) > 1e-3 * np.linalg.norm(steps[other])


def test_a_clip_that_is_not_reached_changes_nothing(start):
    loss_fn, create, batch = start
    plain, _ = one_step(loss_fn, create(optax.sgd(1.0)), batch)
    for stage in ("replica", "mean", "accumulated"):
        moved, _ = one_step(
            loss_fn, create(optax.sgd(1.0)), batch, clip=lbopt.GradientClip(1e6, stage)
        )
        assert np.linalg.norm(moved - plain) <= 1e-6 * np.linalg.norm(plain)


def test_batch_norm_over_groups_of_replicas_runs_with_a_clip_per_replica(problem, batches):
    loss_fn, create = problem(CNN(widths=(8,), hidden=16, batch_norm_scope="replicas:2"))
    tx = optax.sgd(0.1)
    states = []
    for backend in ("jit", "pmap"):
        step = lbopt.make_train_step(
            loss_fn, tx, lbopt.make_mesh(4), backend, clip=lbopt.GradientClip(0.5, "replica")
        )
        states.append(jax.block_until_ready(step(create(tx), batches[0]))[0])
    assert np.allclose(flat(states[0].params), flat(states[1].params), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("backend", "microsteps", "parts"),
    [("jit", 4, 4), ("jit", 1, 4), ("pmap", 1, 4), ("pmap", 2, 8)],
)
def test_noise_is_measured_from_the_parts(backend, microsteps, parts, start):
    loss_fn, create, batch = start
    tx = optax.chain(lbopt.track_noise_scale(32, per_layer=True), optax.sgd(1.0))
    state = create(tx)
    ends = np.cumsum([leaf.size for leaf in jax.tree.leaves(state.params)])

    mapped = backend == "pmap" or microsteps == 1
    examples = [part for row in parts_of(32, REPLICAS if mapped else 1, microsteps) for part in row]
    assert len(examples) == parts
    small = [gradient(loss_fn, state, batch, part) for part in examples]
    mean_square = np.mean([g @ g for g in small])
    big = np.mean(small, 0) @ np.mean(small, 0)

    step = lbopt.make_train_step(
        loss_fn,
        tx,
        lbopt.make_mesh(REPLICAS),
        backend,
        num_microsteps=microsteps,
        measure_noise="layers",
    )
    state, metrics = jax.block_until_ready(step(state, batch))

    noise = state.opt_state[0].whole
    assert np.isclose(noise.square_norm, (parts * big - mean_square) / (parts - 1), rtol=1e-4)
    assert np.isclose(noise.trace, (mean_square - big) * 32 / (parts - 1), rtol=1e-4)

    by_leaf = [np.split(g, ends[:-1]) for g in small]
    for number, found in enumerate(state.opt_state[0].layers.values()):
        rows = [g[number] for g in by_leaf]
        own_square = np.mean([g @ g for g in rows])
        own_big = np.mean(rows, 0) @ np.mean(rows, 0)
        wanted = (own_square - own_big) * 32 / (parts - 1)
        np.testing.assert_allclose(found.trace, wanted, rtol=1e-3, atol=1e-7)
    assert set(metrics) == {"loss", "accuracy"}


@pytest.mark.parametrize("norm", [0, float("inf"), float("nan"), "1"])
def test_a_norm_that_is_none_is_refused(norm):
    with refused("max_norm", norm):
        lbopt.GradientClip(norm)


def test_an_unknown_stage_is_refused():
    with refused("stage", "inside", "choice"):
        lbopt.GradientClip(1.0, "inside")


@pytest.mark.parametrize("backend", ["jit", "pmap"])
@pytest.mark.parametrize(("devices", "clip"), [(4, lbopt.GradientClip(1.0, "mean")), (1, None)])
def test_noise_is_refused_where_the_batch_is_one_part(devices, clip, backend, problem):
    loss_fn, _ = problem(Perceptron())
    with refused("measure_noise", True, "conflict"):
        lbopt.make_train_step(
            loss_fn,
            optax.sgd(1.0),
            lbopt.make_mesh(devices),
            backend,
            clip=clip,
            measure_noise=True,
        )
