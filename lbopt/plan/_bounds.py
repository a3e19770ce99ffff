"""Lower bounds on the communication of loop nests, with tiles and grids that attain them.

A nest has loops i with bounds L_i, and arrays j whose subscripts are subsets phi_j of the loops: a
matrix product C[m, n] += A[m, k] B[k, n] has loops m, n, k and arrays {m, k}, {k, n}, {m, n}. No
compiler is involved.

With a fast memory of M words and beta_i = log_M L_i,

    tile :  k = max sum_i lambda_i
            s.t. for all j: sum_{i in phi_j} lambda_i <= 1,  0 <= lambda_i <= beta_i
    bound:  k = min sum_j s_j + sum_i beta_i t_i
            s.t. for all i: t_i + sum_{j: i in phi_j} s_j >= 1,  s, t >= 0
    words moved >= max(prod_i L_i * M^(1 - k), max_j prod_{i in phi_j} L_i)    up to a constant

The two programs are dual, so each certifies the other. On P processors in a grid p_i
(prod p_i = P), with every array stored once, a processor receives

    words = sum_j [ prod_{i in phi_j} L_i / p_i  -  prod_{i in phi_j} L_i / P ].

References:
  Dinh and Demmel, Communication-Optimal Tilings for Projective Nested Loops with Arbitrary Bounds,
  arXiv 2003.00119. Its programs are [recalled 90%], not read there, and are checked here by duality
  and brute force. The grid is lbopt's own, from the same projections.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from scipy.optimize import linprog

from lbopt.errors import require

Arrays = Mapping[str, Sequence[str]]
"""The loops that subscript each array, by the array's name."""


class Tile(NamedTuple):
    """A tile that attains the bound, with a proof that no tile does better.

    Attributes:
      exponents: lambda of each loop; the tile's side is M^lambda.
      sides: Side of the tile along each loop, a whole number of at least 1.
      exponent: k; the tile has M^k iterations.
      words_bound: Number of words that have to be moved, up to a constant.
      dual_arrays: s of each array. Together with `dual_loops` it is a feasible point of the dual
        program whose value is k.
      dual_loops: t of each loop.

    >>> found = tile({"m": 512, "n": 512, "k": 512}, {"A": "mk", "B": "kn", "C": "mn"}, 2**12)
    >>> found.sides, round(found.words_bound)
    ({'m': 64, 'n': 64, 'k': 64}, 2097152)
    """

    exponents: dict[str, float]
    sides: dict[str, int]
    exponent: float
    words_bound: float
    dual_arrays: dict[str, float]
    dual_loops: dict[str, float]


