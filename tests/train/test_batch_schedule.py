"""A run whose batch grows: its batches anywhere, its rates and moments, killed and resumed."""

import dataclasses
import functools
import hashlib
import json
import math
import random
import shutil
import threading

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from refusal import refused, troubled
from watched_step import WatchedStep

from lbopt.cli import main
from lbopt.config import (
    BatchScheduleConfig,
    CheckpointConfig,
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
    PhaseConfig,
    ScheduleConfig,
    TrainConfig,
    make_schedule,
    resolve_schedule,
)
from lbopt.data import example_indices
from lbopt.recipes import build_run
from lbopt.train import linked, train
from lbopt.transforms import evaluated_params, optimizer_metrics

SIZES = [16] * 5 + [32] * 3 + [48] * 2 + [64] * 4
"""Batch sizes of the run's steps."""


def config(num_devices=2, kind="ramp", **changes):
    if kind == "noise_scale":
        return by_noise(num_devices, **changes)
    ramp = BatchScheduleConfig(
        "ramp", unit="examples", final_batch_size=64, increment=16, length=240.0, microstep_size=16
    )
    schedule = ScheduleConfig(
        0.004,
        base_batch_size=16,
        scaling_rule="sde",
        warmup_rule="epochs",
        base_warmup_epochs=0.03,
        decay="cosine",
    )

    found = TrainConfig(
        data="digits",
        model=ModelConfig("mlp", widths=(8,)),
        optimizer=OptimizerConfig("adamw", weight_decay=0.01, b1=0.8, b2=0.95),
        schedule=schedule,
        global_batch_size=16,
        num_steps=32,
        batch_schedule=ramp,
        log_every_steps=1,
        eval_every_steps=5,
        eval_global_batch_size=400,
        checkpoint=CheckpointConfig(every_steps=2),
        parallel=ParallelConfig(num_devices=num_devices),
    )
    return dataclasses.replace(found, **changes)


def by_noise(num_devices, **changes):
    """Return the config with a batch that doubles by the run's own noise scale."""
    growing = BatchScheduleConfig(
        "noise_scale",
        unit="examples",
        final_batch_size=64,
        every=128.0,
        noise_scale_factor=0.5,
    )
    found = config(num_devices, **changes)
    found.batch_schedule = growing
    found.num_steps = 96
    found.optimizer.track_noise_scale = True
    found.parallel.num_microsteps = 2
    return found


@functools.cache
def run_on(num_devices, kind):
    return build_run(config(num_devices, kind))


class Killed(BaseException):
    """Ends a run the way a kill does: nothing is saved after it."""


def watched(run, before):
    """Return a run whose phases all call `before` (phase, state, batch) at each step."""

    def seen(phase):
        step = WatchedStep(phase.train_step, functools.partial(before, phase))
        return dataclasses.replace(phase, train_step=step)

    if run.growth is not None:
        candidates = tuple(map(seen, run.growth.candidates))
        return dataclasses.replace(run.growth, candidates=candidates).chain(())
    return linked([seen(phase) for phase in run.phases()])


@functools.cache
def straight(num_devices, folder, kind):
    """Return the final parameters of an uninterrupted run, its batches and its folder."""
    seen = []

    def note(phase, state, batch):
        seen.append({name: np.asarray(array).tobytes() for name, array in batch.items()})

    workdir = folder / f"{kind}-{num_devices}"
    state = train(watched(run_on(num_devices, kind), note), workdir)
    return jax.device_get(state.params), [hash_of(batch) for batch in seen], workdir


def hash_of(batch):
    return hashlib.sha256(b"".join(batch[name] for name in sorted(batch))).hexdigest()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("runs")


def lines_of(workdir):
    return [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]


def test_steps_examples_and_batches_are_logged(folder):
    _, _, workdir = straight(2, folder, "ramp")
    lines = lines_of(workdir)
    assert [line["train/global_batch_size"] for line in lines] == SIZES
    assert [line["examples_seen"] for line in lines] == np.cumsum(SIZES).tolist()
    assert [line["step"] for line in lines if "eval/loss" in line] == [5, 10, 14]


