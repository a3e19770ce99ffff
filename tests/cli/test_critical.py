"""`lbopt critical`: branches that continue the run, at its own batch and at larger ones."""

import dataclasses
import json
import math

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from refusal import names_in, numbers_in, refused

import lbopt
from lbopt.api._problem import train_config
from lbopt.cli import _critical, call_get_config, main
from lbopt.cli._critical import Branch, CriticalMeasurement, critical_size
from lbopt.config import (
    Arm,
    DataConfig,
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
    PhaseConfig,
    ScheduleConfig,
    SweepConfig,
    TrainConfig,
    config_to_json,
)
from lbopt.parallel import put_batch
from lbopt.recipes import build_branch, build_run
from lbopt.train import Checkpoints
from lbopt.transforms import optimizer_metrics

FILE = """
from lbopt.config import *
def get_config(arg=""):
    growing = BatchScheduleConfig("steps", unit="examples", changes=((128.0, 32),))
    second = PhaseConfig(
        num_steps=8, global_batch_size=64, schedule=ScheduleConfig(0.004, warmup_rule="none"))
    return TrainConfig(
        data="digits",
        model=ModelConfig("mlp", widths=(8,)),
        optimizer=OptimizerConfig("adamw", b1=0.8, b2=0.95, weight_decay=0.01),
        schedule=ScheduleConfig(
            0.004, base_batch_size=16, scaling_rule="sde", warmup_rule="epochs",
            base_warmup_epochs=0.05, decay="cosine"),
        global_batch_size=16,
        num_steps=32,
        log_every_steps=1,
        eval_every_steps=100,
        eval_global_batch_size=400,
        checkpoint=CheckpointConfig(every_steps=4, keep=100),
        parallel=ParallelConfig(num_devices=2),
        batch_schedule=growing if arg == "growing" else None,
        phase2=second if arg == "two" else None,
    )
"""


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    file = tmp_path_factory.mktemp("config") / "own.py"
    file.write_text(FILE)
    return file


@pytest.fixture(scope="module")
def workdirs(file, tmp_path_factory):
    """Return the workdirs of a run of one batch size, one that grows, one of two phases, by row."""
    found = {}
    for row in ("", "growing", "two"):
        workdir = tmp_path_factory.mktemp("runs") / f"run{row}"
        flag = f"{file}:{row}" if row else str(file)
        assert main(["train", f"--config={flag}", f"--workdir={workdir}"]) == 0
        found[row] = workdir
    return found


def restored(run, workdir, step):
    with Checkpoints(workdir, read_only=True) as checkpoints:
        return checkpoints.restore(run.phase_at(step).shapes(), step)


@pytest.mark.parametrize(("row", "at"), [("", 8), ("growing", 8), ("growing", 12), ("two", 36)])
def test_a_branch_at_the_runs_own_batch_is_the_run(row, at, file, workdirs):
    config = call_get_config(f"{file}:{row}" if row else str(file))
    whole = build_run(config)
    size = whole.phase_at(at + 1).global_batch_size
    branch = build_branch(config, whole, at, size, 4 * size)
    state = branch.enter(restored(whole, workdirs[row], at))
    losses = []
    for step in range(branch.num_steps):
        batch = put_batch(branch.mesh, branch.batches[step])
        state, metrics = branch.train_step(state, batch)
        losses.append(float(metrics["loss"][0] / metrics["loss"][1]))

    lines = [
        json.loads(line) for line in (workdirs[row] / "metrics.jsonl").read_text().splitlines()
    ]
    expected = [line["train/loss"] for line in lines if at < line["step"] <= at + 4]
    np.testing.assert_allclose(losses, expected, rtol=1e-6)
    there = restored(whole, workdirs[row], at + 4)
    for ours, theirs in zip(
        jax.tree.leaves(state.params), jax.tree.leaves(there.params), strict=True
    ):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-7)


def test_a_larger_branch_sees_the_same_examples_at_the_rates_of_the_rule(file, workdirs):
    config = call_get_config(str(file))
    whole = build_run(config)
    small = build_branch(config, whole, 8, 16, 64)
    large = build_branch(config, whole, 8, 64, 64)
    assert (small.num_steps, large.num_steps) == (4, 1)
    together = {
        name: np.concatenate([small.batches[step][name] for step in range(4)])
        for name in small.batches[0]
    }
    for name, array in large.batches[0].items():
        np.testing.assert_array_equal(array, together[name])
    state = restored(whole, workdirs[""], 8)
    rates = {}
    for branch in (small, large):
        entered = branch.enter(jax.tree.map(jnp.copy, state))
        batch = put_batch(branch.mesh, branch.batches[0])
        after, _ = branch.train_step(entered, batch)
        rates[branch.global_batch_size] = float(optimizer_metrics(after.opt_state)["learning_rate"])
    assert math.isclose(rates[64], 2 * rates[16], rel_tol=1e-5)


