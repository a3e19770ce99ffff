"""Recurrent networks: a classifier that reads an image row by row, and a language model."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from lbopt.errors import require_choice
from lbopt.models._head import Head, matmul
from lbopt.models._randomness import Dropout

Carry = tuple[tuple[jax.Array, jax.Array], ...]
"""State of a language model: (cell, hidden) of each layer, both [batch, hidden] fp32."""


class LSTMClassifier(nn.Module):
    """One LSTM layer over the rows of an image, whose last state is classified.

    This is the MNIST-LSTM of the paper on linear-epoch gradual warmup (LEGW, arXiv 1901.08256v1),
    where each row is a time step. The cell and its initialisation are Flax's: LeCun-normal input
    kernels, orthogonal recurrent kernels and zero biases.

    Attributes:
      num_classes: Size of the output.
      hidden: Width of the LSTM; 128 in the paper [recalled 65%].
      dtype: Dtype of the computation; parameters are fp32.

    >>> import jax, jax.numpy as jnp
    >>> model = LSTMClassifier(num_classes=10, hidden=16)
    >>> logits, _ = jax.eval_shape(
    ...     lambda: model.init_with_output(jax.random.key(0), jnp.zeros((2, 4, 8)), train=False)
    ... )
    >>> logits.shape
    (2, 10)
    """

    num_classes: int = 10
    hidden: int = 64
    dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, images: jax.Array, train: bool) -> jax.Array:
        """Map [batch, rows, columns] to fp32 logits [batch, num_classes]."""
        del train
        rows = images.astype(self.dtype).reshape(images.shape[0], images.shape[1], -1)
        cell = nn.OptimizedLSTMCell(self.hidden, dtype=self.dtype)
        states = nn.RNN(cell, unroll=rows.shape[1])(rows)
        return Head(self.num_classes, name="Dense_0")(states[:, -1].astype(self.dtype))


@dataclasses.dataclass(frozen=True)
class LSTMSize:
    """Published shape and training settings of a language model.

    Attributes:
      hidden: Width of embedding and layers.
      dropout_rate: Dropout rate between layers.
      init_scale: Bound of the uniform initial values, which lie within plus and minus this.
      length: Number of tokens through which gradients flow.
    """

    hidden: int
    dropout_rate: float
    init_scale: float
    length: int


LSTM_SIZES = {
    "small": LSTMSize(200, 0.0, 0.1, 20),
    "medium": LSTMSize(650, 0.5, 0.05, 35),
    "large": LSTMSize(1500, 0.65, 0.04, 35),
}
"""Published sizes.

