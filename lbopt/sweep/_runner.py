"""Run a study: threads take trials, fill the lanes of programs with them, and write a line for each that ends."""

from __future__ import annotations

import concurrent.futures
import contextlib
import os
import pathlib
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias

import jax

from lbopt.config import SweepConfig
from lbopt.errors import EnvironmentProblem, Preempted
from lbopt.job import PreemptionWatch, SoloJob, beat
from lbopt.sweep._examples import pack
from lbopt.sweep._record import Record
from lbopt.sweep._results import Results
from lbopt.sweep._trials import FINAL, Cell, Trial, deal_cells
from lbopt.sweep._work import CellWork, Work
from lbopt.sweep.lanes import (
    Equipment,
    MeshProgram,
    MeshSession,
    Once,
    Pairs,
    Program,
    Session,
    Spread,
    make_mesh_probe,
    most_lanes,
    resident_arrays,
)
from lbopt.sweep.search import search_cost
from lbopt.train import Progress

AnySession: TypeAlias = Session | MeshSession
_PATIENCE = 96
"""A program of trials shows no steps: it may take a day where a step may take a quarter of an hour."""


def run_sweep(
    config: SweepConfig,
    cells: Sequence[Cell],
    workdir: pathlib.Path,
    watch: PreemptionWatch | None = None,
) -> list[dict[str, Any]]:
    """Run every trial of a study that is not in `results.jsonl` yet.

    Args:
      config: validated.
      cells: from `make_cells`; of a shard its own.
      workdir: an opened workdir.
      watch: who watches for SIGTERM already, and knows the job; None to watch from here on, alone. The processes of a job
        share the cells, each trains on devices of its own; or, with `trial_devices="all"`, all train every trial together.

    Returns:
      Rows as in `results.jsonl`: those of all trials that were finished before, and of the new ones in the first process the
      whole job's, in the others their own.

    Raises:
      Preempted: on SIGTERM; finished trials are saved.
      EnvironmentProblem: if `results.jsonl` is damaged or cannot be written, or a search needs a package that is not installed.
    """
    job = SoloJob() if watch is None else watch.job
    with (
        contextlib.nullcontext(watch) if watch else PreemptionWatch() as watch,
        Progress(None, 0, "trial", silent=job.index > 0) as progress,
    ):
        together = config.trial_devices == "all"
        results = Results(workdir, job, progress, of_all=together, study=config.name)
        progress.say(f"{len(cells)} cells, {results.num_before} trials finished before")
        study = Study(config, results, progress, watch)
        job.doing("searching and testing", patience=_PATIENCE)
        study.run(cells if together else deal_cells(cells, config)[job.index :: job.count])
        job.doing("waiting for the others' trials", patience=0)
        if any(job.together("trials finished", watch.requested)):
            raise Preempted(
                f"stopped with {len(results.rows)} trials saved; run the same command again to go on"
            )
    return results.rows