@pytest.mark.parametrize(("size", "microsteps"), [(32, 2), (64, 4)])
def test_a_branch_keeps_the_microsteps_of_a_growing_batch(size, microsteps, file):
    config = call_get_config(f"{file}:growing")
    config.batch_schedule.microstep_size = 8
    config.mllog = True
    branch = build_branch(config, build_run(config), 12, size, 64)
    assert branch.mllog["gradient_accumulation_steps"] == microsteps


def test_the_command_prints_and_keeps_the_measurement(workdirs, capsys):
    command = ["critical", f"--workdir={workdirs['']}", "--checkpoint=8", "--factors=1,4"]
    assert main([*command, "--examples=100", "--tolerance=10"]) == 0
    shown = capsys.readouterr().out
    assert "critical batch: at least 64" in shown
    assert main([*command, "--examples=100", "--tolerance=0", "--rule=none"]) == 0
    first, second = (
        json.loads(line) for line in (workdirs[""] / "critical.jsonl").read_text().splitlines()
    )
    assert (first["examples"], first["examples_seen"], first["is_beyond"]) == (256, 128, True)
    assert [branch["global_batch_size"] for branch in first["branches"]] == [16, 64]
    assert [branch["steps"] for branch in first["branches"]] == [16, 4]
    # At the rate of batch 16, a quarter of the steps comes less far.
    assert second["rule"] == "none"
    assert (second["critical_batch_size"], second["is_beyond"]) == (16, False)
    # The run goes on as if nothing had been.
    assert (workdirs[""] / "metrics.jsonl").read_text().count("\n") == 32

    assert main(["report", f"--workdir={workdirs['']}"]) == 0
    page = (workdirs[""] / "report.html").read_text()
    assert "at least 64" in page
    assert "optimizer.track_noise_scale logs it" in page


def test_a_study_gets_the_measurement_too(file, workdirs, tmp_path):
    command = ["critical", f"--workdir={workdirs['']}", "--checkpoint=8", "--factors=1,2"]
    command.append("--examples=64")
    study = tmp_path / "study"
    study.mkdir()
    assert main([*command, f"--study={study}"]) == 2
    assert main([*command, f"--study={workdirs['']}"]) == 2

    config = call_get_config(str(file))
    saved = json.loads((workdirs[""] / "config.json").read_text())

    def with_arms(*arms):
        sweep = config_to_json(SweepConfig(train=TrainConfig(model="cnn"), arms=arms))
        (study / "config.json").write_text(json.dumps({**saved, "kind": "sweep", "config": sweep}))

    with_arms(Arm("other", "momentum", 0.1))
    with refused("--study", str(study), "mismatch") as caught:
        _critical.run([*command[1:], f"--study={study}"])
    assert "model.name" in str(caught.value)
    with_arms(
        Arm("other", "momentum", 0.1),
        Arm("same", "adamw", 0.004, data=config.data, model=config.model),
        Arm("adam", "adam", 0.004, data=config.data, model=config.model),
    )
    assert main([*command, f"--study={study}"]) == 0
    (added,) = [json.loads(line) for line in (study / "critical.jsonl").read_text().splitlines()]
    last = json.loads((workdirs[""] / "critical.jsonl").read_text().splitlines()[-1])
    assert added == {"run": "run", "arms": ["same"], **last}


@pytest.mark.parametrize(
    ("row", "factors", "examples", "step"),
    [("", "1,4", 256, 16), ("growing", "1,2", 256, 12), ("growing", "1,2", 384, 8)],
)
def test_branches_of_a_finished_run_end_within_it(row, factors, examples, step, workdirs, capsys):
    command = ["critical", f"--workdir={workdirs[row]}", f"--factors={factors}"]
    assert main([*command, f"--examples={examples}"]) == 0
    assert f"branching from step {step}, " in capsys.readouterr().err
    line = json.loads((workdirs[row] / "critical.jsonl").read_text().splitlines()[-1])
    assert (line["step"], line["examples"]) == (step, examples)


