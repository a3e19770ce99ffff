"""Checkpoints of the whole training state, by Orbax: asynchronous, atomic, the latest few and the best."""

from __future__ import annotations

import contextlib
import json
import math
import pathlib
import shutil
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from orbax.checkpoint import checkpoint_managers

from lbopt.errors import EnvironmentProblem, UserError
from lbopt.parallel.state import TrainState
from lbopt.transforms.ema import EmaState

PHASE = "phase"
"""Among the metrics of a checkpoint: the number of its phase, if it is not the first."""
_PHASE_COUNTS = 1e9
"""A later phase, with its other examples, is better than an earlier one whatever its metrics."""
_MARGIN_BYTES = 1 << 17
"""For what is saved beside the arrays."""


class Checkpoints:
    """The `checkpoints/` folder of a workdir.

    Args:
      workdir: the run's folder.
      keep: how many of the latest are kept; the best one is kept besides.
      best_metric: which metric says which is best; lower is better if its name ends in "loss".
      read_only: leave the disk as it is.
      always: steps that are kept whatever comes after: the ends of phases.

    Raises:
      UserError: if they are only read, and there are none.
      EnvironmentProblem: if they cannot be read.
    """

    def __init__(
        self,
        workdir: pathlib.Path,
        keep: int = 3,
        best_metric: str = "eval/accuracy",
        read_only: bool = False,
        always: Sequence[int] = (),
    ):
        self._folder = workdir / "checkpoints"
        self._best_metric = best_metric
        policy = checkpoint_managers.AnyPreservationPolicy(
            [
                checkpoint_managers.LatestN(keep),
                checkpoint_managers.CustomSteps(list(always)),
                checkpoint_managers.BestN(get_metric_fn=self._goodness, n=1, keep_checkpoints_without_metrics=False),
            ]
        )
        options = ocp.CheckpointManagerOptions(
            preservation_policy=policy,
            best_fn=self._goodness,  # without it orbax writes no metrics; what is kept, the policy says
            enable_async_checkpointing=not read_only,
            read_only=read_only,
            create=not read_only,
        )
        if not _steps_on_disk(self._folder) and read_only:
            raise UserError(f"--workdir = {str(workdir)!r}: no checkpoint is there yet; let lbopt train save one")
        try:
            self._manager = ocp.CheckpointManager(self._folder, options=options)
        except Exception as error:  # it reads every checkpoint's metrics, whatever state they are in
            raise EnvironmentProblem(_unreadable(self._folder, _first_damaged(self._folder), error)) from error
        self._best = max((self._goodness(metrics) for metrics in self._scored().values()), default=-math.inf)

    def steps(self) -> list[int]:
        """Return the steps of all whole checkpoints, ascending."""
        return sorted(self._manager.all_steps())

    def latest_step(self) -> int | None:
        """Return the step of the newest whole checkpoint, None if there is none."""
        return self._manager.latest_step()

    def best_step(self) -> int | None:
        """Return the step of the best checkpoint by the metric, None if none has one."""
        scored = {step: self._goodness(metrics) for step, metrics in self._scored().items()}
        return max(scored, key=lambda step: (scored[step], step), default=None)

    def would_be_best(self, metrics: Mapping[str, float]) -> bool:
        """Return whether an evaluation is better than that of every checkpoint so far."""
        return bool(metrics) and self._goodness(metrics) > self._best

    def save(self, state: TrainState, metrics: Mapping[str, float] | None) -> None:
        """Start saving; returns once the state is copied, so that its buffers may be donated."""
        step = int(state.step)
        if step == self._manager.latest_step():
            return
        self._check_space(state)
        with self._writing():
            self._manager.save(step, args=ocp.args.StandardSave(state), metrics=dict(metrics) if metrics else None)
        if metrics:
            self._best = max(self._best, self._goodness(metrics))

    def _check_space(self, state: TrainState) -> None:
        """Say that the disk is full before half of a checkpoint is on it."""
        needed = sum(leaf.nbytes for leaf in jax.tree.leaves(state)) + _MARGIN_BYTES
        free = shutil.disk_usage(self._folder).free
        if free < needed:
            raise EnvironmentProblem(
                f"{self._folder}: a checkpoint needs {needed / 2**20:.1f} MiB and {free / 2**20:.1f} MiB are free; free space, then run the same command again"
            )

    def restore(self, like: TrainState, step: int) -> TrainState:
        """Read a checkpoint.

        Args:
          like: shapes, dtypes and shardings (`Run.shapes`); the run that saved it may have had other shardings and devices.
          step: which one.

        Raises:
          EnvironmentProblem: if it cannot be read.
        """
        try:
            return self._manager.restore(step, args=ocp.args.StandardRestore(like))
        except Exception as error:  # whatever the storage layers raise
            raise EnvironmentProblem(_unreadable(self._folder, step, error)) from error

    def wait(self) -> None:
        """Wait until what is being saved is whole on disk."""
        with self._writing():
            self._manager.wait_until_finished()

    def close(self) -> None:
        """Wait and close."""
        with self._writing():
            self._manager.close()

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(self, *exception: object) -> None:
        with contextlib.suppress(Exception) if exception[0] else contextlib.nullcontext():
            self.close()

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # whatever the storage layers raise
            raise EnvironmentProblem(
                f"checkpoints cannot be written to {self._folder} ({_reason(error)}); free space or mend the folder, then run the same command again"
            ) from error

    def _scored(self) -> dict[int, Mapping[str, float]]:
        found = {step: self._manager.metrics(step) for step in self.steps()}
        return {step: metrics for step, metrics in found.items() if metrics}

    def _goodness(self, metrics: Mapping[str, float]) -> float:
        value = metrics[self._best_metric]
        if math.isnan(value):
            return -math.inf
        goodness = -value if self._best_metric.endswith("loss") else value
        return goodness + _PHASE_COUNTS * metrics.get(PHASE, 0)


