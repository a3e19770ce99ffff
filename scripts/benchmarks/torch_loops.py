"""The peer for sweeps in PyTorch: hand-written training loops of the same networks."""

import os

import numpy as np
import torch
from shapes import HEAD, INNER, LAYERS, LENGTH, VOCABULARY, WIDTH, splits
from torch import nn
from torch.nn import functional

_SCORED = 1024
"""Most examples of a split that are scored."""


class _Images(nn.Module):
    """Put the channels of [batch, height, width, channels] first, as PyTorch's convolutions do."""

    def forward(self, x):
        return x.permute(0, 3, 1, 2)


class _Layer(nn.Module):
    """A pre-norm layer with rotary positions and SwiGLU."""

    def __init__(self):
        super().__init__()
        self.norms = nn.ModuleList(nn.RMSNorm(WIDTH, 1e-5) for _ in range(2))
        self.attend = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.join = nn.Linear(WIDTH, WIDTH, bias=False)
        self.enter = nn.Linear(WIDTH, 2 * INNER, bias=False)
        self.leave = nn.Linear(INNER, WIDTH, bias=False)

    def forward(self, x, cos, sin):
        batch, length, _ = x.shape
        heads = self.attend(self.norms[0](x)).view(batch, length, 3, -1, HEAD)
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        query, key = (
            one * cos + torch.cat((-one[..., HEAD // 2 :], one[..., : HEAD // 2]), -1) * sin
            for one in (query, key)
        )
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.join(mixed.transpose(1, 2).reshape(batch, length, WIDTH))
        gate, up = self.enter(self.norms[1](x)).chunk(2, -1)
        return x + self.leave(functional.silu(gate) * up)


class _LanguageModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(_Layer() for _ in range(LAYERS))
        self.norm = nn.RMSNorm(WIDTH, 1e-5)
        turns = 10_000.0 ** (-torch.arange(0, HEAD, 2) / HEAD)
        angles = torch.outer(torch.arange(LENGTH), torch.cat((turns, turns)))
        self.register_buffer("cos", angles.cos())
        self.register_buffer("sin", angles.sin())

    def forward(self, tokens):
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x, self.cos, self.sin)
        logits = functional.linear(self.norm(x), self.embed.weight)
        return logits.flatten(0, 1)


def _make(model: str) -> nn.Module:
    if model == "lm":
        return _LanguageModel()
    if model == "mlp":
        return nn.Sequential(nn.Flatten(), nn.Linear(784, 128), nn.ReLU(), nn.Linear(128, 10))
    # A quarter of Shallue's Simple CNN.
    convolutions = [
        part
        for size in ((1, 8), (8, 16))
        for part in (nn.Conv2d(*size, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2))
    ]
    dense = (nn.Linear(16 * 49, 256), nn.ReLU(), nn.Dropout(0.4), nn.Linear(256, 10))
    return nn.Sequential(_Images(), *convolutions, nn.Flatten(), *dense)


class TorchLoop:
    """A training loop with momentum, and losses at its end, as a study computes them.

    They are those of the validation and test splits, and of some training examples.

    Args:
      model: "cnn", "mlp" or "lm".
      batch_size: Examples per step.
      steps: Optimizer steps of a trial.
    """

    def __init__(self, model: str, batch_size: int, steps: int):
        torch.set_num_threads(os.cpu_count() or 1)
        self.model = model
        self.batch_size = batch_size
        self.steps = steps
        self.data = {
            name: tuple(torch.from_numpy(np.ascontiguousarray(array)).clone() for array in pair)
            for name, pair in splits(model).items()
        }

    def trial(self, learning_rate: float, seed: int) -> float:
        """Train once; return the validation loss."""
        torch.manual_seed(seed)
        rng = np.random.default_rng(seed)
        network = _make(self.model)
        optimizer = torch.optim.SGD(network.parameters(), learning_rate, 0.9)
        inputs, targets = self.data["train"]
        epochs = -(-self.steps * self.batch_size // len(inputs))
        order = torch.from_numpy(
            np.concatenate([rng.permutation(len(inputs)) for _ in range(epochs)])
        )

        for number in range(self.steps):
            picked = order[number * self.batch_size : (number + 1) * self.batch_size]
            for group in optimizer.param_groups:
                group["lr"] = learning_rate * (1 - number / self.steps)
            loss = self._loss(network, inputs[picked], targets[picked])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

        network.eval()
        with torch.no_grad():
            found = {name: self._evaluated(network, name) for name in self.data}
        return found["validation"]

    def _evaluated(self, network: nn.Module, split: str) -> float:
        inputs, targets = (array[:_SCORED] for array in self.data[split])
        losses = [
            float(self._loss(network, inputs[first : first + 256], targets[first : first + 256]))
            for first in range(0, len(inputs), 256)
        ]
        return sum(losses) / len(losses)

    def _loss(self, network: nn.Module, inputs: torch.Tensor, targets: torch.Tensor):
        if self.model == "lm":
            inputs = inputs.long()
        return functional.cross_entropy(network(inputs), targets.long().flatten())
