"""lbopt: training with very large batches in JAX."""

from lbopt.evaluation.evaluate import evaluate
from lbopt.interchange.huggingface import load_huggingface
from lbopt.masks import exclude_paths, exclude_roles, select_paths, select_roles, weights_only
from lbopt.models.norm import BatchNorm
from lbopt.parallel.mesh import make_mesh
from lbopt.parallel.state import TrainState
from lbopt.parallel.step import make_eval_step, make_train_step
from lbopt.schedules.plan import scaling_plan
from lbopt.schedules.published import (
    albert_schedule,
    exponential_schedule,
    mixed_batch_schedule,
    mlperf_schedule,
    step_schedule,
)
from lbopt.schedules.scaling import scale_learning_rate
from lbopt.schedules.warmup import legw_schedule, warmup_schedule
from lbopt.stacks import stacked_from_metadata, stacked_paths
from lbopt.transforms.clipping import clip_by_global_norm
from lbopt.transforms.describe import describe
from lbopt.transforms.ema import ema_params, track_ema
from lbopt.transforms.lamb import lamb
from lbopt.transforms.lans import lans, scale_by_lans
from lbopt.transforms.lars import lars
from lbopt.transforms.learning_rate import scale_by_learning_rate
from lbopt.transforms.moments import scale_by_lamb_moments, scale_by_lars_momentum
from lbopt.transforms.monitoring import monitor_layers, optimizer_metrics
from lbopt.transforms.noise_scale import estimate_noise, track_noise_scale
from lbopt.transforms.normalization import normalize_gradients
from lbopt.transforms.skipping import skip_bad_updates
from lbopt.transforms.summary import summarize_masks
from lbopt.transforms.trust_ratio import scale_by_layerwise_trust_ratio

__version__ = "0.1.0"

__all__ = [
    "BatchNorm",
    "TrainState",
    "albert_schedule",
    "clip_by_global_norm",
    "describe",
    "ema_params",
    "estimate_noise",
    "evaluate",
    "exclude_paths",
    "exclude_roles",
    "exponential_schedule",
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
