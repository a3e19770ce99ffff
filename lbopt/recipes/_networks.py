"""Models by name."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any, cast

import flax.linen as nn
import jax.numpy as jnp

from lbopt import _user_code, errors, stacks, tree, types
from lbopt.config import AUTOMATIC_STEM, TRANSFORMERS, ModelConfig
from lbopt.models import (
    BERT_SIZES,
    CNN,
    DECODER_SIZES,
    LSTM_SIZES,
    MLP,
    RESNET_SIZES,
    DecoderLM,
    LSTMClassifier,
    Model,
    checked,
    make_bert,
    make_decoder_lm,
    make_efficientnet,
    make_lstm_language_model,
    make_model,
    make_resnet,
    make_simple_cnn,
    plain_factor,
)
from lbopt.transforms import Transfer


def make_network(model: ModelConfig, outputs: int, head: str = "pretraining") -> nn.Module:
    """Build the module of a validated config.

    Args:
      model: Config of the network.
      outputs: Number of classes, or of tokens in the vocabulary.
      head: Name of BERT's head; other networks ignore it.
    """
    return _BUILDERS[model.name](model, outputs, head)


def base_model(model: ModelConfig) -> ModelConfig | None:
    """Return the network from which a config transfers its numbers; None if it does not."""
    if model.base_size:
        return dataclasses.replace(
            model,
            size=model.base_size,
            base_size="",
            width_coefficient=None,
            depth_coefficient=None,
            tied=_tied(model) if model.name == "decoder_lm" else None,
        )
    if model.base_widths:
        return dataclasses.replace(model, widths=model.base_widths, base_widths=())
    return None


def transfer_of(model: ModelConfig, base_params: types.Params, stacked: types.Stacked) -> Transfer:
    """Return how a network takes the numbers of a narrower one.

    Args:
      model: Config of the network.
      base_params: Shapes of the narrower network's parameters.
      stacked: The parameters that are stacks of layers.
    """
    # Transformers start from one standard deviation. The last norm before the output belongs to it.
    last_norms = {"prediction_norm", "final_norm"} & base_params.keys()
    kinds = dict.fromkeys(last_norms, "fixed")
    init = "constant" if model.name in TRANSFORMERS else "fan_in"
    depth = depth_ratio(model)
    if depth != 1 and width_ratio(model) == 1:
        # Nothing grows that would tell the layers from the rest.
        kinds |= {"^layer": "hidden", "": "fixed"}
    return Transfer(base_params, cast(Any, kinds), cast(Any, init), stacked, depth)


def own_model(model: ModelConfig, outputs: int) -> Model:
    """Return the user's model; errors of its code name the field, the file and the line."""

    @contextlib.contextmanager
    def naming() -> Iterator[None]:
        place = "model.name"
        named = errors.under("", options="model.options")
        of_user = _user_code.naming_errors(place, model.name)
        with errors.about(place, model.name, "model"), named, of_user:
            yield

    with naming():
        make = _user_code.load(model.name, "model.name")
        made = make_model(make, outputs, model.dtype, model.options, model.remat)
    return checked(made, naming)


def stacked(model: ModelConfig, params: types.Params) -> types.Stacked:
    """Return the parameters of a network that are stacks of layers; None if there are none.

    Raises:
      UserError: Naming `model.stacked`, if its patterns do not fit the parameters.
    """
    if model.stacked:
        found = stacks.stacked_paths(*model.stacked)
        named = errors.about("model.stacked", model.stacked, "stacked")
        with errors.under("", stacked="model.stacked"), named:
            stacks.resolve_stacked(found, params)
        return found
    scanned = model.name in TRANSFORMERS and model.scan_layers
    return stacks.stacked_paths("^layers/") if scanned else None


def _given(**options: Any) -> dict[str, Any]:
    """Return the options that are not None: the others are the size's."""
    return {name: value for name, value in options.items() if value is not None}


def _dtype(model: ModelConfig) -> Any:
    return jnp.dtype(model.dtype)


