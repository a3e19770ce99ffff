"""The configuration of the training loss."""

# No `from __future__ import annotations` here: the flags read the fields' types.
import dataclasses

from lbopt import errors, losses
from lbopt.config._checks import at_least, in_range
from lbopt.config._data import CLASSIFICATION
from lbopt.config._fields import NOT_ZERO, only


@dataclasses.dataclass
class LossConfig:
    """Changes of the training loss; evaluation uses the plain loss.

    Attributes:
      label_smoothing: Probability e taken from the right class, in [0, 1).
      label_smoothing_rule: "all_classes" (e / C on each of C classes: TensorFlow, MLPerf) or
        "other_classes" (e / (C - 1) on each class but the right one, which keeps 1 - e: NUS-LAMB,
        NUS-LARS).
      l2: Factor of half the sum of squares of all parameters except those of normalisation layers.
        It comes on top of an optimizer's weight decay, as in the released EfficientNet code.
      mixup_alpha: Parameter of Beta(alpha, alpha), from which the weights of mixed pairs of images
        are sampled; 0 mixes none.
    """

    label_smoothing: float = only(0.0, {"data.name": CLASSIFICATION})
    label_smoothing_rule: str = only(
        "all_classes", {"data.name": CLASSIFICATION, "label_smoothing": NOT_ZERO}
    )
    l2: float = 0.0
    mixup_alpha: float = only(0.0, {"data.name": CLASSIFICATION})


def check_loss(loss: LossConfig) -> None:
    """Raise `UserError` for a value that no loss takes."""
    in_range("label_smoothing", loss.label_smoothing, 0, 1)
    with errors.under("", smoothing_rule="label_smoothing_rule"):
        losses.check_smoothing_rule(loss.label_smoothing_rule)
    at_least("l2", loss.l2, 0)
    at_least("mixup_alpha", loss.mixup_alpha, 0)
