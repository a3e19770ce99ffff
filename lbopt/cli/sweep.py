"""`lbopt sweep`."""

from __future__ import annotations

from collections.abc import Sequence

from lbopt.cli import arguments
from lbopt.config import SweepConfig, checks
from lbopt.recipes.problem import make_problem
from lbopt.sweep import report, runner, trials
from lbopt.train import workdir as workdirs

FLAGS = {
    "config": "configs/sweeps/FILE[:ROW], then --config.field=VALUE to override",
    "workdir": "folder for results.jsonl and the report; the same one resumes",
}
NOT_COMPARED = ("num_workers", "about")


def run(argv: Sequence[str]) -> None:
    """Run what is missing of a study and write its report."""
    given, overrides = arguments.parse("sweep", argv, FLAGS, required=("config", "workdir"))
    config = arguments.load_config(given["config"], overrides, SweepConfig)
    config.validate()
    problem = make_problem(config.train.data, config.train.model)
    cells = trials.make_cells(config, len(problem.splits.train))
    ours, saved = checks.to_json(config), workdirs.read_config(given["workdir"], "sweep")
    differences = checks.differences(_core(ours), _core(saved["config"])) if saved else None
    workdir = workdirs.open_workdir(given["workdir"], "sweep", ours, differences, arguments.command_line("sweep", argv))
    with workdirs.locked(workdir):
        runner.run_sweep(config, problem, cells, workdir)
    saved = workdirs.read_config(workdir, "sweep")
    assert saved is not None
    page, summary = report.write_sweep_report(workdir, saved)
    print(report.terminal_table(summary))
    print("\n" + "\n".join(summary["findings"]))
    print(f"\n{page}")


def _core(config: dict) -> dict:
    return {name: value for name, value in config.items() if name not in NOT_COMPARED}
