"""Matrix optimizers on BERT-Large: time of an update on pods, state, and CPU time beside Optax.

Muon's update on 32 cores of TPU v3 and of TPU7x, and on 16 chips of v5e and v5p, products in bf16:
the compiler's cycles, and communication by the model of `lbopt plan`. Layers are stacked.
"Replicated" treats every matrix on every device. "Dealt" is `lbopt.shard_matrices` on parameters
that are split along their inputs: two all-to-alls for each shape and split side. What is wanted of
it is 1.3 times the ideal: an equal share of the replicated work, and its own communication without
the empty slots. Its cycles are those of the device that has most to do. Bytes of state are those of
the whole tree, of each variant that differs from the others by 0.1 byte; those of few bits include
the largest magnitudes of blocks. On the CPU Muon runs in fp32 on BERT-Base.
"""

import dataclasses
import functools
import math
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pairs
from bert_tree import bert, size_of
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import lbopt
from lbopt.config import MATRIX_OPTIMIZERS
from lbopt.masks import matrix_dimension_numbers
from lbopt.parallel import deal_matrices
from lbopt.plan import HloProgram, StepCost, open_topology, read_cost, read_program
from lbopt.transforms import MATRIX_VARIANTS, MatrixGroup, with_matrix_layout

SLICES = ("v3:4x4", "v5e:4x4", "v5p:2x2x4", "tpu7x:2x2x4")
LARGE = (24, 1024)
BASE = (12, 768)
RATE = 0.02
LAYERS = lbopt.stacked_paths("^layers/")
MOST = 1.3
ROUNDS = 3


def run() -> Iterator[dict]:
    """Yield the rows of all tables."""
    for name in SLICES:
        yield from _on_pod(name)
    yield from _state()
    yield _on_cpu()


def _update(tx):
    def update(params, opt_state, grads):
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    return update


def _numbers(tree):
    return matrix_dimension_numbers(tree, LAYERS if "layers" in tree else None)


def _split(mesh: Mesh, shape: tuple[int, ...]) -> NamedSharding:
    """Return the sharding of a leaf along its inputs, or along its outputs if those divide."""
    for axis in (-2, -1):
        if len(shape) >= 2 and shape[axis] % mesh.size == 0:
            spec = [None] * len(shape)
            spec[axis] = "data"
            return NamedSharding(mesh, PartitionSpec(*spec))
    return NamedSharding(mesh, PartitionSpec())


def _mesh(name: str) -> Mesh:
    return Mesh(np.array(open_topology(name).devices), ("data",))


@functools.cache
def _cost(name: str, kind: str) -> StepCost:
    place = open_topology(name)
    mesh = _mesh(name)
    devices = list(place.devices)
    tree = bert(*LARGE, stacked=True)
    whole = NamedSharding(mesh, PartitionSpec())
    where = functools.partial(_split, mesh) if kind == "dealt" else lambda shape: whole
    if kind == "optax":
        tx = optax.contrib.muon(RATE, muon_weight_dimension_numbers=_numbers(tree))
    else:
        tx = lbopt.muon(RATE, variant="optax", products_dtype="bfloat16", stacked=LAYERS)
    if kind == "dealt":
        tx = lbopt.shard_matrices(tx, mesh, param_shardings=where)

    def placed(shapes):
        return jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=where(leaf.shape)),
            shapes,
        )

    arguments = (placed(tree), placed(jax.eval_shape(tx.init, tree)), placed(tree))
    results = jax.tree.map(lambda leaf: leaf.sharding, arguments[:2])
    step = jax.jit(_update(tx), donate_argnums=(0, 1), out_shardings=results)
    lowered = step.lower(*arguments)
    compiled = lowered.compile()
    program = read_program(lowered, compiled)
    cost = read_cost(compiled, program, place, devices, 0.0)
    if kind != "dealt":
        return cost
    skipped = _skipped_cycles(program, _groups(tree, where), len(devices))
    return dataclasses.replace(cost, seconds=cost.seconds - skipped / place.chip.hertz)


class _Groups:
    """A layout that notes the groups of matrices, and runs functions where they are."""

    def __init__(self, where):
        self._where = where
        self.found = []

    def spec(self, name, leaf):
        del name
        return tuple(self._where(leaf.shape).spec)

    def kept_spec(self, array):
        del array
        return ()

    def sizes(self, spec):
        del spec
        return dict(self._where((1,)).mesh.shape)

    def placed(self, array, spec):
        del spec
        return array

    def runners(self, groups):
        self.found += groups
        return [lambda fn, specs, *stacked: fn(*stacked)] * len(groups)


def _groups(tree, where) -> list[MatrixGroup]:
    """Return the groups of matrices that are dealt, for leaves with these shardings."""
    layout = _Groups(where)
    orthogonalize = lbopt.scale_by_newton_schulz(stacked=LAYERS)
    with with_matrix_layout(layout):
        jax.eval_shape(lambda grads: orthogonalize.update(grads, orthogonalize.init(grads)), tree)
    return layout.found


