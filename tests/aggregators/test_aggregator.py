"""The ways into an Optax chain, and properties that all aggregators share."""

import re
import sys
import types
import warnings

import boxes
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType
from refusal import names_in, refused

import lbopt
from lbopt.aggregators import _aggregator, cast, randk, sign, topk
from lbopt.stacks import stacked_paths

LABELS = {"body": "^body/", "head": "^head/"}
ALL = {
    "mean": _aggregator.plain_mean(),
    "agvm": lbopt.agvm(LABELS, "body", 1, 0),
    "aps": lbopt.aps(4, 3),
    "aps-stochastic": lbopt.aps(5, 2, rounding="stochastic", overflow="saturate"),
    "ef": lbopt.ef(topk(0.2)),
    "ef21": lbopt.ef21(sign(), 0.5),
    "econtrol": lbopt.econtrol(randk(0.3)),
    "cast": lbopt.ef(cast(5, 2)),
    "powersgd": lbopt.powersgd(2, start=1),
}


def behind(name):
    return (
        optax.chain(lbopt.lamb(0.01), lbopt.scale_by_agvm(LABELS))
        if name == "agvm"
        else lbopt.lamb(0.01)
    )


@pytest.mark.everyday("mean", "agvm", "ef21")
@pytest.mark.parametrize("name", ALL)
def test_one_device_and_four_agree(name, gradients, run, largest_gap):
    grads = gradients(4)
    alone = run(ALL[name], grads, 1)
    spread = run(ALL[name], grads, 4)
    assert largest_gap(alone[0], spread[0]) < 2e-6
    assert largest_gap(alone[2], spread[2]) < 5e-6


def squaring_qr(x):
    """Decompose as a device may, by products of columns; at 1e20 they overflow fp32."""
    lower = jnp.linalg.cholesky(jnp.swapaxes(x, -1, -2) @ x)
    q = jnp.swapaxes(
        jax.lax.linalg.triangular_solve(lower, jnp.swapaxes(x, -1, -2), left_side=True, lower=True),
        -1,
        -2,
    )
    return types.SimpleNamespace(Q=q)


@pytest.mark.parametrize("name", ["agvm", "aps", "ef21", "cast", "powersgd"])
def test_gradients_of_1e20_and_of_1e_minus_25_are_what_their_multiples_are(
    name, gradients, params, monkeypatch
):
    """Scaling by a power of two changes no digit, and no square leaves the range of fp32."""
    if name == "powersgd":
        monkeypatch.setattr(jnp.linalg, "qr", squaring_qr)
    tx = _aggregator.as_optax(ALL[name], 8)
    grads = gradients(3)
    update = jax.jit(tx.update)

    def walk(factor):
        state = tx.init(params)
        moved = []
        for one in grads:
            (out, aux), state = update(
                jax.tree.map(lambda x: x * np.float32(factor), one), state, params
            )
            moved.append(jax.tree.map(lambda x: np.asarray(x, np.float64) / factor, out))
        return moved, {key: aux[key] for key in aux if key != "agvm_modules"}

    expected = jax.tree.leaves(walk(1.0))
    for factor in (2.0**66, 2.0**-83):
        for ours, plain in zip(jax.tree.leaves(walk(factor)), expected, strict=True):
            np.testing.assert_allclose(ours, plain, rtol=2e-6, atol=2e-6)


def test_agvm_of_adam_measures_gradients_of_1e22(gradients, params):
    tx = _aggregator.as_optax(lbopt.agvm(LABELS, "body", 1, 0, adam_b2=0.9), 8)
    rows = jax.tree.map(lambda x: x * np.float32(1e22), gradients(1)[0])
    (_, aux), _ = tx.update(rows, tx.init(params), params, second_moment=params)
    assert all(0.01 < phi < 0.9 for phi in aux["agvm_phi"].values())


RANKED = {
    **ALL,
    "agvm-adam": lbopt.agvm(LABELS, "body", 1, 0, adam_b2=0.9),
    "aps-kahan": lbopt.aps(5, 2, "kahan", stacked=stacked_paths("kernel")),
    "econtrol-sign": lbopt.econtrol(sign()),
    "powersgd-many": lbopt.powersgd(10, start=0),
}


@pytest.mark.parametrize("x64", [False, True], ids=["fp32", "x64"])
@pytest.mark.parametrize("name", RANKED)
def test_nothing_is_promoted_implicitly(name, x64, gradients, params):
    tx = _aggregator.as_optax(RANKED[name], 8)
    rows = gradients(1)[0]

    def step(params, state, rows):
        return tx.update(rows, state, params, second_moment=params)

    kinds = lambda tree: [(x.shape, x.dtype) for x in jax.tree.leaves(tree)]  # noqa: E731
    with (
        jax.numpy_rank_promotion("raise"),
        jax.numpy_dtype_promotion("strict"),
        jax.enable_x64(x64),
    ):
        state = jax.eval_shape(tx.init, params)
        (updates, _), after = jax.eval_shape(step, params, state, rows)
        assert kinds((updates, after)) == kinds((params, state))


