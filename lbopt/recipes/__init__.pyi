from ._branch import build_branch as build_branch
from ._build import (
    batch_phases_of as batch_phases_of,
    build_mesh as build_mesh,
    build_run as build_run,
    build_state as build_state,
    check_batch_fits as check_batch_fits,
    check_growth as check_growth,
    with_averaged_params as with_averaged_params,
)
from ._classification import check_pairs as check_pairs
from ._initial import TEXT_NORMALIZATION_KEY as TEXT_NORMALIZATION_KEY
from ._language_model import CARRY as CARRY
from ._layout import with_layout as with_layout
from ._make_step import make_step as make_step
from ._networks import (
    base_model as base_model,
    make_network as make_network,
    num_layers as num_layers,
)
from ._patterns import check_patterns as check_patterns
from ._problem import (
    LoadedProblem as LoadedProblem,
    check_batch as check_batch,
    check_size as check_size,
    make_problem as make_problem,
)
from ._scale_recipe import scale_recipe as scale_recipe
from ._scaled_recipe import ScaledNumber as ScaledNumber, ScaledRecipe as ScaledRecipe