def tile(
    bounds: Mapping[str, int],
    arrays: Arrays,
    memory_words: int,
    multiples: Mapping[str, int] | None = None,
) -> Tile:
    """Return the best rectangular tile of a nest.

    Args:
      bounds: Number of iterations of each loop, at least 1.
      arrays: The loops that subscript each array; every loop subscripts at least one.
      memory_words: Words of fast memory, at least 2. A tile's share of each single array fits into
        it; for all arrays at once, give a fraction of the memory.
      multiples: Number by loop, for some loops: a side of at least that length is rounded down to a
        multiple of it. {"n": 128, "m": 8} for a TPU's vectors; None for no multiples.

    Raises:
      UserError: If there is no loop, a number is too small, an array has an unknown loop, or a loop
        has no array.

    >>> found = tile({"m": 1024, "n": 1024, "k": 1024}, {"A": "mk", "B": "kn", "C": "mn"}, 2**14)
    >>> round(found.exponent, 3), found.sides
    (1.5, {'m': 128, 'n': 128, 'k': 128})
    """
    _check(bounds, arrays)
    require(memory_words >= 2, "memory_words", memory_words, "give at least 2")
    for loop, multiple in (multiples or {}).items():
        require(
            loop in bounds and multiple >= 1,
            f"multiples[{loop!r}]",
            multiple,
            "give at least 1, for a loop in bounds",
        )

    loops = list(bounds)
    names = list(arrays)
    beta = np.log([bounds[loop] for loop in loops]) / math.log(memory_words)
    within = np.array([[float(loop in arrays[name]) for loop in loops] for name in names])
    best = linprog(
        -np.ones(len(loops)),
        within,
        np.ones(len(names)),
        bounds=list(zip(np.zeros(len(loops)), beta, strict=True)),
    )
    exponent = -best.fun
    exponents = _balanced(within, beta, exponent)

    # A feasible point of the dual program with the same value proves that no tile does better.
    dual = linprog(
        np.concatenate([np.ones(len(names)), beta]),
        -np.concatenate([within.T, np.eye(len(loops))], axis=1),
        -np.ones(len(loops)),
    )

    sizes = [math.prod(bounds[loop] for loop in arrays[name]) for name in names]
    words = max(
        math.exp(
            math.fsum(map(math.log, bounds.values())) + (1 - exponent) * math.log(memory_words)
        ),
        *sizes,
    )
    return Tile(
        dict(zip(loops, exponents.tolist(), strict=True)),
        _rounded(
            dict(zip(loops, memory_words**exponents, strict=True)),
            bounds,
            arrays,
            memory_words,
            multiples or {},
        ),
        exponent,
        words,
        dict(zip(names, dual.x[: len(names)].tolist(), strict=True)),
        dict(zip(loops, dual.x[len(names) :].tolist(), strict=True)),
    )


def _balanced(within: np.ndarray, beta: np.ndarray, exponent: float) -> np.ndarray:
    """Return the exponents of the best tile whose longest side is shortest.

    The best exponent alone does not determine the tile.
    """
    loops = len(beta)
    longest = np.concatenate([np.eye(loops), -np.ones((loops, 1))], axis=1)
    fitting = np.concatenate([within, np.zeros((len(within), 1))], axis=1)
    total = np.concatenate([-np.ones((1, loops)), np.zeros((1, 1))], axis=1)
    result = linprog(
        np.append(np.zeros(loops), 1.0),
        np.concatenate([longest, fitting, total]),
        np.concatenate([np.zeros(loops), np.ones(len(within)), [-exponent + 1e-9]]),
        bounds=[*((0, limit) for limit in beta), (0, None)],
    )
    return result.x[:loops]


def _rounded(
    sides: Mapping[str, float],
    bounds: Mapping[str, int],
    arrays: Arrays,
    memory_words: int,
    multiples: Mapping[str, int],
) -> dict[str, int]:
    """Return whole sides whose arrays fit into memory.

    Sides are rounded down, with a tolerance for the solver's rounding errors.
    """
    whole = {}
    for loop, side in sides.items():
        length = max(1, min(bounds[loop], math.floor(side * (1 + _SOLVER))))
        step = multiples.get(loop, 1)
        whole[loop] = length // step * step if length >= step else length
    for loops in arrays.values():
        while math.prod(whole[loop] for loop in loops) > memory_words:
            longest = max(loops, key=lambda loop: whole[loop])
            step = multiples.get(longest, 1)
            whole[longest] -= step if whole[longest] > step else 1
    return whole


_SOLVER = 1e-6
"""Relative precision of numbers that are rounded down: solutions of linear programs, and roots."""


class Grid(NamedTuple):
    """A grid of processors that share a nest.

    Attributes:
      parts: Number of parts that each loop is cut into; their product is the number of processors.
      words: Number of words that a processor receives.

    >>> dense = {"A": ("token", "in"), "W": ("in", "out"), "C": ("token", "out")}
    >>> found = grid({"token": 4096, "in": 1024, "out": 1024}, dense, 4)
    >>> found.parts, found.words
    ({'token': 4, 'in': 1, 'out': 1}, 786432.0)
    """

    parts: dict[str, int]
    words: float


