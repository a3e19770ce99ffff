"""The training loop: restore, step, log, evaluate and save, until done or asked to stop."""

from __future__ import annotations

import contextlib
import dataclasses
import pathlib
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax

from lbopt import metrics, types
from lbopt._regular import read_regular
from lbopt.data import train_iterator
from lbopt.errors import EnvironmentProblem, Preempted, UserError, require
from lbopt.job import STARTING_PATIENCE, Job, PreemptionWatch, SoloJob
from lbopt.parallel import (
    EMPTY_EXCHANGES,
    TrainState,
    exchange_metrics,
    first_worker,
    put_batch,
)
from lbopt.train._ahead import PhaseAhead
from lbopt.train._checkpoint import Checkpoints
from lbopt.train._checksums import all_finite
from lbopt.train._profile import ProfiledSteps, StepProfile
from lbopt.train._progress import Progress, said_by_first
from lbopt.train._ranking import BROKEN, PHASE
from lbopt.train._run import Run, Target, count_multiples, is_due
from lbopt.transforms import optimizer_metrics
from lbopt.workdir import (
    MetricsWriter,
    MlperfLog,
    NoMetricsWriter,
    broken_losses,
    make_writable_folder,
    metrics_hooks,
    read_json_lines,
    write_text,
)

_ADVICE = "lower the learning rate, or clip the gradients"
_COMPILED_STEPS = 2
"""Steps after which a phase's own programs are there, and that of the next one may be compiled."""
_READ_AHEAD_STEPS = 3
"""Steps before the end of a phase from which on the batches of the next one are read."""
_STALLED_SHARE = 0.5
"""Share of a layer's weights: if an update leaves more of them unchanged, the user is warned."""
_NEXT_SIZE = "train/next_global_batch_size"
"""Metric of the step after which the batch doubles."""
_SHOWN = (
    "train/loss",
    "train/learning_rate",
    _NEXT_SIZE,
    "eval/accuracy",
    "eval/perplexity",
    "eval/f1",
    "perf/examples_per_s",
)
"""Scalars that the progress bar shows."""


