"""The cost of one optimizer update beside optax.

HBM traffic, memory and compile time are by the TPU compiler; CPU time is measured.

The trees have BERT's shapes. Parameters, gradients and state are fp32; parameters and state are
donated. One word is 4 bytes. LAMB in two passes reads g, m, v, w and writes m, v, then reads m, v,
w and writes w: 10 words per parameter; LARS takes 7. From v4 on the compiler's count of bytes
("accessed") includes on-chip memory, and the rows "HBM" count the traffic of HBM alone. On v3 both
are the same.
"""

import functools
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import optax
import pairs
import tpu_compiler
from bert_tree import bert, size_of

import lbopt

LARGE = (24, 1024)
BASE = (12, 768)
RATE = 1e-3
DECAY = 0.01
LAYERS = lbopt.stacked_paths("^layers/")
# Tuples of name, lbopt's optimizer, the peer in optax, most words per parameter on v3.
MAIN = [
    ("LAMB", lbopt.lamb(RATE, weight_decay=DECAY), optax.lamb(RATE, weight_decay=DECAY), 10.2),
    ("LARS", lbopt.lars(RATE, weight_decay=DECAY), optax.lars(RATE, weight_decay=DECAY), 7.2),
]
MORE = [
    (
        "LAMB, variant optax",
        lbopt.lamb(RATE, weight_decay=DECAY, variant="optax"),
        MAIN[0][2],
        None,
    ),
    (
        "LARS, variant optax",
        lbopt.lars(RATE, weight_decay=DECAY, variant="optax"),
        MAIN[1][2],
        None,
    ),
    (
        "LARS, variant nus (ratio outside)",
        lbopt.lars(RATE, weight_decay=DECAY, variant="nus"),
        MAIN[1][2],
        None,
    ),
    (
        "LAMB, variant albert (clips)",
        lbopt.lamb(RATE, variant="albert"),
        optax.chain(optax.clip_by_global_norm(1.0), MAIN[0][2]),
        None,
    ),
    (
        "LAMB, moments in bf16",
        lbopt.lamb(RATE, weight_decay=DECAY, mu_dtype="bfloat16", nu_dtype="bfloat16"),
        MAIN[0][2],
        None,
    ),
    ("LANS", lbopt.lans(RATE, weight_decay=DECAY), None, None),
]
STACKED = [
    (
        "LAMB, layers stacked",
        lbopt.lamb(RATE, weight_decay=DECAY, stacked=LAYERS),
        MAIN[0][2],
        None,
    ),
    (
        "LARS, layers stacked",
        lbopt.lars(RATE, weight_decay=DECAY, stacked=LAYERS),
        MAIN[1][2],
        None,
    ),
]
GENERATIONS = ("v4", "v5e", "v5p", "v6e", "tpu7x")  # with memory on the chip
NO_WORSE = ("ratio", ">=", 0.99)
ROUNDS = 9


def run() -> Iterator[dict]:
    """Yield the rows of all tables."""
    unrolled = bert(*LARGE)
    stacked = bert(*LARGE, stacked=True)

    for case in MAIN:
        yield from _on_tpu("v3", unrolled, *case, whole=True)
    yield _formulation(unrolled)
    for case in MORE:
        yield from _on_tpu("v3", unrolled, *case)
    for case in STACKED:
        yield from _on_tpu("v3", stacked, *case)
    for generation in GENERATIONS:
        for case in MAIN:
            yield from _on_tpu(generation, unrolled, *case[:3], None, on_chip=True)
    yield from _four_leaves()
    yield from _in_eight_bits(unrolled)
    for case in MAIN:
        yield _on_cpu(*case[:3])


def _by_leaf(params, opt_state, grads):
    """Update with LAMB in one expression per leaf, without transforms and masks.

    The optimizer's state is (count, moments). Every leaf gets weight decay and a trust ratio.
    """
    count, moments = opt_state
    t = (count + 1).astype(jnp.float32)

    def leaf(w, mv, g):
        m = 0.9 * mv[0] + 0.1 * g
        v = 0.999 * mv[1] + 0.001 * g * g
        u = m / (1 - 0.9**t) / (jnp.sqrt(v / (1 - 0.999**t)) + 1e-6) + DECAY * w
        ratio = jnp.linalg.norm(jnp.ravel(w)) / jnp.linalg.norm(jnp.ravel(u))
        return w - RATE * ratio * u, (m, v)

    pairs = jax.tree.map(leaf, params, moments, grads)
    flat = jax.tree.structure(params).flatten_up_to(pairs)
    new, kept = (jax.tree.structure(params).unflatten([pair[i] for pair in flat]) for i in (0, 1))
    return new, (count + 1, kept)


def _formulation(tree) -> dict:
    """Return a row with the words of the leaf-by-leaf LAMB beside optax's tree maps."""
    state = (jax.ShapeDtypeStruct((), jnp.int32), jax.tree.map(lambda leaf: (leaf, leaf), tree))
    cost = tpu_compiler.compile_for("v3", _by_leaf, (tree, state, tree), donate=(0, 1))
    peer = _known_cost("v3", False, MAIN[0][2]).accessed_bytes
    words, peer_words = (value / 4 / size_of(tree) for value in (cost.accessed_bytes, peer))
    name = "LAMB leaf by leaf in plain JAX: accessed, TPU v3"
    return pairs.row(name, "words/parameter", words, peer_words, "optax", peer_words / words, None)


