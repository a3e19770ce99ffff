"""`lbopt suggest`: what is measured, and what is made of it."""

import flax.linen as nn
import numpy as np
import pytest
from refusal import refused

import lbopt
from lbopt.cli import _suggest, main
from lbopt.sweep import FinishedTrial


def trial(rate, warmup, loss, diverged=False):
    numbers = dict.fromkeys(("train_accuracy", "validation_accuracy", "test_accuracy"), 0.5)
    factors = {"learning_rate_factor": 1.0, "warmup_factor": 1.0, "weight_decay_factor": 1.0}
    return FinishedTrial(
        arm="a",
        phase="search",
        global_batch_size=8,
        fidelity=1.0,
        steps=100,
        warmup_steps=warmup,
        learning_rate=rate,
        seed=0,
        validation_loss=loss,
        diverged=diverged,
        **numbers,
        **factors,
    )


def test_of_trials_that_do_alike_the_shortest_warmup_is_taken():
    trials = [trial(1.0, 30, 0.2), trial(0.5, 10, 0.201), trial(0.5, 0, 0.3)]
    assert _suggest._best(trials) is trials[1]
    with refused("schedule.base_learning_rate"):
        _suggest._best([trial(1.0, 0, None, diverged=True)])


@pytest.mark.parametrize(
    ("noise", "largest"), [(10, 64), (42, 64), (43, 128), (1000, 2048), (1e9, 5000)]
)
def test_the_largest_batch_is_the_last_whose_doubling_saved_a_fifth_of_the_steps(noise, largest):
    assert _suggest._largest_batch(noise, 64, 5000) == largest
    if 64 < largest < 5000:  # steps at batch B are 1 + noise / B times the fewest
        saved = [(1 + noise / (2 * size)) / (1 + noise / size) for size in (largest // 2, largest)]
        assert saved[0] <= 0.8 < saved[1]


class Net(nn.Module):
    outputs: int

    @nn.compact
    def __call__(self, x):
        return nn.Dense(self.outputs)(x)


def test_the_numbers_are_those_of_the_best_trial_at_the_asked_batch(tmp_path):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(400, 4)).astype(np.float32)
    label = (x @ [1.0, -1.0, 0.5, 0.0] + rng.normal(size=400) > 0).astype(int)
    problem = lbopt.Problem({"x": x, "label": label}, Net)
    found = lbopt.suggest(
        problem, base_batch_size=32, global_batch_size=128, steps=45, num_epochs=9
    )

    assert len(found.trials) == 15
    losses = {(rate, warmup): loss for rate, warmup, loss in found.trials}
    warmup = found.base_warmup_epochs * 320 / 32  # 80 % of the examples train
    near = [loss for (rate, _), loss in losses.items() if rate == found.base_learning_rate]
    assert min(near) <= 1.01 * min(loss for loss in losses.values() if loss is not None)
    assert found.asked.learning_rate == pytest.approx(2 * found.base_learning_rate)
    assert found.asked.total_steps == 23
    assert found.asked.warmup_steps == round(warmup)
    rates = [rate for rate, _ in found.range_test]
    assert rates[0] == pytest.approx(1e-6)
    assert found.noise_scale is None or found.noise_scale > 0
    assert all(flag in str(found) for flag in found.flags)


@pytest.mark.parametrize(
    ("flag", "field"), [("--steps=3", "steps"), ("--batch=0", "--batch"), ("--batch=x", "--batch")]
)
def test_wrong_flags_are_refused_before_anything_is_measured(flag, field, capsys):
    assert main(["suggest", "--config=configs/digits_cnn.py", flag]) == 2
    printed = capsys.readouterr().err
    assert field in printed
    assert printed.count("\n") == 1
