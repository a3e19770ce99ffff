"""A trial in a shared program equals the trial alone, and the run of `lbopt train`."""

import copy
import dataclasses
import functools
import re
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_study import make_config

from lbopt.config import (
    Arm,
    MeasureConfig,
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
    resolve_schedule,
)
from lbopt.data import DAMAGED, ArrayDataset, Splits
from lbopt.parallel import put_replicated
from lbopt.recipes import build_mesh, build_run, make_problem
from lbopt.sweep import _runner, make_cells, make_problems
from lbopt.sweep._finished_trial import SEARCH
from lbopt.sweep._running_trial import RunningTrial
from lbopt.sweep.lanes import Equipment, Program, Session, TrialBatching, make_mesh_probe
from lbopt.sweep.lanes._scores import Scorer, scored_split
from lbopt.sweep.lanes._trial_arguments import Arguments
from lbopt.sweep.search import Factors, Proposal

# Relative to the movement ||w_T - w_0||: other programs round differently. LAMB's direction is like
# a sign where a gradient is only rounding, so its trials are compared over the 3 steps of batch
# 1024, and momentum's over the 24 steps of batch 128.
TOLERANCE = 2e-5
CELLS = [
    ("cnn", "momentum", 128, 24),
    ("cnn", "lamb", 1024, 3),
    ("mlp", "adam", 1024, 3),
    ("mlp", "adamw", 1024, 3),
    ("mlp", "lars", 128, 24),
    ("lstm", "momentum", 1024, 3),
]
AS_SHIPPED = ("cnn", "lamb", 1024)
"""The cell whose programs have the compiler options of a study; others compile faster."""
MODELS = {
    "cnn": ModelConfig("cnn", (4, 8), 16),
    "mlp": ModelConfig("mlp", (16,)),
    "lstm": ModelConfig("lstm", hidden=8),
}


@functools.cache
def cells_of(model):
    config = make_config()
    config.train.model = MODELS[model]
    momentum, lamb = config.arms
    config.arms += tuple(
        Arm(
            name,
            OptimizerConfig(name, weight_decay=decay),
            dataclasses.replace(like.schedule, base_learning_rate=rate),
        )
        for name, decay, like, rate in (
            ("adam", 0.0, momentum, 0.002),
            ("adamw", 0.01, lamb, 0.002),
            ("lars", 0.01, lamb, 1.0),
        )
    )
    config.validate()
    return make_cells(config, make_problems(config))


@pytest.fixture(scope="module")
def cells():
    """Return the cells of the tiny study, with a network that has batch statistics."""
    return cells_of("cnn")


def flat(tree):
    return np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(tree)])


def lane(tree, index):
    return jax.tree.map(lambda x: x[index], tree)


def named(cells, arm, size):
    return next(cell for cell in cells if (cell.arm.name, cell.global_batch_size) == (arm, size))


def three_trials(cell):
    """Return two rates, and another seed."""
    asked = [(Factors(1.0, 1.0, 1.0), 0), (Factors(2.0, 1.0, 1.0), 0), (Factors(1.0, 1.0, 1.0), 7)]
    return [cell.trial(SEARCH, Proposal(factors, 1.0), seed) for factors, seed in asked]


def equip(cell, decays, mode, width=3):
    """Return a config, and a program and equipment that any number of sessions can use."""
    config = make_config(trial_batching=mode, trials_per_program=width)
    config.arms = (cell.arm,) * (cell.index + 1)  # errors name the cell's arm
    batching = TrialBatching(config)
    program = Program(cell, decays, config, batching)
    return config, program, Equipment(cell.problem, config, batching)


def run(cell, wanted, mode, equipped=None):
    """Train trials to their ends, together if batched; return parameters, state and the trial."""
    config, program, equipment = equipped or equip(cell, wanted[0].weight_decay > 0, mode)
    width = TrialBatching(config).width
    found = []
    for start in range(0, len(wanted), width):
        some = dict(enumerate(wanted[start : start + width]))
        session = Session(program, equipment)
        session.begin(some)
        by_lane = {index: RunningTrial(config, cell, trial) for index, trial in some.items()}
        while not all(running.ended for running in by_lane.values()):
            session.advance(
                {index: running for index, running in by_lane.items() if not running.ended}
            )
        params, model_state = session._variables()
        found += [(lane(params, index), lane(model_state, index), by_lane[index]) for index in some]
    return found


