"""Muon's family and AdamH against their public codes, and the split by role."""

import functools
import itertools

import jax
import jax.numpy as jnp
import matrix_sources as sources
import numpy as np
import optax
import preconditioner_sources as preconditioners
import pytest
from compiling import QUICKLY
from matrix_sources import Leaf
from refusal import names_in, refused

import lbopt

jit = functools.partial(jax.jit, compiler_options=QUICKLY)
LEAVES = {
    "embed/embedding": Leaf((10, 6), "embedding"),
    "layers/dense/kernel": Leaf((3, 6, 8), "matrix", layers=3),
    "layers/dense/bias": Leaf((3, 8), "vector"),
    "conv/kernel": Leaf((2, 2, 3, 5), "matrix", inputs=3),
    "query/kernel": Leaf((6, 2, 3), "matrix"),
    "norm/scale": Leaf((6,), "vector"),
    "lm_head/kernel": Leaf((6, 10), "head"),
}
# The first statistics of SOAP have the rank of one gradient. Where a side is longer, its basis is
# not determined, and neither is Adam's direction in it.
SQUARE = {
    **LEAVES,
    "layers/dense/kernel": Leaf((3, 6, 6), "matrix", layers=3),
    "conv/kernel": Leaf((2, 1, 3, 6), "matrix", inputs=3),
}
STACKED = lbopt.stacked_paths("^layers/")
STEPS = 200
IN_FP32 = {"products_dtype": None, "stacked": STACKED}


def rate_of(t):
    return 0.02 / (1 + 0.01 * t)


def often(count):
    """Return the share of the updates in which the factors of PSGD-Kron follow: then and always."""
    return jnp.where(count < 20, 1.0, 0.5)


class OptaxMuon:
    """optax.contrib.muon itself."""

    AXES = {
        "conv/kernel": ((0, 1, 2), 3),
        "layers/dense/kernel": (1, 2),
        "query/kernel": (0, (1, 2)),
    }

    def __init__(self, leaves):
        of = {name: optax.contrib.MuonDimensionNumbers(*axes) for name, axes in self.AXES.items()}
        numbers = {name: of.get(name) for name in leaves}
        self._tx = optax.contrib.muon(rate_of, muon_weight_dimension_numbers=numbers)
        self._state = self._tx.init({name: jnp.zeros(leaf.shape) for name, leaf in leaves.items()})
        self._update = jit(self._tx.update)

    def step(self, weights, gradients, rate):
        del rate
        gradients = {name: jnp.asarray(leaf, jnp.float32) for name, leaf in gradients.items()}
        updates, self._state = self._update(gradients, self._state, weights)
        return {name: weights[name] + np.asarray(updates[name], np.float64) for name in weights}


def clipped_muonh(rate, **options):
    """Return muonh of gradients that are clipped in three groups, each to norm 1."""

    def groups(params):
        def group(path, _):
            kind = LEAVES["/".join(entry.key for entry in path)].kind
            return kind if kind in ("matrix", "head") else "adam"

        return jax.tree_util.tree_map_with_path(group, params)

    clips = dict.fromkeys(("matrix", "head", "adam"), optax.clip_by_global_norm(1.0))
    return optax.chain(optax.multi_transform(clips, groups), lbopt.muonh(rate, **options))


