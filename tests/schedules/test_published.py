"""Schedules of published code against their formulas in float64, at every step of a run."""

import math
from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from refusal import refused

import lbopt
from lbopt.schedules import Units, exponential_factor

NUM_EXAMPLES = 1_281_167


def table(schedule, steps):
    return np.asarray(jax.jit(jax.vmap(schedule))(np.arange(steps)), np.float64)


def assert_rates(schedule, formula, steps, peak):
    expected = np.array([formula(t) for t in range(steps)])
    assert np.max(np.abs(table(schedule, steps) - expected)) <= 2e-6 * peak


# batch, base rate, warmup epochs, epochs of MLPerf v0.7's JAX ResNet-50, which rounds epochs up to
# loops of 4
MLPERF = [(32768, 29.0, 18, 64, 2512), (65536, 23.080977304670448, 33, 92, 1817)]


@pytest.mark.parametrize(("batch", "base", "warmup_epochs", "epochs", "steps"), MLPERF)
def test_mlperf_resnet50(batch, base, warmup_epochs, epochs, steps):
    per_epoch = math.ceil(4 * NUM_EXAMPLES / batch) / 4
    warm = warmup_epochs * per_epoch
    train = round(epochs * per_epoch)
    assert train == steps

    def formula(t):
        if t <= warm:
            return base * t / warm
        return 1e-4 + (base - 1e-4) * (1 - (t - warm) / (train - warm + 1)) ** 2

    schedule = lbopt.mlperf_schedule(base, warm, train)
    assert_rates(schedule, formula, train, base)
    assert schedule(0) == 0
    assert math.isclose(schedule(train - 1), formula(train - 1), rel_tol=1e-4)
    if batch == 65536:
        assert train - warm + 1 == 1166.25


def test_efficientnet_ends_at_a_tenth_and_not_at_a_tenth_of_the_peak():
    schedule = lbopt.mlperf_schedule(15.1, 100, 700, end_learning_rate=0.1)
    assert math.isclose(schedule(701), 0.1, rel_tol=1e-5)
    assert math.isclose(schedule(400), 0.1 + 15.0 * (1 - 300 / 601) ** 2, rel_tol=1e-5)


def test_mlperf_bert_climbs_from_a_negative_step_and_jumps():
    base = 2.88293e-3
    warm = 287
    start = -76
    total = 560

    def formula(t):
        return base * (t - start) / warm if t - start < warm else base * (1 - t / total)

    schedule = lbopt.albert_schedule(base, warm, total, start)
    assert_rates(schedule, formula, total, base)
    rates = table(schedule, total)
    assert math.isclose(rates[0], base * 76 / 287, rel_tol=1e-6)
    assert np.argmax(rates) == 210  # base itself would be reached at step 211 ...
    assert math.isclose(
        rates[211], base * (1 - 211 / 560), rel_tol=1e-5
    )  # ... where the rate drops to 0.623 of it
    assert math.isclose(rates[211] / base, 0.623, abs_tol=5e-4)


def test_mlperf_bert_v1_is_a_pure_decay():
    schedule = lbopt.albert_schedule(2.9293e-3, 0, 700, -700)
    assert_rates(schedule, lambda t: 2.9293e-3 * (1 - t / 700), 700, 2.9293e-3)


def test_without_the_jump_the_decay_begins_at_the_peak():
    jump, smooth = (
        lbopt.warmup_schedule(1.0, 200, 1000, decay_from=origin)
        for origin in ("start", "warmup_end")
    )
    assert table(jump, 1000)[200] == pytest.approx(0.8, rel=1e-6)
    assert table(smooth, 1000)[200] == 1.0
    assert np.array_equal(table(jump, 200), table(smooth, 200))


