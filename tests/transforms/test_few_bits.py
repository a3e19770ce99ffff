"""State in 8 bits and bfloat16, and bfloat16 parameters that take small steps."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch
from refusal import refused

import lbopt
from lbopt.transforms import _eight_bit, _rounding

SIZE = (64, 512)


def torch_map(name, signed):
    """Return bitsandbytes' create_dynamic_map and create_linear_map, transcribed."""
    if name == "linear":
        values = torch.linspace(-1.0 if signed else 0.0, 1.0, 255 if signed else 256)
        zero = [0.0] if signed else []
        return torch.tensor([*values[:127].tolist(), *zero, *values[127:].tolist()])

    data = [0.0, 1.0]
    for exponent in range(7):
        edges = torch.linspace(0.1, 1, 2 ** (exponent + (0 if signed else 1)) + 1)
        means = (edges[:-1] + edges[1:]) / 2.0
        data += (10 ** (-6 + exponent) * means).tolist()
        data += (-(10 ** (-6 + exponent)) * means).tolist() if signed else []
    return torch.tensor(sorted(data))


def torch_codes(x, code, size):
    """Return codes and largest magnitudes as bitsandbytes' PyTorch backend makes them."""
    blocks = torch.tensor(x).reshape(-1, size)
    largest = blocks.abs().max(dim=-1)[0]
    scaled = torch.clamp(blocks * (1.0 / largest.clamp(min=1e-38).view(-1, 1)), -1, 1)
    bounds = (code[:-1] + code[1:]) / 2
    return torch.bucketize(scaled, bounds).to(torch.uint8).numpy(), largest.numpy()


@pytest.mark.parametrize("signed", [True, False])
@pytest.mark.parametrize("name", _eight_bit.MAPS)
def test_codes_are_those_of_bitsandbytes_bit_for_bit(name, signed):
    code = torch_map(name, signed)
    np.testing.assert_array_equal(_eight_bit.table(name, signed), code.numpy())

    # Both sides of every bound, the numbers of the map, and numbers of all sizes.
    rng = np.random.default_rng(0)
    bounds = ((code[:-1] + code[1:]) / 2).numpy()
    edges = [f(bounds, np.float32(far)) for f in (np.nextafter,) for far in (-9, 9)]
    some = [bounds, *edges, code.numpy(), 10 ** rng.uniform(-9, 0, 100_000)]
    flat = np.concatenate(some).astype(np.float32)
    flat = np.resize(
        np.where(rng.random(len(flat)) < 0.5, flat, -flat) if signed else abs(flat), (400, 256)
    )
    flat[:, 0] = 1
    flat[1] = 0
    x = flat * np.float32(10) ** rng.integers(-20, 20, (400, 1)).astype(np.float32)
    for of in (flat, x):
        codes, largest = jax.jit(_eight_bit.encode, static_argnums=(1, 2, 3))(of, name, signed, 128)
        wanted, most = torch_codes(of, code, 128)
        np.testing.assert_array_equal(np.asarray(codes).reshape(wanted.shape), wanted)
        np.testing.assert_array_equal(np.ravel(largest), most)

        values = jax.jit(_eight_bit.decode, static_argnums=(2, 3, 4))(
            codes, largest, name, signed, 128
        )
        again = code.numpy()[wanted] * most[:, None]
        np.testing.assert_array_equal(np.asarray(values).reshape(again.shape), again)


def test_blocks_that_do_not_fill_the_last_axis():
    x = np.random.default_rng(1).standard_normal((3, 300)).astype(np.float32)
    codes, largest = _eight_bit.encode(x, "dynamic", True, 128)
    assert codes.shape == x.shape
    assert largest.shape == (3, 3)
    values = _eight_bit.decode(codes, largest, "dynamic", True, 128)
    assert np.max(abs(values - x)) < 0.04 * np.max(abs(x))
    np.testing.assert_array_equal(largest[:, 2], abs(x[:, 256:]).max(1))


def walk(tx, dtype=jnp.float32, steps=40):
    rng = np.random.default_rng(2)
    params = {
        "kernel": jnp.asarray(rng.standard_normal(SIZE), dtype),
        "bias": jnp.zeros(512, dtype),
    }
    state = tx.init(params)

    @jax.jit
    def step(params, state, grads):
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    start = params
    for _ in range(steps):
        grads = jax.tree.map(
            lambda p: jnp.asarray(rng.standard_normal(p.shape) + 0.3, dtype), params
        )
        params, state = step(params, state, grads)
    way = np.asarray(params["kernel"], np.float64) - np.asarray(start["kernel"], np.float64)
    return way, state


