"""lbopt: training with very large batches in JAX.

Every public name, and the package it is imported from when it is first used.
`lbopt` reads this file too.
"""

from .aggregators import aggregate, agvm, aps, econtrol, ef, ef21, float_quantize, powersgd
from .api import Problem, run_plan, run_sweep, run_training, suggest
from .data import Dataset, Splits
from .evaluation import evaluate
from .interchange import load_huggingface
from .masks import (
    all_leaves,
    exclude_paths,
    exclude_roles,
    select_paths,
    select_roles,
    weights_only,
)
from .models import BatchNorm
from .parallel import (
    Aggregate,
    AllReduce,
    GradientClip,
    ReduceScatter,
    TrainState,
    make_eval_step,
    make_mesh,
    make_train_step,
)
from .schedules import (
    albert_schedule,
    exponential_schedule,
    legw_schedule,
    mixed_batch_schedule,
    mlperf_schedule,
    scale_learning_rate,
    scaling_plan,
    step_schedule,
    warmup_schedule,
)
from .stacks import stacked_from_metadata, stacked_paths
from .transforms import (
    clip_by_global_norm,
    describe,
    ema_params,
    estimate_noise,
    lamb,
    lans,
    lars,
    monitor_layers,
    normalize_gradients,
    optimizer_metrics,
    scale_by_agvm,
    scale_by_lamb_moments,
    scale_by_lans,
    scale_by_lars_momentum,
    scale_by_layerwise_trust_ratio,
    scale_by_learning_rate,
    skip_bad_updates,
    summarize_masks,
    track_ema,
    track_noise_scale,
)

__version__: str

__all__ = [
    "Aggregate",
    "AllReduce",
    "BatchNorm",
    "Dataset",
    "GradientClip",
    "Problem",
    "ReduceScatter",
    "Splits",
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
    "run_plan",
    "run_sweep",
    "run_training",
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
    "suggest",
    "summarize_masks",
    "track_ema",
    "track_noise_scale",
    "warmup_schedule",
    "weights_only",
]
