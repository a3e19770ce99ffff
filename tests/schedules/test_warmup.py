"""Warmup and decay against closed forms in float64."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from refusal import refused

import lbopt
from lbopt.schedules._decay import make_decay

SHAPES = {
    "linear": ({}, lambda s: 1 - s),
    "root": ({"power": 0.5}, lambda s: (1 - s) ** 0.5),
    "square": ({"power": 2.0}, lambda s: (1 - s) ** 2),
    "cosine": ({"decay": "cosine"}, lambda s: (1 + math.cos(math.pi * s)) / 2),
    "constant": ({"decay": "constant"}, lambda s: 1.0),
}


def closed_form(shape, peak, warmup, total, end, count, first_step):
    t = count + first_step
    last = total + first_step
    if t < warmup:
        return peak * t / warmup
    factor = SHAPES[shape][1](min((t - warmup) / (last - warmup), 1.0))
    return peak * (1.0 if shape == "constant" else end + (1 - end) * factor)


@pytest.mark.parametrize("first_step", [0, 1])
@pytest.mark.parametrize("end", [0.0, 0.1])
@pytest.mark.parametrize("warmup", [0, 5, 6.5])
@pytest.mark.parametrize("shape", SHAPES)
def test_every_step_of_a_run_and_beyond(shape, warmup, end, first_step):
    end = 0.0 if shape == "constant" else end
    schedule = lbopt.warmup_schedule(
        0.7, warmup, 25, end_factor=end, first_step=first_step, **SHAPES[shape][0]
    )
    ours = np.asarray(jax.vmap(schedule)(jnp.arange(30)), np.float64)
    expected = np.array(
        [closed_form(shape, 0.7, warmup, 25, end, count, first_step) for count in range(30)]
    )
    assert np.max(np.abs(ours - expected)) <= 1e-6 * 0.7


def test_landmarks():
    schedule = lbopt.warmup_schedule(1.0, 4, 12, end_factor=0.5)
    assert [float(schedule(count)) for count in (0, 1, 4, 8, 12, 100)] == [
        0.0,
        0.25,
        1.0,
        0.75,
        0.5,
        0.5,
    ]


def test_first_step_one_wastes_no_step_at_either_end():
    schedule = lbopt.warmup_schedule(1.0, 4, 11, first_step=1)
    assert [float(schedule(count)) for count in (0, 3, 5, 10, 11)] == [0.25, 1.0, 0.75, 0.125, 0.0]


def test_no_warmup_starts_at_the_peak():
    for shape, (options, _) in SHAPES.items():
        assert lbopt.warmup_schedule(0.5, 0, 10, **options)(0) == 0.5, shape


def test_rate_is_fp32_under_x64_too():
    for x64 in (False, True):
        with jax.enable_x64(x64):
            rate = lbopt.warmup_schedule(0.5, 3, 10)(jnp.asarray(4))
            assert (rate.dtype, rate.shape) == (jnp.float32, ())


def test_jit_equals_eager():
    schedule = lbopt.warmup_schedule(0.3, 5, 20, power=2.0, end_factor=0.1)
    for count in (0, 4, 5, 12, 20):
        assert np.allclose(jax.jit(schedule)(count), schedule(count), rtol=1e-6, atol=0)


def test_rate_and_warmup_may_be_traced_in_one_program():
    def rates(peak, warmup):
        return jax.vmap(lbopt.warmup_schedule(peak, warmup, 20, first_step=1))(jnp.arange(20))

    peaks = jnp.asarray([0.1, 0.5, 2.0])
    warmups = jnp.asarray([0.0, 3.0, 7.5])
    table = jax.jit(jax.vmap(rates))(peaks, warmups)
    expected = [
        [closed_form("linear", peak, warmup, 20, 0.0, count, 1) for count in range(20)]
        for peak, warmup in ((0.1, 0), (0.5, 3), (2.0, 7.5))
    ]
    assert np.max(np.abs(table - np.array(expected)) / peaks[:, None]) <= 1e-6


@pytest.mark.parametrize("kind", [np.array, jnp.array])
@pytest.mark.parametrize(
    ("argument", "value", "code"),
    [
        ("warmup_steps", 20.0, "conflict"),
        ("warmup_steps", -1, "value"),
        ("peak_learning_rate", float("nan"), "value"),
        ("warmup_from", -0.1, "value"),
        ("decay_steps", 0.0, "value"),
        ("end_learning_rate", float("inf"), "value"),
        ("end_factor", 1.5, "value"),
        ("power", 0.0, "value"),
        ("warmup_power", -1.0, "value"),
        ("total_steps", 0, "value"),
        ("first_step", 2, "value"),
    ],
)
def test_arrays_of_one_number_are_checked_like_numbers(argument, value, code, kind):
    with refused(argument, kind(value).item(), code):
        lbopt.warmup_schedule(
            **{
                "peak_learning_rate": 0.1,
                "warmup_steps": 5,
                "total_steps": 20,
                argument: kind(value),
            }
        )


@pytest.mark.parametrize("options", [{}, {"decay": "cosine"}, {"power": 0.5}, {"first_step": 1}])
def test_a_traced_warmup_that_fills_the_run_gives_numbers(options):
    def rates(warmup, counts):
        return jax.vmap(lbopt.warmup_schedule(1.0, warmup, 10, **options))(counts)

    warmups = jnp.asarray([9.0, 10.0, 10.5, 11.0, 12.0])
    table = jax.jit(jax.vmap(rates, (0, None)))(warmups, jnp.arange(14))
    assert np.all((table >= 0) & (table <= 1))


@pytest.mark.parametrize(
    ("argument", "options"),
    [
        ("power", {"decay": "cosine", "power": 2.0}),
        ("power", {"decay": "constant", "power": 2.0}),
        ("power", {"decay": lambda t: 1.0, "power": 2.0}),
        ("end_factor", {"decay": "constant", "end_factor": 0.1}),
        ("end_factor", {"decay": lambda t: 1.0, "end_factor": 0.1}),
        ("decay_steps", {"decay": "constant", "decay_steps": 5}),
        ("decay_steps", {"decay": lambda t: 1.0, "decay_steps": 5}),
        ("end_learning_rate", {"decay": "constant", "end_learning_rate": 0.1}),
        ("decay_from", {"decay": "constant", "decay_from": "start"}),
        ("warmup_power", {"warmup_steps": 0, "warmup_power": 2.0}),
        ("warmup_from", {"warmup_steps": jnp.array(0.0), "warmup_from": 0.1}),
        ("warmup_power", {"warmup_steps": 0, "start_step": 3, "warmup_power": 2.0}),
    ],
)
def test_an_argument_without_effect_is_refused(argument, options):
    with refused(argument, code="unused"):
        lbopt.warmup_schedule(
            **{"peak_learning_rate": 0.5, "warmup_steps": 5, "total_steps": 20, **options}
        )


@pytest.mark.parametrize("floor", ["warmup_from", "end_learning_rate"])
@pytest.mark.parametrize("kind", [float, np.array, jnp.array])
def test_a_peak_below_its_floor_is_refused(floor, kind):
    with refused("peak_learning_rate", 0.25, "conflict") as caught:
        lbopt.warmup_schedule(kind(0.25), 5, 20, **{floor: 0.5})
    assert floor in caught.value.also.values()
    assert float(lbopt.warmup_schedule(0.5, 5, 20, **{floor: kind(0.5)})(5)) == 0.5


def test_drives_an_optimizer():
    schedule = lbopt.warmup_schedule(0.5, 2, 6)
    params = {"w": jnp.ones(3)}
    tx = optax.sgd(schedule)
    state = tx.init(params)
    for count in range(6):
        updates, state = tx.update(params, state)
        assert np.allclose(updates["w"], -schedule(count), rtol=1e-6)


@pytest.mark.parametrize(
    ("argument", "given", "shown", "code"),
    [
        ("warmup_steps", 20, 20.0, "conflict"),
        ("warmup_steps", 21, 21.0, "conflict"),
        ("warmup_steps", -1, -1, "value"),
        ("warmup_steps", np.int64(20), 20.0, "conflict"),
        ("peak_learning_rate", np.float32(-0.5), -0.5, "value"),
        ("warmup_steps", float("nan"), float("nan"), "value"),
        ("total_steps", 0, 0, "value"),
        ("total_steps", -3, -3, "value"),
        ("peak_learning_rate", -0.1, -0.1, "value"),
        ("peak_learning_rate", float("nan"), float("nan"), "value"),
        ("first_step", 2, 2, "value"),
        ("first_step", -1, -1, "value"),
        ("decay", "exponential", "exponential", "choice"),
        ("decay_from", "begin", "begin", "choice"),
        ("power", 0.0, 0.0, "value"),
        ("power", -1.0, -1.0, "value"),
        ("end_factor", -0.1, -0.1, "value"),
        ("end_factor", 1.5, 1.5, "value"),
        ("end_factor", float("nan"), float("nan"), "value"),
    ],
)
def test_bad_arguments_are_named(argument, given, shown, code):
    with refused(argument, shown, code):
        lbopt.warmup_schedule(
            **{"peak_learning_rate": 0.1, "warmup_steps": 5, "total_steps": 20, argument: given}
        )


@pytest.mark.parametrize("shape", SHAPES)
def test_decay_falls_from_one_to_its_end_and_is_clipped(shape):
    end = 1.0 if shape == "constant" else 0.2
    factor = make_decay(**SHAPES[shape][0], end_factor=end % 1)
    values = np.asarray([factor(jnp.float32(s)) for s in (-1.0, 0.0, 0.25, 0.5, 0.75, 1.0, 2.0)])
    assert values[0] == values[1] == 1
    assert np.allclose(values[-2:], end, rtol=1e-6)
    assert np.all(np.diff(values) <= 0)
