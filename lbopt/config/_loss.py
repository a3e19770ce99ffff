"""What is minimised, beside the plain loss."""

# No `from __future__ import annotations` here: the flags read the fields' types.
import dataclasses

from lbopt.config._checks import at_least, in_range
from lbopt.errors import require_choice
from lbopt.losses import SMOOTHING_RULES


@dataclasses.dataclass
class LossConfig:
    """What is minimised in training; evaluation has none of it.

    Attributes:
      label_smoothing: e, in [0, 1) (classification).
      label_smoothing_rule: "all_classes" (e / C on each of C classes: TensorFlow, MLPerf) or "other_classes" (e / (C - 1) on
        each class but the right one, which keeps 1 - e: NUS-LAMB, NUS-LARS).
      l2: adds l2 / 2 times the sum of squares of all parameters but those of normalisation layers. Beside an optimizer's
        own decay this is a second one, as in the released EfficientNet code.
      mixup_alpha: mix pairs of images with a weight from Beta(alpha, alpha); 0 for none (classification).
    """

    label_smoothing: float = 0.0
    label_smoothing_rule: str = "all_classes"
    l2: float = 0.0
    mixup_alpha: float = 0.0


def validate_loss(loss: LossConfig, prefix: str) -> None:
    """Check the loss's fields."""
    in_range(f"{prefix}.label_smoothing", loss.label_smoothing, 0, 1)
    require_choice(f"{prefix}.label_smoothing_rule", loss.label_smoothing_rule, SMOOTHING_RULES)
    at_least(f"{prefix}.l2", loss.l2, 0)
    at_least(f"{prefix}.mixup_alpha", loss.mixup_alpha, 0)
