"""Networks of `transformers` with nontrivial random weights; nothing is downloaded."""

import os

os.environ["HF_HUB_OFFLINE"] = "1"

import jax
import numpy as np
import torch
import transformers
from safetensors.torch import save_file as save_file

from lbopt.interchange import _names

transformers.utils.logging.set_verbosity_error()
transformers.utils.logging.disable_progress_bar()
torch.set_num_threads(1)


def randomized(model, seed=0):
    """Randomize all weights, norm scales and biases, and switch to evaluation mode.

    The frequencies of rotary positions stay.
    """
    torch.manual_seed(seed)
    with torch.no_grad():
        for name, value in [*model.named_parameters(), *model.named_buffers()]:
            if not value.is_floating_point() or name.endswith("inv_freq"):
                continue
            if "embeddings." in name and value.ndim == 2:
                value.normal_(0, 0.3)
            elif value.ndim >= 2:
                value.normal_(0, (1.5 / value[0].numel()) ** 0.5)
            elif value.ndim == 1 and name.endswith("weight"):
                value.uniform_(0.5, 1.5)
            elif value.ndim == 1:
                value.normal_(0, 0.2)
    return model.eval()


def calibrated(model, side):
    """Set running statistics to those of random images, so that signals keep their size."""
    layers = [layer for layer in model.modules() if isinstance(layer, torch.nn.BatchNorm2d)]
    before = [layer.momentum for layer in layers]
    for layer in layers:
        layer.momentum = 1.0
    model.train()
    classify(model, images(side, 4 if side < 100 else 1, model.config.num_channels))
    for layer, momentum in zip(layers, before, strict=True):
        layer.momentum = momentum
        layer.running_mean += 0.2 * torch.randn_like(layer.running_mean) * layer.running_var.sqrt()
        layer.running_var *= 0.5 + 1.5 * torch.rand_like(layer.running_var)
    return model.eval()


def resnet(num_labels=7, **config):
    config = transformers.ResNetConfig(num_labels=num_labels, **config)
    return calibrated(randomized(transformers.ResNetForImageClassification(config)), 64)


def efficientnet(side=64, num_labels=7, **config):
    # Both are off: elementwise dropout and drop-connect there, whole examples here (as in the
    # paper).
    config = transformers.EfficientNetConfig(
        num_labels=num_labels, dropout_rate=0.0, drop_connect_rate=0.0, **config
    )
    return calibrated(randomized(transformers.EfficientNetForImageClassification(config)), side)


def bert(kind, **config):
    # With a padding token, PyTorch differentiates that token's embedding through the decoder only.
    config = {"pad_token_id": None, **config}
    config = transformers.BertConfig(
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, **config
    )
    return randomized(kind(config))


def count(model):
    return sum(parameter.numel() for parameter in model.parameters())


def images(side, batch=2, channels=3):
    return np.random.default_rng(side).normal(size=(batch, side, side, channels)).astype(np.float32)


def classify(model, x):
    """Return logits of images [batch, height, width, channels]."""
    with torch.no_grad():
        return model(torch.tensor(x.transpose(0, 3, 1, 2), dtype=model.dtype)).logits.numpy()


def unbiased(module):
    """Return a PyTorch network whose running statistics move by our momentum, 0.1 or 0.01."""
    for layer in module.modules():
        if isinstance(layer, torch.nn.BatchNorm2d):
            layer.momentum = (
                0.1 if isinstance(module, transformers.ResNetForImageClassification) else 0.01
            )
    return module


def randomized_variables(module, *inputs, seed=0):
    """Randomize our variables in the same manner."""
    rng = np.random.default_rng(seed)

    def draw(name, leaf):
        if name.endswith("/var"):
            return rng.uniform(0.5, 2.0, leaf.shape).astype(np.float32)
        if name.endswith("/scale"):
            return rng.uniform(0.5, 1.5, leaf.shape).astype(np.float32)
        stacked = 1 if "layers/" in name else 0
        spread = (1.5 / np.prod(leaf.shape[stacked:-1])) ** 0.5 if name.endswith("/kernel") else 0.3
        return (spread * rng.normal(size=leaf.shape)).astype(np.float32)

    shapes = jax.eval_shape(lambda: module.init(jax.random.key(0), *inputs, train=False))
    return _names.unflatten(
        {name: draw(name, leaf) for name, leaf in _names.flatten(shapes).items()}
    )


def spread(logits):
    """Return the logits' standard deviation over examples: their dependence on the input."""
    return float(np.std(logits, axis=0).mean())
