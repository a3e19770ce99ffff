"""Plans of small runs by the real compiler: their numbers are those of the program."""

import jax
import numpy as np
import planned
import pytest

from lbopt import replicas
from lbopt.data.from_config import known_source
from lbopt.plan import HloProgram, _collectives, make_plan, open_topology, plan_document
from lbopt.recipes import build_run

pytestmark = pytest.mark.tpu_compiler


def total(plan, source, **fields):
    """Return the bytes exchanged for something in a step."""
    found = [one for one in plan.phases[0].step.collectives if one.source == source]
    return sum(
        one.num_bytes
        for one in found
        if all(getattr(one, name) == value for name, value in fields.items())
    )


def shapes(config, place):
    return build_run(config, place.devices, known_source).shapes()


@pytest.fixture(scope="module")
def place():
    return open_topology("v3:2x2")


@pytest.fixture(scope="module")
def plan(place):
    return make_plan(planned.bert(), "bert", place)


@pytest.mark.everyday("cnn")
@pytest.mark.parametrize("make", [planned.bert, planned.cnn])
def test_train_and_plan_lower_the_same_program(make):
    """Four fake CPU devices and the four cores of two chips get exactly the same StableHLO.

    The test uses fp32, because JAX lowers products of bf16 matrices with an fp32 result in another
    way for CPUs. It uses no products of patches, which lbopt computes in another way on CPUs. The
    same test with data that are read is in tests/recipes/test_mnist.py.
    """
    config = make()
    config.model.dtype = "float32"
    if config.model.name == "cnn":
        config.model.patch_convolutions = False
    texts = []
    for devices in (None, open_topology("v3:1x2").devices):
        run = build_run(config, devices, known_source)
        assert run.mesh.size == 4
        jax.clear_caches()  # the numbers in names of functions depend on earlier traces
        texts.append(run.lower().as_text())
    assert texts[0] == texts[1]
    assert "sharding" in texts[0]


def test_what_is_counted(plan, place):
    (phase,) = plan.phases
    step = phase.step

    assert plan.fits
    assert plan.num_devices == 8
    state = jax.tree.leaves(shapes(planned.bert(), place))
    held = sum(
        x.size * x.dtype.itemsize for x in state if jax.numpy.issubdtype(x.dtype, jax.numpy.number)
    )

    # Rows are padded to the tiles of the memory.
    assert held <= step.argument_bytes <= 1.3 * held + 2**20
    assert step.argument_bytes + step.temporary_bytes <= step.hbm_bytes <= plan.hbm_limit_bytes

    # One forward pass and two products for each of its own in the backward pass. The scan has two
    # iterations.
    assert step.matrix_flops == pytest.approx(phase.model_flops, rel=0.03)
    assert step.flops >= step.matrix_flops
    assert step.hbm_bytes_moved >= 2 * held

    assert 0 < step.seconds < 1
    assert step.unknown_loops == 0
    assert plan.seconds == pytest.approx(100 * step.step_seconds)

    assert sum(operation.seconds for operation in step.operations) == pytest.approx(step.seconds)
    assert 0 < step.update_seconds < step.seconds
    assert any("Bert" in operation.path for operation in step.operations)


def test_gradients_are_exchanged_once_each(plan, place):
    """The compiler sends as many numbers as there are parameters, some of them in bf16."""
    params = sum(x.size for x in jax.tree.leaves(shapes(planned.bert(), place).params))
    sizes = {"f32": 4, "bf16": 2}
    words = sum(total(plan, "gradients", dtype=dtype) / size for dtype, size in sizes.items())
    tied = 512 * 128  # the embedding has two gradients, from its lookup and from the decoder
    assert params <= words <= params + tied + 2000
    assert total(plan, "gradients", dtype="bf16") > 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "name", "sharded"),
    [("float32", "f32", False), ("bfloat16", "bf16", False), ("bfloat16", "bf16", True)],
)
def test_the_precision_of_the_reduction_is_the_one_asked_for(place, dtype, name, sharded):
    config = planned.bert(reduce_dtype=dtype, shard_update=sharded)
    found = make_plan(config, "bert", place, with_evaluation=False)
    params = sum(x.size for x in jax.tree.leaves(shapes(config, place).params))
    assert total(found, "gradients") == total(
        found, "gradients", dtype=name, op="all-reduce", group_size=8
    )
    assert total(found, "gradients") == params * {"f32": 4, "bf16": 2}[name]
    others = [
        one.dtype for one in found.phases[0].step.collectives if one.source in ("metrics", "update")
    ]
    assert others
    assert set(others) == {"f32"}


