"""BERT with its pre-training heads or a question-answering head."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from lbopt import types
from lbopt.errors import UserError, require, require_choice
from lbopt.models import _attention
from lbopt.models._activation import gelu, gelu_tanh
from lbopt.models._layers import check_remat, run_layers
from lbopt.models._projections import BERT_INIT, Embedding, HeadJoin, HeadProjection
from lbopt.models._randomness import Dropout

# Shape suffixes: B batch, L length, D width, F inner width, H heads, K width of a head, P masked
# positions, V vocabulary.

HEADS = ("pretraining", "question_answering")
ACTIVATIONS = {"gelu": gelu, "gelu_tanh": gelu_tanh, "relu": nn.relu}


@dataclasses.dataclass(frozen=True)
class BertSize:
    """The published shape of a network.

    Attributes:
      num_layers: L in the paper.
      width: H in the paper.
      num_heads: A in the paper.
    """

    num_layers: int
    width: int
    num_heads: int


BERT_SIZES = {
    "tiny": BertSize(2, 128, 2),
    "base": BertSize(12, 768, 12),
    "large": BertSize(24, 1024, 16),
}
"""Published sizes.

Base and large: Devlin et al., arXiv 1810.04805v2, section 3; tiny: Turc et al., arXiv 1908.08962v2.
"""


class Bert(nn.Module):
    """A post-norm Transformer encoder over word, position and segment embeddings.

    Kernels and embeddings start from normal(0, 0.02) truncated at two standard deviations, as in
    google-research/bert@eedf5716ce1268e56f0a50264a88cafad334ac61:modeling.py; biases start at
    zero and norm scales at one.

    Attributes:
      vocab_size: Number of tokens; the word embedding is also the decoder's weight.
      num_layers: Number of encoder layers.
      width: Width of a token's vector.
      num_heads: Number of attention heads; must divide `width`.
      inner_width: Width of the feed-forward layer; None for 4 x width.
      max_length: Number of positions, the longest sequence; at least 1.
      num_segments: Number of token types.
      head: "pretraining" (masked tokens and next sentence) or "question_answering" (start and end
        of the answer).
      dropout_rate: Dropout rate of embeddings and of every sublayer's output.
      attention_dropout_rate: Dropout rate of attention probabilities.
      activation: "gelu" (exact), "gelu_tanh" or "relu".
      epsilon: Number added to the variance in layer norms.
      scan: True compiles one layer and loops over it; the parameters of all layers are stacked
        [layers, ...] under `layers`.
      remat: Arrays that the backward pass recomputes: "none"; "attention" (probabilities and
        elementwise results, and of the matmuls only scores); "dots" (elementwise results); "inner"
        (as "attention", and the inner feed-forward layer); "layer" (whole layers).
      remat_layers: Number of layers to which `remat` applies, from the first; None for all. Must be
        None with `scan`.
      readout_scale: Factor of what the decoder makes of the word embedding, 1 / m for a network
        that takes the numbers of one an m-th as wide (see `lbopt.transfer_table`).
      dtype: Dtype of matmuls and of activations between layers; parameters, softmax, norms and
        logits are fp32.

    >>> import jax, jax.numpy as jnp
    >>> model = Bert(vocab_size=100, num_layers=1, width=16, num_heads=2)
    >>> inputs = {"input_ids": jnp.zeros((2, 8), int)}
    >>> logits, _ = jax.eval_shape(
    ...     lambda: model.init_with_output(jax.random.key(0), inputs, train=False)
    ... )
    >>> logits["prediction_logits"].shape, logits["next_sentence_logits"].shape
    ((2, 8, 100), (2, 2))
    """

    vocab_size: int = 30522
    num_layers: int = 12
    width: int = 768
    num_heads: int = 12
    inner_width: int | None = None
    max_length: int = 512
    num_segments: int = 2
    head: str = "pretraining"
    dropout_rate: float = 0.1
    attention_dropout_rate: float = 0.1
    activation: str = "gelu"
    epsilon: float = 1e-12
    scan: bool = False
    remat: str = "none"
    remat_layers: int | None = None
    readout_scale: float = 1.0
    dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, inputs: Mapping[str, jax.Array], train: bool) -> dict[str, jax.Array]:
        """Encode a batch and apply the head.

        Args:
          inputs: `input_ids` [B, L] int; optionally `token_type_ids` [B, L] int (default 0),
            `attention_mask` [B, L] (1 for tokens, 0 for padding; default 1) and, for the
            pre-training head, `masked_positions` [B, P] int.
          train: True applies dropout.

        Returns:
          fp32 logits. Of the pre-training head: `prediction_logits` [B, P, V], or [B, L, V] without
          `masked_positions`, and `next_sentence_logits` [B, 2]. Of the question-answering head:
          `start_logits` and `end_logits` [B, L].
        """
        self._check(inputs)
        ids = inputs["input_ids"]

        words = Embedding(self.vocab_size, self.width, name="word_embedding")
        x_BLD = self._embed(words, inputs, train)
        mask = inputs.get("attention_mask")
        x_BLD = self._encode(
            x_BLD, jnp.ones(ids.shape, bool) if mask is None else mask.astype(bool), train
        )

        if self.head == "question_answering":
            span = _dense(2, jnp.float32, "span")(x_BLD)
            return {"start_logits": span[..., 0], "end_logits": span[..., 1]}
        return {
            "prediction_logits": self._predict(words, x_BLD, inputs.get("masked_positions")),
            "next_sentence_logits": self._next_sentence(x_BLD),
        }

    def _embed(self, words: Embedding, inputs: Mapping[str, jax.Array], train: bool) -> jax.Array:
        ids = inputs["input_ids"]
        segments = inputs.get("token_type_ids", jnp.zeros_like(ids))
        positions = Embedding(self.max_length, self.width, name="position_embedding")
        x_BLD = words(ids) + positions.table()[None, : ids.shape[1]]
        x_BLD = x_BLD + Embedding(self.num_segments, self.width, name="segment_embedding")(segments)
        return Dropout(self.dropout_rate)(
            _norm(self.epsilon, self.dtype, "embedding_norm")(x_BLD), train
        )

    def _encode(self, x_BLD: jax.Array, mask_BL: jax.Array, train: bool) -> jax.Array:
        options = {
            "num_heads": self.num_heads,
            "inner_width": self.inner_width or 4 * self.width,
            "dropout_rate": self.dropout_rate,
            "attention_dropout_rate": self.attention_dropout_rate,
            "activation": self.activation,
            "epsilon": self.epsilon,
            "dtype": self.dtype,
            "train": train,
        }
        return run_layers(
            Layer,
            options,
            x_BLD,
            mask_BL,
            num_layers=self.num_layers,
            scan=self.scan,
            remat=self.remat,
            remat_layers=self.remat_layers,
        )

    def _predict(
        self, words: Embedding, x_BLD: jax.Array, positions_BP: jax.Array | None
    ) -> jax.Array:
        if positions_BP is not None:
            x_BLD = jnp.take_along_axis(x_BLD, positions_BP[..., None], axis=1)
        y = ACTIVATIONS[self.activation](_dense(self.width, self.dtype, "prediction_dense")(x_BLD))
        y = _norm(self.epsilon, self.dtype, "prediction_norm")(y)
        bias = self.param(
            "prediction_bias", nn.initializers.zeros_init(), (self.vocab_size,), jnp.float32
        )
        decoded = words.decode(y, self.dtype)
        if self.readout_scale != 1.0:
            decoded *= self.readout_scale
        return decoded + jax.lax.broadcast_to_rank(bias, decoded.ndim)

    def _next_sentence(self, x_BLD: jax.Array) -> jax.Array:
        pooled = jnp.tanh(_dense(self.width, self.dtype, "pooler")(x_BLD[:, 0]).astype(jnp.float32))
        return _dense(2, jnp.float32, "next_sentence")(pooled)

    def _check(self, inputs: Mapping[str, jax.Array]) -> None:
        require_choice("head", self.head, HEADS)
        check_bert(self.max_length, self.activation, self.remat, self.remat_layers, self.scan)
        length = inputs["input_ids"].shape[1]
        if length > self.max_length:
            fix = (
                f"the model has {self.max_length} positions; use shorter sequences or more "
                "positions"
            )
            raise UserError("sequence_length", length, fix, code="mismatch")
        fix = f"they do not share a width of {self.width} evenly; give a divisor of it"
        require(self.width % self.num_heads == 0, "num_heads", self.num_heads, fix)


def check_bert(
    max_length: int,
    activation: str,
    remat: str,
    remat_layers: int | None,
    scan: bool = False,
) -> None:
    """Raise `UserError` for attributes that no `Bert` has."""
    require(max_length >= 1, "max_length", max_length, "give a number >= 1")
    require_choice("activation", activation, ACTIVATIONS)
    check_remat(remat, remat_layers, scan)


def make_bert(size: str, **options: Any) -> Bert:
    """Build the network of a published size; `options` are attributes of `Bert`.

    Args:
      size: "tiny", "base" or "large".
      **options: Attributes of `Bert` that differ from its defaults.

    Raises:
      UserError: If `size` is not a published size.

    >>> make_bert("large").num_layers
    24
    """
    require_choice("size", size, BERT_SIZES)
    return Bert(**{**dataclasses.asdict(BERT_SIZES[size]), **options})


class Layer(nn.Module):
    """Self-attention and a feed-forward layer, each followed by dropout, a residual sum and a norm.

    The attributes are those of `Bert`. `train` is an attribute rather than an argument of the call,
    so that `nn.remat` and `nn.scan` trace only arrays.
    """

    num_heads: int
    inner_width: int
    dropout_rate: float
    attention_dropout_rate: float
    activation: str
    epsilon: float
    dtype: Any
    train: bool

    @nn.compact
    def __call__(self, x_BLD: jax.Array, mask_BL: jax.Array) -> tuple[jax.Array, None]:
        """Map [B, L, D] to the same shape; the second result is for `nn.scan`."""
        width = x_BLD.shape[-1]

        attended = self._attend(x_BLD, mask_BL)
        y = checkpoint_name(
            HeadJoin(width, self.dtype, name="attention_output")(attended), "attention_output"
        )
        x_BLD = _norm(self.epsilon, self.dtype, "attention_norm")(
            x_BLD + Dropout(self.dropout_rate)(y, self.train)
        )

        inner_BLF = checkpoint_name(_dense(self.inner_width, self.dtype, "inner")(x_BLD), "inner")
        y = _dense(width, self.dtype, "output")(ACTIVATIONS[self.activation](inner_BLF))
        y = checkpoint_name(y, "output")
        return _norm(self.epsilon, self.dtype, "output_norm")(
            x_BLD + Dropout(self.dropout_rate)(y, self.train)
        ), None

    def _attend(self, x_BLD: jax.Array, mask_BL: jax.Array) -> jax.Array:
        """Map [B, L, D] to the context of every head, [B, H, K, L]."""
        batch, length, width = x_BLD.shape
        heads = (batch, length, self.num_heads, width // self.num_heads)

        def project(name: str) -> jax.Array:
            return checkpoint_name(HeadProjection(heads[2:], self.dtype, name=name)(x_BLD), "qkv")

        query = project("query")
        key = project("key")
        value = project("value")
        shape = (self.num_heads, length, length)
        keep, share = Dropout(self.attention_dropout_rate, name="attention_dropout").keep(
            batch, shape, self.train
        )
        mask_BHQS = mask_BL[:, None, None, :]
        return _attention.attend(query, key, value, mask_BHQS, keep, share, heads[3] ** -0.5)


def _dense(width: int, dtype: Any, name: str) -> nn.Dense:
    return nn.Dense(width, dtype=dtype, kernel_init=BERT_INIT, name=name)


def _norm(epsilon: float, dtype: Any, name: str) -> nn.LayerNorm:
    return nn.LayerNorm(epsilon, dtype=dtype, name=name)


def stack_layers(params: types.Params) -> types.Params:
    """Turn the parameters of an unscanned network into those of a scanned one.

    The parameters under `layer0`, `layer1`, ... are stacked under `layers`: [layers, ...].

    Args:
      params: Parameters of an unscanned network, with modules `layer0`, `layer1` and so on.

    >>> import numpy as np
    >>> params = {f"layer{n}": {"output": {"bias": np.full(3, n)}} for n in range(2)}
    >>> stack_layers(params)["layers"]["output"]["bias"].shape
    (2, 3)
    """
    names = bert_layer_names(params)
    rest = {name: value for name, value in params.items() if name not in names}
    return {
        **rest,
        "layers": jax.tree.map(
            lambda *leaves: jnp.stack(leaves), *(params[name] for name in names)
        ),
    }


def bert_layer_names(params: types.Params) -> list[str]:
    """Return the names of an unscanned network's layers in order."""
    return list(itertools.takewhile(params.__contains__, map("layer{}".format, itertools.count())))


def unstack_layers(params: types.Params) -> types.Params:
    """Turn the parameters of a scanned network into those of an unscanned one.

    Args:
      params: Parameters of a scanned network, whose stacks are under `layers`.

    >>> import numpy as np
    >>> params = {"layers": {"output": {"bias": np.zeros((2, 3))}}}
    >>> unstack_layers(params)["layer1"]["output"]["bias"].shape
    (3,)
    """
    stacked = params["layers"]
    rest = {name: value for name, value in params.items() if name != "layers"}
    count = jax.tree.leaves(stacked)[0].shape[0]
    return {
        **rest,
        **{f"layer{i}": jax.tree.map(lambda leaf, i=i: leaf[i], stacked) for i in range(count)},
    }