def test_evaluations_in_epochs_are_at_the_same_examples_at_every_batch(tmp_path):
    # A tenth of 1,024 examples; the fifth multiple, 512, is where the batch changes.
    growing = BatchScheduleConfig("steps", changes=((0.5, 49),))
    whole = config(1, batch_schedule=growing, num_steps=40, eval_every_epochs=0.1)
    whole.schedule.scaling_rule = "none"
    run = build_run(whole)
    assert {phase.cadence.eval_every_examples for phase in run.phases()} == {0.1 * 1024}
    train(run, tmp_path)
    steps = [line["step"] for line in lines_of(tmp_path) if "eval/loss" in line]
    assert steps == [7, 13, 20, 26, 32, 35]


def test_batches_are_the_stream_of_examples_cut_at_the_sizes(folder):
    _, batches, _ = straight(1, folder, "ramp")
    train_set = run_on(1, "ramp").splits.train
    stream = example_indices(len(train_set), 0, 0, sum(SIZES))
    for end, size, found in zip(np.cumsum(SIZES), SIZES, batches, strict=True):
        taken = train_set.take(stream[end - size : end])
        assert found == hash_of({name: array.tobytes() for name, array in taken.items()})


def test_batches_are_the_same_on_any_devices(folder):
    assert (
        straight(1, folder, "ramp")[1]
        == straight(2, folder, "ramp")[1]
        == straight(4, folder, "ramp")[1]
    )


@pytest.mark.parametrize(
    ("num_devices", "kind"), [(1, "ramp"), (2, "ramp"), (4, "ramp"), (2, "noise_scale")]
)
def test_a_run_killed_at_random_places_ends_bit_for_bit_the_same(
    num_devices, kind, folder, tmp_path
):
    params, batches, workdir = straight(num_devices, folder, kind)
    places = random.Random(num_devices)
    kills = 0
    state = None
    while state is None:
        at = places.randint(1, len(batches)) if kills < 10 else math.inf

        def kill(phase, state, batch, at=at):
            if int(state.step) + 1 >= at:
                raise Killed

        try:
            state = train(watched(run_on(num_devices, kind), kill), tmp_path)
        except Killed:
            kills += 1
    assert kills == 10
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(state.params), params)
    assert [untimed(line) for line in lines_of(tmp_path)] == [
        untimed(line) for line in lines_of(workdir)
    ]


def test_a_run_killed_on_one_device_goes_on_with_four(folder, tmp_path):
    params, _, _ = straight(2, folder, "ramp")

    def kill(phase, state, batch):
        if int(state.step) == 6:  # in the second of four batch sizes
            raise Killed

    with pytest.raises(Killed):
        train(watched(run_on(1, "ramp"), kill), tmp_path)
    found = train(run_on(4, "ramp"), tmp_path).params
    assert [line["examples_seen"] for line in lines_of(tmp_path)] == np.cumsum(SIZES).tolist()
    first = run_on(2, "ramp").init().params
    gaps = jax.tree.map(lambda a, b: np.linalg.norm(np.asarray(a) - b), found, params)
    moved = jax.tree.map(lambda a, b: np.linalg.norm(np.asarray(a) - b), first, params)
    assert max(jax.tree.leaves(gaps)) < 1e-5 * max(jax.tree.leaves(moved))


def untimed(line):
    return {name: value for name, value in line.items() if not name.startswith("perf/")}


