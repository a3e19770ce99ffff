"""`lbopt plan` of a study: what every cell costs on a pod, and what all of it would."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from lbopt.config import SweepConfig
from lbopt.errors import UserError
from lbopt.plan import Plan, Topology, make_plan, plan_document
from lbopt.sweep.search import SearchCost, search_cost

Say = Callable[[str], None]
_HEADER = (
    "arm",
    "batch",
    "microsteps",
    "steps",
    "GiB a device",
    "ms a step",
    "of peak",
    "hours a run",
    "runs",
    "hours",
)


class CellPlan(NamedTuple):
    """One cell on the pod.

    Attributes:
      arm: its name.
      global_batch_size: examples per step.
      num_microsteps: that a step is accumulated over.
      plan: of a run of whole length.
      search: what the search takes.
      num_final: runs of whole length that are tested.
    """

    arm: str
    global_batch_size: int
    num_microsteps: int
    plan: Plan
    search: SearchCost
    num_final: int

    @property
    def full_runs(self) -> float:
        """Runs of the whole length, those that are shorter by their part."""
        return self.search.full_runs + self.num_final

    @property
    def seconds(self) -> float | None:
        """Of all runs of the cell, one after another; None if they do not fit."""
        return self.full_runs * self.plan.seconds if self.plan.fits else None


def plan_study(
    config: SweepConfig, flag: str, topology: Topology, with_evaluation: bool, say: Say
) -> list[CellPlan]:
    """Compile the step of every cell for a pod; nothing is run.

    Args:
      config: validated.
      flag: how the user named it.
      topology: the pod.
      with_evaluation: compile the evaluation too.
      say: gets a line before each compilation.

    Returns:
      The cells of the first arm, ascending in batch size, then those of the next. One that needs more memory than a device has
      is among them: its plan says that it does not fit.

    Raises:
      UserError: naming `config.trial_devices`, if a trial of the study has one device, or the field of a trial's config that
        does not go with the pod, as a batch that its devices do not divide.
      EnvironmentProblem: if a search needs a package that is not installed.
    """
    if config.trial_devices != "all":
        raise UserError(
            f"config.trial_devices = {config.trial_devices!r}: a trial has one device, and a pod is nothing to plan; set config.trial_devices='all'"
        )
    cells = []
    for index, arm in enumerate(config.arms):
        for size in config.global_batch_sizes:
            devices = config.train.parallel.num_devices or len(topology.devices)
            train = config.cell_train(index, size, devices)

            def tell(line: str, where: str = f"{arm.name}, batch {size}") -> None:
                say(f"{where}: {line}")

            plan = make_plan(train, flag, topology, with_evaluation, tell)
            cost = search_cost(config.arm_search(index))
            cells.append(
                CellPlan(
                    arm.name,
                    size,
                    train.parallel.num_microsteps,
                    plan,
                    cost,
                    len(config.final_seeds),
                )
            )
    return cells


def lines(cells: list[CellPlan]) -> list[str]:
    """Return the plan as a table, and what the whole study takes.

    Args:
      cells: from `plan_study`.

    Returns:
      Lines of text: memory in GiB a device, time in ms a step and in hours, utilization in percent of the peak.
    """
    rows = [_HEADER, *map(_row, cells)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(_HEADER))]
    table = ["  ".join(_cells(row, widths)) for row in rows]
    seconds = [cell.seconds for cell in cells]
    known = [one for one in seconds if one is not None]
    total = f"all runs one after another take {sum(known) / 3600:.1f} h by these steps"
    left_out = f"; {len(seconds) - len(known)} cells do not fit and are not counted" * (
        len(known) < len(seconds)
    )
    runs = sum(cell.search.trials + cell.num_final for cell in cells)
    return [*table, "", f"{runs} runs; {total}{left_out}"]


def _cells(row: tuple[str, ...], widths: list[int]) -> list[str]:
    return [
        row[0].ljust(widths[0]),
        *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)),
    ]


def _row(cell: CellPlan) -> tuple[str, ...]:
    plan = cell.plan
    (phase,) = plan.phases
    memory = f"{max(step.hbm_bytes for step in plan.compiled) / 2**30:.1f}"
    start = (
        cell.arm,
        str(cell.global_batch_size),
        str(cell.num_microsteps),
        f"{plan.num_steps:,}",
        memory,
    )
    if not plan.fits or cell.seconds is None:
        return *start, "does not fit", "-", "-", f"{cell.full_runs:.3g}", "-"
    return (
        *start,
        f"{1000 * phase.step.step_seconds:.1f}",
        f"{100 * plan.utilization:.1f} %",
        f"{plan.seconds / 3600:.2f}",
        f"{cell.full_runs:.3g}",
        f"{cell.seconds / 3600:.1f}",
    )


def to_json(cells: list[CellPlan], name: str) -> dict[str, Any]:
    """Return the plan of a study as plain data; each cell has the plan of one run of whole length.

    Args:
      cells: from `plan_study`, at least one.
      name: of the study.

    Returns:
      `{"study", "topology", "fits" (all cells do), "projected_seconds", "cells": [{"arm", "global_batch_size",
      "num_microsteps", "search_trials", "search_full_runs", "final_runs", "projected_seconds", "run"}]}`; the seconds of a cell
      that does not fit are null, and the study's are those of the others, all runs one after another.
    """
    seconds = [cell.seconds for cell in cells]
    return {
        "study": name,
        "topology": cells[0].plan.topology.name,
        "fits": None not in seconds,
        "projected_seconds": sum(one for one in seconds if one is not None),
        "cells": [
            {
                "arm": cell.arm,
                "global_batch_size": cell.global_batch_size,
                "num_microsteps": cell.num_microsteps,
                "search_trials": cell.search.trials,
                "search_full_runs": cell.search.full_runs,
                "final_runs": cell.num_final,
                "projected_seconds": cell.seconds,
                "run": plan_document(cell.plan),
            }
            for cell in cells
        ],
    }
