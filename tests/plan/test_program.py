"""Costs read from compiled programs compared with XLA's own count and, in loops, arithmetic."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

import lbopt
from lbopt.aggregators import plain_mean
from lbopt.errors import EnvironmentProblem
from lbopt.parallel import with_shardings
from lbopt.plan import (
    HloProgram,
    _collectives,
    _costs,
    bytes_between_slices,
    open_topology,
    read_program,
)
from lbopt.plan._hlo_program import parse_shapes

pytestmark = pytest.mark.tpu_compiler


@pytest.fixture(scope="module")
def compile_for_one():
    """(function, shapes) -> compiled for the first core of a chip."""
    device = open_topology("v3:1x1").devices[0]
    where = NamedSharding(
        Mesh(np.array([device]), ("one",), axis_types=(AxisType.Auto,)), PartitionSpec()
    )

    def compiled(fn, *shapes):
        placed = [jax.ShapeDtypeStruct(shape, jnp.float32, sharding=where) for shape in shapes]
        return jax.jit(fn).lower(*placed).compile()

    return compiled


def convolution(strides=(1, 1), padding="SAME", **options):
    numbers = ("NHWC", "HWIO", "NHWC")
    return lambda x, w: jax.lax.conv_general_dilated(
        x, w, strides, padding, dimension_numbers=numbers, **options
    )


CONVOLUTIONS = {
    "same": (convolution(), (4, 12, 12, 8), (3, 3, 8, 16)),
    "valid": (convolution(padding="VALID"), (4, 12, 12, 8), (3, 3, 8, 16)),
    "strided": (convolution((2, 2)), (4, 13, 12, 8), (3, 3, 8, 16)),
    "dilated kernel": (convolution(rhs_dilation=(2, 1)), (4, 12, 12, 8), (3, 3, 8, 16)),
    "dilated input": (
        convolution(padding=((1, 1), (2, 1)), lhs_dilation=(2, 2)),
        (4, 7, 7, 8),
        (3, 3, 8, 16),
    ),
    "groups": (convolution(feature_group_count=4), (4, 12, 12, 8), (3, 3, 2, 16)),
    "product": (lambda x, w: x @ w, (64, 32), (32, 48)),
    "batched product": (lambda x, w: jnp.einsum("bik,bkj->bij", x, w), (6, 32, 24), (6, 24, 16)),
}


@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_operations_are_those_of_the_arithmetic(compile_for_one, name):
    """XLA's count leaves padding out too, before any pass has rewritten the program."""
    fn, *shapes = CONVOLUTIONS[name]
    lowered = jax.jit(fn).lower(*(jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes))
    wanted = lowered.cost_analysis()["flops"]
    found = _costs.matrix_flops(HloProgram(compile_for_one(fn, *shapes).as_text()))
    assert found == pytest.approx(wanted, rel=1e-6)


@pytest.mark.parametrize("backwards", [False, True])
@pytest.mark.parametrize("length", [1, 7])
def test_loops_are_multiplied_out(compile_for_one, length, backwards):
    width = 128

    def looped(x, kernels):
        return jax.lax.scan(
            lambda x, kernel: (jnp.tanh(x @ kernel), None), x, kernels, reverse=backwards
        )[0]

    compiled = compile_for_one(looped, (64, width), (length, width, width))
    program = HloProgram(compiled.as_text())
    assert _costs.matrix_flops(program) == length * 2 * 64 * width**2
    assert _costs.matrix_flops(program, multiplied=False) == 2 * 64 * width**2
    assert not program.unknown_loops
    one = HloProgram(
        compile_for_one(
            lambda x, kernel: jnp.tanh(x @ kernel), (64, width), (width, width)
        ).as_text()
    )
    assert (
        0.5 * length
        <= _costs.estimated_cycles(program) / _costs.estimated_cycles(one)
        <= 3 * length
    )
    # An iteration reads one slice of the kernels. The state may move, too, or stay on the chip.
    kernel = 4 * width**2
    least = length * kernel
    assert least <= _costs.hbm_bytes(program) <= 2 * least + 10 * 4 * 64 * width * length + kernel


