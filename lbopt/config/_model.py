"""Which network."""

# No `from __future__ import annotations` here: the flags read the fields' types.
import dataclasses

from lbopt.config._checks import at_least, in_range
from lbopt.errors import require, require_choice

DTYPES = ("float32", "bfloat16")
MODELS = ("bert", "cnn", "efficientnet", "lstm", "lstm_lm", "mlp", "resnet")
SIZES = {
    "bert": ("tiny", "base", "large"),
    "efficientnet": ("b0", "b1", "b2", "b3", "b4", "b5", "b6", "b7"),
    "lstm_lm": ("small", "medium", "large"),
    "resnet": ("18", "34", "50", "101", "152"),
}
"""Published sizes of the families that have them."""
STEMS = ("conv7", "space_to_depth", "conv3")
RUNNING_FROM = ("all", "first")
ACTIVATIONS = ("gelu", "gelu_tanh", "relu")
REMATS = ("none", "attention", "dots", "inner", "layer")
FAMILIES = {
    "classification": ("cnn", "efficientnet", "lstm", "mlp", "resnet"),
    "language_model": ("lstm_lm",),
    "masked_lm": ("bert",),
    "question_answering": ("bert",),
}
"""The models of each task."""
BATCH_NORMED = ("cnn", "efficientnet", "resnet")
WIDEST = 2**14
"""A wider layer is a slip of the keyboard: its kernels alone would not fit this machine or the next."""


@dataclasses.dataclass
class ModelConfig:
    """The model. Fields that a family does not have are ignored by it; None is the published size's value.

    Attributes:
      name: "resnet", "efficientnet", "bert", "lstm_lm" (language model), "cnn", "lstm" or "mlp" (classifiers).
      widths: channels of each stage (cnn), widths of the hidden layers (mlp).
      hidden: width of the hidden layer (cnn) or of the LSTM (lstm).
      batch_norm_scope: "global", "local", "replicas:N", "examples:N" or "tiles:RxC" (cnn, resnet, efficientnet).
      batch_norm_momentum: of the running statistics (cnn, resnet, efficientnet).
      batch_norm_running_from: whose statistics are kept for evaluation: the mean over "all" groups or the "first" one's
        (resnet, efficientnet).
      batch_norm_unbiased_var: keep the variance of n - 1 degrees of freedom for evaluation (resnet, efficientnet).
      dtype: of the computation, "float32" or "bfloat16"; parameters are fp32.
      size: the published network: resnet "18" to "152", efficientnet "b0" to "b7", bert "tiny", "base" or "large", lstm_lm
        "small", "medium" or "large".
      stem: of resnet: "conv7", "space_to_depth" (the same function, faster on TPU) or "conv3" (for small images).
      patch_convolutions: of cnn: write convolutions as patches times matrices, which is faster on CPU; False for TPU.
      fold_columns: of resnet: the same function, computed on folded columns where channels are few; for TPU.
      fold_examples: of efficientnet: the same function, computed on so many folded examples where channels are few; for TPU.
      width_coefficient: channels, as a multiple of resnet's or of efficientnet-b0's; hidden width, of lstm_lm's.
      depth_coefficient: blocks, as a multiple of efficientnet-b0's.
      dropout_rate: before the head (efficientnet), of sublayers (bert), between layers (lstm_lm).
      attention_dropout_rate: of bert.
      stochastic_depth_rate: of efficientnet's last block.
      max_length: positions of bert.
      activation: of bert: "gelu" (exact), "gelu_tanh" (as in google-research/bert, faster on TPU) or "relu".
      scan_layers: compile one layer of bert and loop over it.
      remat: what bert's backward pass computes again: "none", "attention", "dots", "inner" or "layer".
      remat_layers: only in so many layers of bert; None for all.
    """

    name: str = "cnn"
    widths: tuple[int, ...] = (16, 32)
    hidden: int = 64
    batch_norm_scope: str = "global"
    batch_norm_momentum: float | None = None
    batch_norm_running_from: str = "all"
    batch_norm_unbiased_var: bool = False
    dtype: str = "float32"
    size: str = ""
    stem: str = "conv7"
    patch_convolutions: bool = True
    fold_columns: bool = False
    fold_examples: int = 1
    width_coefficient: float | None = None
    depth_coefficient: float | None = None
    dropout_rate: float | None = None
    attention_dropout_rate: float | None = None
    stochastic_depth_rate: float | None = None
    max_length: int = 512
    activation: str = "gelu"
    scan_layers: bool = False
    remat: str = "none"
    remat_layers: int | None = None


def validate_model(model: ModelConfig, prefix: str) -> None:
    """Check the model's fields."""
    require_choice(f"{prefix}.name", model.name, MODELS)
    require_choice(f"{prefix}.dtype", model.dtype, DTYPES)
    require(
        len(model.widths) > 0 and min(model.widths) > 0 and max(model.widths) <= WIDEST,
        f"{prefix}.widths",
        model.widths,
        f"give at least one width, each in [1, {WIDEST}]",
    )
    require(
        1 <= model.hidden <= WIDEST,
        f"{prefix}.hidden",
        model.hidden,
        f"give a width in [1, {WIDEST}]",
    )
    for field in (
        "batch_norm_momentum",
        "dropout_rate",
        "attention_dropout_rate",
        "stochastic_depth_rate",
    ):
        if getattr(model, field) is not None:
            in_range(f"{prefix}.{field}", getattr(model, field), 0, 1)
    _validate_size(model, prefix)


def _validate_size(model: ModelConfig, prefix: str) -> None:
    if model.name in SIZES:
        require_choice(f"{prefix}.size", model.size, SIZES[model.name])
    else:
        require(
            not model.size,
            f"{prefix}.size",
            model.size,
            f"{model.name!r} has no published sizes; leave it empty",
        )
    for field in ("width_coefficient", "depth_coefficient"):
        value = getattr(model, field)
        require(
            value is None or 0 < value <= 64,
            f"{prefix}.{field}",
            value,
            "give a number in (0, 64], or None",
        )
    require_choice(f"{prefix}.stem", model.stem, STEMS)
    require_choice(f"{prefix}.batch_norm_running_from", model.batch_norm_running_from, RUNNING_FROM)
    require_choice(f"{prefix}.remat", model.remat, REMATS)
    require_choice(f"{prefix}.activation", model.activation, ACTIVATIONS)
    for field in ("max_length", "fold_examples"):
        at_least(f"{prefix}.{field}", getattr(model, field), 1)
    if model.remat_layers is not None:
        at_least(f"{prefix}.remat_layers", model.remat_layers, 0)
        require(
            not model.scan_layers,
            f"{prefix}.remat_layers",
            model.remat_layers,
            "a scan has one layer for all; set scan_layers=False, or give None",
        )
