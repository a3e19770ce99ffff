from ._aggregator import (
    ONE_IN as ONE_IN,
    Aggregated as Aggregated,
    Aggregator as Aggregator,
    AggregatorState as AggregatorState,
    Extra as Extra,
    WireBytes as WireBytes,
    aggregate as aggregate,
    as_optax as as_optax,
    cast_like as cast_like,
    keep_finite as keep_finite,
    plain_mean as plain_mean,
    rebuilt_state as rebuilt_state,
    remembered_state as remembered_state,
    require_aggregator as require_aggregator,
    second_moment_of as second_moment_of,
    warn_of_wire_bytes as warn_of_wire_bytes,
    widened as widened,
)
from ._agvm import agvm as agvm, check_anchor as check_anchor
from ._aps import ACCUMULATIONS as ACCUMULATIONS, aps as aps
from ._compress import (
    Compressor as Compressor,
    cast as cast,
    identity as identity,
    randk as randk,
    sign as sign,
    topk as topk,
)
from ._disagreement import (
    phi as phi,
    phi_layers as phi_layers,
    phi_modules as phi_modules,
    require_halves as require_halves,
    square_norm as square_norm,
)
from ._feedback import econtrol as econtrol, ef as ef, ef21 as ef21
from ._group import Group as Group, matrix_width as matrix_width, row_padding as row_padding
from ._powersgd import powersgd as powersgd
from ._quantize import (
    OVERFLOWS as OVERFLOWS,
    ROUNDINGS as ROUNDINGS,
    float_quantize as float_quantize,
)
