"""Matrices dealt over devices: the same numbers, few collectives, none in the iterations."""

import functools
import json
import os
import pathlib
import re
import runpy
import subprocess
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
from jobs import on_devices
from refusal import refused

import lbopt
from lbopt.parallel import split_sharding
from lbopt.parallel._shard_matrices import cost, deal_matrices, makespan
from lbopt.transforms import MatrixGroup

PROGRAM = pathlib.Path(__file__).with_name("matrices_on_devices.py")
SHARED = types.SimpleNamespace(**runpy.run_path(str(PROGRAM)))
PARAMS = SHARED.PARAMS
GRADS = SHARED.GRADS
NAMES = ("muon", "normuon", "muonh", "dion", "soap")
SPECS = {
    "layers": {"up": {"kernel": P(None, "x", None)}, "down": {"kernel": P(None, None, "x")}},
    "query": {"kernel": P("x")},
    "mixer": {"kernel": P(None, "x"), "bias": P()},
    "embed": {"embedding": P()},
}
LIMITS = {"soaph": 2e-5}  # what is left of a gradient beside the weight, in a turned basis
LIMIT = 5e-6


def walk(tx, params, grads):
    return SHARED.walk(tx, params, tx.init(params), grads)


def check(found, name):
    theirs = SHARED.alone(name)
    found = jax.device_get(found)
    assert jax.tree.structure(found) == jax.tree.structure(theirs)
    for mine, other in zip(jax.tree.leaves(found), jax.tree.leaves(theirs), strict=True):
        assert np.linalg.norm(mine - other) <= LIMIT * max(np.linalg.norm(other), 1e-30)


@pytest.mark.everyday(
    "muon-stack-4", "muon-owner-4", "normuon-auto-4", "muonh-owner-4", "dion-auto-4", "soap-auto-4"
)
@pytest.mark.parametrize("count", [1, 4])
@pytest.mark.parametrize("by", ["stack", "owner", "auto"])
@pytest.mark.parametrize("name", NAMES)
def test_whole_leaves_under_jit(name, by, count):
    tx = lbopt.shard_matrices(SHARED.MAKE[name](), SHARED.mesh_of(count), by)
    whole = NamedSharding(SHARED.mesh_of(count), P())
    params, grads = jax.device_put((PARAMS, GRADS), whole)
    check(jax.jit(functools.partial(walk, tx))(params, grads), name)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("by", ["stack", "owner"])
def test_split_leaves(kind, by):
    mesh = SHARED.mesh_of(4, kind)
    shardings = jax.tree.map(lambda spec: NamedSharding(mesh, spec), SPECS)
    params = jax.device_put(PARAMS, shardings)
    grads = [jax.device_put(gradient, shardings) for gradient in GRADS]
    with jax.set_mesh(mesh):
        tx = lbopt.shard_matrices(SHARED.MAKE["muon"](), mesh, by, param_shardings=shardings)
        found, state = jax.jit(functools.partial(walk, tx))(params, grads)
        for leaf, where in zip(jax.tree.leaves(found), jax.tree.leaves(shardings), strict=True):
            assert kind == AxisType.Auto or leaf.sharding.is_equivalent_to(where, leaf.ndim)
    check((found, state), "muon")


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_leaves_that_are_split_over_two_axes(kind):
    mesh = jax.make_mesh((2, 2), ("x", "y"), axis_types=(kind, kind))
    specs = {
        "layers": {"up": {"kernel": P(None, "x", "y")}, "down": {"kernel": P(None, "x", "y")}},
        "query": {"kernel": P("y")},
        "mixer": {"kernel": P(None, ("x", "y")), "bias": P()},
        "embed": {"embedding": P()},
    }
    shardings = jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs)
    params, *grads = jax.device_put((PARAMS, *GRADS), (shardings,) * (1 + len(GRADS)))
    with jax.set_mesh(mesh):
        tx = lbopt.shard_matrices(SHARED.MAKE["muon"](), mesh, param_shardings=shardings)
        check(jax.jit(functools.partial(walk, tx))(params, grads), "muon")


