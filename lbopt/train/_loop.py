"""The training loop: restore, step, log, evaluate, save, until done or asked to stop."""

from __future__ import annotations

import contextlib
import dataclasses
import pathlib
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from lbopt import metrics, types
from lbopt._regular import read_regular
from lbopt.data import train_iterator
from lbopt.errors import EnvironmentProblem, Preempted, UserError, require
from lbopt.job import STARTING_PATIENCE, Job, PreemptionWatch, SoloJob
from lbopt.parallel import TrainState, put_batch
from lbopt.train._checkpoint import BROKEN, PHASE, Checkpoints
from lbopt.train._checksums import all_finite
from lbopt.train._progress import Progress, said_by_first
from lbopt.train._run import Run, Target
from lbopt.transforms import optimizer_metrics
from lbopt.workdir import (
    MetricsWriter,
    MlperfLog,
    NoMetricsWriter,
    broken_losses,
    make_writable_folder,
    read_json_lines,
    write_text,
)

_STEER = "lower the learning rate, or clip the gradients"
_STALLED = 0.5
"""Of the weights of a layer: where more of them do not move, that is said."""
_SHOWN = (
    "train/loss",
    "train/learning_rate",
    "eval/accuracy",
    "eval/perplexity",
    "eval/f1",
    "perf/examples_per_s",
)


def train(run: Run, workdir: pathlib.Path, watch: PreemptionWatch | None = None) -> TrainState:
    """Train to the end of the last phase, from the newest checkpoint if there is one.

    Args:
      run: from `recipes.build`.
      workdir: an opened workdir (see `open_workdir`).
      watch: who watches for SIGTERM already, and knows the job; None to watch from here on, alone.

    Returns:
      The final state.

    Raises:
      Preempted: on SIGTERM, once the state is saved.
      EnvironmentProblem: if a checkpoint cannot be read or written.
    """
    job = SoloJob() if watch is None else watch.job
    first = job.index == 0  # the only one that writes, but for its part of the checkpoints
    if first:
        make_writable_folder(workdir / "checkpoints")
        _keep_vocabulary(run, workdir)
    total = run.phases()[-1].last_step
    with contextlib.ExitStack() as stack:
        ends = [phase.last_step for phase in run.phases()]
        job.doing("restoring", patience=STARTING_PATIENCE)
        checkpoints = stack.enter_context(
            Checkpoints(workdir, run.keep_checkpoints, run.best_metric, False, ends, job)
        )
        state = restore_or_init(run, checkpoints, job)
        start = int(state.step)
        lines = (
            read_json_lines(workdir / "metrics.jsonl") if first else []
        )  # say now if it is damaged
        history = History.of([line for line in lines if line["step"] <= start])
        history = History(*job.from_first("history", dataclasses.astuple(history)))
        mllog = run.mllog if first else None
        if start >= total or history.stopped(run.target):
            MlperfLog(workdir, mllog, run.epoch_at, start).run_ends(start, history.reached)
            said_by_first(job)(f"complete at step {start} of {total}: nothing to do")
            _say_if_broken(history, checkpoints, said_by_first(job))
            return state
        watch = watch or stack.enter_context(PreemptionWatch(job))
        writer: MetricsWriter | NoMetricsWriter = (
            MetricsWriter(workdir, start) if first else NoMetricsWriter()
        )
        stack.enter_context(writer)
        stack.callback(checkpoints.settle)
        progress = stack.enter_context(Progress(total, start, silent=not first))
        if watch.requested and job.count == 1:
            raise Preempted(
                f"stopped before step {start + 1} of {total}; run the same command again to go on"
            )
        progress.say(
            f"{'resuming at' if start else 'starting at'} step {start} of {total}, global batch "
            f"{run.phase_at(start + 1).global_batch_size}, {run.mesh.size} devices{f' of {job.count} processes' * (job.count > 1)}"
        )
        log = MlperfLog(workdir, mllog, run.epoch_at, start)
        for phase in run.phases():
            if int(state.step) < phase.last_step and not history.stopped(phase.target):
                session = _Session(phase, total, history, checkpoints, writer, watch, progress, log)
                state = session.go_on(state)
        log.run_ends(int(state.step), history.reached)
        job.doing("waiting for the last checkpoint", total)
        checkpoints.wait()
        _say_if_broken(history, checkpoints, progress.say)
        return state


