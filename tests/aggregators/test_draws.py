"""Aggregators draw anew for every step, replica, leaf and shard wherever that is promised."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import lbopt
from lbopt.aggregators import as_optax, randk

REPLICAS = 8
VALUES = np.random.default_rng(0).uniform(0.5, 1, 64).astype(np.float32)
SAME = {name: np.tile(VALUES, (REPLICAS, 1)) for name in ("first", "second")}
"""Equal gradients on all replicas and in both leaves."""


def two_steps(aggregator):
    """Return {leaf: update} of two steps."""
    params = {name: jnp.zeros(64) for name in SAME}
    tx = as_optax(aggregator, REPLICAS)
    (one, _), state = tx.update(SAME, tx.init(params), params)
    (two, _), _ = tx.update(SAME, state, params)
    return [jax.tree.map(np.asarray, updates) for updates in (one, two)]


def places(update):
    return frozenset(np.flatnonzero(update))


def test_randk_draws_for_every_step_and_leaf():
    said = two_steps(lbopt.econtrol(randk(0.25), eta=0.0))
    first = {name: places(x) for name, x in said[0].items()}
    second = {name: places(said[1][name] - said[0][name]) for name in SAME}
    assert len({first["first"], first["second"], second["first"], second["second"]}) == 4
    assert {len(drawn) for drawn in first.values()} == {16}


def test_stochastic_rounding_draws_for_every_step_and_leaf():
    said = two_steps(lbopt.aps(5, 2, rounding="stochastic"))
    assert len({x.tobytes() for updates in said for x in updates.values()}) == 4
    alike = two_steps(lbopt.aps(5, 2))
    assert len({x.tobytes() for updates in alike for x in updates.values()}) == 1


def test_stochastic_rounding_draws_for_every_replica():
    """With equal draws, a number and its opposite would round to opposites and sum to zero."""
    rows = {"w": np.stack([VALUES, -VALUES] * (REPLICAS // 2))}
    params = {"w": jnp.zeros(64)}
    for rounding, some in (("stochastic", True), ("nearest", False)):
        tx = as_optax(lbopt.aps(5, 2, rounding=rounding), REPLICAS)
        (updates, _), _ = tx.update(rows, tx.init(params), params)
        assert np.any(updates["w"]) == some


@pytest.mark.parametrize(
    "aggregator",
    [lbopt.ef(randk(0.25)), lbopt.aps(5, 2, rounding="stochastic")],
    ids=["randk", "aps"],
)
def test_parts_that_are_sent_apart_draw_apart(aggregator):
    """Two devices each send one half of a leaf with two equal halves."""
    values = np.tile(VALUES, 2)

    def loss_fn(params, model_state, batch, rng):
        del rng
        return jnp.sum(params["w"] * values) * batch["x"].mean(), (model_state, {})

    tx = optax.sgd(1.0)
    step = lbopt.make_train_step(
        loss_fn, tx, lbopt.make_mesh(4), reduction=lbopt.Aggregate(aggregator, over=2)
    )
    state = step.place(lbopt.TrainState.create({"w": jnp.zeros(128)}, {}, tx, 0))
    state, _ = jax.block_until_ready(step(state, {"x": np.ones(4, np.float32)}))
    halves = np.split(np.asarray(state.params["w"]), 2)
    assert not np.array_equal(*halves)
    assert all(np.any(half) for half in halves)
