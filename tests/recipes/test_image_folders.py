"""Networks of lbopt and of the user train on a folder of images."""

import jax
import numpy as np
import pytest
from PIL import Image
from refusal import refused

from lbopt import metrics
from lbopt.config import (
    ImageFolderConfig,
    ModelConfig,
    ScheduleConfig,
    TrainConfig,
    config_from_json,
    config_to_json,
)
from lbopt.recipes import build_run, make_problem

CODE = """
import flax.linen as nn

class Net(nn.Module):
    outputs: int

    @nn.compact
    def __call__(self, x):
        return nn.Dense(self.outputs)(x.reshape(len(x), -1))


class TooWide(Net):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(self.outputs + 1)(x.reshape(len(x), -1))
"""


@pytest.fixture
def stripes(tmp_path, monkeypatch):
    """Make images of horizontal and of vertical stripes."""
    rng = np.random.default_rng(0)
    for name in ("across", "down"):
        folder = tmp_path / "stripes" / name
        folder.mkdir(parents=True)
        for number in range(24):
            pixels = rng.integers(0, 60, (8, 8, 3), dtype=np.uint8)
            pixels[(slice(None, None, 2),) if name == "across" else np.s_[:, ::2]] += 120
            Image.fromarray(pixels).save(folder / f"{number}.png")
    (tmp_path / "net.py").write_text(CODE)
    monkeypatch.chdir(tmp_path)
    return ImageFolderConfig("stripes", train_crop="none", validation_fraction=0.25)


@pytest.mark.parametrize(
    "model",
    [ModelConfig("net.py:Net"), ModelConfig("cnn", widths=(4,), hidden=8)],
    ids=["own", "cnn"],
)
def test_a_network_learns_the_classes(model, stripes):
    config = TrainConfig(
        data=stripes,
        model=model,
        schedule=ScheduleConfig(0.01),
        num_steps=40,
        global_batch_size=16,
        eval_global_batch_size=8,
    )
    config.validate()
    assert config_from_json(TrainConfig, config_to_json(config)) == config
    run = build_run(config, jax.devices()[:1])
    state = run.init()
    for step in range(run.num_steps):
        state, sums = jax.block_until_ready(run.train_step(state, run.batches[step]))
    assert metrics.means([sums])["accuracy"] > 0.8
    assert run.evaluate(state)["accuracy"] > 0.8


@pytest.mark.everyday("resnet")
@pytest.mark.parametrize(
    "model",
    [
        ModelConfig("resnet", size="18", width_coefficient=0.125),
        ModelConfig("efficientnet", size="b0", width_coefficient=0.25),
    ],
    ids=["resnet", "efficientnet"],
)
def test_the_networks_for_photographs_take_them(model, stripes):
    stripes = ImageFolderConfig("stripes", image_size=32)
    problem = make_problem(stripes, model)
    assert problem.outputs == 2
    batch = problem.splits.train.draw(np.arange(2), np.zeros(2, int), 0)
    assert batch["image"].shape == (2, 32, 32, 3)


def test_a_network_whose_outputs_do_not_fit_the_classes_is_refused(stripes):
    with refused("model.name", code="mismatch"):
        make_problem(stripes, ModelConfig("net.py:TooWide"))
