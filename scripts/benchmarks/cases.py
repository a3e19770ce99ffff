"""The steps that `bench_models` compiles: ours and plain, as functions of the mesh."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
import plain_models

import lbopt
from lbopt import losses
from lbopt.models import from_linen, make_bert, make_efficientnet, make_resnet
from lbopt.parallel import TrainState

Build = Callable[[Any], tuple[Any, Any, Any]]
"""Maps a mesh to (step, shapes of the state, shapes of the batch)."""


@dataclasses.dataclass
class StepCase:
    """One network at one batch on one pod.

    Attributes:
      name: Name of the case in the table.
      topology: The pod, as in "v3:16x32".
      flops: Floating-point operations of a step on one core: multiplications and additions of
        matrix products and convolutions, three times those of the forward pass.
      ours: Builds lbopt's step.
      plain: Builds the peer's step; None if the case has no peer.
      most_ms: Upper limit of the time of lbopt's step, in milliseconds.
      least_utilisation: Lower limit of its FLOP utilisation, in percent.
      breakdown: Whether to print the time by module and operation.
      loops: Whether the step has a loop over layers. The compiler counts a loop's body once, so
        only memory and compile time are stated.
    """

    name: str
    topology: str
    flops: float
    ours: Build
    plain: Build | None = None
    most_ms: float | None = None
    least_utilisation: float | None = None
    breakdown: bool = False
    loops: bool = False


def _images(batch: int, side: int, channels: int = 3) -> dict:
    image = jax.ShapeDtypeStruct((batch, side, side, channels), jnp.bfloat16)
    return {"image": image, "label": jax.ShapeDtypeStruct((batch,), jnp.int32)}


def _text(batch: int, length: int, masked: int) -> dict:
    shapes = dict.fromkeys(("input_ids", "token_type_ids", "attention_mask"), (batch, length))
    shapes |= dict.fromkeys(("masked_positions", "masked_labels"), (batch, masked)) | {
        "next_sentence_label": (batch,)
    }
    return {name: jax.ShapeDtypeStruct(shape, jnp.int32) for name, shape in shapes.items()}


def _classification(outputs, batch):
    return jnp.mean(losses.softmax_cross_entropy(outputs, batch["label"], 0.1))


def _pretraining(outputs, batch):
    words, sentences = outputs.values() if isinstance(outputs, dict) else outputs
    word_loss = losses.softmax_cross_entropy(words, batch["masked_labels"])
    return jnp.mean(word_loss) + jnp.mean(
        losses.softmax_cross_entropy(sentences, batch["next_sentence_label"])
    )


def _step(network, batch: dict, loss, tx, shard_update: bool = False) -> Build:
    model = from_linen(network)
    inputs = (lambda batch: batch) if loss is _pretraining else (lambda batch: batch["image"])

    def loss_fn(params, model_state, batch, rng):
        outputs, new_state = model.apply(params, model_state, inputs(batch), train=True, rng=rng)
        return loss(outputs, batch), (new_state, {})

    def build(mesh):
        example = jax.tree.map(
            lambda leaf: jnp.zeros((1, *leaf.shape[1:]), leaf.dtype), inputs(batch)
        )
        state = jax.eval_shape(
            lambda: TrainState.create(*model.init(jax.random.key(0), example), tx, 0)
        )
        step = lbopt.make_train_step(
            loss_fn, tx, mesh, key_per_replica=False, shard_update=shard_update
        )
        return step, state, batch

    return build


def _resnet(network, side: int, channels: int, tx, **options) -> Build:
    return _step(network, _images(32768, side, channels), _classification, tx, **options)


def _bert(network, batch: int, length: int, masked: int, tx, **options) -> Build:
    return _step(network, _text(batch, length, masked), _pretraining, tx, **options)


def _bert_flops(sequences: int, length: int, masked: int) -> float:
    """Return the FLOPs of a step of BERT-Large: layers, decoder and pooler.

    A layer has 12 width^2 multiplications per token, and 2 length * width more in attention.
    """
    width = 1024
    tokens = sequences * length
    layers = 24 * tokens * (12 * width**2 + 2 * length * width)
    heads = sequences * masked * (width**2 + 30522 * width) + sequences * width**2
    return 3 * 2 * (layers + heads)


_BF16 = jnp.bfloat16
_LARS = lbopt.lars(0.1, weight_decay=1e-4)
_PLAIN_LARS = optax.lars(0.1, weight_decay=1e-4)
_LAMB = lbopt.lamb(1e-3, weight_decay=0.01)
_PLAIN_LAMB = optax.lamb(1e-3, weight_decay=0.01)
_STACKED_LAMB = lbopt.lamb(1e-3, weight_decay=0.01, stacked=lbopt.stacked_paths("^layers/"))
_RESNET = make_resnet("50", stem="space_to_depth", fold_columns=True, dtype=_BF16)
_RESNET_FLOPS = 3 * 2 * 4.089e9 * 32
_B5_FLOPS = 3 * 2 * 9.9e9 * 64
_B5 = {"dtype": _BF16, "dropout_rate": 0.0, "stochastic_depth_rate": 0.0}
_NO_DROPOUT = {
    "dropout_rate": 0.0,
    "attention_dropout_rate": 0.0,
    "activation": "gelu_tanh",
    "dtype": _BF16,
}
_DROPOUT = {"activation": "gelu_tanh", "dtype": _BF16}

CASES = [
    StepCase(
        "ResNet-50, batch 32768",
        "v3:16x32",
        _RESNET_FLOPS,
        _resnet(_RESNET, 112, 12, _LARS),
        _resnet(plain_models.ResNet50(), 224, 3, _PLAIN_LARS),
        least_utilisation=38,
        breakdown=True,
    ),
    StepCase(
        "ResNet-50, batch 32768, sharded update",
        "v3:16x32",
        _RESNET_FLOPS,
        _resnet(_RESNET, 112, 12, _LARS, shard_update=True),
        least_utilisation=38,
    ),
    StepCase(
        "ResNet-50, batch 32768, convolutions and ReLUs alone",
        "v3:16x32",
        _RESNET_FLOPS,
        _resnet(plain_models.BareResNet50(), 112, 12, optax.sgd(0.1)),
    ),
    StepCase(
        "EfficientNet-B5, batch 65536",
        "v3:16x32",
        _B5_FLOPS,
        _step(
            make_efficientnet("b5", fold_examples=8, **_B5),
            _images(65536, 456),
            _classification,
            _LARS,
        ),
        _step(
            plain_models.EfficientNet(1.6, 2.2), _images(65536, 456), _classification, _PLAIN_LARS
        ),
        most_ms=600,
        breakdown=True,
    ),
    StepCase(
        "EfficientNet-B5, batch 65536, convolutions alone",
        "v3:16x32",
        _B5_FLOPS,
        _step(
            plain_models.BareEfficientNet(1.6, 2.2),
            _images(65536, 456),
            _classification,
            optax.sgd(0.1),
        ),
    ),
    StepCase(
        "BERT-Large, batch 65536 x 128, no dropout",
        "v3:32x32",
        _bert_flops(32, 128, 20),
        _bert(make_bert("large", **_NO_DROPOUT), 65536, 128, 20, _LAMB),
        _bert(plain_models.BertLarge(dropout=0.0), 65536, 128, 20, _PLAIN_LAMB),
        least_utilisation=62,
        breakdown=True,
    ),
    StepCase(
        "BERT-Large, batch 65536 x 128, no dropout, sharded update",
        "v3:32x32",
        _bert_flops(32, 128, 20),
        _bert(make_bert("large", **_NO_DROPOUT), 65536, 128, 20, _LAMB, shard_update=True),
        least_utilisation=62,
        breakdown=True,
    ),
    StepCase(
        "BERT-Large, batch 65536 x 128, no dropout, one layer in a loop",
        "v3:32x32",
        _bert_flops(32, 128, 20),
        _bert(make_bert("large", scan=True, **_NO_DROPOUT), 65536, 128, 20, _STACKED_LAMB),
        loops=True,
    ),
    StepCase(
        "BERT-Large, batch 65536 x 128",
        "v3:32x32",
        _bert_flops(32, 128, 20),
        _bert(make_bert("large", **_DROPOUT), 65536, 128, 20, _LAMB),
        _bert(plain_models.BertLarge(), 65536, 128, 20, _PLAIN_LAMB),
    ),
    StepCase(
        "BERT-Large, batch 65536 x 128, sharded update",
        "v3:32x32",
        _bert_flops(32, 128, 20),
        _bert(make_bert("large", **_DROPOUT), 65536, 128, 20, _LAMB, shard_update=True),
    ),
    StepCase(
        "BERT-Large, batch 32768 x 512",
        "v3:32x32",
        _bert_flops(16, 512, 80),
        _bert(make_bert("large", **_DROPOUT), 32768, 512, 80, _LAMB),
        _bert(plain_models.BertLarge(remat=True), 32768, 512, 80, _PLAIN_LAMB),
    ),
    StepCase(
        "BERT-Large, batch 32768 x 512, sharded update",
        "v3:32x32",
        _bert_flops(16, 512, 80),
        _bert(make_bert("large", **_DROPOUT), 32768, 512, 80, _LAMB, shard_update=True),
    ),
]