def train_alone(cell, wanted):
    """Run each trial step by step with the same config, as `lbopt train` would."""
    outcomes = []
    for trial in wanted:
        train = copy.deepcopy(cell.train)
        train.seed = trial.seed
        train.global_batch_size = cell.global_batch_size
        train.schedule.base_learning_rate *= trial.factors.learning_rate
        train.parallel.num_devices = 1
        built = build_run(train)
        state = built.init()
        start = flat(state.params)
        losses = []
        for step in range(built.num_steps):
            state, metrics = built.train_step(state, built.batches[step])
            losses.append(float(metrics["loss"][0] / metrics["loss"][1]))
        outcomes.append((start, state, losses))
    return outcomes


@pytest.fixture
def as_shipped():
    jax.config.update("jax_disable_most_optimizations", False)
    yield
    jax.config.update("jax_disable_most_optimizations", True)


@pytest.mark.everyday("mlp-lars-128-24")
@pytest.mark.parametrize(("model", "arm", "size", "steps"), CELLS)
def test_trials_in_one_program_equal_runs_of_their_own(model, arm, size, steps, request):
    if (model, arm, size) == AS_SHIPPED:
        request.getfixturevalue("as_shipped")
    cell = named(cells_of(model), arm, size)
    wanted = three_trials(cell)
    alone = train_alone(cell, wanted)
    for batching in ("none", "vmap"):
        found = run(cell, wanted, batching)
        for (params, _, running), (start, state, losses) in zip(found, alone, strict=True):
            movement = np.linalg.norm(flat(state.params) - start)
            assert np.linalg.norm(flat(params) - flat(state.params)) <= TOLERANCE * movement, (
                batching
            )
            assert len(losses) == steps
            np.testing.assert_allclose(np.concatenate(running.losses), losses, rtol=1e-4)
            distance = np.concatenate(running.distances)[-1]
            assert distance == pytest.approx(movement, rel=1e-5)
        assert (
            np.linalg.norm(flat(found[1][0]) - flat(found[0][0])) > 1000 * TOLERANCE * movement
        )  # the check is sensitive


def test_a_trial_runs_in_the_program_of_an_arm_with_other_options():
    cell, other = (copy.deepcopy(named(cells_of("mlp"), "adam", 1024)) for _ in range(2))
    cell.train.optimizer = OptimizerConfig("muonh", options={"momentum": 0.9, "rest_b1": 0.8})
    other.train.optimizer = OptimizerConfig("muonh", options={"momentum": 0.5, "rest_b1": 0.6})
    theirs, ours = (
        each.trial(SEARCH, Proposal(Factors(1, 1, 1), 1.0), 0) for each in (cell, other)
    )

    ((start, state, _),) = train_alone(other, [ours])
    found = [flat(params) for params, *_ in run(cell, [ours, theirs], "none")]
    moved, error, apart = (np.linalg.norm(flat(state.params) - x) for x in (start, *found))
    assert error <= TOLERANCE * moved
    assert apart > 1000 * TOLERANCE * moved


def test_a_trial_that_diverges_disturbs_nobody_beside_it():
    cell = named(cells_of("mlp"), "momentum", 128)
    asked = [(1.0, 0), (1e30, 0), (1.0, 7)]
    wanted = [
        cell.trial(SEARCH, Proposal(Factors(rate, 1.0, 1.0), 1.0), seed) for rate, seed in asked
    ]
    equipped = equip(cell, False, "vmap")
    found = run(cell, wanted, "vmap", equipped)
    assert [running.diverged for *_, running in found] == [False, True, False]
    for place in (0, 2):
        ((expected, _, _),) = run(cell, [wanted[place]], "vmap", equipped)
        assert np.array_equal(flat(found[place][0]), flat(expected))