def _keep_vocabulary(run: Run, workdir: pathlib.Path) -> None:
    """Write the vocabulary into a workdir; refuse to go on with another one."""
    check_vocabulary(run, workdir)
    for name, content in run.vocabulary.files().items():
        if not (workdir / name).exists():
            write_text(workdir / name, content)


def check_vocabulary(run: Run, workdir: pathlib.Path) -> None:
    """Raise `UserError` if the data of a run have another vocabulary than the one that its workdir keeps."""
    for name, content in run.vocabulary.files().items():
        file = workdir / name
        if file.exists():
            try:
                kept = read_regular(file)
            except OSError as error:
                raise EnvironmentProblem(
                    f"{file} cannot be read ({error.strerror}); mend it, or use another --workdir"
                ) from error
            fix = f"the run there began with another {name} than its data have now; use the data of then, or another --workdir"
            require(
                kept == content.encode("utf-8", "backslashreplace"), "--workdir", str(workdir), fix
            )


def _say_if_broken(history: History, checkpoints: Checkpoints, say: Callable[[str], None]) -> None:
    """Say at the end of a run that its loss was not finite, and which checkpoint is from before."""
    if history.broken_step is None:
        return
    kept = checkpoints.latest_finite_step()
    fix = (
        "no checkpoint has a finite network"
        if kept is None
        else f"the last finite network is --checkpoint={kept}"
    )
    say(f"the loss was not finite, first at step {history.broken_step}: {fix}; {_STEER}")


def restore_or_init(run: Run, checkpoints: Checkpoints, job: Job) -> TrainState:
    """Return the newest saved state that is intact, or the first one."""
    state = checkpoints.restore_newest(lambda step: run.phase_at(step).shapes(), said_by_first(job))
    return run.init() if state is None else state


@dataclasses.dataclass
class History:
    """What the metrics of earlier steps say.

    Attributes:
      seconds: of training, evaluation included, over all starts; what a kill took back, up to the last line that was kept,
        does not count.
      reached: whether the target has been reached.
      broken_step: the first step whose logged loss is not finite; None if there is none.
      stalled: whether it was said that updates are too small for the dtype of the parameters.
    """

    seconds: float = 0.0
    reached: bool = False
    broken_step: int | None = None
    stalled: bool = False

    @classmethod
    def of(cls, lines: Sequence[Mapping[str, Any]]) -> History:
        """Read it from the lines of metrics.jsonl."""
        seconds = [
            line["perf/elapsed_s"] for line in lines if line.get("perf/elapsed_s") is not None
        ]
        reached = any("target/steps" in line for line in lines)
        return cls(
            max(seconds, default=0.0),
            reached,
            next((line["step"] for line in lines if broken_losses(line)), None),
        )

    def stopped(self, target: Target | None) -> bool:
        """Return whether the run has ended at its target."""
        return self.reached and target is not None and target.stop


