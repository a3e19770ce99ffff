"""Time and sent bytes of aggregators beside the plain mean, and the HBM traffic of the quantiser.

The gradients have the shapes of BERT-Base with stacked layers. The aggregation is compiled for 32
cores of TPU v3.

A step's time is the sum of the compiler's cycle estimates for the operations between gradients
and update, plus the collectives' time by the model of `lbopt plan`, without overlap. The bytes are
those that a core sends in ring algorithms for the collectives of the compiled program; at most
`wire_bytes` are wanted. An aggregator with two kinds of steps is timed at the more expensive kind.
The compiler has no estimate for sorts, nor for gathers and scatters of single numbers: such a time
is too short, and the table shows how many numbers are sorted.
"""

import math
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pairs
import tpu_compiler
from bert_tree import bert

import lbopt
from lbopt.aggregators import WireBytes, cast, plain_mean, randk, sign, topk
from lbopt.parallel import Aggregation, TrainState, batch_sharding, make_mesh, with_shardings
from lbopt.plan import StepCost, open_topology, read_cost, read_program

TOPOLOGY = "v3:4x4"
TREE = (12, 768)
LABELS = {"embedding": "^embed", "rest": ""}
LAYERS = lbopt.stacked_paths("^layers/")
CASES = {
    "agvm (a step that measures)": lbopt.agvm(LABELS, "rest"),
    "aps, e5m2": lbopt.aps(5, 2, stacked=LAYERS),
    "aps, e5m2, partial sums rounded": lbopt.aps(5, 2, "same", stacked=LAYERS),
    "aps, e5m2, partial sums rounded, Kahan": lbopt.aps(5, 2, "kahan", stacked=LAYERS),
    "aps, e5m2, stochastic": lbopt.aps(5, 2, rounding="stochastic", stacked=LAYERS),
    "aps, bf16": lbopt.aps(8, 7, stacked=LAYERS),
    "powersgd, rank 4": lbopt.powersgd(4, start=0, stacked=LAYERS),
    "econtrol, sign": lbopt.econtrol(sign(), stacked=LAYERS),
    "ef21, randk 1 %": lbopt.ef21(randk(0.01), 0.9, stacked=LAYERS),
    "ef, cast to e5m2": lbopt.ef(cast(5, 2), LAYERS),
    "ef, topk 1 %": lbopt.ef(topk(0.01), LAYERS),
    "ef, randk 1 %": lbopt.ef(randk(0.01), LAYERS),
}
ELEMENTS = 1 << 24
FORMATS = {"e5m2": (5, 2), "e4m3": (4, 3), "e3m0": (3, 0), "bf16": (8, 7)}


def run() -> list[dict]:
    """Return a few rows per aggregator and one per format of the quantiser."""
    tree = bert(*TREE, stacked=True)
    _, mean, _ = _cost(tree, plain_mean())

    rows = []
    for name, aggregator in CASES.items():
        begin = time.perf_counter()
        promised, cost, sorted_numbers = _cost(tree, aggregator)
        print(f"{name}: compiled in {time.perf_counter() - begin:.0f} s", file=sys.stderr)
        ours, peer = (1e3 * one.step_seconds for one in (cost, mean))
        rows.append(
            pairs.row(
                f"{name}: time, {TOPOLOGY}", "ms/step", ours, peer, "plain mean", peer / ours, None
            )
        )
        alone, base = (1e3 * one.seconds for one in (cost, mean))
        rows.append(
            pairs.row(
                f"{name}: of it computing", "ms/step", alone, base, "plain mean", base / alone, None
            )
        )
        if sorted_numbers:
            name_of_it = f"{name}: sorted, not in these times"
            rows.append(
                pairs.row(
                    name_of_it, "million numbers/step", sorted_numbers / 1e6, None, None, None, None
                )
            )
        sent = _sent(cost) / 1e6
        ring = _sent(mean) / 1e6
        aim = ("lbopt", "<=", promised.sent / 1e6)
        rows.append(
            pairs.row(
                f"{name}: sent by a core", "MB/step", sent, ring, "plain mean", ring / sent, aim
            )
        )
    return rows + [_quantiser(*one) for one in FORMATS.items()]


def _cost(tree, aggregator) -> tuple[WireBytes, StepCost, int]:
    """Compile an aggregation without model and optimizer.

    Returns:
      (bytes that the aggregator promises, cost of the compiled program, count of numbers it sorts).
    """
    place = open_topology(TOPOLOGY)
    mesh = make_mesh(devices=place.devices)
    aggregation = Aggregation(aggregator, mesh)
    rows = jax.tree.map(
        lambda p: jax.ShapeDtypeStruct(
            (mesh.size, *p.shape), p.dtype, sharding=batch_sharding(mesh)
        ),
        tree,
    )
    state = jax.eval_shape(aggregation.init, tree)
    state = with_shardings(state, aggregation.sharding(state))

    def aggregate(rows, state):
        blank = jnp.zeros((), jnp.int32)
        found = aggregation(rows, TrainState(blank, {}, {}, optax.EmptyState(), blank, state))
        return found.updates, found.state

    begin = time.perf_counter()
    # The state is donated, as a train step donates it.
    lowered = jax.jit(aggregate, donate_argnums=1).lower(rows, state)
    compiled = lowered.compile()
    seconds = time.perf_counter() - begin
    program = read_program(lowered, compiled)
    cost = read_cost(compiled, program, place, list(mesh.devices.flat), seconds)
    sorts = [one for one in program.executed if one.instruction.op == "sort"]
    return (
        aggregation.wire_bytes(tree),
        cost,
        sum(one.times * math.prod(one.instruction.arrays[0].dims) for one in sorts),
    )


def _sent(cost: StepCost) -> float:
    """Return the bytes that a core sends for the program's collectives by ring algorithms."""
    total = 0.0
    for one in cost.collectives:
        twice = 2 if one.op == "all-reduce" else 1
        total += twice * one.num_bytes * (one.group_size - 1) / one.group_size
    return total


def _quantiser(name: str, form: tuple[int, int]) -> dict:
    """Return a row with the words of HBM traffic per element that rounding an array takes."""
    array = jax.ShapeDtypeStruct((ELEMENTS,), np.float32)
    cost = tpu_compiler.compile_for(
        "v3", lambda x: lbopt.float_quantize(x, *form), (array,), donate=(0,)
    )
    words = cost.hbm_bytes / 4 / ELEMENTS
    what = f"float_quantize to {name}, TPU v3: HBM"
    return pairs.row(what, "words/element", words, None, None, None, ("lbopt", "<=", 2.0))