def test_a_loop_in_a_loop_is_multiplied_twice(compile_for_one):
    def turn(x, kernel):
        return jax.lax.fori_loop(2, 5, lambda _, x: jnp.tanh(x @ kernel), x), None

    compiled = compile_for_one(
        lambda x, kernels: jax.lax.scan(turn, x, kernels)[0], (64, 128), (4, 128, 128)
    )
    assert _costs.matrix_flops(HloProgram(compiled.as_text())) == 4 * 3 * 2 * 64 * 128 * 128


def test_a_loop_that_counts_by_twos(compile_for_one):
    def by_twos(x, w):
        turn = lambda state: (state[0] + 2, jnp.tanh(state[1] @ w))  # noqa: E731
        return jax.lax.while_loop(lambda state: state[0] < 9, turn, (1, x))[1]

    program = HloProgram(compile_for_one(by_twos, (64, 128), (128, 128)).as_text())
    assert _costs.matrix_flops(program) == 4 * 2 * 64 * 128 * 128


def test_a_loop_whose_length_nobody_knows_is_named(compile_for_one):
    def until(x, w):
        return jax.lax.while_loop(lambda x: jnp.sum(x) < 1e6, lambda x: jnp.tanh(x @ w) + 1, x)

    program = HloProgram(compile_for_one(until, (64, 128), (128, 128)).as_text())
    assert _costs.matrix_flops(program) == 2 * 64 * 128 * 128
    assert len(program.unknown_loops) == 1


def test_bytes_of_an_elementwise_operation(compile_for_one):
    program = HloProgram(
        compile_for_one(lambda x, y: x * 2 + y, (4096, 1024), (4096, 1024)).as_text()
    )
    assert _costs.hbm_bytes(program) == 3 * 4 * 4096 * 1024


def test_an_update_in_place_writes_its_update():
    text = """HloModule m

%fused (p0: f32[100,128], p1: f32[1,128], p2: s32[]) -> f32[100,128] {
  %p0 = f32[100,128]{1,0} parameter(0)
  %p1 = f32[1,128]{1,0} parameter(1)
  %p2 = s32[] parameter(2)
  %zero = s32[] constant(0)
  ROOT %update = f32[100,128]{1,0} dynamic-update-slice(%p0, %p1, %p2, %zero)
}

ENTRY %main (a: f32[100,128], b: f32[1,128], c: s32[]) -> f32[100,128] {
  %a = f32[100,128]{1,0} parameter(0)
  %b = f32[1,128]{1,0} parameter(1)
  %c = s32[] parameter(2)
  ROOT %fusion = f32[100,128]{1,0} fusion(%a, %b, %c), kind=kLoop, calls=%fused
}
"""
    assert _costs.hbm_bytes(HloProgram(text)) == 2 * 4 * 128 + 4


FUSED = """HloModule m

%fused (p0: f32[24,64,128], p1: s32[]) -> (f32[64], f32[64]) {{
  %p0 = f32[24,64,128]{{2,1,0}} parameter(0)
  %p1 = s32[] parameter(1)
  %zero = s32[] constant(0)
  %flat = f32[1536,128]{{1,0}} bitcast(%p0)
  %part = f32[64,128]{{1,0}} dynamic-slice(%flat, %p1, %zero), dynamic_slice_sizes={{64,128}}
  ROOT %both = (f32[64]{{0}}, f32[64]{{0}}) \
reduce(%part, {other}, %zero, %zero), dimensions={{1}}, to_apply=%sums
}}

ENTRY %main (a: f32[24,64,128], c: s32[]) -> (f32[64], f32[64]) {{
  %a = f32[24,64,128]{{2,1,0}} parameter(0)
  %c = s32[] parameter(1)
  ROOT %fusion = (f32[64]{{0}}, f32[64]{{0}}) fusion(%a, %c), kind=kInput, calls=%fused
}}
"""


@pytest.mark.parametrize(("other", "read"), [("%part", 64 * 128), ("%p0", 24 * 64 * 128)])
def test_what_a_fusion_reads_and_writes(other, read):
    """A slice, seen through a bitcast, or all of it; and both results of one instruction."""
    assert _costs.hbm_bytes(HloProgram(FUSED.format(other=other))) == 4 * read + 4 + 2 * 4 * 64


