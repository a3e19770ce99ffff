"""A running trial: steps of its probes and evaluations, its end, and its row."""

import numpy as np
import pytest
from refusal import refused
from tiny_study import make_config

from lbopt.config import MeasureConfig
from lbopt.sweep import make_cells, make_problems
from lbopt.sweep._running_trial import RunningTrial
from lbopt.sweep.search import Factors, Proposal


def make_trial(phase="final", fidelity=1.0, **changes):
    train = {
        name: changes.pop(name) for name in list(changes) if hasattr(make_config().train, name)
    }
    config = make_config(**changes)
    for name, value in train.items():
        setattr(config.train, name, value)
    cells = make_cells(config, make_problems(config))
    (cell,) = (cell for cell in cells if (cell.arm.name, cell.global_batch_size) == ("lamb", 128))
    return RunningTrial(
        config, cell, cell.trial(phase, Proposal(Factors(1.0, 1.0, 1.0), fidelity), 7)
    )


def walk(trial):
    """Visit all stops and return their steps."""
    stops = []
    while not trial.ended:
        count = trial.steps_to_next_stop
        trial.extend(
            np.full(count, 2.0, np.float32),
            np.arange(trial.done + 1, trial.done + count + 1, dtype=np.float32),
        )
        stops.append(trial.done)
        if trial.wants_evaluation:
            trial.evaluated({"loss": 1.0, "accuracy": trial.done / 24})
        if trial.wants_probe:
            trial.probed(
                {
                    "noise_trace": 8.0 * trial.done,
                    "gradient_square_norm": 2.0,
                    "phi_layers/a/b": 0.5,
                }
            )
    return stops


def scores(loss=1.0):
    return {split: {"loss": loss, "accuracy": 0.5} for split in ("train", "validation", "test")}


def test_nothing_to_look_at_is_one_stop():
    assert walk(make_trial("search")) == [24]
    assert walk(make_trial("search", fidelity=0.5)) == [12]


def test_only_final_trials_are_probed_at_log_spaced_steps():
    measure = MeasureConfig(num_probes=4, probe_parts=2, probe_part_size=8)
    assert walk(make_trial(measure=measure)) == [1, 3, 8, 24]
    assert walk(make_trial("search", measure=measure)) == [24]


def test_a_target_is_looked_for_at_every_evaluation():
    target = {"target_metric": "eval/accuracy", "target_value": 0.6, "eval_every_epochs": 0.75}
    trial = make_trial(**target)
    assert walk(trial) == [6, 12, 18, 24]
    row = trial.record(scores())
    assert (row["steps_to_target"], row["examples_to_target"]) == (18, 18 * 128)
    assert row["evaluations"]["step"] == [6, 12, 18, 24]


def test_a_target_may_end_the_trial():
    target = {
        "target_metric": "eval/accuracy",
        "target_value": 0.5,
        "stop_at_target": True,
        "eval_every_steps": 10,
    }
    trial = make_trial(**target)
    assert walk(trial) == [10, 20]
    row = trial.record(scores())
    assert (row["steps"], row["steps_run"], row["examples_seen"], row["steps_to_target"]) == (
        24,
        20,
        20 * 128,
        20,
    )


def test_a_target_that_is_not_reached_is_reported():
    trial = make_trial(target_metric="eval/loss", target_value=0.5, eval_every_steps=50)
    assert walk(trial) == [24]
    row = trial.record(scores())
    assert (row["steps_to_target"], row["examples_to_target"]) == (None, None)
    assert "steps_to_target" not in make_finished().record(scores())


def make_finished(**changes):
    trial = make_trial(**changes)
    walk(trial)
    return trial