BUILD = {
    "muon_keller": (
        sources.Keller,
        {"wd": 0.1},
        lbopt.muon,
        {"weight_decay": 0.1, "rest_weight_decay": 0.0},
    ),
    "muon_moonlight": (
        sources.Moonlight,
        {},
        lbopt.muon,
        {"variant": "moonlight", "weight_decay_mask": None},
    ),
    "muon_polar": (
        sources.Polar,
        {},
        lbopt.muon,
        {"variant": "polar", "weight_decay_mask": None},
    ),
    "muon_optax": (OptaxMuon, {}, lbopt.muon, {"variant": "optax"}),
    "normuon": (
        sources.NorMuon,
        {"wd": 0.1},
        lbopt.normuon,
        {"weight_decay": 0.1, "rest_weight_decay": 0.0},
    ),
    "muonh_marin": (
        sources.MuonHMarin,
        {"ratio": 0.3},
        lbopt.muonh,
        {"rest_learning_rate_ratio": 0.3},
    ),
    "muonh_marin_clipped": (
        sources.MuonHMarin,
        {"ratio": 0.3, "clip": True},
        clipped_muonh,
        {"rest_learning_rate_ratio": 0.3},
    ),
    "muonh_modded": (sources.MuonHModded, {}, lbopt.muonh, {"variant": "modded_nanogpt"}),
    "adamh": (sources.AdamHMarin, {"ratio": 0.3}, lbopt.adamh, {"rest_learning_rate_ratio": 0.3}),
    "scion": (sources.ScionNvidia, {"radius": 1.5}, lbopt.scion, {"shape_factor": 1.5}),
    "soap": (
        sources.SoapPaper,
        {"wd_before": 0.1},
        lbopt.soap,
        {"weight_decay": 0.1, "rest_weight_decay": 0.0},
    ),
    "soap_kl": (sources.SoapKl, {"flat": True}, lbopt.soap, {"variant": "kl"}),
    "soaph": (sources.SoapKl, {}, lbopt.soaph, {}),
    "soaph_paper": (sources.SoapPaper, {"sphere": True}, lbopt.soaph, {"variant": "paper"}),
    "shampoo_square": (
        preconditioners.Shampoo,
        {"b2": 0.95, "every": 3, "graft": ("adam", 0.99, 1e-8), "weight_decay": 0.1},
        lbopt.shampoo,
        {
            "b2": 0.95,
            "every_steps": 3,
            "graft_b2": 0.99,
            "weight_decay": 0.1,
            "rest_b2": 0.95,
            "rest_weight_decay": 0.0,
        },
    ),
    "shampoo_sums_square": (
        preconditioners.Shampoo,
        {"eps": 1e-6, "exponents": {0: 0.5, 1: 0.0}},
        lbopt.shampoo,
        {
            "b2": 1.0,
            "eps": 1e-6,
            "every_steps": 1,
            "side": "out",
            "graft": None,
            "weight_decay": 0.0,
            "rest_b2": 0.95,
        },
    ),
    "shampoo_shorter": (
        preconditioners.ShampooShorter,
        {"b2": 0.95, "every": 3, "graft": ("adam", 0.99, 1e-8)},
        lbopt.shampoo,
        {
            "variant": "one_sided",
            "b2": 0.95,
            "every_steps": 3,
            "graft_b2": 0.99,
            "weight_decay": 0.0,
            "rest_b2": 0.95,
        },
    ),
    "kron": (
        preconditioners.PsgdKron,
        {"weight_decay": 0.1},
        lbopt.kron,
        {
            "weight_decay": 0.1,
            "rest_weight_decay": 0.0,
            "probability": often,
        },
    ),
    "muown": (
        preconditioners.Muown,
        {"weight_decay": 0.1, "factor": 0.2},
        lbopt.muown,
        {"weight_decay": 0.1, "shape_factor": 0.2, "rest_weight_decay": 0.0},
    ),
    "dion": (sources.DionSimple, {}, lbopt.dion, {"rank": 4}),
    "muloco": (
        sources.MuLoCo,
        {},
        lbopt.muloco,
        {"outer_learning_rate": 0.4, "outer_momentum": 0.6, "sync_steps": 7},
    ),
}
WITHOUT_PRODUCTS = (
    lbopt.adamh,
    lbopt.soap,
    lbopt.soaph,
    lbopt.shampoo,
    lbopt.kron,
    lbopt.dion,
)


def leaves_of(name):
    return SQUARE if name.startswith("soap") or name.endswith("square") else LEAVES


def flat_of(seed, size=1.0, leaves=LEAVES):
    rng = np.random.default_rng(seed)
    return {name: size * rng.normal(size=leaf.shape) for name, leaf in leaves.items()}


def gradient_of(step, leaves=LEAVES):
    """Return gradients; those of one step are zero, of another tiny, of a third large."""
    return flat_of(1000 + step, {40: 0.0, 60: 1e-12, 80: 1e4}.get(step, 1.0), leaves)


def nested(flat, dtype=jnp.float32):
    tree = {}
    for name, leaf in flat.items():
        *parents, last = name.split("/")
        inside = tree
        for parent in parents:
            inside = inside.setdefault(parent, {})
        inside[last] = jnp.asarray(leaf, dtype)
    return tree


def first_bases(leaves):
    """Return the random bases that `dion` starts with, [in, rank] for each matrix."""
    state = lbopt.dion(0.1, rank=4, stacked=STACKED).init(nested(flat_of(0, leaves=leaves)))
    [kept] = lbopt.transforms.find_states(state, [lbopt.transforms.DionState])
    return kept.basis


