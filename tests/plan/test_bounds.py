"""The dual program certifies each bound, and small cases are searched exhaustively."""

import itertools
import math

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest
from refusal import refused

import lbopt.plan
from lbopt.plan import dp_limit, grid, tile
from lbopt.plan._bounds import words_each_receives

MATMUL = {"A": "mk", "B": "kn", "C": "mn"}
DENSE = {"A": ("token", "in"), "W": ("in", "out"), "C": ("token", "out")}


@st.composite
def nests(draw):
    """Return nests of up to five loops and four arrays, where every loop subscripts an array."""
    loops = "abcde"[: draw(st.integers(1, 5))]
    sizes = {loop: draw(st.integers(1, 2**14)) for loop in loops}
    arrays = [
        draw(st.sets(st.sampled_from(loops), min_size=1)) for _ in range(draw(st.integers(1, 4)))
    ]
    arrays[0] |= set(loops) - set().union(*arrays)
    return sizes, {str(number): "".join(sorted(array)) for number, array in enumerate(arrays)}


@hypothesis.settings(max_examples=150, deadline=None)
@hypothesis.given(nests(), st.integers(2, 2**20))
def test_the_dual_certifies_the_tile(nest, memory_words):
    sizes, arrays = nest
    found = tile(sizes, arrays, memory_words)
    beta = {loop: math.log(size, memory_words) for loop, size in sizes.items()}

    for loops in arrays.values():  # the tile is feasible
        assert sum(found.exponents[loop] for loop in loops) <= 1 + 1e-6
        assert math.prod(found.sides[loop] for loop in loops) <= memory_words

    assert all(-1e-9 <= found.exponents[loop] <= beta[loop] + 1e-6 for loop in sizes)
    assert sum(found.exponents.values()) == pytest.approx(found.exponent, abs=1e-5)

    for loop in sizes:  # and so is the dual point
        covered = found.dual_loops[loop] + sum(
            found.dual_arrays[name] for name in arrays if loop in arrays[name]
        )
        assert covered >= 1 - 1e-6
    assert min(*found.dual_arrays.values(), *found.dual_loops.values(), 0) >= -1e-9

    value = sum(found.dual_arrays.values()) + sum(
        beta[loop] * found.dual_loops[loop] for loop in sizes
    )
    # Their values are equal: neither can be better.
    assert value == pytest.approx(found.exponent, abs=1e-5)


@pytest.mark.parametrize(
    ("sizes", "arrays", "memory", "exponent"),
    [
        ({"m": 1024, "n": 1024, "k": 1024}, MATMUL, 2**14, 1.5),
        (
            {"m": 4096, "n": 4096, "k": 1},
            MATMUL,
            2**14,
            1.0,
        ),  # an outer product: every result is written once
        ({"m": 4096, "n": 4096, "k": 8}, MATMUL, 2**14, 1 + 3 / 14),
        ({"i": 4096, "j": 4096}, {"x": "i", "y": "j"}, 2**10, 2.0),  # n bodies
        (
            {"b": 256, "c": 64, "k": 256, "x": 56, "y": 56},
            {"I": "bcxy", "W": "ck", "O": "bkxy"},
            2**14,
            1 + 6 / 14,
        ),
    ],
)
def test_known_exponents(sizes, arrays, memory, exponent):
    found = tile(sizes, arrays, memory)
    assert found.exponent == pytest.approx(exponent, abs=1e-6)
    whole = math.prod(sizes.values())
    largest = max(math.prod(sizes[loop] for loop in loops) for loops in arrays.values())
    assert found.words_bound == pytest.approx(
        max(whole * memory ** (1 - exponent), largest), rel=1e-4
    )


@pytest.mark.parametrize(
    ("sizes", "memory"),
    [((32, 32, 4), 64), ((32, 32, 32), 64), ((32, 2, 16), 16), ((20, 30, 12), 100)],
)
def test_no_tile_of_whole_sides_does_more(sizes, memory):
    loops = dict(zip("mnk", sizes, strict=True))
    best = max(
        m * n * k
        for m, n, k in itertools.product(*(range(1, size + 1) for size in sizes))
        if max(m * n, n * k, m * k) <= memory
    )
    found = tile(loops, MATMUL, memory)
    assert best <= memory**found.exponent * (1 + 1e-6)
    assert best >= memory**found.exponent / 2, "and the bound is no empty one"
    assert best / 2 <= math.prod(found.sides.values()) <= best


def test_of_equal_tiles_the_balanced_one_is_taken():
    assert tile({"m": 32, "n": 32, "k": 4}, MATMUL, 64).sides == {"m": 8, "n": 8, "k": 4}


