"""Metric sums and losses against float64 NumPy."""

import re
from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from refusal import refused

from lbopt import losses, metrics


def reference_losses(logits, labels, smoothing):
    logits = np.asarray(logits, np.float64)
    shifted = logits - logits.max(-1, keepdims=True)
    log_p = shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
    target = np.full(logits.shape, smoothing / logits.shape[-1])
    target[np.arange(len(labels)), labels] += 1 - smoothing
    return -(target * log_p).sum(-1)


@pytest.fixture
def examples():
    rng = np.random.default_rng(0)
    return (3 * rng.standard_normal((64, 10))).astype(np.float32), rng.integers(0, 10, 64).astype(
        np.int32
    )


@pytest.mark.parametrize("smoothing", [0.0, 0.1, 1.0])
def test_cross_entropy(smoothing, examples):
    logits, labels = examples
    got = losses.softmax_cross_entropy(jnp.asarray(logits), labels, smoothing)
    assert got.shape == (64,)
    assert got.dtype == jnp.float32
    np.testing.assert_allclose(
        got, reference_losses(logits, labels, smoothing), rtol=2e-6, atol=1e-6
    )


def test_label_smoothing_is_zero_by_default_and_changes_the_loss(examples):
    logits, labels = examples
    plain = reference_losses(logits, labels, 0.0)
    smooth = reference_losses(logits, labels, 0.1)
    assert np.abs(plain - smooth).max() > 0.1
    np.testing.assert_allclose(
        losses.softmax_cross_entropy(jnp.asarray(logits), labels), plain, rtol=2e-6, atol=1e-6
    )


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_cross_entropy_of_narrow_logits_is_computed_in_fp32(dtype, examples):
    logits, labels = examples
    narrow = jnp.asarray(logits, dtype)
    got = losses.softmax_cross_entropy(narrow, labels, 0.1)
    assert got.dtype == jnp.float32
    np.testing.assert_allclose(
        got, reference_losses(np.asarray(narrow, np.float64), labels, 0.1), rtol=2e-6, atol=1e-6
    )


def test_smoothing_on_the_other_classes_leaves_the_right_one_alone(examples):
    logits, labels = examples
    smoothing = 0.3
    p = reference_losses(logits, labels, 0.0)
    log_p = logits - np.log(np.exp(logits.astype(np.float64)).sum(-1, keepdims=True))
    others = (log_p.sum(-1) + p) / 9  # mean of log p over the nine other classes
    got = losses.softmax_cross_entropy(jnp.asarray(logits), labels, smoothing, "other_classes")
    np.testing.assert_allclose(got, (1 - smoothing) * p - smoothing * others, rtol=2e-6, atol=1e-6)
    with refused("smoothing_rule", "some", "choice"):
        losses.softmax_cross_entropy(jnp.asarray(logits), labels, smoothing, "some")


def test_the_penalty_is_half_the_squares_of_all_but_normalisation():
    rng = np.random.default_rng(0)
    params = {
        "Dense_0": {"kernel": rng.normal(size=(3, 4)), "bias": rng.normal(size=4)},
        "BatchNorm_0": {"scale": rng.normal(size=4), "bias": rng.normal(size=4)},
    }
    wanted = 0.25 / 2 * sum(np.sum(leaf**2) for leaf in params["Dense_0"].values())
    got = losses.l2_penalty(jax.tree.map(jnp.asarray, params), 0.25)
    assert got.dtype == jnp.float32
    assert float(got) == pytest.approx(wanted, rel=1e-6)
    grads = jax.grad(losses.l2_penalty)(
        jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), params), 0.25
    )
    np.testing.assert_allclose(
        grads["Dense_0"]["bias"], 0.25 * params["Dense_0"]["bias"], rtol=1e-6
    )
    assert not np.any(grads["BatchNorm_0"]["bias"])


@pytest.mark.parametrize("size", [1e4, -1e4])
def test_cross_entropy_of_large_logits_is_finite(size):
    logits = jnp.array([[size, 0.0, 0.0]])
    got = losses.softmax_cross_entropy(logits, jnp.array([1]))
    np.testing.assert_allclose(got, reference_losses(logits, [1], 0.0), rtol=2e-6)
    assert np.all(
        np.isfinite(
            jax.grad(lambda z: losses.softmax_cross_entropy(z, jnp.array([1])).sum())(logits)
        )
    )


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_the_gradient_is_probability_minus_target(smoothing, examples):
    logits, labels = examples
    got = jax.grad(lambda z: losses.softmax_cross_entropy(z, labels, smoothing).sum())(
        jnp.asarray(logits)
    )
    wide = np.exp(logits.astype(np.float64))
    target = np.eye(10)[labels] * (1 - smoothing) + smoothing / 10
    np.testing.assert_allclose(got, wide / wide.sum(-1, keepdims=True) - target, atol=1e-6)


def test_summed_without_a_mask():
    total, count = metrics.summed(jnp.array([1.0, 2.5, -1.0]))
    assert (float(total), float(count)) == (2.5, 3.0)
    assert total.dtype == count.dtype == jnp.float32