def test_shapes_of_tuples_with_comments_and_tokens():
    found = parse_shapes(
        "(f32[2,3]{1,0:T(8,128)}, /*index=1*/token[], u8[5]{0:T(512)S(1)}, pred[])"
    )
    assert [(array.dtype, array.num_bytes, array.hbm_bytes) for array in found] == [
        ("f32", 24, 24),
        ("u8", 5, 0),
        ("pred", 1, 1),
    ]


@pytest.mark.parametrize(
    ("written", "groups"),
    [
        ("replica_groups={{0,2},{1,3}}", [[0, 2], [1, 3]]),
        ("replica_groups=[2,2]<=[4]", [[0, 1], [2, 3]]),
        ("replica_groups=[4,2]<=[2,2,2]T(0,2,1)", [[0, 2], [1, 3], [4, 6], [5, 7]]),
        ("replica_groups=mesh['axis_0'=4] {'axis_0'}", [[0, 1, 2, 3]]),
        ("replica_groups=mesh['a'=2,'b'=3] {'a'}", [[0, 3], [1, 4], [2, 5]]),
        ("source_target_pairs={{0,1},{1,0}}", [[0, 1], [1, 0]]),
        ("channel_id=1", []),
    ],
)
def test_groups_of_collectives(written, groups):
    assert (
        _collectives.replica_groups(f"channel_id=3, {written}, use_global_device_ids=true")
        == groups
    )


def test_collectives_are_added_up_by_what_they_are_for():
    text = """HloModule m

%add (x: f32[], y: f32[]) -> f32[] {
  %x = f32[] parameter(0)
  %y = f32[] parameter(1)
  ROOT %sum = f32[] add(%x, %y)
}

ENTRY %main (a: f32[10], b: f32[20]) -> f32[10] {
  %a = f32[10]{0} parameter(0)
  %b = f32[20]{0} parameter(1)
  %both = (f32[10]{0}, f32[20]{0}) all-reduce(%a, %b), replica_groups={{0,1},{2,3}}, \
to_apply=%add, metadata={op_name="jit(f)/transpose(jvp(N))/dense/dot_general"}
  %first = f32[10]{0} get-tuple-element(%both), index=0, \
metadata={op_name="jit(f)/jvp(N)/norm/batch_statistics/reduce_sum"}
  %second = f32[20]{0} get-tuple-element(%both), index=1
  %part = f32[5]{0} reduce-scatter(%second), replica_groups=[1,4]<=[4], dimensions={0}, \
to_apply=%add, metadata={op_name="jit(f)/reduce_gradients/psum_scatter"}
  ROOT %sum2 = f32[10]{0} all-reduce(%first), \
to_apply=%add, metadata={op_name="jit(f)/reduce_gradients/psum"}
}
"""
    sent = (
        "  %sent = (f32[6]{0}, f32[6]{0}, u32[]{:S(2)}, u32[]{:S(2)}) "
        "collective-permute-start(%six), source_target_pairs={{0,1},{1,0}}\n"
    )
    text = text.replace("  %part =", f"{sent}  %part =")
    *found, permuted = _collectives.collectives(HloProgram(text), 4)
    assert (permuted.op, permuted.dtype, permuted.num_bytes) == ("collective-permute", "f32", 24)
    (alone,) = _collectives.collectives(
        HloProgram(text[text.index("HloModule") :].replace("replica_groups=[1,4]<=[4], ", "")), 4
    )[1:2]
    assert (alone.op, alone.num_bytes, alone.group_size) == ("reduce-scatter", 80, 4), (
        "no groups mean all devices"
    )
    assert [(one.op, one.num_bytes, one.count, one.group_size, one.source) for one in found] == [
        ("all-reduce", 80, 1, 2, "gradients"),
        ("reduce-scatter", 80, 1, 4, "gradients"),
        ("all-reduce", 40, 1, 2, "batch norm"),
        ("all-reduce", 40, 1, 4, "gradients"),
    ]


EITHER = """
%cheap (a: f32[4]) -> f32[4] {
  %a = f32[4]{0} parameter(0)
  ROOT %one = f32[4]{0} negate(%a), backend_config={"estimated_cycles":"10"}
}

%dear (b: f32[4]) -> f32[4] {
  %b = f32[4]{0} parameter(0)
  ROOT %two = f32[4]{0} sine(%b), backend_config={"estimated_cycles":"70"}
}

ENTRY %main (p: pred[], x: f32[4]) -> f32[4] {
  %p = pred[] parameter(0)
  %x = f32[4]{0} parameter(1)
  ROOT %either = f32[4]{0} conditional(%p, %x, %x), true_computation=%cheap, false_computation=%dear
}
"""


