"""One device, four under jit, four under pmap, and gradient accumulation train equally.

Tolerance: the largest difference of any parameter is at most 1e-5 of the movement ||w_t - w_0||,
after one update and after ten. The runs differ only in the order of fp32 sums (relative rounding
6e-8 each, on parameters a few times as large as the movement). LAMB's direction g / (|g| + 1e-6)
magnifies that for the few gradient entries that are near 1e-6. The tests
`test_the_tolerance_sees_...` show the size of a real difference.
"""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import lbopt
from lbopt.aggregators import plain_mean
from lbopt.models import CNN, LSTMClassifier

TOLERANCE = 1e-5
OPTIMIZERS = {
    "lamb": lambda: lbopt.lamb(0.02, weight_decay=0.01),
    "lars": lambda: lbopt.lars(0.1, weight_decay=1e-4, trust_coefficient=0.2),
    "optax.sgd": lambda: optax.sgd(
        0.1, momentum=0.9
    ),  # unlike the others it depends on the gradient's scale
}
LAYOUTS = [(4, "jit"), (4, "pmap")]
MICROSTEPS = 4


class Perceptron(nn.Module):
    """Two dense layers: the cheapest model without batch norm."""

    @nn.compact
    def __call__(self, images, train):
        x = images.reshape(images.shape[0], -1)
        x = nn.tanh(nn.Dense(16)(x))
        return nn.Dense(10)(x)


def small_cnn(scope="global"):
    return CNN(widths=(8,), hidden=16, batch_norm_scope=scope)


def make_step(loss_fn, tx, num_devices, backend, **options):
    return lbopt.make_train_step(loss_fn, tx, lbopt.make_mesh(num_devices), backend, **options)


def assert_same(relative_gap, one, other):
    assert relative_gap(one[0], one[1], other[1]) <= TOLERANCE
    assert relative_gap(one[0], one[-1], other[-1]) <= TOLERANCE


@pytest.mark.everyday("lamb")
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_cnn_with_global_batch_norm_trains_the_same_on_one_and_four_devices(
    optimizer, problem, trajectory, relative_gap, batches
):
    loss_fn, create = problem(small_cnn())
    tx = OPTIMIZERS[optimizer]()
    one = trajectory(make_step(loss_fn, tx, 1, "jit"), create(tx), batches)
    for num_devices, backend in LAYOUTS:
        other = trajectory(make_step(loss_fn, tx, num_devices, backend), create(tx), batches)
        assert_same(relative_gap, one, other)


@pytest.mark.everyday("lamb")
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_accumulation_is_the_whole_batch_without_batch_norm(
    optimizer, problem, trajectory, relative_gap, batches
):
    loss_fn, create = problem(Perceptron())
    tx = OPTIMIZERS[optimizer]()
    whole = trajectory(make_step(loss_fn, tx, 1, "jit"), create(tx), batches)
    for num_devices, backend in LAYOUTS:
        parts = trajectory(
            make_step(loss_fn, tx, num_devices, backend, num_microsteps=MICROSTEPS),
            create(tx),
            batches,
        )
        assert_same(relative_gap, whole, parts)


@pytest.mark.slow
def test_accumulation_of_an_lstm_is_the_whole_batch(problem, trajectory, relative_gap, batches):
    loss_fn, create = problem(LSTMClassifier(hidden=8))
    tx = OPTIMIZERS["lamb"]()
    batches = [
        batch | {"image": batch["image"][:, 2:5]} for batch in batches
    ]  # three rows compile faster than eight
    whole = trajectory(make_step(loss_fn, tx, 1, "jit"), create(tx), batches)
    parts = trajectory(
        make_step(loss_fn, tx, 4, "jit", num_microsteps=MICROSTEPS), create(tx), batches
    )
    assert_same(relative_gap, whole, parts)


def dealt(batch):
    """Put the examples of microstep 0 first, then those of microstep 1, and so on."""
    size = len(batch["label"])
    order = np.concatenate([np.arange(part, size, MICROSTEPS) for part in range(MICROSTEPS)])
    return {name: array[order] for name, array in batch.items()}