def test_summed_leaves_out_masked_values_even_where_they_are_not_numbers():
    values = jnp.array([1.0, jnp.nan, 2.0, jnp.inf])
    total, count = metrics.summed(values, jnp.array([True, False, True, False]))
    assert (float(total), float(count)) == (3.0, 2.0)


def test_summed_keeps_a_counted_nan():
    total, count = metrics.summed(jnp.array([1.0, jnp.nan]), jnp.array([True, True]))
    assert np.isnan(total)
    assert float(count) == 2.0


def test_summed_adds_in_fp32():
    total, count = metrics.summed(
        jnp.ones(1000, jnp.bfloat16)
    )  # every count above 256 needs more than bf16's 8 bits
    assert (float(total), float(count)) == (1000.0, 1000.0)
    assert float(metrics.summed(jnp.ones(1001, bool), jnp.ones(1001, bool))[0]) == 1001.0


def test_summed_with_an_empty_mask():
    total, count = metrics.summed(jnp.full(3, jnp.nan), jnp.zeros(3, bool))
    assert (float(total), float(count)) == (0.0, 0.0)


@pytest.mark.parametrize("masked", [False, True])
def test_classification(masked, examples):
    logits, labels = examples
    mask = np.arange(64) % 3 > 0 if masked else np.ones(64, bool)
    each = losses.softmax_cross_entropy(jnp.asarray(logits), labels)
    got = metrics.classification(
        jnp.asarray(logits), labels, each, jnp.asarray(mask) if masked else None
    )
    assert set(got) == {"loss", "accuracy"}
    np.testing.assert_allclose(
        got["loss"], (reference_losses(logits, labels, 0.0)[mask].sum(), mask.sum()), rtol=1e-5
    )
    np.testing.assert_array_equal(
        got["accuracy"], ((logits.argmax(-1) == labels)[mask].sum(), mask.sum())
    )


def test_metrics_of_each_example_add_up_to_those_of_the_batch():
    """This includes windows of tokens, some of which do not count."""
    draw = np.random.default_rng(0)
    batch = {
        "logits": draw.standard_normal((6, 4, 3)).astype(np.float32),
        "labels": draw.integers(0, 3, (6, 4)),
        "mask": draw.random((6, 4)) < 0.7,
    }

    def metric_fn(params, model_state, batch):
        each = losses.softmax_cross_entropy(batch["logits"], batch["labels"])
        return metrics.classification(batch["logits"], batch["labels"], each, batch["mask"])

    whole = metric_fn({}, {}, batch)
    each = metrics.of_each_example(metric_fn)({}, {}, batch)
    for name, pair in whole.items():
        for total, parts in zip(pair, each[name], strict=True):
            assert parts.shape == (6,)
            np.testing.assert_allclose(np.sum(parts), total, rtol=1e-6)
    np.testing.assert_array_equal(each["loss"][1], batch["mask"].sum(1))


def test_means_divides_once():
    batches = [
        {"loss": (3.0, 1.0), "accuracy": (1.0, 1.0)},
        {"loss": (1.0, 3.0), "accuracy": (0.0, 3.0)},
    ]
    assert metrics.means(batches) == {
        "loss": 1.0,
        "accuracy": 0.25,
    }  # the mean of the batch means would be 5/3 and 1/2


def test_means_adds_in_float64():
    batch = {"loss": (jnp.float32(0.1), jnp.float32(1))}
    got = metrics.means(batch for _ in range(10_000))
    # An fp32 running sum of ten thousand tenths is off by more than 1e-5; these are exact multiples
    # of fp32(0.1).
    assert got["loss"] == pytest.approx(float(np.float32(0.1)), rel=1e-12)


def test_means_of_no_batches_is_empty():
    assert metrics.means([]) == {}


def test_means_takes_metrics_that_only_some_batches_have():
    assert metrics.means([{"a": (1.0, 2.0)}, {"b": (3.0, 3.0)}, {"a": (1.0, 2.0)}]) == {
        "a": 0.5,
        "b": 1.0,
    }


def test_complex_numbers_and_arrays_are_no_metrics():
    with refused("values", code="type"):
        metrics.summed(jnp.array([3 + 4j]))
    for total, kind in (
        (jnp.asarray(3 + 4j), "complex64[]"),
        (np.ones(3, np.float32), "float32[3]"),
        (1j, "complex"),
        ("x", "str"),
        (None, "NoneType"),
        ([1, [2, 3]], "list"),
        (jax.random.key(0), "key<fry>[]"),
    ):
        with refused("metrics/a", code="type") as caught:
            metrics.means([{"a": (total, 3)}])
        assert re.search(rf"(^|\W){re.escape(kind)}\W.*\bint\b", caught.value.reason)


@pytest.mark.parametrize(
    "one", [True, np.True_, 1, np.int8(1), Fraction(1), jnp.bfloat16(1), np.ones(())]
)
def test_real_numbers_of_every_kind_are_metrics(one):
    assert metrics.means([{"a": (one, 2)}]) == {"a": 0.5}