@pytest.mark.parametrize("staircase", [True, False])
def test_efficientnet_rmsprop_staircase(staircase):
    per_epoch = NUM_EXAMPLES / 4096
    warm = 5 * per_epoch
    schedule = lbopt.exponential_schedule(0.256, 2.4 * per_epoch, 10_000, 0.97, warm, staircase)

    def formula(t):
        stairs = t / (2.4 * per_epoch)
        return 0.256 * (
            t / warm if t < warm else 0.97 ** (math.floor(stairs) if staircase else stairs)
        )

    assert_rates(schedule, formula, 10_000, 0.256)


def test_whole_numbers_of_stairs_are_not_missed_by_rounding():
    for steps_per_decay in (3, 7, 0.1 * 30, 1000 / 3):
        schedule = lbopt.exponential_schedule(1.0, steps_per_decay, 100_000, 0.5)
        for stair in (1, 2, 9, 30):
            step = math.ceil(stair * steps_per_decay - 1e-9)
            assert float(schedule(step)) == 0.5**stair, (steps_per_decay, stair)
            assert float(schedule(step - 1)) == 0.5 ** (stair - 1), (steps_per_decay, stair)


@pytest.mark.parametrize(("step", "stairs"), [(9, 30), (15, 50), (18, 60)])
def test_a_quotient_just_below_a_whole_number_is_that_number(step, stairs):
    assert np.float32(step) / np.float32(0.3) < stairs, "this case needs no slack"
    assert float(exponential_factor(0.5, 0.3)(step)) == 0.5**stairs


def test_steps_of_goyal():
    schedule = lbopt.step_schedule(3.2, (4800, 9600, 12800), 14_400, 0.1, warmup_steps=800)

    def formula(t):
        return (
            3.2 * t / 800
            if t < 800
            else 3.2 * 0.1 ** sum(t >= boundary for boundary in (4800, 9600, 12800))
        )

    assert_rates(schedule, formula, 14_400, 3.2)


def test_quadratic_ramp_from_a_rate_that_is_not_zero():
    schedule = lbopt.warmup_schedule(9.0, 100, 1000, power=2.0, warmup_power=2.0, warmup_from=1.0)

    def formula(t):
        return 1 + 8 * (t / 100) ** 2 if t < 100 else 9 * (1 - (t - 100) / 900) ** 2

    assert_rates(schedule, formula, 1000, 9.0)


def test_mixed_batch_bert_climbs_from_zero_again():
    """Phases of NVIDIA's 64K/32K run: DeepLearningExamples, pretrain_config.sh."""
    first = lbopt.warmup_schedule(6e-3, 2000, 7038)
    second = lbopt.warmup_schedule(4e-3, 200, 1563)
    rates = table(lbopt.mixed_batch_schedule((first, 7038), (second, 1563)), 7038 + 1563)
    assert np.array_equal(rates, np.concatenate([table(first, 7038), table(second, 1563)]))
    assert rates[7037] > 0
    assert rates[7038] == 0
    assert math.isclose(rates[7238], 4e-3, rel_tol=1e-6)


def test_any_optax_schedule_may_be_the_decay():
    cosine = optax.cosine_decay_schedule(1.0, 90)
    ours = lbopt.warmup_schedule(0.5, 10, 100, decay=cosine)
    theirs = optax.warmup_cosine_decay_schedule(0.0, 0.5, 10, 100)
    assert np.allclose(table(ours, 100), table(theirs, 100), rtol=1e-5, atol=1e-7)
    named = lbopt.warmup_schedule(0.5, 10, 100, decay="cosine")
    assert np.allclose(table(named, 100), table(theirs, 100), rtol=1e-5, atol=1e-7)


def test_polynomial_equals_optax():
    ours = lbopt.warmup_schedule(0.7, 0, 50, power=3.0, end_learning_rate=0.1)
    theirs = optax.polynomial_schedule(0.7, 0.1, 3.0, 50)
    assert np.allclose(table(ours, 60), table(theirs, 60), rtol=1e-5)


GOOD = {"peak_learning_rate": 0.1, "warmup_steps": 5, "total_steps": 20}
RATE = optax.constant_schedule(1.0)


