"""The configuration of the network."""

# No `from __future__ import annotations` here: the flags read the fields' types.
import dataclasses
from collections.abc import Callable
from typing import Any

from lbopt import errors, tree
from lbopt._user_code import is_place
from lbopt.config._checks import DTYPES, require_place_or_choice
from lbopt.config._fields import NOT_GLOBAL, PLACE, only, only_default
from lbopt.errors import require, require_choice
from lbopt.models import (
    BERT_SIZES,
    DECODER_SIZES,
    REMATS,
    STEMS,
    BatchNorm,
    check_bert,
    check_fold_examples,
    check_running_statistics,
    make_bert,
    make_decoder_lm,
    make_efficientnet,
    make_lstm_language_model,
    make_resnet,
    require_drop_rate,
)

_BY_SIZE: dict[str, Callable[[str], Any]] = {
    "bert": make_bert,
    "decoder_lm": make_decoder_lm,
    "efficientnet": make_efficientnet,
    "lstm_lm": make_lstm_language_model,
    "resnet": make_resnet,
}
"""Functions that build the families with published sizes."""
FAMILIES = {
    "classification": ("cnn", "efficientnet", "lstm", "mlp", "resnet", "simple_cnn"),
    "language_model": ("decoder_lm", "lstm_lm"),
    "masked_lm": ("bert",),
    "question_answering": ("bert",),
}
"""The models of each task."""
MODELS = tuple(sorted({name for names in FAMILIES.values() for name in names}))
OWN_REMATS = ("none", "dots", "all")
"""Rematerialisations of the user's own models, see `lbopt.models.with_remat`."""
TRANSFORMERS = ("bert", "decoder_lm")
BATCH_NORMED = ("cnn", "efficientnet", "resnet")
PATCHED = ("cnn", "simple_cnn")
"""Networks of small images, whose convolutions may be written as products of patches."""
FORM = ("norm", "positions", "activation", "has_bias")
"""Attributes of decoders that change which parameters they have."""
_REMATERIALISED = tuple(name for name in REMATS if name != "none")
AUTOMATIC_STEM = "auto"
"""The stem "conv7", computed as suits the devices."""
WIDEST = 2**14
"""Largest width of a layer; the kernels of a wider one would fit no device."""


