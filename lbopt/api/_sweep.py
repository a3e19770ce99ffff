"""`run_sweep`: a study of several optimizers over batch sizes, as `lbopt sweep`."""

from __future__ import annotations

import dataclasses
import json
import pathlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from lbopt import paths
from lbopt.api._folder import Folder, framed, write_page
from lbopt.api._problem import Problem, check_objects, in_python, schedule_for, train_config
from lbopt.cli import sweep_in
from lbopt.config import Arm, SweepConfig
from lbopt.errors import require
from lbopt.job import SoloJob
from lbopt.sweep import read_results
from lbopt.workdir import absolute_workdir

_OF_STUDY = {field.name for field in dataclasses.fields(SweepConfig)} - {
    "train",
    "arms",
    "global_batch_sizes",
}


@dataclasses.dataclass(frozen=True, repr=False)
class StudyResult:
    """A finished study. A notebook shows its report, and `print` its table.

    Attributes:
      config: The config, as `lbopt sweep` would read it from a file.
      records: The lines of `results.jsonl`, a dict for each trial; `pandas.DataFrame(records)` is
        a table.
      findings: What was found, a sentence each.
      summary: The content of `summary.json`: scores, limits and claims.

    >>> import flax.linen as nn, lbopt, numpy as np
    >>> x = np.random.default_rng(0).normal(size=(640, 2)).astype(np.float32)
    >>> label = (x[:, 0] > x[:, 1]).astype(np.int32)
    >>> problem = lbopt.Problem({"x": x, "label": label}, nn.Dense(2))
    >>> study = lbopt.run_sweep(  # doctest: +SKIP
    ...     problem, {"LAMB": ("lamb", 0.02)}, (64,), num_epochs=1, final_seeds=(7,)
    ... )
    >>> sorted({record["phase"] for record in study.records})  # doctest: +SKIP
    ['final', 'search']
    >>> print(str(study).splitlines()[0])  # doctest: +SKIP
    test accuracy, % (mean over seeds)
    """

    config: SweepConfig
    records: list[dict[str, Any]]
    findings: list[str]
    summary: dict[str, Any]
    _table: str
    _page: str
    _folder: Folder

    @property
    def workdir(self) -> str:
        """The folder of the study; a temporary one is removed with this object."""
        return self._folder.name

    def report(self, path: paths.GivenPath) -> pathlib.Path:
        """Write the page of the study, with its figures, to a file or into a folder.

        Returns:
          The file.
        """
        return write_page(self._page, path)

    def __repr__(self) -> str:
        return f"StudyResult({self.config.name!r}, {len(self.records)} trials in {self.workdir})"

    def __str__(self) -> str:
        return "\n".join([self._table, "", *self.findings])

    def _repr_html_(self) -> str:
        return framed(self._page)


def run_sweep(
    problem: Problem,
    arms: Mapping[str, Any] | Sequence[Arm],
    batch_sizes: Sequence[int],
    *,
    workdir: paths.GivenPath | None = None,
    accept: str = "",
    **fields: Any,
) -> StudyResult:
    """Run a study of the largest batch size that several optimizers can use, as `lbopt sweep`.

    Args:
      problem: Data, model and loss of every trial.
      arms: Name -> optimizer, or (optimizer, schedule), each as `run_training` takes them, for the
        smallest batch; or a sequence of `lbopt.config.Arm`.
      batch_sizes: Examples per optimizer step, ascending.
      workdir: Folder for results.jsonl and the report, from which the same call resumes
        (gs://BUCKET/FOLDER too); None for a temporary one.
      accept: Names of your files, separated by commas, that may have changed since the run in the
        workdir began.
      **fields: Other fields of `lbopt.config.SweepConfig` (`search`, `final_seeds`, `name`, ...),
        and of `TrainConfig` for every trial (`num_epochs`, `target_metric`, ...).

    Returns:
      The records of all trials, and what they show.

    Raises:
      UserError: Naming the argument and the fix, before anything is compiled.
      EnvironmentProblem: If data, devices, workdir or an installed package are at fault.
      Preempted: On SIGTERM; finished trials are saved, and the same call resumes.

    >>> import flax.linen as nn, lbopt, numpy as np
    >>> x = np.random.default_rng(0).normal(size=(1280, 2)).astype(np.float32)
    >>> label = (x[:, 0] > x[:, 1]).astype(np.int32)
    >>> problem = lbopt.Problem({"x": x, "label": label}, nn.Dense(2))
    >>> arms = {"LAMB": ("lamb", 0.02), "momentum": ("momentum", 0.1)}
    >>> study = run_sweep(  # doctest: +SKIP
    ...     problem, arms, (64, 256), num_epochs=2, final_seeds=(7,)
    ... )
    >>> len(study.records) >= 24  # doctest: +SKIP
    True
    """
    with in_python():
        fix = "give a list of numbers, for instance (64, 256)"
        fits = isinstance(batch_sizes, Iterable)
        require(fits, "batch_sizes", batch_sizes, fix, code="type")
        target = Folder(workdir)
        of_study = {name: value for name, value in fields.items() if name in _OF_STUDY}
        of_train = {name: value for name, value in fields.items() if name not in _OF_STUDY}
        config = SweepConfig(
            **{"name": "run_sweep", **of_study},
            train=train_config(problem, None, None, **of_train),
            arms=tuple(_arms(arms)),
            global_batch_sizes=tuple(batch_sizes),
        )
        command = "lbopt.run_sweep(...) of a program"
        accepted = {"accept": accept} if accept else {}
        written = sweep_in(target.name, config, SoloJob(), command, files=accepted)
        assert written is not None, "a whole study has trials"
        with target.opened() as folder:
            records = read_results(absolute_workdir(folder))
            summary = json.loads((absolute_workdir(folder) / "summary.json").read_text())
            page = (absolute_workdir(folder) / "report.html").read_text("utf-8")
    return StudyResult(config, records, written.findings, summary, written.table, page, target)


def _arms(arms: Mapping[str, Any] | Sequence[Arm]) -> list[Arm]:
    if not isinstance(arms, Mapping):
        fix = "give a dict of name -> optimizer, or a list of lbopt.config.Arm"
        fits = all(isinstance(arm, Arm) for arm in arms)
        require(fits, "arms", arms, fix, code="type")
        return list(arms)
    found = [_arm(name, given) for name, given in arms.items()]
    for index, arm in enumerate(found):
        check_objects(arm, f"arms[{index}].")
    return found


def _arm(name: str, given: Any) -> Arm:
    if isinstance(given, Arm):
        return dataclasses.replace(given, name=name)
    # A transformation of Optax is a tuple of two functions as well.
    is_pair = type(given) is tuple and len(given) == 2
    optimizer, schedule = given if is_pair else (given, None)
    return Arm(name, optimizer, schedule_for(optimizer, schedule))