def kron_noise(leaves):
    """Return the noise of `kron` as (name, step) -> array, and the steps in which it balances."""
    places = sorted(leaves, key=lambda name: name.split("/"))

    def key(step):
        return jax.random.fold_in(jax.random.key(0), step)

    def noise(name, step):
        own = jax.random.fold_in(key(step), 1 + matrices.index(name))
        return np.asarray(jax.random.normal(own, leaves[name].shape), np.float64)

    matrices = [name for name in places if leaves[name].kind == "matrix"]
    draws = (jax.random.fold_in(key(step), 0) for step in range(STEPS))
    balanced = [bool(jax.random.bernoulli(draw, 0.01)) for draw in draws]
    assert any(balanced)
    return {
        "noise": noise,
        "balances": balanced.__getitem__,
        "updates": lambda n: n < 19 or n % 2 == 0,
    }


@functools.cache
def walked(name, is_square=False):
    """Return the weights of the source after 1, 2 and all steps."""
    source, options, _, _ = BUILD[name]
    leaves = SQUARE if is_square else leaves_of(name)
    if name == "dion":
        options = {"bases": first_bases(leaves)}
    if name == "kron":
        options = {**options, **kron_noise(leaves)}
    run = source(leaves, **options)
    weights = flat_of(0, leaves=leaves)
    kept = []
    for step in range(STEPS):
        weights = run.step(weights, gradient_of(step, leaves), rate_of(step))
        if step in (0, 1, STEPS - 1):
            kept.append(weights)
    return kept


def norm(x):
    return np.linalg.norm(np.asarray(x, np.float64))


@pytest.mark.parametrize("name", BUILD)
def test_200_steps_equal_the_public_code(name):
    _, _, factory, options = BUILD[name]
    own = {"stacked": STACKED} if factory in WITHOUT_PRODUCTS else IN_FP32
    tx = factory(rate_of, **options, **own)
    leaves = leaves_of(name)
    params = nested(flat_of(0, leaves=leaves))
    state = tx.init(params)

    @jit
    def step_fn(params, state, gradients):
        updates, state = tx.update(gradients, state, params)
        return optax.apply_updates(params, updates), state

    expected = iter(walked(name))
    for step in range(STEPS):
        params, state = step_fn(params, state, nested(gradient_of(step, leaves)))
        if step not in (0, 1, STEPS - 1):
            continue
        for path, wanted in next(expected).items():
            *parents, last = path.split("/")
            found = functools.reduce(lambda node, key: node[key], parents, params)[last]
            moved = norm(wanted - flat_of(0, leaves=leaves)[path])
            # What does not move, as a matrix in SOAP's first step, is rounded to fp32.
            limit = 2e-3 * moved + 1e-6 * norm(wanted)
            assert norm(np.asarray(found, np.float64) - wanted) <= limit, (step, path)


def test_soap_decays_nearly_as_its_code():
    """Which leaves the first step out, and decays what a step has moved: less than one decay."""
    leaves = {"kernel": Leaf((6, 6), "matrix")}
    source = sources.SoapPaper(leaves, wd=0.1)
    theirs = flat_of(0, leaves=leaves)
    tx = lbopt.soap(rate_of, weight_decay=0.1)
    params = start = nested(theirs)
    state = tx.init(params)
    update = jit(tx.update)
    for step in range(STEPS):
        gradient = gradient_of(step, leaves)
        theirs = source.step(theirs, gradient, rate_of(step))
        updates, state = update(nested(gradient), state, params)
        params = optax.apply_updates(params, updates)

    gap = norm(params["kernel"] - theirs["kernel"])
    assert gap < 0.1 * rate_of(0) * norm(start["kernel"])


@pytest.mark.slow  # it walks every source again
def test_every_two_sources_differ_by_five_times_the_tolerance():
    """Their matrices do, whatever they do to the rest."""
    start = flat_of(0, leaves=SQUARE)
    matrices = [path for path, leaf in SQUARE.items() if leaf.kind == "matrix"]
    for name, other in itertools.permutations(BUILD, 2):
        ours, theirs = (walked(one, is_square=True)[-1] for one in (name, other))
        gaps = [
            norm(ours[path] - theirs[path]) / norm(ours[path] - start[path]) for path in matrices
        ]
        assert max(gaps) > 0.01, (name, other)


