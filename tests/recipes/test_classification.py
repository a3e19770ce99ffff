"""The loss on images: byte inputs, mixtures, penalties, top-5 accuracy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from refusal import refused

from lbopt import losses, metrics, replicas
from lbopt.config import LossConfig
from lbopt.data import Splits
from lbopt.data.from_config import Source
from lbopt.models import Model
from lbopt.recipes import _classification

BATCH = 8
CLASSES = 120
SCALE = ((0.5, 0.25, 0.125), (0.2, 0.4, 0.8))


def flat(params, model_state, images, train, rng=None):
    """A linear model of the pixels."""
    return jnp.einsum("bf,fc->bc", images.reshape(len(images), -1), params), model_state


def task(loss=None, scale=SCALE):
    source = Source(Splits(None, None, None), CLASSES, pixel_scale=scale)
    return _classification.make(Model(None, flat), source, loss or LossConfig())


@pytest.fixture
def batch():
    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, (BATCH, 4, 4, 3), dtype=np.uint8)
    return {"image": images, "label": rng.integers(0, CLASSES, BATCH).astype(np.int32)}


@pytest.fixture
def params():
    return np.random.default_rng(1).normal(size=(48, CLASSES)).astype(np.float32) / 7


def test_bytes_are_normalised_channel_by_channel(batch):
    wanted = (batch["image"] / 255 - np.asarray(SCALE[0])) / np.asarray(SCALE[1])
    np.testing.assert_allclose(task().inputs(batch), wanted, atol=1e-6)
    folded = (
        batch["image"]
        .reshape(BATCH, 2, 2, 2, 2, 3)
        .transpose(0, 1, 3, 2, 4, 5)
        .reshape(BATCH, 2, 2, 12)
    )
    unfolded = (
        np.asarray(task().inputs({"image": folded}))
        .reshape(BATCH, 2, 2, 2, 2, 3)
        .transpose(0, 1, 3, 2, 4, 5)
    )
    np.testing.assert_allclose(unfolded.reshape(BATCH, 4, 4, 3), wanted, atol=1e-6)


def test_grey_bytes_have_one_scale():
    image = np.asarray([[[0, 51], [102, 255]]], np.uint8)
    got = task(scale=((0.2,), (0.5,))).inputs({"image": image})
    np.testing.assert_allclose(got, (image / 255 - 0.2) / 0.5, atol=1e-6)


def test_floats_are_taken_as_they_are():
    image = np.full((1, 2, 2), 0.3, np.float32)
    assert task().inputs({"image": image}) is image


def test_the_five_best_classes_are_counted(batch, params):
    mask = np.asarray([True] * 6 + [False] * 2)
    found = metrics.means([jax.device_get(task().metric_fn(params, {}, {**batch, "mask": mask}))])
    logits = np.asarray(task().inputs(batch)).reshape(BATCH, -1).astype(np.float64) @ params
    best = np.argsort(-logits, 1)
    labels = batch["label"]
    assert found["accuracy"] == np.mean((best[:, 0] == labels)[mask])
    assert found["top_5_accuracy"] == np.mean(
        [label in row[:5] for label, row in zip(labels, best, strict=True)][:6]
    )
    batch["label"] = best[:, 4].astype(np.int32)
    found = metrics.means([jax.device_get(task().metric_fn(params, {}, {**batch, "mask": mask}))])
    assert (found["accuracy"], found["top_5_accuracy"]) == (0, 1)


def test_neighbours_are_mixed_in_image_and_label(batch, params):
    mixing = task(LossConfig(mixup_alpha=0.4, label_smoothing=0.1))
    key = jax.random.key(3)
    weights = np.asarray(_classification.mixup_weights(jax.random.fold_in(key, 0x6D69), BATCH, 0.4))
    np.testing.assert_allclose(weights[::2] + weights[1::2], 1, rtol=1e-6)
    images = np.asarray(task().inputs(batch))
    order = [1, 0, 3, 2, 5, 4, 7, 6]
    wide = weights[:, None, None, None]
    logits, _ = flat(params, {}, wide * images + (1 - wide) * images[order], True)
    both = [
        losses.softmax_cross_entropy(logits, labels, 0.1)
        for labels in (batch["label"], batch["label"][order])
    ]
    wanted = np.mean(weights * both[0] + (1 - weights) * both[1])
    assert float(mixing.loss_fn(params, {}, batch, key)[0]) == pytest.approx(
        float(wanted), rel=1e-6
    )
    assert abs(wanted - float(task().loss_fn(params, {}, batch, key)[0])) > 1e-3


def test_weights_are_drawn_from_beta_pair_by_pair():
    weights = np.asarray(_classification.mixup_weights(jax.random.key(0), 20000, 0.4))[::2]
    assert abs(weights.mean() - 0.5) < 4 * np.sqrt(weights.var() / 10000)
    assert weights.var() == pytest.approx(
        0.25 / (2 * 0.4 + 1), rel=0.03
    )  # the variance of Beta(a, a)


def test_weights_do_not_depend_on_how_the_batch_is_spread():
    key = jax.random.key(0)

    def here(_):
        with replicas.tracing_for(4, "data"):
            return _classification.mixup_weights(key, 2, 0.4)

    parts = jax.vmap(here, axis_name="data")(jnp.arange(4))
    np.testing.assert_array_equal(parts.reshape(-1), _classification.mixup_weights(key, 8, 0.4))


def test_an_odd_part_has_no_pairs(batch, params):
    batch = {name: array[:5] for name, array in batch.items()}
    with refused("loss.mixup_alpha", 0.4, "value"):
        task(LossConfig(mixup_alpha=0.4)).loss_fn(params, {}, batch, jax.random.key(0))


def test_losses_and_gradients_without_smoothing_are_exact():
    """In float64 by NumPy, for certain outputs and for labels that are no class too."""
    rng = np.random.default_rng(0)
    logits = (rng.normal(size=(6, 5)) * 4).astype(np.float32)
    logits[0, 4] += 100.0  # certain and right: its loss is below the spacing of its logit
    labels = np.array([4, 0, 2, -1, 7, 1])
    wide = logits.astype(np.float64)
    odds = np.exp(wide - wide.max(1, keepdims=True))
    odds /= odds.sum(1, keepdims=True)
    one_hot = np.eye(8)[labels][:, :5]
    wanted = -(one_hot * np.log(odds)).sum(1)

    found, pull = jax.vjp(lambda z: losses.softmax_cross_entropy(z, jnp.asarray(labels)), logits)
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-30)
    (gradient,) = pull(jnp.ones(6))
    slopes = one_hot.sum(1, keepdims=True) * odds - one_hot
    np.testing.assert_allclose(gradient, slopes, rtol=1e-4, atol=1e-7)
    with refused("logits", code="mismatch"):
        losses.softmax_cross_entropy(jnp.zeros((6, 6, 5)), jnp.asarray(labels))
