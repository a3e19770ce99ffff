"""Layouts that suit a TPU are chosen there alone, and a run may change its kind of device."""

import copy
import json
import pathlib

import pytest

from lbopt.cli import call_get_config
from lbopt.cli._train import comparison
from lbopt.config import config_to_json
from lbopt.recipes import with_layout

CONFIGS = pathlib.Path(__file__).parents[2] / "configs"
RESNET = "resnet50_lamb.py:you-32768"
B5 = "efficientnet.py:b5-lars-65536"
CNN = "digits_cnn.py"
PLAIN = ("conv7", False, None, False)
FOLDED = ("space_to_depth", True, None, True)


def load(name, **changes):
    config = copy.deepcopy(call_get_config(str(CONFIGS / name)))
    for path, value in changes.items():
        group, _, field = path.partition("__")
        setattr(getattr(config, group) if field else config, field or group, value)
    return config


def layout(config):
    model = config.model
    return model.stem, model.fold_columns, model.fold_examples, config.data.space_to_depth


@pytest.mark.parametrize(
    ("name", "changes", "platform", "devices", "chosen"),
    [
        (RESNET, {}, "tpu", 1024, FOLDED),
        (RESNET, {}, "gpu", 8, PLAIN),
        (RESNET, {}, "cpu", None, PLAIN),
        # The host cannot fold an odd number of pixels, nor crops that it does not resize.
        (RESNET, {"data__image_size": 225}, "tpu", 1024, ("conv7", True, None, False)),
        (RESNET, {"data__train_crop": "padded"}, "tpu", 1024, ("conv7", True, None, None)),
        # What the user says stays.
        (RESNET, {"model__stem": "conv7"}, "tpu", 1024, ("conv7", True, None, False)),
        (RESNET, {"model__fold_columns": True}, "gpu", 8, ("conv7", True, None, False)),
        (RESNET, {"data__space_to_depth": True}, "gpu", 8, ("space_to_depth", False, None, True)),
        (B5, {}, "tpu", 1024, ("auto", None, 8, False)),
        (B5, {}, "tpu", 2048, ("auto", None, 1, False)),
        (B5, {}, "gpu", 1024, ("auto", None, 1, False)),
        (B5, {}, "tpu", None, ("auto", None, 1, False)),
        (B5, {"parallel__num_microsteps": 2}, "tpu", 1024, ("auto", None, 1, False)),
        (B5, {"model__batch_norm_scope": "examples:4"}, "tpu", 1024, ("auto", None, 1, False)),
        (B5, {"model__fold_examples": 2}, "gpu", 8, ("auto", None, 2, False)),
        (CNN, {}, "tpu", 8, ("auto", None, None, None)),
    ],
)
def test_what_suits_the_devices_is_chosen(name, changes, platform, devices, chosen):
    assert layout(with_layout(load(name, **changes), platform, devices)) == chosen


@pytest.mark.parametrize("name", [CNN, "fashion_mnist.py"])
@pytest.mark.parametrize(
    ("said", "platform", "by_patches"),
    [(None, "tpu", False), (None, "gpu", True), (None, "cpu", True), (True, "tpu", True)],
)
def test_small_cnns_have_convolutions_of_their_own_on_a_tpu(said, platform, by_patches, name):
    config = load(name, model__patch_convolutions=said)
    assert with_layout(config, platform, 8).model.patch_convolutions is by_patches


@pytest.mark.parametrize("name", [RESNET, B5, CNN])
def test_a_run_resumes_with_another_layout(name):
    """Also one of a version that had no automatic choice."""
    saved = {"config": json.loads(json.dumps(config_to_json(with_layout(load(name), "tpu", 1024))))}
    assert comparison(load(name))(saved) == []


def test_another_stem_is_another_run():
    saved = {"config": json.loads(json.dumps(config_to_json(load(RESNET))))}
    other = load(RESNET, model__stem="conv3")
    assert any("model.stem is" in line for line in comparison(other)(saved))
