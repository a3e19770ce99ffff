"""Random draws in a step.

Flax's dropout draws from the step's key for the batch that it sees: under jit the draws are equal
on any number of devices, under pmap they are independent per replica. lbopt draws by an example's
index in the global batch, so its draws are equal everywhere.
"""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from refusal import refused

import lbopt
from lbopt.aggregators import plain_mean
from lbopt.models import Bert, EfficientNet, Stage, from_linen
from lbopt.models._randomness import Dropout, StochasticDepth


class Dropped(nn.Module):
    """Dropout on the pixels, then one dense layer."""

    @nn.compact
    def __call__(self, images, train):
        x = images.reshape(images.shape[0], -1)
        return nn.Dense(10)(nn.Dropout(0.5, deterministic=not train)(x))


def test_dropout_is_the_same_on_one_and_four_devices(problem, trajectory, relative_gap, batches):
    loss_fn, create = problem(Dropped())
    tx = optax.sgd(0.1)
    one, four = (
        trajectory(lbopt.make_train_step(loss_fn, tx, lbopt.make_mesh(n)), create(tx), batches[:5])
        for n in (1, 4)
    )
    assert relative_gap(one[0], one[1], four[1]) <= 1e-5
    assert relative_gap(one[0], one[-1], four[-1]) <= 1e-5


def noise_sum(params, model_state, batch, rng):
    """Report the random numbers that the examples see; the loss itself uses none."""
    noise = jax.random.uniform(rng, batch["x"].shape)
    spread = jnp.zeros(16).at[batch["place"]].set(noise)
    return jnp.mean(params["w"] * batch["x"]), (model_state, {"noise": (spread, jnp.ones(()))})


def noise(num_devices, backend, num_microsteps=1, num_steps=1, seed=0):
    tx = optax.sgd(0.1)
    step = lbopt.make_train_step(
        noise_sum, tx, lbopt.make_mesh(num_devices), backend, num_microsteps=num_microsteps
    )
    state = lbopt.TrainState.create({"w": jnp.ones(())}, {}, tx, seed)
    for _ in range(num_steps):
        state, metrics = jax.block_until_ready(
            step(state, {"x": np.ones(16, np.float32), "place": np.arange(16)})
        )
    return np.asarray(metrics["noise"][0])


def test_every_example_draws_the_same_under_jit_whatever_the_devices():
    np.testing.assert_array_equal(noise(1, "jit"), noise(4, "jit"))


@pytest.mark.parametrize(
    ("num_devices", "backend", "num_microsteps"),
    [(4, "jit", 1), (4, "pmap", 1), (4, "jit", 2), (4, "pmap", 2)],
)
def test_no_two_examples_draw_the_same(num_devices, backend, num_microsteps):
    assert len(set(noise(num_devices, backend, num_microsteps).tolist())) == 16


@pytest.mark.parametrize("backend", ["jit", "pmap"])
def test_steps_and_seeds_draw_differently_and_repeatably(backend):
    first = noise(4, backend)
    np.testing.assert_array_equal(first, noise(4, backend))
    assert not np.any(first == noise(4, backend, num_steps=2))
    assert not np.any(first == noise(4, backend, seed=1))


@pytest.mark.parametrize("key", [jax.random.key, jax.random.PRNGKey])
def test_a_key_is_as_good_as_the_number_that_it_is_made_of(key):
    def keys(seed):
        return lbopt.TrainState.create({"w": jnp.ones(())}, {}, optax.sgd(0.1), seed).rng

    np.testing.assert_array_equal(keys(key(3)), keys(3))
    np.testing.assert_array_equal(jax.jit(keys)(key(3)), keys(3))


def test_a_key_of_another_kind_is_refused_by_name():
    key = jax.random.key(3, impl="rbg")
    with refused("seed", key, "mismatch"):
        lbopt.TrainState.create({}, {}, optax.sgd(0.1), key)


class Drawn(nn.Module):
    """Both kinds of draws, twice each, applied to ones."""

    @nn.compact
    def __call__(self, x, train):
        y = Dropout(0.5)(jnp.ones_like(x), train)
        y = StochasticDepth(0.25)(y, train) + 8 * Dropout(0.5)(jnp.ones_like(x), train)
        return y + 64 * StochasticDepth(0.5)(jnp.ones_like(x), train)


def drawn(num_devices, backend, num_microsteps=1, num_steps=1, seed=0, draw=None, **options):
    """Return [16, 12]: the draws of each example of the global batch in the last step."""
    draw = draw or (lambda x, rng: from_linen(Drawn()).apply({}, {}, x, True, rng)[0])

    def loss_fn(params, model_state, batch, rng):
        y = draw(batch["x"], rng)
        spread = jnp.zeros((16, 12)).at[batch["place"]].set(y)
        return jnp.mean(params["w"] * y), (model_state, {"drawn": (spread, jnp.ones(()))})

    tx = optax.sgd(0.1)
    mesh = lbopt.make_mesh(num_devices)
    step = lbopt.make_train_step(
        loss_fn,
        tx,
        mesh,
        backend,
        num_microsteps=num_microsteps,
        key_per_replica=False,
        donate=False,
        **options,
    )
    state = step.place(lbopt.TrainState.create({"w": jnp.ones(())}, {}, tx, seed))
    for _ in range(num_steps):
        state, metrics = jax.block_until_ready(
            step(state, {"x": np.ones((16, 12), np.float32), "place": np.arange(16)})
        )
    return np.asarray(metrics["drawn"][0])


