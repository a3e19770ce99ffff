"""A config becomes a run."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh

from lbopt import errors, types
from lbopt.config import ParallelConfig, TrainConfig, naming, naming_phase2, scaled_modules
from lbopt.data import Dataset, TrainBatches
from lbopt.data.from_config import load_source
from lbopt.data.text import Vocabulary
from lbopt.errors import require, require_choice
from lbopt.parallel import (
    Step,
    TrainState,
    available_devices,
    check_divisible,
    local_parts,
    make_mesh,
    put_replicated,
    split_seed,
    torus_grid,
    with_shardings,
)
from lbopt.recipes import _initial, _optimizers, _problem, _replicas, _schedule, _step
from lbopt.replicas import Replicas
from lbopt.train import Cadence, Run, Target
from lbopt.transforms import LearningRateState, ema_params


def build_run(
    config: TrainConfig,
    devices: Sequence[jax.Device] | None = None,
    load: _problem.Load = load_source,
    trains: bool = True,
) -> Run:
    """Turn a validated config into everything the training loop needs, compiling nothing.

    Args:
      config: of the run.
      devices: to choose from, for instance of a pod that is not here; None for `jax.devices()`.
      load: see `make_problem`.
      trains: False for a run whose checkpoints are only read: the state is the same, and neither batches nor groups of batch norm
        have to fit the devices. Its step cannot be called.

    Returns:
      The run; of two phases, the first, which knows the second.

    Raises:
      UserError: naming the field that does not fit the data or the devices.
      EnvironmentProblem: if the data, or what the run starts from, cannot be had.
    """
    config.validate()
    if not trains:
        config = _on_any_devices(config, devices)
    first, *second = config.phases()
    with _naming():
        mesh = build_mesh(config.parallel, devices)
        run = _build_phase(first, mesh, load, trains=trains)
        if not second:
            return run
        assert config.phase2 is not None
        kept = config.phase2.optimizer_state == "keep"
        with naming_phase2():
            then = _build_phase(second[0], mesh, load, run, kept, trains)
    return dataclasses.replace(run, then=then)


def _naming() -> contextlib.AbstractContextManager[None]:
    """Let errors name fields of a run's config as `config.field`."""
    return naming("config", TrainConfig)


def _on_any_devices(config: TrainConfig, devices: Sequence[jax.Device] | None) -> TrainConfig:
    """Return the config of a run that has the same network and state, and asks nothing of the devices."""
    found, parallel = copy.deepcopy(config), config.parallel
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
    # AGVM asks for an even number of replicas; what the others remember is rebuilt for any.
    found.aggregator.over, found.aggregator.replicas_per_device = (
        "replicas",
        1 + (config.aggregator.name == "agvm"),
    )
    found.model.batch_norm_scope = "global"
    return found