OPTIMIZERS = {
    "lamb": lbopt.lamb(1e-2),
    "lars": lbopt.lars(1.0),
    "adamw": optax.adamw(1e-3),
    "adamh": lbopt.adamh(1e-2),
    "muon": lbopt.muon(1e-2),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize(
    ("form", "words", "off"), [("8bit_dynamic", 0.28, 0.05), ("bf16_stochastic", 0.52, 0.02)]
)
def test_an_optimizer_walks_the_same_way_with_state_in_few_bits(name, form, words, off):
    way, state = walk(OPTIMIZERS[name])
    small_way, small = walk(lbopt.compress_state(OPTIMIZERS[name], form))
    assert nbytes(small) < words * nbytes(state)
    distance = np.linalg.norm(small_way - way) / np.linalg.norm(way)
    assert 1e-4 < distance < off


@pytest.mark.parametrize("name", ["lars", "muon"])
def test_the_linear_map_suits_momentum(name):
    way, _ = walk(OPTIMIZERS[name])
    small_way, _ = walk(lbopt.compress_state(OPTIMIZERS[name], "8bit_linear"))
    assert 1e-4 < np.linalg.norm(small_way - way) / np.linalg.norm(way) < 0.05


def nbytes(tree):
    return sum(leaf.nbytes for leaf in jax.tree.leaves(tree))


def test_the_linear_map_loses_small_second_moments():
    small = np.full((1, 256), 1e-4, np.float32)
    small[0, 0] = 1
    kept = {}
    for name in _eight_bit.MAPS:
        kept[name] = _eight_bit.decode(
            *_eight_bit.encode(small, name, False, 256), name, False, 256
        )
    assert kept["linear"][0, 1] == 0
    np.testing.assert_allclose(kept["dynamic"][0, 1], 1e-4, rtol=0.06)


def test_state_is_compressed_by_field_and_size():
    params = {
        "large": jnp.ones((64, 64)),
        "small": jnp.ones((63, 64)),
        "narrow": jnp.ones((512, 8)),
    }
    moments = lbopt.compress_state(optax.adam(1e-3)).init(params).inner[0]
    dtypes = {name: (moments.mu[name].dtype, moments.nu[name].dtype) for name in params}
    codes = (jnp.dtype("uint8"),) * 2
    whole = (jnp.dtype("float32"),) * 2
    assert dtypes == {"large": codes, "small": whole, "narrow": whole}

    one = lbopt.compress_state(optax.adam(1e-3), signed=(), unsigned=("nu",)).init(params).inner[0]
    assert one.mu["large"].dtype == jnp.float32
    assert one.nu["large"].dtype == jnp.uint8


def test_two_formats_in_one_optimizer():
    tx = lbopt.compress_state(lbopt.lamb(1e-2), "bf16_stochastic", signed=(), unsigned=("nu",))
    _, state = walk(lbopt.compress_state(tx, "8bit_dynamic", unsigned=()), steps=2)
    [moments] = lbopt.transforms.find_states(state, [type(lbopt.scale_by_lamb_moments().init({}))])
    assert moments.mu["kernel"].dtype == jnp.uint8
    assert moments.nu["kernel"].dtype == jnp.bfloat16


def test_stochastic_rounding_goes_to_a_neighbour_with_the_right_mean():
    x = jnp.asarray([1 + 2**-9, -(1 + 2**-10), 3e-41, 1e30, 0.0, jnp.inf, -jnp.inf], jnp.float32)
    rounded = jax.vmap(lambda key: _rounding.rounded_by_chance(x, jnp.bfloat16, key))(
        jax.random.split(jax.random.key(0), 20_000)
    )
    assert (rounded == rounded.astype(jnp.bfloat16).astype(jnp.float32)).all()
    assert set(np.unique(rounded[:, 0])) == {1, 1 + 2**-7}
    assert set(np.unique(rounded[:, 4])) == {0}
    # Five standard deviations of the mean of 20,000 roundings, whose step is 2^-7 of the number.
    np.testing.assert_allclose(
        np.mean(np.float64(rounded)[:, :2], 0), x[:2], atol=5 * 2**-8 / 20_000**0.5
    )
    np.testing.assert_array_equal(rounded[0, 5:], x[5:])
    assert jnp.isnan(
        _rounding.rounded_by_chance(jnp.full(3, jnp.nan), jnp.bfloat16, jax.random.key(0))
    ).all()


@pytest.mark.parametrize("cure", [lbopt.round_stochastically, lbopt.compensate_rounding])
def test_bf16_parameters_take_small_steps(cure):
    """Plain bfloat16 loses most of LAMB's way at a rate of 1e-3; with a cure it is that of fp32."""
    tx = lbopt.lamb(1e-3, mu_dtype="float32", nu_dtype="float32")
    way, _ = walk(tx)
    with pytest.warns(UserWarning, match="bias, kernel: in 16 bits a step below 1/512"):
        lost, _ = walk(tx, jnp.bfloat16)
    cured, _ = walk(cure(tx), jnp.bfloat16)  # warnings are errors here

    def share(one):
        return np.vdot(one, way) / np.vdot(way, way)

    assert share(lost) < 0.5
    assert 0.97 < share(cured) < 1.03


def test_noise_is_that_of_the_seed_and_the_step():
    def after(seed, steps):
        way, state = walk(lbopt.round_stochastically(lbopt.lamb(1e-3), seed), jnp.bfloat16, steps)
        return way, int(state.rounding_count)

    one, count = after(0, 3)
    same, _ = after(0, 3)
    other, _ = after(1, 3)
    np.testing.assert_array_equal(one, same)
    assert count == 3
    assert (one != other).any()


@pytest.mark.parametrize(
    ("make", "field"),
    [
        (lambda: lbopt.compress_state(lbopt.lamb(0.1), "int8"), "format"),
        (lambda: lbopt.compress_state(lbopt.lamb(0.1), signed="mu"), "signed"),
        (lambda: lbopt.compress_state(lbopt.lamb(0.1), block_size=8), "block_size"),
        (lambda: lbopt.compress_state(optax.sgd(0.1)).init({"w": jnp.ones(3)}), "signed"),
        (lambda: lbopt.round_stochastically(optax.sgd(0.1), -1), "seed"),
        (lambda: lbopt.compensate_rounding(lbopt.lamb), "inner"),
    ],
)
def test_bad_arguments_are_named(make, field):
    with refused(field):
        make()
