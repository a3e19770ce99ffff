"""Error feedback against NumPy, and its exact properties."""

import jax
import numpy as np
import pytest
from refusal import refused

import lbopt
from lbopt.aggregators import Compressor, as_optax, cast, identity, randk, sign, topk
from lbopt.stacks import stacked_paths

STEPS = 6


def as_tree(rows, like):
    """Return the remembered list in the containers of the gradients."""
    return jax.tree.unflatten(jax.tree.structure(like), rows)


def top(x, fraction=0.1):
    """Top-k of the last axis, in NumPy."""
    k = max(1, int(np.ceil(fraction * x.shape[-1] - 1e-9)))
    out = np.zeros_like(x)
    places = np.argsort(-np.abs(x), -1, kind="stable")[..., :k]
    np.put_along_axis(out, places, np.take_along_axis(x, places, -1), -1)
    return out


def by_hand(rule, grads, momentum=0.0, eta=0.0, dense_start=False):
    """Return the updates of each step for rows [replicas, n] of one leaf, in float64."""
    updates = []
    e = 0.0
    h = 0.0
    v = 0.0

    for step, g in enumerate(grads):
        g = g.astype(np.float64)
        if rule == "ef":
            u = top(e + g)
            e = e + g - u
            updates.append(u.mean(0))
            continue

        v = g if step == 0 else momentum * v + (1 - momentum) * g
        g = v if rule == "ef21" else g
        if step == 0 and dense_start:
            h = g
        else:
            d = top(g - h + eta * e)
            e = e + g - h - d
            h = h + d

        updates.append(h.mean(0))

    return updates


RULES = {
    "ef": (lambda c: lbopt.ef(c), {"rule": "ef"}),
    "ef21": (lambda c: lbopt.ef21(c), {"rule": "ef21"}),
    "ef21-momentum": (lambda c: lbopt.ef21(c, momentum=0.7), {"rule": "ef21", "momentum": 0.7}),
    "ef21-dense": (
        lambda c: lbopt.ef21(c, 0.7, True),
        {"rule": "ef21", "momentum": 0.7, "dense_start": True},
    ),
    "econtrol": (lambda c: lbopt.econtrol(c, 0.3), {"rule": "econtrol", "eta": 0.3}),
    "econtrol-dense": (
        lambda c: lbopt.econtrol(c, 0.3, True),
        {"rule": "econtrol", "eta": 0.3, "dense_start": True},
    ),
}
COMPRESSORS = [topk(0.1), randk(0.2), sign(), cast(4, 3)]


@pytest.mark.parametrize("name", RULES)
def test_equals_numpy(name, gradients, run):
    make, options = RULES[name]
    grads = gradients(STEPS)
    ours, _, _ = run(make(topk(0.1)), grads)
    flat = [np.concatenate([np.ravel(x) for x in jax.tree.leaves(one)]) for one in ours]
    leaves = zip(*(jax.tree.leaves(one) for one in grads), strict=True)
    wanted = [by_hand(grads=[x.reshape(8, -1) for x in leaf], **options) for leaf in leaves]
    for step in range(STEPS):
        np.testing.assert_allclose(
            flat[step], np.concatenate([one[step] for one in wanted]), rtol=1e-5, atol=1e-6
        )


@pytest.mark.everyday("econtrol-topk(0.1)", "ef21-topk(0.1)", "ef-topk(0.1)")
@pytest.mark.parametrize(
    ("make", "compressor"),
    [
        *((lbopt.econtrol, one) for one in COMPRESSORS),
        (lbopt.ef, COMPRESSORS[0]),
        (lbopt.ef21, COMPRESSORS[0]),
    ],
    ids=lambda one: one.name if isinstance(one, Compressor) else one.__name__,
)
def test_on_the_wire_and_on_one_device_it_is_the_same(
    compressor, make, gradients, run, largest_gap
):
    grads = gradients(STEPS)
    alone, spread = (run(make(compressor), grads, devices) for devices in (1, 4))
    assert largest_gap(alone[0], spread[0]) < 1e-6
    assert largest_gap(alone[2], spread[2]) < 2e-6


@pytest.mark.parametrize("make", [lbopt.ef, lbopt.ef21, lbopt.econtrol])
def test_with_everything_said_it_is_the_mean(make, gradients, run, largest_gap):
    grads = gradients(STEPS)
    ours, _, _ = run(make(identity()), grads)
    wanted = [jax.tree.map(lambda g: g.astype(np.float64).mean(0), one) for one in grads]
    assert largest_gap(ours, wanted) < 1e-6