@pytest.mark.parametrize("num_microsteps", [1, 2])
def test_examples_draw_the_same_on_any_number_of_devices_and_backend(num_microsteps):
    """The draws are equal bit for bit if the number of microsteps is the same."""
    one = drawn(1, "jit", num_microsteps)
    assert len(np.unique(one, axis=0)) == 16, "every example draws for itself"
    layouts = (
        [(2, "jit"), (4, "jit"), (2, "pmap"), (4, "pmap")]
        if num_microsteps == 1
        else [(4, "jit"), (4, "pmap")]
    )
    for num_devices, backend in layouts:
        np.testing.assert_array_equal(drawn(num_devices, backend, num_microsteps), one)


@pytest.mark.everyday("by example-2", "at once-1")
@pytest.mark.parametrize("num_microsteps", [1, 2])
@pytest.mark.parametrize(
    "draw", [None, lambda x, rng: jax.random.uniform(rng, x.shape)], ids=["by example", "at once"]
)
def test_a_replica_draws_the_same_wherever_it_is(draw, num_microsteps):
    """With an aggregator, which sees replicas, draws are equal bit for bit.

    This includes draws that are made for all of a replica's examples at once.
    """
    one, *others = (
        drawn(
            devices,
            backend,
            num_microsteps,
            draw=draw,
            reduction=lbopt.Aggregate(plain_mean(), 4 // devices),
        )
        for devices, backend in ((1, "jit"), (2, "jit"), (4, "jit"), (4, "pmap"))
    )
    assert len(np.unique(one, axis=0)) == 16, "every example draws for itself"
    for other in others:
        np.testing.assert_array_equal(other, one)


def test_steps_and_seeds_draw_differently_example_by_example():
    one = drawn(4, "pmap")
    for other in (
        drawn(4, "pmap", num_steps=2),
        drawn(4, "pmap", seed=1),
        drawn(4, "pmap", num_microsteps=2),
    ):
        assert np.mean(np.all(one == other, axis=1)) < 0.2


def bert_problem():
    """Return a model and a batch: one BERT layer with dropout everywhere."""
    module = Bert(
        vocab_size=30,
        num_layers=1,
        width=8,
        num_heads=2,
        inner_width=8,
        max_length=6,
        head="question_answering",
        dropout_rate=0.2,
        attention_dropout_rate=0.2,
    )
    rng = np.random.default_rng(0)
    labels = {"start_logits": rng.integers(0, 6, 8), "end_logits": rng.integers(0, 6, 8)}
    return module, {"inputs": {"input_ids": rng.integers(0, 30, (8, 6))}, "labels": labels}


def efficientnet_problem():
    """Return an EfficientNet with grouped batch norm and stochastic depth, and a batch."""
    module = EfficientNet(
        stages=(Stage(3, 2, 1, 8, 2),),
        stem_width=8,
        head_width=8,
        num_classes=5,
        stochastic_depth_rate=0.8,
        batch_norm_scope="examples:8",
    )
    rng = np.random.default_rng(0)
    images = np.float32(rng.normal(size=(16, 4, 4, 3)) + rng.normal(size=(16, 1, 1, 1)))
    return module, {"inputs": images, "labels": rng.integers(0, 5, 16)}


def folded_problem():
    """Return a model whose examples four devices fold into channels, and one does not."""
    module, batch = efficientnet_problem()
    return module, batch, module.clone(fold_examples=4)


@pytest.mark.everyday("bert_problem")
@pytest.mark.parametrize("problem", [bert_problem, efficientnet_problem, folded_problem])
def test_models_that_draw_train_the_same_on_one_and_four_devices_under_both_backends(
    problem, trajectory, relative_gap
):
    """After three steps parameters agree to 1e-5 of their movement, batch statistics to 1e-5."""
    module, batch, *spread = problem()
    models = {1: from_linen(module), 4: from_linen(*spread or [module])}

    def loss_fn(model, params, model_state, batch, rng):
        outputs, model_state = model.apply(params, model_state, batch["inputs"], True, rng)
        each = jax.tree.map(
            lambda logits, labels: jnp.mean(
                optax.softmax_cross_entropy_with_integer_labels(logits, labels)
            ),
            outputs,
            batch["labels"],
        )
        return sum(jax.tree.leaves(each)), (model_state, {})

    tx = optax.sgd(0.1)
    shapes, of_state = jax.eval_shape(models[1].init, jax.random.key(0), batch["inputs"])
    rng = np.random.default_rng(1)
    params = jax.tree.map(lambda leaf: np.float32(rng.normal(0.1, 0.3, leaf.shape)), shapes)
    model_state = jax.tree.map(lambda leaf: np.ones(leaf.shape, np.float32), of_state)
    start = lbopt.TrainState.create(params, model_state, tx, 5)

    def run(num_devices, backend):
        mesh = lbopt.make_mesh(num_devices)
        loss = functools.partial(loss_fn, models[num_devices])
        step = lbopt.make_train_step(loss, tx, mesh, backend, key_per_replica=False, donate=False)
        return step, trajectory(step, start, [batch] * 3)

    step, one = run(1, "jit")
    redrawn = trajectory(step, start.replace(rng=start.rng + 1), [batch] * 3)
    assert relative_gap(one[0], one[-1], redrawn[-1]) > 1e-3, "draws matter"
    for num_devices, backend in ((4, "jit"), (4, "pmap")):
        _, other = run(num_devices, backend)
        assert relative_gap(one[0], one[-1], other[-1]) <= 1e-5
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6),
            one[-1].model_state,
            other[-1].model_state,
        )