def train(
    run: Run,
    workdir: pathlib.Path,
    watch: PreemptionWatch | None = None,
    on_metrics: Iterable[Any] = (),
    profile: ProfiledSteps | None = None,
) -> TrainState:
    """Train to the end of the last phase, from the newest checkpoint if there is one.

    Args:
      run: The run, from `recipes.build_run`.
      workdir: The workdir, opened by `open_workdir`.
      watch: The watch for SIGTERM, which knows the job; None for a new one, of this process alone.
      on_metrics: Functions (step, metrics) that get each line of metrics.jsonl when it is written,
        in the first process of the job: its scalars and `examples_seen`, as a dict of floats that
        the function may keep. Or writers with `write_scalars(step, metrics)`, like those of
        `clu.metric_writers`. After a restart, steps since the last checkpoint come again.
      profile: Steps that are traced once, into `profile/` of the workdir; None for none.

    Returns:
      The final state.

    Raises:
      UserError: If a function of `on_metrics` raises an error; it names the file and the line.
      Preempted: On SIGTERM, when the state is saved.
      KeyboardInterrupt: On Ctrl-C; the message names the last checkpoint.
      EnvironmentProblem: If a checkpoint cannot be read or written.
    """
    job = SoloJob() if watch is None else watch.job
    is_first = job.index == 0  # others write only their shards of the checkpoints
    hooks = metrics_hooks(on_metrics)
    if is_first:
        make_writable_folder(workdir / "checkpoints")
        _keep_vocabulary(run, workdir)

    with contextlib.ExitStack() as stack:
        job.doing("restoring", patience=STARTING_PATIENCE)
        ends = [phase.last_step for phase in run.phases() if phase.is_end]
        checkpoints = stack.enter_context(
            Checkpoints(workdir, run.keep_checkpoints, run.best_metric, False, ends, job)
        )
        state = _restore_or_init(run, checkpoints, job)
        start = int(state.step)
        status = _shared_status(workdir, start, job)
        mllog = run.mllog if is_first else None
        chain = run if run.growth is None else run.growth.chain(status.doubled_at)
        total = chain.phases()[-1].last_step
        if chain.growth is not None:
            chain.growth.check(state, chain.phase_at(start))

        if start >= total or status.is_stopped(run.target):
            MlperfLog(workdir, mllog, chain.epoch_at, start).run_ends(start, status.reached)
            said_by_first(job)(f"complete at step {start} of {total}: nothing to do")
            _say_if_broken(status, checkpoints, said_by_first(job))
            return state

        watch = watch or stack.enter_context(PreemptionWatch(job))
        writer: MetricsWriter | NoMetricsWriter = (
            MetricsWriter(workdir, start, hooks) if is_first else NoMetricsWriter()
        )
        stack.enter_context(writer)
        stack.enter_context(_naming_last_checkpoint(checkpoints, total))
        stack.callback(checkpoints.settle)  # a save still uses the writer
        progress = stack.enter_context(Progress(total, start, silent=not is_first))
        if watch.requested and job.count == 1:
            raise Preempted(
                f"stopped before step {start + 1} of {total}; run the same command again to resume"
            )
        progress.say(_first_line(chain, start, total, job))

        tracing = StepProfile(profile if is_first else None, workdir, start, progress.say)
        stack.callback(tracing.close)
        log = MlperfLog(workdir, mllog, lambda step: chain.epoch_at(step), start)
        ahead: PhaseAhead | None = None
        while (phase := chain.phase_at(int(state.step) + 1)).last_step > int(state.step):
            if status.is_stopped(phase.target):
                break
            ready = ahead
            following = phase.next_phase
            if phase.growth is not None and following is None:
                following = phase.growth.after(phase)
            ahead = None if following is None else PhaseAhead(following)
            loop = _PhaseLoop(
                phase, total, status, checkpoints, writer, watch, progress, log, tracing, ahead
            )
            state = loop.train(state, ready)
            if run.growth is not None and status.doubled_at:
                chain = run.growth.chain(status.doubled_at)
                total = chain.phases()[-1].last_step
                progress.expect(total, int(state.step))

        log.run_ends(int(state.step), status.reached)
        job.doing("waiting for the last checkpoint", total)
        checkpoints.wait()
        _say_if_broken(status, checkpoints, progress.say)
        return state


@contextlib.contextmanager
def _naming_last_checkpoint(checkpoints: Checkpoints, total: int) -> Iterator[None]:
    """Let a `KeyboardInterrupt` say from which checkpoint the same command resumes."""
    try:
        yield
    except KeyboardInterrupt as error:
        saved = checkpoints.latest_step()
        state = "without a checkpoint yet"
        if saved is not None:
            state = f"with the state of step {saved} of {total} saved"
        again = "start again" if saved is None else "resume"
        error.args = (f"interrupted {state}; run the same command again to {again}",)
        raise


def _first_line(run: Run, start: int, total: int, job: Job) -> str:
    """Return the line that says where a run starts, and on what."""
    size = run.phase_at(start + 1).global_batch_size
    processes = f" of {job.count} processes" if job.count > 1 else ""
    return (
        f"{'resuming at' if start else 'starting at'} step {start} of {total}, global batch "
        f"{size}, {run.mesh.size} devices{processes}"
    )


def _keep_vocabulary(run: Run, workdir: pathlib.Path) -> None:
    """Write the vocabulary into a workdir, unless it is there."""
    check_vocabulary(run, workdir)
    for name, content in run.vocabulary.files().items():
        if not (workdir / name).exists():
            write_text(workdir / name, content)