@dataclasses.dataclass
class _Session:
    """The work of one process on one phase."""

    run: Run
    total: int
    history: History
    checkpoints: Checkpoints
    writer: MetricsWriter | NoMetricsWriter
    watch: PreemptionWatch
    progress: Progress
    log: MlperfLog

    def go_on(self, state: TrainState) -> TrainState:
        """Train to the end of the phase, or to the target."""
        run, start = self.run, int(state.step)
        if start == run.first_step and not run.is_first:
            self.progress.say(f"phase from step {start} on: global batch {run.global_batch_size}")
            state = run.enter(state)
        self.checkpoints.prepare(state)
        self.log.training_begins(start)
        clock = _Clock(start, run.global_batch_size, self.history.seconds)
        job = self.watch.job
        job.doing("reading the first batch", start, STARTING_PATIENCE)
        for step, batch in enumerate(
            train_iterator(run.batches, start - run.first_step), start + 1
        ):
            job.doing("in step", step, STARTING_PATIENCE if step == start + 1 else 1)
            state, metrics = run.train_step(state, put_batch(run.mesh, batch))
            if run.mesh.devices.flat[0].platform == "cpu":
                jax.block_until_ready(
                    metrics
                )  # queued collectives of many steps deadlock on a few CPU cores
            stopping = job.stops_after(step) and step < self.total
            scalars = self._scalars(step, state, metrics, clock, stopping)
            self._tell(step, scalars)
            self._check_finite(step, scalars)
            self._save(step, state, scalars, stopping)
            if self.history.stopped(run.target):
                break
            job.doing("reading the batch of the next step", step)
        self.history.seconds = clock.elapsed_s()
        return state

    def _tell(self, step: int, scalars: dict[str, float]) -> None:
        if scalars:
            self.writer.write(step, self.run.examples_seen(step), scalars)
        self.progress.advance()
        if scalars:
            self.progress.report({name: scalars[name] for name in _SHOWN if name in scalars})

    def _check_finite(self, step: int, scalars: Mapping[str, float]) -> None:
        """Say once that a loss is not finite, or end the run there if that was asked for."""
        broken = broken_losses(scalars)
        if broken and self.run.stop_at_nan:
            self._stop_at_nan(f"{broken[0]} is {scalars[broken[0]]} at step {step}")
        if broken and self.history.broken_step is None:
            self.history.broken_step = step
            self.progress.say(
                f"{broken[0]} is {scalars[broken[0]]} at step {step}, and the run goes on: {_STEER}"
            )

    def _stop_at_nan(self, what: str) -> None:
        self.checkpoints.wait()
        kept = self.checkpoints.latest_step()
        state = (
            "nothing was saved before" if kept is None else f"the last checkpoint is of step {kept}"
        )
        fix = (
            f"{what}, and {state}; lower {{learning_rate}}, or clip by {{max_grad_norm}}, in "
            "another --workdir"
        )
        also = ["learning_rate", "max_grad_norm"]
        raise UserError("stop_at_nan", True, fix, code="value", also=also)

    def _save(
        self, step: int, state: TrainState, scalars: Mapping[str, float], stopping: bool
    ) -> None:
        evaluated = {name: value for name, value in scalars.items() if name.startswith("eval/")}
        if evaluated and not self.run.is_first:
            evaluated[PHASE] = 1.0
        due = self._due(step, self.run.cadence.checkpoint_every_steps) or self.history.stopped(
            self.run.target
        )
        if stopping or due or self.checkpoints.would_be_best(evaluated):
            self.watch.job.doing("saving after step", step)
            if not all_finite(jax.tree.leaves((state.params, state.model_state))):
                if self.run.stop_at_nan:
                    self._stop_at_nan(f"the network is not finite after step {step}")
                evaluated[BROKEN] = 1.0
            self.checkpoints.save(state, evaluated, before=self.writer.sync)
        if stopping:
            self.checkpoints.wait()
            _say_if_broken(self.history, self.checkpoints, self.progress.say)
            raise Preempted(
                f"stopped at step {step} of {self.total} with the state saved; run the same command again to go on"
            )

    def _scalars(
        self, step: int, state: TrainState, pairs: types.Metrics, clock: _Clock, stopping: bool
    ) -> dict[str, float]:
        """Return what this step has to log: nothing, training scalars, evaluation, or both."""
        run = self.run
        scalars: dict[str, float] = {}
        if self._due(step, run.cadence.log_every_steps):
            pairs, applied = jax.device_get((pairs, optimizer_metrics(state.opt_state)))
            scalars |= {f"train/{name}": value for name, value in metrics.means([pairs]).items()}
            scalars |= {f"train/{name}": float(value) for name, value in applied.items()}
            _check_skipped(step, applied)
            self._check_stalled(step, applied)
            scalars["perf/examples_per_s"] = clock.examples_per_s(step)
        if self._due(step, run.cadence.eval_every_steps):
            self.log.evaluation_begins(step)
            self.watch.job.doing("evaluating after step", step)
            with clock.paused():
                found = {f"eval/{name}": value for name, value in run.evaluate(state).items()}
            self.log.evaluated(step, found)
            scalars |= found | self._target(step, found, clock)
            if step < run.last_step and not self.history.stopped(run.target):
                self.log.training_begins(step)
        if scalars or stopping:  # the time until a preemption is not lost
            scalars |= {**self._damaged(), "perf/elapsed_s": clock.elapsed_s()}
        return scalars

    def _check_stalled(self, step: int, applied: Mapping[str, Any]) -> None:
        """Say once that updates are too small for the dtype of the parameters."""
        shares = {
            name: float(share) for name, share in applied.items() if name.startswith("stalled")
        }
        worst = max(shares, key=shares.__getitem__, default=None)
        if worst is None or shares[worst] <= _STALLED or self.history.stalled:
            return
        self.history.stalled = True
        self.progress.say(
            f"warning: at step {step} the update left {shares[worst]:.0%} of the weights of {worst.partition('/')[2]} as they were: "
            "it is less than half of their last bit; keep the parameters in fp32"
        )

    def _damaged(self) -> dict[str, float]:
        """Return how many records all processes have left out."""
        ours = self.run.damaged_counts()
        counts = self.watch.job.together("damaged", ours) if ours else []
        return {name: sum(count[name] for count in counts) for name in ours}

    def _target(self, step: int, found: Mapping[str, float], clock: _Clock) -> dict[str, float]:
        """Return, at the first evaluation that reaches the target, after how much work that was."""
        target = self.run.target
        if target is None or self.history.reached or not target.reached(found):
            return {}
        self.history.reached = True
        return {
            "target/steps": step,
            "target/examples": self.run.examples_seen(step),
            "target/seconds": clock.elapsed_s(),
        }

    def _due(self, step: int, every_steps: float) -> bool:
        here = step - self.run.first_step
        return step == self.run.last_step or here // every_steps > (here - 1) // every_steps