def _build_phase(
    config: TrainConfig,
    mesh: Mesh,
    load: _problem.Load,
    before: Run | None = None,
    keep_optimizer: bool = True,
    trains: bool = True,
) -> Run:
    size = config.global_batch_size
    problem = _problem.make_problem(
        config.data, config.model, config.loss, size, config.init_from, load
    )
    train, validation, test = problem.splits
    if trains:
        check_batch_fits(config, problem, mesh)
    resolved = _schedule.resolve_schedule(
        config.schedule, size, len(train), config.num_epochs, num_steps=config.num_steps
    )
    schedule = _schedule.make_schedule(config.schedule, resolved)
    labels = scaled_modules(config.aggregator)
    _replicas.check_modules(labels, problem.init)
    tx = _optimizers.make_optimizer(config.optimizer, schedule, None, size, problem.stacked, labels)
    train_step = _step.make_step(config, problem.loss_fn, tx, mesh, problem.stacked, trains)
    shapes, init = _laid_out(
        functools.partial(build_state, problem, tx, config.seed), train_step, config
    )
    evaluate_on = problem.evaluator(mesh, config.parallel.backend)
    averaged = _averaging(config, mesh)
    first_step, first_example = (
        (before.last_step, before.examples_seen(before.last_step)) if before else (0, 0)
    )

    def evaluation(dataset: Dataset) -> Callable[[TrainState], dict[str, float]]:
        return lambda state: evaluate_on(averaged(state), dataset, config.eval_global_batch_size)

    return Run(
        mesh=mesh,
        shapes=shapes,
        init=init,
        train_step=train_step,
        batches=TrainBatches(
            train,
            config.seed,
            size,
            resolved.num_steps,
            *_spread(mesh, trains),
            first_example=first_example,
        ),
        evaluate=evaluation(validation),
        evaluate_test=evaluation(test),
        lower_evaluation=lambda: evaluate_on.lower(
            shapes(), validation, config.eval_global_batch_size
        ),
        validation=validation,
        global_batch_size=size,
        num_steps=resolved.num_steps,
        cadence=_cadence(config, resolved),
        keep_checkpoints=config.checkpoint.keep,
        best_metric=config.checkpoint.best_metric,
        first_step=first_step,
        first_example=first_example,
        vocabulary=problem.vocabulary,
        check_start=lambda: _check_start(config, shapes(), problem.vocabulary),
        enter=_entering(tx, train_step, keep_optimizer) if before else None,
        damaged=lambda: _damaged(train, validation),
        target=_target(config),
        mllog=_mllog(config, resolved, len(train), len(validation)) if config.mllog else None,
        stop_at_nan=config.stop_at_nan,
        steps_per_epoch=resolved.steps_per_epoch,
    )


def _spread(mesh: Mesh, trains: bool) -> tuple[int, list[int] | None]:
    """Return into how many parts a batch is cut, and which are this process's."""
    return (mesh.size, local_parts(mesh)) if trains else (1, None)


def check_batch_fits(config: TrainConfig, problem: _problem.Problem, mesh: Mesh) -> None:
    """Check the batch against data, devices and batch norm, and the names of metrics."""
    size, parts, examples = (
        config.global_batch_size,
        config.parallel.num_microsteps,
        len(problem.splits.train),
    )
    fix = f"the training set has {examples} examples; use at most that"
    require(size <= examples, "global_batch_size", size, fix, code="mismatch")
    rows = config.aggregator.replicas_per_device
    check_divisible(size, mesh, parts, rows)
    _problem.check_batch(
        config.model,
        Replicas(mesh.size, grid=torus_grid(mesh), rows=rows),
        size // (parts * rows),
    )
    known = [f"eval/{name}" for name in problem.metric_names]
    require_choice("checkpoint.best_metric", config.checkpoint.best_metric, known)
    if config.target_metric:
        require_choice("target_metric", config.target_metric, known)


def _cadence(config: TrainConfig, resolved: _schedule.ResolvedSchedule) -> Cadence:
    epochs = config.eval_every_epochs
    every_steps = config.eval_every_steps if epochs is None else epochs * resolved.steps_per_epoch
    return Cadence(config.log_every_steps, every_steps, config.checkpoint.every_steps)


def _target(config: TrainConfig) -> Target | None:
    if not config.target_metric:
        return None
    return Target(config.target_metric, config.target_value, config.stop_at_target)


def _mllog(
    config: TrainConfig, resolved: _schedule.ResolvedSchedule, num_train: int, num_validation: int
) -> dict[str, Any]:
    """Return what MLPerf's log says at the beginning, under its keys."""
    optimizer = config.optimizer
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


def _laid_out(
    first: Callable[..., TrainState], train_step: Step, config: TrainConfig
) -> tuple[Callable[[], TrainState], Callable[[], TrainState]]:
    """Return () -> shapes of the first state with the shardings that the step asks for, and () -> the state itself, laid out so.

    What the run starts from is read when the state is made.
    """

    def begun(*learned: Any) -> TrainState:
        return train_step.with_aggregator_state(first(*learned))

    @functools.cache
    def shapes() -> TrainState:
        bare = jax.eval_shape(begun)
        return with_shardings(bare, train_step.state_sharding(bare))

    def init() -> TrainState:
        shardings = jax.tree.map(lambda x: x.sharding, shapes())
        if config.init_from is None:
            return jax.jit(begun, out_shardings=shardings)()
        return jax.jit(begun, out_shardings=shardings)(_read_initial(config, shapes()))

    return shapes, init


