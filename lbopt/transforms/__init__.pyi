from ._adamh import adamh as adamh
from ._arguments import (
    rate_at as rate_at,
    require_state as require_state,
    require_transformation as require_transformation,
)
from ._cautious import cautious as cautious
from ._clipping import (
    clip_by_global_norm as clip_by_global_norm,
    global_norm as global_norm,
)
from ._compressed_state import (
    CompressedState as CompressedState,
    compress_state as compress_state,
)
from ._describe import describe as describe
from ._dion import DionState as DionState, dion as dion, scale_by_dion as scale_by_dion
from ._ema import (
    EmaState as EmaState,
    ema_params as ema_params,
    evaluated_params as evaluated_params,
    has_evaluated_params as has_evaluated_params,
    track_ema as track_ema,
    warn_of_microsteps as warn_of_microsteps,
)
from ._kron import KronState as KronState, scale_by_kron as scale_by_kron
from ._lamb import lamb as lamb
from ._lans import lans as lans, scale_by_lans as scale_by_lans
from ._lars import lars as lars
from ._leaf_table import summarize_masks as summarize_masks
from ._learning_rate import (
    LearningRateState as LearningRateState,
    scale_by_learning_rate as scale_by_learning_rate,
)
from ._matrix_variants import MATRIX_VARIANTS as MATRIX_VARIANTS
from ._matrix_view import (
    MatrixFn as MatrixFn,
    MatrixGroup as MatrixGroup,
    MatrixRunner as MatrixRunner,
    MatrixSpec as MatrixSpec,
    mesh_axes as mesh_axes,
    with_matrix_layout as with_matrix_layout,
)
from ._module_scale import (
    Labels as Labels,
    ModuleOf as ModuleOf,
    ModuleScaleState as ModuleScaleState,
    module_patterns as module_patterns,
    resolve_labels as resolve_labels,
    scale_by_agvm as scale_by_agvm,
)
from ._moments import (
    LambMomentsState as LambMomentsState,
    scale_by_lamb_moments as scale_by_lamb_moments,
    scale_by_lars_momentum as scale_by_lars_momentum,
    squarable as squarable,
)
from ._monitoring import (
    LayerNormsState as LayerNormsState,
    is_per_layer as is_per_layer,
    monitor_layers as monitor_layers,
    optimizer_metrics as optimizer_metrics,
)
from ._muon import muon as muon, muonh as muonh, normuon as normuon, scion as scion
from ._muown import MuownState as MuownState, muown as muown, scale_by_muown as scale_by_muown
from ._newton_schulz import (
    NeuronNormState as NeuronNormState,
    scale_by_matrix_shape as scale_by_matrix_shape,
    scale_by_neuron_norm as scale_by_neuron_norm,
    scale_by_newton_schulz as scale_by_newton_schulz,
)
from ._noise_scale import estimate_noise as estimate_noise, track_noise_scale as track_noise_scale
from ._normalization import normalize_gradients as normalize_gradients
from ._outer import OuterState as OuterState, muloco as muloco, nesterov_outer as nesterov_outer
from ._per_path import (
    UNKNOWN_PARAMS as UNKNOWN_PARAMS,
    find_states as find_states,
    is_placeholder as is_placeholder,
)
from ._relative import (
    SphereState as SphereState,
    hyperball as hyperball,
    radial_brake as radial_brake,
    relative_update as relative_update,
    update_floor as update_floor,
)
from ._reweighing import (
    MomentDecays as MomentDecays,
    reweigh_moments as reweigh_moments,
    unknown_moments as unknown_moments,
)
from ._rounding import (
    CompensationState as CompensationState,
    RoundingState as RoundingState,
    compensate_rounding as compensate_rounding,
    round_stochastically as round_stochastically,
)
from ._second_order import (
    kron as kron,
    shampoo as shampoo,
    soap as soap,
    soaph as soaph,
)
from ._shampoo import ShampooState as ShampooState, scale_by_shampoo as scale_by_shampoo
from ._skipping import SkipState as SkipState, skip_bad_updates as skip_bad_updates
from ._soap import SoapState as SoapState, scale_by_soap as scale_by_soap
from ._transfer import (
    LeafTransfer as LeafTransfer,
    Transfer as Transfer,
    scale_by_transfer as scale_by_transfer,
    transfer_init as transfer_init,
    transfer_table as transfer_table,
)
from ._trust_ratio import (
    CLIP_MODES as CLIP_MODES,
    scale_by_layerwise_trust_ratio as scale_by_layerwise_trust_ratio,
)
from ._variants import VARIANTS as VARIANTS, LambVariant as LambVariant, LarsVariant as LarsVariant
