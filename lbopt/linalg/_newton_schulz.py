"""Newton-Schulz iterations: the orthogonal factor of a matrix by matrix products alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple, cast

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from lbopt import _scalars, tree
from lbopt.errors import UserError, require_choice
from lbopt.linalg._matmul import matmul

Triple = tuple[float, float, float]
Coefficients = (
    Literal[
        "muon",
        "quintic",
        "polar_express",
        "polar_express_5",
        "cans",
        "deepseek",
        "newton",
        "cubic",
    ]
    | Sequence[Triple]
)


class CoefficientSet(NamedTuple):
    """A published sequence of polynomials.

    Attributes:
      triples: (a, b, c) of each step, a X + b (X X^T) X + c (X X^T)^2 X.
      steps: Number of steps of its authors.
      repeats_last: Whether more steps repeat the last polynomial; else they start again.
      norm_factor: Factor on the Frobenius norm that the matrix is divided by.
    """

    triples: tuple[Triple, ...]
    steps: int
    repeats_last: bool = False
    norm_factor: float = 1.0


# The figures of these sets are those of NVIDIA-NeMo/Emerging-Optimizers@fd772926:
# emerging_optimizers/orthogonalized_optimizers/muon_utils.py, which names their origins, except for
# "polar_express_5" (microsoft/dion@0a059a45:dion/polar_express.py) and "newton"
# (KellerJordan/modded-nanogpt@1ee24075:records/track_3_optimization).
COEFFICIENTS: Mapping[str, CoefficientSet] = {
    "muon": CoefficientSet(((3.4445, -4.7750, 2.0315),), 5),
    "quintic": CoefficientSet(
        (
            (4.0848, -6.8946, 2.9270),
            (3.9505, -6.3029, 2.6377),
            (3.7418, -5.5913, 2.3037),
            (2.8769, -3.1427, 1.2046),
            (2.8366, -3.0525, 1.2012),
        ),
        5,
    ),
    "polar_express": CoefficientSet(
        (
            (8.2051, -22.9019, 16.4607),
            (4.0664, -2.8612, 0.5184),
            (3.9096, -2.8234, 0.5250),
            (3.2856, -2.4153, 0.4853),
            (2.2779, -1.6198, 0.3985),
            (1.8726, -1.2307, 0.3585),
            (1.8564, -1.2132, 0.3568),
            (1.8750, -1.2500, 0.3750),
        ),
        8,
        repeats_last=True,
    ),
    "polar_express_5": CoefficientSet(
        (
            (8.156554524902461, -22.48329292557795, 15.878769915207462),
            (4.042929935166739, -2.808917465908714, 0.5000178451051316),
            (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
            (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
            (2.3465413258596377, -1.7097828382687081, 0.42323551169305323),
        ),
        5,
        repeats_last=True,
        norm_factor=1.02,
    ),
    "cans": CoefficientSet(
        (
            (8.4703, -25.1081, 18.6293),
            (4.1828, -3.1087, 0.5806),
            (3.9619, -2.9541, 0.5630),
            (3.2866, -2.4647, 0.5074),
            (2.2737, -1.6447, 0.4162),
        ),
        5,
        repeats_last=True,
    ),
    "deepseek": CoefficientSet(
        (*[(3.4445, -4.7750, 2.0315)] * 8, *[(2.0, -1.5, 0.5)] * 2), 10, repeats_last=True
    ),
    "newton": CoefficientSet(((2.0, -1.5, 0.5),), 12),
    "cubic": CoefficientSet(
        (
            (3.3656576, -3.3420992, 0.0),
            (2.5744352, -1.4957376, 0.0),
            (2.5368962, -1.4312570, 0.0),
            (2.4418906, -1.2764040, 0.0),
            (2.2230472, -0.9630650, 0.0),
        ),
        5,
    ),
}


def resolve_coefficients(coefficients: Coefficients, steps: int | None = None) -> CoefficientSet:
    """Return the set with one triple for each step.

    Args:
      coefficients: Name of a set, or triples (a, b, c), which start again if there are more steps.
      steps: Number of steps >= 1; None for that of the set.

    Raises:
      UserError: For an unknown name, or triples that are not three numbers each.

    >>> resolve_coefficients("muon", 2).triples
    ((3.4445, -4.775, 2.0315), (3.4445, -4.775, 2.0315))
    """
    if isinstance(coefficients, str):
        require_choice("coefficients", coefficients, COEFFICIENTS)
        chosen = COEFFICIENTS[coefficients]
    else:
        triples = _checked(coefficients)
        chosen = CoefficientSet(triples, len(triples))

    count = chosen.steps if steps is None else _scalars.whole("steps", steps)
    last = len(chosen.triples) - 1
    places = (min(i, last) if chosen.repeats_last else i % (last + 1) for i in range(count))
    return chosen._replace(triples=tuple(chosen.triples[place] for place in places), steps=count)


def _checked(coefficients: Any) -> tuple[Triple, ...]:
    """Return triples as floats; raise `UserError` if they are none."""
    try:
        triples = tuple(tuple(float(number) for number in triple) for triple in coefficients)
    except (TypeError, ValueError):
        triples = ()
    if not triples or any(len(triple) != 3 for triple in triples):
        fix = f"give one of {', '.join(COEFFICIENTS)}, or a list of (a, b, c), one for each step"
        raise UserError("coefficients", coefficients, fix)
    return cast(tuple[Triple, ...], triples)


def newton_schulz(
    x: jax.Array,
    coefficients: Coefficients = "muon",
    steps: int | None = None,
    *,
    dtype: DTypeLike | None = None,
    eps: float | jax.Array = 0.0,
) -> jax.Array:
    r"""Return nearly the orthogonal factor U V^T of each matrix X = U S V^T.

        X <- X / (f ||X||_F + eps) ;   X <- a X + (b A + c A A) X,  A = X X^T   (once a step)

    Every step maps each singular value s to a s + b s^3 + c s^5 and keeps the singular vectors. A
    matrix with more rows than columns is transposed first. A zero matrix stays zero.

    Args:
      x: Matrices [..., m, n], floating point or complex.
      coefficients: A published set, or triples (a, b, c). In exact arithmetic, singular values of
        at least 0.002 of the Frobenius norm end in
        "muon" [0.68, 1.21], "quintic" [0.85, 1.15], "polar_express_5" [0.85, 1.15],
        "cans" [0.88, 1.12], "polar_express", "deepseek" and "newton" [0.99, 1.01];
        "cubic" (three products a step instead of four) ends those of at least 0.007 in [0.77, 1.3].
      steps: Number of steps; None for that of the set: 5, "polar_express" 8, "deepseek" 10,
        "newton" 12.
      dtype: Dtype of the products; None for that of `x`. bf16 as published: its singular values
        are then off by up to 2 %.
      eps: Constant >= 0 added to the norm.

    Returns:
      Matrices of the shape and dtype of `x`.

    >>> import jax.numpy as jnp
    >>> [round(float(number), 2) for number in newton_schulz(jnp.diag(jnp.array([3.0, 0.2])))[0]]
    [0.7, 0.0]

    References:
      Jordan et al., Muon, 2024 ("muon"). Amsel et al., The Polar Express, arXiv:2505.16932
      ("polar_express"). Grishina et al., arXiv:2506.10935 ("cans"). Higham, Functions of Matrices,
      2008, section 8.3 (the iteration).

    Note:
      The norm is taken in fp32 (or wider), also where the products are in bf16. In fp32 it is right
      from 1e-33 to 1e34, so the scale of `x` does not matter.
    """
    chosen = resolve_coefficients(coefficients, steps)
    wide = x.astype(tree.wide_dtype(x.dtype))
    norm = tree.l2_norm(wide, tuple(range(x.ndim - 2)))
    below = chosen.norm_factor * norm + eps
    wide = tree.map_parts(lambda part: part / jnp.where(below > 0, below, 1), wide)

    transposed = x.shape[-2] > x.shape[-1]
    y = wide.mT if transposed else wide
    y = y.astype(x.dtype if dtype is None else dtype)
    for triple in chosen.triples:
        y = _step(y, *triple)
    return (y.mT if transposed else y).astype(x.dtype)


def _step(x: jax.Array, a: float, b: float, c: float) -> jax.Array:
    """Return a X + b (X X^T) X + c (X X^T)^2 X, for X with at most as many rows as columns."""
    gram = matmul(x, x.mT.conj())
    polynomial = b * gram if c == 0 else b * gram + matmul(c * gram, gram)
    return a * x + matmul(polynomial, x)
