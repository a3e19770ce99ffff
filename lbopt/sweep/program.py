"""One compiled program per cell: whole training runs as a function of learning rate, warmup, weight decay and seed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from lbopt import metrics as metric_pairs, replicas
from lbopt.config.optimizer import OptimizerConfig
from lbopt.config.sweep import SweepConfig
from lbopt.data.arrays import ArrayDataset, Dataset
from lbopt.data.batches import eval_batches
from lbopt.data.order import example_indices
from lbopt.parallel.clip import GradientClip
from lbopt.parallel.state import TrainState
from lbopt.parallel.step import step_fn
from lbopt.recipes import optimizers, schedule as schedules
from lbopt.recipes.build import make_state, with_averaged_params
from lbopt.recipes.problem import Problem
from lbopt.sweep.trials import Cell, Trial

# On CPU, LLVM's level 1 compiles these programs in half the time and they run as fast: a cell runs for seconds.
_ON_CPU: Any = {"xla_backend_optimization_level": 1}


class Arguments(NamedTuple):
    """The arguments of one trial; batched, every leaf has a leading trial axis.

    Attributes:
      learning_rate: fp32 scalar.
      warmup_steps: fp32 scalar.
      weight_decay: fp32 scalar.
      seed: int32 scalar, of the initialisation.
      order: [steps, global batch] int32 indices into the training set.
    """

    learning_rate: Any
    warmup_steps: Any
    weight_decay: Any
    seed: Any
    order: Any


class Outcome(NamedTuple):
    """What a trial ends with.

    Attributes:
      params: final parameters.
      model_state: final model state.
      losses: [steps] mean training loss of every step.
    """

    params: Any
    model_state: Any
    losses: jax.Array


def make_trial_fn(
    problem: Problem, cell: Cell, config: SweepConfig
) -> Callable[[dict[str, jax.Array], Arguments], Outcome]:
    """Return (training set, arguments) -> outcome: `lbopt train`'s step under `lax.scan`.

    Note:
      Under `vmap` the models are still initialised one after another. Orthogonal initialisation factorises matrices,
      and on CPU two batched factorisations that run at once wait for each other's threads for ever (jaxlib 0.10.2).
    """
    problem = problem._replace(init=jax.custom_batching.sequential_vmap(problem.init))

    def run(examples: dict[str, jax.Array], arguments: Arguments) -> Outcome:
        schedule = schedules.make_schedule(
            cell.arm.schedule, cell.resolved, arguments.learning_rate, arguments.warmup_steps
        )
        optimizer = cell.arm.optimizer
        tx = optimizers.make_optimizer(
            optimizer, schedule, arguments.weight_decay, cell.global_batch_size, problem.stacked
        )
        step = step_fn(
            problem.loss_fn,
            tx,
            config.train.parallel.num_microsteps,
            clip=_early_clip(optimizer),
            measure_noise=optimizer.track_noise_scale,
        )

        def body(state: TrainState, indices: jax.Array) -> tuple[TrainState, jax.Array]:
            state, metrics = step(state, {name: array[indices] for name, array in examples.items()})
            total, count = metrics["loss"]
            return state, total / count

        with replicas.tracing_for(1):
            state, losses = jax.lax.scan(body, make_state(problem, tx, arguments.seed), arguments.order)
        if optimizer.ema_decay is not None:
            state = with_averaged_params(state)
        return Outcome(state.params, state.model_state, losses)

    return run


def _early_clip(optimizer: OptimizerConfig) -> GradientClip | None:
    """Return the clip that belongs to the step and not to the optimizer; a trial has one replica."""
    max_norm = optimizers.resolve_clip(optimizer)
    if max_norm is None or optimizer.clip_stage == "accumulated":
        return None
    return GradientClip(max_norm, optimizer.clip_stage)


def batch_trials(fn: Callable[..., Any], batching: str) -> Callable[..., Any]:
    """Run `fn(examples, arguments)` over a leading trial axis of the arguments.

    Args:
      fn: for one trial.
      batching: "map" runs the trials one after another inside one program, "vmap" batches them, "auto" takes "vmap" on
        accelerators and "map" on CPU, where it compiles faster (`scripts/bench sweep` shows both).
    """
    if batching == "auto":
        batching = "map" if jax.default_backend() == "cpu" else "vmap"
    if batching == "vmap":
        return jax.vmap(fn, in_axes=(None, 0))
    return lambda shared, arguments: jax.lax.map(lambda one: fn(shared, one), arguments)


def pack(cell: Cell, trials: Sequence[Trial], num_examples: int) -> Arguments:
    """Stack the arguments of several trials."""
    steps, size = cell.resolved.num_steps, cell.global_batch_size
    orders = [example_indices(num_examples, trial.seed, 0, steps * size).reshape(steps, size) for trial in trials]
    count = len(trials)
    return Arguments(
        learning_rate=np.asarray([trial.learning_rate for trial in trials], np.float32),
        warmup_steps=np.full(count, cell.resolved.warmup_steps, np.float32),
        weight_decay=np.full(count, cell.arm.optimizer.weight_decay, np.float32),
        seed=np.asarray([trial.seed for trial in trials], np.int32),
        order=np.stack(orders).astype(np.int32),
    )


def compile_cell(problem: Problem, cell: Cell, config: SweepConfig) -> Callable[[Sequence[Trial]], Outcome]:
    """Compile a cell's program for `trials_per_program` trials a call.

    Returns:
      A function of up to that many trials; a shorter call is filled up with repeats of its first trial, whose results
      are dropped. Outcomes have a leading trial axis.
    """
    width, train = config.trials_per_program, problem.splits.train
    assert isinstance(train, ArrayDataset), "SweepConfig.validate lets no other data through"
    examples = {name: jnp.asarray(array) for name, array in train.arrays.items()}
    batched = jax.jit(batch_trials(make_trial_fn(problem, cell, config), config.trial_batching))
    blank = Trial("", 0.0, 0.0, 0)
    lowered = batched.lower(examples, pack(cell, [blank] * width, len(train)))
    compiled = lowered.compile(_ON_CPU if jax.default_backend() == "cpu" else None)

    def run(trials: Sequence[Trial]) -> Outcome:
        filled = [*trials, *[trials[0]] * (width - len(trials))]
        outcome = compiled(examples, pack(cell, filled, len(train)))
        return jax.tree.map(lambda x: x[: len(trials)], outcome)

    return run


def make_scorer(problem: Problem, dataset: Dataset) -> Callable[[Any, Any], list[dict[str, float]]]:
    """Return (params, model_state), each with a trial axis -> mean metrics of each trial over a data set."""
    (batch,) = eval_batches(dataset, len(dataset))

    @jax.jit
    def score(params, model_state):
        return jax.lax.map(
            lambda variables: problem.metric_fn(variables[0], variables[1], batch), (params, model_state)
        )

    def means(params: Any, model_state: Any) -> list[dict[str, float]]:
        pairs = jax.device_get(score(params, model_state))
        count = len(jax.tree.leaves(pairs)[0])
        return [metric_pairs.means([jax.tree.map(lambda x: x[index], pairs)]) for index in range(count)]  # noqa: B023

    return means
