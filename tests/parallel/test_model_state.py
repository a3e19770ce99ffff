"""Model state keeps its dtypes and is reduced by leaf; a second step causes no second trace."""

import contextlib
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.core import FrozenDict, freeze
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from refusal import refused

import lbopt
from lbopt.errors import NO_VALUE
from lbopt.parallel._gradients import make_gradient_fn

STEPS = 2
OPTIONS = {
    "jit": {},
    "microsteps": {"num_microsteps": 2},
    "pmap": {"backend": "pmap"},
    "pmap and microsteps": {"backend": "pmap", "num_microsteps": 2},
    "clip of replicas": {"clip": lbopt.GradientClip(1.0, "replica")},
    "reduced in bf16": {"reduction": lbopt.AllReduce(jnp.bfloat16)},
    "scattered": {"reduction": lbopt.ReduceScatter()},
    "rows": {"reduction": lbopt.Aggregate(lbopt.aps(), 2), "num_microsteps": 2},
}


def first_state():
    return {
        "count": jnp.zeros((), jnp.int32),
        "bytes": jnp.zeros(2, jnp.int8),
        "nibbles": jnp.zeros(2, jnp.int4),
        "last_of_uint32": jnp.full((), 2**32 - 2, jnp.uint32),
        "first": jnp.ones((), bool),
        "key": jax.random.key(1),
        "other_key": jax.random.split(jax.random.key(1, impl="rbg"), 2),
        "half": jnp.zeros(3, jnp.float16),
        "promoted": jnp.zeros(3, jnp.bfloat16),
        "eighth": jnp.zeros(3, jnp.float8_e4m3fn),
        "complex": jnp.zeros(2, jnp.complex64),
        "python": (0, 1.5, True),
        "nothing": [None, {}, np.zeros(2, jax.dtypes.float0)],
    }


def next_state(state, mean):
    return {
        **{name: state[name] + 1 for name in ("count", "bytes", "nibbles", "last_of_uint32")},
        "first": jnp.zeros_like(state["first"]),
        "key": jax.random.fold_in(state["key"], 7),
        "other_key": jax.vmap(jax.random.fold_in, (0, None))(state["other_key"], 7),
        "half": state["half"] + 1,
        "promoted": state["promoted"] + jnp.float32(mean),
        "eighth": (state["eighth"].astype(jnp.float32) + 1).astype(jnp.float8_e4m3fn),
        "complex": state["complex"] + 1j,
        "python": (state["python"][0] + 1, state["python"][1] * 2, False),
        "nothing": state["nothing"],
    }


def data(leaf):
    keys = jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    return np.asarray(jax.random.key_data(leaf) if keys else leaf)


def traced_loss():
    """Return a loss whose state has leaves of all kinds, and a list that grows with each trace."""
    traces = []

    def loss_fn(params, state, batch, rng):
        traces.append(None)
        loss = jnp.mean(jnp.square(batch["x"] @ params["w"]))
        size = len(batch["x"])
        return loss, (
            next_state(state, jnp.mean(batch["x"])),
            {"loss": (loss * size, jnp.float32(size))},
        )

    return loss_fn, traces


@pytest.mark.parametrize("option", OPTIONS)
def test_a_state_of_all_kinds_keeps_dtypes_and_is_traced_once(option):
    loss_fn, traces = traced_loss()
    tx = optax.sgd(0.1)
    step = lbopt.make_train_step(loss_fn, tx, lbopt.make_mesh(4), donate=False, **OPTIONS[option])

    weights = {"w": jnp.full((2, 2), 0.5)}  # a weak type, which an update would make strong
    state = step.place(lbopt.TrainState.create(weights, first_state(), tx))
    dtypes = [leaf.dtype for leaf in jax.tree.leaves(state.model_state)]
    first_traces = 0
    expected = first_state()

    for done in range(STEPS):
        state, _ = jax.block_until_ready(step(state, {"x": np.ones((16, 2), np.float32)}))
        first_traces = first_traces or len(traces)
        expected = next_state(expected, 1.0)
        assert len(traces) == first_traces <= 2, f"traced again in step {done}"

    assert jax.tree.structure(state.model_state) == jax.tree.structure(expected)
    assert [leaf.dtype for leaf in jax.tree.leaves(state.model_state)] == dtypes
    for got, wanted in zip(
        jax.tree.leaves(state.model_state), jax.tree.leaves(expected), strict=True
    ):
        np.testing.assert_array_equal(
            data(got), data(jnp.asarray(wanted)) if np.isscalar(wanted) else data(wanted)
        )


def test_all_contexts_exist_before_the_first_trace():
    """In this process other tests may have made them, so ask a new one."""
    code = "import sys, lbopt; lbopt.make_train_step; print(*sys.modules)"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert {"lbopt.masks._recording", "lbopt.replicas"} <= set(shown.stdout.split())


