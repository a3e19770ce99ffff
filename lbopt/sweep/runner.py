"""Run a study: every cell's search, the choice on validation, the final trials, the test."""

from __future__ import annotations

import concurrent.futures
import contextlib
import math
import os
import pathlib
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from lbopt.config.sweep import SweepConfig
from lbopt.errors import Preempted
from lbopt.job import pulse
from lbopt.job.member import Alone
from lbopt.recipes.problem import Problem
from lbopt.schedules import units
from lbopt.sweep import program, trials
from lbopt.sweep.results import Results
from lbopt.sweep.trials import Cell, Trial
from lbopt.train.preemption import PreemptionWatch
from lbopt.train.progress import Progress
from lbopt.train.writers import finite

_PATIENCE = 96
"""A program of trials shows no steps: it may take a day where a step may take a quarter of an hour."""


def run_sweep(
    config: SweepConfig,
    problem: Problem,
    cells: Sequence[Cell],
    workdir: pathlib.Path,
    watch: PreemptionWatch | None = None,
) -> list[dict[str, Any]]:
    """Run every trial of a study that is not in `results.jsonl` yet.

    Args:
      config: validated.
      problem: from `make_problem`.
      cells: from `make_cells`.
      workdir: an opened workdir.
      watch: who watches for SIGTERM already, and knows the job; None to watch from here on, alone. The processes of a job
        share the cells; each trains on a device of its own.

    Returns:
      All rows, finished before or now, in the first process; in the others those of their cells.

    Raises:
      Preempted: on SIGTERM; finished trials are saved.
    """
    job = Alone() if watch is None else watch.job
    total = len(cells) * (len(config.learning_rate_factors) * len(config.search_seeds) + len(config.final_seeds))
    with (
        contextlib.nullcontext(watch) if watch else PreemptionWatch() as watch,
        Progress(total, 0, "trial", silent=job.index > 0) as progress,
    ):
        results = Results(workdir, job, progress)
        progress.advance(results.num_before)
        progress.say(f"{total} trials in {len(cells)} programs, {results.num_before} finished before")
        study = _Study(config, problem, results, progress, watch)
        job.doing("searching and testing", patience=_PATIENCE)
        _run_side_by_side(study, cells[job.index :: job.count], config.num_workers or os.cpu_count() or 1)
        job.doing("waiting for the others' trials", patience=0)
        if any(job.together("trials finished", watch.requested)):
            raise Preempted(f"stopped with {len(results.rows)} trials saved; run the same command again to go on")
    return results.rows


def _run_side_by_side(study: _Study, cells: Sequence[Cell], num_workers: int) -> None:
    """Take cells in threads: XLA compiles and runs without the interpreter's lock, and one core alone is soon idle."""
    with concurrent.futures.ThreadPoolExecutor(num_workers) as pool:
        futures = [pool.submit(study.run_cell, cell) for cell in cells]
        try:
            for future in concurrent.futures.as_completed(futures):
                future.result()
        except BaseException:
            study.stop.set()
            raise


class _Study:
    """What the cells of a study share while it runs."""

    def __init__(
        self, config: SweepConfig, problem: Problem, results: Results, progress: Progress, watch: PreemptionWatch
    ):
        self.config, self.problem, self.results, self.progress, self.watch = config, problem, results, progress, watch
        self.stop = threading.Event()
        self._validate = program.make_scorer(problem, problem.splits.validation)
        self._test = program.make_scorer(problem, problem.splits.test)

    def run_cell(self, cell: Cell) -> None:
        """Search, choose, test; trials that have a row already are left alone."""
        compiled = _Once(lambda: program.compile_cell(self.problem, cell, self.config))
        self._run_missing(cell, cell.search_trials(self.config), compiled)
        if self._stopping():
            return
        rows = [
            row
            for row in list(self.results.rows)
            if (row["arm"], row["global_batch_size"]) == (cell.arm.name, cell.global_batch_size)
        ]
        self._run_missing(cell, cell.final_trials(self.config, trials.choose_factor(rows)), compiled)

    def _stopping(self) -> bool:
        return self.stop.is_set() or self.watch.requested

    def _run_missing(self, cell: Cell, wanted: Sequence[Trial], compiled: _Once) -> None:
        finished = {trials.key(row) for row in list(self.results.rows)}
        missing = [trial for trial in wanted if trials.trial_key(cell, trial) not in finished]
        width = self.config.trials_per_program
        for start in range(0, len(missing), width):
            if self._stopping():
                return
            self._run_some(cell, missing[start : start + width], compiled)

    def _run_some(self, cell: Cell, some: Sequence[Trial], compiled: _Once) -> None:
        run = compiled()
        begin = time.perf_counter()
        outcome = run(some)
        losses = np.asarray(outcome.losses)
        pulse.beat()
        validation = self._validate(outcome.params, outcome.model_state)
        tested = some[0].phase == trials.FINAL
        test = self._test(outcome.params, outcome.model_state) if tested else [None] * len(some)
        seconds = (time.perf_counter() - begin) / len(some)
        measured = zip(some, losses, validation, test, strict=True)
        rows = [self._row(cell, trial, loss, scores, tested, seconds) for trial, loss, scores, tested in measured]
        self.results.add(rows)
        best = max(row["validation_accuracy"] for row in rows)
        self.progress.report({f"{cell.name}: {some[0].phase}, best validation accuracy": best})

    def _row(
        self,
        cell: Cell,
        trial: Trial,
        losses: np.ndarray,
        validation: dict[str, float],
        test: dict[str, float] | None,
        seconds: float,
    ) -> dict[str, Any]:
        here = units.Units(len(self.problem.splits.train), cell.global_batch_size)
        last_epoch = losses[-min(len(losses), here.steps(1)) :]
        diverged = not bool(np.isfinite(losses).all() and math.isfinite(validation["loss"]))
        perplexity = {}
        if "perplexity" in validation:
            perplexity["validation_perplexity"] = finite(validation["perplexity"])
            perplexity["test_perplexity"] = finite(test["perplexity"]) if test else None
        return {
            "arm": cell.arm.name,
            "optimizer": cell.arm.optimizer.name,
            "scaling_rule": cell.arm.schedule.scaling_rule,
            "warmup_rule": cell.arm.schedule.warmup_rule,
            "global_batch_size": cell.global_batch_size,
            "phase": trial.phase,
            "learning_rate": trial.learning_rate,
            "learning_rate_factor": trial.learning_rate_factor,
            "warmup_steps": cell.resolved.warmup_steps,
            "weight_decay": cell.arm.optimizer.weight_decay,
            "seed": trial.seed,
            "steps": cell.resolved.num_steps,
            "examples_seen": here.examples(cell.resolved.num_steps),
            "train_loss": finite(float(np.mean(last_epoch))),
            "validation_loss": finite(validation["loss"]),
            "validation_accuracy": validation["accuracy"],
            "test_loss": finite(test["loss"]) if test else None,
            "test_accuracy": test["accuracy"] if test else None,
            **perplexity,
            "diverged": diverged,
            "seconds": round(seconds, 4),
        }


class _Once:
    """Call a function the first time its result is needed: a cell that is finished is never compiled."""

    def __init__(self, make: Callable[[], Callable[[Sequence[Trial]], program.Outcome]]):
        self._make = make
        self._made: Callable[[Sequence[Trial]], program.Outcome] | None = None

    def __call__(self) -> Callable[[Sequence[Trial]], program.Outcome]:
        if self._made is None:
            self._made = self._make()
        return self._made
