from ._low_rank import (
    LowRank as LowRank,
    glu as glu,
    range_finder as range_finder,
)
from ._matmul import matmul as matmul
from ._newton_schulz import (
    COEFFICIENTS as COEFFICIENTS,
    Coefficients as Coefficients,
    CoefficientSet as CoefficientSet,
    newton_schulz as newton_schulz,
    resolve_coefficients as resolve_coefficients,
)
from ._qr import (
    Grqr as Grqr,
    cholesky_qr2 as cholesky_qr2,
    grqr as grqr,
    orthonormal_basis as orthonormal_basis,
    tsqr as tsqr,
)
from ._roots import inverse_root as inverse_root
from ._sketch import gaussian_sketch as gaussian_sketch, srht as srht
from ._stacks import of_each as of_each