def check_vocabulary(run: Run, workdir: pathlib.Path) -> None:
    """Check that a run's data have the vocabulary that its workdir keeps.

    Raises:
      UserError: If they have another one.
      EnvironmentProblem: If the workdir's cannot be read.
    """
    for name, content in run.vocabulary.files().items():
        file = workdir / name
        if not file.exists():
            continue
        try:
            kept = read_regular(file)
        except OSError as error:
            fix = f"it cannot be read ({error.strerror}); make it readable or use another workdir"
            raise EnvironmentProblem(str(file), reason=fix, code="damaged") from error
        fix = (
            f"the run there began with another {name} than its data have now; use the data that "
            "it began with, or another workdir"
        )
        same = kept == content.encode("utf-8", "backslashreplace")
        require(same, "workdir", str(workdir), fix, code="mismatch")


def _restore_or_init(run: Run, checkpoints: Checkpoints, job: Job) -> TrainState:
    """Return the newest saved state that is intact, or a fresh one."""
    state = checkpoints.restore_newest(lambda step: run.phase_at(step).shapes(), said_by_first(job))
    return run.init() if state is None else state


@dataclasses.dataclass
class Status:
    """The history of a run up to a step, from the lines of metrics.jsonl.

    Attributes:
      seconds: Seconds of training and evaluation, summed over restarts; work after the last logged
        line before a kill is excluded.
      reached: Whether the target was reached.
      broken_step: The first step whose logged loss is not finite; None if there is none.
      doubled_at: Steps after which the noise scale doubled the batch.
      warned_of_stalled: Whether the user was warned that updates are too small for the dtype of
        the parameters.
      warned_of_empty: Whether the user was warned of exchanges of local steps without a worker.
    """

    seconds: float = 0.0
    reached: bool = False
    broken_step: int | None = None
    doubled_at: list[int] = dataclasses.field(default_factory=list)
    warned_of_stalled: bool = False
    warned_of_empty: bool = False

    @classmethod
    def of(cls, lines: Sequence[Mapping[str, Any]]) -> Status:
        """Return the status after these lines of metrics.jsonl."""
        seconds = [
            line["perf/elapsed_s"] for line in lines if line.get("perf/elapsed_s") is not None
        ]
        return cls(
            seconds=max(seconds, default=0.0),
            reached=any("target/steps" in line for line in lines),
            broken_step=next((line["step"] for line in lines if broken_losses(line)), None),
            doubled_at=[line["step"] for line in lines if line.get(_NEXT_SIZE) is not None],
        )

    def is_stopped(self, target: Target | None) -> bool:
        """Return whether the run has ended at its target."""
        return self.reached and target is not None and target.stop


def _shared_status(workdir: pathlib.Path, start: int, job: Job) -> Status:
    """Return the status of a run at the step where it starts, as the first process reads it."""
    lines = read_json_lines(workdir / "metrics.jsonl") if job.index == 0 else []
    ours = Status.of([line for line in lines if line["step"] <= start])
    return Status(*job.from_first("history", dataclasses.astuple(ours)))


def _say_if_broken(status: Status, checkpoints: Checkpoints, say: Callable[[str], None]) -> None:
    """Say at the end of a run that its loss was not finite, and which checkpoint is from before."""
    if status.broken_step is None:
        return
    kept = checkpoints.latest_finite_step()
    which = (
        "no checkpoint has a finite network"
        if kept is None
        else f"the last finite network is checkpoint {kept}"
    )
    say(f"the loss was not finite, first at step {status.broken_step}: {which}; {_ADVICE}")