class Study:
    """What the threads of a study share while it runs.

    Args:
      config: of the study.
      results: where lines go.
      progress: is told.
      watch: says when to stop.
    """

    def __init__(
        self, config: SweepConfig, results: Results, progress: Progress, watch: PreemptionWatch
    ):
        self._config, self._results, self._progress, self._watch = config, results, progress, watch
        self._together = config.trial_devices == "all"
        self._batched = Spread(config).batched
        self._turns = 0
        self._equipment: dict[tuple[int, int], Once[Any]] = {}
        self._programs: dict[str, Once[Any]] = {}
        self._arrays: dict[int, Once[Any]] = {}

    def run(self, cells: Sequence[Cell]) -> None:
        """Run what is missing of these cells, until it is done or the watch says to stop.

        Args:
          cells: those of this process.

        Raises:
          Exception: the first that a thread ended with; the others stop at their next look.
        """
        work = Work(cells, self._config, self._results.rows, exclusive=self._batched)
        count = self._num_threads()
        with concurrent.futures.ThreadPoolExecutor(count) as pool:
            futures = [pool.submit(self._serve, work) for _ in range(count)]
            try:
                for future in concurrent.futures.as_completed(futures):
                    future.result()
            except BaseException:
                work.stop()
                raise

    def _num_threads(self) -> int:
        """Return how many take trials; one where all devices take the same steps in the same order."""
        if self._together:
            return 1
        return self._config.num_workers or (
            os.cpu_count() or 1 if jax.default_backend() == "cpu" else 2
        )

    def _serve(self, work: Work) -> None:
        """Run trials, of one program after another, until there is nothing more to do."""
        try:
            while (key := work.choose(self._ready)) is not None:
                try:
                    with _room():
                        self._run_program(work, key)
                finally:
                    work.leave(key)
        except BaseException:
            work.stop()
            raise

    def _ready(self, key: str) -> bool:
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
        cell, trial = first[0].cell, first[1]
        program = self._programs.setdefault(key, Once(lambda: self._compiled(cell, trial)))()
        session = self._session(program, cell)
        lanes: dict[int, tuple[CellWork, Record]] = {}
        waiting = [first]
        while True:
            self._fill(work, key, session, lanes, waiting)
            if not lanes or self._stopping(work):
                return
            self._advance(work, session, lanes)

    def _session(self, program: Any, cell: Cell) -> AnySession:
        if self._together:
            probe = self._shared(cell, 0, lambda: make_mesh_probe(cell.problem, self._config))
            return MeshSession(program, probe)
        spread = program.spread
        return Session(
            program,
            self._shared(cell, spread.width, lambda: Equipment(cell.problem, self._config, spread)),
        )

    def _spread(self, cell: Cell) -> Spread:
        """Return how trials of a cell share a program: no more of them than there are at a time, or than memory is likely to hold."""
        if not self._batched:
            return Spread(self._config)
        search = search_cost(self._config.arm_search(cell.index))
        at_once = max(search.at_once, len(self._config.final_seeds))
        return Spread(
            self._config,
            width=min(at_once, most_lanes(cell.global_batch_size, jax.local_device_count())),
        )

    def _shared(self, cell: Cell, width: int, make: Callable[[], Any]) -> Any:
        """Return what all trials of a problem share that are so many in a call."""
        return self._equipment.setdefault((id(cell.problem), width), Once(make))()

    def _compiled(self, cell: Cell, trial: Trial) -> Any:
        decays = trial.weight_decay > 0
        if self._together:
            return MeshProgram(cell, decays, self._config)
        spread, of = self._spread(cell), id(cell.problem)
        arrays = self._arrays.setdefault(
            of, Once(lambda: spread.put(resident_arrays(cell.problem.splits.train)))
        )
        return Program(cell, decays, self._config, spread, arrays())

    def _stopping(self, work: Work) -> bool:
        """Return whether to stop; processes that train together agree on when."""
        self._turns += 1
        stopping = (
            self._watch.job.stops_after(self._turns)
            if self._together
            else self._watch.requested or work.stopped
        )
        if stopping:
            work.stop()
        return stopping

    def _fill(
        self,
        work: Work,
        key: str,
        session: AnySession,
        lanes: dict[int, tuple[CellWork, Record]],
        waiting: list[tuple[CellWork, Trial]],
    ) -> None:
        """Put trials that wait into lanes that are free."""
        fresh: dict[int, Trial] = {}
        for lane in range(session.width):
            if lane in lanes:
                continue
            taken = waiting.pop() if waiting else work.take(key)
            if taken is None:
                break
            fresh[lane] = taken[1]
            lanes[lane] = taken[0], Record(self._config, taken[0].cell, taken[1])
        if fresh:
            session.begin(fresh)

    def _advance(
        self, work: Work, session: AnySession, lanes: dict[int, tuple[CellWork, Record]]
    ) -> None:
        """Take steps, look at the trials that want it, and write the lines of those that have ended."""
        begin = time.perf_counter()
        records = {lane: record for lane, (_, record) in lanes.items()}
        session.advance(records)
        beat()
        _look(session, records)
        ended = {lane: record for lane, record in records.items() if record.ended}
        scores, examples = _final_scores(session, ended)
        seconds = (time.perf_counter() - begin) / len(lanes)
        for record in records.values():
            record.seconds += seconds
        finished = [
            (lanes.pop(lane)[0], record.row(scores[lane])) for lane, record in ended.items()
        ]
        if finished:
            rows = [row for _, row in finished]
            packed = [
                pack(row, examples[lane])
                for lane, row in zip(ended, rows, strict=True)
                if lane in examples
            ]
            self._results.add(rows, [line for line in packed if line is not None])
        for of, row in finished:
            self._say(of.cell, row)
            work.tell(of, row)

    def _say(self, cell: Cell, row: dict[str, Any]) -> None:
        name = f"{cell.name}: {row['phase']}, validation"
        measured = "perplexity" if "validation_perplexity" in row else "accuracy"
        self._progress.report({f"{name} {measured}": row[f"validation_{measured}"] or float("nan")})


@contextlib.contextmanager
def _room() -> Iterator[None]:
    """Say what to do where the devices' memory is full."""
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        raise EnvironmentProblem(
            f"the devices have too little memory for these trials ({str(error).splitlines()[0][:200]}); lower config.trials_per_program, "
            "config.microstep_size or config.train.eval_global_batch_size"
        ) from error


def _look(session: AnySession, records: dict[int, Record]) -> None:
    """Evaluate and probe the trials that are where they are to be looked at."""
    evaluated = [lane for lane, record in records.items() if record.wants_evaluation]
    if evaluated:
        scores = session.score("validation")
        for lane in evaluated:
            records[lane].evaluated(scores[lane])
    probed = [lane for lane, record in records.items() if record.wants_probe]
    if probed:
        measured = session.probe()
        for lane in probed:
            records[lane].probed(measured[lane])


def _final_scores(
    session: AnySession, ended: dict[int, Record]
) -> tuple[dict[int, dict[str, dict[str, float]]], dict[int, Pairs]]:
    """Return the scores of trials that have ended, by lane and split.

    The second dictionary has the scores of each test example, by lane. The test split is looked at
    for final trials only.
    """
    found: dict[int, dict[str, dict[str, float]]] = {lane: {} for lane in ended}
    examples: dict[int, Pairs] = {}
    for split in ("train", "validation") if ended else ():
        scores = session.score(split)
        for lane in ended:
            found[lane][split] = scores[lane]

    final = [lane for lane, record in ended.items() if record.trial.phase == FINAL]
    tested = session.test() if final else []
    for lane in final:
        found[lane]["test"] = tested[lane].means
        pairs = tested[lane].examples
        if pairs is not None:
            examples[lane] = pairs
    return found, examples
