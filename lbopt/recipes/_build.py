"""Construction of a run from its config."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import optax
from jax.sharding import Mesh

from lbopt import errors, types
from lbopt.config import (
    NOISE_SCALE,
    CheckpointConfig,
    OptimizerConfig,
    ParallelConfig,
    ResolvedSchedule,
    TrainConfig,
    at_batch_size,
    batch_ratios,
    check_moments,
    doubled_sizes,
    examples_in,
    make_optimizer,
    make_schedule,
    moment_decays,
    naming,
    naming_growth,
    naming_phase2,
    naming_step,
    resolve_batch_schedule,
    resolve_schedule,
    scale_optimizer,
    scaled_modules,
    step_options,
    with_local_steps,
)
from lbopt.data import TrainBatches
from lbopt.data.from_config import load_source
from lbopt.errors import require
from lbopt.parallel import (
    TrainState,
    available_devices,
    check_divisible,
    devices_per_worker,
    local_parts,
    make_mesh,
    split_seed,
    torus_grid,
)
from lbopt.recipes import _initial, _layout, _make_step, _patterns, _problem
from lbopt.replicas import Replicas
from lbopt.schedules import BatchPhase, Units, phase_schedule
from lbopt.train import Cadence, NoiseGrowth, Reweighing, Run, Target, linked
from lbopt.transforms import evaluated_params, has_evaluated_params


def build_run(
    config: TrainConfig,
    devices: Sequence[jax.Device] | None = None,
    load: _problem.Load = load_source,
    trains: bool = True,
) -> Run:
    """Turn a validated config into everything the training loop needs, compiling nothing.

    Args:
      config: Config of the run.
      devices: Devices to choose from, for instance those of a pod that is not here; None for
        `jax.devices()`.
      load: Function that loads the data, as in `make_problem`.
      trains: False for a run whose checkpoints are only read. Its state is the same and its step
        cannot be called, so neither batches nor groups of batch norm have to fit the devices.

    Returns:
      The run. If it has two phases this is the first, which knows the second.

    Raises:
      UserError: Naming the field that does not fit the data or the devices.
      EnvironmentProblem: If the data or the initial values cannot be read.
    """
    config.validate()
    if not trains:
        config = _on_any_devices(config, devices)
    first, *second = config.phases()
    with naming_run():
        mesh = build_mesh(config.parallel, devices)
        if config.batch_schedule is not None:
            by_noise = config.batch_schedule.kind == NOISE_SCALE
            build = _build_noise_growth if by_noise else _build_batch_phases
            return build(first, mesh, load, trains)
        run = _build_phase(first, mesh, load, trains)
        if not second:
            return run
        assert config.phase2 is not None
        kept = first if config.phase2.optimizer_state == "keep" else None
        with naming_phase2():
            second_phase = _build_phase(second[0], mesh, load, trains, run, kept)
    return dataclasses.replace(run, next_phase=second_phase)


def naming_run() -> contextlib.AbstractContextManager[None]:
    """Let errors name fields of a run's config as `config.field`."""
    return naming("config", TrainConfig)


def _on_any_devices(config: TrainConfig, devices: Sequence[jax.Device] | None) -> TrainConfig:
    """Return the config of a run with the same network and state that fits any devices."""
    found = copy.deepcopy(config)
    parallel = config.parallel
    there = len(available_devices() if devices is None else devices)
    found.parallel = ParallelConfig(
        parallel.backend if config.aggregator.name != "agvm" else "jit",
        parallel.num_devices
        if parallel.num_devices is None or parallel.num_devices <= there
        else None,
        shard_update=parallel.shard_update,
    )
    if found.phase2 is not None:
        found.phase2.num_microsteps = 1
    found.batch_schedule = None  # states have the same shapes at every batch size
    # AGVM needs an even number of replicas; the memory of other aggregators is rebuilt for any.
    found.aggregator.over = "replicas"
    found.aggregator.replicas_per_device = 1 + (config.aggregator.name == "agvm")
    found.model.batch_norm_scope = "global"
    return found