@dataclasses.dataclass
class _PhaseLoop:
    """The loop over the steps of one phase, in one process of the job."""

    run: Run
    total: int
    status: Status
    checkpoints: Checkpoints
    writer: MetricsWriter | NoMetricsWriter
    watch: PreemptionWatch
    progress: Progress
    log: MlperfLog
    tracing: StepProfile
    ahead: PhaseAhead | None

    def train(self, state: TrainState, ready: PhaseAhead | None) -> TrainState:
        """Train to the end of the phase, or to the target.

        Args:
          state: The state to start from.
          ready: What the phase before has prepared for this one; None without one.
        """
        run = self.run
        job = self.watch.job
        start = int(state.step)
        # What `enter` calls is compiled in the background too, so this waits for it first.
        job.doing("reading the first batch", start, STARTING_PATIENCE)
        batches = (
            train_iterator(run.batches, start - run.first_step)
            if ready is None
            else ready.batches(run)
        )
        if start == run.first_step and start > 0:
            self.progress.say(f"phase from step {start} on: global batch {run.global_batch_size}")
            state = run.enter(state)
        self.checkpoints.prepare(state)
        self.log.training_begins(start)
        clock = _Clock(start, run.global_batch_size, self.status.seconds)

        for step, batch in enumerate(batches, start + 1):
            if self.ahead is not None and step == start + _COMPILED_STEPS:
                self.ahead.start_compiling()
            if run.next_phase and self.ahead and step >= run.last_step - _READ_AHEAD_STEPS:
                self.ahead.start_reading()
            # The first step is compiled, which takes longer.
            job.doing("in step", step, STARTING_PATIENCE if step == start + 1 else 1)
            with self.tracing.step(step, state):
                state, step_metrics = run.train_step(state, put_batch(run.mesh, batch))
            if run.mesh.devices.flat[0].platform == "cpu":
                # Queued collectives of many steps deadlock on a few CPU cores.
                jax.block_until_ready(step_metrics)
            self.tracing.end(step, state)

            stopping = job.stops_after(step) and step < self.total
            scalars = self._scalars(step, state, step_metrics, clock, stopping)
            self._report(step, scalars)
            self._check_finite(step, scalars)
            self._save(step, state, scalars, stopping)
            if self.status.is_stopped(run.target) or step in self.status.doubled_at:
                break
            job.doing("reading the batch of the next step", step)

        self.status.seconds = clock.elapsed_s()
        return state

    def _scalars(
        self,
        step: int,
        state: TrainState,
        step_metrics: types.Metrics,
        clock: _Clock,
        stopping: bool,
    ) -> dict[str, float]:
        """Return the scalars to log after a step: of training, of evaluation, both or none."""
        scalars: dict[str, float] = {}
        if self._is_due(step, self.run.cadence.log_every_steps):
            scalars |= self._training_scalars(step, state, step_metrics)
            scalars["perf/examples_per_s"] = clock.examples_per_s(step)
            if self.run.continues or not self.run.is_end or self.run.growth is not None:
                scalars["train/global_batch_size"] = float(self.run.global_batch_size)
        if self._evaluation_is_due(step):
            scalars |= self._evaluate(step, state, clock)
        scalars |= self._decision(step, state)
        if scalars or stopping:  # the time until a preemption counts as well
            scalars |= {**self._damaged_counts(), "perf/elapsed_s": clock.elapsed_s()}
        return scalars

    def _decision(self, step: int, state: TrainState) -> dict[str, float]:
        """Return the batch size from now on, if the noise scale says that it doubles here."""
        growth = self.run.growth
        if growth is None or not growth.decides(self.run, step):
            return {}
        size = 2 * self.run.global_batch_size
        scale = float(optimizer_metrics(state.opt_state)["noise_scale"])
        if not scale >= growth.factor * size:
            return {"train/noise_scale": scale}
        self.status.doubled_at.append(step)
        return {"train/noise_scale": scale, _NEXT_SIZE: float(size)}

    def _training_scalars(
        self, step: int, state: TrainState, step_metrics: types.Metrics
    ) -> dict[str, float]:
        """Return the metrics of a step and of its optimizer.

        Ends the run if the optimizer has skipped too many updates in a row.
        """
        measured = (step_metrics, optimizer_metrics(first_worker(state)), exchange_metrics(state))
        pairs, applied, exchanged = jax.device_get(measured)
        _check_skipped(self.run, step, applied)
        self._warn_of_stalled(step, applied)
        self._warn_of_empty(step, exchanged)
        found = {**metrics.means([pairs]), **applied, **exchanged}
        return {f"train/{name}": float(value) for name, value in found.items()}

    def _evaluate(self, step: int, state: TrainState, clock: _Clock) -> dict[str, float]:
        """Return the metrics of the evaluation after a step, and the work up to the target."""
        run = self.run
        self.log.evaluation_begins(step)
        self.watch.job.doing("evaluating after step", step)
        with clock.paused():
            found = {f"eval/{name}": value for name, value in run.evaluate(state).items()}
        self.log.evaluated(step, found)

        scalars = found | self._target_scalars(step, found, clock)
        if step < run.last_step and not self.status.is_stopped(run.target):
            self.log.training_begins(step)
        return scalars

    def _target_scalars(
        self, step: int, found: Mapping[str, float], clock: _Clock
    ) -> dict[str, float]:
        """Return the work up to the target, at the first evaluation that reaches it."""
        target = self.run.target
        if target is None or self.status.reached or not target.reached(found):
            return {}
        self.status.reached = True
        return {
            "target/steps": step,
            "target/examples": self.run.examples_seen(step),
            "target/seconds": clock.elapsed_s(),
        }

    def _damaged_counts(self) -> dict[str, float]:
        """Return the numbers of damaged records that all processes have skipped."""
        ours = self.run.damaged_counts()
        counts = self.watch.job.together("damaged", ours) if ours else []
        return {name: sum(count[name] for count in counts) for name in ours}

    def _warn_of_stalled(self, step: int, applied: Mapping[str, Any]) -> None:
        """Warn once that updates are too small for the dtype of the parameters."""
        shares = {
            name: float(share) for name, share in applied.items() if name.startswith("stalled")
        }
        worst = max(shares, key=shares.__getitem__, default=None)
        if worst is None or shares[worst] <= _STALLED_SHARE or self.status.warned_of_stalled:
            return
        self.status.warned_of_stalled = True
        layer = worst.partition("/")[2]
        self.progress.say(
            f"warning: at step {step} the update left {shares[worst]:.0%} of the weights of "
            f"{layer} as they were: it is less than half of their last bit; keep the parameters "
            "in fp32"
        )

    def _warn_of_empty(self, step: int, exchanged: Mapping[str, Any]) -> None:
        """Warn once that exchanges had no sound worker, so that the parameters stayed."""
        empty = int(exchanged.get(EMPTY_EXCHANGES, 0))
        if not empty or self.status.warned_of_empty:
            return
        self.status.warned_of_empty = True
        self.progress.say(
            f"warning: exchanges without any finite worker by step {step}: {empty}, and these left "
            f"the parameters as they were; {_ADVICE}"
        )

    def _report(self, step: int, scalars: dict[str, float]) -> None:
        """Write the scalars of a step, and show some of them."""
        if scalars:
            self.writer.write(step, self.run.examples_seen(step), scalars)
        self.progress.advance()
        shown = {name: scalars[name] for name in _SHOWN if name in scalars}
        if shown:
            self.progress.report(shown)

    def _check_finite(self, step: int, scalars: Mapping[str, float]) -> None:
        """Say once that a loss is not finite, or end the run if that was asked for."""
        broken = broken_losses(scalars)
        if not broken:
            return
        what = f"{broken[0]} is {scalars[broken[0]]} at step {step}"
        if self.run.stop_at_nan:
            self._stop_at_nan(what)
        if self.status.broken_step is None:
            self.status.broken_step = step
            self.progress.say(f"{what}, and the run continues (stop_at_nan = False): {_ADVICE}")

    def _stop_at_nan(self, what: str) -> None:
        """End the run because a loss or the network is not finite."""
        self.checkpoints.wait()
        kept = self.checkpoints.latest_step()
        saved = (
            "nothing was saved before" if kept is None else f"the last checkpoint is of step {kept}"
        )
        fix = (
            f"{what}, and {saved}; lower {{learning_rate}}, or clip by {{max_grad_norm}}, in "
            "another workdir"
        )
        raise UserError("stop_at_nan", True, fix, also=_advised(self.run))

    def _save(
        self, step: int, state: TrainState, scalars: Mapping[str, float], stopping: bool
    ) -> None:
        """Save the state if that is due, if it is the best so far, or if the run is to stop."""
        evaluated = {name: value for name, value in scalars.items() if name.startswith("eval/")}
        if evaluated and not self.run.is_first:
            evaluated[PHASE] = 1.0

        due = self._is_due(step, self.run.cadence.checkpoint_every_steps)
        due = due or stopping or self.status.is_stopped(self.run.target)
        if due or self.checkpoints.would_be_best(evaluated):
            self.watch.job.doing("saving after step", step)
            # A broken network is marked, so that the latest finite checkpoint is kept as well.
            if not all_finite(jax.tree.leaves((state.params, state.model_state))):
                if self.run.stop_at_nan:
                    self._stop_at_nan(f"the network is not finite after step {step}")
                evaluated[BROKEN] = 1.0
            # A run resumed from this checkpoint does not write the metrics before it again, so they
            # must be on disk first.
            self.checkpoints.save(state, evaluated, before=self.writer.sync)

        if stopping:
            self.checkpoints.wait()
            _say_if_broken(self.status, self.checkpoints, self.progress.say)
            raise Preempted(
                f"stopped at step {step} of {self.total} with the state saved; run the same "
                "command again to resume"
            )

    def _is_due(self, step: int, every_steps: float) -> bool:
        """Return whether a step is the last one, or the first at or after a multiple."""
        run = self.run
        return (step == run.last_step and run.is_end) or is_due(step - run.counts_from, every_steps)

    def _evaluation_is_due(self, step: int) -> bool:
        """Return whether an evaluation comes after a step."""
        run = self.run
        every = run.cadence.eval_every_examples
        if every is None:
            return self._is_due(step, run.cadence.eval_every_steps)
        before, now = (count_multiples(run.examples_seen(at), every) for at in (step - 1, step))
        return now > before or (step == run.last_step and run.is_end)


