"""Decoder language models: GPT-2, Llama, and small ones of the same form."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name

from lbopt.errors import require, require_choice
from lbopt.models import _attention
from lbopt.models._activation import gelu, gelu_tanh, swish
from lbopt.models._head import Head
from lbopt.models._layers import check_remat, run_layers
from lbopt.models._projections import Embedding, HeadJoin, HeadProjection
from lbopt.models._randomness import Dropout

# Shape suffixes: B batch, L length, D width, F inner width, H heads, G heads of keys and values,
# K width of a head.

NORMS = ("layer", "rms")
POSITIONS = ("learned", "rotary")
GATED = "swiglu"
UNGATED = {"gelu": gelu, "gelu_tanh": gelu_tanh, "relu": nn.relu}
DECODER_ACTIVATIONS = (*UNGATED, GATED)


class RopeScaling(NamedTuple):
    """How Llama 3.1 slows the rotation of positions for longer texts.

    Pairs of channels that turn less than `low_freq_factor` times within `original_max_length`
    positions turn `factor` times as slowly; those that turn more than `high_freq_factor` times stay
    as they are; between the two it is interpolated linearly in the number of turns.

    Attributes:
      factor: Factor of the wavelengths, > 0; 8 in Llama 3.1.
      low_freq_factor: Number of turns, > 0; 1 in Llama 3.1.
      high_freq_factor: Number of turns, above `low_freq_factor`; 4 in Llama 3.1.
      original_max_length: Longest sequence of the training before; 8192 in Llama 3.1.

    >>> RopeScaling(8.0, 1.0, 4.0, 8192).factor
    8.0

    References:
      meta-llama/llama-models@a9c89c471f793423afd4cc3ca8671d6e56fe64cb:models/llama3/model.py,
      apply_scaling.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_length: int


@dataclasses.dataclass(frozen=True)
class DecoderSize:
    """The shape of a decoder language model; the names are attributes of `DecoderLM`."""

    num_layers: int
    width: int
    num_heads: int
    num_kv_heads: int
    inner_width: int
    max_length: int
    norm: str = "rms"
    positions: str = "rotary"
    activation: str = GATED
    has_bias: bool = False
    tied: bool = True
    init_std: float = 0.02
    residual_init: bool = True
    epsilon: float = 1e-5
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling | None = None


def _gpt2(num_layers: int, width: int, num_heads: int) -> DecoderSize:
    return DecoderSize(
        num_layers,
        width,
        num_heads,
        num_heads,
        4 * width,
        1024,
        norm="layer",
        positions="learned",
        activation="gelu_tanh",
        has_bias=True,
    )


def _llama(num_kv_heads: int, inner_width: int, max_length: int, **others: Any) -> DecoderSize:
    return DecoderSize(
        32,
        4096,
        32,
        num_kv_heads,
        inner_width,
        max_length,
        tied=False,
        residual_init=False,
        **others,
    )


def _small(num_layers: int, width: int, inner_width: int) -> DecoderSize:
    heads = width // 32
    std = math.sqrt(2 / (5 * width))
    return DecoderSize(num_layers, width, heads, heads, inner_width, 2048, init_std=std)


DECODER_SIZES = {
    "0.5m": _small(3, 96, 256),
    "1m": _small(4, 128, 384),
    "4m": _small(4, 256, 768),
    "20m": _small(6, 512, 1408),
    "gpt2": _gpt2(12, 768, 12),
    "gpt2-medium": _gpt2(24, 1024, 16),
    "gpt2-large": _gpt2(36, 1280, 20),
    "gpt2-xl": _gpt2(48, 1600, 25),
    "llama2-7b": _llama(32, 11008, 4096),
    "llama3-8b": _llama(8, 14336, 8192, rope_theta=500000.0),
    "llama3.1-8b": _llama(
        8, 14336, 131072, rope_theta=500000.0, rope_scaling=RopeScaling(8.0, 1.0, 4.0, 8192)
    ),
}
"""Sizes.

"0.5m" to "20m" are our own: Llama's form, heads of 32 channels, an inner width of 8/3 of the width
rounded up to a multiple of 128 and tied embeddings; the names count the parameters with 2,048
tokens. Their initial values have the standard deviation sqrt(2 / (5 width)) of Nguyen and Salazar,
arXiv 1910.05895, which is GPT-2's 0.02 at a width of 1,000.

GPT-2: Radford et al. 2019, Table 2; heads, 1,024 positions and the form:
openai/gpt-2@9b63575ef42771a015060c964af2c3da4cf7c8ab:src/model.py. Llama 2 7B: Touvron et al.,
arXiv 2307.09288v2, Table 1 and section 2.2. Llama 3 8B: Grattafiori et al., arXiv 2407.21783v3,
Table 3; the scaling of 3.1's positions: as for `RopeScaling`. Inner widths are those of
`transformers`' LlamaConfig, with whose numbers of parameters tests compare all sizes.
"""