def _read_initial(config: TrainConfig, shapes: TrainState) -> tuple[types.Params, types.ModelState]:
    place = config.init_from
    assert place is not None
    with _naming():
        read = _initial.read(place, config.model)
        params, _ = _initial.merged(shapes.params, read["params"], config.model, place)
        stats = {
            name: value
            for name, value in read.items()
            if name != "params" and name in shapes.model_state
        }
        known = {name: shapes.model_state[name] for name in stats}
        return params, _initial.merged(known, stats, config.model, place)[0]


def _check_start(config: TrainConfig, shapes: TrainState, vocabulary: Vocabulary) -> None:
    """Look at what the run starts from before anything is compiled."""
    if config.init_from is not None:
        with _naming():
            _initial.check_text(config.init_from, vocabulary)
        _read_initial(config, shapes)


def _averaging(config: TrainConfig, mesh: Mesh) -> Callable[[TrainState], TrainState]:
    """Return what a state is evaluated as: with averaged parameters, if the optimizer keeps them."""

    def averaged(state: TrainState) -> TrainState:
        state = with_averaged_params(state)
        return state.replace(params=put_replicated(mesh, state.params))

    return (lambda state: state) if config.optimizer.ema_decay is None else averaged


def _entering(
    tx: optax.GradientTransformation, train_step: Step, keep_optimizer: bool
) -> Callable[[TrainState], TrainState]:
    """Return the last state of a phase -> the first state of the next."""

    def again(part: Any) -> Any:
        if not isinstance(part, LearningRateState):
            return part
        return part._replace(schedule_count=jnp.zeros_like(part.schedule_count))

    def entered(state: TrainState) -> TrainState:
        if not keep_optimizer:
            return train_step.with_aggregator_state(state.replace(opt_state=tx.init(state.params)))
        is_leaf = lambda part: isinstance(part, LearningRateState)  # noqa: E731
        return state.replace(opt_state=jax.tree.map(again, state.opt_state, is_leaf=is_leaf))

    def enter(state: TrainState) -> TrainState:
        return jax.jit(entered, out_shardings=train_step.state_sharding(state))(state)

    return enter


def _damaged(train: Dataset, validation: Dataset) -> dict[str, float]:
    """Return how many records were left out so far, for the log, where that can happen."""
    counts = {
        "train": getattr(train, "damaged", None),
        "validation": getattr(validation, "damaged", None),
    }
    return {
        f"data/damaged_{name}_records": float(len(count))
        for name, count in counts.items()
        if count is not None
    }


def build_mesh(parallel: ParallelConfig, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """Lay out the devices that a config asks for, of those given or of `jax.devices()`.

    Raises:
      UserError: naming the field that does not fit them.
    """
    with errors.under("parallel"):
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
    problem: _problem.Problem,
    tx,
    seed: int | jax.Array,
    learned: tuple[types.Params, types.ModelState] | None = None,
) -> TrainState:
    """Return the state before the first update; `seed` may be traced. Sweeps and runs start from the same one.

    Args:
      problem: what is to be learned.
      tx: the optimizer.
      seed: of the run.
      learned: parameters and model state to start from, with None for leaves that start fresh.
    """
    params, model_state = problem.init(split_seed(seed)[0])
    if learned is not None:
        params, stats = (
            _over(*pair) for pair in zip((params, {**model_state}), learned, strict=True)
        )
        model_state = {**model_state, **stats}
    return TrainState.create(params, model_state, tx, seed)


def _over(fresh: types.PyTree, learned: types.PyTree) -> types.PyTree:
    """Return `learned`, with what is missing there from `fresh`."""
    if isinstance(learned, Mapping):
        return {**fresh, **{name: _over(fresh[name], value) for name, value in learned.items()}}
    return fresh if learned is None else learned


def with_averaged_params(state: TrainState) -> TrainState:
    """Return the state with the average that `track_ema` kept in the place of the parameters."""
    return state.replace(params=ema_params(state.opt_state, like=state.params))
