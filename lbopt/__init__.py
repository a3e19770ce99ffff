"""lbopt: training with very large batches in JAX."""

from lbopt.evaluation.evaluate import evaluate
from lbopt.models.norm import BatchNorm
from lbopt.parallel.mesh import make_mesh
from lbopt.parallel.state import TrainState
from lbopt.parallel.step import make_eval_step, make_train_step
from lbopt.schedules.scaling import scale_learning_rate
from lbopt.schedules.warmup import legw_schedule, warmup_schedule
from lbopt.transforms.lamb import lamb
from lbopt.transforms.lars import lars
from lbopt.transforms.learning_rate import scale_by_learning_rate
from lbopt.transforms.moments import scale_by_lamb_moments, scale_by_lars_momentum
from lbopt.transforms.monitoring import optimizer_metrics
from lbopt.transforms.trust_ratio import scale_by_layerwise_trust_ratio
from lbopt.tree import weights_only

__version__ = "0.1.0"

__all__ = [
    "BatchNorm",
    "TrainState",
    "evaluate",
    "lamb",
    "lars",
    "legw_schedule",
    "make_eval_step",
    "make_mesh",
    "make_train_step",
    "optimizer_metrics",
    "scale_by_lamb_moments",
    "scale_by_lars_momentum",
    "scale_by_layerwise_trust_ratio",
    "scale_by_learning_rate",
    "scale_learning_rate",
    "warmup_schedule",
    "weights_only",
]