def test_inside_shard_map():
    mesh = SHARED.mesh_of(4)
    tx = lbopt.shard_matrices(SHARED.MAKE["normuon"](), mesh, "owner")
    inside = jax.shard_map(
        functools.partial(walk, tx), mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False
    )
    check(jax.jit(inside)(PARAMS, GRADS), "normuon")


def test_leaves_that_are_split_inside_shard_map_are_refused():
    mesh = SHARED.mesh_of(4)
    tx = lbopt.shard_matrices(lbopt.muon(0.1), mesh, param_shardings=lambda shape: P("x"))
    params = {"a": {"kernel": jnp.ones((8, 8))}}
    inside = jax.shard_map(
        functools.partial(walk, tx), mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False
    )
    with refused("param_shardings/a/kernel", P("x"), "conflict"):
        inside(params, [params])


def test_with_a_sharded_update_in_a_training_step():
    mesh = lbopt.make_mesh(4)

    def loss_fn(params, model_state, batch, rng):
        x = batch["x"] @ params["a"]["kernel"]
        return jnp.mean((jnp.tanh(x) @ params["b"]["kernel"] - batch["y"]) ** 2), (model_state, {})

    rng = np.random.default_rng(0)
    params = {name: {"kernel": np.float32(0.1 * rng.normal(size=(128, 128)))} for name in "ab"}
    batch = {name: np.float32(rng.normal(size=(8, 128))) for name in "xy"}
    ends = []
    for options in ({}, {"shard_update": True}):
        tx = lbopt.muon(0.02, products_dtype=None)
        if options:
            where = functools.partial(split_sharding, mesh)
            tx = lbopt.shard_matrices(tx, mesh, param_shardings=where)
        step = lbopt.make_train_step(loss_fn, tx, mesh, **options)
        state = step.place(lbopt.TrainState.create(params, {}, tx))
        for _ in range(2):
            state, _ = step(state, batch)
            jax.block_until_ready(state)
        ends.append(jax.device_get(state.params))
    for mine, other in zip(*map(jax.tree.leaves, ends), strict=True):
        assert np.linalg.norm(mine - other) <= 5e-6 * np.linalg.norm(other)


@pytest.mark.everyday("muonh", "soap")
@pytest.mark.parametrize("name", SHARED.MAKE)
def test_checkpoints_pass_from_one_mesh_to_another(name):
    """Parameters and state are split in another way for each update."""
    gaps = SHARED.gaps(name, [1, 2, 4])
    assert max(gaps.values()) <= LIMITS.get(name, LIMIT)


@pytest.mark.process
@pytest.mark.slow
def test_one_four_and_eight_devices():
    done = subprocess.run(
        [sys.executable, str(PROGRAM), "1", "4", "8"],
        env=on_devices(8) | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout)
    assert found.keys() == SHARED.MAKE.keys()
    for name, gaps in found.items():
        assert max(gaps.values()) <= LIMITS.get(name, LIMIT), name


COLLECTIVES = ("all-to-all", "all-gather", "all-reduce", "reduce-scatter", "collective-permute")


def counted(text):
    """Return {collective: count} of a compiled program."""
    found = {name: len(re.findall(rf" {name}(?:-start)?\(", text)) for name in COLLECTIVES}
    return {name: count for name, count in found.items() if count}