def test_agvm_starts_without_nan(params):
    """JAX's search for the first NaN (jax_debug_nans) would stop there."""
    with jax.debug_nans(True):
        state = lbopt.aggregate(ALL["agvm"], behind("agvm"), 8).init(params)
    leaves = jax.tree.leaves(state)
    assert len({leaf.unsafe_buffer_pointer() for leaf in leaves}) == len(
        leaves
    )  # no buffer is donated twice


@pytest.mark.parametrize("name", ALL)
def test_state_keeps_its_shapes_and_dtypes(name, gradients, params, run):
    init = lambda: _aggregator.as_optax(ALL[name], 8).init(params)  # noqa: E731
    first = init()
    _, _, last = run(ALL[name], gradients(2))
    assert jax.tree.structure(first) == jax.tree.structure(last)
    shapes = lambda tree: [(x.shape, x.dtype) for x in jax.tree.leaves(tree)]  # noqa: E731
    assert shapes(first) == shapes(last) == shapes(jax.eval_shape(init))
    assert all(x.shape[0] == 8 for x in jax.tree.leaves(last.local))


@pytest.mark.parametrize("name", ALL)
def test_no_array_gets_more_axes_from_the_parameters_containers_than_it_has(
    name, gradients, params
):
    tx = _aggregator.as_optax(ALL[name], 8)

    for kind in boxes.KINDS:
        inside = boxes.boxed(kind, params)
        state = jax.eval_shape(tx.init, inside)
        boxes.check_ranks(kind, state)
        rows = jax.tree.map(lambda p: jax.ShapeDtypeStruct((8, *p.shape), p.dtype), inside)
        extra = {"second_moment": inside} if name == "agvm" else {}
        after = jax.eval_shape(tx.update, rows, state, inside, **extra)[1]
        assert (jax.tree.leaves(after), jax.tree.structure(after)) == (
            jax.tree.leaves(state),
            jax.tree.structure(state),
        )

    mapped = optax.tree_utils.tree_map_params(
        tx,
        lambda leaf, p: leaf.shape == p.shape,
        jax.eval_shape(tx.init, params),
        params,
        transform_non_params=lambda _: None,
    )
    assert all(jax.tree.leaves(mapped))


@pytest.mark.parametrize("name", ["mean", "agvm", "ef", "powersgd"])
def test_with_and_without_the_module_of_optax(name, gradients, params, largest_gap):
    aggregating = pytest.importorskip("optax.experimental.aggregating")  # Optax 0.2.8 and newer
    ours = lbopt.aggregate(ALL[name], behind(name), 8)
    there = _aggregator.as_optax(ALL[name], 8)
    assert isinstance(there, aggregating.Aggregator)
    theirs = aggregating.process(
        optax.identity(), there, optax.with_extra_args_support(behind(name)), True
    )
    found = []
    for tx in (ours, theirs):
        weights = jax.tree.map(lambda p: p + 1.0, params)
        state = tx.init(params)
        update = jax.jit(tx.update)
        for one in gradients(2):
            updates, state = update(one, state, weights)
            weights = optax.apply_updates(weights, updates)
        found.append(weights)
    assert largest_gap(*found) == 0


def test_standing_alone_where_optax_has_no_such_module(monkeypatch, gradients, params):
    monkeypatch.setitem(sys.modules, "optax.experimental", None)
    tx = _aggregator.as_optax(_aggregator.plain_mean(), 8)
    assert type(tx) is optax.GradientTransformationExtraArgs
    (updates, aux), _ = tx.update(gradients(1)[0], tx.init(params), params)
    assert aux == {}
    assert updates["body"]["bias"].shape == (16,)


@pytest.mark.everyday("mean", "agvm", "aps", "ef21", "powersgd")
@pytest.mark.parametrize("name", ALL)
def test_rebuilt_for_other_replicas_it_goes_on(name, gradients, params, run):
    _, _, state = run(ALL[name], gradients(3))
    other = _aggregator.rebuilt_state(jax.tree.map(jnp.asarray, state), 4)
    wanted = jax.eval_shape(lambda: ALL[name].init(params, 4))
    assert [x.shape for x in jax.tree.leaves(other)] == [x.shape for x in jax.tree.leaves(wanted)]
    mean = lambda rows: rows.mean(0)  # noqa: E731
    for was, now in zip(jax.tree.leaves(state.local), jax.tree.leaves(other.local), strict=True):
        np.testing.assert_allclose(mean(now), mean(was), atol=1e-6)
    rows = jax.tree.map(lambda g: g[:4], gradients(1)[0])
    (updates, _), _ = jax.jit(_aggregator.as_optax(ALL[name], 4).update)(rows, other, params)
    assert all(np.all(np.isfinite(x)) for x in jax.tree.leaves(updates))