def _build_phase(
    config: TrainConfig,
    mesh: Mesh,
    load: _problem.Load,
    trains: bool,
    before: Run | None = None,
    kept: TrainConfig | None = None,
) -> Run:
    """Build a phase of one batch size, with a learning rate of its own.

    Args:
      config: Config of the phase.
      mesh: The devices.
      load: Function that loads the data.
      trains: As in `build_run`.
      before: The phase before; None for the first.
      kept: Config of the phase before, if its optimizer's state is kept; None if not.
    """
    config = _layout.with_layout(config, mesh.devices.flat[0].platform, mesh.size)
    problem = make_problem_of(config, load)
    if trains:  # of two faults the batch is the one to name
        check_batch_fits(config, problem, mesh)
    resolved = resolved_of(config, problem)
    schedule = make_schedule(config.schedule, resolved)
    run = build_one_batch(config, problem, mesh, resolved, schedule, before, trains)
    if kept is None:
        return dataclasses.replace(run, resets_optimizer=before is not None)

    old, new = (
        scale_optimizer(each.optimizer, each.schedule, each.global_batch_size)
        for each in (kept, config)
    )
    return dataclasses.replace(run, reweighing=_reweighing(old, new, problem))


def _build_batch_phases(config: TrainConfig, mesh: Mesh, load: _problem.Load, trains: bool) -> Run:
    """Build a run whose batch changes; a phase for each batch size, from one problem."""
    growing = config.batch_schedule
    assert growing is not None
    config, problem, resolved = _prepared(config, mesh, load, trains)
    first = config.global_batch_size
    num_examples = len(problem.splits.train)
    base = make_schedule(config.schedule, resolved)

    runs: list[Run] = []
    for phase in batch_phases_of(config, problem):
        size = phase.global_batch_size
        here = at_batch_size(config, size, mesh.size)
        steps = dataclasses.replace(
            resolved,
            num_steps=phase.num_steps,
            steps_per_epoch=Units(num_examples, size).exact_steps(1),
        )
        scale = batch_ratios(config, first, size).learning_rate
        schedule = phase_schedule(base, phase, first, scale)
        with naming_growth(growing, size) if runs else contextlib.nullcontext():
            run = build_one_batch(
                here, problem, mesh, steps, schedule, runs[-1] if runs else None, trains
            )
        before = runs[-1].global_batch_size if runs else size
        runs.append(continuing(run, config, before, problem) if runs else run)

    _check_states(config, [run.tx for run in runs], problem)
    log = runs[0].mllog
    if log is not None:
        whole = {**log, "opt_learning_rate_training_steps": runs[-1].last_step}
        runs[0] = dataclasses.replace(runs[0], mllog=whole)
    return linked(runs)


def _prepared(
    config: TrainConfig, mesh: Mesh, load: _problem.Load, trains: bool
) -> tuple[TrainConfig, _problem.LoadedProblem, ResolvedSchedule]:
    """Return a config of several batch sizes with its layout, its problem, and its schedule."""
    config = _layout.with_layout(config, mesh.devices.flat[0].platform)
    problem = make_problem_of(config, load)
    if trains:
        check_batch_fits(config, problem, mesh)
    return config, problem, resolved_of(config, problem)