Medium and large: Zaremba et al., arXiv 1409.2329v5, section 4.1; small:
tensorflow/models@086660faed00c84086b05bee6cfa1a2c9f801712:tutorials/rnn/ptb/ptb_word_lm.py.
"""


class LSTMLanguageModel(nn.Module):
    """Embedding, LSTM layers with dropout between them, and a softmax over the vocabulary.

    As in Zaremba et al. (arXiv 1409.2329v5), dropout applies to connections between layers and
    never to those in time. LSTM biases start at zero, those of the forget gate included; all other
    parameters start uniform within plus and minus `init_scale`.

    Attributes:
      vocab_size: Number of tokens.
      hidden: Width of embedding and layers.
      num_layers: Number of stacked LSTM layers.
      dropout_rate: Dropout rate of each layer's input and of the last layer's output.
      init_scale: Bound of the uniform initial values.
      dtype: Dtype of matmuls; gates, parameters and logits are fp32.

    >>> import jax, jax.numpy as jnp
    >>> model = LSTMLanguageModel(vocab_size=100, hidden=16)
    >>> tokens = {"tokens": jnp.zeros((2, 5), int)}
    >>> found, _ = jax.eval_shape(
    ...     lambda: model.init_with_output(jax.random.key(0), tokens, train=False)
    ... )
    >>> sorted(found), found["logits"].shape
    (['carry', 'logits'], (2, 5, 100))
    """

    vocab_size: int = 10000
    hidden: int = 200
    num_layers: int = 2
    dropout_rate: float = 0.0
    init_scale: float = 0.1
    dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, inputs: Mapping[str, Any], train: bool) -> dict[str, Any]:
        """Predict each token's successor.

        Args:
          inputs: `tokens` [batch, length] int; optionally `carry`, the state after the preceding
            text (default zero).
          train: True applies dropout.

        Returns:
          `logits` [batch, length, vocabulary] fp32 and `carry`, the state after the last token.
        """
        uniform = _uniform(self.init_scale)
        tokens = inputs["tokens"]
        embedding = nn.Embed(self.vocab_size, self.hidden, embedding_init=uniform, name="embedding")
        x = embedding(tokens)

        carry: Carry | tuple[None, ...] = inputs.get("carry") or (None,) * self.num_layers
        left = []
        for number in range(self.num_layers):
            x = Dropout(self.dropout_rate)(x, train)
            layer = LSTMLayer(self.hidden, uniform, self.dtype, name=f"layer{number}")
            state, x = layer(x, carry[number])
            left.append(state)

        x = Dropout(self.dropout_rate)(x, train).astype(self.dtype)
        return {
            "logits": Head(self.vocab_size, uniform, uniform, name="head")(x),
            "carry": tuple(left),
        }


def make_lstm_language_model(size: str, **options: Any) -> LSTMLanguageModel:
    """Build the language model of a published size.

    `options` are attributes of `LSTMLanguageModel`.

    Args:
      size: "small", "medium" or "large".
      **options: Attributes of `LSTMLanguageModel` that differ from the published ones.

    Raises:
      UserError: If `size` is not a published size.

    >>> make_lstm_language_model("large").hidden
    1500
    """
    require_choice("size", size, LSTM_SIZES)
    published = dataclasses.asdict(LSTM_SIZES[size])
    del published["length"]
    return LSTMLanguageModel(**{**published, **options})


class LSTMLayer(nn.Module):
    """One LSTM layer over time.

        i, f, g, o = x W + h U + b
        c' = sigmoid(f) c + sigmoid(i) tanh(g)
        h' = sigmoid(o) tanh(c')

    The product x W is computed for all steps at once, which leaves one matmul to each step.

    Attributes:
      hidden: Width of the layer.
      init: Initializer of the kernels W [input, 4 hidden] and U [hidden, 4 hidden]; the bias b
        [4 hidden] starts at zero.
      dtype: Dtype of matmuls; gates and cell are fp32.

    References:
      Hochreiter and Schmidhuber 1997, in the form of Zaremba et al., arXiv 1409.2329v5, section
      3.1.
    """

    hidden: int
    init: Any
    dtype: Any = jnp.float32

    @nn.compact
    def __call__(
        self, x: jax.Array, state: tuple[jax.Array, jax.Array] | None = None
    ) -> tuple[tuple[jax.Array, jax.Array], jax.Array]:
        """Run the layer over a sequence.

        Args:
          x: [batch, length, input].
          state: (cell, hidden) before the first step; None for zeros.

        Returns:
          The state after the last step, and the hidden states of all steps, fp32
          [batch, length, hidden].
        """
        kernel = self.param("kernel", self.init, (x.shape[-1], 4 * self.hidden), jnp.float32)
        recurrent = self.param(
            "recurrent_kernel", self.init, (self.hidden, 4 * self.hidden), jnp.float32
        )
        bias = self.param("bias", nn.initializers.zeros_init(), (4 * self.hidden,), jnp.float32)
        zeros = jnp.zeros((x.shape[0], self.hidden), jnp.float32)
        start = (zeros, zeros) if state is None else state

        # The inputs of all steps in one large product: in the loop only the recurrent one is left.
        projected = matmul(x.astype(self.dtype), kernel) + bias[None, None, :]

        def step(
            state: tuple[jax.Array, jax.Array], gates: jax.Array
        ) -> tuple[tuple[jax.Array, jax.Array], jax.Array]:
            cell, hidden = state
            gates = gates + matmul(hidden.astype(self.dtype), recurrent)
            enter, forget, candidate, leave = jnp.split(gates, 4, axis=-1)
            cell = nn.sigmoid(forget) * cell + nn.sigmoid(enter) * jnp.tanh(candidate)
            hidden = nn.sigmoid(leave) * jnp.tanh(cell)
            return (cell, hidden), hidden

        end, outputs = jax.lax.scan(step, start, projected.swapaxes(0, 1))
        return end, outputs.swapaxes(0, 1)


def _uniform(scale: float) -> Any:
    def init(key: jax.Array, shape: Any, dtype: Any = jnp.float32) -> jax.Array:
        return jax.random.uniform(key, shape, dtype, -scale, scale)

    return init