def test_microsteps_with_batch_norm_are_groups_of_the_dealt_batch(
    problem, trajectory, relative_gap, batches
):
    """Example i belongs to microstep i mod 4 on any number of devices.

    Running statistics are the mean over microsteps.
    """
    grouped_loss, create = problem(small_cnn(f"examples:{len(batches[0]['label']) // MICROSTEPS}"))
    global_loss, _ = problem(small_cnn())
    tx = OPTIMIZERS["lamb"]()
    groups = trajectory(
        make_step(grouped_loss, tx, 1, "jit"), create(tx), [dealt(batch) for batch in batches]
    )
    for num_devices, backend in [(1, "jit"), *LAYOUTS]:
        parts = trajectory(
            make_step(global_loss, tx, num_devices, backend, num_microsteps=MICROSTEPS),
            create(tx),
            batches,
        )
        assert_same(relative_gap, groups, parts)
        for group, part in zip(
            jax.tree.leaves(groups[1].model_state),
            jax.tree.leaves(parts[1].model_state),
            strict=True,
        ):
            np.testing.assert_allclose(part, group, rtol=1e-5, atol=1e-6)


def test_the_tolerance_sees_local_batch_norm(problem, trajectory, relative_gap, batches):
    tx = OPTIMIZERS["lamb"]()
    (global_loss, create) = problem(small_cnn())
    (local_loss, _) = problem(small_cnn("local"))
    one = trajectory(make_step(global_loss, tx, 1, "jit"), create(tx), batches[:1])
    local = trajectory(make_step(local_loss, tx, 4, "jit"), create(tx), batches[:1])
    assert relative_gap(one[0], one[1], local[1]) > 100 * TOLERANCE


def test_the_tolerance_sees_one_missing_example(problem, trajectory, relative_gap, batches):
    tx = OPTIMIZERS["optax.sgd"]()
    loss_fn, create = problem(Perceptron())
    twice = {name: np.concatenate([array[:1], array[:-1]]) for name, array in batches[0].items()}
    step = make_step(loss_fn, tx, 1, "jit")
    one, other = (trajectory(step, create(tx), [batch]) for batch in (batches[0], twice))
    assert relative_gap(one[0], one[1], other[1]) > 100 * TOLERANCE


@pytest.mark.parametrize(
    ("backend", "num_microsteps"), [("jit", 1), ("jit", 2), ("pmap", 1), ("pmap", 2)]
)
def test_metrics_are_sums_over_the_global_batch(backend, num_microsteps, problem, batches):
    loss_fn, create = problem(Perceptron())
    tx = optax.sgd(0.1)
    state = create(tx)
    batch = batches[0]
    params = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), state.params)
    x = batch["image"].reshape(len(batch["label"]), -1).astype(np.float64)
    x = np.tanh(x @ params["Dense_0"]["kernel"] + params["Dense_0"]["bias"])
    logits = x @ params["Dense_1"]["kernel"] + params["Dense_1"]["bias"]
    losses = np.log(np.sum(np.exp(logits), -1)) - logits[np.arange(len(logits)), batch["label"]]

    _, metrics = jax.block_until_ready(
        make_step(loss_fn, tx, 4, backend, num_microsteps=num_microsteps)(state, batch)
    )
    assert set(metrics) == {"loss", "accuracy"}
    np.testing.assert_allclose(metrics["loss"], (losses.sum(), 32), rtol=1e-5)
    np.testing.assert_array_equal(
        metrics["accuracy"], (np.sum(logits.argmax(-1) == batch["label"]), 32)
    )


@pytest.mark.parametrize(("backend", "num_microsteps"), [("jit", 2), ("pmap", 1), ("pmap", 2)])
def test_narrow_weights_do_not_wrap(backend, num_microsteps):
    def counted(batch):
        x = batch["x"]
        return {"n": (x.sum(dtype=jnp.bfloat16), x.sum(dtype=jnp.uint8)), "any": (x.any(), True)}

    def loss_fn(params, model_state, batch, rng):
        return params["w"], (model_state, counted(batch))

    mesh = lbopt.make_mesh(4)
    batch = {"x": np.full((8, 25), 1, np.uint8)}
    state = lbopt.TrainState.create({"w": jnp.ones(())}, {}, optax.sgd(0.1))
    tx = optax.sgd(0.1)
    step = lbopt.make_train_step(loss_fn, tx, mesh, backend, num_microsteps=num_microsteps)
    _, metrics = jax.block_until_ready(step(state, batch))
    parts = num_microsteps * (4 if backend == "pmap" else 1)
    assert metrics == {"n": (200, 200), "any": (parts, parts)}


