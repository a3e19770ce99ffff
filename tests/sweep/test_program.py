"""A trial in a shared program is the trial run alone, and the run `lbopt train` makes."""

import jax
import numpy as np
import pytest

from lbopt.config import TrainConfig
from lbopt.recipes import build
from lbopt.sweep import program

TOLERANCE = 2e-4  # of the movement ||w_T - w_0|| after 24 steps: other programs round differently, training amplifies


def flat(tree):
    return np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(tree)])


@pytest.fixture(scope="module")
def lamb_cell(cells):
    return next(cell for cell in cells if (cell.arm.name, cell.global_batch_size) == ("lamb", 128))


@pytest.fixture(scope="module")
def some(lamb_cell, config):
    return lamb_cell.search_trials(config)[1:] + lamb_cell.final_trials(config, 1.0)[:1]


@pytest.fixture(scope="module")
def trained_alone(lamb_cell, some, config):
    """Run each trial as `lbopt train` would: the same config through recipes.build, step by step."""
    outcomes = []
    for trial in some:
        schedule = lamb_cell.arm.schedule
        factor = trial.learning_rate / lamb_cell.resolved.learning_rate
        train = TrainConfig(
            seed=trial.seed,
            global_batch_size=lamb_cell.global_batch_size,
            num_epochs=config.train.num_epochs,
            model=config.train.model,
            optimizer=lamb_cell.arm.optimizer,
            schedule=type(schedule)(**{**vars(schedule), "base_learning_rate": schedule.base_learning_rate * factor}),
        )
        train.parallel.num_devices = 1
        run = build.build(train)
        state = run.init()
        start, losses = flat(state.params), []
        for step in range(run.num_steps):
            state, metrics = run.train_step(state, run.batches[step])
            losses.append(float(metrics["loss"][0] / metrics["loss"][1]))
        outcomes.append((start, state, losses))
    return outcomes


@pytest.mark.parametrize("batching", ["map", "vmap"])
def test_trials_in_one_program_equal_runs_of_their_own(batching, lamb_cell, some, trained_alone, config, problem):
    study = type(config)(**{**vars(config), "trial_batching": batching, "trials_per_program": 3})
    outcome = program.compile_cell(problem, lamb_cell, study)(some)
    assert outcome.losses.shape == (3, 24)
    for index, (start, state, losses) in enumerate(trained_alone):
        movement = np.linalg.norm(flat(state.params) - start)
        together = flat(jax.tree.map(lambda x, index=index: x[index], outcome.params))
        assert np.linalg.norm(together - flat(state.params)) <= TOLERANCE * movement
        np.testing.assert_allclose(outcome.losses[index], losses, rtol=1e-3)
    different = flat(jax.tree.map(lambda x: x[1], outcome.params)) - flat(jax.tree.map(lambda x: x[0], outcome.params))
    assert np.linalg.norm(different) > 100 * TOLERANCE * movement  # the check can tell trials apart


def test_a_short_call_is_filled_up_and_changes_nothing(lamb_cell, some, config, problem):
    study = type(config)(**{**vars(config), "trials_per_program": 3})
    run = program.compile_cell(problem, lamb_cell, study)
    whole, part = run(some), run(some[:1])
    assert np.array_equal(flat(part.params), flat(jax.tree.map(lambda x: x[:1], whole.params)))
    assert len(part.losses) == 1


def test_scores_equal_numpy(problem, lamb_cell, some, config):
    study = type(config)(**{**vars(config), "trials_per_program": 3})
    outcome = program.compile_cell(problem, lamb_cell, study)(some)
    dataset = problem.splits.test
    scores = program.make_scorer(problem, dataset)(outcome.params, outcome.model_state)
    for index, score in enumerate(scores):
        variables = jax.tree.map(lambda x, index=index: x[index], (outcome.params, outcome.model_state))
        each = [
            problem.metric_fn(*variables, {**dataset.take(np.array([i])), "mask": np.array([True])}) for i in range(9)
        ]
        first = program.make_scorer(problem, type(dataset)(dataset.take(np.arange(9))))(
            *jax.tree.map(lambda x: x[None], variables)
        )[0]
        assert first["accuracy"] == pytest.approx(np.mean([float(one["accuracy"][0]) for one in each]))
        assert first["loss"] == pytest.approx(np.mean([float(one["loss"][0]) for one in each]), rel=1e-5)
        assert 0 <= score["accuracy"] <= 1
