"""Lower bounds on communication for projective loop nests, with tiles and grids that attain them.

A nest has loops i with bounds L_i, and arrays j whose subscripts are subsets phi_j of the loops: a matrix product
C[m, n] += A[m, k] B[k, n] has loops m, n, k and arrays {m, k}, {k, n}, {m, n}.

With a fast memory of M words and beta_i = log_M L_i,

    tile :  k = max sum_i lambda_i                   s.t. for all j: sum_{i in phi_j} lambda_i <= 1,  0 <= lambda_i <= beta_i
    bound:  k = min sum_j s_j + sum_i beta_i t_i     s.t. for all i: t_i + sum_{j: i in phi_j} s_j >= 1,  s, t >= 0
    words moved >= max(prod_i L_i * M^(1 - k), max_j prod_{i in phi_j} L_i)            up to a constant

The two programs are dual, so each is the other's certificate. On P processors in a grid p_i (prod p_i = P), with every
array stored once, a processor receives

    words = sum_j [ prod_{i in phi_j} L_i / p_i  -  prod_{i in phi_j} L_i / P ].

References:
  Dinh and Demmel, Communication-Optimal Tilings for Projective Nested Loops with Arbitrary Bounds,
  arXiv 2003.00119. Its programs are [recalled 90%], not read there, and are checked here by duality
  and brute force. The grid is our own from the same projections.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from scipy.optimize import linprog

from lbopt.errors import require

Arrays = Mapping[str, Sequence[str]]
"""Name -> the loops that subscript it."""


class Tile(NamedTuple):
    """A tile that attains the bound, and the proof that none does better.

    Attributes:
      exponents: loop -> lambda; the tile's side is M^lambda.
      sides: loop -> whole numbers, at least 1.
      exponent: k, the tile has M^k iterations.
      words_bound: that have to be moved, up to a constant.
      dual_arrays: array -> s; with `dual_loops` a feasible point of the dual program whose value is k.
      dual_loops: loop -> t.
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
      bounds: loop -> how often it runs.
      arrays: see the head of this file; every loop subscripts one at least.
      memory_words: of fast memory; each array's part of a tile fits into it (for all of them at once give a part of it).
      multiples: loop -> of what its side is to be a multiple if it is as long, {"n": 128, "m": 8} for a TPU's vectors.

    Raises:
      UserError: for no loops, a bound or multiple below 1, a memory below 2 words, an array of unknown loops, or a loop without array.

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
    loops, names = list(bounds), list(arrays)
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
    """Of the tiles with the best exponent, return one whose longest side is shortest: vertices of a program are not unique."""
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
    """Return whole sides whose arrays fit: rounded down, but for what the solver lost in the last digits."""
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
"""Relative precision of what is rounded down: the solver's of linear programs, and of roots."""


class Grid(NamedTuple):
    """How processors share a nest.

    Attributes:
      parts: loop -> into how many parts it is cut; their product is the number of processors.
      words: that a processor receives.
    """

    parts: dict[str, int]
    words: float


def grid(bounds: Mapping[str, float], arrays: Arrays, num_processors: int) -> Grid:
    """Return the grid of fewest words, of all; of equal ones the least elongated.

    Args:
      bounds: loop -> how often it runs; need not be whole.
      arrays: see the head of this file.
      num_processors: P.

    Raises:
      UserError: as `tile`, and if no grid has so many processors.

    >>> dense = {"A": ("token", "in"), "W": ("in", "out"), "C": ("token", "out")}
    >>> grid({"token": 512 * 128, "in": 1024, "out": 4096}, dense, 16).parts
    {'token': 16, 'in': 1, 'out': 1}
    """
    _check(bounds, arrays)
    require(num_processors >= 1, "num_processors", num_processors, "give at least 1")
    limits = [math.floor(size * (1 + _SOLVER)) for size in bounds.values()]
    grids = list(_factorisations(num_processors, limits))
    fix = f"no grid cuts loops of {tuple(limits)} into so many parts; use fewer"
    require(grids, "num_processors", num_processors, fix)
    found = [Grid(dict(zip(bounds, parts, strict=True)), 0.0) for parts in grids]
    found = [one._replace(words=words_each_receives(bounds, arrays, one.parts)) for one in found]
    return min(found, key=lambda one: (round(one.words, 6), max(one.parts.values())))


def words_each_receives(
    bounds: Mapping[str, float], arrays: Arrays, parts: Mapping[str, int]
) -> float:
    """Return the words that a processor of a grid receives; see the head of this file."""
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
    """Return up to how many processors cutting tokens alone is communication-optimal for a dense layer.

    Cutting `out` in two would halve the weights a processor receives and double the inputs; at P processors that does not
    pay while the weights, in x out, are at most tokens x in / P, and likewise for `in`: P <= tokens / max(in, out).

    >>> dp_limit(512 * 128, 1024, 4096), dp_limit(65536 * 128, 1024, 4096)
    (16, 2048)
    """
    for field, value in (("tokens", tokens), ("d_in", d_in), ("d_out", d_out)):
        require(value >= 1, field, value, "give at least 1")
    return tokens // max(d_in, d_out)


def _check(bounds: Mapping[str, float], arrays: Arrays) -> None:
    require(bounds, "bounds", dict(bounds), "a nest has a loop at least")
    for loop, size in bounds.items():
        require(size >= 1, f"bounds[{loop!r}]", size, "a loop runs once at least")
        require(
            any(loop in loops for loops in arrays.values()),
            "arrays",
            dict(arrays),
            f"no array has the loop {loop!r}; leave it out",
        )
    for name, loops in arrays.items():
        unknown = [loop for loop in loops if loop not in bounds]
        require(
            not unknown,
            f"arrays[{name!r}]",
            loops,
            f"there is no loop {', '.join(map(repr, unknown))} in bounds",
        )
