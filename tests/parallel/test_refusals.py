"""Impossible combinations are refused in one line, before anything is traced or compiled."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from refusal import numbers_in, refused

import lbopt
from lbopt.aggregators import plain_mean
from lbopt.data import ArrayDataset
from lbopt.parallel import check_divisible, put_batch


def never(*arguments):
    raise AssertionError("traced")


def state():
    return lbopt.TrainState.create({"w": jnp.zeros(8)}, {}, optax.sgd(0.1))


@pytest.mark.parametrize("backend", ["jit", "pmap"])
@pytest.mark.parametrize(("batch_size", "num_microsteps"), [(30, 1), (36, 2), (2, 1), (0, 1)])
def test_a_batch_that_does_not_split_is_refused_before_tracing(backend, batch_size, num_microsteps):
    step = lbopt.make_train_step(
        never, optax.sgd(0.1), lbopt.make_mesh(4), backend, num_microsteps=num_microsteps
    )
    batch = {"image": np.zeros((batch_size, 8), np.float32)}
    for call in (step, step.lower):
        with refused("global_batch_size", batch_size, "value"):
            call(state(), batch)


@pytest.mark.parametrize("backend", ["jit", "pmap"])
def test_a_batch_that_splits_is_traced(backend):
    step = lbopt.make_train_step(
        never, optax.sgd(0.1), lbopt.make_mesh(4), backend, num_microsteps=2
    )
    with pytest.raises(AssertionError, match="traced"):
        step(state(), {"image": np.zeros((32, 8), np.float32)})


@pytest.mark.parametrize("backend", ["jit", "pmap"])
def test_an_evaluation_batch_that_does_not_split_is_refused_before_tracing(backend):
    step = lbopt.make_eval_step(never, lbopt.make_mesh(4), backend)
    with refused("global_batch_size", 30, "value"):
        step({}, {}, {"image": np.zeros((30, 8), np.float32)})


def test_the_message_names_the_nearest_size_that_works():
    for size, nearest in ((35, 32), (1, 8)):
        with refused("global_batch_size", size, "value") as caught:
            check_divisible(size, 4, num_microsteps=2)
        assert numbers_in(caught)[-2:] == [8, nearest]
    check_divisible(32, 4, num_microsteps=2)


def test_an_unknown_backend_is_refused():
    with refused("backend", "pmpa", "choice") as caught:
        lbopt.make_train_step(never, optax.sgd(0.1), lbopt.make_mesh(1), "pmpa")
    assert "'pmap'" in caught.value.reason
    with refused("backend", "pmpa", "choice"):
        lbopt.make_eval_step(never, lbopt.make_mesh(1), "pmpa")


@pytest.mark.parametrize("num_devices", [0, 5, -1])
def test_a_number_of_devices_that_is_not_there_is_refused(num_devices):
    with refused("num_devices", num_devices, "value") as caught:
        lbopt.make_mesh(num_devices)
    assert 4 in numbers_in(caught)


def test_a_mesh_takes_the_first_devices():
    assert list(lbopt.make_mesh(2).devices.flat) == jax.devices()[:2]
    assert lbopt.make_mesh().size == 4
    assert list(lbopt.make_mesh(1, jax.devices()[2:]).devices.flat) == [jax.devices()[2]]


BAD_LEAVES = {
    "scalar": (np.float32(1), "type"),
    "number": (1.5, "type"),
    "text": ("abc", "type"),
    "array of text": (np.array(["a"] * 8), "type"),
    "array of objects": (np.array([[1], [1, 2]] * 4, dtype=object), "type"),
    "array of times": (np.zeros(8, "datetime64[s]"), "type"),
    "foreign byte order": (np.zeros(8, ">f4"), "type"),
    "structured array": (np.zeros(8, [("one", "<i4")]), "type"),
    "masked array": (np.ma.zeros(8), "type"),
    "array of another length": (np.zeros(4), "mismatch"),
}


@pytest.mark.parametrize("kind", BAD_LEAVES)
def test_a_leaf_of_the_batch_that_is_no_array_of_examples_is_named(kind):
    mesh = lbopt.make_mesh(4)
    leaf, code = BAD_LEAVES[kind]
    batch = {"a": np.zeros((8, 2)), "t": [np.zeros(8), [leaf]]}
    calls = [
        lambda: put_batch(mesh, batch),
        lambda: lbopt.make_eval_step(never, mesh)({}, {}, batch),
    ]
    calls += [
        lambda backend=backend: lbopt.make_train_step(never, optax.sgd(0.1), mesh, backend)(
            state(), batch
        )
        for backend in ("jit", "pmap")
    ]
    for call in calls:
        with refused("batch/t/1/0", leaf, code):
            call()


def test_a_batch_of_the_size_before_is_looked_at_too():
    step = lbopt.make_eval_step(lambda params, model_state, batch: {}, lbopt.make_mesh(4))
    step({}, {}, {"a": np.zeros(8, np.float32), "none": None})
    with refused("batch/a", code="type"):
        step({}, {}, {"a": np.array([None] * 8)})
    with refused("batch", {}, "value"):
        step({}, {}, {})


def mesh_of(shape, names, kind=AxisType.Auto):
    return Mesh(np.asarray(jax.devices()).reshape(shape), names, axis_types=(kind,) * len(names))


@pytest.mark.parametrize(
    "options",
    [{"backend": "pmap"}, {"reduction": lbopt.AllReduce(jnp.float32)}, {"shard_update": True}, {}],
)
def test_a_mesh_that_does_not_go_with_the_step_is_refused(options):
    for_all = [
        ("axis_names", mesh_of(4, ("batch",))),
        ("axis_types", mesh_of(4, ("data",), AxisType.Manual)),
    ]
    where_mapped = [("axis_names", mesh_of((2, 2), ("data", "model")))]
    by_compiler = [("axis_types", mesh_of(4, ("data",), AxisType.Explicit))]
    cases = (
        for_all
        + (where_mapped if options else [])
        + (by_compiler if options and "backend" not in options else [])
    )
    for field, mesh in cases:
        with refused(f"mesh.{field}", getattr(mesh, field), "value"):
            lbopt.make_train_step(never, optax.sgd(0.1), mesh, **options)
    for field, mesh in for_all:
        with refused(f"mesh.{field}", getattr(mesh, field), "value"):
            lbopt.make_eval_step(never, mesh, options.get("backend", "jit"))


@pytest.mark.parametrize(
    "leaf", [jnp.zeros(2, jnp.int32), jnp.zeros(2, bool), np.zeros(2, jax.dtypes.float0)]
)
@pytest.mark.parametrize("options", [{}, {"num_microsteps": 2}, {"backend": "pmap"}])
def test_a_parameter_without_a_gradient_is_named(leaf, options):
    step = lbopt.make_train_step(never, optax.sgd(0.1), lbopt.make_mesh(4), **options)
    first = state().replace(params={"w": jnp.zeros(8), "table": {"ids": leaf}})
    with refused("params/table/ids", code="type"):
        step(first, {"x": np.zeros((8, 2), np.float32)})


@pytest.mark.parametrize("options", [{}, {"backend": "pmap"}, {"shard_update": True}])
def test_a_state_that_was_split_over_the_mesh_is_named(options):
    mesh = lbopt.make_mesh(4)
    sharding = NamedSharding(mesh, PartitionSpec("data"))
    split = {"w": jax.device_put(jnp.zeros(8), sharding)}
    step = lbopt.make_train_step(never, optax.sgd(0.1), mesh, **options)
    with refused("params/w", sharding, "mismatch"):
        step(state().replace(params=split), {"x": np.zeros((8, 2), np.float32)})


@pytest.mark.parametrize(
    "seed",
    [
        1.5,
        "a",
        None,
        jax.random.split(jax.random.key(0)),
        np.zeros(3, np.uint32),
        np.zeros((2, 2), np.uint32),
    ],
)
def test_a_seed_that_is_none_is_refused_in_one_line(seed):
    with refused("seed", seed, "type"):
        lbopt.TrainState.create({}, {}, optax.sgd(0.1), seed)


@pytest.mark.parametrize("bad", ["name", object(), np.array("a"), np.array(None)])
def test_a_leaf_that_is_no_array_is_named_where_the_state_is_made(bad):
    for where, leaves in (
        ("params/a/b", ({"a": {"b": bad}}, {})),
        ("model_state/a/b", ({}, {"a": {"b": bad}})),
    ):
        with refused(where, bad, "type"):
            lbopt.TrainState.create(*leaves, optax.sgd(0.1))


GOOD = {"n": (jnp.zeros(()), 8)}


@pytest.mark.parametrize("backend", ["jit", "pmap"])
@pytest.mark.parametrize(
    "form",
    [
        lambda loss: loss,
        lambda loss: (loss, GOOD),
        lambda loss: (loss, ({}, GOOD, 1)),
        lambda loss: (loss[None], ({}, GOOD)),
        lambda loss: (loss.astype(int), ({}, GOOD)),
        lambda loss: (loss + 1j, ({}, GOOD)),
        lambda loss: ("0.5", ({}, GOOD)),
        lambda loss: ((loss, loss[None]), ({}, GOOD)),
        lambda loss: ((loss, loss + 1j), ({}, GOOD)),
        lambda loss: ((loss, "1"), ({}, GOOD)),
        lambda loss: ((loss, loss, loss), ({}, GOOD)),
        lambda loss: (loss, ({}, [loss, 1])),
        lambda loss: (loss, ({}, {"loss": loss})),
        lambda loss: (loss, ({}, {"loss": (loss, None)})),
        lambda loss: (loss, ({}, {"a": {"b": (loss, 1)}})),
    ],
)
def test_what_is_no_loss_is_refused_in_one_line(backend, form):
    def loss_fn(params, model_state, batch, rng):
        return form(jnp.vdot(params["w"], params["w"]) + batch["x"].sum())

    step = lbopt.make_train_step(loss_fn, optax.sgd(0.1), lbopt.make_mesh(4), backend)
    with refused("loss_fn", code="type"):
        step.lower(state(), {"x": np.zeros((8, 2), np.float32)})


@pytest.mark.parametrize(("backend", "field"), [("jit", "metrics/n"), ("pmap", "metric_fn")])
def test_evaluation_refuses_metrics_that_do_not_add_up(backend, field):
    step = lbopt.make_eval_step(
        lambda params, model_state, batch: {"n": batch["x"].sum()}, lbopt.make_mesh(4), backend
    )
    with refused(field, code="type"):
        lbopt.evaluate(step, state(), ArrayDataset({"x": np.zeros((8, 2), np.float32)}), 8)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("loss_fn", {}),
        ("tx", 0.1),
        ("mesh", None),
        ("num_microsteps", 2.0),
        ("num_microsteps", True),
        ("compute_dtype", jnp.int8),
        ("reduction", jnp.float32),
        ("reduction", lbopt.aps),
        ("clip", 1.0),
        ("donate", "no"),
    ],
)
def test_an_argument_of_another_type_is_named(field, value):
    arguments = {"loss_fn": never, "tx": optax.sgd(0.1), "mesh": lbopt.make_mesh(4), field: value}
    with refused(field, value):
        lbopt.make_train_step(**arguments)


def test_a_dtype_that_does_not_add_up_is_refused():
    with refused("reduction.dtype", "fp33", "type"):
        lbopt.AllReduce("fp33")


@pytest.mark.parametrize("kind", [np.asarray, jnp.asarray])
def test_arrays_of_one_number_are_numbers(kind):
    step = lbopt.make_train_step(
        lambda params, model_state, batch, rng: (params["w"].sum() + batch["x"].sum(), ({}, {})),
        optax.sgd(0.1),
        lbopt.make_mesh(kind(2)),
        num_microsteps=kind(2),
        clip=lbopt.GradientClip(kind(1)),
        reduction=lbopt.Aggregate(plain_mean(), kind(1)),
        donate=0,
    )
    after, _ = step(step.place(state()), {"x": np.zeros((8, 2), np.float32)})
    assert float(jnp.linalg.norm(after.params["w"])) == pytest.approx(0.1)