ELSEWHERE = {
    "fresh": lambda tree: tree,
    "restored as NumPy's": lambda tree: jax.tree.map(np.asarray, tree),
    "committed to a device": lambda tree: jax.device_put(tree, jax.devices()[0]),
    "restored with Python's and NumPy's numbers": lambda tree: tree.replace(
        step=0, opt_state=jax.tree.map(lambda x: x if x.ndim else np.int64(x), tree.opt_state)
    ),
    "on fewer devices": lambda tree: jax.device_put(
        tree, NamedSharding(Mesh(jax.devices()[:2], "data"), PartitionSpec())
    ),
    "on a mesh of another name": lambda tree: jax.device_put(
        tree, NamedSharding(Mesh(jax.devices()[:4], "batch"), PartitionSpec())
    ),
}


LAYOUTS = [
    ((jax.devices()[:4], "data"), PartitionSpec("data")),
    ((jax.devices()[:4], "data"), PartitionSpec()),
    (
        (jax.devices()[3::-1], "data"),
        PartitionSpec("data"),
    ),  # JAX would swap the devices' shards, or crash
    ((jax.devices()[:2], "batch"), PartitionSpec(None, "batch")),
]


@pytest.mark.parametrize("option", ["jit", "pmap", "reduced in bf16", "scattered"])
def test_a_state_or_a_batch_that_nobody_placed_is_traced_once(option):
    traces = []
    tx = optax.adam(0.1)

    def loss_fn(params, state, batch, rng):
        traces.append(None)
        return jnp.mean(batch["x"] @ params["w"]), (state, {"loss": (jnp.zeros(()), jnp.ones(()))})

    def metric_fn(params, state, batch):
        traces.append(None)
        return {"sum": (jnp.sum(batch["x"] @ params["w"]), len(batch["x"]))}

    mesh = lbopt.make_mesh(4)
    batch = {"x": np.arange(64, dtype=np.float32).reshape(16, 4)}
    step = lbopt.make_train_step(loss_fn, tx, mesh, donate=False, **OPTIONS[option])
    evaluate = lbopt.make_eval_step(metric_fn, mesh, OPTIONS[option].get("backend", "jit"))
    for name, put in ELSEWHERE.items():
        if option == "scattered" and ("on " in name or "device" in name):
            continue  # there the user chose where it lies, and is told that it is not the place
        state = put(lbopt.TrainState.create({"w": jnp.ones((4, 4))}, {}, tx))
        for _ in range(2):
            evaluate(state.params, state.model_state, batch)
            state, _ = jax.block_until_ready(step(state, batch))
        assert len(traces) == 2, f"{name}: the steps were traced {len(traces)} times"
    for where in (
        None,
        jax.devices()[1],
        *(NamedSharding(Mesh(*of), spec) for of, spec in LAYOUTS),
    ):
        elsewhere = (
            jax.tree.map(jnp.asarray, batch) if where is None else jax.device_put(batch, where)
        )
        assert (
            evaluate(state.params, {}, elsewhere)["sum"] == evaluate(state.params, {}, batch)["sum"]
        ), where
        state, _ = jax.block_until_ready(step(state, elsewhere))
    assert len(traces) == 2, (
        f"batches that lie otherwise: the steps were traced {len(traces)} times"
    )


@pytest.mark.parametrize(
    ("returned", "leaf", "code", "shapes"),
    [
        (lambda state: {}, "count", "missing", []),
        (lambda state: None, "count", "missing", []),
        (lambda state: {**state, "each": state["each"][:4]}, "each", "type", ["(8,)", "(4,)"]),
    ],
)
def test_a_state_that_comes_back_short_is_refused_by_leaf(returned, leaf, code, shapes):
    def loss_fn(params, state, batch, rng):
        return jnp.sum(params["w"]), (returned(state), {"loss": (0.0, 1.0)})

    state = lbopt.TrainState.create(
        {"w": jnp.ones(2)}, {"count": jnp.zeros(()), "each": jnp.zeros(8)}, optax.sgd(0.1)
    )
    for options in ({}, {"backend": "pmap", "num_microsteps": 2}):
        step = lbopt.make_train_step(loss_fn, optax.sgd(0.1), lbopt.make_mesh(4), **options)
        with refused(f"model_state/{leaf}", NO_VALUE, code) as caught:
            step.lower(state, {"x": np.ones((8, 2), np.float32)})
        assert re.findall(r"\(\d,\)", caught.value.reason) == shapes


def test_a_state_comes_back_in_its_own_containers():
    def loss_fn(params, state, batch, rng):
        return jnp.sum(params["w"]), (
            {"count": dict(state["count"]), "new": 1},
            {"loss": (0.0, 1.0)},
        )

    gradients = make_gradient_fn(loss_fn)
    arguments = {"w": jnp.ones(2)}, {"count": freeze({"a": jnp.zeros(2)})}, {}, jax.random.key(0)
    assert not isinstance(
        jax.eval_shape(gradients, *arguments).model_state["count"], FrozenDict
    )  # a leaf was added, so the structure differs
    arguments[1]["new"] = jnp.zeros((), jnp.int32)
    found = jax.eval_shape(gradients, *arguments).model_state
    assert isinstance(found["count"], FrozenDict)
    assert found["new"].dtype == jnp.int32
    assert not found["new"].weak_type


