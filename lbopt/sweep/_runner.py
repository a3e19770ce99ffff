"""Run a study: threads fill the lanes of programs with trials, and write a record for each."""

from __future__ import annotations

import concurrent.futures
import contextlib
import math
import os
import pathlib
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias

import jax

from lbopt.config import SweepConfig
from lbopt.errors import EnvironmentProblem, Preempted
from lbopt.job import PreemptionWatch, SoloJob, beat
from lbopt.sweep._example_scores import pack
from lbopt.sweep._finished_trial import FINAL, SEARCH
from lbopt.sweep._progress import BAR, StepTimes, StudyProgress
from lbopt.sweep._results import Results
from lbopt.sweep._running_trial import RunningTrial
from lbopt.sweep._trials import Cell, Trial, deal_cells
from lbopt.sweep._work import CellWork, Work
from lbopt.sweep.lanes import (
    Equipment,
    GrowingProgram,
    MeshProgram,
    MeshSession,
    Once,
    Pairs,
    Program,
    Session,
    TrialBatching,
    make_mesh_probe,
    most_lanes,
    program_key,
    resident_arrays,
)
from lbopt.sweep.search import Factors, Proposal, search_cost
from lbopt.train import Progress

AnySession: TypeAlias = Session | MeshSession
_TIMED_S = 0.1
"""Seconds for which steps of a program are timed."""
_PATIENCE = 96
"""Multiple of a step's longest time that a program of trials, which shows no steps, may take."""


def run_sweep(
    config: SweepConfig,
    cells: Sequence[Cell],
    workdir: pathlib.Path,
    watch: PreemptionWatch | None = None,
    foreword: Sequence[str] = (),
) -> list[dict[str, Any]]:
    """Run every trial of a study that is not in `results.jsonl` yet.

    The processes of a job share the cells, and each trains on its own devices. With
    `trial_devices="all"`, all processes train every trial together.

    Args:
      config: A validated config.
      cells: The cells, from `make_cells`; for a shard, its own ones.
      workdir: An opened workdir.
      watch: The watch for SIGTERM, which knows the job; None for a new one, of this process alone.
      foreword: Lines to show before the first trial, after those on their number and time.

    Returns:
      Records as in `results.jsonl` of all trials that this process knows, see `Results`.

    Raises:
      Preempted: On SIGTERM; finished trials are saved.
      KeyboardInterrupt: On Ctrl-C; the message says how many trials are saved.
      EnvironmentProblem: If `results.jsonl` is damaged or cannot be written, or a search needs a
        package that is not installed.
    """
    job = SoloJob() if watch is None else watch.job
    with (
        contextlib.nullcontext(watch) if watch else PreemptionWatch() as watch,
        Progress(None, 0, "trial", silent=job.index > 0, bar_format=BAR) as progress,
    ):
        together = config.trial_devices == "all"
        study = StudyProgress(config, cells, progress)
        results = Results(workdir, job, study.add, of_all=together, study=config.name)
        progress.say(f"{len(cells)} cells, {results.num_before} trials finished before")
        study.resume(results.records[: results.num_before])

        runner = Runner(config, results, watch)
        job.doing("searching and testing", patience=_PATIENCE)
        chosen = cells if together else deal_cells(cells, config)[job.index :: job.count]
        try:
            left = study.unfinished(chosen)
            if left:
                progress.say("compiling and timing a step of each arm")
            # Devices that train together take the same steps in every process.
            timed = left and (together or job.index == 0)
            steps = runner.time_steps(left) if timed else None
            if job.index == 0:
                side_by_side = runner.side_by_side * (1 if together else job.count)
                for line in [*study.forecast(steps, side_by_side), *foreword]:
                    progress.say(line)
            runner.run(chosen)
        except KeyboardInterrupt as error:
            error.args = (f"interrupted with {_saved(results)}",)
            raise
        job.doing("waiting for the others' trials", patience=0)
        if any(job.together("trials finished", watch.requested)):
            raise Preempted(f"stopped with {_saved(results)}")
    return results.records


