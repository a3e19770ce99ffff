"""float_quantize against ml_dtypes, against float64, and against CPD's kernel."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from refusal import refused

import lbopt
from lbopt.aggregators._quantize import Format
from lbopt.errors import NO_VALUE
from tests.oracles import low_bits

KNOWN = {
    "float8_e5m2": (5, 2),
    "float8_e4m3": (4, 3),
    "float8_e3m4": (3, 4),
    "float16": (5, 10),
    "bfloat16": (8, 7),
}
ODD = [(2, 1), (3, 0), (3, 2), (4, 0), (5, 7), (6, 9), (7, 23), (8, 0), (8, 3), (8, 23)]


def bits(x):
    return np.asarray(x, np.float32).view(np.uint32)


def same(ours, theirs):
    """Compare bit for bit; any NaN equals any other."""
    ours = np.asarray(ours, np.float32)
    theirs = np.asarray(theirs, np.float32)
    return np.array_equal(np.isnan(ours), np.isnan(theirs)) and np.array_equal(
        bits(ours)[~np.isnan(ours)], bits(theirs)[~np.isnan(theirs)]
    )


@pytest.fixture(scope="module")
def anything():
    """Return fp32 numbers of all sizes: random bits, and normal numbers at many scales."""
    rng = np.random.default_rng(0)
    raw = rng.integers(0, 2**32, 50_000, dtype=np.uint64).astype(np.uint32).view(np.float32)
    scaled = np.ldexp(rng.normal(size=50_000), rng.integers(-40, 20, 50_000)).astype(np.float32)
    edges = np.array(
        [0.0, -0.0, np.inf, -np.inf, np.nan, 1e-45, 1.1754944e-38, 3.4028235e38], np.float32
    )
    return np.concatenate([raw, scaled, edges])


def edges_of(dtype):
    """Return a format's numbers, the midpoints between them, and the fp32 neighbours of all."""
    width = np.dtype(dtype).itemsize
    codes = np.arange(2 ** (8 * width)).astype({1: np.uint8, 2: np.uint16}[width])
    all_of_it = codes.view(dtype).astype(np.float32)
    finite = np.unique(all_of_it[np.isfinite(all_of_it)])
    middles = ((finite[1:].astype(np.float64) + finite[:-1]) / 2).astype(np.float32)
    return np.concatenate(
        [
            all_of_it,
            middles,
            np.nextafter(middles, np.float32(np.inf)),
            np.nextafter(middles, np.float32(-np.inf)),
        ]
    )


@pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered in cast")
@pytest.mark.parametrize("name", KNOWN)
def test_equals_ml_dtypes_bit_for_bit(name, anything):
    dtype = np.dtype(getattr(ml_dtypes, name, name))
    x = np.concatenate([anything, edges_of(dtype)])
    assert same(lbopt.float_quantize(x, *KNOWN[name]), x.astype(dtype).astype(np.float32))


@pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered in cast")
@pytest.mark.parametrize("name", KNOWN)
def test_saturation_differs_only_where_ml_dtypes_has_infinity(name, anything):
    dtype = np.dtype(getattr(ml_dtypes, name, name))
    x = np.concatenate([anything, edges_of(dtype)])
    wanted = x.astype(dtype).astype(np.float32)
    largest = np.float32(ml_dtypes.finfo(dtype).max)
    wanted = np.where(np.isinf(wanted) & np.isfinite(x), np.copysign(largest, x), wanted)
    assert same(lbopt.float_quantize(x, *KNOWN[name], overflow="saturate"), wanted)


@pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered in cast")
@pytest.mark.parametrize("form", ODD)
def test_any_other_format_equals_float64(form, anything):
    for overflow in ("inf", "saturate"):
        ours = lbopt.float_quantize(anything, *form, overflow=overflow)
        assert same(ours, low_bits.rounded(anything, *form, overflow).astype(np.float32)), overflow


@pytest.mark.parametrize("form", [(5, 2), (4, 3), (3, 0), (5, 10), (8, 7), (8, 23)])
def test_cpd_is_what_its_kernel_does(form, anything):
    top = 2.0 ** (2 ** (form[0] - 1))
    near = (min(top, 2.0**127) * np.linspace(0.9, 1.1, 200)).astype(np.float32)
    tiny = np.float32(2.0 ** (2 - 2 ** (form[0] - 1))) * np.linspace(0, 1.1, 300, dtype=np.float32)
    x = np.concatenate([anything[::40], anything[-8:], near, tiny, -tiny])
    wanted = np.array([low_bits.cpd_cast(value, *form) for value in x], np.float32)
    np.testing.assert_array_equal(
        lbopt.float_quantize(x, *form, overflow="cpd"), wanted
    )  # except for the sign of 0