def _four_leaves() -> Iterator[dict]:
    """Yield rows of LAMB on four matrices alone."""
    tree = {str(i): {"kernel": jax.ShapeDtypeStruct((1024, 4096), jnp.float32)} for i in range(4)}
    for generation in GENERATIONS:
        mine, theirs = (_cost(generation, tree, tx) for tx in MAIN[0][1:3])
        for what, unit, of in (
            ("HBM", "words/parameter", lambda cost: cost.hbm_bytes / 4 / size_of(tree)),
            ("estimate", "Mcycles", lambda cost: cost.cycles / 1e6),
        ):
            name = f"LAMB, four 1024 x 4096 matrices: {what}, TPU {generation}"
            ratio = of(theirs) / of(mine)
            yield pairs.row(name, unit, of(mine), of(theirs), "optax", ratio, NO_WORSE)


def _in_eight_bits(tree) -> Iterator[dict]:
    """Yield rows of LAMB whose moments are kept in 8 bits, beside LAMB.

    Reading gradient, weight and codes, and writing weight and codes, takes 4 words; a second
    reading 6.5. The compiler needs minutes and 10 GB for it.
    """
    plain = _known_cost("v5e", False, MAIN[0][1])
    cost = _cost("v5e", tree, lbopt.compress_state(MAIN[0][1]))
    name = "LAMB, state in 8 bits"
    for what, unit, aim, of in (
        ("HBM", "words/parameter", 6.0, lambda cost: cost.hbm_bytes / 4 / size_of(tree)),
        ("estimate", "Mcycles", None, lambda cost: cost.cycles / 1e6),
    ):
        ratio = of(plain) / of(cost)
        yield pairs.row(
            f"{name}: {what}, TPU v5e",
            unit,
            of(cost),
            of(plain),
            "lbopt.lamb",
            ratio,
            aim and ("lbopt", "<=", aim),
        )


def _update(tx):
    def update(params, opt_state, grads):
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    return update


@functools.cache
def _known_cost(
    generation: str, stacked: bool, tx: optax.GradientTransformation
) -> tpu_compiler.Cost:
    return _cost(generation, bert(*LARGE, stacked=stacked), tx)


def _cost(generation, tree, tx):
    arguments = (tree, jax.eval_shape(tx.init, tree), tree)
    return tpu_compiler.compile_for(generation, _update(tx), arguments, donate=(0, 1))


def _on_tpu(generation, tree, name, ours, peer, most, whole=False, on_chip=False) -> list[dict]:
    """Return the rows of one optimizer on one TPU generation.

    Args:
      generation: "v3", "v4", "v5e", "v5p", "v6e" or "tpu7x".
      tree: Shapes of the parameters.
      name: Name of the optimizer in the table.
      ours: lbopt's optimizer.
      peer: optax's optimizer; None if there is none.
      most: Most accessed words per parameter that are wanted; None for no aim.
      whole: Whether to add rows of cycles, temporaries and compile time.
      on_chip: Whether to add rows of HBM traffic and cycles, for generations with on-chip memory.
    """
    stacked = "layers" in tree
    theirs = None if peer is None else _known_cost(generation, stacked, peer)
    mine = _known_cost(generation, stacked, ours)
    size = size_of(tree)
    peer_name = "optax"

    def row(what, unit, of, aim=None):
        ours = of(mine)
        peer = None if theirs is None else of(theirs)
        ratio = None if not peer else peer / max(ours, 1e-9)
        return pairs.row(
            f"{name}: {what}, TPU {generation}", unit, ours, peer, peer and peer_name, ratio, aim
        )

    aim = most and ("lbopt", "<=", most)
    rows = [row("accessed", "words/parameter", lambda cost: cost.accessed_bytes / 4 / size, aim)]
    if on_chip:
        rows.append(row("HBM", "words/parameter", lambda cost: cost.hbm_bytes / 4 / size, NO_WORSE))
    if on_chip or whole:
        rows.append(row("estimate", "Mcycles", lambda cost: cost.cycles / 1e6, NO_WORSE))
    if whole:
        aim = ("lbopt", "<=", 1.0)
        rows.append(
            row("temporaries", "bytes/parameter", lambda cost: cost.temporary_bytes / size, aim)
        )
        rows.append(_compile_time(generation, tree, name, ours, peer))
    return rows


def _compile_time(generation, tree, name, ours, peer) -> dict:
    """Return a row with the seconds of tracing, lowering and compiling.

    Each is timed twice and the shorter time counts: the first compilation of a process is slower.
    """
    times: dict[str, list[float]] = {"ours": [], "peer": []}
    for _ in range(2):
        for whose, tx in (("peer", peer), ("ours", ours)):
            jax.clear_caches()
            times[whose].append(_cost(generation, tree, tx).compile_seconds)
    mine, theirs = (min(values) for values in times.values())
    leaves = len(jax.tree.leaves(tree))
    what = f"{name}: compile time, {leaves} leaves, TPU {generation}"
    return pairs.row(what, "s", mine, theirs, "optax", theirs / mine, ("ratio", ">=", 1 / 1.2))


def _on_cpu(name, ours, peer) -> dict:
    """Return a row with updates/s on this machine."""
    tree = bert(*BASE)

    def walker(tx):
        params = jax.tree.map(lambda leaf: jnp.full(leaf.shape, 0.02, leaf.dtype), tree)
        grads = jax.tree.map(lambda leaf: jnp.full(leaf.shape, 1e-3, leaf.dtype), tree)
        step = jax.jit(_update(tx), donate_argnums=(0, 1))
        holder = [(params, tx.init(params))]

        def walk():
            holder[0] = jax.block_until_ready(step(*holder[0], grads))

        return walk

    seconds, peer_seconds, ratio = pairs.in_turn(walker(ours), walker(peer), ROUNDS, discard=2)
    aim = ("ratio", ">=", 1.0)
    return pairs.row(
        f"{name}: BERT-Base, CPU", "updates/s", 1 / seconds, 1 / peer_seconds, "optax", ratio, aim
    )