def test_the_split_is_visible(capsys):
    shapes = jax.eval_shape(lambda: nested(flat_of(0)))
    lbopt.summarize_masks(shapes, lbopt.muonh(0.1, stacked=STACKED))
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    found = {line[0]: (line[-1], line[-3]) for line in lines if "/" in line[0]}
    assert found == {
        "conv/kernel": ("muonh", "yes"),
        "embed/embedding": ("adamw", "no"),
        "layers/dense/bias": ("adamw", "no"),
        "layers/dense/kernel": ("muonh", "yes"),
        "lm_head/kernel": ("adamh", "yes"),
        "norm/scale": ("adamw", "no"),
        "query/kernel": ("muonh", "yes"),
    }


def test_heads_can_be_orthogonalized_by_themselves():
    numbers = {"query": {"kernel": optax.contrib.MuonDimensionNumbers((0,), (2,))}}
    params = {
        "query": {
            "kernel": jnp.asarray(np.random.default_rng(0).normal(size=(6, 2, 3)), jnp.float32)
        }
    }
    tx = lbopt.scale_by_newton_schulz("deepseek", dimension_numbers=numbers)
    updates, _ = tx.update(params, tx.init(params))
    for head in range(2):
        y = np.asarray(updates["query"]["kernel"][:, head], np.float64)
        np.testing.assert_allclose(y.T @ y, np.eye(3), atol=5e-3)


def test_optimizers_of_optax_move_on_spheres_and_take_the_rest():
    params = nested(flat_of(0))
    weights = lbopt.masks.weights_only & lbopt.masks.exclude_roles("embedding")
    on_spheres = optax.chain(
        optax.contrib.scale_by_ademamix(),
        lbopt.relative_update(mask=weights, stacked=STACKED),
        lbopt.scale_by_learning_rate(0.1),
        lbopt.hyperball(mask=weights, stacked=STACKED),
    )
    split = lbopt.muonh(0.1, rest=optax.contrib.scale_by_adopt(), stacked=STACKED)
    prodigy = lbopt.muonh(0.1, rest=optax.contrib.prodigy(1.0, estim_lr0=0.1), stacked=STACKED)
    sophia = optax.chain(
        optax.contrib.sophia(1.0),
        lbopt.relative_update(mask=weights, stacked=STACKED),
        optax.scale(0.1),
        lbopt.hyperball(mask=weights, stacked=STACKED),
    )

    def loss(params, **_):
        return sum(jnp.sum(p**2) for p in jax.tree.leaves(params))

    for tx in (on_spheres, split, prodigy, sophia):
        state = tx.init(params)
        moved = params
        update = jit(functools.partial(optax.with_extra_args_support(tx).update, obj_fn=loss))
        for _ in range(3):
            updates, state = update(params, state, moved)
            moved = optax.apply_updates(moved, updates)
        kernel = moved["query"]["kernel"]
        assert norm(kernel) == pytest.approx(norm(params["query"]["kernel"]), rel=3e-7)
        assert norm(moved["norm"]["scale"] - params["norm"]["scale"]) > 1e-3


def test_any_transformation_can_take_the_rest():
    params = nested(flat_of(0))
    tx = lbopt.muon(
        0.02, rest=lbopt.scale_by_lars_momentum(0.0), rest_learning_rate_ratio=0.5, stacked=STACKED
    )
    updates, _ = tx.update(params, tx.init(params), params)
    np.testing.assert_allclose(updates["norm"]["scale"], -0.01 * params["norm"]["scale"], rtol=1e-6)


@pytest.mark.everyday("muon_keller", "soap", "dion", "muown")
@pytest.mark.parametrize("name", BUILD)
def test_zero_gradients_do_not_move_matrices_and_bad_ones_can_be_skipped(name):
    _, _, factory, options = BUILD[name]
    decay = {} if name.startswith(("adamh", "muonh", "soaph")) else {"weight_decay": 0.0}
    tx = lbopt.skip_bad_updates(factory(0.1, stacked=STACKED, **{**options, **decay}))
    params = nested(flat_of(0))
    zeros = jax.tree.map(jnp.zeros_like, params)

    update = jit(tx.update)
    updates, state = update(zeros, tx.init(params), params)
    assert all(
        norm(u) <= 1e-5 * norm(p)
        for u, p in zip(jax.tree.leaves(updates), jax.tree.leaves(params), strict=True)
    )
    bad = jax.tree.map(lambda p: p.at[(0,) * p.ndim].set(jnp.nan), params)
    updates, _ = update(bad, state, params)
    assert not any(np.any(u) for u in jax.tree.leaves(updates))


