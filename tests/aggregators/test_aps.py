"""APS against the published algorithm in NumPy, and its exact properties."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from refusal import refused

import lbopt
from lbopt.aggregators import as_optax, cast, topk
from lbopt.aggregators._powers_of_two import ceil_log2, ldexp
from tests.oracles import low_bits

REPLICAS = 8


def updates_of(aggregator, grads, steps):
    """Return the updates of some steps with the same gradients."""
    tx = as_optax(aggregator, REPLICAS)
    params = jax.tree.map(lambda g: g[0], grads)
    state = jax.jit(tx.init)(params)
    update = jax.jit(tx.update)
    found = []
    for _ in range(steps):
        (updates, _), state = update(grads, state, params)
        found.append(updates)
    return found


def summed(aggregator, grads):
    """Return the update of the first step."""
    return updates_of(aggregator, grads, 1)[0]


@pytest.fixture(scope="module")
def grads():
    rng = np.random.default_rng(0)
    return {
        "large": rng.normal(size=(REPLICAS, 40)).astype(np.float32),
        "small": (1e-6 * rng.normal(size=(REPLICAS, 5, 7))).astype(np.float32),
        "tiny": (1e-30 * rng.normal(size=(REPLICAS, 3))).astype(np.float32),
    }


@pytest.mark.everyday(
    "True-kahan-form0",
    "True-kahan-form2",
    "False-kahan-form1",
    "True-same-form1",
    "False-same-form*",
)
@pytest.mark.parametrize("form", [(5, 2), (4, 3), (3, 0), (6, 9)])
@pytest.mark.parametrize("accumulate", ["same", "kahan"])
@pytest.mark.parametrize("shift", [True, False])
def test_equals_the_published_algorithm(form, accumulate, shift, grads):
    ours = summed(lbopt.aps(*form, accumulate, shift, overflow="cpd"), grads)
    for name, rows in grads.items():
        wanted = (
            low_bits.cpd_sum(rows.reshape(REPLICAS, -1), *form, accumulate == "kahan", shift)
            / REPLICAS
        )
        np.testing.assert_array_equal(np.ravel(ours[name]), wanted, err_msg=name)


@pytest.mark.parametrize("form", [(5, 2), (4, 3), (5, 10)])
def test_fp32_sums_are_rounded_twice_in_all(form, grads):
    ours = summed(lbopt.aps(*form), grads)
    top = 2 ** (form[0] - 1) - 1
    for name, rows in grads.items():
        shift = top - int(np.ceil(np.log2(np.abs(rows.astype(np.float64)).max() * REPLICAS)))
        sent = low_bits.rounded(np.ldexp(rows, shift), *form).astype(np.float32)
        total = np.float32(0) * sent[0]
        for one in sent:
            total = total + one
        wanted = np.ldexp(low_bits.rounded(total, *form), -shift) / REPLICAS
        np.testing.assert_array_equal(ours[name], wanted.astype(np.float32), err_msg=name)


def test_with_all_bits_it_is_the_sum(grads):
    ours = summed(lbopt.aps(8, 23), grads)
    for name, rows in grads.items():
        total = np.float32(0) * rows[0]
        for row in rows:
            total = total + row
        np.testing.assert_array_equal(ours[name], total / REPLICAS, err_msg=name)


@pytest.mark.parametrize("accumulate", ["fp32", "same", "kahan"])
def test_powers_of_two_do_not_matter(accumulate, grads):
    aggregator = lbopt.aps(4, 3, accumulate)
    once = summed(aggregator, grads)
    larger = summed(aggregator, jax.tree.map(lambda g: g * np.float32(2**20), grads))
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(a * np.float32(2**20), b), once, larger)


def test_an_all_zero_layer_stays_zero(grads):
    ours = summed(lbopt.aps(), {**grads, "zero": np.zeros((REPLICAS, 4), np.float32)})
    np.testing.assert_array_equal(ours["zero"], 0)
    assert np.all(np.isfinite(ours["large"]))
    assert np.any(ours["large"] != 0)


def test_one_zero_replica_does_not_matter(grads):
    rows = {"w": grads["large"].copy()}
    rows["w"][3] = 0
    assert np.all(np.isfinite(summed(lbopt.aps(), rows)["w"]))


def test_sums_never_overflow_with_the_shift():
    same_everywhere = {"w": np.full((REPLICAS, 3), 1.999, np.float32)}
    for accumulate in ("fp32", "same", "kahan"):
        assert np.all(np.isfinite(summed(lbopt.aps(3, 2, accumulate), same_everywhere)["w"]))
    without = summed(lbopt.aps(3, 2, shift=False), {"w": np.full((REPLICAS, 3), 4.0, np.float32)})
    assert np.all(np.isinf(without["w"]))


@pytest.mark.parametrize(("form", "least", "most"), [((5, 2), 0.05, 0.2), ((4, 3), 0.02, 0.1)])
def test_small_gradients_survive_by_the_shift_alone(form, least, most):
    rows = {"w": (1e-6 * np.random.default_rng(1).normal(size=(REPLICAS, 4000))).astype(np.float32)}
    exact = rows["w"].astype(np.float64).mean(0)

    def error(**options):
        return np.linalg.norm(
            summed(lbopt.aps(*form, "same", **options), rows)["w"] - exact
        ) / np.linalg.norm(exact)

    np.testing.assert_array_equal(summed(lbopt.aps(*form, "same", shift=False), rows)["w"], 0)
    assert least < error() < most


def test_layers_of_a_stack_have_shifts_of_their_own():
    rng = np.random.default_rng(2)
    layers = [
        np.float32(scale) * rng.normal(size=(REPLICAS, 6)).astype(np.float32)
        for scale in (1, 1e-5, 1e-10)
    ]
    stacked = summed(lbopt.aps(4, 3, stacked=lambda name, leaf: 1), {"w": np.stack(layers, 1)})["w"]
    alone = [summed(lbopt.aps(4, 3), {"w": layer})["w"] for layer in layers]
    np.testing.assert_array_equal(stacked, np.stack(alone))
    together = summed(lbopt.aps(4, 3), {"w": np.stack(layers, 1)})["w"]
    assert np.all(together[2] == 0)


def test_stochastic_rounding_draws_anew_at_every_step(grads):
    aggregator = lbopt.aps(5, 2, rounding="stochastic", overflow="saturate")
    many = np.array([updates["large"] for updates in updates_of(aggregator, grads, 39)])
    assert np.any(many[0] != many[1])
    many = many.mean(0)
    exact = grads["large"].mean(0)
    assert np.linalg.norm(many - exact) < 0.5 * np.linalg.norm(
        summed(lbopt.aps(5, 2), grads)["large"] - exact
    )


def test_bytes_on_the_wire():
    params = {"w": np.zeros((100, 10), np.float32), "b": np.zeros(24, np.float32)}
    sent, ring = lbopt.aps(5, 2).wire_bytes(params, 8)
    assert ring == 2 * 7 / 8 * 4 * 1024
    assert sent == 2 * 7 / 8 * (
        1024 + 2 * 4
    )  # one byte per element each way, and one fp32 maximum per layer
    assert lbopt.aps(8, 7, shift=False).wire_bytes(params, 8).ratio == 2


def test_exponents_and_powers_are_exact():
    rng = np.random.default_rng(3)
    x = np.ldexp(rng.uniform(1, 2, 500), rng.integers(-120, 120, 500)).astype(np.float32)
    x = np.concatenate([x, 2.0 ** np.arange(-126, 127)]).astype(np.float32)
    np.testing.assert_array_equal(ceil_log2(jnp.asarray(x)), np.ceil(np.log2(x.astype(np.float64))))
    shift = rng.integers(-5, 5, len(x)).astype(np.int32)
    wanted = np.ldexp(x.astype(np.float64), shift)
    normal = np.abs(wanted) >= np.finfo(np.float32).tiny
    with np.errstate(over="ignore"):
        np.testing.assert_array_equal(
            np.asarray(ldexp(x, shift))[normal], wanted.astype(np.float32)[normal]
        )
    assert ldexp(jnp.float32(2.0**-100), jnp.int32(200)) == 2.0**100


@pytest.mark.parametrize(
    ("field", "value", "code"),
    [
        ("exponent_bits", 1, "value"),
        ("accumulate", "bf16", "choice"),
        ("overflow", "no", "choice"),
        ("rounding", "no", "choice"),
        ("shift", 1, "value"),
    ],
)
def test_refusals(field, value, code):
    with refused(field, value, code):
        lbopt.aps(**{field: value})


@pytest.mark.everyday("same-3", "kahan-2", "kahan-3", "kahan-8")
@pytest.mark.parametrize("replicas", [1, 2, 3, 5, 7, 8])
@pytest.mark.parametrize("accumulate", ["fp32", "same", "kahan"])
def test_sums_never_overflow_where_drawing_upwards_doubles(replicas, accumulate):
    """The numbers have no mantissa, and the number of replicas is not a power of two."""
    values = np.random.default_rng(0).uniform(0.5, 1, 500)
    values[::2] = 1
    values = np.float32(values / replicas)  # the sum of the largest is a power of two
    params = {"w": jnp.zeros(500)}
    tx = as_optax(lbopt.aps(3, 0, accumulate, rounding="stochastic"), replicas)
    (updates, _), _ = tx.update({"w": np.tile(values, (replicas, 1))}, tx.init(params), params)
    assert np.isfinite(updates["w"]).all()
    assert float(np.max(updates["w"])) >= 0.5 / replicas


def test_a_leaf_without_numbers_is_let_be():
    rows = {"none": np.zeros((4, 0, 3), np.float32), "w": np.ones((4, 2), np.float32)}
    params = jax.tree.map(lambda x: jnp.zeros(x.shape[1:]), rows)
    for aggregator in (
        lbopt.aps(4, 3),
        lbopt.ef(cast(4, 3)),
        lbopt.ef(topk(0.5)),
    ):
        tx = as_optax(aggregator, 4)
        (updates, _), _ = tx.update(rows, tx.init(params), params)
        assert updates["none"].shape == (0, 3)
        assert np.any(updates["w"])