def _cnn(model: ModelConfig, outputs: int, head: str) -> nn.Module:
    del head
    options = {
        **_given(batch_norm_momentum=model.batch_norm_momentum),
        "by_patches": model.patch_convolutions is not False,
    }
    return CNN(
        outputs,
        tuple(model.widths),
        model.hidden,
        model.batch_norm_scope,
        dtype=_dtype(model),
        **options,
    )


def _simple_cnn(model: ModelConfig, outputs: int, head: str) -> nn.Module:
    del head
    return make_simple_cnn(
        num_classes=outputs,
        dtype=_dtype(model),
        by_patches=model.patch_convolutions is not False,
        **_given(width_coefficient=model.width_coefficient, dropout_rate=model.dropout_rate),
    )


def _resnet(model: ModelConfig, outputs: int, head: str) -> nn.Module:
    del head
    options = _given(batch_norm_momentum=model.batch_norm_momentum)
    if model.width_coefficient is not None:
        wide = RESNET_SIZES[model.size].widths
        options["widths"] = tuple(max(8, round(width * model.width_coefficient)) for width in wide)
        options["stem_width"] = max(8, round(64 * model.width_coefficient))
    return make_resnet(
        model.size,
        num_classes=outputs,
        stem="conv7" if model.stem == AUTOMATIC_STEM else model.stem,
        fold_columns=bool(model.fold_columns),
        batch_norm_scope=model.batch_norm_scope,
        batch_norm_running_from=model.batch_norm_running_from,
        batch_norm_unbiased_var=model.batch_norm_unbiased_var,
        dtype=_dtype(model),
        **options,
    )


def _efficientnet(model: ModelConfig, outputs: int, head: str) -> nn.Module:
    del head
    return make_efficientnet(
        model.size,
        num_classes=outputs,
        batch_norm_scope=model.batch_norm_scope,
        batch_norm_running_from=model.batch_norm_running_from,
        batch_norm_unbiased_var=model.batch_norm_unbiased_var,
        fold_examples=model.fold_examples or 1,
        dtype=_dtype(model),
        **_given(
            width_coefficient=model.width_coefficient,
            depth_coefficient=model.depth_coefficient,
            dropout_rate=model.dropout_rate,
            stochastic_depth_rate=model.stochastic_depth_rate,
            batch_norm_momentum=model.batch_norm_momentum,
        ),
    )


def width_ratio(model: ModelConfig) -> float:
    """Return how many times as wide a Transformer is as that whose numbers it takes."""
    base = base_model(model)
    if base is None:
        return 1.0
    if model.name == "bert":
        return _heads_and_width(model)[1] / _heads_and_width(base)[1]
    return _decoder_shape(model)["width"] / _decoder_shape(base)["width"]


def depth_ratio(model: ModelConfig) -> float:
    """Return how many times as many layers a network has as that whose numbers it takes.

    It is 1 for networks that do not follow the depth.
    """
    base = base_model(model)
    if base is None or model.name != "decoder_lm":
        return 1.0
    return _decoder_shape(model)["num_layers"] / _decoder_shape(base)["num_layers"]


def num_layers(model: ModelConfig) -> int:
    """Return the number of layers of a Transformer."""
    if model.name == "bert":
        return BERT_SIZES[model.size].num_layers
    return _decoder_shape(model)["num_layers"]


def readout_scale(model: ModelConfig) -> float:
    """Return the factor of a tied output layer, which a transfer over the width needs."""
    return 1 / width_ratio(model)


def _heads_and_width(model: ModelConfig) -> tuple[int, int]:
    published = BERT_SIZES[model.size]
    num_heads = max(1, round(published.num_heads * (model.width_coefficient or 1.0)))
    return num_heads, num_heads * published.width // published.num_heads