def _skipped_cycles(program: HloProgram, groups: list[MatrixGroup], devices: int) -> int:
    """Return the cycles of conditionals that no device executes together.

    The plan counts them all; here only those of the device that has most to do.
    """
    cycles = {}
    total = 0
    for one in (
        one for computation in program.computations.values() for one in computation.values()
    ):
        if one.op == "conditional":
            sides = tuple(sorted(one.arrays[0].dims[-2:]))
            cycles[sides] = max(
                sum(inner.cycles for inner in program.computations[branch].values())
                for branch in one.branches
            )
            total += cycles[sides]

    extra = np.zeros(devices, int)
    for group, order in zip(groups, deal_matrices(groups, devices, "auto"), strict=True):
        used = np.sum(order >= 0, axis=1)
        if np.ptp(used):
            extra += (used - np.min(used)) * cycles.get(tuple(sorted(group.sides)), 0)
    return total - int(np.max(extra))


def _filled(name: str) -> float:
    """Return the share of what is sent that belongs to matrices; the rest are empty slots."""
    mesh = _mesh(name)
    groups = _groups(bert(*LARGE, stacked=True), functools.partial(_split, mesh))
    orders = deal_matrices(groups, mesh.size, "auto")
    words = [math.prod(group.sides) for group in groups]
    matrices = sum(group.number * each for group, each in zip(groups, words, strict=True))
    return matrices / sum(order.size * each for order, each in zip(orders, words, strict=True))


def _on_pod(name: str) -> Iterator[dict]:
    cores = len(open_topology(name).devices)
    theirs, mine, dealt = (_cost(name, kind) for kind in ("optax", "replicated", "dealt"))

    def row(what, cost, peer, peer_name, aim=None):
        ours = 1e3 * cost.step_seconds
        other = 1e3 * peer
        return pairs.row(f"Muon, {name}: {what}", "ms", ours, other, peer_name, other / ours, aim)

    yield row("replicated", mine, theirs.step_seconds, "optax.contrib.muon, fp32 products")
    yield row("dealt", dealt, theirs.step_seconds, "optax.contrib.muon, replicated")
    ideal = mine.seconds / cores + dealt.collective_seconds * _filled(name)
    yield row("dealt, beside the ideal", dealt, ideal, "ideal", ("ratio", ">=", 1 / MOST))
    exchanges = {one.op: one.count for one in dealt.collectives}
    others = sum(exchanges.values()) - exchanges.get("all-to-all", 0)
    if others:
        raise AssertionError(f"other collectives: {exchanges}")
    title = f"Muon, {name}: all-to-alls, dealt"
    yield pairs.row(title, "", exchanges["all-to-all"], None, None, None, None)


def _state() -> Iterator[dict]:
    """Yield the bytes of state a parameter of each optimizer."""
    tree = bert(*LARGE, stacked=True)
    made = {"adamw": optax.adamw(RATE)}
    for name in ("lamb", "lars", "adamh"):
        made[name] = getattr(lbopt, name)(RATE, stacked=LAYERS)
    for name in MATRIX_OPTIMIZERS:
        factory = functools.partial(getattr(lbopt, name), RATE, stacked=LAYERS)
        made[name] = factory()
        for variant in MATRIX_VARIANTS.get(name, {}):
            made[f"{name}, {variant}"] = factory(variant=variant)

    seen = set()
    for name, tx in made.items():
        for form in (None, "bf16_stochastic", "8bit_dynamic"):
            shown = tx if form is None else lbopt.compress_state(tx, form)
            try:
                state = jax.eval_shape(shown.init, tree)
            except lbopt.errors.UserError:
                continue  # no field to compress
            size = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state))
            known = (name.split(", ")[0], form, round(size / size_of(tree), 1))
            if known in seen:
                continue  # a variant that is shown has as many
            seen.add(known)
            title = f"{name}: state{'' if form is None else ', ' + form}"
            yield pairs.row(title, "bytes/parameter", size / size_of(tree), None, None, None, None)


def _on_cpu() -> dict:
    tree = bert(*BASE)

    def walker(tx):
        params = jax.tree.map(lambda leaf: jnp.full(leaf.shape, 0.02, leaf.dtype), tree)
        rng = np.random.default_rng(0)
        grads = jax.tree.map(lambda leaf: jnp.asarray(rng.normal(size=leaf.shape), "f4"), tree)
        step = jax.jit(_update(tx), donate_argnums=(0, 1))
        holder = [(params, tx.init(params))]

        def walk():
            holder[0] = jax.block_until_ready(step(*holder[0], grads))

        return walk

    ours = lbopt.muon(RATE, variant="optax")
    peer = optax.contrib.muon(RATE, muon_weight_dimension_numbers=_numbers(tree))
    seconds, peer_seconds, ratio = pairs.in_turn(walker(ours), walker(peer), ROUNDS)
    title = "Muon, configured alike: BERT-Base, CPU"
    aim = ("ratio", ">=", 1.0)
    return pairs.row(title, "s/update", seconds, peer_seconds, "optax.contrib.muon", ratio, aim)