@dataclasses.dataclass
class ModelConfig:
    """The network. A field that is None has the published size's value.

    Attributes:
      name: "resnet", "efficientnet", "bert", "decoder_lm" or "lstm_lm" (language models), "cnn",
        "simple_cnn", "lstm" or "mlp" (classifiers); or what makes your own, "module:make" or
        "file.py:make": a module of Flax (Linen, NNX), Equinox or Haiku, or a function that returns
        one (see `lbopt.models.make_model`). Files are looked for beside the config file, then here.
      widths: Channels of each stage of cnn, or widths of the hidden layers of mlp.
      hidden: Width of the hidden layer of cnn, or of the LSTM of lstm.
      batch_norm_scope: Examples that share batch statistics: "global", "local", "replicas:N",
        "examples:N" or "tiles:RxC".
      batch_norm_momentum: Decay of the running statistics, in [0, 1).
      batch_norm_running_from: Statistics that are kept for evaluation: the mean over "all" groups
        or those of the "first" one.
      batch_norm_unbiased_var: Whether the variance kept for evaluation has n - 1 degrees of
        freedom.
      dtype: Dtype of the computation, "float32" or "bfloat16"; parameters are fp32.
      size: Published network: resnet "18" to "152", efficientnet "b0" to "b7", bert "tiny", "base"
        or "large", lstm_lm "small", "medium" or "large"; decoder_lm "0.5m", "1m", "4m" or "20m"
        (our own), "gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl", "llama2-7b", "llama3-8b" or
        "llama3.1-8b".
      stem: "conv7", "space_to_depth" (the same function, faster on TPU), "auto" (the faster of
        these two on the devices that train) or "conv3" (for small images).
      patch_convolutions: Whether convolutions are written as patches times matrices, which is
        faster on CPU; None for False on TPU and True elsewhere.
      fold_columns: Whether the same function is computed on folded columns where channels are few;
        None for True on TPU and False elsewhere.
      fold_examples: Number of examples that are folded into one where channels are few, for the
        same function; None for 8 on a TPU that has a multiple of 64 examples, and 1 elsewhere.
      base_size: Size of bert or decoder_lm on which the numbers of the recipe were found: learning
        rates, eps, weight decay and the scale of the initial values of each parameter follow the
        width (muP; see `lbopt.transfer_table`), those of decoder_lm the depth too. "" for no such
        transfer.
      base_widths: The same for mlp: the widths of the hidden layers there; () for none.
      width_coefficient: Channels as a multiple of those of resnet or of efficientnet-b0, channels
        and hidden units as a multiple of those of simple_cnn, hidden width as a multiple of that of
        lstm_lm, or heads of the same width as a multiple of those of bert or decoder_lm.
      depth_coefficient: Blocks as a multiple of those of efficientnet-b0, or layers as a multiple
        of those of decoder_lm.
      dropout_rate: Dropout before the head (efficientnet, simple_cnn), of sublayers (bert;
        decoder_lm, where None is 0) or between layers (lstm_lm).
      attention_dropout_rate: Dropout of attention weights.
      stochastic_depth_rate: Probability of leaving out the last block of efficientnet.
      max_length: Number of positions of bert; longest sequence of decoder_lm, which has as many
        positions where they are learned (GPT-2).
      tied: Whether the word embedding of decoder_lm is also its output layer; None for the size's.
      qk_norm: Whether decoder_lm normalizes the query and key of each head.
      init_std: Standard deviation of the initial values of decoder_lm's matrices and embeddings;
        None for that of `base_size`, or of the size.
      activation: "gelu" (exact), "gelu_tanh" (as in google-research/bert, faster on TPU) or "relu".
      scan_layers: Whether one layer of bert or decoder_lm is compiled and looped over.
      remat: Arrays that the backward pass of bert or decoder_lm recomputes: "none", "attention",
        "dots", "inner" or "layer" (see `lbopt.models.Bert`); of your own "none", "dots" (all but
        matrix products) or "all".
      remat_layers: Number of layers of bert or decoder_lm to which `remat` applies; None for all.
      options: Arguments of `make`.
      stacked: Regular expressions of your own parameters that are stacks of layers, the layers on
        the leading axis: each layer has a trust ratio of its own.

    >>> from lbopt.config import TrainConfig
    >>> model = ModelConfig("cnn", widths=(8, 16), batch_norm_scope="examples:64")
    >>> TrainConfig(data="digits", model=model).validate()
    """

    name: str = "cnn"
    widths: tuple[int, ...] = only((16, 32), name=("cnn", "mlp"))
    hidden: int = only(64, name=("cnn", "lstm"))
    batch_norm_scope: str = only("global", name=BATCH_NORMED)
    batch_norm_momentum: float | None = only(None, name=BATCH_NORMED)
    batch_norm_running_from: str = only(
        "all",
        name=("efficientnet", "resnet"),
        batch_norm_scope=NOT_GLOBAL,  # one group is all groups
    )
    batch_norm_unbiased_var: bool = only(False, name=("efficientnet", "resnet"))
    dtype: str = "float32"
    size: str = only("", name=tuple(_BY_SIZE))
    base_size: str = only("", name=TRANSFORMERS)
    base_widths: tuple[int, ...] = only((), name=("mlp",))
    stem: str = only(AUTOMATIC_STEM, name=("resnet",))
    patch_convolutions: bool | None = only(None, name=PATCHED)
    fold_columns: bool | None = only(None, name=("resnet",))
    fold_examples: int | None = only(None, name=("efficientnet",))
    width_coefficient: float | None = only(
        None, name=(*TRANSFORMERS, "efficientnet", "lstm_lm", "resnet", "simple_cnn")
    )
    depth_coefficient: float | None = only(None, name=("decoder_lm", "efficientnet"))
    dropout_rate: float | None = only(
        None, name=(*TRANSFORMERS, "efficientnet", "lstm_lm", "simple_cnn")
    )
    attention_dropout_rate: float | None = only(None, name=TRANSFORMERS)
    stochastic_depth_rate: float | None = only(None, name=("efficientnet",))
    max_length: int = only(512, name=TRANSFORMERS)
    activation: str = only("gelu", name=("bert",))
    tied: bool | None = only(None, name=("decoder_lm",))
    qk_norm: bool = only(False, name=("decoder_lm",))
    init_std: float | None = only(None, name=("decoder_lm",))
    scan_layers: bool = only(False, name=TRANSFORMERS)
    remat: str = only("none", {"name": TRANSFORMERS}, {"name": PLACE})
    remat_layers: int | None = only(
        None, name=TRANSFORMERS, remat=_REMATERIALISED, scan_layers=(False,)
    )
    options: dict[str, Any] = only_default(dict, name=PLACE)
    stacked: tuple[str, ...] = only((), name=PLACE)


