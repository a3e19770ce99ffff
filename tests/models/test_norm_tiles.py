"""Batch norm over tiles of a replica grid, on eight and four devices, equals NumPy's."""

import itertools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from refusal import numbers_in, refused

import lbopt
from lbopt import replicas
from lbopt.models import StatsScope

DEVICES = 8
BATCH = 16
MOMENTUM = 0.75
GRIDS = {
    "2x4": ["2x2", "1x2", "2x1", "2x4", "1x4", "1x1"],
    "4x2": ["2x2", "1x2", "2x1", "4x2", "4x1", "1x1"],
}
TILED = [f"tiles:{tile}@{grid}" for grid, tiles in GRIDS.items() for tile in tiles]
WIDE = [scope for scope in TILED if "1x1" not in scope]
GROUPED = ["replicas:2", "replicas:4", "examples:4", "examples:8", "global"]
WITHIN = ["local", "replicas:1", "examples:2", "tiles:1x1@2x4"]


def examples_of(scope):
    """Return the examples of each group, replica by replica.

    Replica r is at row r // columns, column r % columns.
    """
    if scope == "global":
        return [np.arange(BATCH)]
    if not scope.startswith("tiles"):
        kind, size = scope.split(":")
        examples = int(size) * (BATCH // DEVICES if kind == "replicas" else 1)
        return [np.arange(start, start + examples) for start in range(0, BATCH, examples)]
    rows, columns, height, width = (int(number) for number in re.findall(r"\d+", scope))
    part = BATCH // DEVICES
    groups = {}
    for replica, (row, column) in enumerate(itertools.product(range(height), range(width))):
        examples = range(replica * part, (replica + 1) * part)
        groups.setdefault((row // rows, column // columns), []).extend(examples)
    return list(groups.values())


@pytest.fixture(scope="module")
def arrays():
    """Return inputs whose examples differ in mean and spread, so that groups matter."""
    rng = np.random.default_rng(1)
    x = rng.standard_normal((BATCH, 2, 3)) * rng.uniform(
        0.5, 2, (BATCH, 1, 1)
    ) + rng.standard_normal((BATCH, 1, 3))
    scale = rng.uniform(0.5, 2, 3)
    bias = rng.standard_normal(3)
    weights = rng.standard_normal(x.shape)
    return [array.astype(np.float32) for array in (x, scale, bias, weights)]


@pytest.fixture(scope="module")
def on_eight(arrays, normalized_on_eight):
    """Return (case, backend) -> (results by scope, collectives), all from one process."""
    narrow = [(arrays[0] + 20).astype(jnp.bfloat16), *arrays[1:]]

    jobs = {
        ("wide", "jit"): (("jit", DEVICES, WIDE + GROUPED, arrays), {}),
        ("wide", "pmap"): (("pmap", DEVICES, WIDE + GROUPED, arrays), {}),
        ("mesh", "jit"): (
            ("jit", DEVICES, ["tiles:2x2"], arrays),
            {"grid": (4, 2), "running_from": "first"},
        ),
        ("mesh", "pmap"): (
            ("pmap", DEVICES, ["tiles:2x2"], arrays),
            {"grid": (4, 2), "running_from": "first"},
        ),
        ("narrow", "jit"): (
            ("jit", DEVICES, ["tiles:2x2@2x4"], narrow),
            {"unbiased_running_var": True},
        ),
        ("narrow", "pmap"): (
            ("pmap", DEVICES, ["tiles:2x2@2x4"], narrow),
            {"unbiased_running_var": True},
        ),
        ("within", "jit"): (("jit", DEVICES, WITHIN, arrays), {}),
        ("within", "pmap"): (("pmap", DEVICES, WITHIN, arrays), {}),
    }

    return dict(zip(jobs, normalized_on_eight(list(jobs.values())), strict=True))


def moved(start, batch):
    return MOMENTUM * start + (1 - MOMENTUM) * batch


@pytest.mark.process
@pytest.mark.parametrize("backend", ["jit", "pmap"])
@pytest.mark.parametrize("scope", WIDE + GROUPED)
def test_outputs_gradients_and_running_statistics(scope, backend, on_eight, arrays, reference):
    result = on_eight["wide", backend][0][scope]
    expected = reference(*arrays, examples_of(scope))
    for name in ("y", "dx", "dscale", "dbias"):
        np.testing.assert_allclose(result[name], expected[name], rtol=2e-5, atol=1e-5, err_msg=name)
    np.testing.assert_allclose(result["mean"], moved(5.0, expected["mean"]), rtol=2e-6)
    np.testing.assert_allclose(result["var"], moved(3.0, expected["var"]), rtol=2e-6)


def test_the_groups_of_tiles_are_not_contiguous():
    """The comparison above distinguishes tiles from contiguous groups of the same size."""
    assert [list(group) for group in examples_of("tiles:2x2@2x4")] == [
        [0, 1, 2, 3, 8, 9, 10, 11],
        [4, 5, 6, 7, 12, 13, 14, 15],
    ]
    assert [list(group) for group in examples_of("tiles:2x1@4x2")] == [
        [0, 1, 4, 5],
        [2, 3, 6, 7],
        [8, 9, 12, 13],
        [10, 11, 14, 15],
    ]


@pytest.mark.process
@pytest.mark.parametrize("backend", ["jit", "pmap"])
def test_the_grid_may_be_the_meshs(backend, on_eight, arrays, reference):
    """The grid may come from the mesh. The first tile is replica 0's."""
    result = on_eight["mesh", backend][0]["tiles:2x2"]
    groups = examples_of("tiles:2x2@4x2")
    expected = reference(*arrays, groups)
    for name in ("y", "dx", "dscale", "dbias"):
        np.testing.assert_allclose(result[name], expected[name], rtol=2e-5, atol=1e-5, err_msg=name)
    first = np.asarray(arrays[0], np.float64)[groups[0]]
    np.testing.assert_allclose(result["mean"], moved(5.0, first.mean((0, 1))), rtol=2e-6)
    np.testing.assert_allclose(result["var"], moved(3.0, first.var((0, 1))), rtol=2e-6)


@pytest.mark.process
@pytest.mark.parametrize("backend", ["jit", "pmap"])
def test_bf16_inputs_and_unbiased_variance(backend, on_eight, arrays, reference):
    result = on_eight["narrow", backend][0]["tiles:2x2@2x4"]
    groups = examples_of("tiles:2x2@2x4")
    narrow = (arrays[0] + 20).astype(jnp.bfloat16).astype(np.float64)
    expected = reference(narrow, *arrays[1:], groups)
    assert result["y"].dtype == jnp.bfloat16
    assert result["var"].dtype == np.float32
    np.testing.assert_allclose(
        np.asarray(result["y"], np.float64), expected["y"], rtol=2**-8, atol=2e-3
    )
    np.testing.assert_allclose(
        np.asarray(result["dx"], np.float64), expected["dx"], rtol=2**-7, atol=4e-3
    )
    np.testing.assert_allclose(result["mean"], moved(5.0, expected["mean"]), rtol=2e-6)
    count = 8 * 2  # examples of a tile x positions
    np.testing.assert_allclose(
        result["var"], moved(3.0, expected["var"] * count / (count - 1)), rtol=1e-4
    )


@pytest.mark.process
@pytest.mark.parametrize("backend", ["jit", "pmap"])
@pytest.mark.parametrize("scope", WITHIN)
def test_groups_within_a_replica(scope, backend, on_eight, arrays, reference):
    result = on_eight["within", backend][0][scope]
    expected = reference(*arrays, DEVICES)
    for name in ("y", "dx", "dscale", "dbias"):
        np.testing.assert_allclose(result[name], expected[name], rtol=5e-5, atol=2e-5, err_msg=name)


@pytest.mark.process
def test_programs_reduce_and_do_nothing_else(on_eight):
    assert (
        on_eight["wide", "jit"][1]
        == on_eight["mesh", "jit"][1]
        == on_eight["narrow", "jit"][1]
        == {"all-reduce"}
    )


def refusal(scope, count, examples, grid=None, axis_name=None):
    module = lbopt.BatchNorm(scope)
    variables = {
        "params": {"scale": jnp.ones(2), "bias": jnp.zeros(2)},
        "batch_stats": {"mean": jnp.zeros(2), "var": jnp.ones(2)},
    }

    def apply(x):
        with replicas.tracing_for(count, axis_name, grid):
            return module.apply(variables, x, use_running_average=False, mutable=["batch_stats"])

    shape = (count, examples // count, 2) if axis_name else (examples, 2)
    traced = jax.pmap(apply, axis_name).lower if axis_name else jax.jit(apply).lower
    with refused("stats_scope", scope, "mismatch") as caught:
        traced(np.ones(shape, np.float32))
    return str(caught.value)


REFUSED = [
    ("tiles:2x2", None, 16, ["tiles:2x2@HxW"]),
    ("tiles:1x2@2x4", None, 16, ["2 x 4"]),
    ("tiles:1x2", (2, 4), 16, ["2 x 4"]),
    ("tiles:1x4@2x2", None, 16, ["1 x 4", "2 x 2"]),
    ("tiles:3x1@4x1", None, 16, ["3 x 1", "4 x 1"]),
    ("tiles:1x2@2x2", None, 6, ["4", "6"]),
]


@pytest.mark.parametrize(("scope", "grid", "examples", "named"), REFUSED)
def test_tiles_that_do_not_fit_are_refused_in_one_line(scope, grid, examples, named):
    text = refusal(scope, 4, examples, grid)
    for part in named:
        assert part in text
    if examples % 4 == 0:
        assert refusal(scope, 4, examples, grid, "data") == text


def test_the_stated_grid_wins_over_the_meshs():
    scope = StatsScope.parse("tiles:1x2@2x4")
    assert scope.tile_counts(8, (4, 2)) == (2, 2)
    assert StatsScope.parse("tiles:1x2").tile_counts(8, (4, 2)) == (4, 1)
    with refused("stats_scope", scope.text, "mismatch") as caught:
        scope.tile_counts(4, (2, 2))
    assert numbers_in(caught) == [2, 4, 4]


@pytest.mark.parametrize(
    "text",
    [
        "tiles",
        "tiles:",
        "tiles:2",
        "tiles:2x",
        "tiles:0x2",
        "tiles:2x2@",
        "tiles:2x2@4",
        "tiles:2x2@0x4",
        "tiles:2x2x2",
    ],
)
def test_what_are_no_tiles(text):
    with refused("stats_scope", text, "value") as caught:
        StatsScope.parse(text)
    assert "tiles:RxC@HxW" in caught.value.reason


@pytest.mark.parametrize(
    "text", [*TILED, "tiles:2x16", "global", "local", "replicas:4", "examples:256"]
)
def test_text_is_what_was_parsed(text):
    assert StatsScope.parse(text).text == text


@pytest.mark.parametrize("grid", [(2, 4), (4, 2), (8, 1), (1, 8)])
def test_peers_cover_every_replica_once(grid):
    """For every tile that divides a grid, `peers` has equal groups, as axis_index_groups needs."""
    for rows, columns in itertools.product((1, 2, 4, 8), repeat=2):
        if grid[0] % rows or grid[1] % columns or rows * columns in (1, 8):
            continue
        groups = StatsScope.parse(f"tiles:{rows}x{columns}").peers(
            replicas.Replicas(8, "data", grid), 2
        )
        assert sorted(itertools.chain(*groups)) == list(range(8))
        assert {len(group) for group in groups} == {rows * columns}
        for group in groups:
            places = [divmod(replica, grid[1]) for replica in group]
            height, width = (max(side) - min(side) + 1 for side in zip(*places, strict=True))
            assert (height, width) == (rows, columns)
    assert math.prod(grid) == 8