@pytest.mark.parametrize("memory", [2**14, 10_000, 200])
def test_sides_may_be_those_of_vectors(memory):
    found = tile({"m": 1000, "n": 1000, "k": 6}, MATMUL, memory, {"m": 8, "n": 128}).sides
    assert found["m"] % 8 == 0
    assert found["n"] % 128 == 0 or found["n"] < 128
    assert found["k"] <= 6
    assert max(found["m"] * found["n"], found["n"] * found["k"], found["m"] * found["k"]) <= memory


@hypothesis.settings(max_examples=60, deadline=None)
@hypothesis.given(st.lists(st.integers(1, 40), min_size=3, max_size=3), st.integers(1, 24))
def test_no_grid_receives_less(sizes, processors):
    loops = dict(zip("mnk", sizes, strict=True))
    every = [
        parts
        for parts in itertools.product(range(1, processors + 1), repeat=3)
        if math.prod(parts) == processors
        and all(part <= size for part, size in zip(parts, sizes, strict=True))
    ]

    if not every:
        with refused("num_processors", processors, "conflict"):
            grid(loops, MATMUL, processors)
        return

    m, n, k = sizes
    words = min(
        m * k / (pm * pk)
        + k * n / (pk * pn)
        + m * n / (pm * pn)
        - (m * k + k * n + m * n) / processors
        for pm, pn, pk in every
    )

    found = grid(loops, MATMUL, processors)
    assert found.words == pytest.approx(words, abs=1e-6)
    assert words_each_receives(loops, MATMUL, found.parts) == pytest.approx(words, abs=1e-6)


@pytest.mark.parametrize(("batch", "limit"), [(512, 32), (8192, 512), (65536, 4096)])
def test_the_batch_alone_is_cut_up_to_the_limit_and_no_further(batch, limit):
    """The product is BERT-Large's wider one at 128 tokens per example."""
    tokens = batch * 128
    assert (
        lbopt.plan.dp_limit(tokens, 1024, 4096) == lbopt.plan.dp_limit(tokens, 4096, 1024) == limit
    )
    loops = {"token": tokens, "in": 1024, "out": 4096}
    best = {
        number: grid(loops, DENSE, number).words
        / words_each_receives(loops, DENSE, {"token": number, "in": 1, "out": 1})
        for number in (limit // 2, limit - 2, limit, limit + 2, 2 * limit)
    }
    assert [best[number] for number in (limit // 2, limit - 2, limit)] == pytest.approx([1.0] * 3)
    assert max(best[limit + 2], best[2 * limit]) < 1 - 1e-6


@hypothesis.given(st.integers(1, 300), st.integers(2, 40), st.integers(2, 40), st.integers(1, 64))
def test_the_limit_beside_all_grids(tokens, d_in, d_out, half):
    processors = 2 * half
    hypothesis.assume(processors <= tokens)
    loops = {"token": tokens, "in": d_in, "out": d_out}
    alone = words_each_receives(loops, DENSE, {"token": processors, "in": 1, "out": 1})
    best = grid(loops, DENSE, processors).words
    assert (alone <= best + 1e-6) == (processors <= dp_limit(tokens, d_in, d_out))


@pytest.mark.parametrize(
    ("call", "field", "value", "code"),
    [
        (lambda: tile({"m": 0}, {"A": "m"}, 8), "bounds['m']", 0, "value"),
        (lambda: tile({"m": 4}, {"A": "m"}, 1), "memory_words", 1, "value"),
        (lambda: tile({}, {}, 64), "bounds", {}, "missing"),
        (lambda: tile({"m": 4}, {"A": "m"}, 8, {"m": 0}), "multiples['m']", 0, "value"),
        (lambda: tile({"m": 4}, {"A": "m"}, 8, {"n": 8}), "multiples['n']", 8, "value"),
        (lambda: tile({"m": 4}, {"A": "mx"}, 8), "arrays['A']", "mx", "choice"),
        (lambda: grid({"m": 4, "n": 4}, {"A": "m"}, 2), "arrays", {"A": "m"}, "conflict"),
        (lambda: grid({"m": 4}, {"A": "m"}, 0), "num_processors", 0, "value"),
        (lambda: dp_limit(0, 1, 1), "tokens", 0, "value"),
    ],
)
def test_what_is_no_nest_is_refused(call, field, value, code):
    with refused(field, value, code):
        call()


def test_words_of_a_layer_are_those_of_its_grid():
    from lbopt.plan._count import LayerSizes
    from lbopt.plan._limits import fewest_words

    rng = np.random.default_rng(0)
    for _ in range(50):
        tokens, d_in, d_out = (int(2**power) for power in rng.integers(3, 14, 3))
        processors = int(2 ** rng.integers(0, 8))
        layer = LayerSizes("", 0, tokens * d_in, d_in * d_out, tokens * d_out)
        wanted = grid({"token": tokens, "in": d_in, "out": d_out}, DENSE, processors).words
        assert fewest_words(layer, processors) == pytest.approx(wanted)
        assert layer.dp_limit == max(1, dp_limit(tokens, d_in, d_out))