class DecoderLM(nn.Module):
    r"""A pre-norm Transformer decoder, which predicts each token from those before it.

        x <- x + s attention(norm(x)),    x <- x + s feed_forward(norm(x)),    s = `branch_scale`

    Matrices and embeddings start from normal(0, `init_std`), biases at zero and norm scales at one.

    Attributes:
      vocab_size: Number of tokens.
      num_layers: Number of layers.
      width: Width of a token's vector.
      num_heads: Number of heads of queries.
      num_kv_heads: Number of heads of keys and values, which must divide `num_heads`
        (grouped-query attention, arXiv 2305.13245v3); None for `num_heads`.
      head_width: Width of a head; None for `width` / `num_heads`.
      inner_width: Width of the feed-forward layer; None for 4 x width.
      max_length: Longest sequence, and with "learned" positions their number; at least 1.
      norm: "rms" (arXiv 1910.07467v1) or "layer".
      positions: "rotary" (arXiv 2104.09864v5, halves of a head rotated against each other) or
        "learned".
      activation: "swiglu" (arXiv 2002.05202v1), "gelu" (exact), "gelu_tanh" or "relu".
      has_bias: Whether dense layers have biases; the output layer never has one.
      qk_norm: Whether the query and key of each head are divided by their root mean square before
        the rotation (as in Qwen3; arXiv 2010.04245v1).
      tied: Whether the word embedding is also the output layer's weight.
      init_std: Standard deviation of the initial values of matrices and embeddings.
      residual_init: Whether that of the last matrix of each branch is divided by
        sqrt(2 num_layers), as in GPT-2.
      dropout_rate: Dropout rate of embeddings and of every branch's output.
      attention_dropout_rate: Dropout rate of attention probabilities.
      epsilon: Number added to the variance, or to the mean square, in norms.
      rope_theta: Base of the wavelengths of rotary positions.
      rope_scaling: Slower rotary positions for longer texts; None for none.
      readout_scale: Factor of the logits; 1 / m for a tied network that takes the numbers of one an
        m-th as wide (see `lbopt.transfer_table`).
      branch_scale: Factor of every branch; 1 / d for a network that takes the numbers of one with a
        d-th of its layers. `residual_init` then uses the number of layers of that one.
      attention_scale: Factor of the attention scores; None for 1 / sqrt(head_width).
      scan: True compiles one layer and loops over it; the parameters of all layers are stacked
        [layers, ...] under `layers`.
      remat: As in `Bert`.
      remat_layers: As in `Bert`.
      dtype: Dtype of matmuls and of activations between layers; parameters, softmax, norms and
        logits are fp32.

    >>> import jax, jax.numpy as jnp
    >>> model = DecoderLM(vocab_size=100, num_layers=1, width=16, num_heads=2)
    >>> tokens = {"tokens": jnp.zeros((2, 8), int)}
    >>> outputs, _ = jax.eval_shape(
    ...     lambda: model.init_with_output(jax.random.key(0), tokens, train=False)
    ... )
    >>> outputs["logits"].shape
    (2, 8, 100)

    References:
      Radford et al., Language Models are Unsupervised Multitask Learners, 2019, section 2.3;
      Touvron et al., arXiv 2302.13971v1, section 2.2; branch_scale: Dey et al., CompleteP, arXiv
      2505.01618, Table 1 with alpha = 1.
    """

    vocab_size: int = 50257
    num_layers: int = 12
    width: int = 768
    num_heads: int = 12
    num_kv_heads: int | None = None
    head_width: int | None = None
    inner_width: int | None = None
    max_length: int = 1024
    norm: str = "rms"
    positions: str = "rotary"
    activation: str = GATED
    has_bias: bool = False
    qk_norm: bool = False
    tied: bool = True
    init_std: float = 0.02
    residual_init: bool = True
    dropout_rate: float = 0.0
    attention_dropout_rate: float = 0.0
    epsilon: float = 1e-5
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling | None = None
    readout_scale: float = 1.0
    branch_scale: float = 1.0
    attention_scale: float | None = None
    scan: bool = False
    remat: str = "none"
    remat_layers: int | None = None
    dtype: Any = jnp.float32

    @property
    def each_head(self) -> int:
        """Width of a head."""
        return self.head_width or self.width // self.num_heads

    @property
    def score_scale(self) -> float:
        """Factor of the attention scores."""
        plain = self.each_head**-0.5
        return plain if self.attention_scale is None else self.attention_scale

    @nn.compact
    def __call__(self, inputs: Mapping[str, Any], train: bool) -> dict[str, Any]:
        """Predict each token's successor.

        Args:
          inputs: `tokens` [batch, length] int.
          train: True applies dropout.

        Returns:
          `logits` [batch, length, vocabulary] fp32; those of a position depend on the tokens up to
          that position.
        """
        tokens = inputs["tokens"]
        length = tokens.shape[1]
        self._check(length)
        init = nn.initializers.normal(self.init_std)

        words = Embedding(self.vocab_size, self.width, init, name="word_embedding")
        x_BLD = words(tokens)
        rotation = None
        if self.positions == "learned":
            table = Embedding(self.max_length, self.width, init, name="position_embedding")
            x_BLD += table.table()[None, :length]
        else:
            rotation = rotation_of(length, self.each_head, self.rope_theta, self.rope_scaling)
        x_BLD = Dropout(self.dropout_rate)(x_BLD.astype(self.dtype), train)

        x_BLD = self._decode(x_BLD, rotation, train)
        x_BLD = _norm(self.norm, self.epsilon, self.dtype, "final_norm")(x_BLD)
        # Fewer products than of the logits.
        x_BLD = _times(x_BLD, self.readout_scale)
        if self.tied:
            return {"logits": words.decode(x_BLD, self.dtype)}
        head = Head(self.vocab_size, init, has_bias=False, name="head")
        return {"logits": head(x_BLD)}

    def _decode(self, x_BLD: jax.Array, rotation: Any, train: bool) -> jax.Array:
        branches = 2 * self.num_layers * self.branch_scale
        options = {
            "num_heads": self.num_heads,
            "num_kv_heads": self.num_kv_heads or self.num_heads,
            "head_width": self.each_head,
            "inner_width": self.inner_width or 4 * self.width,
            "norm": self.norm,
            "activation": self.activation,
            "has_bias": self.has_bias,
            "qk_norm": self.qk_norm,
            "dropout_rate": self.dropout_rate,
            "attention_dropout_rate": self.attention_dropout_rate,
            "epsilon": self.epsilon,
            "score_scale": self.score_scale,
            "branch_scale": self.branch_scale,
            "init_std": self.init_std,
            "last_std": self.init_std / math.sqrt(branches if self.residual_init else 1),
            "dtype": self.dtype,
            "train": train,
        }

        return run_layers(
            DecoderLayer,
            options,
            x_BLD,
            rotation,
            num_layers=self.num_layers,
            scan=self.scan,
            remat=self.remat,
            remat_layers=self.remat_layers,
        )

    def _check(self, length: int) -> None:
        require_choice("norm", self.norm, NORMS)
        require_choice("positions", self.positions, POSITIONS)
        require_choice("activation", self.activation, DECODER_ACTIVATIONS)
        require(self.max_length >= 1, "max_length", self.max_length, "give a number >= 1")
        check_remat(self.remat, self.remat_layers, self.scan)

        fix = f"the model takes {self.max_length} tokens; use shorter sequences or a larger maximum"
        require(length <= self.max_length, "sequence_length", length, fix, code="mismatch")
        fix = f"they do not share a width of {self.width} evenly; give a divisor of it"
        even = self.head_width is not None or self.width % self.num_heads == 0
        require(even, "num_heads", self.num_heads, fix)
        shared = self.num_kv_heads or self.num_heads
        fix = f"the {self.num_heads} heads of queries do not share them evenly; give a divisor"
        require(self.num_heads % shared == 0, "num_kv_heads", self.num_kv_heads, fix)
        fix = "rotary positions turn pairs of channels; give an even number"
        turns = self.positions != "rotary" or self.each_head % 2 == 0
        require(turns, "head_width", self.each_head, fix)


