"""Random data of the shapes of Fashion-MNIST and of a text; values do not change the speed."""

import numpy as np

IMAGES = {"train": 10_000, "validation": 1_000, "test": 1_000}
WINDOWS = {"train": 1_024, "validation": 64, "test": 64}
"""Number of examples in each split."""
VOCABULARY = 2_048
LENGTH = 128
LAYERS = 4
WIDTH = 128
INNER = 384
HEAD = 32
"""Shape of the language model, that of the size "1m" of `lbopt.models.DecoderLM`."""


def load_images() -> tuple[dict[str, np.ndarray], ...]:
    """Return the images and classes of the three splits."""
    return tuple({"image": x, "label": y} for x, y in splits("cnn").values())


def load_text() -> tuple[dict[str, np.ndarray], ...]:
    """Return the windows of the three splits, each with the token after its end."""
    pairs = splits("lm").values()
    return tuple({"tokens": np.concatenate((x, y[:, -1:]), 1)} for x, y in pairs)


def multiplications(model: str) -> float:
    """Return the multiplications of a forward pass on an example, in matrices alone."""
    if model == "lm":
        layer = 4 * WIDTH**2 + 3 * WIDTH * INNER + LENGTH * WIDTH  # of causal attention the half
        return LENGTH * (LAYERS * layer + WIDTH * VOCABULARY)
    if model == "mlp":
        return 784 * 128 + 128 * 10
    return 784 * 25 * 8 + 196 * 200 * 16 + 784 * 256 + 256 * 10


def splits(model: str) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Return inputs and targets of each split: images and classes, or tokens and next tokens."""
    rng = np.random.default_rng(0)
    if model == "lm":
        texts = {
            name: rng.integers(0, VOCABULARY, (count, LENGTH + 1), np.int32)
            for name, count in WINDOWS.items()
        }
        return {name: (text[:, :-1], text[:, 1:]) for name, text in texts.items()}
    return {
        name: (
            rng.random((count, 28, 28, 1), np.float32),
            rng.integers(0, 10, count, np.int32),
        )
        for name, count in IMAGES.items()
    }
