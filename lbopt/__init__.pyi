"""lbopt: training with very large batches in JAX.

Every public name, and the room it is imported from when it is first used: `lbopt` reads this file too.
"""

from .aggregators.agvm import agvm
from .aggregators.aps import aps
from .aggregators.feedback import econtrol, ef, ef21
from .aggregators.powersgd import powersgd
from .aggregators.protocol import aggregate
from .aggregators.quantize import float_quantize
from .evaluation.means import evaluate
from .interchange.huggingface import load_huggingface
from .masks import (
    all_leaves,
    exclude_paths,
    exclude_roles,
    select_paths,
    select_roles,
    weights_only,
)
from .models.norm import BatchNorm
from .parallel.clip import GradientClip
from .parallel.mesh import make_mesh
from .parallel.reduction import Aggregate, AllReduce, ReduceScatter
from .parallel.state import TrainState
from .parallel.step import make_eval_step, make_train_step
from .schedules.plan import scaling_plan
from .schedules.published import (
    albert_schedule,
    exponential_schedule,
    mixed_batch_schedule,
    mlperf_schedule,
    step_schedule,
)
from .schedules.scaling import scale_learning_rate
from .schedules.warmup import legw_schedule, warmup_schedule
from .stacks import stacked_from_metadata, stacked_paths
from .transforms.clipping import clip_by_global_norm
from .transforms.describe import describe
from .transforms.ema import ema_params, track_ema
from .transforms.lamb import lamb
from .transforms.lans import lans, scale_by_lans
from .transforms.lars import lars
from .transforms.learning_rate import scale_by_learning_rate
from .transforms.module_scale import scale_by_agvm
from .transforms.moments import scale_by_lamb_moments, scale_by_lars_momentum
from .transforms.monitoring import monitor_layers, optimizer_metrics
from .transforms.noise_scale import estimate_noise, track_noise_scale
from .transforms.normalization import normalize_gradients
from .transforms.skipping import skip_bad_updates
from .transforms.summary import summarize_masks
from .transforms.trust_ratio import scale_by_layerwise_trust_ratio

__version__: str

__all__ = [
    "Aggregate",
    "AllReduce",
    "BatchNorm",
    "GradientClip",
    "ReduceScatter",
    "TrainState",
    "aggregate",
    "agvm",
    "albert_schedule",
    "all_leaves",
    "aps",
    "clip_by_global_norm",
    "describe",
    "econtrol",
    "ef",
    "ef21",
    "ema_params",
    "estimate_noise",
    "evaluate",
    "exclude_paths",
    "exclude_roles",
    "exponential_schedule",
    "float_quantize",
    "lamb",
    "lans",
    "lars",
    "legw_schedule",
    "load_huggingface",
    "make_eval_step",
    "make_mesh",
    "make_train_step",
    "mixed_batch_schedule",
    "mlperf_schedule",
    "monitor_layers",
    "normalize_gradients",
    "optimizer_metrics",
    "powersgd",
    "scale_by_agvm",
    "scale_by_lamb_moments",
    "scale_by_lans",
    "scale_by_lars_momentum",
    "scale_by_layerwise_trust_ratio",
    "scale_by_learning_rate",
    "scale_learning_rate",
    "scaling_plan",
    "select_paths",
    "select_roles",
    "skip_bad_updates",
    "stacked_from_metadata",
    "stacked_paths",
    "step_schedule",
    "summarize_masks",
    "track_ema",
    "track_noise_scale",
    "warmup_schedule",
    "weights_only",
]