def make_decoder_lm(size: str, **options: Any) -> DecoderLM:
    """Build the decoder language model of a size; `options` are attributes of `DecoderLM`.

    Args:
      size: A key of `DECODER_SIZES`: "0.5m", "1m", "4m", "20m", "gpt2", "gpt2-medium",
        "gpt2-large", "gpt2-xl", "llama2-7b", "llama3-8b" or "llama3.1-8b".
      **options: Attributes of `DecoderLM` that differ from the size's.

    Raises:
      UserError: For another size.

    >>> make_decoder_lm("llama3-8b").num_kv_heads
    8
    """
    require_choice("size", size, DECODER_SIZES)
    found = DECODER_SIZES[size]
    shape = {field.name: getattr(found, field.name) for field in dataclasses.fields(found)}
    return DecoderLM(**{**shape, **options})


def plain_factor(module: DecoderLM, name: str) -> float:
    """Return the factor by which a parameter is multiplied in a network without scales.

    That network has the same logits and `readout_scale` = `branch_scale` = 1, and its attention
    scores are scaled by 1 / sqrt(head_width).

    Args:
      module: The network.
      name: Path of the parameter.

    >>> plain_factor(DecoderLM(branch_scale=0.5), "layer0/output/kernel")
    0.5
    """
    query = r"query_norm/" if module.qk_norm else r"query/"
    factors = {
        r"final_norm/": module.readout_scale,
        r"(attention_output|output)/": module.branch_scale,
        query: module.score_scale * module.each_head**0.5,
    }
    found = (factor for place, factor in factors.items() if re.search(f"(^|/){place}", name))
    return next(found, 1.0)