def test_cpd_rounds_a_cut_mantissa_below_the_normal_numbers():
    # Slightly above half of the smallest number, IEEE rounds up; CPD has dropped the bits that
    # distinguish it from a tie.
    x = np.float32(2.0**-17 * (1 + 2**-23))
    assert lbopt.float_quantize(x, 5, 2) == 2.0**-16
    assert lbopt.float_quantize(x, 5, 2, overflow="cpd") == 0


def test_past_the_largest_number():
    x = np.array([57344.0, 61439.0, 61440.0, 65536.0, -1e9], np.float32)
    np.testing.assert_array_equal(
        lbopt.float_quantize(x, 5, 2), [57344, 57344, np.inf, np.inf, -np.inf]
    )
    np.testing.assert_array_equal(
        lbopt.float_quantize(x, 5, 2, "saturate"), [57344, 57344, 57344, 57344, -57344]
    )
    np.testing.assert_array_equal(
        lbopt.float_quantize(x, 5, 2, "cpd"), [57344, 57344, 65536, np.inf, -np.inf]
    )


@pytest.mark.parametrize("value", [1.3, -200.7, 2.0**-16 * 0.3, 2.0**-15 * 1.4, 2.0**-22, 2.0**-30])
def test_stochastic_rounding_is_right_on_average(value):
    count = 1 << 16
    x = jnp.full((count,), value, jnp.float32)
    out = np.asarray(
        lbopt.float_quantize(x, 5, 2, rounding="stochastic", key=jax.random.key(0)), np.float64
    )
    below, above = np.unique(out)[[0, -1]]
    assert set(np.unique(out)) <= {below, above}
    unit = np.ldexp(1.0, max(np.frexp(value)[1] - 1, -14) - 2)
    assert above - below <= unit
    chance = abs(value) / unit % 1
    deviation = unit * np.sqrt(chance * (1 - chance) / count)
    assert abs(out.mean() - np.float32(value)) < 5 * deviation


def test_numbers_of_the_format_stay_under_stochastic_rounding():
    x = edges_of(ml_dtypes.float8_e4m3)[:256]
    x = x[np.isfinite(x)]
    assert same(lbopt.float_quantize(x, 4, 3, rounding="stochastic", key=jax.random.key(1)), x)


def test_dtype_and_shape_are_kept_under_jit():
    x = jnp.ones((3, 5), jnp.bfloat16) * 1.1
    out = jax.jit(lambda x: lbopt.float_quantize(x, 4, 1))(x)
    assert out.shape == x.shape
    assert out.dtype == x.dtype


@pytest.mark.parametrize("form", [*KNOWN.values(), *ODD])
@pytest.mark.parametrize("overflow", ["inf", "cpd"])
def test_the_carrier_holds_every_number(form, overflow, anything):
    finite = anything[np.isfinite(anything)]
    out = np.asarray(lbopt.float_quantize(finite, *form, overflow=overflow))
    if form[0] == 8:  # XLA's conversion may flush its subnormal numbers
        out = out[(np.abs(out) >= np.finfo(np.float32).tiny) | (out == 0)]
    carrier = Format(*form).carrier(overflow)
    assert same(out.astype(carrier).astype(np.float32), out)
    assert same(jnp.asarray(out).astype(carrier).astype(jnp.float32), out)


@pytest.mark.parametrize(
    ("wrong", "field", "value", "code"),
    [
        ({"exponent_bits": 9}, "exponent_bits", 9, "value"),
        ({"mantissa_bits": -1}, "mantissa_bits", -1, "value"),
        ({"overflow": "wrap"}, "overflow", "wrap", "choice"),
        ({"rounding": "up"}, "rounding", "up", "choice"),
        ({"rounding": "stochastic"}, "key", None, "value"),
        ({"x": np.arange(3)}, "x", NO_VALUE, "type"),
    ],
)
def test_refusals(wrong, field, value, code):
    with refused(field, value, code):
        lbopt.float_quantize(
            **{"x": np.ones(2, np.float32), "exponent_bits": 5, "mantissa_bits": 2, **wrong}
        )