def _unreadable(folder: pathlib.Path, step: int, error: Exception) -> str:
    earlier = [other for other in _steps_on_disk(folder) if other < step]
    fix = f"to resume at step {max(earlier)}" if earlier else "to start again, or use another --workdir"
    return f"checkpoint {folder / str(step)} cannot be read ({_reason(error)}); remove that folder {fix}"


def _reason(error: Exception) -> str:
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[0][:120]


def is_begun(workdir: pathlib.Path) -> bool:
    """Return whether a workdir has a checkpoint."""
    return (workdir / "checkpoints").is_dir() and bool(_steps_on_disk(workdir / "checkpoints"))


def _steps_on_disk(folder: pathlib.Path) -> list[int]:
    try:
        return sorted(int(entry.name) for entry in folder.iterdir() if entry.name.isdecimal())
    except FileNotFoundError:
        return []
    except OSError as error:
        raise EnvironmentProblem(
            f"{folder} cannot be read ({error.strerror}); mend it or use another --workdir"
        ) from error


def _first_damaged(folder: pathlib.Path) -> int:
    """Return the first step whose metrics cannot be read, for a message; the newest if all of them can."""
    steps = _steps_on_disk(folder)
    for step in steps:
        file = folder / str(step) / "metrics" / "metrics"
        try:
            json.loads(file.read_text())
        except FileNotFoundError:
            continue
        except (OSError, ValueError):
            return step
    return steps[-1] if steps else 0


def read_variables(workdir: pathlib.Path) -> dict[str, Any]:
    """Read parameters (their average, if the run kept one) and model state of a run's newest checkpoint, whatever the run was.

    Returns:
      {"params": ..., "batch_stats": ...}, NumPy arrays.

    Raises:
      UserError: if there is no checkpoint.
      EnvironmentProblem: if it cannot be read.
    """
    folder, field = workdir / "checkpoints", f"config.init_from = {str(workdir)!r}"
    steps = _steps_on_disk(folder)
    if not steps:
        raise UserError(f"{field}: no checkpoint is there yet; let lbopt train save one")
    try:
        with ocp.PyTreeCheckpointer() as reader:
            place = folder / str(steps[-1]) / "default"
            saved = reader.restore(place, restore_args=_as_numpy(reader.metadata(place)))
    except Exception as error:  # whatever the storage layers raise
        fix = f"checkpoint {steps[-1]} cannot be read ({_reason(error)}); use another checkpoint"
        raise EnvironmentProblem(f"{field}: {fix}") from error
    average = _averaged(saved["opt_state"])
    return {"params": saved["params"] if average is None else average, **saved["model_state"]}


def _averaged(opt_state: Any) -> Any:
    """Return the average that `lbopt.track_ema` kept, from a state whose tuples have become dictionaries and lists; None if there is none."""
    if isinstance(opt_state, dict) and set(opt_state) == set(EmaState._fields):
        return opt_state["ema"]
    parts = opt_state.values() if isinstance(opt_state, dict) else opt_state if isinstance(opt_state, list) else ()
    return next((found for part in parts if (found := _averaged(part)) is not None), None)


def _as_numpy(metadata: Any) -> Any:
    described = metadata.item_metadata
    if described is None:
        raise ValueError("the description of its arrays is missing or damaged")
    return jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), described.tree)


def choose_step(checkpoints: Checkpoints, which: str) -> int:
    """Return the step of the "latest" or "best" checkpoint, or the one whose number is given.

    Raises:
      UserError: if there is none.
    """
    named = {"latest": checkpoints.latest_step, "best": checkpoints.best_step}
    step = (
        named[which]() if which in named else next((step for step in checkpoints.steps() if str(step) == which), None)
    )
    if step is None:
        raise UserError(
            f"--checkpoint = {which!r}: there is no such checkpoint; use latest, best or a step, after lbopt train has saved one"
        )
    return step