# Those of modded-nanogpt and Optax stop, as their codes do.
@pytest.mark.everyday("muon_keller", "soap", "dion")
@pytest.mark.parametrize(
    "name", [name for name in BUILD if not {"modded", "optax"} & {*name.split("_")}]
)
def test_a_gradient_beyond_all_measure_does_not_stop_an_optimizer(name):
    _, _, factory, options = BUILD[name]
    tx = factory(0.01, stacked=STACKED, **options)
    params = nested(flat_of(0))
    state = tx.init(params)
    update = jit(tx.update)
    for size in (1.0, 1e25, 1.0, 1.0):
        updates, state = update(nested(flat_of(1, size)), state, params)
    assert all(0 < norm(u) < np.inf for u in jax.tree.leaves(updates))


def test_bad_input_is_refused_in_one_line():
    vectors = {"norm": {"scale": jnp.ones(3)}, "gain": jnp.ones(())}
    for tx in (lbopt.muon(0.1), lbopt.scale_by_newton_schulz()):
        with refused("dimension_numbers", code="value") as caught:
            tx.init(vectors)
        assert {"gain", "norm/scale"} <= names_in(caught)

    numbers = {"norm": {"scale": optax.contrib.MuonDimensionNumbers(0, 1)}, "gain": None}
    with refused("dimension_numbers/norm/scale", numbers["norm"]["scale"], "value"):
        lbopt.muon(0.1, dimension_numbers=numbers).init(vectors)
    with refused("dimension_numbers", code="type"):
        lbopt.muon(0.1, dimension_numbers={"norm": None}).init(vectors)
    matrix = {"dense": {"kernel": jnp.ones((4, 6))}}
    stack = {"layers": {"alpha": jnp.ones((4, 6))}, **matrix}
    lbopt.muonh(0.1, stacked=lbopt.stacked_paths("layers")).init(stack)  # of vectors
    for axes in ((0, 1), ((0,), (1,)), [0, 1]):
        with refused("dimension_numbers/dense/kernel", axes, "value"):
            lbopt.muon(0.1, dimension_numbers={"dense": {"kernel": axes}}).init(matrix)
    with refused("stacked", code="mismatch") as caught:  # its rows are no layers
        lbopt.muonh(0.1, stacked=lbopt.stacked_paths("dense")).init(matrix)
    assert "dense/kernel" in names_in(caught)
    with refused("stacked/norm/scale", code="value"):
        lbopt.muon(0.1, stacked=lambda path, leaf: 2 * (path == "norm/scale")).init(vectors)

    for field, value, code in [
        ("variant", "kellar", "choice"),
        ("rest", "adam", "choice"),
        ("rest", 3, "type"),
        ("momentum", 1.0, "value"),
        ("momentum_form", "mean", "choice"),
        ("shape_rule", "square", "choice"),
        ("coefficients", "muno", "choice"),
        ("steps", 0, "value"),
        ("products_dtype", "int8", "value"),
        ("eps", -1.0, "value"),
        ("rest_learning_rate_ratio", -1.0, "value"),
        ("rest_b2", 1.0, "value"),
        ("weight_decay", -0.1, "value"),
    ]:
        with refused(field, value, code):
            lbopt.muon(0.1, **{field: value})
    with refused("neuron_b2", 1.0, "value"):
        lbopt.normuon(0.1, neuron_b2=1.0)
    with refused("rank", 9, "value"):
        lbopt.dion(0.1, rank=9, stacked=STACKED).init(nested(flat_of(0)))
    for build, field, value in [
        (lbopt.dion, "rank", 0),
        (lbopt.dion, "rank_fraction", 0.0),
        (lbopt.muon, "learning_rate", -1.0),
        (lbopt.soap, "every_steps", 0),
        (lbopt.soap, "b1", 1.0),
        (lbopt.muloco, "sync_steps", 0),
        (lbopt.muloco, "outer_momentum", 1.0),
    ]:
        with refused(field, value, "value"):
            build(**{"learning_rate": 0.1, field: value})
    with refused("rank_fraction", 0.5, "conflict"):
        lbopt.dion(0.1, rank=2, rank_fraction=0.5)
    with refused("root", 2.5, "value"):
        lbopt.shampoo(0.1, root=2.5, method="newton")
