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


def adam8bit_way(grads, rate):
    """Return the way that Adam8bit's CUDA kernel walks, transcribed: every number is fp32."""
    rate, beta1, beta2, eps = map(np.float32, (rate, 0.9, 0.999, 1e-8))
    one = np.float32(1)
    code1 = torch_map("dynamic", signed=True)
    code2 = torch_map("dynamic", signed=False)
    numbers1 = code1.numpy()
    grads = grads.reshape(len(grads), -1, 256)
    codes1 = np.zeros(grads[0].shape, np.uint8)
    codes2 = np.zeros_like(codes1)
    absmax1 = np.zeros(len(codes1), np.float32)
    absmax2 = np.zeros_like(absmax1)
    way = np.zeros(codes1.shape, np.float32)

    for step, g in enumerate(grads, 1):
        correction1 = one - beta1 ** np.float32(step)
        correction2 = np.sqrt(one - beta2 ** np.float32(step))
        step_size = -rate * correction2 / correction1
        s2 = code2.numpy()[codes2] * absmax2[:, None]
        s2 = s2 * beta2 + (one - beta2) * g * g
        s1 = numbers1[codes1] * absmax1[:, None]
        s1 = s1 * beta1 + (one - beta1) * g
        way = way + step_size * (s1 / (np.sqrt(s2) + correction2 * eps))
        codes1, absmax1 = torch_codes(s1, code1, 256)
        codes2, absmax2 = torch_codes(s2, code2, 256)
        # A number keeps its sign: a negative one is not written as 0.
        other_sign = np.signbit(numbers1[codes1]) != np.signbit(s1)
        codes1 = codes1 + np.where(other_sign, np.where(s1 > 0, 1, -1), 0).astype(np.uint8)
    assert way.dtype == np.float32
    return way.ravel()


def way_from_zero(tx, grads):
    @jax.jit
    def walked(grads):
        def step(carry, g):
            updates, state = tx.update(g, carry[1], carry[0])
            return (optax.apply_updates(carry[0], updates), state), None

        start = jnp.zeros_like(grads[0])
        return jax.lax.scan(step, (start, tx.init(start)), grads)[0][0]

    return np.ravel(walked(grads))


def test_adam_in_8_bits_walks_as_that_of_bitsandbytes():
    """Adam walks as kOptimizerStatic8bit2StateBlockwise<ADAM> does.

    bitsandbytes-foundation/bitsandbytes@95f9af30:csrc/kernels.cu. Its blocks run through the
    flattened array, and it skips gradients that are not finite: here rows are whole blocks, and all
    gradients are finite. Its sign rule moves only numbers below 3e-7 of their block's largest.
    """
    rng = np.random.default_rng(3)
    scales = 10 ** (np.linspace(-4, 0, 8)[:, None] + rng.uniform(-1.5, 0, (8, 512)))
    grads = ((rng.standard_normal((200, 8, 512)) + 0.3) * scales).astype(np.float32)
    wanted = adam8bit_way(grads, 1e-3)
    plain = way_from_zero(optax.adam(1e-3), grads)
    way = way_from_zero(lbopt.compress_state(optax.adam(1e-3), block_size=256), grads)

    # 1 - 0.999 in fp32 is off by 1.3e-5, of which the root takes half. A few numbers near the
    # middle of two codes get the other code, as fp32 rounds differently here and there.
    assert np.quantile(abs(way - wanted), 0.99) < 1e-5 * np.max(abs(wanted))
    tolerance = 1e-3
    assert np.linalg.norm(way - wanted) < tolerance * np.linalg.norm(wanted)
    assert np.linalg.norm(plain - wanted) > 20 * tolerance * np.linalg.norm(wanted)


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


@pytest.mark.parametrize("name", ["lars", "adamh", "muon", "muown", "soap"])
def test_optimizers_warn_once_of_all_leaves_in_bf16(name):
    params = {"kernel": jnp.ones((8, 8), jnp.bfloat16), "bias": jnp.ones(8, jnp.bfloat16)}
    with pytest.warns(UserWarning, match="bias, kernel: in 16 bits") as caught:
        getattr(lbopt, name)(0.1).init(params)
    assert len(caught) == 1
    lbopt.round_stochastically(getattr(lbopt, name)(0.1)).init(params)  # warnings are errors here


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
