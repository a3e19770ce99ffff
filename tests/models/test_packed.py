"""A CNN's trials packed into channels: under vmap each equals its result alone, in float64."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

from lbopt import replicas
from lbopt.models import CNN, _packed
from lbopt.sweep.lanes import _gauges

WIDTHS = (6, 12)
HIDDEN = 16
TRIALS = 11
BATCH = 16
MODEL = CNN(widths=WIDTHS, hidden=HIDDEN, by_patches=False)


class Plain(CNN):
    """The same network with each operation in the order of the model's definition."""

    def _packs_trials(self):
        return False


PLAIN = Plain(widths=WIDTHS, hidden=HIDDEN, by_patches=False)


@pytest.fixture(scope="module")
def trials():
    """Return variables, images and labels.

    Scales have both signs; biases and statistics differ from zero and one. Corners of the images
    are blank, so that all pixels of a pooling tile are its maximum.
    """
    rng = np.random.default_rng(0)

    def trained(path, leaf):
        noise = rng.standard_normal(leaf.shape)
        change = {
            "kernel": leaf,
            "scale": rng.choice([-1.0, 1.0], leaf.shape) * rng.uniform(0.5, 2, leaf.shape),
            "bias": 0.3 * noise,
            "mean": noise,
            "var": rng.uniform(0.5, 2, leaf.shape),
        }
        return np.asarray(change[path[-1].key], np.float32)

    images = rng.random((TRIALS, BATCH, 8, 8)).astype(np.float32)
    images[:, ::3, :5, :5] = 0
    init = jax.vmap(lambda key: MODEL.init(key, images[0], train=True))
    variables = jax.tree_util.tree_map_with_path(
        trained, init(jax.random.split(jax.random.key(0), TRIALS))
    )
    return variables, images, rng.integers(0, 10, (TRIALS, BATCH)).astype(np.int32)


def some(trials, which):
    return jax.tree.map(lambda leaf: leaf[which], trials)


def loss_fn(module, params, stats, images, labels):
    inputs = {"params": params, "batch_stats": stats}
    logits, updated = module.apply(inputs, images, train=True, mutable=["batch_stats"])
    picked = jnp.take_along_axis(jax.nn.log_softmax(logits), labels[:, None], 1)
    return -jnp.mean(picked), (logits, updated["batch_stats"])


def differentiated(module, variables, images, labels):
    """Return the gradients by parameters and images, the logits and the new statistics."""

    def fn(params, images):
        return loss_fn(module, params, variables["batch_stats"], images, labels)

    return jax.grad(fn, (0, 1), has_aux=True)(variables["params"], images)


def close(ours, theirs, tolerance=1e-5):
    """Compare leaf by leaf, relative to the largest element of each."""

    def compare(path, one, other):
        one = np.asarray(one, np.float64)
        other = np.asarray(other, np.float64)
        assert np.abs(one - other).max() <= tolerance * np.abs(other).max(), jax.tree_util.keystr(
            path
        )

    jax.tree_util.tree_map_with_path(compare, ours, theirs)


@pytest.fixture(scope="module")
def exact(trials):
    """Return the result of `differentiated` for each trial alone, in float64."""
    with jax.enable_x64(True):
        model = PLAIN.clone(dtype=jnp.float64)
        wide = jax.tree.map(
            lambda leaf: leaf.astype(np.float64) if leaf.dtype == np.float32 else leaf, trials
        )
        differentiate = jax.jit(functools.partial(differentiated, model))
        return [jax.device_get(differentiate(*some(wide, number))) for number in range(TRIALS)]


@pytest.fixture(scope="module")
def alone(trials):
    """Return the result of `differentiated` for each trial alone."""
    differentiate = jax.jit(functools.partial(differentiated, MODEL))
    return [jax.device_get(differentiate(*some(trials, number))) for number in range(TRIALS)]


