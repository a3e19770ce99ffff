"""A config becomes a run."""

from __future__ import annotations

import jax

from lbopt.config.train import TrainConfig
from lbopt.data.batches import TrainBatches
from lbopt.errors import require
from lbopt.evaluation import evaluate
from lbopt.parallel import mesh as meshes, step as steps
from lbopt.parallel.state import TrainState, split_seed
from lbopt.recipes import optimizers, problem as problems, schedule as schedules
from lbopt.train.run import Cadence, Run


def build(config: TrainConfig) -> Run:
    """Turn a validated config into everything the training loop needs, compiling nothing.

    Raises:
      UserError: naming the field that does not fit the data or the devices.
      EnvironmentProblem: if the data cannot be had.
    """
    config.validate()
    problem = problems.make_problem(config.data, config.model)
    train, validation, _ = problem.splits
    size = config.global_batch_size
    require(
        size <= len(train),
        "config.global_batch_size",
        size,
        f"the training set has {len(train)} examples; use at most that",
    )
    mesh = meshes.make_mesh(config.parallel.num_devices)
    meshes.check_divisible(size, mesh, config.parallel.num_microsteps)
    problems.check_batch_norm(config.model, mesh.size, size // config.parallel.num_microsteps)
    resolved = schedules.resolve(config.schedule, size, len(train), config.num_epochs)
    schedule = schedules.make_schedule(config.schedule, resolved)
    tx = optimizers.make_optimizer(config.optimizer, schedule)
    backend = config.parallel.backend
    eval_step = steps.make_eval_step(problem.metric_fn, mesh, backend)  # type: ignore[arg-type]

    def init() -> TrainState:
        return make_state(problem, tx, config.seed)

    return Run(
        mesh=mesh,
        init=jax.jit(init, out_shardings=meshes.replicated(mesh)),
        train_step=steps.make_train_step(problem.loss_fn, tx, mesh, backend, config.parallel.num_microsteps),  # type: ignore[arg-type]
        batches=TrainBatches(train, config.seed, size, resolved.num_steps, jax.process_index(), jax.process_count()),
        evaluate=lambda state: evaluate(eval_step, state, validation, config.eval_global_batch_size),
        evaluate_test=lambda state: evaluate(eval_step, state, problem.splits.test, config.eval_global_batch_size),
        global_batch_size=size,
        num_steps=resolved.num_steps,
        cadence=Cadence(config.log_every_steps, config.eval_every_steps, config.checkpoint.every_steps),
        keep_checkpoints=config.checkpoint.keep,
        best_metric=config.checkpoint.best_metric,
    )


def make_state(problem: problems.Problem, tx, seed: int | jax.Array) -> TrainState:
    """Return the state before the first update; `seed` may be traced. Sweeps and runs start from the same one."""
    params, model_state = problem.init(split_seed(seed)[0])
    return TrainState.create(params, model_state, tx, seed)