def _bert(model: ModelConfig, outputs: int, head: str) -> nn.Module:
    num_heads, width = _heads_and_width(model)
    return make_bert(
        model.size,
        num_heads=num_heads,
        width=width,
        readout_scale=readout_scale(model),
        vocab_size=outputs,
        head=head,
        max_length=model.max_length,
        activation=model.activation,
        scan=model.scan_layers,
        remat=model.remat,
        remat_layers=None if model.remat == "none" or model.scan_layers else model.remat_layers,
        dtype=_dtype(model),
        **_given(
            dropout_rate=model.dropout_rate, attention_dropout_rate=model.attention_dropout_rate
        ),
    )


def _decoder_shape(model: ModelConfig) -> dict[str, int]:
    """Return the sizes of a decoder that the coefficients of width and depth change."""
    size = DECODER_SIZES[model.size]
    wide = model.width_coefficient or 1.0
    each = size.width // size.num_heads
    num_heads = round(size.num_heads * wide)
    return {
        "num_layers": round(size.num_layers * (model.depth_coefficient or 1.0)),
        "width": num_heads * each,
        "num_heads": num_heads,
        "num_kv_heads": round(size.num_kv_heads * wide),
        "inner_width": round(size.inner_width * wide),
    }


def _tied(model: ModelConfig) -> bool:
    return DECODER_SIZES[model.size].tied if model.tied is None else model.tied


def _decoder_lm(model: ModelConfig, outputs: int, head: str) -> nn.Module:
    del head
    tied = _tied(model)
    # Initial values belong to the numbers that are taken.
    base = DECODER_SIZES[model.base_size or model.size]

    return make_decoder_lm(
        model.size,
        **_decoder_shape(model),
        tied=tied,
        qk_norm=model.qk_norm,
        init_std=base.init_std if model.init_std is None else model.init_std,
        residual_init=base.residual_init,
        readout_scale=readout_scale(model) if tied else 1.0,
        branch_scale=1 / depth_ratio(model),
        attention_scale=_attention_scale(model),
        vocab_size=outputs,
        max_length=model.max_length,
        scan=model.scan_layers,
        remat=model.remat,
        remat_layers=None if model.remat == "none" or model.scan_layers else model.remat_layers,
        dtype=_dtype(model),
        **_given(
            dropout_rate=model.dropout_rate, attention_dropout_rate=model.attention_dropout_rate
        ),
    )


def _attention_scale(model: ModelConfig) -> float | None:
    """Return the factor of attention scores, which falls with 1 / (width of a head) from the base.

    None for 1 / sqrt(width of a head).
    """
    base = base_model(model)
    if base is None:
        return None
    own, narrow = (
        shape["width"] // shape["num_heads"] for shape in map(_decoder_shape, (model, base))
    )
    return None if own == narrow else narrow**0.5 / own


def plain_factors(model: ModelConfig, params: types.Params) -> types.PyTree:
    """Return the factor of each parameter of a decoder in a network without scales.

    See `lbopt.models.plain_factor`.
    """
    network = cast(DecoderLM, _decoder_lm(model, 1, ""))
    return tree.map_with_name(lambda name, _: plain_factor(network, name), params)


def _lstm_lm(model: ModelConfig, outputs: int, head: str) -> nn.Module:
    del head
    options = _given(dropout_rate=model.dropout_rate)
    if model.width_coefficient is not None:
        options["hidden"] = max(1, round(LSTM_SIZES[model.size].hidden * model.width_coefficient))
    return make_lstm_language_model(model.size, vocab_size=outputs, dtype=_dtype(model), **options)


def _lstm(model: ModelConfig, outputs: int, head: str) -> nn.Module:
    del head
    return LSTMClassifier(outputs, model.hidden, dtype=_dtype(model))


def _mlp(model: ModelConfig, outputs: int, head: str) -> nn.Module:
    del head
    return MLP(outputs, tuple(model.widths), dtype=_dtype(model))


_BUILDERS = {
    "bert": _bert,
    "cnn": _cnn,
    "decoder_lm": _decoder_lm,
    "efficientnet": _efficientnet,
    "lstm": _lstm,
    "lstm_lm": _lstm_lm,
    "mlp": _mlp,
    "resnet": _resnet,
    "simple_cnn": _simple_cnn,
}