@pytest.mark.parametrize("name", ["ef", "ef21", "econtrol", "powersgd"])
def test_a_broken_gradient_is_forgotten_if_asked(name, gradients, params, run):
    good = gradients(3)
    broken = jax.tree.map(np.copy, good[0])
    broken["body"]["kernel"][2, 0, 0] = np.nan
    sound = _aggregator.keep_finite(ALL[name])
    with_it, _, state = run(sound, [good[0], broken, *good[1:]])
    without, _, wanted = run(ALL[name], good)
    jax.tree.map(np.testing.assert_array_equal, state.local, wanted.local)
    jax.tree.map(np.testing.assert_array_equal, with_it[-1], without[-1])
    assert all(np.all(np.isnan(x)) for x in jax.tree.leaves(with_it[1]))
    _, _, spoilt = run(ALL[name], [good[0], broken, *good[1:]])
    assert not all(np.all(np.isfinite(x)) for x in jax.tree.leaves(spoilt.local))


def test_a_choice_that_loses_on_the_wire_is_told(params):
    with pytest.warns(UserWarning, match=r"ef\(topk\(0.3\)\) .*\b6\.\d+ kB .*\b8 .*\b2\.\d+ x"):
        _aggregator.warn_if_it_loses(lbopt.ef(topk(0.3)), params, 8)
    with pytest.warns(UserWarning, match=r"ef\(topk\(0.13\)\) .*\b1\.[01]\d* x"):
        _aggregator.warn_if_it_loses(lbopt.ef(topk(0.13)), params, 8)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        _aggregator.warn_if_it_loses(lbopt.ef(topk(0.1)), params, 8)
        _aggregator.warn_if_it_loses(lbopt.agvm(LABELS, "body"), params, 8)


def test_a_second_moment_is_found_in_the_chain_or_missed():
    params = {"kernel": jnp.ones((3, 1))}
    assert _aggregator.second_moment_of(lbopt.lamb(0.1).init(params))["kernel"].shape == (3, 1)
    with refused("opt_state", code="missing"):
        _aggregator.second_moment_of(optax.sgd(0.1).init(params))
    both = optax.chain(
        optax.scale_by_adam(), optax.scale_by_adam(), lbopt.scale_by_agvm({"all": ""})
    )
    tx = lbopt.aggregate(lbopt.agvm({"all": ""}, "all", adam_b2=0.9), both, 2)
    rows = jax.tree.map(lambda p: jnp.stack([p, p]), params)
    tx.update(rows, tx.init(params), params, second_moment=params)
    with refused("opt_state", code="conflict"):
        _aggregator.second_moment_of(both.init(params))


def test_what_is_no_aggregator_is_refused():
    for given in (lbopt.aps, "aps", optax.identity()):
        with refused("aggregator", given, "type"):
            _aggregator.as_optax(given, 4)


def test_replicas_have_to_fit_the_mesh():
    with refused("num_replicas", 6, "value"):
        _aggregator.as_optax(_aggregator.plain_mean(), 6, lbopt.make_mesh(4))
    for mesh in (
        jax.make_mesh((4,), ("data",), (AxisType.Explicit,)),
        jax.make_mesh((2, 2), ("a", "b"), (AxisType.Auto,) * 2),
    ):
        with refused("mesh", mesh, "value"):
            _aggregator.as_optax(_aggregator.plain_mean(), 8, mesh)


def test_gradients_have_to_be_rows(gradients, params):
    tx = lbopt.aggregate(_aggregator.plain_mean(), optax.sgd(0.1), 8)
    state = tx.init(params)
    rows = gradients(1)[0]
    for wrong in (
        params,
        jax.tree.map(lambda g: g[:4], rows),
        jax.tree.map(lambda g: g[..., None], rows),
    ):
        with refused("gradients/body/bias", code="type") as caught:
            tx.update(wrong, state, params)
        assert "(8, 16)" in caught.value.reason
    with refused("gradients/body/bias", code="type") as caught:
        _aggregator.as_optax(_aggregator.plain_mean(), 8).update(params, state[0])
    assert re.findall(r"\(.*?\)", caught.value.reason) == ["(16,)", "(8, ...)"]
    with refused("gradients", code="type") as caught:
        tx.update(rows["body"], state, params)
    assert {"bias", "body/bias", "body/kernel"} <= names_in(caught)
    with refused("params/scale", 1.0, "type"):
        tx.init({"scale": 1.0})


