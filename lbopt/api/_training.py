"""`run_training`: one run, as `lbopt train`."""

from __future__ import annotations

import dataclasses
import pathlib
import shutil
from collections.abc import Iterable, Sequence
from typing import Any

from lbopt import paths, types
from lbopt.api._folder import Folder, framed, write_page
from lbopt.api._problem import Problem, in_python, train_config
from lbopt.cli import Trained, train_in
from lbopt.config import TrainConfig
from lbopt.errors import require, require_choice
from lbopt.job import PreemptionWatch
from lbopt.parallel import TrainState
from lbopt.report import write_training_report
from lbopt.transforms import evaluated_params
from lbopt.workdir import absolute_workdir, read_config


@dataclasses.dataclass(frozen=True, repr=False)
class TrainingResult:
    """A finished run. A notebook shows its report.

    Attributes:
      config: The config, as `lbopt train` would read it from a file.
      state: The final state: parameters, optimizer state, model state, step.
      metrics: The lines of `metrics.jsonl`, a dict each; `pandas.DataFrame(result.metrics)` is a
        table.

    >>> import flax.linen as nn, lbopt, numpy as np
    >>> x = np.random.default_rng(0).normal(size=(640, 2)).astype(np.float32)
    >>> label = (x[:, 0] > x[:, 1]).astype(np.int32)
    >>> problem = lbopt.Problem({"x": x, "label": label}, nn.Dense(2))
    >>> result = lbopt.run_training(problem, num_steps=8)  # doctest: +SKIP
    >>> int(result.state.step), result.metrics[-1]["step"]  # doctest: +SKIP
    (8, 8)
    >>> result.report("report.html").name  # doctest: +SKIP
    'report.html'
    """

    config: TrainConfig
    state: TrainState
    metrics: list[dict[str, Any]]
    _trained: Trained
    _folder: Folder

    @property
    def params(self) -> types.Params:
        """The parameters that are evaluated: the moving average, where the optimizer keeps one."""
        if not self._trained.run.evaluates_average:
            return self.state.params
        return evaluated_params(self.state.opt_state, self.state.params)

    @property
    def workdir(self) -> str:
        """The folder of the run; a temporary one is removed with this object."""
        return self._folder.name

    def evaluate(self, split: str = "test") -> dict[str, float]:
        """Return the metrics of the final parameters on every example of a split.

        Args:
          split: "validation" or "test".
        """
        require_choice("split", split, ("validation", "test"))
        run = self._trained.run
        return (run.evaluate if split == "validation" else run.evaluate_test)(self.state)

    def report(self, path: paths.GivenPath) -> pathlib.Path:
        """Write the page of the run, with its figures, to a file or into a folder.

        Returns:
          The file.
        """
        return write_page(self._page(), path)

    def _page(self) -> str:
        with self._folder.opened() as folder:
            saved = read_config(folder, "train")
            assert saved is not None
            return write_training_report(absolute_workdir(folder), saved).read_text("utf-8")

    def __repr__(self) -> str:
        last = self.metrics[-1] if self.metrics else {}
        shown = {name: value for name, value in last.items() if name.startswith(("step", "eval/"))}
        return f"TrainingResult({self.config.name!r}, {shown} in {self.workdir})"

    def _repr_html_(self) -> str:
        return framed(self._page())


def run_training(
    problem: Problem,
    optimizer: Any = "lamb",
    schedule: Any = None,
    *,
    global_batch_size: int = 256,
    workdir: paths.GivenPath | None = None,
    accept: str = "",
    on_metrics: Sequence[Any] = (),
    **fields: Any,
) -> TrainingResult:
    """Train a model to the end, as `lbopt train` does, and return it.

    Args:
      problem: Data, model and loss.
      optimizer: One of lbopt's optimizers by name or as an `OptimizerConfig`; a function of Optax
        such as `optax.lion`, or its name "optax.lion"; a function of yours that takes
        `learning_rate` (and, if it likes, `weight_decay`, `mask` and `stacked`) and returns an
        `optax.GradientTransformation`; or a finished transformation, whose updates are multiplied
        by the schedule's number.
      schedule: `ScheduleConfig`, a rule over batch sizes; a number, the learning rate of every
        step; a function of the number of updates so far; None for LEGW's default rule, or for the
        number 1 with a finished transformation.
      global_batch_size: Examples per optimizer step over all devices and microsteps.
      workdir: Folder for config.json, metrics and checkpoints, from which the same call resumes
        (gs://BUCKET/FOLDER too); None for a temporary one.
      accept: Names of your files, separated by commas, that may have changed since the run in the
        workdir began.
      on_metrics: Functions (step, metrics) that get each line of metrics.jsonl when it is written,
        a dict of floats; or writers with `write_scalars(step, metrics)`.
      **fields: Other fields of `lbopt.config.TrainConfig` by name: `num_epochs`, `num_steps`,
        `seed`, `parallel=ParallelConfig(num_microsteps=4)` and so on.

    Returns:
      The final state and the metrics.

    Raises:
      UserError: Naming the argument and the fix, before anything is compiled.
      EnvironmentProblem: If data, devices, workdir or an installed package are at fault.
      Preempted: On SIGTERM; the state is saved, and the same call resumes.

    >>> import flax.linen as nn, lbopt, numpy as np
    >>> x = np.random.default_rng(0).normal(size=(1280, 2)).astype(np.float32)
    >>> label = (x[:, 0] > x[:, 1]).astype(np.int32)
    >>> problem = lbopt.Problem({"x": x, "label": label}, nn.Dense(2))
    >>> result = run_training(  # doctest: +SKIP
    ...     problem, "lamb", 0.02, global_batch_size=128, num_epochs=5
    ... )
    >>> result.evaluate("test")["accuracy"] > 0.9  # doctest: +SKIP
    True
    """
    with in_python(), PreemptionWatch() as watch:
        fix = "give a list of functions (step, metrics)"
        fits = isinstance(on_metrics, Iterable)
        require(fits, "on_metrics", on_metrics, fix, code="type")
        target = Folder(workdir)
        fields = {"name": "run_training", "global_batch_size": global_batch_size, **fields}
        config = train_config(problem, optimizer, schedule, **fields)
        config.validate()
        if workdir is None:  # nobody resumes it
            config.checkpoint = dataclasses.replace(config.checkpoint, every_steps=_NEVER)
        with target.opened() as folder:
            command = "lbopt.run_training(...) of a program"
            accepted = {"accept": accept} if accept else {}
            trained = train_in(folder, config, watch, command, on_metrics, files=accepted)
            if workdir is None:
                shutil.rmtree(absolute_workdir(folder) / "checkpoints", ignore_errors=True)
    return TrainingResult(config, trained.state, trained.lines, trained, target)


_NEVER = 2**30
"""More steps than a run has."""