@pytest.mark.everyday("3")
@pytest.mark.parametrize("count", [1, 3, 8, 11])
def test_each_trial_is_what_it_is_alone(trials, alone, exact, count):
    together = jax.jit(jax.vmap(functools.partial(differentiated, MODEL)))(
        *some(trials, slice(count))
    )
    for number in range(count):
        one = some(together, number)
        close(one, alone[number])
        close(one, exact[number])


def test_alone_it_is_the_plain_model(trials, alone):
    close(alone[0], jax.jit(functools.partial(differentiated, PLAIN))(*some(trials, 0)))


def test_in_bfloat16_it_is_as_far_from_the_plain_model_as_rounding(trials, exact):
    errors = []
    for module in (MODEL, PLAIN):
        module = module.clone(dtype=jnp.bfloat16)
        (by_params, _), (logits, stats) = jax.jit(
            jax.vmap(functools.partial(differentiated, module))
        )(*trials)
        assert logits.dtype == jnp.float32
        assert all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves((by_params, stats)))
        errors.append(
            [
                np.abs(logits[number] - exact[number][1][0]).max()
                / np.abs(exact[number][1][0]).max()
                for number in range(TRIALS)
            ]
        )
    ours, plain = np.array(errors)
    assert ours.mean() < 1.5 * plain.mean() < 0.1


def test_what_trials_share_need_not_be_repeated(trials):
    variables, images, labels = trials
    fn = functools.partial(differentiated, MODEL)
    shared = jax.jit(jax.vmap(fn, (0, None, None)))(variables, images[0], labels[0])
    for number in (0, 5):
        close(some(shared, number), jax.jit(fn)(some(variables, number), images[0], labels[0]))


def test_vmap_in_vmap(trials):
    fn = functools.partial(differentiated, MODEL)
    six = some(trials, slice(6))
    flat = jax.jit(jax.vmap(fn))(*six)
    split = jax.tree.map(lambda leaf: leaf.reshape(2, 3, *leaf.shape[1:]), six)
    nested = jax.jit(jax.vmap(jax.vmap(fn)))(*split)
    close(jax.tree.map(lambda leaf: leaf.reshape(6, *leaf.shape[2:]), nested), flat)


def test_gradient_of_the_sum_over_trials(trials):
    """vmap inside grad; a sweep has grad inside vmap."""
    variables, images, labels = trials

    def total(params):
        return jax.vmap(functools.partial(loss_fn, MODEL))(
            params, variables["batch_stats"], images, labels
        )[0].sum()

    ours = jax.jit(jax.grad(total))(variables["params"])
    (theirs, _), _ = jax.jit(jax.vmap(functools.partial(differentiated, MODEL)))(*trials)
    close(ours, theirs)


def trained(module, steps, variables, images, labels):
    """Take gradient steps in a loop whose length is known only at run time."""

    def body(carry):
        done, variables = carry
        (gradient, _), (_, stats) = differentiated(module, variables, images, labels)
        params = jax.tree.map(lambda w, g: w - 0.05 * g, variables["params"], gradient)
        return done + 1, {"params": params, "batch_stats": stats}

    with replicas.tracing_for(1):
        return jax.lax.while_loop(lambda carry: carry[0] < steps, body, (jnp.int32(0), variables))[
            1
        ]


def test_steps_in_a_loop_on_four_devices(trials):
    eight = some(trials, slice(8))
    parts = PartitionSpec("trials")
    fn = jax.vmap(functools.partial(trained, MODEL), (None, 0, 0, 0))
    mesh = Mesh(np.array(jax.devices()), ("trials",))
    spread = jax.shard_map(
        fn,
        mesh=mesh,
        in_specs=(PartitionSpec(), parts, parts, parts),
        out_specs=parts,
        check_vma=False,
    )
    found = jax.device_get(jax.jit(spread)(np.int32(3), *eight))
    alone = jax.jit(functools.partial(trained, PLAIN))
    for number in range(8):
        close(some(found, number), alone(np.int32(3), *some(eight, number)), 1e-4)


