"""A config becomes a run."""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
from jax.sharding import Mesh

from lbopt.config.parallel import ParallelConfig
from lbopt.config.train import TrainConfig
from lbopt.data.batches import TrainBatches
from lbopt.errors import UserError, require
from lbopt.evaluation import evaluate
from lbopt.parallel import mesh as meshes, shards, step as steps
from lbopt.parallel.state import TrainState, split_seed
from lbopt.recipes import optimizers, problem as problems, schedule as schedules
from lbopt.replicas import Replicas
from lbopt.train.run import Cadence, Run
from lbopt.transforms.ema import ema_params


def build(config: TrainConfig) -> Run:
    """Turn a validated config into everything the training loop needs, compiling nothing.

    Raises:
      UserError: naming the field that does not fit the data or the devices.
      EnvironmentProblem: if the data cannot be had.
    """
    config.validate()
    problem = problems.make_problem(config.data, config.model, config.loss)
    train, validation, _ = problem.splits
    size = config.global_batch_size
    require(
        size <= len(train),
        "config.global_batch_size",
        size,
        f"the training set has {len(train)} examples; use at most that",
    )
    mesh = _make_mesh(config.parallel)
    meshes.check_divisible(size, mesh, config.parallel.num_microsteps)
    here = Replicas(mesh.size, grid=meshes.torus_grid(mesh))
    problems.check_batch(config.model, here, size // config.parallel.num_microsteps)
    resolved = schedules.resolve(config.schedule, size, len(train), config.num_epochs)
    schedule = schedules.make_schedule(config.schedule, resolved)
    tx = optimizers.make_optimizer(config.optimizer, schedule, global_batch_size=size, stacked=problem.stacked)
    measured = config.optimizer.track_noise_scale
    require(
        not measured or mesh.size * config.parallel.num_microsteps > 1,
        "config.optimizer.track_noise_scale",
        measured,
        "it compares gradients of parts of the batch: set config.parallel.num_microsteps to 2 or more",
    )
    backend = config.parallel.backend
    eval_step = steps.make_eval_step(problem.metric_fn, mesh, backend)  # type: ignore[arg-type]

    stage = config.optimizer.clip_stage

    train_step = steps.make_train_step(
        problem.loss_fn,
        tx,
        mesh,
        backend,  # type: ignore[arg-type]
        config.parallel.num_microsteps,
        max_grad_norm=None if stage in ("accumulated", "none") else optimizers.resolve_clip(config.optimizer),
        clip_stage=stage,
        measure_noise=measured,
        key_per_replica=False,
        shard_update=config.parallel.shard_update,
    )

    shapes, init = _laid_out(lambda: make_state(problem, tx, config.seed), train_step)

    def averaged(state: TrainState) -> TrainState:
        if config.optimizer.ema_decay is None:
            return state
        state = with_averaged_params(state)
        return state.replace(params=meshes.put_replicated(mesh, state.params))

    return Run(
        mesh=mesh,
        shapes=shapes,
        init=init,
        train_step=train_step,
        batches=TrainBatches(train, config.seed, size, resolved.num_steps, jax.process_index(), jax.process_count()),
        evaluate=lambda state: evaluate(eval_step, averaged(state), validation, config.eval_global_batch_size),
        evaluate_test=lambda state: evaluate(
            eval_step, averaged(state), problem.splits.test, config.eval_global_batch_size
        ),
        global_batch_size=size,
        num_steps=resolved.num_steps,
        cadence=Cadence(config.log_every_steps, config.eval_every_steps, config.checkpoint.every_steps),
        keep_checkpoints=config.checkpoint.keep,
        best_metric=config.checkpoint.best_metric,
    )


def _laid_out(
    first: Callable[[], TrainState], train_step: steps.Step
) -> tuple[Callable[[], TrainState], Callable[[], TrainState]]:
    """Return () -> shapes of the first state with the shardings that the step asks for, and () -> the state itself, laid out so."""

    @functools.cache
    def shapes() -> TrainState:
        bare = jax.eval_shape(first)
        return shards.placed(bare, train_step.state_sharding(bare))

    def init() -> TrainState:
        return jax.jit(first, out_shardings=jax.tree.map(lambda x: x.sharding, shapes()))()

    return shapes, init


def _make_mesh(parallel: ParallelConfig) -> Mesh:
    try:
        return meshes.make_mesh(parallel.num_devices, order=parallel.order)
    except UserError as error:
        raise UserError(f"config.parallel.{error}") from error


def make_state(problem: problems.Problem, tx, seed: int | jax.Array) -> TrainState:
    """Return the state before the first update; `seed` may be traced. Sweeps and runs start from the same one."""
    params, model_state = problem.init(split_seed(seed)[0])
    return TrainState.create(params, model_state, tx, seed)


def with_averaged_params(state: TrainState) -> TrainState:
    """Return the state with the average that `track_ema` kept in the place of the parameters."""
    return state.replace(params=ema_params(state.opt_state, like=state.params))