@pytest.mark.parametrize(
    ("build", "field", "value", "code"),
    [
        (
            lambda: lbopt.warmup_schedule(**GOOD, start_step=15),
            *("warmup_steps", 5.0, "conflict"),
        ),
        (lambda: lbopt.warmup_schedule(**GOOD, warmup_power=0.0), "warmup_power", 0.0, "value"),
        (
            lambda: lbopt.warmup_schedule(**GOOD, start_step=-5, warmup_from=0.05),
            *("warmup_from", 0.05, "unused"),
        ),
        (lambda: lbopt.warmup_schedule(**GOOD, warmup_from=-1.0), "warmup_from", -1.0, "value"),
        (lambda: lbopt.warmup_schedule(**GOOD, decay_from="end"), "decay_from", "end", "choice"),
        (lambda: lbopt.warmup_schedule(**GOOD, decay_steps=0), "decay_steps", 0, "value"),
        (
            lambda: lbopt.warmup_schedule(**GOOD, end_learning_rate=-1.0),
            *("end_learning_rate", -1.0, "value"),
        ),
        (
            lambda: lbopt.warmup_schedule(**GOOD, end_learning_rate=0.1, end_factor=0.1),
            *("end_learning_rate", 0.1, "conflict"),
        ),
        (
            lambda: lbopt.warmup_schedule(
                **GOOD, end_learning_rate=0.1, decay=optax.constant_schedule(1.0)
            ),
            *("end_learning_rate", 0.1, "conflict"),
        ),
        (lambda: lbopt.mlperf_schedule(1.0, 100, 100), "warmup_steps", 100.0, "conflict"),
        (lambda: lbopt.albert_schedule(1.0, 100, 100), "warmup_steps", 100.0, "conflict"),
        (
            lambda: lbopt.exponential_schedule(1.0, 0.0, 100),
            *("steps_per_decay", 0.0, "value"),
        ),
        (lambda: lbopt.exponential_schedule(1.0, 5.0, 100, 1.5), "decay_rate", 1.5, "value"),
        (lambda: lbopt.step_schedule(1.0, (5, 3), 100), "boundaries", (5, 3), "value"),
        (lambda: lbopt.step_schedule(1.0, (0, 5), 100), "boundaries", 0, "value"),
        (lambda: lbopt.step_schedule(1.0, (5, math.nan), 100), "boundaries", math.nan, "value"),
        (lambda: lbopt.step_schedule(1.0, (5, 100), 100), "boundaries", (5, 100), "unused"),
        (
            lambda: lbopt.exponential_schedule(1.0, 120.5, 100),
            *("steps_per_decay", 120.5, "unused"),
        ),
        (lambda: lbopt.step_schedule(1.0, (), 100), "boundaries", (), "value"),
        (lambda: lbopt.step_schedule(1.0, (5,), 100, 0.0), "factor", 0.0, "value"),
        (lambda: lbopt.mixed_batch_schedule(), "phases", (), "value"),
        (lambda: lbopt.mixed_batch_schedule((RATE, 4), (RATE, 0)), "phases[1]", 0, "value"),
        (lambda: lbopt.mixed_batch_schedule(RATE, 5), "phases[0]", RATE, "type"),
        (lambda: lbopt.mixed_batch_schedule((0.1, 5)), "phases[0]", (0.1, 5), "type"),
        (lambda: lbopt.warmup_schedule(0.1, "5", 20), "warmup_steps", "5", "value"),
        (lambda: lbopt.warmup_schedule("0.1", 5, 20), "peak_learning_rate", "0.1", "value"),
    ],
)
def test_bad_arguments_are_named(build, field, value, code):
    with refused(field, value, code):
        build()


