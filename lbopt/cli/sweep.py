"""`lbopt sweep`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lbopt.cli import arguments
from lbopt.config import SweepConfig, checks
from lbopt.job.member import STARTING, Alone
from lbopt.job.place import FLAGS as JOB_FLAGS
from lbopt.parallel import processes
from lbopt.parallel.mesh import available_devices
from lbopt.recipes.problem import make_problem
from lbopt.report import page
from lbopt.sweep import report, runner, trials
from lbopt.train import bucket, workdir as workdirs
from lbopt.train.preemption import PreemptionWatch

FLAGS = {
    "config": "configs/sweeps/FILE[:ROW], then --config.field=VALUE to override",
    "workdir": "folder for results.jsonl and the report; the same one resumes",
    **JOB_FLAGS,
}
NOT_COMPARED = ("num_workers", "about")


def run(argv: Sequence[str], job: Alone) -> None:
    """Run what is missing of a study and write its report."""
    given, overrides = arguments.parse("sweep", argv, FLAGS, required=("config", "workdir"))
    config = arguments.load_config(given["config"], overrides, SweepConfig)
    config.validate()
    ours, command = checks.to_json(config), arguments.command_line("sweep", argv)
    job.same("config", ours)
    processes.start(job)
    page.new_figure()  # say now, not after the last trial, if nothing can be drawn
    available_devices()
    problem = make_problem(config.train.data, config.train.model, config.train.loss)
    cells = trials.make_cells(config, len(problem.splits.train))

    def compare(saved: dict[str, Any]) -> list[str]:
        return checks.differences(_core(ours), _core(saved["config"]))

    with PreemptionWatch(job) as watch, bucket.opened(given["workdir"], job) as folder:
        workdirs.check_shared(folder, job)
        with workdirs.open_workdir(folder, "sweep", ours, compare, 1, command, job) as workdir:
            runner.run_sweep(config, problem, cells, workdir, watch)
            if job.index:
                return
            job.doing("writing the report", patience=STARTING)
            saved = workdirs.read_config(workdir, "sweep")
            assert saved is not None
            file, summary = report.write_sweep_report(workdir, saved)
            where = bucket.shown(file)
    print(report.terminal_table(summary))
    print("\n" + "\n".join(summary["findings"]))
    print(f"\n{where}")


def _core(config: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in config.items() if name not in NOT_COMPARED}
