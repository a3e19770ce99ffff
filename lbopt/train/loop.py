"""The training loop: restore, step, log, evaluate, save, until done or asked to stop."""

from __future__ import annotations

import contextlib
import pathlib
import sys
import time
from collections.abc import Mapping
from typing import Any

import jax

from lbopt import metrics as metric_pairs, types
from lbopt.data.batches import train_iterator
from lbopt.errors import Preempted, UserError
from lbopt.parallel.mesh import put_batch
from lbopt.parallel.state import TrainState
from lbopt.train import workdir as workdirs
from lbopt.train.checkpoint import Checkpoints
from lbopt.train.preemption import PreemptionWatch
from lbopt.train.progress import Progress
from lbopt.train.run import Run
from lbopt.train.writers import MetricsWriter, read_lines
from lbopt.transforms.monitoring import optimizer_metrics

_SHOWN = ("train/loss", "train/learning_rate", "eval/accuracy", "eval/perplexity", "perf/examples_per_s")


def train(run: Run, workdir: pathlib.Path, watch: PreemptionWatch | None = None) -> TrainState:
    """Train to the end, from the newest checkpoint if there is one.

    Args:
      run: from `recipes.build`.
      workdir: an opened workdir (see `open_workdir`).
      watch: who watches for SIGTERM already; None to watch from here on.

    Returns:
      The final state.

    Raises:
      Preempted: on SIGTERM, once the state is saved.
      EnvironmentProblem: if a checkpoint cannot be read or written.
    """
    workdirs.make_writable(workdir / "checkpoints")
    with contextlib.ExitStack() as stack:
        checkpoints = stack.enter_context(Checkpoints(workdir, run.keep_checkpoints, run.best_metric))
        state = restore_or_init(run, checkpoints)
        start = int(state.step)
        if start >= run.num_steps:
            read_lines(workdir / "metrics.jsonl")  # say now if it is damaged
            print(f"complete at step {start} of {run.num_steps}: nothing to do", file=sys.stderr)
            return state
        watch = watch or stack.enter_context(PreemptionWatch())
        writer = stack.enter_context(MetricsWriter(workdir, start))
        progress = stack.enter_context(Progress(run.num_steps, start))
        if watch.requested:
            raise Preempted(f"stopped before step {start + 1} of {run.num_steps}; run the same command again to go on")
        progress.say(
            f"{'resuming at' if start else 'starting at'} step {start} of {run.num_steps}, global batch {run.global_batch_size}, {run.mesh.size} devices"
        )
        return _steps(run, state, start, checkpoints, writer, watch, progress)


def restore_or_init(run: Run, checkpoints: Checkpoints) -> TrainState:
    """Return the newest saved state, or the first one."""
    latest = checkpoints.latest_step()
    if latest is None:
        return run.init()
    return checkpoints.restore(run.shapes(), latest)


def _steps(
    run: Run,
    state: TrainState,
    start: int,
    checkpoints: Checkpoints,
    writer: MetricsWriter,
    watch: PreemptionWatch,
    progress: Progress,
) -> TrainState:
    clock = _Clock(start, run.global_batch_size)
    for step, batch in enumerate(train_iterator(run.batches, start), start + 1):
        state, metrics = run.train_step(state, put_batch(run.mesh, batch))
        if run.mesh.devices.flat[0].platform == "cpu":
            jax.block_until_ready(metrics)  # queued collectives of many steps deadlock on a few CPU cores
        scalars = _scalars(run, step, state, metrics, clock)
        if scalars:
            writer.write(step, step * run.global_batch_size, scalars)
        progress.advance()
        if scalars:
            progress.report({name: scalars[name] for name in _SHOWN if name in scalars})
        stopping = watch.requested and step < run.num_steps
        evaluated = {name: value for name, value in scalars.items() if name.startswith("eval/")}
        due = _due(step, run.cadence.checkpoint_every_steps, run.num_steps)
        if stopping or due or checkpoints.would_be_best(evaluated):
            writer.sync()
            checkpoints.save(state, evaluated)
        if stopping:
            checkpoints.wait()
            raise Preempted(
                f"stopped at step {step} of {run.num_steps} with the state saved; run the same command again to go on"
            )
    checkpoints.wait()
    return state


def _scalars(run: Run, step: int, state: TrainState, metrics: types.Metrics, clock: _Clock) -> dict[str, float]:
    """Return what this step has to log: nothing, training scalars, evaluation, or both."""
    scalars: dict[str, float] = {}
    if _due(step, run.cadence.log_every_steps, run.num_steps):
        metrics, applied = jax.device_get((metrics, optimizer_metrics(state.opt_state)))
        scalars |= {f"train/{name}": value for name, value in metric_pairs.means([metrics]).items()}
        scalars |= {f"train/{name}": float(value) for name, value in applied.items()}
        _check_skipped(step, applied)
        scalars["perf/examples_per_s"] = clock.examples_per_s(step)
    if _due(step, run.cadence.eval_every_steps, run.num_steps):
        with clock.paused():
            scalars |= {f"eval/{name}": value for name, value in run.evaluate(state).items()}
    return scalars


def _check_skipped(step: int, applied: Mapping[str, Any]) -> None:
    """Stop where nothing but broken gradients comes."""
    if applied.get("skipped/limit_reached", False):
        raise UserError(
            f"config.optimizer.skip_limit: more gradients in a row than that were not finite by step {step} "
            f"({int(applied['skipped/nonfinite'])} were skipped in all); lower config.schedule.base_learning_rate, clip, or raise skip_limit"
        )


def _due(step: int, every_steps: int, num_steps: int) -> bool:
    return step % every_steps == 0 or step == num_steps


class _Clock:
    """Measure training speed between log lines, evaluation left out."""

    def __init__(self, step: int, global_batch_size: int):
        self._step, self._global_batch_size = step, global_batch_size
        self._since = time.perf_counter()

    def examples_per_s(self, step: int) -> float:
        now = time.perf_counter()
        speed = (step - self._step) * self._global_batch_size / max(now - self._since, 1e-9)
        self._step, self._since = step, now
        return speed

    @contextlib.contextmanager
    def paused(self):
        begin = time.perf_counter()
        yield
        self._since += time.perf_counter() - begin