def collectives(by, specs):
    """Return {collective: count} of one orthogonalization of two groups of shapes."""
    mesh = SHARED.mesh_of(4)
    shapes = {"a": (4, 64, 128), "b": (4, 128, 64), "c": (2, 64, 64)}
    tx = lbopt.shard_matrices(
        lbopt.scale_by_newton_schulz(stacked=lambda path, leaf: True),
        mesh,
        by,
        param_shardings=specs,
    )
    arguments = {
        name: {
            "kernel": jax.ShapeDtypeStruct(
                shape,
                jnp.float32,
                sharding=NamedSharding(mesh, specs[name]["kernel"] if specs else P()),
            )
        }
        for name, shape in shapes.items()
    }
    where = jax.tree.map(lambda leaf: leaf.sharding, arguments)

    update = jax.jit(lambda grads: tx.update(grads, tx.init(grads))[0], out_shardings=where)
    return counted(update.lower(arguments).compile().as_text())


@pytest.mark.parametrize("by", ["stack", "owner"])
def test_collectives_of_each_shape(by):
    # a and the transpose of b are one shape, c another.
    assert collectives(by, None) == {"all-gather": 2}


@pytest.mark.parametrize("by", ["stack", "owner"])
def test_fewer_matrices_than_devices_are_summed(by):
    """Padding is not sent: one of four devices has the matrix."""
    mesh = SHARED.mesh_of(4)
    plain = lbopt.scale_by_newton_schulz(dtype=None)
    tx = lbopt.shard_matrices(plain, mesh, by)
    grads = {"a": {"kernel": PARAMS["mixer"]["kernel"]}}

    def update(tx):
        return jax.jit(lambda grads: tx.update(grads, tx.init(grads))[0])

    whole = jax.device_put(grads, NamedSharding(mesh, P()))
    compiled = update(tx).lower(whole).compile()
    assert counted(compiled.as_text()) == {"all-reduce": 1}
    found = compiled(whole)
    theirs = update(plain)(grads)
    np.testing.assert_allclose(found["a"]["kernel"], theirs["a"]["kernel"], rtol=0, atol=1e-6)


def test_split_leaves_take_two_all_to_alls_a_shape():
    rows = P(None, "x", None)
    columns = P(None, None, "x")
    specs = {"a": {"kernel": rows}, "b": {"kernel": columns}, "c": {"kernel": rows}}
    assert collectives("stack", specs) == {"all-to-all": 4}
    # Both a and b along their inputs: one along its longer side, the other along its shorter.
    specs["b"]["kernel"] = rows
    assert collectives("stack", specs) == {"all-to-all": 6}


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_layers_and_merged_axes_that_are_split_are_moved_and_not_gathered(kind):
    """Layers move to rows, heads stay, and the inputs of a convolution move to its outputs."""
    mesh = SHARED.mesh_of(4, kind)
    specs = {"layers": P("x"), "query": P(None, "x"), "conv": P(None, None, "x")}
    shapes = {"layers": (4, 32, 16), "query": (32, 4, 4), "conv": (3, 3, 16, 8)}
    rng = np.random.default_rng(0)
    grads = {name: {"kernel": np.float32(rng.normal(size=s))} for name, s in shapes.items()}
    where = {name: {"kernel": NamedSharding(mesh, spec)} for name, spec in specs.items()}
    plain = lbopt.scale_by_newton_schulz(dtype=None, stacked=SHARED.STACKED)
    tx = lbopt.shard_matrices(plain, mesh, param_shardings=where)

    with jax.set_mesh(mesh):
        split = jax.device_put(grads, where)
        update = jax.jit(lambda grads: tx.update(grads, tx.init(grads))[0], out_shardings=where)
        compiled = update.lower(split).compile()
        found = jax.device_get(compiled(split))
    # An all-to-all before and after, and for the moved ones another of both.
    assert counted(compiled.as_text()) == {"all-to-all": 10}
    theirs = plain.update(grads, plain.init(grads))[0]
    for mine, other in zip(*map(jax.tree.leaves, (found, theirs)), strict=True):
        np.testing.assert_allclose(mine, other, rtol=0, atol=2e-6)