@pytest.mark.parametrize(
    ("options", "number"),
    [
        ({}, 0),
        ({"num_microsteps": 2}, 1),  # examples 1, 3, 5, ...
        ({"backend": "pmap"}, 0),
        ({"backend": "pmap", "num_microsteps": 2}, 1),
        ({"reduction": lbopt.AllReduce(jnp.float32)}, 0),
        ({"reduction": lbopt.Aggregate(lbopt.aps(), 2), "num_microsteps": 2}, 1),
    ],
)
def test_where_they_differ_leaves_without_a_mean_are_the_first_replicas_after_its_last_microstep(
    options, number
):
    def loss_fn(params, state, batch, rng):
        first = batch["number"][0]
        state = {
            "int": first,
            "odd": first % 2 == 1,
            "key": jax.random.fold_in(state["key"], first),
        }
        state["mean"] = jnp.mean(batch["number"].astype(jnp.float16))
        return jnp.sum(params["w"]), (state, {"loss": (jnp.zeros(()), jnp.ones(()))})

    tx = optax.sgd(0.1)
    key = jax.random.key(3)
    before = {
        "int": jnp.zeros((), jnp.int32),
        "odd": jnp.zeros((), bool),
        "key": key,
        "mean": jnp.zeros((), "float16"),
    }
    step = lbopt.make_train_step(loss_fn, tx, lbopt.make_mesh(4), donate=False, **options)
    state = step.place(lbopt.TrainState.create({"w": jnp.zeros(2)}, before, tx))
    found, _ = jax.block_until_ready(step(state, {"number": np.arange(16, dtype=np.int32)}))
    assert (int(found.model_state["int"]), bool(found.model_state["odd"])) == (
        number,
        number % 2 == 1,
    )
    np.testing.assert_array_equal(
        data(found.model_state["key"]), data(jax.random.fold_in(key, number))
    )
    assert float(found.model_state["mean"]) == 7.5
    for leaf in jax.tree.leaves(found.model_state):
        copies = [data(shard.data).tolist() for shard in leaf.addressable_shards]
        assert copies == copies[:1] * 4, "replicas keep different states"


@pytest.mark.parametrize("backend", ["jit", "pmap"])
def test_an_evaluation_takes_a_state_of_all_kinds(backend):
    def metric_fn(params, state, batch):
        drawn = jax.random.bernoulli(state["key"], 1.0)
        return {"seen": (jnp.sum(batch["mask"] & drawn & state["first"]), len(batch["mask"]))}

    step = lbopt.make_eval_step(metric_fn, lbopt.make_mesh(4), backend)
    found = step({}, first_state(), {"mask": np.arange(8) < 5})
    assert [int(part) for part in found["seen"]] == [5, 8]


def test_an_evaluation_of_three_arrays_under_pmap():
    """JAX used to take each array for one of the three arguments."""
    step = lbopt.make_eval_step(
        lambda params, state, batch: {
            "sum": (batch["x"].sum() + batch["y"].sum() + params["w"], 1.0)
        },
        lbopt.make_mesh(4),
        "pmap",
    )
    found = step(
        {"w": jnp.ones(())}, {}, {"x": np.ones((4, 2), np.float32), "y": np.ones(4, np.float32)}
    )
    assert [float(part) for part in found["sum"]] == [16, 4]


@pytest.mark.parametrize(
    ("counted", "options", "whole"),
    [
        (True, {"num_microsteps": 2}, False),
        (True, {}, True),
        (False, {"num_microsteps": 2}, True),
        (True, {"backend": "pmap"}, False),
        (True, {"reduction": lbopt.AllReduce(jnp.float32)}, False),
        (True, {"reduction": lbopt.Aggregate(lbopt.aps(), 2)}, False),
        (False, {"backend": "pmap"}, True),
    ],
)
def test_a_mean_over_what_is_counted_in_the_batch_is_refused_in_parts(counted, options, whole):
    def loss_fn(params, state, batch, rng):
        each = batch["x"] @ params["w"]
        weight = batch["tokens"] if counted else jnp.ones_like(batch["tokens"])
        total = jnp.sum(each * weight)
        count = jax.jit(jnp.sum)(weight)
        return total / count, (
            state,
            {"loss": (total, count), "tokens": (jnp.sum(batch["tokens"]), count)},
        )

    tx = optax.sgd(0.1)
    batch = {"x": np.ones((8, 2), np.float32), "tokens": np.arange(8, dtype=np.float32)}
    step = lbopt.make_train_step(loss_fn, tx, lbopt.make_mesh(4), **options)
    state = step.place(lbopt.TrainState.create({"w": jnp.zeros(2)}, {}, tx))
    with contextlib.nullcontext() if whole else refused("loss_fn", code="mismatch"):
        step.lower(state, batch)