def test_rates_follow_the_schedule_in_examples_and_the_rule(folder):
    _, _, workdir = straight(2, folder, "ramp")
    whole = config()
    resolved = resolve_schedule(whole.schedule, 16, 1024, 0, num_steps=32)
    before = np.cumsum([0, *SIZES])[:-1] / 16
    warmup = resolved.warmup_steps
    expected = []
    for size, start in zip(SIZES, before, strict=True):
        step = start + 1  # the first update has the rate of step 1
        factor = step / warmup
        if step >= warmup:
            factor = 0.5 * (1 + math.cos(math.pi * (step - warmup) / (33 - warmup)))
        expected.append(0.004 * factor * math.sqrt(size / 16))
    rates = [line["train/learning_rate"] for line in lines_of(workdir)]
    np.testing.assert_allclose(rates, expected, rtol=1e-5)


def test_the_noise_scale_decides_when_the_batch_doubles(folder):
    lines = lines_of(straight(2, folder, "noise_scale")[2])
    whole = config(2, "noise_scale")
    resolved = resolve_schedule(whole.schedule, 16, 1024, 0, num_steps=96)
    base = make_schedule(whole.schedule, resolved)
    size = 16
    seen = 0
    doubled = 0

    for line in lines:
        rate = float(base(seen / 16)) * math.sqrt(size / 16)
        assert line["train/learning_rate"] == pytest.approx(rate, rel=1e-5)
        assert line["train/global_batch_size"] == size
        seen += size
        assert line["examples_seen"] == seen
        scale = line["train/noise_scale"]
        large_enough = scale is None or scale >= 0.5 * 2 * size
        decides = seen % 128 == 0 and size < 64 and line is not lines[-1]
        assert ("train/next_global_batch_size" in line) == (decides and large_enough)
        if decides and large_enough:
            size *= 2
            doubled += 1
    assert doubled == 2
    assert seen == 96 * 16


@pytest.mark.parametrize("rule", ["sde", "sqrt+token_half_life"])
def test_moments_keep_their_weight_when_their_decays_change(rule):
    """Under a constant gradient Adam's step is the learning rate, whatever the decays."""
    whole = config(1)
    whole.schedule.scaling_rule = rule
    whole.optimizer.weight_decay = 0.0
    run = build_run(whole)
    state = run.init()
    decays = set()

    for phase in run.phases():
        if phase.continues:
            state = phase.enter(state)
        for _ in range(phase.num_steps):
            gradient = jax.tree.map(lambda leaf: jnp.full_like(leaf, 0.5), state.params)
            updates, opt_state = phase.tx.update(gradient, state.opt_state, state.params)
            state = state.replace(opt_state=opt_state)
            rate = float(optimizer_metrics(opt_state)["learning_rate"])
            step = np.asarray(jax.tree.leaves(updates)[0])
            np.testing.assert_allclose(-step, rate, rtol=1e-4)
        nu = np.asarray(jax.tree.leaves(optax.tree_utils.tree_get(opt_state, "nu"))[0]).ravel()[0]
        decays.add(round(float(nu), 3))
    assert len(decays) > 1  # the moments themselves do change


def test_an_average_of_parameters_keeps_its_half_life_in_examples():
    whole = config(1)
    whole.optimizer = OptimizerConfig("momentum", ema_decay=0.9, ema_ramp=False)
    whole.schedule.scaling_rule = "sqrt+ema"
    run = build_run(whole)
    state = run.init()
    average = jax.device_get(state.params)

    for phase in run.phases():
        if phase.continues:
            state = phase.enter(state)
        decay = 0.9 ** (phase.global_batch_size / 16)
        for _ in range(phase.num_steps):
            gradient = jax.tree.map(lambda leaf: jnp.full_like(leaf, 0.5), state.params)
            updates, opt_state = phase.tx.update(gradient, state.opt_state, state.params)
            params = optax.apply_updates(state.params, updates)
            state = state.replace(opt_state=opt_state, params=params)
            average = jax.tree.map(lambda a, b, d=decay: d * a + (1 - d) * b, average, params)
    found = evaluated_params(state.opt_state, state.params)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), found, average
    )