def test_a_lane_that_is_free_early_takes_the_next_trial_and_disturbs_nobody(cells):
    """Slot 1 gets another trial while slot 0 trains; each equals its own session bit for bit."""
    cell = named(cells, "momentum", 128)
    equipped = config, program, equipment = equip(cell, False, "vmap", width=2)
    session = Session(program, equipment)

    ours, short, late = (
        cell.trial(SEARCH, Proposal(Factors(rate, 1.0, 1.0), fidelity), seed)
        for rate, fidelity, seed in ((1.0, 1.0, 0), (2.0, 1 / 3, 0), (1.0, 2 / 3, 7))
    )
    assert [trial.num_steps for trial in (ours, short, late)] == [24, 8, 16]

    session.begin({0: ours, 1: short})
    lanes = {0: RunningTrial(config, cell, ours), 1: RunningTrial(config, cell, short)}
    while not lanes[1].ended:
        session.advance(lanes)
    assert lanes[0].done == 8

    session.begin({1: late})
    last = RunningTrial(config, cell, late)
    while not last.ended:
        session.advance({0: lanes[0], 1: last})
    assert lanes[0].ended

    params = session._variables()[0]
    for index, running in ((0, lanes[0]), (1, last)):
        ((expected, _, other),) = run(cell, [running.trial], "vmap", equipped)
        assert np.array_equal(np.concatenate(running.losses), np.concatenate(other.losses))
        assert np.array_equal(flat(lane(params, index)), flat(expected))


def test_a_short_trial_runs_the_whole_schedule():
    """Half the fidelity means half the steps, half the warmup, and a complete decay."""
    config = make_config()
    config.arms[1].schedule.first_step = 0
    cell = named(make_cells(config, make_problems(config)), "lamb", 128)
    trial = cell.trial(SEARCH, Proposal(Factors(1.0, 2.0, 1.0), 0.5), 0)
    ((_, _, running),) = run(cell, [trial], "none")
    assert (running.done, trial.num_steps, cell.warmup_steps(trial)) == (12, 12, 2)
    shorter = copy.deepcopy(cell.train)
    shorter.num_epochs /= 2
    resolved = resolve_schedule(
        shorter.schedule, 128, len(cell.problem.splits.train), shorter.num_epochs
    )
    assert (resolved.warmup_steps, resolved.num_steps) == (2, 12)
    whole = dataclasses.replace(cell, train=shorter, resolved=resolved)
    ((_, _, expected),) = run(
        whole, [whole.trial(SEARCH, Proposal(Factors(1.0, 1.0, 1.0), 1.0), 0)], "none"
    )
    np.testing.assert_allclose(
        np.concatenate(running.losses), np.concatenate(expected.losses), rtol=1e-4
    )


def test_programs_of_one_problem_share_its_arrays_on_the_device(cells, tmp_path):
    runner = _runner.Runner(make_config(), None, None)
    programs = [runner._compiled(cell, three_trials(cell)[0]) for cell in cells[:2]]
    assert programs[0].feed.shared["image"] is programs[1].feed.shared["image"]


class Spoilt(ArrayDataset):
    """A damaged record is replaced by the next good one, and its batch reports it."""

    def draw(self, indices, epochs, seed):
        return {**super().draw(indices, epochs, seed), DAMAGED: [(3, "cut short")]}


@pytest.mark.slow
def test_a_damaged_record_among_the_probed_ones_changes_nothing(cells):
    problem = cells[0].problem
    config = make_config(measure=MeasureConfig(num_probes=1, probe_parts=4, probe_part_size=8))
    train = problem.splits.train
    spoilt = problem._replace(splits=problem.splits._replace(train=Spoilt(train.arrays)))
    variables = jax.tree.map(lambda x: x[None], problem.init(jax.random.key(0)))
    found = [
        Equipment(one, config, TrialBatching(config)).probe(*variables) for one in (problem, spoilt)
    ]
    jax.tree.map(np.testing.assert_array_equal, *found)
    alone = jax.tree.map(lambda x: x[0], variables)
    mesh = build_mesh(ParallelConfig())
    on_mesh = [
        make_mesh_probe(one, config)(*put_replicated(mesh, alone)) for one in (problem, spoilt)
    ]
    jax.tree.map(np.testing.assert_array_equal, *on_mesh)


def test_many_lanes_are_scored_a_few_examples_at_a_time():
    problem = cells_of("mlp")[0].problem
    config = make_config(trial_batching="vmap", trials_per_program=64)
    config.train.eval_global_batch_size = 5000
    batching = TrialBatching(config)
    assert batching.most_examples == 512 == 2**13 * 4 / 64
    variables = jax.vmap(problem.init)(jax.random.split(jax.random.key(0), 64))
    scores = Equipment(problem, config, batching).score
    assert {len(batch["label"]) for batch in scores._batches("train")} == {512}
    assert len(scores("validation", *variables)) == 64