def _saved(results: Results) -> str:
    return f"{len(results.records)} trials saved; run the same command again to resume"


class Runner:
    """Runs trials in threads that share programs, data on devices and probes.

    Args:
      config: The config of the study.
      results: The finished trials, to which new ones are added.
      watch: The watch for SIGTERM.
    """

    def __init__(self, config: SweepConfig, results: Results, watch: PreemptionWatch):
        self._config = config
        self._results = results
        self._watch = watch
        self._together = config.trial_devices == "all"
        self._batched = TrialBatching(config).batched and not self._together
        self._turns = 0
        self._equipment: dict[tuple[int, int], Once[Any]] = {}
        self._programs: dict[str, Once[Any]] = {}
        self._arrays: dict[int, Once[Any]] = {}

    def run(self, cells: Sequence[Cell]) -> None:
        """Run the missing trials of some cells, until all are finished or the job is to stop.

        Args:
          cells: The cells of this process.

        Raises:
          Exception: The first error of a thread; the other threads stop soon after.
        """
        work = Work(cells, self._config, self._results.records, exclusive=self._batched)
        count = self.num_threads
        with concurrent.futures.ThreadPoolExecutor(count) as pool:
            futures = [pool.submit(self._serve, work) for _ in range(count)]
            try:
                for future in concurrent.futures.as_completed(futures):
                    future.result()
            except BaseException:
                work.stop()
                raise

    @property
    def side_by_side(self) -> int:
        """Number of trials that run at the same time; lanes of one program count as one."""
        return 1 if self._batched else self.num_threads

    @property
    def num_threads(self) -> int:
        """Number of threads: one if all devices must take the same steps in order."""
        if self._together:
            return 1
        default = os.cpu_count() or 1 if jax.default_backend() == "cpu" else 2
        return self._config.num_workers or default

    def time_steps(self, cells: Sequence[Cell]) -> StepTimes | None:
        """Measure the steps of each arm at its smallest batch, and of one also at its largest.

        Their programs are those of the trials, which need no other compilation.

        Args:
          cells: The cells that this process has left, at least one.

        Returns:
          The times with all threads at work; None if the process was asked to stop meanwhile.
        """
        ordered = sorted(cells, key=lambda one: one.global_batch_size)
        first: dict[str, Cell] = {}
        for cell in ordered:
            first.setdefault(cell.arm.name, cell)
        name = next(iter(first))
        last = [cell for cell in ordered if cell.arm.name == name][-1]

        chosen = list(first.values())
        if last is not first[name]:
            chosen.append(last)
        together = self.side_by_side
        seconds = []
        with concurrent.futures.ThreadPoolExecutor(self.num_threads) as pool:
            list(pool.map(self._time, chosen, [0.0] * len(chosen)))
            for cell in chosen:
                found = pool.map(self._time, [cell] * together, [_TIMED_S] * together)
                seconds.append(max(found))
        if math.inf in seconds:
            return None

        times = {
            cell.arm.name: (cell.global_batch_size, taken)
            for cell, taken in zip(first.values(), seconds, strict=False)
        }
        more = last.global_batch_size - first[name].global_batch_size
        longer = max(0.0, seconds[-1] - seconds[0])  # below 0 by chance only
        return StepTimes(times, longer / more if more else 0.0)

    def _time(self, cell: Cell, seconds: float) -> float:
        """Return the seconds of a step of one trial of a cell; compile its program first."""
        if self._asked_to_stop():
            return math.inf
        search = self._config.arm_search(cell.index)
        trial = cell.trial(SEARCH, Proposal(Factors(1.0, 1.0, 1.0), 1.0), search.seeds[0])
        with (
            _device_memory_errors(self._config, self._batched),
            self._config.naming_trials(cell.index),
        ):
            key = program_key(cell, trial)
            program = self._programs.setdefault(key, Once(lambda: self._compiled(cell, trial)))()
            session = self._session(program, cell)
            return session.time_steps(trial, seconds) / session.width

    def _serve(self, work: Work) -> None:
        """Run the trials of one program after another, until none is left."""
        try:
            while (key := work.choose(self._is_compiled)) is not None:
                try:
                    with _device_memory_errors(self._config, self._batched):
                        self._run_program(work, key)
                finally:
                    work.leave(key)
        except BaseException:
            work.stop()
            raise

    def _is_compiled(self, key: str) -> bool:
        return (
            key in self._programs
            and self._programs[key].made
            and getattr(self._programs[key](), "compiled", True)
        )

    def _run_program(self, work: Work, key: str) -> None:
        """Keep the lanes of a program filled while trials wait for it."""
        first = work.take(key)
        if first is None:
            return
        cell = first[0].cell
        trial = first[1]
        lanes: dict[int, tuple[CellWork, RunningTrial]] = {}
        waiting = [first]
        with self._config.naming_trials(cell.index):
            program = self._programs.setdefault(key, Once(lambda: self._compiled(cell, trial)))()
            session = self._session(program, cell)
            while True:
                # Trials whose batch grows stay in one phase: they begin together.
                if not (cell.growth and lanes):
                    self._fill(work, key, session, lanes, waiting)
                if not lanes or self._stopping(work):
                    return
                self._advance(work, session, lanes)

    def _session(self, program: Any, cell: Cell) -> AnySession:
        if self._together:
            probe = self._shared(cell, 0, lambda: make_mesh_probe(cell.problem, self._config))
            return MeshSession(program, probe)
        batching = program.batching
        make = lambda: Equipment(cell.problem, self._config, batching)  # noqa: E731
        return Session(program, self._shared(cell, batching.width, make))

    def _batching(self, cell: Cell) -> TrialBatching:
        """Return the lanes of a cell's program: as many as trials are wanted and fit in memory."""
        if not self._batched:
            return TrialBatching(self._config)
        search = search_cost(self._config.arm_search(cell.index))
        at_once = max(search.at_once, len(self._config.final_seeds))
        most = most_lanes(cell.largest_batch_size, jax.local_device_count())
        return TrialBatching(self._config, width=min(at_once, most))

    def _shared(self, cell: Cell, width: int, make: Callable[[], Any]) -> Any:
        """Return the result of `make`, which all trials of a problem share at this width."""
        return self._equipment.setdefault((id(cell.problem), width), Once(make))()

    def _compiled(self, cell: Cell, trial: Trial) -> Any:
        """Return the program of a trial."""
        decays = trial.weight_decay > 0
        if self._together:
            return MeshProgram(cell, decays, self._config)
        batching = self._batching(cell)
        put = Once(lambda: batching.put(resident_arrays(cell.problem.splits.train)))
        arrays = self._arrays.setdefault(id(cell.problem), put)
        each = (cell, decays, self._config, batching, arrays())
        if not cell.growth:
            return Program(*each)
        return GrowingProgram([Program(*each, phase) for phase in cell.growth], cell)

    def _stopping(self, work: Work) -> bool:
        """Return whether to stop."""
        stopping = self._asked_to_stop() or work.stopped
        if stopping:
            work.stop()
        return stopping

    def _asked_to_stop(self) -> bool:
        """Return whether the job is to stop; one that trains together stops at the same turn."""
        self._turns += 1
        if self._together:
            return self._watch.job.stops_after(self._turns)
        return self._watch.requested

    def _fill(
        self,
        work: Work,
        key: str,
        session: AnySession,
        lanes: dict[int, tuple[CellWork, RunningTrial]],
        waiting: list[tuple[CellWork, Trial]],
    ) -> None:
        """Put waiting trials into free lanes."""
        fresh: dict[int, Trial] = {}
        for lane in range(session.width):
            if lane in lanes:
                continue
            taken = waiting.pop() if waiting else work.take(key)
            if taken is None:
                break
            fresh[lane] = taken[1]
            lanes[lane] = taken[0], RunningTrial(self._config, taken[0].cell, taken[1])
        if fresh:
            session.begin(fresh)

    def _advance(
        self, work: Work, session: AnySession, lanes: dict[int, tuple[CellWork, RunningTrial]]
    ) -> None:
        """Take steps, evaluate and probe, and write the records of trials that have ended."""
        begin = time.perf_counter()
        running = {lane: run for lane, (_, run) in lanes.items()}
        session.advance(running)
        beat()

        _evaluate_and_probe(session, running)
        ended = {lane: run for lane, run in running.items() if run.ended}
        scores, examples = _final_scores(session, ended)

        # The lanes share one program, so each trial is charged an equal part of its time.
        seconds = (time.perf_counter() - begin) / len(lanes)
        for run in running.values():
            run.seconds += seconds

        finished = [(lanes.pop(lane)[0], run.record(scores[lane])) for lane, run in ended.items()]
        if finished:
            records = [record for _, record in finished]
            packed = [
                pack(record, examples[lane])
                for lane, record in zip(ended, records, strict=True)
                if lane in examples
            ]
            self._results.add(records, [line for line in packed if line is not None])

        # Told after the records are saved: a resumed search replays the saved records.
        for cell_work, record in finished:
            work.tell(cell_work, record)