def test_divergence_ends_a_trial_at_its_step():
    """Later steps of its batched program do not count."""
    trial = make_trial()
    losses = np.array([2.0, 2.1, np.inf, np.nan, 1.0], np.float32)
    trial.extend(losses, np.arange(5, dtype=np.float32))
    assert trial.ended
    assert trial.done == 3
    row = trial.record(scores(float("nan")))
    assert (row["diverged"], row["divergence_step"], row["steps_run"]) == (True, 3, 3)
    assert (row["validation_loss"], row["last_epoch_loss"]) == (None, None)
    assert row["curve"]["train_loss"] == [2.0, pytest.approx(2.1), None]


def test_nothing_is_a_score_of_outputs_that_are_not_numbers():
    """argmax over NaN outputs finds the first class, which is right for a tenth of the digits."""
    broken = scores() | {"train": {"loss": float("nan"), "accuracy": 0.1}}
    row = make_finished().record(broken)
    assert (row["train_loss"], row["train_accuracy"]) == (None, None)
    assert (row["validation_accuracy"], row["test_accuracy"]) == (0.5, 0.5)


def test_runs_of_one_length_keep_the_same_steps_wherever_they_end():
    """A mean over seeds is taken at each step, so all seeds must have the same steps."""
    target = {"target_metric": "eval/accuracy", "stop_at_target": True, "eval_every_steps": 10}
    curves = []
    for value in (110 / 24, 200 / 24, 999.0):
        trial = make_trial(num_steps=300, target_value=value, **target)
        walk(trial)
        curves.append(trial.record(scores())["curve"])
    assert [curve["step"][-1] for curve in curves] == [110, 200, 300]
    whole = curves[-1]["step"]
    assert len(whole) == 64
    for curve in curves[:-1]:
        *others, last = curve["step"]
        assert others == [step for step in whole if step < last]
        assert curve["distance"] == curve["step"]  # the planted distance is t
        assert len(curve["train_loss"]) == len(curve["step"])


def test_a_last_update_that_breaks_the_network_is_divergence_too():
    row = make_finished().record(scores(float("inf")))
    assert (row["diverged"], row["divergence_step"]) == (True, None)


def test_the_noise_scale_is_the_median_over_the_probed_steps():
    measure = MeasureConfig(num_probes=4, probe_parts=2, probe_part_size=8)
    row = make_finished(measure=measure).record(scores())
    assert row["noise_scale"] == pytest.approx(
        np.median([8.0 * step / 2.0 for step in (1, 3, 8, 24)])
    )
    assert row["probes"]["step"] == [1, 3, 8, 24]
    assert row["probes"]["phi_layers"] == {"a/b": [0.5] * 4}


def test_distances_are_fitted_from_the_end_of_warmup_on():
    row = make_finished().record(scores())
    assert row["diffusion"]["from_step"] == row["warmup_steps"] == 2
    assert row["diffusion"]["to_step"] == 24
    assert row["diffusion"]["power"]["exponent"] == pytest.approx(
        1.0, abs=1e-6
    )  # the planted distance is t
    assert row["distance"] == 24


def test_nothing_is_said_of_distances_that_are_not_measured():
    row = make_finished(measure=MeasureConfig(distance=False)).record(scores())
    assert row["distance"] is None
    assert "diffusion" not in row
    assert "distance" not in row["curve"]


def test_the_record_of_a_trial_names_its_metric_and_has_its_scores():
    row = make_finished().record(scores())
    assert (row["metric"], row["trivial_loss"]) == ("accuracy", pytest.approx(np.log(10)))
    found = {split: {**one, "hits": 0.25} for split, one in scores().items()}
    row = make_finished(metric="eval/loss").record(found)
    assert (row["metric"], row["test_loss"], row["test_accuracy"]) == ("loss", 1.0, 0.5)
    assert "test_hits" not in row
    trial = make_trial()
    trial._metric = "hits"
    walk(trial)
    assert trial.record(found)["test_hits"] == 0.25


def test_an_accuracy_that_is_no_share_is_refused_before_it_is_written():
    """The line could not be read again."""
    trial = make_finished()
    with refused("loss.name", ""):
        trial.record(scores() | {"test": {"loss": 1.0, "accuracy": 97.0}})