@pytest.mark.parametrize("name", ["agvm", "ef", "econtrol", "powersgd"])
def test_a_state_without_its_type_or_of_others_is_refused(name, gradients, params):
    tx = _aggregator.as_optax(ALL[name], 8)
    rows = gradients(1)[0]
    with refused("opt_state", code="type"):
        tx.update(rows, tx.init(params)._asdict(), params)
    if name != "agvm":  # agvm remembers nothing per replica or parameter
        for other in (
            tx.init(jax.tree.map(lambda p: p[..., :1], params)),
            _aggregator.as_optax(ALL[name], 4).init(params),
        ):
            with refused("opt_state", code="mismatch"):
                tx.update(rows, other, params)


@pytest.mark.parametrize(
    "name",
    ["ef topk", "ef sign", "ef21", "econtrol", "powersgd"],
)
def test_what_the_optimizer_skips_leaves_nothing_behind(name, gradients, params):
    """A skipped spike in the middle of a run leaves the later steps unchanged."""
    aggregator = {
        "ef topk": lbopt.ef(topk(0.2)),
        "ef sign": lbopt.ef(sign()),
        "ef21": lbopt.ef21(randk(0.3), dense_start=True),
        "econtrol": lbopt.econtrol(randk(0.3), dense_start=True),
        "powersgd": lbopt.powersgd(1, start=1),
    }[name]
    inner = lbopt.skip_bad_updates(optax.sgd(0.1), 5, spike_factor=20.0, warmup_updates=4)
    tx = lbopt.aggregate(aggregator, inner, 8)
    update = jax.jit(tx.update)
    grads = gradients(12)
    spike = jax.tree.map(lambda g: 1000 * g, grads[6])

    def end(steps):
        weights = params
        state = tx.init(params)
        for rows in steps:
            updates, state = update(rows, state, weights)
            weights = optax.apply_updates(weights, updates)
        return weights, state

    plain, (memory, _) = end(grads)
    spiked, (after, skips) = end([*grads[:6], spike, *grads[6:]])
    assert int(skips.skipped_spikes) == 1
    jax.tree.map(np.testing.assert_array_equal, (spiked, after), (plain, memory))
    unguarded = lbopt.aggregate(aggregator, optax.sgd(0.1), 8).init(params)[0]
    assert _aggregator.remembered_state(after, unguarded, skips.inner, skips.inner) is after


def test_what_optax_skips_leaves_nothing_behind(gradients, params):
    tx = lbopt.aggregate(lbopt.ef(topk(0.2)), optax.apply_if_finite(optax.sgd(0.1), 3), 8)
    update = jax.jit(tx.update)
    (first, second) = gradients(2)
    _, plain = update(first, tx.init(params), params)
    _, after = update(jax.tree.map(lambda g: jnp.nan * g, second), plain, params)
    assert int(after[1].total_notfinite) == 1
    jax.tree.map(np.testing.assert_array_equal, after[0], plain[0])


def test_updates_that_only_wait_are_remembered(gradients, params):
    """With two accumulated microsteps per update, a skip undoes only the one that updates."""
    inner = lbopt.skip_bad_updates(optax.sgd(0.1), 5, spike_factor=20.0, warmup_updates=1)
    tx = lbopt.aggregate(
        lbopt.ef(topk(0.2)), optax.MultiSteps(inner, 2).gradient_transformation(), 8
    )
    grads = gradients(8)
    grads[5] = jax.tree.map(lambda g: 1000 * g, grads[5])
    state = tx.init(params)
    counts = []
    for rows in grads:
        _, state = jax.jit(tx.update)(rows, state, params)
        counts.append(int(state[0].shared))
    assert int(state[1].inner_opt_state.skipped_spikes) == 1
    assert counts == [1, 2, 3, 4, 5, 5, 6, 7]  # the sixth update is skipped


@pytest.mark.parametrize("name", ALL)
def test_complex_parameters_are_averaged_or_refused_by_name(name):
    params = {"body": {"w": jnp.zeros((4, 3))}, "head": {"w": jnp.zeros(3, jnp.complex64)}}
    tx = lbopt.aggregate(ALL[name], behind(name), 2)
    if name != "mean":
        with refused("params/head/w", code="type"):
            tx.init(params)
        return
    rows = jax.tree.map(
        lambda p: jnp.stack([p + 1, p + 1 + 2 * jnp.asarray(1j, jnp.complex64)]).astype(p.dtype),
        params,
    )
    (updates, _), _ = _aggregator.as_optax(ALL[name], 2).update(
        rows, _aggregator.as_optax(ALL[name], 2).init(params)
    )
    np.testing.assert_array_equal(updates["head"]["w"], [1 + 1j] * 3)