@contextlib.contextmanager
def _device_memory_errors(config: SweepConfig, batched: bool) -> Iterator[None]:
    """Turn a full memory of the devices into an `EnvironmentProblem`.

    It names the fields that apply to the study.

    Args:
      config: The config of the study.
      batched: Whether a call of a program takes many trials.
    """
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        ways = {"config.trials_per_program": "lower"} if batched else {}
        # A study refuses `microstep_size` if it has a number of microsteps.
        if config.train.parallel.num_microsteps > 1:
            ways["config.train.parallel.num_microsteps"] = "raise"
        else:
            ways["config.microstep_size"] = "lower"
        ways["config.train.eval_global_batch_size"] = "lower"

        fix = (
            f"the devices have too little memory ({str(error).splitlines()[0][:200]}); "
            f"{' or '.join(f'{change} {field}' for field, change in ways.items())}"
        )
        raise EnvironmentProblem(next(iter(ways)), reason=fix, code="resource") from error


def _evaluate_and_probe(session: AnySession, running: dict[int, RunningTrial]) -> None:
    """Evaluate and probe the trials for which that is due after their last step."""
    evaluated = [lane for lane, run in running.items() if run.wants_evaluation]
    if evaluated:
        scores = session.score("validation")
        for lane in evaluated:
            running[lane].evaluated(scores[lane])
    probed = [lane for lane, run in running.items() if run.wants_probe]
    if probed:
        measured = session.probe()
        for lane in probed:
            running[lane].probed(measured[lane])


def _final_scores(
    session: AnySession, ended: dict[int, RunningTrial]
) -> tuple[dict[int, dict[str, dict[str, float]]], dict[int, Pairs]]:
    """Return the scores of trials that have ended, by lane and split; of tests by example too.

    The test split is evaluated for final trials only.

    Returns:
      Means by lane, split and metric; and the scores on each test example by lane.
    """
    found: dict[int, dict[str, dict[str, float]]] = {lane: {} for lane in ended}
    examples: dict[int, Pairs] = {}
    for split in ("train", "validation") if ended else ():
        scores = session.score(split)
        for lane in ended:
            found[lane][split] = scores[lane]

    final = [lane for lane, run in ended.items() if run.trial.phase == FINAL]
    tested = session.test() if final else []
    for lane in final:
        found[lane]["test"] = tested[lane].means
        pairs = tested[lane].examples
        if pairs is not None:
            examples[lane] = pairs
    return found, examples
