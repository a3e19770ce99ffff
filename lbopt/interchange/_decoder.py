"""Llama, Qwen3 and GPT-2 in lbopt and in `transformers`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from lbopt import types
from lbopt.errors import UserError, require, require_choice
from lbopt.interchange import _json_fields, _layouts
from lbopt.interchange._family import Family
from lbopt.interchange._json_fields import COUNT, POSITIVE, RATE, Field
from lbopt.interchange._names import (
    EMBEDDING,
    LAYER_NORM,
    DerivedInt,
    Described,
    LayerNames,
    Leaf,
)
from lbopt.models import DecoderLM, RopeScaling, plain_factor

_SCALE = (Leaf("params", "scale", "weight", _layouts.SAME, is_vector=True),)
_KERNEL = (Leaf("params", "kernel", "weight", _layouts.DENSE),)
_TURNED = (Leaf("params", "weight", "weight", _layouts.SAME),)
_HEAD = LayerNames("head", "lm_head", _KERNEL)
_TIED = "lm_head.weight"

_LLAMA_LAYER = "model.layers.{i}"
LLAMA = (
    LayerNames("word_embedding", "model.embed_tokens", EMBEDDING),
    LayerNames("layer{i}/attention_norm", f"{_LLAMA_LAYER}.input_layernorm", _SCALE),
    LayerNames("layer{i}/query", f"{_LLAMA_LAYER}.self_attn.q_proj", _TURNED),
    LayerNames("layer{i}/key", f"{_LLAMA_LAYER}.self_attn.k_proj", _TURNED),
    LayerNames("layer{i}/value", f"{_LLAMA_LAYER}.self_attn.v_proj", _TURNED),
    LayerNames("layer{i}/query_norm", f"{_LLAMA_LAYER}.self_attn.q_norm", _SCALE),
    LayerNames("layer{i}/key_norm", f"{_LLAMA_LAYER}.self_attn.k_norm", _SCALE),
    LayerNames("layer{i}/attention_output", f"{_LLAMA_LAYER}.self_attn.o_proj", _KERNEL),
    LayerNames("layer{i}/inner_norm", f"{_LLAMA_LAYER}.post_attention_layernorm", _SCALE),
    LayerNames("layer{i}/gate", f"{_LLAMA_LAYER}.mlp.gate_proj", _KERNEL),
    LayerNames("layer{i}/inner", f"{_LLAMA_LAYER}.mlp.up_proj", _KERNEL),
    LayerNames("layer{i}/output", f"{_LLAMA_LAYER}.mlp.down_proj", _KERNEL),
    LayerNames("final_norm", "model.norm", _SCALE),
    _HEAD,
)

# Query, key and value are parts of one tensor there, [in, 3 out].
_GPT2_LAYER = "transformer.h.{i}"
GPT2_PARTS = ("query", "key", "value")
_TURNED_PART = (
    Leaf("params", "weight", "weight", _layouts.DENSE),
    Leaf("params", "bias", "bias", _layouts.SAME, is_vector=True),
)
_CONV1D = (
    Leaf("params", "kernel", "weight", _layouts.SAME),
    Leaf("params", "bias", "bias", _layouts.SAME, is_vector=True),
)
GPT2 = (
    LayerNames("word_embedding", "transformer.wte", EMBEDDING),
    LayerNames("position_embedding", "transformer.wpe", EMBEDDING),
    LayerNames("layer{i}/attention_norm", f"{_GPT2_LAYER}.ln_1", LAYER_NORM),
    *(
        LayerNames(f"layer{{i}}/{part}", f"{_GPT2_LAYER}.attn.c_attn.{part}", _TURNED_PART)
        for part in GPT2_PARTS
    ),
    LayerNames("layer{i}/attention_output", f"{_GPT2_LAYER}.attn.c_proj", _CONV1D),
    LayerNames("layer{i}/inner_norm", f"{_GPT2_LAYER}.ln_2", LAYER_NORM),
    LayerNames("layer{i}/inner", f"{_GPT2_LAYER}.mlp.c_fc", _CONV1D),
    LayerNames("layer{i}/output", f"{_GPT2_LAYER}.mlp.c_proj", _CONV1D),
    LayerNames("final_norm", "transformer.ln_f", LAYER_NORM),
    _HEAD,
)

LLAMA_FIELDS = (
    Field("vocab_size", "vocab_size", 32000, COUNT),
    Field("num_hidden_layers", "num_layers", 32, COUNT),
    Field("hidden_size", "width", 4096, COUNT),
    Field("num_attention_heads", "num_heads", 32, COUNT),
    Field("intermediate_size", "inner_width", 11008, COUNT),
    Field("max_position_embeddings", "max_length", 2048, COUNT),
    Field("attention_dropout", "attention_dropout_rate", 0.0, RATE),
    Field("rms_norm_eps", "epsilon", 1e-6, POSITIVE),
)
_QWEN3_DEFAULTS = {
    "vocab_size": 151936,
    "intermediate_size": 22016,
    "max_position_embeddings": 32768,
}
QWEN3_FIELDS = tuple(
    field._replace(default=_QWEN3_DEFAULTS.get(field.theirs, field.default))
    for field in LLAMA_FIELDS
)
GPT2_FIELDS = (
    Field("vocab_size", "vocab_size", 50257, COUNT),
    Field("n_layer", "num_layers", 12, COUNT),
    Field("n_embd", "width", 768, COUNT),
    Field("n_head", "num_heads", 12, COUNT),
    Field("n_positions", "max_length", 1024, COUNT),
    Field("attn_pdrop", "attention_dropout_rate", 0.1, RATE),
    Field("resid_pdrop", "dropout_rate", 0.1, RATE),
    Field("layer_norm_epsilon", "epsilon", 1e-5, POSITIVE),
)
GPT2_ACTIVATIONS = {
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu": "gelu",
    "relu": "relu",
}
"""Activations by their names in `transformers`; of two names for one, the first is written."""
_LLAMA_FORM = {"norm": "rms", "positions": "rotary", "activation": "swiglu", "has_bias": False}
_GPT2_FORM = {"norm": "layer", "positions": "learned", "has_bias": True, "qk_norm": False}
_LLAMA_FIXED = {"hidden_act": "silu", "attention_bias": False, "mlp_bias": False}
_QWEN3_FIXED = {"hidden_act": "silu", "attention_bias": False, "use_sliding_window": False}
_GPT2_FIXED = {
    "scale_attn_weights": True,
    "scale_attn_by_inverse_layer_idx": False,
    "add_cross_attention": False,
}
_ROPE_KINDS = ("default", "llama3")
_SCALING = {
    "factor": "factor",
    "low_freq_factor": "low_freq_factor",
    "high_freq_factor": "high_freq_factor",
    "original_max_position_embeddings": "original_max_length",
}
"""Parameters of rotary positions in `transformers` and in `RopeScaling`."""
_MOST = 1e100
"""Far above all numbers in use, and finite."""
_WAVELENGTH = _json_fields.Kind(
    lambda value: (
        isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value <= _MOST
    ),
    f"give a number > 0, and at most {_MOST:g}",
)


def _llama_module(config: Mapping[str, Any], qwen3: bool) -> DecoderLM:
    _json_fields.require_fixed(config, _QWEN3_FIXED if qwen3 else _LLAMA_FIXED)
    kinds = config.get("layer_types")
    fix = "lbopt's layers attend to all tokens before; give a model with 'full_attention' alone"
    full = isinstance(kinds, list) and all(kind == "full_attention" for kind in kinds)
    require(kinds is None or full, "layer_types", kinds, fix, code="choice")

    attributes = _json_fields.read(QWEN3_FIELDS if qwen3 else LLAMA_FIELDS, config)
    heads = attributes["num_heads"]
    shared = config.get("num_key_value_heads", 32 if qwen3 else None)
    if shared is not None:
        shared = _json_fields.get(config, "num_key_value_heads", shared, COUNT)
        fix = f"give a divisor of num_attention_heads, which is {heads}"
        require(heads % shared == 0, "num_key_value_heads", shared, fix, code="conflict")
    width = config.get("head_dim", 128 if qwen3 else None)
    if width is None:
        _require_heads("num_attention_heads", heads, "hidden_size", attributes["width"])
    else:
        width = _json_fields.get(config, "head_dim", width, COUNT)
    fix = "rotary positions turn pairs of channels; give an even number"
    even = (width or attributes["width"] // heads) % 2 == 0
    require(even, "head_dim", width, fix)

    theta, scaling = _rope(config)
    return DecoderLM(
        **_LLAMA_FORM,
        qk_norm=qwen3,
        num_kv_heads=shared,
        head_width=width,
        tied=_tied(config, False),
        residual_init=False,
        rope_theta=theta,
        rope_scaling=scaling,
        **attributes,
    )


def _require_heads(field: str, heads: int, other: str, width: int) -> None:
    fix = f"give a number that divides {other}, which is {width}"
    require(width % heads == 0, field, heads, fix, code="conflict")


def _tied(config: Mapping[str, Any], default: bool) -> bool:
    tied = config.get("tie_word_embeddings", default)
    require(isinstance(tied, bool), "tie_word_embeddings", tied, "give true or false", code="type")
    return tied


def _rope(config: Mapping[str, Any]) -> tuple[float, RopeScaling | None]:
    """Return the base and the scaling of rotary positions, in the newer or the older fields."""
    newer = config.get("rope_parameters") is not None
    field = "rope_parameters" if newer else "rope_scaling"
    given = {} if config.get(field) is None else config[field]
    require(isinstance(given, dict), field, given, "give an object", code="type")
    theta = _json_fields.get(
        {**config, **given}, "rope_theta", config.get("rope_theta", 10000.0), _WAVELENGTH
    )
    kind = given.get("rope_type", given.get("type", "default"))
    if kind not in _ROPE_KINDS:
        fix = (
            f"lbopt has only {' and '.join(map(repr, _ROPE_KINDS))}; give a model with one of them"
        )
        raise UserError(f"{field}.rope_type", kind, fix, code="choice")

    names = {"rope_type", "type", "rope_theta", *(_SCALING if kind == "llama3" else ())}
    for name in sorted(given.keys() - names):
        fix = f"lbopt's rotary positions of type {kind!r} have no such parameter; leave it out"
        raise UserError(f"{field}.{name}", given[name], fix, code="unused")
    if kind == "default":
        return theta, None
    for name in _SCALING:
        allowed = COUNT if name == "original_max_position_embeddings" else _WAVELENGTH
        fix = f"positions of type 'llama3' need it; {allowed.fix}"
        require(name in given, f"{field}.{name}", None, fix, code="missing")
        require(allowed.allows(given[name]), f"{field}.{name}", given[name], fix)
    scaling = RopeScaling(**{ours: given[theirs] for theirs, ours in _SCALING.items()})
    fix = f"give a number above low_freq_factor, which is {scaling.low_freq_factor}"
    rises = scaling.high_freq_factor > scaling.low_freq_factor
    require(rises, f"{field}.high_freq_factor", scaling.high_freq_factor, fix, code="conflict")
    return theta, scaling


def _llama_config(
    module: DecoderLM, params: types.Params, image_size: int | None
) -> dict[str, Any]:
    del params, image_size
    form = (QWEN3_FIELDS, _QWEN3_FIXED) if module.qk_norm else (LLAMA_FIELDS, _LLAMA_FIXED)
    scaling = None
    if module.rope_scaling is not None:
        scaling = {theirs: getattr(module.rope_scaling, ours) for theirs, ours in _SCALING.items()}
        scaling["rope_type"] = "llama3"

    # The fields of rotary positions that older `transformers` read too.
    return {
        **_json_fields.write(form[0], module),
        **form[1],
        "intermediate_size": module.inner_width or 4 * module.width,
        "num_key_value_heads": module.num_kv_heads or module.num_heads,
        "head_dim": module.each_head,
        "rope_theta": module.rope_theta,
        "rope_scaling": scaling,
        "tie_word_embeddings": module.tied,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    }


def _gpt2_module(config: Mapping[str, Any]) -> DecoderLM:
    _json_fields.require_fixed(config, _GPT2_FIXED)
    activation = config.get("activation_function", "gelu_new")
    require_choice("activation_function", activation, GPT2_ACTIVATIONS)
    attributes = _json_fields.read(GPT2_FIELDS, config)
    _require_heads("n_head", attributes["num_heads"], "n_embd", attributes["width"])
    rate = attributes["dropout_rate"]
    embedded = _json_fields.get(config, "embd_pdrop", 0.1, RATE)
    fix = f"lbopt has one rate for embeddings and branches; give resid_pdrop, which is {rate}"
    require(embedded == rate, "embd_pdrop", embedded, fix, code="conflict")
    inner = config.get("n_inner")
    if inner is not None:
        inner = _json_fields.get(config, "n_inner", inner, COUNT)
    return DecoderLM(
        **_GPT2_FORM,
        activation=GPT2_ACTIVATIONS[activation],
        inner_width=inner,
        tied=_tied(config, True),
        **attributes,
    )


def _gpt2_config(module: DecoderLM, params: types.Params, image_size: int | None) -> dict[str, Any]:
    del params, image_size
    names = GPT2_ACTIVATIONS.items()
    activation = next(theirs for theirs, ours in names if ours == module.activation)
    return {
        **_json_fields.write(GPT2_FIELDS, module),
        **_GPT2_FIXED,
        "activation_function": activation,
        "embd_pdrop": module.dropout_rate,
        "n_inner": module.inner_width,
        "tie_word_embeddings": module.tied,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    }


def _layers(
    fields: tuple[Field, ...], module: DecoderLM, config: Mapping[str, Any]
) -> Iterator[Described]:
    del config
    size = _json_fields.sizes(
        fields, module.clone(inner_width=module.inner_width or 4 * module.width)
    )
    names = {field.ours: field.theirs for field in fields}
    inner = DerivedInt(module.inner_width or 4 * module.width, names.get("inner_width", "n_inner"))
    vocabulary = size["vocab_size"]
    width = size["width"]
    queries = DerivedInt(module.num_heads * module.each_head, names["num_heads"], "head_dim")
    keys = DerivedInt(
        (module.num_kv_heads or module.num_heads) * module.each_head,
        "num_key_value_heads",
        "head_dim",
    )

    yield Described("word_embedding", (vocabulary, width))
    if module.positions == "learned":
        yield Described("position_embedding", (size["max_length"], width))
    for number in range(module.num_layers):
        shapes = {
            "attention_norm": (width,),
            "query": (queries, width),
            "key": (keys, width),
            "value": (keys, width),
            "attention_output": (queries, width),
            "inner_norm": (width,),
            "inner": (width, inner),
            "output": (inner, width),
        }
        if module.qk_norm:
            head = DerivedInt(module.each_head, "head_dim")
            shapes |= {"query_norm": (head,), "key_norm": (head,)}
        if module.activation == "swiglu":
            shapes["gate"] = (width, inner)
        for name, shape in shapes.items():
            yield Described(f"layer{number}/{name}", shape, size["num_layers"].fields)
    yield Described("final_norm", (width,))
    if not module.tied:
        yield Described("head", (width, vocabulary))


def _has(module: Any, form: Mapping[str, Any]) -> bool:
    return isinstance(module, DecoderLM) and all(
        getattr(module, name) == value for name, value in form.items()
    )


def _llama(qwen3: bool, tied: bool) -> Family:
    fields = QWEN3_FIELDS if qwen3 else LLAMA_FIELDS
    form = {**_LLAMA_FORM, "qk_norm": qwen3, "tied": tied}
    words = "model.embed_tokens.weight"

    return Family(
        "Qwen3ForCausalLM" if qwen3 else "LlamaForCausalLM",
        "qwen3" if qwen3 else "llama",
        LLAMA,
        describes=lambda module: _has(module, form),
        module=lambda config: _llama_module(config, qwen3),
        config=_llama_config,
        layers=lambda module, config: _layers(fields, module, config),
        applies=lambda config: _tied(config, False) == tied,
        tied={_TIED: words} if tied else {},
        ignored=(r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq",),
        factor=plain_factor,
        words=(words, fields[0].default),
    )


def _gpt2(tied: bool) -> Family:
    form = {**_GPT2_FORM, "tied": tied, "num_kv_heads": None, "head_width": None}
    words = "transformer.wte.weight"

    return Family(
        "GPT2LMHeadModel",
        "gpt2",
        GPT2,
        describes=lambda module: _has(_plain_heads(module), form),
        module=_gpt2_module,
        config=_gpt2_config,
        layers=lambda module, config: _layers(GPT2_FIELDS, module, config),
        applies=lambda config: _tied(config, True) == tied,
        tied={_TIED: words} if tied else {},
        # OpenAI's folders were saved from the network without its head.
        former=((r"^(wte|wpe|h|ln_f)\.", r"transformer.\1."),),
        ignored=(r"transformer\.h\.\d+\.attn\.(bias|masked_bias)",),
        factor=plain_factor,
        words=(words, 50257),
        joined=r"(transformer\.h\.\d+\.attn\.c_attn)\.(weight|bias)",
        parts=GPT2_PARTS,
    )


def _plain_heads(module: Any) -> Any:
    """Return the network with None for the numbers of heads that are the default."""
    if not isinstance(module, DecoderLM):
        return module
    same = module.num_kv_heads == module.num_heads
    each = module.each_head * module.num_heads == module.width
    return module.clone(
        num_kv_heads=None if same else module.num_kv_heads,
        head_width=None if each else module.head_width,
    )


FAMILIES = (
    *(_llama(qwen3, tied) for qwen3 in (False, True) for tied in (False, True)),
    *(_gpt2(tied) for tied in (True, False)),
)