def test_scores_equal_numpy(cells):
    """Every example of a split counts once, though no batch size divides the splits."""
    cell = named(cells, "lamb", 1024)
    config = make_config()
    config.train.eval_global_batch_size = 100
    batching = TrialBatching(config)
    equipment = Equipment(cell.problem, config, batching)
    params, model_state = equipment.initialise(np.zeros(1, np.int32))
    metric_fn = jax.jit(cell.problem.metric_fn)
    for name in ("train", "validation", "test"):
        split = getattr(cell.problem.splits, name)
        whole = {**split.take(np.arange(len(split))), "mask": np.ones(len(split), bool)}
        pairs = metric_fn(lane(params, 0), lane(model_state, 0), whole)
        (scores,) = equipment.score(name, params, model_state)
        for metric, (total, count) in pairs.items():
            assert count == len(split)
            assert scores[metric] == pytest.approx(float(total) / float(count), rel=1e-5)


def test_no_factorisation_is_batched():
    """XLA's CPU pool can hang on two batched ones; an LSTM's recurrent kernels are orthogonal."""
    config = make_config(trial_batching="vmap")
    problem = make_problem(config.train.data, ModelConfig("lstm", hidden=8))
    batching = TrialBatching(config)
    lowered = (
        Equipment(problem, config, batching)
        .initialise._init.lower(np.zeros(batching.width, np.int32))
        .as_text()
    )
    batch_dims = re.findall(r'custom_call @lapack_.*num_batch_dims = "(\d)"', lowered)
    assert set(batch_dims) == {"0"}


def test_a_trial_without_weight_decay_is_not_one_with_a_decay_of_zero():
    """Variants that adapt only decayed leaves become plain Adam without decay, in a search too."""
    config = make_config()
    config.arms = config.arms[1:]
    config.arms[0].optimizer = OptimizerConfig("lamb", "timm", weight_decay=0.01)
    (cell, *_) = make_cells(config, make_problems(config))
    without = cell.trial(SEARCH, Proposal(Factors(1.0, 1.0, 0.0), 1.0), 0)
    with pytest.warns(UserWarning, match="weight_decay"):
        (_, _, running) = run(cell, [without], "none")[0]
    shown = Arguments.of(without)
    assert shown.weight_decay == 0
    with_a_little = cell.trial(SEARCH, Proposal(Factors(1.0, 1.0, 1e-6), 1.0), 0)
    (_, _, adapted) = run(cell, [with_a_little], "none")[0]
    assert abs(np.concatenate(adapted.losses)[-1] - np.concatenate(running.losses)[-1]) > 1e-3


@pytest.mark.parametrize(
    ("train", "validation", "scored"),
    [(4000, 10, 4000), (4001, 10, 1000), (4800, 1200, 4800), (4801, 1200, 1200)],
)
def test_a_training_set_much_larger_than_the_validation_set_is_scored_on_a_part(
    train, validation, scored
):
    splits = Splits(*(ArrayDataset({"x": np.arange(count)}) for count in (train, validation, 50)))
    found = scored_split(splits, "train").take(np.arange(scored))["x"]
    assert len(scored_split(splits, "train")) == len(set(found)) == scored
    assert set(found) <= set(range(train))
    assert scored_split(splits, "test") is splits.test


def test_the_training_score_is_the_mean_over_that_part():
    values = np.random.default_rng(0).normal(size=4001).astype(np.float32)
    splits = Splits(*(ArrayDataset({"x": values[:count]}) for count in (4001, 10, 50)))

    def metric_fn(params, state, batch):
        return {"x": (jnp.sum(params * batch["x"] * batch["mask"]), jnp.sum(batch["mask"]))}

    problem = types.SimpleNamespace(splits=splits, metric_fn=metric_fn)
    scorer = Scorer(problem, TrialBatching(make_config()), 300)
    (found,) = scorer("train", jnp.array([2.0]), {})
    part = scored_split(splits, "train").take(np.arange(1000))["x"]
    assert found["x"] == pytest.approx(2 * np.mean(part, dtype=np.float64), rel=1e-5)
    assert abs(found["x"] - 2 * values.mean()) > 1e-3