def check_model(model: ModelConfig) -> None:
    """Raise `UserError` for a value that no network takes."""
    require_place_or_choice("name", model.name, MODELS, "config.model")
    require_choice("dtype", model.dtype, DTYPES)
    if model.name in _BY_SIZE:
        _BY_SIZE[model.name](model.size)
    _check_widths(model)
    _check_base(model)
    # Fields of other networks are checked too: a misspelt value is refused as such, and not as a
    # field without effect.
    require_choice("stem", model.stem, (AUTOMATIC_STEM, *STEMS))

    own = is_place(model.name)
    if own:
        require_choice("remat", model.remat, OWN_REMATS)
    remat = "none" if own else model.remat
    check_bert(model.max_length, model.activation, remat, model.remat_layers)
    with errors.about("stacked", model.stacked):
        tree.check_patterns(model.stacked or ("",))
    if model.fold_examples is not None:
        check_fold_examples(model.fold_examples)
    momentum = model.batch_norm_momentum
    with errors.under("", momentum="batch_norm_momentum", running_from="batch_norm_running_from"):
        check_running_statistics(
            BatchNorm.momentum if momentum is None else momentum, model.batch_norm_running_from
        )
    std = model.init_std
    require(std is None or std > 0, "init_std", std, "give a number > 0, or None")
    for field in ("dropout_rate", "attention_dropout_rate", "stochastic_depth_rate"):
        if getattr(model, field) is not None:
            require_drop_rate(field, getattr(model, field))


def check_heads(model: ModelConfig) -> None:
    """Raise `UserError` for a Transformer without a whole number of heads, or of layers."""
    if model.name == "bert":
        _check_whole(model, "width_coefficient", "heads", BERT_SIZES[model.size].num_heads)
    if model.name == "decoder_lm":
        size = DECODER_SIZES[model.size]
        shared = "heads of keys" if size.num_kv_heads < size.num_heads else "heads"
        _check_whole(model, "width_coefficient", shared, size.num_kv_heads)
        _check_whole(model, "depth_coefficient", "layers", size.num_layers)


def _check_whole(model: ModelConfig, field: str, what: str, count: int) -> None:
    times = getattr(model, field)
    if times is None:
        return
    # A fraction is written with some digits, and 25 x 0.28 is 7.000000000000001.
    several = round(count * times)
    fix = f"size {model.size!r} has {count} {what}; give a multiple of 1 / {count}"
    require(several >= 1 and abs(count * times - several) <= 1e-4, field, times, fix)


def _check_base(model: ModelConfig) -> None:
    if model.base_size:
        sizes = DECODER_SIZES if model.name == "decoder_lm" else BERT_SIZES
        require_choice("base_size", model.base_size, sizes)
        both = [sizes.get(name) for name in (model.size, model.base_size)]
        forms = [[getattr(one, name, None) for name in FORM] for one in both]
        fix = f"{{size}} = {model.size!r} is of another form; give a size of the same form"
        same = forms[0] == forms[1]
        require(same, "base_size", model.base_size, fix, code="conflict", also=["size"])
    base = model.base_widths
    fits = not base or (len(base) == len(model.widths) and min(base) > 0)
    fix = f"give a width for each of the {len(model.widths)} {{widths}}, or none"
    require(fits, "base_widths", base, fix, code="mismatch", also=["widths"])


def _check_widths(model: ModelConfig) -> None:
    widths = model.widths
    hidden = model.hidden
    fits = len(widths) > 0 and min(widths) > 0 and max(widths) <= WIDEST
    require(fits, "widths", widths, f"give at least one width, each in [1, {WIDEST}]")
    require(1 <= hidden <= WIDEST, "hidden", hidden, f"give a width in [1, {WIDEST}]")
    for field in ("width_coefficient", "depth_coefficient"):
        value = getattr(model, field)
        fits = value is None or 0 < value <= 64
        require(fits, field, value, "give a number in (0, 64], or None")