class DecoderLayer(nn.Module):
    """Causal self-attention and a feed-forward layer, each after a norm and added to its input.

    The attributes are those of `DecoderLM`; `score_scale` is the factor of the attention scores and
    `last_std` the standard deviation of the initial values of each branch's last matrix, `init_std`
    that of the others. `train` is an attribute, as in BERT's layer.
    """

    num_heads: int
    num_kv_heads: int
    head_width: int
    inner_width: int
    norm: str
    activation: str
    has_bias: bool
    qk_norm: bool
    dropout_rate: float
    attention_dropout_rate: float
    epsilon: float
    score_scale: float
    branch_scale: float
    init_std: float
    last_std: float
    dtype: Any
    train: bool

    @nn.compact
    def __call__(self, x_BLD: jax.Array, rotation: Any) -> tuple[jax.Array, None]:
        """Map [B, L, D] to the same shape; the second result is for `nn.scan`."""
        width = x_BLD.shape[-1]
        last = nn.initializers.normal(self.last_std)

        y = _norm(self.norm, self.epsilon, self.dtype, "attention_norm")(x_BLD)
        context_BHKL = self._attend(y, rotation)
        join = HeadJoin(width, self.dtype, last, self.has_bias, name="attention_output")
        y = checkpoint_name(join(context_BHKL), "attention_output")
        x_BLD = x_BLD + Dropout(self.dropout_rate)(_times(y, self.branch_scale), self.train)

        y = _norm(self.norm, self.epsilon, self.dtype, "inner_norm")(x_BLD)
        inner_BLF = checkpoint_name(self._dense(self.inner_width, "inner")(y), "inner")
        if self.activation == GATED:
            gate_BLF = checkpoint_name(self._dense(self.inner_width, "gate")(y), "inner")
            inner_BLF = swish(gate_BLF) * inner_BLF
        else:
            inner_BLF = UNGATED[self.activation](inner_BLF)
        y = checkpoint_name(self._dense(width, "output", self.last_std)(inner_BLF), "output")
        return x_BLD + Dropout(self.dropout_rate)(_times(y, self.branch_scale), self.train), None

    def _attend(self, x_BLD: jax.Array, rotation: Any) -> jax.Array:
        """Map [B, L, D] to the context of every head, [B, H, K, L]."""
        batch, length, _ = x_BLD.shape
        init = nn.initializers.normal(self.init_std)

        def project(name: str, heads: int) -> jax.Array:
            shape = (heads, self.head_width)
            dense = HeadProjection(shape, self.dtype, init, self.has_bias, name=name)
            return checkpoint_name(dense(x_BLD), "qkv")

        def turned(name: str, heads: int) -> jax.Array:
            y_BHKL = project(name, heads)
            if self.qk_norm:
                options = {"reduction_axes": 2, "feature_axes": 2, "name": f"{name}_norm"}
                y_BHKL = nn.RMSNorm(self.epsilon, dtype=self.dtype, **options)(y_BHKL)
            return y_BHKL if rotation is None else rotated(y_BHKL, *rotation)

        shape = (self.num_heads, length, length)
        keep, share = Dropout(self.attention_dropout_rate, name="attention_dropout").keep(
            batch, shape, self.train
        )
        return _attention.attend_causally(
            turned("query", self.num_heads),
            turned("key", self.num_kv_heads),
            project("value", self.num_kv_heads),
            keep,
            share,
            self.score_scale,
        )

    def _dense(self, width: int, name: str, std: float | None = None) -> nn.Dense:
        init = nn.initializers.normal(self.init_std if std is None else std)
        return nn.Dense(
            width, use_bias=self.has_bias, dtype=self.dtype, kernel_init=init, name=name
        )


