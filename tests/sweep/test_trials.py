"""Which trials there are, and how the learning rate is chosen."""

import pytest

from lbopt.errors import UserError
from lbopt.sweep import trials


def row(factor, accuracy, loss=1.0, phase="search", diverged=False, **more):
    scores = {"validation_accuracy": accuracy, "validation_loss": loss}
    return {"phase": phase, "learning_rate_factor": factor, "diverged": diverged, **scores, **more}


def test_a_cell_has_every_rate_with_every_search_seed(config, cells):
    assert len(cells) == 4
    for cell in cells:
        found = [(trial.learning_rate_factor, trial.seed) for trial in cell.search_trials(config)]
        assert found == [(factor, seed) for factor in (0.5, 1.0, 2.0) for seed in (0,)]
        assert [trial.seed for trial in cell.final_trials(config, 2.0)] == [7, 8]


def test_rates_follow_the_scaling_rules(cells, config):
    rates = {(cell.arm.name, cell.global_batch_size): cell.search_trials(config)[1].learning_rate for cell in cells}
    assert rates == pytest.approx(
        {
            ("momentum", 128): 0.05 * 2,
            ("momentum", 1024): 0.05 * 16,
            ("lamb", 128): 0.02 * 2**0.5,
            ("lamb", 1024): 0.02 * 4,
        }
    )


def test_legw_warms_up_for_the_same_steps_at_every_batch(cells):
    assert {cell.resolved.warmup_steps for cell in cells if cell.arm.name == "lamb"} == {2}
    assert {cell.resolved.num_steps for cell in cells} == {24, 3}


def test_a_batch_above_the_training_set_is_refused(config):
    with pytest.raises(UserError, match=r"config.global_batch_sizes.*1000 examples"):
        trials.make_cells(config, 1000)


def test_the_best_mean_validation_accuracy_is_chosen():
    rows = [row(1.0, 0.9), row(1.0, 0.7), row(2.0, 0.85), row(2.0, 0.83)]
    assert trials.choose_factor(rows) == 2.0


def test_test_accuracy_and_final_trials_do_not_choose():
    rows = [row(1.0, 0.9, test_accuracy=0.1), row(2.0, 0.8, test_accuracy=1.0), row(4.0, 1.0, phase="final")]
    assert trials.choose_factor(rows) == 1.0


def test_ties_go_to_the_lower_loss_then_to_the_smaller_rate():
    assert trials.choose_factor([row(1.0, 0.9, loss=0.5), row(2.0, 0.9, loss=0.4)]) == 2.0
    assert trials.choose_factor([row(2.0, 0.9, loss=0.5), row(1.0, 0.9, loss=0.5)]) == 1.0


def test_a_diverged_trial_counts_as_nothing():
    rows = [row(1.0, 0.5), row(2.0, 0.99, loss=None, diverged=True), row(2.0, 0.9)]
    assert trials.choose_factor(rows) == 1.0