def test_econtrol_without_feedback_is_ef21_bit_for_bit(gradients, run):
    grads = gradients(STEPS)
    for compressor in COMPRESSORS:
        one = run(lbopt.econtrol(compressor, 0.0), grads)
        other = run(lbopt.ef21(compressor), grads)
        jax.tree.map(np.testing.assert_array_equal, one[0], other[0])
        jax.tree.map(np.testing.assert_array_equal, one[2].local.estimate, other[2].local.estimate)


def test_what_was_said_and_what_is_left_add_up_to_the_gradients(gradients, run):
    grads = gradients(STEPS)
    updates, _, state = run(lbopt.ef(topk(0.1)), grads)
    said = jax.tree.map(lambda *x: np.sum(x, 0, dtype=np.float64), *updates)
    left = jax.tree.map(lambda e: e.mean(0, dtype=np.float64), as_tree(state.local.error, said))
    meant = jax.tree.map(lambda *x: np.sum(x, 0, dtype=np.float64).mean(0), *grads)
    jax.tree.map(lambda a, b, c: np.testing.assert_allclose(a + b, c, atol=3e-6), said, left, meant)


@pytest.mark.slow
def test_the_error_of_econtrol_telescopes(gradients, params):
    """e_T = sum of g_t - h_(t+1), replica by replica."""
    grads = gradients(STEPS)
    tx = as_optax(lbopt.econtrol(topk(0.1), 0.3), 8)
    state = tx.init(params)
    total = jax.tree.map(lambda g: np.zeros(g.shape), grads[0])
    for one in grads:
        _, state = tx.update(one, state, params)
        total = jax.tree.map(
            lambda t, g, h: t + g.astype(np.float64) - h,
            total,
            one,
            as_tree(state.local.estimate, one),
        )
    jax.tree.map(
        lambda t, e: np.testing.assert_allclose(e, t, atol=3e-6),
        total,
        as_tree(state.local.error, total),
    )


@pytest.mark.parametrize("make", [lambda c: lbopt.ef21(c, 0.5), lambda c: lbopt.econtrol(c, 0.2)])
def test_the_mean_is_built_from_messages_alone_and_stays_the_mean_of_the_estimates(
    make, gradients, run
):
    _, _, state = run(make(topk(0.1)), gradients(30), devices=4)
    for estimates, mean in zip(state.local.estimate, jax.tree.leaves(state.mirrored), strict=True):
        np.testing.assert_allclose(estimates.mean(0), mean, atol=3e-6)


def test_layers_of_a_stack_are_compressed_one_by_one():
    rng = np.random.default_rng(0)
    rows = {
        "w": (rng.normal(size=(8, 3, 20)) * np.array([1, 1e3, 1e-3])[:, None]).astype(np.float32)
    }
    params = {"w": np.zeros((3, 20), np.float32)}

    def update(aggregator):
        tx = as_optax(aggregator, 8)
        return np.asarray(tx.update(rows, tx.init(params), params)[0][0]["w"])

    kept = update(lbopt.ef(topk(0.1), stacked=stacked_paths("^w")))
    np.testing.assert_allclose(kept, top(rows["w"]).mean(0), rtol=1e-5, atol=1e-9)
    assert np.all(update(lbopt.ef(topk(0.1)))[[0, 2]] == 0)


def test_bf16_gradients_are_remembered_in_fp32(gradients, params):
    rows = jax.tree.map(lambda g: g.astype("bfloat16"), gradients(1)[0])
    half = jax.tree.map(lambda p: p.astype("bfloat16"), params)
    tx = as_optax(lbopt.ef21(topk(0.1)), 8)
    (updates, _), state = tx.update(rows, tx.init(half), half)
    assert {x.dtype for x in jax.tree.leaves(updates)} == {np.dtype("bfloat16")}
    assert {x.dtype for x in jax.tree.leaves(state.local)} == {np.dtype(np.float32)}


@pytest.mark.parametrize(
    ("make", "field", "value", "code"),
    [
        (lambda: lbopt.ef("topk"), "compressor", "topk", "type"),
        (lambda: lbopt.ef21(topk), "compressor", topk, "type"),
        (lambda: lbopt.ef21(sign(), momentum=1.0), "momentum", 1.0, "value"),
        (lambda: lbopt.econtrol(sign(), eta=-0.1), "eta", -0.1, "value"),
    ],
)
def test_refusals(make, field, value, code):
    with refused(field, value, code):
        make()