def test_branches_that_pass_the_end_are_refused(file, workdirs):
    flags = [f"--workdir={workdirs['']}", "--factors=1,4"]
    for which in ("latest", "20"):
        with refused("--checkpoint", which, "mismatch"):
            _critical.run([*flags, "--examples=256", f"--checkpoint={which}"])
    with refused("--examples", 512, "mismatch") as caught:
        _critical.run([*flags, "--examples=512"])
    assert {"4", "448", "config.checkpoint.keep"} <= names_in(caught)


def test_the_last_quarter_has_the_same_examples_in_every_branch(file, workdirs):
    """A network that stays as it is has the same loss on the same examples, and on no others."""
    config = call_get_config(str(file))
    config.schedule.base_learning_rate = 1e-30
    found = _critical.measure(config, workdirs[""], "4", [1, 2, 3], 0.01, 100)
    assert found.examples == 384
    assert [branch.steps for branch in found.branches] == [24, 12, 8]
    losses = [branch.train_loss for branch in found.branches]
    np.testing.assert_allclose(losses, losses[0], rtol=1e-6)


def test_factors_that_make_branches_long_are_refused(workdirs):
    with refused("--factors", "1,7,11,13,16", "mismatch"):
        _critical.run([f"--workdir={workdirs['']}", "--factors=7,11,13,16"])


@pytest.mark.parametrize(
    ("row", "at", "size", "left"),
    [
        ("", 0, 16, 512),
        ("", 32, 16, 0),
        ("growing", 8, 32, 384),
        ("two", 8, 16, 384),
        ("two", 32, 16, 0),
        ("two", 36, 64, 256),
    ],
)
def test_a_branch_ends_within_its_run_or_phase(row, at, size, left, file):
    config = call_get_config(f"{file}:{row}" if row else str(file))
    whole = build_run(config)
    assert whole.examples_left(at) == left
    with refused("num_examples", left + size, "mismatch") as caught:
        build_branch(config, whole, at, size, left + size)
    assert left in numbers_in(caught)


def test_a_rule_of_a_run_whose_batch_grows_is_refused(workdirs):
    with refused("--rule", "linear", "conflict"):
        _critical.run([f"--workdir={workdirs['growing']}", "--rule=linear"])


def test_a_branch_that_diverges_is_null_in_the_file():
    branches = (Branch(16, 2, 1.0, 1.0), Branch(32, 1, math.nan, math.inf))
    line = CriticalMeasurement(8, 128, 32, "none", 0.01, branches, 16, False).line()
    assert line["branches"][0] == dataclasses.asdict(branches[0])
    assert (line["branches"][1]["train_loss"], line["branches"][1]["validation_loss"]) == (
        None,
    ) * 2
    assert (line["step"], line["critical_batch_size"]) == (8, 16)


@pytest.mark.parametrize(
    ("losses", "critical", "beyond"),
    [
        ((1.0, 1.005, 1.009), 64, True),
        ((1.0, 1.02, 1.0), 16, False),
        ((1.0, 0.9, math.nan), 32, False),
        ((1.0, 1.01, 1.011), 32, False),
    ],
)
def test_the_largest_batch_with_all_smaller_ones_within_the_tolerance(losses, critical, beyond):
    branches = [Branch(16 * 2**k, 1, loss, loss) for k, loss in enumerate(losses)]
    assert critical_size(branches, 0.01) == (critical, beyond)


@pytest.mark.parametrize(
    ("flag", "field"),
    [
        ("--factors=1,x", "--factors"),
        ("--factors=0", "--factors"),
        ("--examples=none", "--examples"),
        ("--tolerance=-1", "--tolerance"),
        ("--rule=cubic", "--rule"),
        ("--rule=token_half_life+sde", "--rule"),
        ("--checkpoint=7", "checkpoint"),
        ("--factors=1,5", "config.optimizer.b1"),
    ],
)
def test_refusals(flag, field, workdirs):
    with refused(field):
        _critical.run([f"--workdir={workdirs['']}", "--examples=80", flag])


def test_branches_count_in_tokens_of_text_alone(workdirs):
    with refused("--tokens", "80", "conflict") as caught:
        _critical.run([f"--workdir={workdirs['']}", "--tokens=80"])
    assert "digits" in names_in(caught)
    with refused("--tokens", "80", "conflict"):
        _critical.run([f"--workdir={workdirs['']}", "--examples=80", "--tokens=80"])


