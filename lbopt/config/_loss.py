"""The configuration of the training loss."""

# No `from __future__ import annotations` here: the flags read the fields' types.
import dataclasses
from typing import Any

from lbopt import errors, losses
from lbopt._user_code import is_place
from lbopt.config._checks import at_least, in_range
from lbopt.config._data import OF_CLASSES
from lbopt.config._fields import NOT_ZERO, PLACE, only, only_default
from lbopt.errors import require


@dataclasses.dataclass
class LossConfig:
    """The training loss. Evaluation uses it without smoothing, penalty and mixtures.

    Attributes:
      label_smoothing: Probability e taken from the right class, in [0, 1).
      label_smoothing_rule: "all_classes" (e / C on each of C classes: TensorFlow, MLPerf) or
        "other_classes" (e / (C - 1) on each class but the right one, which keeps 1 - e: NUS-LAMB,
        NUS-LARS).
      l2: Factor of half the sum of squares of all parameters except those of normalisation layers.
        It comes on top of an optimizer's weight decay, as in the released EfficientNet code.
      mixup_alpha: Parameter of Beta(alpha, alpha), from which the weights of mixed pairs of images
        are sampled; 0 mixes none.
      name: "" for the loss of the data's task, or a function of yours, "module:function" or
        "file.py:function". It is called with the model's outputs and the arrays of the batch by
        name, and returns the loss of each example [batch] or (sum over the batch, weight); and
        perhaps, as a second result, a dict of metrics in these forms.
      options: Arguments of the function.

    >>> from lbopt.config import TrainConfig
    >>> TrainConfig(data="digits", model="cnn", loss=LossConfig(label_smoothing=0.1)).validate()
    """

    label_smoothing: float = only(0.0, {"data.name": OF_CLASSES, "name": ("",)})
    label_smoothing_rule: str = only(
        "all_classes", {"data.name": OF_CLASSES, "name": ("",), "label_smoothing": NOT_ZERO}
    )
    l2: float = 0.0
    mixup_alpha: float = only(0.0, {"data.name": OF_CLASSES, "name": ("",)})
    name: str = ""
    options: dict[str, Any] = only_default(dict, name=PLACE)


def check_loss(loss: LossConfig) -> None:
    """Raise `UserError` for a value that no loss takes."""
    fix = "give module:function or file.py:function, or leave it '' for the loss of the task"
    require(not loss.name or is_place(loss.name), "name", loss.name, fix)
    in_range("label_smoothing", loss.label_smoothing, 0, 1)
    with errors.under("", smoothing_rule="label_smoothing_rule"):
        losses.check_smoothing_rule(loss.label_smoothing_rule)
    at_least("l2", loss.l2, 0)
    at_least("mixup_alpha", loss.mixup_alpha, 0)
