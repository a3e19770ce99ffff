"""The shapes of BERT's parameters, layers unrolled or stacked, without a model."""

import math

import jax
import jax.numpy as jnp


def bert(num_layers: int, dim: int, vocab_size: int = 30_522, stacked: bool = False) -> dict:
    """Return the shapes of BERT with its two pretraining heads, fp32, as `jax.ShapeDtypeStruct`s.

    Args:
      num_layers: Number of layers: 12 (Base) or 24 (Large).
      dim: Width: 768 (Base) or 1024 (Large).
      vocab_size: Number of rows of the word embedding.
      stacked: Whether one tree `layers` replaces the tree of each layer; its leaves have a leading
        axis of layers.
    """

    def leaf(*shape):
        return jax.ShapeDtypeStruct(shape, jnp.float32)

    def norm():
        return {"scale": leaf(dim), "bias": leaf(dim)}

    def dense(inputs, outputs):
        return {"kernel": leaf(inputs, outputs), "bias": leaf(outputs)}

    layer = {
        **{name: dense(dim, dim) for name in ("query", "key", "value", "attention_output")},
        "intermediate": dense(dim, 4 * dim),
        "output": dense(4 * dim, dim),
        "attention_layer_norm": norm(),
        "layer_norm": norm(),
    }
    tables = {"word": vocab_size, "position": 512, "type": 2}
    tree = {
        "embeddings": {
            **{name: {"embedding": leaf(size, dim)} for name, size in tables.items()},
            "layer_norm": norm(),
        },
        "pooler": dense(dim, dim),
        "masked_lm": {
            **dense(dim, dim),
            "layer_norm": norm(),
            "output": {"bias": leaf(vocab_size)},
        },
        "next_sentence": dense(dim, 2),
    }
    if stacked:
        return {**tree, "layers": jax.tree.map(lambda x: leaf(num_layers, *x.shape), layer)}
    return {**tree, **{f"layer_{number}": layer for number in range(num_layers)}}


def size_of(tree: dict) -> int:
    """Return the number of parameters."""
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(tree))