def probed(module, variables, images, labels):
    def loss(params, stats, batch, key):
        del key
        value, (_, updated) = loss_fn(module, params, stats, *batch)
        return value, ({}, updated)

    probe = _gauges.make_probe(loss, 4)
    return probe(
        variables["params"], variables["batch_stats"], (images, labels), jax.random.key(0)
    ).flat()


@pytest.mark.slow
def test_probes_are_those_of_the_plain_model(trials):
    """Probes differentiate twice."""
    three = some(trials, slice(3))
    expected = jax.jit(jax.vmap(functools.partial(probed, PLAIN)))(*three)
    together = jax.jit(jax.vmap(functools.partial(probed, MODEL)))(*three)
    alone = jax.jit(functools.partial(probed, MODEL))(*some(three, 1))
    assert np.all(expected["lipschitz"] > 0)
    for name, value in expected.items():
        np.testing.assert_allclose(together[name], value, rtol=1e-4, atol=1e-6, err_msg=name)
        np.testing.assert_allclose(alone[name], value[1], rtol=1e-4, atol=1e-6, err_msg=name)


def rows(trials, fn, calls):
    """Return `fn` with its batching rule, recording each trace."""

    def alone(x, w):
        calls.append("alone")
        return fn(x, w)

    def together(x, w):
        calls.append("together")
        assert len(x) == len(w) == trials
        return _packed.unpack(fn(_packed.pack(x), _packed.pack(w)), trials)

    return _packed.batched_by(alone, together)


@pytest.mark.everyday("0", "2")
@pytest.mark.parametrize("order", [0, 1, 2, 3])
def test_derivatives_of_any_order(order):
    calls = []
    rng = np.random.default_rng(0)
    x = rng.standard_normal((5, 4, 3))
    w = rng.standard_normal((5, 3))

    def fn(x, w):
        return jnp.sin(x * w) + jnp.mean(x, 0) ** 3

    def summed(fn):
        total = lambda scale, x, w: jnp.sum(fn(scale * x, w * scale))  # noqa: E731
        for _ in range(order):
            total = jax.grad(total)
        return jax.vmap(total, (None, 0, 0))

    with jax.enable_x64(True):
        ours = summed(rows(5, fn, calls))(1.0, x, w)
        np.testing.assert_allclose(ours, summed(fn)(1.0, x, w), rtol=1e-12)
    assert "together" in calls


def test_vmap_takes_its_rule():
    calls = []
    x = jnp.ones((5, 4, 3))
    fn = rows(5, lambda x, w: x * w, calls)
    fn(x[0], x[0, 0])
    assert set(calls) == {"alone"}
    calls.clear()
    np.testing.assert_array_equal(jax.vmap(fn, (0, None))(x, 2 * x[0, 0]), 2 * x)
    assert "together" in calls


def test_pack_puts_trials_beside_each_other():
    x = jnp.arange(2 * 3 * 4).reshape(2, 3, 4)
    np.testing.assert_array_equal(_packed.pack(x)[0], [0, 1, 2, 3, 12, 13, 14, 15])
    np.testing.assert_array_equal(_packed.unpack(_packed.pack(x), 2), x)


def uses_rule(model, trials):
    """Return whether the model's program has functions with custom batching rules."""
    jaxpr = jax.make_jaxpr(functools.partial(differentiated, model))(*some(trials, 0))
    return "custom_vmap_call" in str(jaxpr)


def test_where_it_is_used(trials):
    assert uses_rule(MODEL, trials)
    assert not uses_rule(PLAIN, trials)
    assert not uses_rule(MODEL.clone(by_patches=True), trials)
    with replicas.tracing_for(1):
        assert uses_rule(MODEL, trials)
        assert not uses_rule(MODEL.clone(batch_norm_scope="local"), trials)
    with replicas.tracing_for(2):
        assert not uses_rule(MODEL, trials)