def test_tokens_are_those_of_the_phase_in_which_the_branches_begin():
    """With a batch of 2, a branch of 4 steps of batch 4 has at least 16 examples."""
    schedule = ScheduleConfig(0.001, warmup_rule="none")
    second = PhaseConfig(4, 2, schedule=schedule, sequence_length=64, max_predictions=10)
    config = TrainConfig(
        data=DataConfig("pydoc_mlm", sequence_length=32),
        model=ModelConfig("bert", size="tiny", max_length=64),
        schedule=schedule,
        global_batch_size=2,
        num_steps=4,
        parallel=ParallelConfig(num_devices=1),
        phase2=second,
    )
    training = build_run(config)
    lengths = [_critical._length(config, training, (1, 2), None, 2048, at) for at in (0, 6)]
    assert lengths == [64, 32]


def test_text_that_goes_on_from_step_to_step_is_refused(file, workdirs, monkeypatch):
    carried = TrainConfig(data=DataConfig("pydoc_lm", carry_state=True), model="lstm")
    monkeypatch.setattr(_critical, "saved_config", lambda *_: carried)
    with refused("--workdir", str(workdirs[""]), "conflict") as caught:
        _critical.run([f"--workdir={workdirs['']}"])
    assert "data.carry_state" in str(caught.value)


def test_a_branch_of_a_network_that_is_evaluated_without_a_loss(file, workdirs):
    config = call_get_config(str(file))
    whole = build_run(config)
    branch = build_branch(config, whole, 8, 64, 256)
    branch = dataclasses.replace(branch, evaluation=lambda *_: {"f1": 0.5})
    found = _critical._run_branch(branch, restored(whole, workdirs[""], 8))
    assert found.validation_loss is None
    measured = CriticalMeasurement(8, 128, 256, "none", 0.01, (found,), 64, False)
    assert measured.line()["branches"][0]["validation_loss"] is None
    assert measured.lines()[2].endswith("-")


def test_a_run_of_local_steps_is_refused(file, tmp_path):
    options = [
        "--config.diloco.every=4",
        "--config.num_steps=8",
        "--config.schedule.decay=constant",
    ]
    workdir = tmp_path / "run"
    assert main(["train", f"--config={file}", f"--workdir={workdir}", *options]) == 0
    with refused("--workdir", str(workdir), "conflict"):
        _critical.run([f"--workdir={workdir}"])


DIMS = 256
"""Inputs of the planted regressions, Gaussian and independent."""
EXAMPLES = 512
SLOPE = 0.2404
"""Mean derivative of the logistic function at a Gaussian of standard deviation START."""
START = 0.4
"""Distance from the optimum of the logistic regression at which branches start."""