@pytest.mark.parametrize("optimizer", ["muon", "soap", "shampoo", "adamh", "lamb", "lans"])
def test_the_state_of_an_optimizer_is_the_same_at_every_batch(optimizer):
    whole = config(1)
    whole.optimizer = OptimizerConfig(optimizer)
    whole.schedule.scaling_rule = "sqrt+token_half_life"
    states = [
        jax.eval_shape(phase.tx.init, run_on(1, "ramp").init().params)
        for phase in build_run(whole).phases()
    ]
    assert len({jax.tree.structure(state) for state in states}) == 1


def test_a_rule_that_changes_the_state_is_refused():
    whole = config(1)
    whole.optimizer = OptimizerConfig("muonh")
    whole.schedule.base_learning_rate = 0.008
    whole.schedule.scaling_rule = "muonh"
    with refused("config.schedule.scaling_rule", "muonh", "conflict"):
        build_run(whole)


def test_a_run_by_noise_scale_without_its_log_is_refused(folder, tmp_path):
    workdir = straight(2, folder, "noise_scale")[2]
    shutil.copytree(workdir / "checkpoints", tmp_path / "checkpoints")
    lines = (workdir / "metrics.jsonl").read_text().splitlines()
    kept = [line for line in lines if "next_global_batch_size" not in line]
    (tmp_path / "metrics.jsonl").write_text("\n".join(kept) + "\n")
    with troubled("metrics.jsonl", code="mismatch"):
        train(run_on(2, "noise_scale"), tmp_path)


def test_a_change_of_batch_compiles_nothing_in_the_loop(tmp_path):
    # The programs are compiled by another thread. Small operations are compiled once a process.
    run = build_run(config(eval_every_steps=100, eval_global_batch_size=384))
    run = dataclasses.replace(run, cadence=dataclasses.replace(run.cadence, log_every_steps=100))
    compiled = []
    in_phase = []

    def note(event, duration, **_):
        here = threading.current_thread()
        ours = here is threading.main_thread() or here.name == "lbopt next phase"
        if ours and event == "/jax/core/compile/backend_compile_duration":
            compiled.append((here.name, list(in_phase)))

    def enter(phase, state, batch):
        in_phase[:] = [phase.global_batch_size]

    jax.monitoring.register_event_duration_secs_listener(note)
    try:
        train(watched(run, enter), tmp_path)
    finally:
        jax.monitoring.unregister_event_duration_listener(note)
    elsewhere = [size for name, size in compiled if name == "lbopt next phase"]
    assert len(elsewhere) >= 3
    # The first phase compiles its own step, and the last one the evaluation.
    here = [size for name, size in compiled if name != "lbopt next phase"]
    assert [16] in here
    assert [32] not in here
    assert [48] not in here


@pytest.mark.parametrize(
    ("changes", "field", "code"),
    [
        ({"kind": "often"}, "config.batch_schedule.kind", "choice"),
        ({"unit": "tokens"}, "config.batch_schedule.unit", "conflict"),
        ({"unit": "weeks"}, "config.batch_schedule.unit", "choice"),
        ({"final_batch_size": 16}, "config.batch_schedule.final_batch_size", "conflict"),
        ({"increment": 17}, "config.batch_schedule.increment", "mismatch"),
        ({"length": 0.0}, "config.batch_schedule.length", "value"),
        ({"microstep_size": 0}, "config.batch_schedule.microstep_size", "value"),
        ({"every": 2.0}, "config.batch_schedule.every", "unused"),
        ({"changes": ((1.0, 32),)}, "config.batch_schedule.changes", "unused"),
        ({"kind": "steps"}, "config.batch_schedule.final_batch_size", "unused"),
    ],
)
def test_refused_before_anything_is_compiled(changes, field, code):
    whole = config()
    whole.batch_schedule = dataclasses.replace(whole.batch_schedule, **changes)
    with refused(field, code=code):
        whole.validate()


def test_refused_beside_other_fields():
    with refused("config.batch_schedule.kind", code="conflict"):
        config(phase2=PhaseConfig()).validate()
    whole = config()
    whole.parallel.num_microsteps = 2
    with refused("config.batch_schedule.microstep_size", code="conflict"):
        whole.validate()


