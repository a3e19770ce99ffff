"""PowerSGD against its published code in NumPy, and its exact properties."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from refusal import refused

import lbopt
from lbopt.aggregators import as_optax
from lbopt.stacks import stacked_paths

STEPS = 7


def by_hand(grads, left, right):
    """Return the updates of one matrix from [replicas, m, n] of each step.

    The order is that of epfml/powersgd: float64, QR, separate errors.
    """
    factors = {"left": left.astype(np.float64), "right": right.astype(np.float64)}
    errors = np.zeros(grads[0].shape)
    updates = []
    for step, rows in enumerate(grads):
        matrices = rows.astype(np.float64) + errors
        seen = matrices if step % 2 == 0 else matrices.transpose(0, 2, 1)
        ours, theirs = ("left", "right") if step % 2 == 0 else ("right", "left")
        factors[ours] = np.linalg.qr(factors[ours])[0]
        sides = [matrix.T @ factors[ours] for matrix in seen]
        factors[theirs] = np.mean(sides, 0)
        left = np.stack(
            [matrix - factors[ours] @ side.T for matrix, side in zip(seen, sides, strict=True)]
        )
        low = factors[ours] @ factors[theirs].T
        errors, low = (left, low) if step % 2 == 0 else (left.transpose(0, 2, 1), low.T)
        updates.append(low)
    return updates, errors


@pytest.mark.parametrize("devices", [1, 4])
def test_equals_the_published_code(devices, gradients, params, run):
    aggregator = lbopt.powersgd(2, start=0)
    first = aggregator.init(params, 8).shared
    grads = gradients(STEPS)
    ours, _, state = run(aggregator, grads, devices)

    names = ["body/bias", "body/kernel", "head/kernel"]
    for leaf, name in enumerate(names):
        module, kind = name.split("/")
        rows = [one[module][kind] for one in grads]
        got = [one[module][kind] for one in ours]

        if kind == "bias":
            wanted = [row.mean(0) for row in rows]
            errors = None
        else:
            wanted, errors = by_hand(
                rows, np.asarray(first.left[leaf])[0], np.asarray(first.right[leaf])[0]
            )

        for mine, theirs in zip(got, wanted, strict=True):
            np.testing.assert_allclose(mine, theirs, rtol=1e-4, atol=2e-5, err_msg=name)
        if errors is not None:
            np.testing.assert_allclose(state.local[leaf][:, 0], errors, rtol=1e-4, atol=5e-5)


def test_where_replicas_differ_for_ever_the_memory_stays_small():
    """The memory would grow if replicas did not subtract the reconstruction of the mean."""
    steady = jax.random.normal(jax.random.key(0), (4, 12, 16))
    tx = lbopt.aggregate(lbopt.powersgd(2, start=0), optax.identity(), 4)
    params = {"kernel": jnp.zeros((12, 16))}

    def step(state, key):
        rows = {"kernel": steady + 0.5 * jax.random.normal(key, steady.shape)}
        update, state = tx.update(rows, state, params)
        return state, (jnp.abs(state[0].local[0]).max(), rows["kernel"].mean(0) - update["kernel"])

    state, (largest, left) = jax.lax.scan(
        step, tx.init(params), jax.random.split(jax.random.key(1), 3000)
    )
    assert largest[2000:].max() < 1.5 * largest[500:1500].max()
    # The applied update and the remainder still add up to the mean.
    np.testing.assert_allclose(left.sum(0), state[0].local[0].mean(0)[0], atol=2e-2)


def test_a_gradient_of_low_rank_is_exact_after_one_sweep(run, params, largest_gap):
    rng = np.random.default_rng(0)

    def low(p):
        return rng.normal(size=(p.shape[0], 2)) @ rng.normal(size=(2, *p.shape[1:]))

    # The same low rank in the mean and in every replica: column spaces are shared.
    rows = jax.tree.map(
        lambda p: (
            np.ones((8, *p.shape)) if p.ndim == 1 else rng.uniform(0.5, 2, (8, 1, 1)) * low(p)[None]
        ).astype(np.float32),
        params,
    )
    aggregator = lbopt.powersgd(2, start=0)
    mean = jax.tree.map(lambda g: g.mean(0), rows)
    one, _, after_one = run(aggregator, [rows])
    assert largest_gap(one[0], mean) > 0.1
    # A sweep is a step on each side. The second step also sends the remainder of the first, so that
    # nothing of two gradients is left.
    two, _, after_two = run(aggregator, [rows] * 2)
    sent = jax.tree.map(lambda *x: np.sum(x, 0), *two)
    assert largest_gap(sent, jax.tree.map(lambda g: 2 * g, mean)) < 1e-4

    def left(state):
        return max(float(np.abs(x.mean(0)).max()) for x in jax.tree.leaves(state.local))

    assert left(after_one) > 0.1
    assert left(after_two) < 1e-4


def test_what_was_applied_and_the_change_of_the_error_make_the_mean(run, gradients):
    grads = gradients(STEPS)
    updates, _, state = run(lbopt.powersgd(1, start=2), grads)
    for leaf, (module, kind) in enumerate(
        [("body", "bias"), ("body", "kernel"), ("head", "kernel")]
    ):
        applied = np.sum([one[module][kind] for one in updates], 0, dtype=np.float64)
        meant = np.sum([one[module][kind].mean(0, dtype=np.float64) for one in grads], 0)
        left = 0 if kind == "bias" else state.local[leaf].mean(0, dtype=np.float64)[0]
        np.testing.assert_allclose(applied + left, meant, atol=1e-5)


def test_the_first_steps_are_whole(run, gradients, largest_gap):
    grads = gradients(3)
    updates, _, state = run(lbopt.powersgd(1, start=2), grads)
    for one, g in zip(updates[:2], grads, strict=False):
        assert largest_gap(one, jax.tree.map(lambda x: x.mean(0), g)) < 1e-6
    assert largest_gap(updates[2], jax.tree.map(lambda x: x.mean(0), grads[2])) > 0.1
    assert state.shared.count == 3


def test_after_an_odd_number_of_whole_steps_it_begins_as_it_would_at_once(
    run, gradients, largest_gap
):
    """The sweep starts with the same side."""
    first, *grads = gradients(4)
    late, _, _ = run(lbopt.powersgd(1, start=1), [first, *grads])
    early, _, _ = run(lbopt.powersgd(1, start=0), grads)
    assert largest_gap(late[1:], early) < 1e-5


def test_rank_is_not_lost_when_a_gradient_vanishes(run, gradients, largest_gap):
    grads = gradients(6)
    zero = jax.tree.map(np.zeros_like, grads[0])
    updates, _, _ = run(lbopt.powersgd(2, start=0), [zero, zero, *grads])
    assert largest_gap(updates[0], jax.tree.map(lambda x: x[0], zero)) == 0
    assert all(np.linalg.matrix_rank(one["body"]["kernel"], tol=1e-3) == 2 for one in updates[4:])


def test_layers_of_a_stack_are_matrices_of_their_own():
    rng = np.random.default_rng(0)
    rows = rng.normal(size=(8, 3, 12, 10)).astype(np.float32)
    params = {"w": np.zeros((3, 12, 10), np.float32)}
    aggregator = lbopt.powersgd(2, start=0, stacked=stacked_paths("^w"))
    tx = as_optax(aggregator, 8)
    first = tx.init(params)
    (updates, _), _ = tx.update({"w": rows}, first, params)
    for layer in range(3):
        wanted, _ = by_hand(
            [rows[:, layer]],
            np.asarray(first.shared.left[0])[layer],
            np.asarray(first.shared.right[0])[layer],
        )
        np.testing.assert_allclose(updates["w"][layer], wanted[0], rtol=1e-4, atol=1e-5)


def test_bytes_do_not_depend_on_the_replicas_but_for_the_ring():
    params = {
        "w": np.zeros((1000, 500), np.float32),
        "b": np.zeros(500, np.float32),
        "s": np.zeros((3, 2), np.float32),
    }
    aggregator = lbopt.powersgd(4)
    for replicas in (8, 1024):
        sent, ring = aggregator.wire_bytes(params, replicas)
        # Compression would not make the small matrix half as large.
        assert sent == 2 * (replicas - 1) / replicas * 4 * (4 * (1000 + 500) / 2 + 500 + 6)
        assert ring == 2 * (replicas - 1) / replicas * 4 * (500_000 + 500 + 6)


@pytest.mark.parametrize(
    ("wrong", "field", "value"),
    [
        ({"rank": 0}, "rank", 0),
        ({"rank": 1.5}, "rank", 1.5),
        ({"rank": 1, "start": -1}, "start", -1),
        ({"rank": 1, "min_rate": 0}, "min_rate", 0),
    ],
)
def test_refusals(wrong, field, value):
    with refused(field, value, "value"):
        lbopt.powersgd(**wrong)