def test_of_a_conditional_the_dearer_branch_counts():
    program = HloProgram(EITHER)
    assert _costs.estimated_cycles(program) == 70
    assert "negate" not in {run.instruction.op for run in program.executed}


def test_a_program_that_jaxlib_cannot_read_is_read_all_the_same():
    """The compiler's own text has the same operations, the asynchronous ones too."""

    class Unreadable:
        def as_text(self):
            raise jax.errors.JaxRuntimeError("INTERNAL: RET_CHECK failure")

    device = open_topology("tpu7x:2x2x1").devices[0]
    where = NamedSharding(Mesh(np.array([device]), ("one",)), PartitionSpec())
    matrix = jax.ShapeDtypeStruct((1024, 4096), jnp.float32, sharding=where)
    lowered = jax.jit(lambda x, y: x / jnp.linalg.norm(x) + y / jnp.linalg.norm(y)).lower(
        matrix, matrix
    )

    def operations(program):
        return [
            (run.instruction.op, run.instruction.result, run.instruction.cycles, run.times)
            for run in program.executed
        ]

    wanted = operations(HloProgram(lowered.compile().as_text()))
    assert "slice-start" in {op for op, *_ in wanted}
    assert operations(read_program(lowered, Unreadable())) == wanted

    class Silent:
        def compile(self, options):
            del options

    with pytest.raises(EnvironmentProblem, match="neither this jaxlib nor the compiler"):
        read_program(Silent(), Unreadable())


@pytest.mark.parametrize(
    ("aggregator", "fragments", "last_step", "words"),
    [
        ("mean", 1, None, (256 * 1024 + 1024 * 128) / 4),
        ("mean", 1, 99, (256 * 1024 + 1024 * 128) / 4),
        ("mean", 2, None, (256 * 1024 + 1024 * 128) / 4),
        ("mean", 2, 99, (256 * 1024 + 1024 * 128) / 4),
        ("powersgd", 1, None, 4 * (256 + 1024 + 1024 + 128) / 2),
    ],
)
def test_an_exchange_of_local_steps_counts_as_often_as_it_comes(
    aggregator, fragments, last_step, words
):
    """Between two slices of v5e: the parameters once in eight steps, in one piece or in two.

    The exchanges of PowerSGD send one factor and the other in turn, of another size.
    """
    devices = topologies.get_topology_desc("v5e:2x2", platform="tpu", num_slices=2).devices
    tx = lbopt.diloco(optax.adam(0.1), every=8, num_fragments=fragments, last_step=last_step)

    def loss_fn(params, model_state, batch, rng):
        hidden = jnp.tanh(batch["x"] @ params["first"])
        return jnp.mean((hidden @ params["second"]) ** 2), (model_state, {})

    chosen = {"mean": plain_mean(), "powersgd": lbopt.powersgd(4, start=0)}[aggregator]
    reduction = lbopt.Aggregate(chosen, over="slices")
    step = lbopt.make_train_step(loss_fn, tx, lbopt.make_mesh(devices=devices), reduction=reduction)
    shape = lambda *sizes: jax.ShapeDtypeStruct(sizes, jnp.float32)  # noqa: E731
    params = {"first": shape(256, 1024), "second": shape(1024, 128)}
    bare = jax.eval_shape(
        lambda params: step.with_aggregator_state(lbopt.TrainState.create(params, {}, tx)), params
    )
    state = with_shardings(bare, step.state_sharding(bare))
    compiled = step.lower(state, {"x": shape(64, 256)}).compile()
    program = HloProgram(compiled.as_text(), step.exchanges)
    sent = bytes_between_slices(program, 2)

    # Beside the parameters a device sends the number of workers that take part, one word padded.
    word = 128 * 4 / 8 * fragments
    assert sent == pytest.approx(step.aggregation.wire_bytes(params).sent + word)
    assert step.aggregation.wire_bytes(params).sent == 4 * words / 8