def test_refused_on_these_devices_and_data():
    odd = config(num_devices=4)
    odd.batch_schedule = dataclasses.replace(odd.batch_schedule, increment=2, final_batch_size=18)
    with refused("config.batch_schedule.final_batch_size", 18):
        build_run(odd)
    flat = config(batch_schedule=BatchScheduleConfig("seesaw", final_batch_size=64))
    flat.schedule.decay = "constant"
    with refused("config.batch_schedule.kind", "seesaw", "conflict"):
        build_run(flat)
    prime = config(num_devices=1)
    prime.batch_schedule = dataclasses.replace(
        prime.batch_schedule, increment=241, final_batch_size=257
    )
    with refused("config.batch_schedule.microstep_size", 16, "mismatch"):
        build_run(prime)
    halves = config(batch_schedule=BatchScheduleConfig("steps", changes=((0.1, 18),)))
    halves.parallel.num_microsteps = 4
    with refused("config.batch_schedule.changes", 18):
        build_run(halves)


@pytest.mark.parametrize(
    ("growing", "field"),
    [
        (BatchScheduleConfig("steps", changes=((0.1, 32), (30.0, 64))), "changes"),
        (BatchScheduleConfig("steps", changes=((0.1, 32), (0.101, 64))), "changes"),
        (BatchScheduleConfig("steps", changes=((0.5, 32), (0.501, 64))), "changes"),
        (BatchScheduleConfig("doubling", final_batch_size=64, every=100.0), "every"),
        (BatchScheduleConfig("ramp", final_batch_size=64, increment=16, length=9.0), "length"),
        (BatchScheduleConfig("ramp", final_batch_size=64, increment=1, length=0.2), "length"),
        (BatchScheduleConfig("critical", final_batch_size=64, measured=((9.0, 64),)), "measured"),
    ],
)
def test_a_change_after_the_end_and_a_phase_shorter_than_a_step_are_refused(growing, field):
    with refused(f"config.batch_schedule.{field}", code="conflict"):
        build_run(config(batch_schedule=growing))


def test_seesaw_needs_a_rule_that_scales_the_rate():
    whole = config(batch_schedule=BatchScheduleConfig("seesaw", final_batch_size=64))
    whole.schedule.scaling_rule = "token_half_life"
    with refused("config.batch_schedule.kind", "seesaw", "conflict"):
        whole.validate()


def test_a_noise_scale_that_nothing_measures_is_refused():
    alone = config(1, "noise_scale")
    alone.parallel.num_microsteps = 1
    with refused("config.optimizer.track_noise_scale"):
        build_run(alone)
    unmeasured = config(2, "noise_scale")
    unmeasured.optimizer.track_noise_scale = False
    with refused("config.batch_schedule.kind", "noise_scale", "conflict"):
        unmeasured.validate()
    uneven = config(2, "noise_scale")
    uneven.batch_schedule.final_batch_size = 80
    with refused("config.batch_schedule.final_batch_size", 80, "mismatch"):
        uneven.validate()


def test_another_batch_schedule_does_not_resume(tmp_path, capsys):
    file = tmp_path / "own.py"
    file.write_text(
        "from lbopt.config import *\n"
        "def get_config(arg='32'):\n"
        "    return TrainConfig(data='digits', model='mlp', num_steps=4, global_batch_size=16,\n"
        "        schedule=0.01, log_every_steps=1, eval_every_steps=100,\n"
        "        batch_schedule=BatchScheduleConfig('steps', unit='examples',\n"
        "            changes=((32.0, int(arg)),)))\n"
    )
    command = ["train", f"--workdir={tmp_path / 'run'}"]
    assert main([*command, f"--config={file}:32"]) == 0
    assert main([*command, f"--config={file}:64"]) == 2
    assert "batch_schedule" in capsys.readouterr().err