def distances(size, rate, noise, examples):
    """Return E |w - w*|^2 before each step of SGD and after the last, in closed form.

    The loss is (x (w - w*) - e)^2, of noise scale DIMS + 1 + DIMS E e^2 / |w - w*|^2. It begins at
    |w - w*|^2 = 1, and `noise` is the noise scale there.
    """
    found = [1.0]
    for _ in range(examples // size):
        shrunk = (1 - 2 * rate) ** 2 + (2 * rate) ** 2 * (DIMS + 1) / size
        found.append(found[-1] * shrunk + (2 * rate) ** 2 * (noise - DIMS - 1) / size)
    return found


def distance(size, rate, noise):
    """Return E |w - w*|^2 after EXAMPLES."""
    return distances(size, rate, noise, EXAMPLES)[-1]


def linear(random, x, sigma):
    """Return (problem, rate unit, first kernel, squared relative distance of a kernel)."""
    target = random.normal(size=DIMS)
    target = (target / np.linalg.norm(target)).astype(np.float32)
    y = x @ target + random.normal(scale=sigma, size=len(x)).astype(np.float32)
    problem = lbopt.Problem({"x": x, "y": y[:, None]}, nn.Dense(1, use_bias=False))
    start = np.zeros((DIMS, 1), np.float32)
    return problem, 1.0, start, lambda kernel: np.sum((kernel[:, 0] - target) ** 2)


def logistic(random, x, sigma):
    """Return the same for labels that are drawn by a fair coin, whatever x is.

    The optimum is 0, where the covariance of the gradient is that of x over 4. In units of the
    slope, the gradient of the difference of the two logits' weights is that of a linear regression
    with noise of variance 1 / 4 over the slope's square.
    """
    del sigma
    label = random.integers(2, size=len(x)).astype(np.int32)
    problem = lbopt.Problem({"x": x, "label": label}, nn.Dense(2, use_bias=False))
    way = random.normal(size=DIMS)
    half = (START / 2 * way / np.linalg.norm(way)).astype(np.float32)
    start = np.stack([-half, half], 1)
    return problem, 1 / SLOPE, start, lambda kernel: np.sum(np.diff(kernel) ** 2) / START**2


def by_sgd(problem, rate, rule):
    """Return the config of a run by SGD at batch 32, at a constant rate."""
    schedule = ScheduleConfig(
        rate, base_batch_size=32, scaling_rule=rule, warmup_rule="none", decay="constant"
    )
    plain = OptimizerConfig("momentum", momentum=0.0)
    config = train_config(problem, plain, schedule, global_batch_size=32)
    config.parallel.num_devices = 1
    return config


def with_params(state, values):
    return state.replace(params=jax.tree.map(lambda _: jnp.array(values), state.params))


@pytest.mark.parametrize(
    ("make", "sigma"),
    [(linear, 1.0), (linear, 3.0), (logistic, 0.5 / SLOPE / START)],
    ids=["linear", "linear, noisy", "logistic"],
)
def test_branches_recover_a_planted_noise_scale(make, sigma):
    """Over the same examples, how much the batch matters depends on the noise scale alone."""
    planted = DIMS + 1 + DIMS * sigma**2
    random = np.random.default_rng(0)
    x = random.normal(size=(2**15, DIMS)).astype(np.float32)
    problem, unit, start, far = make(random, x, sigma)

    rate = 0.5 / (1 + planted / 32)  # the best at batch 32
    config = by_sgd(problem, rate * unit, "sqrt")
    whole = build_run(config)
    state = whole.init()

    def ends(size, repeats=48):
        branch = build_branch(config, whole, 0, size, EXAMPLES)
        found = []
        for repeat in range(repeats):
            here = with_params(jax.tree.map(jnp.copy, state), start)
            batches = branch.batches.moved(repeat * EXAMPLES, branch.num_steps)
            for step in range(branch.num_steps):
                here, _ = branch.train_step(here, put_batch(branch.mesh, batches[step]))
            (weights,) = jax.tree.leaves(here.params)
            found.append(far(np.asarray(weights, np.float64)))
        return np.mean(found)

    for size in (128, 512):
        further = ends(size) - ends(32)
        low = 1.0
        high = 1e6
        while high / low > 1.001:
            middle = math.sqrt(low * high)
            gap = distance(size, rate * math.sqrt(size / 32), middle) - distance(32, rate, middle)
            low, high = (middle, high) if gap > further else (low, middle)
        assert low == pytest.approx(planted, rel=0.15)


def test_the_critical_batch_is_that_of_the_closed_form(tmp_path):
    """By the linear rule a large batch loses in proportion to the planted noise.

    Half or twice the noise would give another batch at the same tolerance.
    """
    random = np.random.default_rng(0)
    x = random.normal(size=(2**15, DIMS)).astype(np.float32)
    problem, _, start, _ = linear(random, x, 1.0)
    rate = 0.5 / (1 + (2 * DIMS + 1) / 32)
    config = by_sgd(problem, rate, "linear")
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(with_params(build_run(config).init(), start), None)
    factors = (1, 4, 8, 16)
    examples = 24576

    def closed_form(variance):
        found = []
        for factor in factors:
            noise = DIMS + 1 + DIMS * variance
            *seen, _ = distances(32 * factor, rate * factor, noise, examples)
            loss = variance + np.mean(seen[-len(seen) // 4 :])
            found.append(Branch(32 * factor, len(seen), loss, loss))
        return found

    tolerance = 0.0735
    sizes = [critical_size(closed_form(variance), tolerance)[0] for variance in (0.5, 1.0, 2.0)]
    assert sizes == [256, 128, 32]

    found = _critical.measure(config, tmp_path, "0", factors, tolerance, examples)
    assert (found.critical_batch_size, found.is_beyond) == (128, False)
    ours, theirs = (
        [branch.train_loss - branches[0].train_loss for branch in branches]
        for branches in (found.branches, closed_form(1.0))
    )
    np.testing.assert_allclose(ours[1:], theirs[1:], rtol=0.3)
