"""Parameter counts of the published networks, computed from the papers' tables; no arrays."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers
from refusal import refused

from lbopt.models import (
    EFFICIENTNET_SIZES,
    LSTMClassifier,
    from_linen,
    make_bert,
    make_decoder_lm,
    make_efficientnet,
    make_lstm_language_model,
    make_resnet,
)


def count(module, inputs):
    """Return the number of parameters and of batch statistics."""
    params, state = jax.eval_shape(from_linen(module).init, jax.random.key(0), inputs)
    assert {leaf.dtype for leaf in jax.tree.leaves((params, state))} == {jnp.dtype(jnp.float32)}
    return tuple(sum(leaf.size for leaf in jax.tree.leaves(tree)) for tree in (params, state))


def conv(size, inputs, outputs):
    """Count a convolution's kernel and its batch norm's scale and bias."""
    return size * size * inputs * outputs + 2 * outputs


# He et al., arXiv 1512.03385v1, Table 1; torchvision has the same counts.
RESNETS = {
    "18": ((2, 2, 2, 2), 1, 11689512),
    "34": ((3, 4, 6, 3), 1, 21797672),
    "50": ((3, 4, 6, 3), 4, 25557032),
    "101": ((3, 4, 23, 3), 4, 44549160),
    "152": ((3, 8, 36, 3), 4, 60192808),
}


def resnet_count(depths, expansion, num_classes=1000):
    total = conv(7, 3, 64)
    inputs = 64
    for stage, depth in enumerate(depths):
        inside = 64 * 2**stage
        outputs = inside * expansion
        for block in range(depth):
            if expansion == 4:
                total += (
                    conv(1, inputs, inside) + conv(3, inside, inside) + conv(1, inside, outputs)
                )
            else:
                total += conv(3, inputs, inside) + conv(3, inside, inside)
            if block == 0 and inputs != outputs:
                total += conv(1, inputs, outputs)
            inputs = outputs
    return total + (inputs + 1) * num_classes


@pytest.mark.everyday("18-*", "50-*", "152-conv7")
@pytest.mark.parametrize("stem", ["conv7", "space_to_depth"])
@pytest.mark.parametrize("size", RESNETS)
def test_resnet(size, stem):
    depths, expansion, published = RESNETS[size]
    assert resnet_count(depths, expansion) == published
    params, _ = count(make_resnet(size, stem=stem), jnp.zeros((1, 64, 64, 3)))
    assert params == published


def test_resnet_layers():
    """The network's number counts convolutions, without shortcuts, and the head.

    Every convolution has a batch norm.
    """
    for size in RESNETS:
        module = make_resnet(size)
        shapes = jax.eval_shape(
            from_linen(module).init, jax.random.key(0), jnp.zeros((1, 32, 32, 3))
        )[0]
        kernels = [
            jax.tree_util.keystr(path)
            for path, _ in jax.tree_util.tree_leaves_with_path(shapes)
            if path[-1].key == "kernel"
        ]
        assert sum("shortcut" not in name for name in kernels) == int(size)
        expected = 3 if not module.bottleneck else 4
        assert sum("shortcut" in name for name in kernels) == expected


# Tan and Le, arXiv 1905.11946v5, Table 1 (B0): kernel, expansion, output channels, blocks; widths
# and depths by section 3.3 and tensorflow/tpu's efficientnet_builder.py. Counts are those of
# keras.applications without the input's normalisation.
TABLE = [
    (3, 1, 16, 1),
    (3, 6, 24, 2),
    (5, 6, 40, 2),
    (3, 6, 80, 3),
    (5, 6, 112, 3),
    (5, 6, 192, 4),
    (3, 6, 320, 1),
]
EFFICIENTNETS = {
    "b0": (10, 10, 5288548),
    "b1": (10, 11, 7794184),
    "b2": (11, 12, 9109994),
    "b3": (12, 14, 12233232),
    "b4": (14, 18, 19341616),
    "b5": (16, 22, 30389784),
    "b6": (18, 26, 43040704),
    "b7": (20, 31, 66347960),
}
IMAGES = {"b0": 224, "b1": 240, "b2": 260, "b3": 300, "b4": 380, "b5": 456, "b6": 528, "b7": 600}


def widened(channels, tenths):
    """Round channels x tenths / 10 to a multiple of 8, half up.

    If that loses more than a tenth, use the next multiple.
    """
    exact = channels * tenths  # in tenths of a channel
    eights = (exact + 40) // 80
    return 8 * max(1, eights + (10 * 80 * eights < 9 * exact))


def efficientnet_count(width, depth, num_classes=1000):
    inputs = widened(32, width)
    total = conv(3, 3, inputs)
    for kernel, expansion, channels, blocks in TABLE:
        outputs = widened(channels, width)
        for _ in range(-(-blocks * depth // 10)):
            inside = inputs * expansion
            squeezed = inputs // 4
            total += conv(1, inputs, inside) if expansion > 1 else 0
            total += kernel**2 * inside + 2 * inside
            total += inside * squeezed + squeezed + squeezed * inside + inside
            total += conv(1, inside, outputs)
            inputs = outputs
    head = widened(1280, width)
    return total + conv(1, inputs, head) + (head + 1) * num_classes


@pytest.mark.everyday("b0", "b1")
@pytest.mark.parametrize("size", EFFICIENTNETS)
def test_efficientnet(size):
    width, depth, published = EFFICIENTNETS[size]
    assert efficientnet_count(width, depth) == published
    params, _ = count(make_efficientnet(size), jnp.zeros((1, 32, 32, 3)))
    assert params == published
    assert EFFICIENTNET_SIZES[size].image_size == IMAGES[size]


BERTS = {"base": (12, 768, 12, 110106428), "large": (24, 1024, 16, 336226108)}


@pytest.mark.everyday("base-False", "large-True")
@pytest.mark.parametrize("scan", [False, True])
@pytest.mark.parametrize("size", BERTS)
def test_bert_for_pretraining(size, scan):
    """Devlin et al., arXiv 1810.04805v2, section 3; embeddings and decoder are tied."""
    layers, width, heads, published = BERTS[size]
    dense = lambda inputs, outputs: (inputs + 1) * outputs  # noqa: E731
    embeddings = (30522 + 512 + 2) * width + 2 * width
    layer = 4 * dense(width, width) + dense(width, 4 * width) + dense(4 * width, width) + 4 * width
    pretraining = dense(width, width) + 2 * width + 30522
    next_sentence = dense(width, width) + dense(width, 2)
    assert embeddings + layers * layer + pretraining + next_sentence == published
    module = make_bert(size, scan=scan)
    assert count(module, {"input_ids": jnp.zeros((1, 8), jnp.int32)}) == (published, 0)
    assert module.num_heads == heads
    answering = make_bert(size, scan=scan, head="question_answering")
    params, _ = count(answering, {"input_ids": jnp.zeros((1, 8), jnp.int32)})
    assert params == embeddings + layers * layer + dense(width, 2)


# Width, layers, heads, heads of keys, inner width, tokens, and the counts that go round.
DECODERS = {
    "gpt2": (768, 12, 12, 12, 3072, 50257, 124_439_808),
    "gpt2-medium": (1024, 24, 16, 16, 4096, 50257, 354_823_168),
    "gpt2-large": (1280, 36, 20, 20, 5120, 50257, 774_030_080),
    "gpt2-xl": (1600, 48, 25, 25, 6400, 50257, 1_557_611_200),
    "llama2-7b": (4096, 32, 32, 32, 11008, 32000, 6_738_415_616),
    "llama3-8b": (4096, 32, 32, 8, 14336, 128256, 8_030_261_248),
    "llama3.1-8b": (4096, 32, 32, 8, 14336, 128256, 8_030_261_248),
    "0.5m": (96, 3, 3, 3, 256, 2048, 529_056),
    "1m": (128, 4, 4, 4, 384, 2048, 1_115_264),
    "4m": (256, 4, 8, 8, 768, 2048, 3_934_464),
    "20m": (512, 6, 16, 16, 1408, 2048, 20_322_816),
}


@pytest.mark.everyday("gpt2", "llama3-8b", "1m")
@pytest.mark.parametrize("size", DECODERS)
def test_decoders(size):
    """`transformers` counts the same, on its device without arrays."""
    width, layers, heads, shared, inner, tokens, published = DECODERS[size]
    each = {"vocab_size": tokens}
    if size.startswith("gpt2"):
        shape = {"n_embd": width, "n_layer": layers, "n_head": heads, "n_inner": inner}
        config = transformers.GPT2Config(**each, **shape)
        kind = transformers.GPT2LMHeadModel
    else:
        shape = {
            "hidden_size": width,
            "num_hidden_layers": layers,
            "num_attention_heads": heads,
            "num_key_value_heads": shared,
            "intermediate_size": inner,
            "tie_word_embeddings": not size.startswith("llama"),
        }
        config = transformers.LlamaConfig(**each, **shape)
        kind = transformers.LlamaForCausalLM

    with torch.device("meta"):
        theirs = sum(leaf.numel() for leaf in kind(config).parameters())

    module = make_decoder_lm(size, vocab_size=tokens, scan=True)
    assert count(module, {"tokens": jnp.zeros((1, 2), jnp.int32)}) == (theirs, 0)
    assert theirs == published
    assert module.num_heads == heads
    # The standard deviation of their configs, and arXiv 1910.05895's for ours.
    ours = size.endswith("m")
    assert module.init_std == ((2 / (5 * width)) ** 0.5 if ours else config.initializer_range)


@pytest.mark.parametrize(
    ("size", "hidden", "millions"),
    [("small", 200, 4.65), ("medium", 650, 19.78), ("large", 1500, 66.02)],
)
def test_lstm_language_model(size, hidden, millions):
    """Two layers of four gates each.

    Zaremba et al., arXiv 1409.2329v5, give 66 M for the large model; Gal and Ghahramani give 20 M
    for the medium one.
    """
    expected = 10000 * hidden + 2 * 4 * hidden * (2 * hidden + 1) + (hidden + 1) * 10000
    assert expected / 1e6 == pytest.approx(millions, abs=0.01)
    module = make_lstm_language_model(size)
    assert count(module, {"tokens": jnp.zeros((1, 2), jnp.int32)}) == (expected, 0)
    assert module.num_layers == 2


def test_the_lstm_of_legw():
    """MNIST row by row, as in You et al., arXiv 1901.08256v1: four gates and the head.

    Each gate has 28 + 128 inputs and a bias.
    """
    expected = 4 * 128 * (28 + 128 + 1) + (128 + 1) * 10
    assert count(LSTMClassifier(hidden=128), jnp.zeros((1, 28, 28))) == (expected, 0)


@pytest.mark.parametrize(
    ("make", "listed"),
    [
        (make_resnet, "101, 152, 18, 34, 50"),
        (make_efficientnet, "b0, b1"),
        (make_bert, "base, large, tiny"),
        (make_decoder_lm, "gpt2, gpt2-large"),
        (make_lstm_language_model, "large, medium, small"),
    ],
)
def test_unknown_sizes_are_refused(make, listed):
    with refused("size", "20", "choice") as caught:
        make("20")
    assert listed in caught.value.reason


def test_options_override_the_published_shape():
    assert make_resnet("50", num_classes=7, dtype=jnp.bfloat16).num_classes == 7
    assert make_efficientnet("b3", dropout_rate=0.1).dropout_rate == 0.1
    assert make_lstm_language_model("medium", dropout_rate=0.0).init_scale == 0.05
    assert np.isclose(make_efficientnet("b3").dropout_rate, 0.3)