def test_pjit_is_jit(problem, batches):
    loss_fn, create = problem(Perceptron())
    tx = OPTIMIZERS["lamb"]()
    results = [
        jax.block_until_ready(make_step(loss_fn, tx, 4, backend)(create(tx), batches[0]))
        for backend in ("jit", "pjit")
    ]
    jax.tree.map(np.testing.assert_array_equal, *results)


@pytest.mark.parametrize(("num_devices", "backend"), [(1, "jit"), *LAYOUTS])
def test_the_step_is_a_pure_function(num_devices, backend, problem, batches):
    loss_fn, create = problem(Perceptron())
    tx = OPTIMIZERS["lamb"]()
    step = make_step(loss_fn, tx, num_devices, backend, donate=False)
    state = create(tx)
    first, _ = jax.block_until_ready(step(state, batches[0]))
    again = [jax.block_until_ready(step(state, batches[0]))[0] for _ in range(3)]
    for repeat in again:
        jax.tree.map(np.testing.assert_array_equal, first, repeat)
    assert int(first.step) == int(state.step) + 1 == 1
    np.testing.assert_array_equal(first.rng, state.rng)
    assert any(
        jnp.any(a != b)
        for a, b in zip(jax.tree.leaves(first.params), jax.tree.leaves(state.params), strict=True)
    )


@pytest.mark.parametrize(
    "options",
    [
        {"num_microsteps": 2},
        {"backend": "pmap", "reduction": lbopt.AllReduce(jnp.float32)},
        {"reduction": lbopt.ReduceScatter(jnp.float32)},
        {"reduction": plain_mean(), "clip": lbopt.GradientClip(1.0)},
        {"clip": lbopt.GradientClip(1.0, "mean"), "num_microsteps": 2, "measure_noise": True},
    ],
    ids=["microsteps", "pmap in fp32", "scattered", "aggregated", "measured"],
)
def test_complex_parameters_train_as_their_two_parts_do(options):
    def draw(seed, *shape):
        return jax.random.normal(jax.random.key(seed), shape, jnp.complex64)

    batch = {"x": draw(0, 16, 4), "y": draw(1, 16, 4)}

    def loss_of(weights, batch):
        apart = batch["x"] @ weights - batch["y"]
        loss = jnp.mean(jnp.square(apart.real) + jnp.square(apart.imag))
        return loss, ({}, {"loss": (loss, jnp.ones(()))})

    whole = {"w": draw(2, 4, 4)}
    pair = {"re": whole["w"].real, "im": whole["w"].imag}
    forms = [
        (whole, lambda params, _, batch, rng: loss_of(params["w"], batch)),
        (
            pair,
            lambda params, _, batch, rng: loss_of(
                jax.lax.complex(params["re"], params["im"]), batch
            ),
        ),
    ]
    ends = []
    losses_seen = []
    tracks = lbopt.track_noise_scale(16) if "measure_noise" in options else optax.identity()
    tx = optax.chain(tracks, optax.sgd(0.05, momentum=0.9))
    for params, loss_fn in forms:
        step = make_step(loss_fn, tx, 4, **{"backend": "jit", **options})
        state = step.place(lbopt.TrainState.create(params, {}, tx, seed=0))
        for _ in range(10):
            state, metrics = jax.block_until_ready(step(state, batch))
            losses_seen.append(float(metrics["loss"][0] / metrics["loss"][1]))
        ends.append(jax.tree.map(np.asarray, state.params))
    np.testing.assert_allclose(
        ends[0]["w"], ends[1]["re"] + 1j * ends[1]["im"], rtol=1e-5, atol=1e-6
    )
    assert losses_seen[9] < 0.7 * losses_seen[0]