NUMBERS = {
    lbopt.warmup_schedule: {
        **GOOD,
        **{
            "power": 2,
            "end_factor": 0,
            "first_step": 1,
            "warmup_power": 2,
            "warmup_from": 0,
            "start_step": 0,
        },
        **{"decay_steps": 9, "end_learning_rate": 0},
    },
    lbopt.legw_schedule: {
        **{
            "base_learning_rate": 1,
            "base_batch_size": 8,
            "base_warmup_epochs": 1,
            "global_batch_size": 16,
        },
        **{"num_examples": 64, "num_epochs": 9, "power": 2, "end_factor": 0, "first_step": 1},
    },
    lbopt.mlperf_schedule: {
        **{
            "base_learning_rate": 1,
            "warmup_steps": 5,
            "train_steps": 20,
            "end_learning_rate": 0,
            "power": 2,
        },
    },
    lbopt.albert_schedule: {
        **{
            "base_learning_rate": 1,
            "warmup_steps": 5,
            "total_steps": 20,
            "start_warmup_step": -1,
            "power": 2,
        },
        "end_learning_rate": 0,
    },
    lbopt.exponential_schedule: {
        **{
            "base_learning_rate": 1,
            "steps_per_decay": 3,
            "total_steps": 20,
            "decay_rate": 1,
            "warmup_steps": 5,
        },
    },
    lbopt.step_schedule: {
        "base_learning_rate": 1,
        "boundaries": (9,),
        "total_steps": 20,
        "factor": 1,
    },
    lbopt.scale_learning_rate: {
        "base_learning_rate": 1,
        "base_batch_size": 8,
        "global_batch_size": 16,
    },
    Units: {"num_examples": 64, "global_batch_size": 16},
}
NO_NUMBERS = (
    True,
    np.True_,
    "5",
    [5],
    np.array([5]),
    math.nan,
    1e300,
    -(10**40),
    1j,
    np.array(1j),
    np.array(None),
    len,
)


@pytest.mark.parametrize("build", NUMBERS, ids=lambda build: build.__name__)
def test_what_is_no_number_is_refused_by_its_own_name(build):
    for argument, good in NUMBERS[build].items():
        for bad in NO_NUMBERS:
            if argument == "boundaries" and not np.isscalar(bad):
                continue
            with refused(argument, bad, "value"):
                build(**{**NUMBERS[build], argument: bad})
        if argument != "boundaries":
            build(
                **{
                    **NUMBERS[build],
                    argument: np.int8(good) if isinstance(good, int) else Fraction(good),
                }
            )


def test_numbers_of_any_kind_give_the_same_rates():
    rates = []
    for kind in (int, Fraction, np.int8, jnp.int32, lambda n: jnp.asarray(n, jnp.bfloat16)):
        numbers = {
            name: kind(n) for name, n in NUMBERS[lbopt.warmup_schedule].items() if name not in GOOD
        }
        rates.append(table(lbopt.warmup_schedule(kind(3), kind(5), 20, **numbers), 25))
        assert np.array_equal(rates[0], rates[-1]), kind
    narrow = Units(np.int32(NUM_EXAMPLES), np.int32(512))
    assert (narrow.steps(5000), narrow.warmup_steps(5000)) == (12511397, 12511396)


def test_a_rate_is_fp32_whatever_a_decay_function_or_a_traced_argument_is():
    def rate(floor):
        return lbopt.warmup_schedule(
            0.5, 5, 20, decay=lambda t: np.float64(0.5), warmup_from=floor
        )(7)

    with jax.enable_x64(True), jax.numpy_dtype_promotion("strict"):
        for dtype in (jnp.bfloat16, jnp.float64, jnp.int32):
            assert jax.eval_shape(rate, jax.ShapeDtypeStruct((), dtype)).dtype == jnp.float32
    for bad in ("0.5", None, np.zeros(2)):
        decay = lambda t, bad=bad: bad  # noqa: E731
        with refused("decay", decay, "type"):
            lbopt.warmup_schedule(0.5, 5, 20, decay=decay)(7)