def rotation_of(
    length: int, head_width: int, theta: float, scaling: RopeScaling | None
) -> tuple[jax.Array, jax.Array]:
    """Return cosines and sines of the angles of all positions, both fp32 [K / 2, L]."""
    turns_K = rotary_frequencies(head_width, theta, scaling).astype(np.float32)
    angles_KL = jnp.asarray(turns_K)[:, None] * jnp.arange(length, dtype=jnp.float32)[None, :]
    return jnp.cos(angles_KL), jnp.sin(angles_KL)


def rotary_frequencies(head_width: int, theta: float, scaling: RopeScaling | None) -> np.ndarray:
    """Return the angle in radians by which each pair of channels turns per position, [K / 2].

    >>> rotary_frequencies(4, 10000.0, None).tolist()
    [1.0, 0.01]

    References:
      Su et al., arXiv 2104.09864v5, section 3.2.2; see `RopeScaling`.
    """
    frequencies = theta ** (-np.arange(0, head_width, 2) / head_width)
    if scaling is None:
        return frequencies
    turns = scaling.original_max_length * frequencies / (2 * math.pi)
    between = scaling.high_freq_factor - scaling.low_freq_factor
    kept = np.clip((turns - scaling.low_freq_factor) / between, 0, 1)
    return frequencies * (kept + (1 - kept) / scaling.factor)


def rotated(x_BHKL: jax.Array, cosines_KL: jax.Array, sines_KL: jax.Array) -> jax.Array:
    """Turn channel k of a head against channel k + K / 2 by the angles of the positions."""
    first, second = jnp.split(x_BHKL.astype(jnp.promote_types(x_BHKL.dtype, jnp.float32)), 2, 2)
    cosines = cosines_KL[None, None]
    sines = sines_KL[None, None]
    turned = (first * cosines - second * sines, second * cosines + first * sines)
    return jnp.concatenate(turned, axis=2).astype(x_BHKL.dtype)


def _times(x: jax.Array, factor: float) -> jax.Array:
    return x if factor == 1.0 else x * jnp.asarray(factor, x.dtype)


def _norm(kind: str, epsilon: float, dtype: Any, name: str) -> nn.LayerNorm | nn.RMSNorm:
    make = nn.LayerNorm if kind == "layer" else nn.RMSNorm
    return make(epsilon, dtype=dtype, name=name)
