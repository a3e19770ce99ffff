"""Activations over the width: flat where numbers are transferred, and not without."""

import flax.linen as nn
import numpy as np
import pytest
from refusal import refused

import lbopt
from lbopt.config import Arm, DataConfig, ModelConfig, OptimizerConfig, SweepConfig, TrainConfig

WIDTHS = (64, 256, 1024)


def mlps(base):
    return {
        width: lbopt.Problem("digits", ModelConfig("mlp", (width, width), base_widths=base))
        for width in WIDTHS
    }


def berts(base):
    return {
        64 * heads: lbopt.Problem(
            "pydoc_mlm",
            ModelConfig(
                "bert",
                size="tiny",
                base_size=base,
                width_coefficient=heads / 2,
                max_length=64,
                dropout_rate=0.0,
                attention_dropout_rate=0.0,
            ),
        )
        for heads in (2, 4, 8)
    }


def decoders(base):
    """Return decoders of the width of "1m" and of half of it, and one of twice it."""
    fields = {"size": "1m", "base_size": base, "max_length": 32, "depth_coefficient": 0.5}
    data = DataConfig("pydoc_lm", sequence_length=32, vocab_size=256)
    return {
        128 * wide: lbopt.Problem(data, ModelConfig("decoder_lm", width_coefficient=wide, **fields))
        for wide in (0.5, 1.0, 2.0)
    }


CASES = {"mlp": (mlps, (64, 64), (), 0.01, 64), "bert": (berts, "tiny", "", 0.003, 8)}
CASES["decoder"] = (decoders, "1m", "", 0.001, 2)


@pytest.mark.everyday("mlp")
@pytest.mark.parametrize("name", CASES)
def test_steps_have_the_same_size_at_every_width(name):
    make, base, none, rate, size = CASES[name]
    checks = [
        lbopt.coordinate_check(make(each), "adamw", rate, global_batch_size=size)
        for each in (base, none)
    ]
    with_transfer, without = (check.slopes() for check in checks)
    # Two logits of eight examples say little about their size, and nor does what they are made of.
    last = {
        layer: slopes[-1]
        for layer, slopes in with_transfer.items()
        if "next_sentence" not in layer and "pooler" not in layer
    }
    assert max(last.values()) < 0.15, last
    # The logits of a decoder fall with the width before the first step, and recover slowly.
    last.pop("output/logits", None)
    assert min(last.values()) > -0.15, last
    assert max(slopes[-1] for slopes in without.values()) > 0.7


def test_gradients_are_clipped_at_every_stage():
    """On one device and without microsteps all stages are one."""

    def logits(**clip):
        optimizer = OptimizerConfig("adam", **clip)
        problems = {
            width: lbopt.Problem("digits", ModelConfig("mlp", (width,))) for width in (4, 8)
        }
        check = lbopt.coordinate_check(problems, optimizer, 0.1, global_batch_size=8, num_steps=1)
        return check.sizes["head"]

    clipped = {
        stage: logits(max_grad_norm=1e-8, clip_stage=stage)
        for stage in ("accumulated", "mean", "replica")
    }
    np.testing.assert_allclose(clipped["mean"], clipped["accumulated"], rtol=1e-5)
    np.testing.assert_allclose(clipped["replica"], clipped["accumulated"], rtol=1e-5)
    assert not np.allclose(clipped["accumulated"], logits(), rtol=0.1)


def test_the_figure_has_a_panel_for_each_step_and_a_line_for_each_layer():
    check = lbopt.coordinate_check({8: mlps(())[64], 16: mlps(())[256]}, "adam", 0.01, num_steps=1)
    panels = check.figure(["Dense_0", "head"]).axes
    assert [len(panel.lines) for panel in panels] == [2, 2]
    assert check._repr_png_().startswith(b"\x89PNG")


def test_what_cannot_be_checked_is_refused():
    with refused("problems", 1):
        lbopt.coordinate_check({64: mlps(())[64]})
    with refused("model.base_widths", (64, 64), "conflict"):
        lbopt.coordinate_check(mlps((64, 64)), "lamb")
    with refused("global_batch_size", 5000, "mismatch"):
        lbopt.coordinate_check(mlps(()), global_batch_size=5000)
    own = lbopt.Problem("digits", nn.Sequential([lambda x: x.reshape(len(x), -1), nn.Dense(10)]))
    with refused("problems[1]", own, "type"):
        lbopt.coordinate_check({1: own, 2: own})


def test_the_arms_of_a_study_bring_the_optimizer_that_follows_the_width():
    train = TrainConfig(data="digits", model=ModelConfig("mlp", (128,), base_widths=(64,)))
    fields = {"train": train, "global_batch_sizes": (64,)}
    SweepConfig(arms=(Arm("Adam", "adam", 0.01),), **fields).validate()
    with refused("config.train.model.base_widths", (64,), "conflict"):
        SweepConfig(arms=(Arm("LAMB", "lamb", 0.01),), **fields).validate()


def test_an_optimizer_without_a_rule_for_the_width_is_refused():
    with refused("config.model.base_widths", (64, 64), "conflict"):
        TrainConfig(
            data="digits",
            model=ModelConfig("mlp", (128, 128), base_widths=(64, 64)),
            optimizer="lamb",
        ).validate()
    with refused("config.model.width_coefficient", 0.25):
        TrainConfig(
            data="pydoc_mlm", model=ModelConfig("bert", size="tiny", width_coefficient=0.25)
        ).validate()
    with refused("config.model.base_widths", (64,), "mismatch"):
        TrainConfig(
            data="digits",
            model=ModelConfig("mlp", (128, 128), base_widths=(64,)),
            optimizer="adam",
        ).validate()