@pytest.mark.slow
def test_a_sharded_update_holds_and_moves_its_part(plan, place):
    config = planned.bert(shard_update=True, reduce_dtype="float32")
    state = shapes(config, place)
    split = [leaf for leaf in jax.tree.leaves(state.opt_state) if leaf.size >= 2**14]
    assert split
    for leaf in split:
        assert np.prod(leaf.sharding.shard_shape(leaf.shape)) * 8 == leaf.size
    found = make_plan(config, "bert", place, with_evaluation=False).phases[0].step
    whole = plan.phases[0].step
    moments = sum(leaf.size * 4 for leaf in split)
    assert whole.argument_bytes - found.argument_bytes == pytest.approx(moments * 7 / 8, rel=0.05)
    large = sum(leaf.size * 4 for leaf in jax.tree.leaves(state.params) if leaf.size >= 2**14)
    gathered = sum(one.num_bytes for one in found.collectives if one.source == "parameters")
    assert gathered == large, "v3 sums arrays that are zero but for one part"
    words = whole.update_hbm_bytes / large
    assert words == pytest.approx(10, rel=0.05), "a LAMB in two passes"
    small = 10 * sum(leaf.size * 4 for leaf in jax.tree.leaves(state.params) if leaf.size < 2**14)
    assert found.update_hbm_bytes == pytest.approx(
        whole.update_hbm_bytes / 8 + small * 7 / 8, rel=0.01
    ), "small leaves stay whole"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "name", "size"), [("float32", "f32", 4), ("bfloat16", "bf16", 2)]
)
def test_a_scattered_sum_is_a_reduce_scatter_along_one_axis_after_the_other(
    place, dtype, name, size
):
    config = planned.bert(shard_update=True, reduce_dtype=dtype, reduce_scatter=True)
    found = make_plan(config, "bert", place, with_evaluation=False).phases[0].step.collectives
    scattered = [one for one in found if one.op == "reduce-scatter" and one.source == "gradients"]
    gathered = [one for one in found if one.op == "all-gather" and one.source == "parameters"]
    large = sum(
        leaf.size for leaf in jax.tree.leaves(shapes(config, place).params) if leaf.size >= 2**14
    )
    for each, dtype_of, size_of in ((scattered, name, size), (gathered, "f32", 4)):
        assert {one.dtype for one in each} == {dtype_of}
        by_size = {one.group_size: one.num_bytes for one in each}
        # four cores in a row of two chips, then two rows: the second time a quarter is left
        assert by_size == {4: large * size_of, 2: large * size_of // 4}


@pytest.mark.everyday("replicas:2-bfloat16-groups1")
@pytest.mark.parametrize(
    ("scope", "dtype", "groups"),
    [
        ("replicas:2", None, [[0, 1], [2, 3], [4, 5], [6, 7]]),
        ("replicas:2", "bfloat16", [[0, 1], [2, 3], [4, 5], [6, 7]]),
        ("examples:32", None, [[0, 1, 2, 3], [4, 5, 6, 7]]),
        ("examples:32", "float32", [[0, 1, 2, 3], [4, 5, 6, 7]]),
        ("tiles:2x2", "float32", [[0, 1, 4, 5], [2, 3, 6, 7]]),
        ("global", None, [[0, 1, 2, 3, 4, 5, 6, 7]]),
    ],
)
def test_batch_norm_talks_within_its_groups(place, scope, dtype, groups):
    """Statistics are in fp32 whatever the gradients' dtype, with mapped replicas and without."""
    config = planned.cnn(scope, order="torus" if "tiles" in scope else "given", reduce_dtype=dtype)
    run = build_run(config, place.devices, known_source)
    program = HloProgram(run.lower().compile().as_text())

    found = [
        part.instruction
        for part in program.executed
        if part.instruction.op == "all-reduce"
        and _collectives.source_of(part.instruction.path) == "batch norm"
    ]

    # Running statistics are averaged over all replicas if these are mapped.
    running = [one for one in found if replicas.STATE in one.path.split("/")]
    forward = [one for one in found if "transpose(" not in one.path and one not in running]

    assert forward
    for one in forward:
        assert {array.dtype for array in one.arrays} == {"f32"}
        assert (
            sorted(map(sorted, _collectives.replica_groups(one.attributes) or [list(range(8))]))
            == groups
        )


@pytest.mark.slow
def test_one_core_talks_with_nobody():
    found = make_plan(
        planned.cnn(num_devices=1), "cnn", open_topology("v3:1x1"), with_evaluation=False
    )
    assert (found.num_devices, found.num_hosts) == (1, 1)
    assert found.phases[0].step.collectives == ()
    assert found.phases[0].step.collective_seconds == 0


@pytest.mark.slow
def test_a_local_batch_norm_talks_with_nobody(place):
    found = (
        make_plan(planned.cnn("local"), "cnn", place, with_evaluation=False)
        .phases[0]
        .step.collectives
    )
    assert all(one.num_bytes < 1024 for one in found if one.source == "batch norm")


def test_what_does_not_fit_is_refused():
    place = open_topology("v3:1x1")
    config = planned.cnn(global_batch_size=49152)
    config.model.widths = (32, 64)
    config.model.patch_convolutions = True  # patches need more memory than convolutions
    config.model.dtype = "float32"
    found = make_plan(config, "cnn", place, with_evaluation=False)
    assert not found.fits
    step = found.phases[0].step
    assert step.hbm_bytes > found.hbm_limit_bytes
    written = plan_document(found)
    assert written["fits"] is False
    assert written["projected_seconds"] is None


def test_a_plan_as_data(plan):
    found = plan_document(plan)

    names = {
        "recipe",
        "topology",
        "device_kind",
        "num_devices",
        "fits",
        "hbm_bytes_per_device",
        "hbm_limit_bytes",
        "flops_per_step_per_device",
        "hbm_bytes_moved_per_step",
        "collectives",
        "compute_seconds_per_step",
        "collective_seconds_per_step",
        "model_flops_utilization",
        "steps",
        "projected_seconds",
        "published_seconds",
        "published_source",
        "compile_seconds",
        "assumptions",
    }

    assert names <= found.keys()
    assert all(
        {"op", "dtype", "bytes", "count", "group_size", "source"} <= one.keys()
        for one in found["collectives"]
    )

    assert found["published_source"] == "a paper: 1 min on 2 x 2 chips"
    assert found["phases"][0]["evaluation"]["batches"] is None, "nobody knows how long a corpus is"
    assert any("evaluation" in said for said in found["assumptions"])

    whole = found["compute_seconds_per_step"] + found["collective_seconds_per_step"]
    used = found["model_flops_per_step_per_device"] / whole / 61.5e12
    assert found["model_flops_utilization"] == pytest.approx(used, abs=2e-4)
