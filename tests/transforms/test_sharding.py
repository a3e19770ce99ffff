"""Transforms keep their state's placement, and match their results on whole parameters."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

import lbopt

MAKE = {
    "trust_ratio": functools.partial(lbopt.scale_by_layerwise_trust_ratio, weight_decay=0.1),
    "lamb_moments": lbopt.scale_by_lamb_moments,
    "lars_momentum": lbopt.scale_by_lars_momentum,
    "clip": functools.partial(lbopt.clip_by_global_norm, 1.0),
    "learning_rate": functools.partial(lbopt.scale_by_learning_rate, 0.1),
    "lamb": functools.partial(lbopt.lamb, 0.1, weight_decay=0.1, max_grad_norm=1.0),
    "lars": functools.partial(lbopt.lars, 0.1, weight_decay=0.1),
    "lars_outside": functools.partial(lbopt.lars, 0.1, weight_decay=0.1, variant="nus"),
    "lars_flax": functools.partial(lbopt.lars, 0.1, variant="flax"),
    "lans": functools.partial(lbopt.lans, 0.1, weight_decay=0.1),
    "normalize": lbopt.normalize_gradients,
    "skip": functools.partial(lbopt.skip_bad_updates, lbopt.lamb(0.1), spike_factor=5.0),
    "ema": functools.partial(lbopt.track_ema, 0.9),
    "monitor": lbopt.monitor_layers,
    "relative": functools.partial(lbopt.relative_update, "initial"),
    "hyperball": lbopt.hyperball,
    "brake": lbopt.radial_brake,
    "floor": functools.partial(lbopt.update_floor, 2.0),
    "cautious": functools.partial(lbopt.cautious, lbopt.scale_by_lars_momentum(0.8)),
}
KEPT_BY_PATH = {
    "newton_schulz": lbopt.scale_by_newton_schulz,
    "neuron_norm": lbopt.transforms.scale_by_neuron_norm,
    "soap": lbopt.scale_by_soap,
    "dion": lbopt.scale_by_dion,
    "muonh": functools.partial(lbopt.muonh, 0.1),
    "muloco": functools.partial(lbopt.muloco, 0.1),
    "compress": functools.partial(lbopt.compress_state, lbopt.lamb(0.1), min_size=1, min_length=1),
    "compress_bf16": functools.partial(
        lbopt.compress_state, lbopt.lamb(0.1), "bf16_stochastic", min_size=1, min_length=1
    ),
    "round": functools.partial(lbopt.round_stochastically, lbopt.lamb(0.1)),
    "compensate": functools.partial(lbopt.compensate_rounding, lbopt.lamb(0.1)),
    "adamh": functools.partial(lbopt.adamh, 0.1),
    "shampoo": lbopt.scale_by_shampoo,
    "kron": lbopt.scale_by_kron,
    "muown": functools.partial(lbopt.muown, 0.1),
}
"""Transforms with arrays in their states that are not shaped like parameters, or with noise."""
SPECS = {
    "replicated": {"kernel": P(), "bias": P()},
    "sharded": {"kernel": P(None, "x"), "bias": P("x")},
}


@pytest.fixture(scope="module")
def values():
    rng = np.random.default_rng(5)

    def draw():
        return {
            "kernel": np.float32(rng.normal(size=(3, 8))),
            "bias": np.float32(rng.normal(size=8)),
        }

    return draw(), draw()


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("name", MAKE)
def test_state_keeps_its_shardings_over_updates(name, spec, values):
    mesh = jax.make_mesh((4,), ("x",), axis_types=(AxisType.Auto,))
    whole = NamedSharding(mesh, P())
    params, gradient = (
        jax.device_put(tree, {key: NamedSharding(mesh, SPECS[spec][key]) for key in tree})
        for tree in values
    )

    tx = MAKE[name]()
    shardings = jax.tree.map(lambda leaf: leaf.sharding if leaf.ndim else whole, tx.init(params))
    for leaf in jax.tree.leaves(tx.init(params)):
        assert leaf.ndim == 0 or leaf.sharding == NamedSharding(
            mesh, SPECS[spec]["kernel" if leaf.ndim == 2 else "bias"]
        )

    state = jax.device_put(tx.init(params), shardings)
    update = jax.jit(tx.update)

    for _ in range(2):
        updates, state = update(gradient, state, params)
        for leaf, sharding in zip(jax.tree.leaves(state), jax.tree.leaves(shardings), strict=True):
            assert leaf.sharding.is_equivalent_to(sharding, leaf.ndim)
        for key in updates:
            assert updates[key].sharding.is_equivalent_to(params[key].sharding, params[key].ndim)


@pytest.mark.parametrize("name", [*MAKE, *KEPT_BY_PATH])
def test_sharding_types_are_stable_on_an_explicit_mesh(name):
    mesh = jax.make_mesh((4,), ("x",), axis_types=(AxisType.Explicit,))
    with jax.set_mesh(mesh):
        params = {
            "kernel": jnp.ones(
                (2, 8, 4), jnp.float16, out_sharding=NamedSharding(mesh, P(None, "x"))
            )
        }
        tx = {**MAKE, **KEPT_BY_PATH}[name]()
        eager = tx.init(params)
        jitted = jax.jit(tx.init)(params)
        assert jax.tree.map(jax.typeof, eager) == jax.tree.map(jax.typeof, jitted)
        updates, state = jax.jit(tx.update)(params, jitted, params)
        assert jax.tree.map(jax.typeof, state) == jax.tree.map(jax.typeof, eager)
        assert jax.tree.map(jax.typeof, updates) == jax.tree.map(jax.typeof, params)


@pytest.mark.parametrize(
    "name", [*MAKE, "adamh", "compress", "compress_bf16", "round", "compensate"]
)
def test_sharded_equals_whole(name, values):
    mesh = jax.make_mesh((4,), ("x",), axis_types=(AxisType.Auto,))
    params, gradient = (
        jax.device_put(tree, {key: NamedSharding(mesh, SPECS["sharded"][key]) for key in tree})
        for tree in values
    )
    tx = {**MAKE, **KEPT_BY_PATH}[name]()
    sharded, _ = jax.jit(tx.update)(gradient, tx.init(params), params)
    expected, _ = tx.update(
        *(
            jax.tree.map(jnp.asarray, values[1]),
            tx.init(values[0]),
            jax.tree.map(jnp.asarray, values[0]),
        )
    )
    for key in expected:
        assert np.linalg.norm(sharded[key] - expected[key]) <= 1e-6 * np.linalg.norm(expected[key])


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
def test_types_are_stable_where_a_stack_is_split_along_its_layers(axis_type):
    """This covers a scan, a condition, and wrappers that choose between old and new states."""
    mesh = jax.make_mesh((2,), ("x",), axis_types=(axis_type,))
    stacked = lbopt.stacked_paths("^layers/")
    tx = optax.chain(lbopt.lamb(0.1, stacked=stacked), lbopt.monitor_layers(stacked))
    wrapped = [
        tx,
        lbopt.skip_bad_updates(tx),
        optax.MultiSteps(tx, 2),
        optax.apply_if_finite(tx, 3),
    ]
    with jax.set_mesh(mesh):
        params = {
            "layers": {"kernel": jax.device_put(jnp.ones((4, 3, 3)), NamedSharding(mesh, P("x")))}
        }
        for each in wrapped:

            def step(carry, _=None, each=each):
                updates, state = each.update(carry[0], carry[1], carry[0])
                return (jax.tree.map(jnp.add, carry[0], updates), state), None

            def steps(carry, step=step):
                carry, _ = jax.lax.scan(step, carry, None, length=2)
                return jax.lax.cond(
                    carry[0]["layers"]["kernel"].sum() > 0, lambda c: step(c)[0], lambda c: c, carry
                )

            state = each.init(params)
            after = jax.eval_shape(steps, (params, state))
            assert types(after[1]) == types(jax.eval_shape(lambda state: state, state))


def types(state):
    """A constant belongs to no mesh, and counts as a replicated array of any mesh."""
    return jax.tree.map(lambda x: (x.shape, x.dtype, jax.typeof(x).sharding.spec), state)