def _advised(run: Run) -> dict[str, str]:
    """Return the fields that a diverged run may change, and where they stand."""
    rate = "learning_rate" if run.is_first else "next_phase.learning_rate"
    return {"learning_rate": rate, "max_grad_norm": "max_grad_norm"}


def _check_skipped(run: Run, step: int, applied: Mapping[str, Any]) -> None:
    """Raise `UserError` if the optimizer has skipped too many gradients in a row."""
    if not applied.get("skipped/limit_reached", False):
        return
    skipped = int(applied["skipped/nonfinite"])
    fix = (
        f"more than skip_limit consecutive gradients were not finite by step {step} ({skipped} were"
        " skipped in all); lower {learning_rate}, clip by {max_grad_norm}, or raise {skip_limit}"
    )
    also = {**_advised(run), "skip_limit": "skip_limit"}
    raise UserError("skip_limit", reason=fix, also=also)


class _Clock:
    """Training speed between log lines, without evaluation, and the seconds of the whole run.

    Args:
      step: The step at which the clock starts.
      global_batch_size: Number of examples in a step.
      seconds_before: Seconds of earlier starts and phases.
    """

    def __init__(self, step: int, global_batch_size: int, seconds_before: float = 0.0):
        self._step = step
        self._global_batch_size = global_batch_size
        self._since = time.perf_counter()
        self._origin = self._since - seconds_before

    def examples_per_s(self, step: int) -> float:
        """Return the speed since the last call."""
        now = time.perf_counter()
        speed = (step - self._step) * self._global_batch_size / max(now - self._since, 1e-9)
        self._step = step
        self._since = now
        return speed

    def elapsed_s(self) -> float:
        """Return the seconds of training and evaluation, earlier starts included."""
        return time.perf_counter() - self._origin

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Exclude the time in the context from the speed."""
        begin = time.perf_counter()
        yield
        self._since += time.perf_counter() - begin