def grid(bounds: Mapping[str, float], arrays: Arrays, num_processors: int) -> Grid:
    """Return the grid with the fewest words; among equal grids, the least elongated.

    Args:
      bounds: Number of iterations of each loop, at least 1; it need not be whole.
      arrays: The loops that subscript each array; every loop subscripts at least one.
      num_processors: Number of processors, P.

    Raises:
      UserError: If the nest is not valid (see `tile`), or no grid has P processors.

    >>> dense = {"A": ("token", "in"), "W": ("in", "out"), "C": ("token", "out")}
    >>> grid({"token": 512 * 128, "in": 1024, "out": 4096}, dense, 16).parts
    {'token': 16, 'in': 1, 'out': 1}
    """
    _check(bounds, arrays)
    require(num_processors >= 1, "num_processors", num_processors, "give at least 1")
    limits = [math.floor(size * (1 + _SOLVER)) for size in bounds.values()]
    grids = list(_factorisations(num_processors, limits))
    fix = f"no grid cuts loops of {tuple(limits)} into this number of parts; use fewer"
    require(grids, "num_processors", num_processors, fix, code="conflict")

    found = [Grid(dict(zip(bounds, parts, strict=True)), 0.0) for parts in grids]
    found = [one._replace(words=words_each_receives(bounds, arrays, one.parts)) for one in found]
    return min(found, key=lambda one: (round(one.words, 6), max(one.parts.values())))


def words_each_receives(
    bounds: Mapping[str, float], arrays: Arrays, parts: Mapping[str, int]
) -> float:
    """Return the number of words that a processor of a grid receives."""
    processors = math.prod(parts.values())
    total = 0.0
    for loops in arrays.values():
        whole = math.prod(bounds[loop] for loop in loops)
        total += whole / math.prod(parts[loop] for loop in loops) - whole / processors
    return total


def _factorisations(number: int, limits: Sequence[int]) -> Iterator[tuple[int, ...]]:
    if not limits:
        if number == 1:
            yield ()
        return
    for part in range(1, min(number, limits[0]) + 1):
        if number % part == 0:
            for rest in _factorisations(number // part, limits[1:]):
                yield part, *rest


def dp_limit(tokens: int, d_in: int, d_out: int) -> int:
    """Return the most processors for which cutting only the tokens of a dense layer is optimal.

    Cutting `out` in two as well would spare a processor half of the weights, in x out / 2 words,
    and bring it tokens x in / P words of inputs. That does not pay while P <= 2 tokens / out. More
    parts pay later, and the same holds for `in`, so P <= 2 tokens / max(in, out).

    Args:
      tokens: Number of tokens in a batch.
      d_in: Width of the layer's inputs.
      d_out: Width of the layer's outputs.

    Raises:
      UserError: If an argument is less than 1.

    >>> dp_limit(512 * 128, 1024, 4096), dp_limit(65536 * 128, 1024, 4096)
    (32, 4096)
    """
    for field, value in (("tokens", tokens), ("d_in", d_in), ("d_out", d_out)):
        require(value >= 1, field, value, "give at least 1")
    return min(tokens, 2 * tokens // max(d_in, d_out))


def _check(bounds: Mapping[str, float], arrays: Arrays) -> None:
    require(bounds, "bounds", dict(bounds), "give at least one loop", code="missing")
    for loop, size in bounds.items():
        require(size >= 1, f"bounds[{loop!r}]", size, "give at least 1 iteration")
        require(
            any(loop in loops for loops in arrays.values()),
            "arrays",
            dict(arrays),
            f"no array has the loop {loop!r}; leave it out",
            code="conflict",
        )
    for name, loops in arrays.items():
        unknown = [loop for loop in loops if loop not in bounds]
        require(
            not unknown,
            f"arrays[{name!r}]",
            loops,
            f"there is no loop {', '.join(map(repr, unknown))} in bounds; add it",
            code="choice",
        )