def test_two_split_axes_take_two_all_to_alls_before_and_two_after():
    """Three matrices on four devices: padding is sent to nobody."""
    mesh = jax.make_mesh((2, 2), ("x", "y"), axis_types=(AxisType.Auto,) * 2)
    where = NamedSharding(mesh, P("x", "y"))
    leaf = jax.ShapeDtypeStruct((64, 64), jnp.float32, sharding=where)
    grads = {str(index): {"kernel": leaf} for index in range(3)}
    plain = lbopt.scale_by_newton_schulz()
    tx = lbopt.shard_matrices(plain, mesh, param_shardings=lambda shape: where)
    update = jax.jit(lambda grads: tx.update(grads, tx.init(grads))[0], out_shardings=where)
    assert counted(update.lower(grads).compile().as_text()) == {"all-to-all": 4}


def test_what_soap_keeps_is_never_gathered():
    """Updates, two moments, two factors and two bases of one shape take two all-to-alls each."""
    mesh = SHARED.mesh_of(4)
    params = {str(index): {"kernel": jnp.ones((32, 64))} for index in range(4)}
    plain = lbopt.scale_by_soap()
    place, arguments = SHARED.placed(mesh, (params, plain.init(params)))
    tx = lbopt.shard_matrices(plain, mesh, param_shardings=place)
    where = jax.tree.map(lambda x: x.sharding, arguments)
    text = jax.jit(tx.update, out_shardings=where).lower(*arguments).compile().as_text()
    assert counted(text) == {"all-to-all": 14}


def test_owners_are_packed_by_cost():
    groups = [
        MatrixGroup((64, 64), 5),
        MatrixGroup((64, 256), 3),
        MatrixGroup((32, 32), 2),
    ]
    stacked = deal_matrices(groups, 4, "stack")
    owned = deal_matrices(groups, 4, "owner")
    for orders in (stacked, owned):
        for group, order in zip(groups, orders, strict=True):
            assert sorted(order[order >= 0]) == list(range(group.number))
            assert order.shape[0] == 4
    total = sum(cost(group) * group.number for group in groups)
    assert makespan(groups, owned) <= 4 / 3 * max(total / 4, cost(groups[1]))
    assert makespan(groups, owned) < makespan(groups, stacked)
    assert [order.tolist() for order in deal_matrices(groups, 4, "auto")] == [
        o.tolist() for o in owned
    ]


def test_stacking_different_shapes_says_what_it_costs():
    mesh = SHARED.mesh_of(4)
    params = {str(i): {"kernel": jnp.ones((8 + i, 12))} for i in range(4)}
    tx = lbopt.shard_matrices(lbopt.scale_by_newton_schulz(), mesh, "stack")
    with pytest.warns(UserWarning, match=r"4 matrices of 4 shapes on 4 devices take \d\.\d times"):
        jax.eval_shape(tx.update, params, ())


def test_wrong_arguments_are_refused_in_one_line():
    mesh = SHARED.mesh_of(4)
    with refused("by", "rows", "choice"):
        lbopt.shard_matrices(lbopt.muon(0.1), mesh, "rows")
    with refused("axis_names", "model", "value"):
        lbopt.shard_matrices(lbopt.muon(0.1), mesh, axis_names="model")
    with refused("tx", 3, "type"):
        lbopt.shard_matrices(3, mesh)
    with refused("mesh", None, "type"):
        lbopt.shard_matrices(lbopt.muon(0.1), None)

    params = {"a": {"kernel": jnp.ones((4, 4))}}
    for given, field in (
        ({"b": {"kernel": P("x")}}, "param_shardings"),
        ({"a": {"kernel": "x"}}, "param_shardings/a/kernel"),
        ({"a": {"kernel": P("y")}}, "param_shardings/a/kernel"),
        (lambda shape: None, "param_shardings/a/kernel"),
        (lambda: P(), "param_shardings"),
    ):
        with refused(field):
            tx = lbopt.shard_matrices(lbopt.muon(0.1), mesh, param_shardings=given)
            tx.update(params, tx.init(params), params)