def _build_noise_growth(config: TrainConfig, mesh: Mesh, load: _problem.Load, trains: bool) -> Run:
    """Build a run whose batch doubles as its noise scale says, with all its batch sizes."""
    growing = config.batch_schedule
    assert growing is not None
    config, problem, resolved = _prepared(config, mesh, load, trains)
    first = config.global_batch_size
    num_examples = len(problem.splits.train)
    base = make_schedule(config.schedule, resolved)
    total = num_examples * config.num_epochs if config.num_steps is None else 0

    candidates: list[Run] = []
    before = first
    for size in doubled_sizes(growing, first):
        here = at_batch_size(config, size, mesh.size)
        units = Units(num_examples, size)
        steps = dataclasses.replace(resolved, steps_per_epoch=units.exact_steps(1))
        ratios = batch_ratios(config, first, size)
        schedule = _in_strides(base, size // first, ratios.learning_rate)
        with naming_growth(growing, size) if candidates else contextlib.nullcontext():
            run = build_one_batch(here, problem, mesh, steps, schedule, None, trains)
        candidates.append(continuing(run, config, before, problem) if candidates else run)
        before = size

    _check_states(config, [run.tx for run in candidates], problem)
    unit = examples_in(growing, num_examples, config.data.sequence_length)
    last = candidates[-1].global_batch_size
    every = max(1, round(growing.every * unit / last)) * last
    growth = NoiseGrowth(
        tuple(candidates), every, growing.noise_scale_factor, total or first * resolved.num_steps
    )
    return growth.chain(())


def check_growth(
    config: TrainConfig, problem: _problem.LoadedProblem, sizes: Sequence[int]
) -> None:
    """Check that the optimizer's state can be carried from batch size to batch size.

    Args:
      config: Config of a run with a batch schedule.
      problem: Its data, model and loss.
      sizes: The batch sizes, in order.

    Raises:
      UserError: Naming the field, for a rule that has no value for a number of the optimizer, or
        that changes the state, or moments of an unknown optimizer.
    """
    rate = config.schedule.base_learning_rate
    made = [_optimizer_at(config, problem, size, rate) for size in sizes]
    for (before, _), (after, _) in itertools.pairwise(made):
        _reweighing(before, after, problem)
    _check_states(config, [tx for _, tx in made], problem)


def _optimizer_at(
    config: TrainConfig,
    problem: _problem.LoadedProblem,
    global_batch_size: int,
    schedule: optax.ScalarOrSchedule,
) -> tuple[OptimizerConfig, optax.GradientTransformation]:
    """Return the optimizer of a batch size, with the numbers that the scaling rule gives it."""
    optimizer = scale_optimizer(config.optimizer, config.schedule, global_batch_size)
    labels = scaled_modules(config.aggregator)
    of_leaves = (problem.stacked, labels, problem.known_roles, problem.transfer)
    return optimizer, make_optimizer(optimizer, schedule, None, global_batch_size, *of_leaves)


def _check_states(
    config: TrainConfig,
    optimizers: Sequence[optax.GradientTransformation],
    problem: _problem.LoadedProblem,
) -> None:
    """Check that the optimizer's state is the same tree at every batch size."""
    trees = [jax.tree.structure(jax.eval_shape(tx.init, problem.params)) for tx in optimizers]
    rule = config.schedule.scaling_rule
    fix = "it changes a number of the optimizer that is at a special value (a ratio of 1, for "
    fix += "instance), and with it the optimizer's state; give the number another value"
    require(len({*trees}) == 1, "schedule.scaling_rule", rule, fix, code="conflict")


def continuing(run: Run, config: TrainConfig, before: int, problem: _problem.LoadedProblem) -> Run:
    """Return a run as the phase after one of another batch size.

    Args:
      run: The run.
      config: Its config, with the optimizer's numbers at `schedule.base_batch_size`.
      before: The other batch size.
      problem: Its model.
    """
    old, new = (
        scale_optimizer(config.optimizer, config.schedule, size)
        for size in (before, run.global_batch_size)
    )
    return dataclasses.replace(run, continues=True, reweighing=_reweighing(old, new, problem))


def _reweighing(
    before: OptimizerConfig, after: OptimizerConfig, problem: _problem.LoadedProblem
) -> Reweighing | None:
    """Return the program that suits moments to an optimizer's numbers; None if they stay."""
    decays = moment_decays(before, after)
    if decays is None:
        return None
    check_moments(after, decays, problem.params, problem.stacked, problem.known_roles)
    return Reweighing(decays)


def _in_strides(schedule: optax.Schedule, stride: int, scale: float) -> optax.Schedule:
    """Return a schedule that takes several steps of another one at a time, times a factor."""
    return lambda count: scale * schedule(count * stride)


def batch_phases_of(config: TrainConfig, problem: _problem.LoadedProblem) -> tuple[BatchPhase, ...]:
    """Return the phases of a config with a batch schedule, one for each batch size.

    Args:
      config: Config of a run.
      problem: Its data.

    Raises:
      UserError: Naming the field, for a change after the end, or a phase shorter than a step.
    """
    assert config.batch_schedule is not None
    size = config.global_batch_size
    num_examples = len(problem.splits.train)
    resolved = resolved_of(config, problem)
    total = num_examples * config.num_epochs
    with errors.under("batch_schedule"):
        return resolve_batch_schedule(
            config.batch_schedule,
            size,
            num_examples,
            config.data.sequence_length,
            make_schedule(config.schedule, resolved),
            total if config.num_steps is None else size * config.num_steps,
        )


def make_problem_of(config: TrainConfig, load: _problem.Load) -> _problem.LoadedProblem:
    size = config.global_batch_size
    return _problem.make_problem(
        config.data, config.model, config.loss, size, config.init_from, load
    )


def resolved_of(config: TrainConfig, problem: _problem.LoadedProblem) -> ResolvedSchedule:
    """Return the schedule of a config at its own batch size."""
    num_examples = len(problem.splits.train)
    size = config.global_batch_size
    return resolve_schedule(
        config.schedule, size, num_examples, config.num_epochs, num_steps=config.num_steps
    )


def build_one_batch(
    config: TrainConfig,
    problem: _problem.LoadedProblem,
    mesh: Mesh,
    resolved: ResolvedSchedule,
    schedule: optax.Schedule,
    before: Run | None,
    trains: bool,
) -> Run:
    """Build a run of one batch size.

    Args:
      config: Config of the run, its layout chosen.
      problem: Data, model and loss.
      mesh: The devices.
      resolved: The length, and the numbers of the schedule for logs.
      schedule: Learning rate as a function of updates so far.
      before: The phase before; None for the first.
      trains: As in `build_run`.
    """
    size = config.global_batch_size
    train, validation, _ = problem.splits
    if trains:
        check_batch_fits(config, problem, mesh)
    _patterns.check_patterns(config, problem)
    optimizer, inner = _optimizer_at(config, problem, size, schedule)
    opt_state = jax.eval_shape(inner.init, problem.params)
    fix = "arrays of its state have size zero, which no checkpoint can hold; use another"
    fits = all(leaf.size for leaf in jax.tree.leaves(opt_state))
    require(fits, "optimizer.name", config.optimizer.name, fix, code="conflict")
    tx = with_local_steps(config.diloco, inner, resolved.num_steps)
    of_inner = errors.about("optimizer.name", config.optimizer.name, "diloco.inner")
    with of_inner, errors.under("diloco"):
        jax.eval_shape(tx.init, problem.params)
    train_step = _make_step.make_step(config, problem.loss_fn, tx, mesh, problem.stacked, trains)

    # A later phase continues the stream of examples where the first one ends.
    position = (before.last_step, before.examples_seen(before.last_step)) if before else (0, 0)
    first_step, first_example = position

    return Run(
        make_state=functools.partial(build_state, problem, tx, config.seed),
        tx=tx,
        train_step=train_step,
        batches=TrainBatches(
            train,
            config.seed,
            size,
            resolved.num_steps,
            *_batch_shards(mesh, trains),
            first_example=first_example,
        ),
        splits=problem.splits,
        evaluation=problem.evaluator(mesh, config.parallel.backend),
        eval_global_batch_size=config.eval_global_batch_size,
        cadence=_cadence(config, resolved, len(train)),
        steps_per_epoch=resolved.steps_per_epoch,
        keep_checkpoints=config.checkpoint.keep,
        best_metric=_best_metric(config, problem),
        evaluates_average=has_evaluated_params(opt_state),
        initial=_initial.of_config(config),
        vocabulary=problem.vocabulary,
        target=_target(config),
        mllog=_mllog(config, optimizer, resolved, len(train), len(validation))
        if config.mllog
        else None,
        stop_at_nan=config.stop_at_nan,
        first_step=first_step,
    )


def _batch_shards(mesh: Mesh, trains: bool) -> tuple[int, list[int] | None]:
    """Return the number of equal shards of a global batch, and this process's shards by index.

    A run that does not train reads no batch of several devices: (1, None).
    """
    return (mesh.size, local_parts(mesh)) if trains else (1, None)


def check_batch_fits(
    config: TrainConfig, problem: _problem.LoadedProblem | None, mesh: Mesh
) -> None:
    """Check the batch against data, devices and batch norm, and the names of metrics.

    Without a problem, check what does not depend on its data.
    """
    size = config.global_batch_size
    microsteps = config.parallel.num_microsteps
    if problem is not None:
        _problem.check_size(problem, size)
    simulated = config.aggregator.replicas_per_device
    check_divisible(size, mesh.size * simulated, microsteps)
    here = Replicas(mesh.size, grid=torus_grid(mesh), simulated=simulated)
    if config.diloco.every > 1:  # batch norm sees the devices of one worker
        with naming_step():
            here = Replicas(devices_per_worker(mesh, step_options(config)))
    seen = size * here.count // (mesh.size * simulated * microsteps)
    _problem.check_batch(config.model, here, seen)
    if problem is None:
        return

    problem.check_metric("checkpoint.best_metric", _best_metric(config, problem))
    if config.target_metric:
        problem.check_metric("target_metric", config.target_metric)


def _best_metric(config: TrainConfig, problem: _problem.LoadedProblem) -> str:
    """Return the metric that says which checkpoint is best; the default suits any task."""
    name = config.checkpoint.best_metric
    is_default = name == CheckpointConfig.best_metric and "accuracy" not in problem.metric_names
    return f"eval/{problem.main_metric}" if is_default else name


def _cadence(config: TrainConfig, resolved: ResolvedSchedule, num_examples: int) -> Cadence:
    return Cadence(
        config.log_every_steps,
        config.steps_between_evaluations(resolved.steps_per_epoch),
        config.checkpoint.every_steps,
        config.examples_between_evaluations(num_examples),
    )


def _target(config: TrainConfig) -> Target | None:
    if not config.target_metric:
        return None
    return Target(config.target_metric, config.target_value, config.stop_at_target)


def _mllog(
    config: TrainConfig,
    optimizer: OptimizerConfig,
    resolved: ResolvedSchedule,
    num_train: int,
    num_validation: int,
) -> dict[str, Any]:
    """Return the values at the beginning of MLPerf's log, by their keys."""
    return {
        "submission_benchmark": config.model.name,
        "seed": config.seed,
        "global_batch_size": config.global_batch_size,
        "gradient_accumulation_steps": config.parallel.num_microsteps,
        "train_samples": num_train,
        "eval_samples": num_validation,
        "opt_name": optimizer.name,
        "opt_base_learning_rate": resolved.learning_rate,
        "opt_learning_rate_warmup_steps": resolved.warmup_steps,
        "opt_learning_rate_training_steps": resolved.num_steps,
        "opt_learning_rate_decay_poly_power": config.schedule.power,
        "opt_end_learning_rate": config.schedule.end_learning_rate or 0.0,
        "opt_weight_decay": optimizer.weight_decay,
    }


def build_mesh(parallel: ParallelConfig, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """Lay out the devices that a config asks for, of those given or of `jax.devices()`.

    Raises:
      UserError: Naming the field that does not fit them.
    """
    with errors.under("parallel", ("num_devices", "order")):
        mesh = make_mesh(parallel.num_devices, devices, parallel.order)
        taking_part = len({device.process_index for device in mesh.devices.flat})
        fix = (
            f"{taking_part} of {jax.process_count()} processes would have some; use more devices, "
            "or start fewer processes"
        )
        fits = devices is not None or taking_part == jax.process_count()
        require(fits, "num_devices", parallel.num_devices, fix, code="mismatch")
    return mesh


def build_state(
    problem: _problem.LoadedProblem,
    tx,
    seed: int | jax.Array,
    learned: tuple[types.Params, types.ModelState] | None = None,
) -> TrainState:
    """Return the state before the first update, the same for runs and sweeps.

    Args:
      problem: Data, model and loss.
      tx: The optimizer.
      seed: Seed of the run; it may be traced.
      learned: Parameters and model state to start from, with None for leaves that start fresh.
    """
    params, model_state = problem.init(split_seed(seed)[0])
    if learned is not None:
        params, stats = (
            _completed(*pair) for pair in zip((params, {**model_state}), learned, strict=True)
        )
        model_state = {**model_state, **stats}
    return TrainState.create(params, model_state, tx, seed)


def _completed(fresh: types.PyTree, learned: types.PyTree) -> types.PyTree:
    """Return `learned`, with leaves that are None or missing in it taken from `fresh`."""
    if isinstance(learned, Mapping):
        known = {name: _completed(fresh[name], value) for name, value in learned.items()}
        return {**fresh, **known}
    return fresh if learned is None else learned


def with_averaged_params(state: TrainState) -> TrainState:
    """Return the state with the average that `track_ema` kept in the place of the parameters."""
    return state.replace(params=evaluated_params(state.opt_state, state.params))