def _check_skipped(step: int, applied: Mapping[str, Any]) -> None:
    """Stop where nothing but broken gradients comes."""
    if applied.get("skipped/limit_reached", False):
        skipped = int(applied["skipped/nonfinite"])
        fix = (
            f"more gradients in a row than that were not finite by step {step} ({skipped} were "
            "skipped in all); lower {learning_rate}, clip by {max_grad_norm}, or raise {skip_limit}"
        )
        also = ["learning_rate", "max_grad_norm", "skip_limit"]
        raise UserError("skip_limit", reason=fix, also=also)


class _Clock:
    """Measure training speed between log lines, evaluation left out, and the time of it all."""

    def __init__(self, step: int, global_batch_size: int, seconds_before: float = 0.0):
        self._step, self._global_batch_size = step, global_batch_size
        self._since = time.perf_counter()
        self._origin = self._since - seconds_before

    def examples_per_s(self, step: int) -> float:
        now = time.perf_counter()
        speed = (step - self._step) * self._global_batch_size / max(now - self._since, 1e-9)
        self._step, self._since = step, now
        return speed

    def elapsed_s(self) -> float:
        return time.perf_counter() - self._origin

    @contextlib.contextmanager
    def paused(self):
        begin = time.perf_counter()
        yield
        self._since += time.perf_counter() - begin
