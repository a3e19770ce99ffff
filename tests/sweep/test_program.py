"""A trial in a shared program is the trial run alone, and the run `lbopt train` makes."""

import re

import jax
import numpy as np
import pytest

from lbopt.config import ModelConfig, TrainConfig
from lbopt.recipes import build
from lbopt.recipes.problem import make_problem
from lbopt.sweep import program

# Of the movement ||w_T - w_0||: other programs round differently. LAMB's direction is sign-like where a gradient is all
# rounding, so its trials are compared over the 3 steps of batch 1024, momentum's over the 24 of batch 128.
TOLERANCE = 2e-5
CELLS = [("momentum", 128, 24), ("lamb", 1024, 3)]


def flat(tree):
    return np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(tree)])


def named(cells, arm, size):
    return next(cell for cell in cells if (cell.arm.name, cell.global_batch_size) == (arm, size))


def three_trials(cell, config):
    return cell.search_trials(config)[1:] + cell.final_trials(config, 1.0)[:1]


def widened(config, batching="auto"):
    return type(config)(**{**vars(config), "trial_batching": batching, "trials_per_program": 3})


@pytest.fixture(scope="module")
def lamb_cell(cells):
    return named(cells, "lamb", 1024)


@pytest.fixture(scope="module")
def some(lamb_cell, config):
    return three_trials(lamb_cell, config)


def train_alone(cell, trials, config):
    """Run each trial as `lbopt train` would: the same config through recipes.build, step by step."""
    outcomes = []
    for trial in trials:
        schedule = cell.arm.schedule
        factor = trial.learning_rate / cell.resolved.learning_rate
        train = TrainConfig(
            seed=trial.seed,
            global_batch_size=cell.global_batch_size,
            num_epochs=config.train.num_epochs,
            model=config.train.model,
            optimizer=cell.arm.optimizer,
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


@pytest.mark.parametrize(("arm", "size", "steps"), CELLS)
def test_trials_in_one_program_equal_runs_of_their_own(arm, size, steps, cells, config, problem):
    cell = named(cells, arm, size)
    trials = three_trials(cell, config)
    alone = train_alone(cell, trials, config)
    for batching in ("map", "vmap"):
        outcome = program.compile_cell(problem, cell, widened(config, batching))(trials)
        assert outcome.losses.shape == (3, steps)
        ends = [flat(jax.tree.map(lambda x, index=index: x[index], outcome.params)) for index in range(3)]
        for index, (start, state, losses) in enumerate(alone):
            movement = np.linalg.norm(flat(state.params) - start)
            assert np.linalg.norm(ends[index] - flat(state.params)) <= TOLERANCE * movement, batching
            np.testing.assert_allclose(outcome.losses[index], losses, rtol=1e-4)
        assert np.linalg.norm(ends[1] - ends[0]) > 1000 * TOLERANCE * movement  # the check can tell trials apart


def test_a_short_call_is_filled_up_and_changes_nothing(lamb_cell, some, config, problem):
    run = program.compile_cell(problem, lamb_cell, widened(config))
    whole, part = run(some), run(some[:1])
    assert np.array_equal(flat(part.params), flat(jax.tree.map(lambda x: x[:1], whole.params)))
    assert len(part.losses) == 1


def test_scores_equal_numpy(problem, lamb_cell, some, config):
    outcome = program.compile_cell(problem, lamb_cell, widened(config))(some)
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


def test_no_factorisation_is_batched(lamb_cell, some, config):
    """XLA's CPU pool can hang for ever on two batched ones; an LSTM's recurrent kernels are orthogonal."""
    problem = make_problem(config.train.data, ModelConfig("lstm", hidden=8))
    train = problem.splits.train
    fn = program.make_trial_fn(problem, lamb_cell, config)
    over_trials = program.batch_trials(fn, "vmap")
    lowered = jax.jit(over_trials).lower(train.arrays, program.pack(lamb_cell, some, len(train))).as_text()
    batch_dims = re.findall(r'custom_call @lapack_.*num_batch_dims = "(\d)"', lowered)
    assert set(batch_dims) == {"0"}
