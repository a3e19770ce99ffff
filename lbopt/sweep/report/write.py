"""The report of a study: figures, page, summary and a table for the terminal."""

from __future__ import annotations

import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from lbopt import typed_json
from lbopt.config import SweepConfig
from lbopt.config.search import validate_search
from lbopt.errors import EnvironmentProblem, UserError, require
from lbopt.report import page
from lbopt.sweep.findings.metric import Metric, Row, metric_of
from lbopt.sweep.findings.points import index_rows
from lbopt.sweep.findings.summary import summarize
from lbopt.sweep.report.figures import (
    ablation,
    accuracy,
    diffusion,
    layers,
    noise,
    precision,
    probes,
    search,
    target,
    training,
    warmup,
)
from lbopt.sweep.report.figures.style import Study
from lbopt.sweep.report.protocol import protocol
from lbopt.sweep.report.setup import arms_table, definitions
from lbopt.sweep.report.tables import results_table, terminal_table, trials_csv, trials_table
from lbopt.sweep.results import read_results
from lbopt.train import workdir as workdirs

__all__ = ["FIGURE", "TRIALS", "terminal_table", "write_sweep_report"]

FIGURE, TRIALS = accuracy.FIGURE, "trials.csv"


def write_sweep_report(
    workdir: pathlib.Path, saved: Mapping[str, Any]
) -> tuple[pathlib.Path, dict[str, Any]]:
    """Write summary.json, trials.csv, the figures and report.html; return the page and the summary.

    Args:
      workdir: the study's folder.
      saved: its `config.json`.

    Returns:
      The path of report.html, and what `summarize` returns with `command` and `versions`.

    Raises:
      UserError: naming `--workdir`, if no trial is finished yet, or one is of another study.
      EnvironmentProblem: if `results.jsonl` is damaged, a file cannot be written, or matplotlib or jinja2 is not installed.
    """
    rows = read_results(workdir, saved["config"]["name"])
    if not rows:
        raise UserError(
            f"--workdir = {str(workdir)!r}: no trial is finished yet; run lbopt sweep first"
        )
    _check_saved(saved["config"])
    config, metric = saved["config"], metric_of(rows)
    summary = {
        **summarize(config, rows),
        "command": saved.get("command", ""),
        "versions": saved["versions"],
    }
    workdirs.write_json(workdir / "summary.json", summary)
    workdirs.write_text(workdir / TRIALS, trials_csv(rows))
    sections = [
        *_measured_sections(_study(workdir, config, summary, rows, metric), summary),
        _protocol(config, summary, metric),
        _all_trials(rows, metric),
        page.Section(
            "How it was made", code=page.environment_text(saved, saved.get("command", ""))
        ),
    ]
    file = workdir / "report.html"
    lead = f"How far does the batch size go? {summary['num_trials']} trials{'' if summary['complete'] else ' so far'}."
    page.write_page(file, config["name"], lead, sections)
    return file, summary


def _check_saved(config: Mapping[str, Any]) -> None:
    """Refuse a config.json that somebody edited: what no study begins with has no report."""
    study = typed_json.convert(config, SweepConfig)
    names, sizes = [arm.name for arm in study.arms], list(study.global_batch_sizes)
    try:
        require(
            names and len(set(names)) == len(names),
            "config.arms",
            names,
            "one arm or more, each of its own name",
        )
        ascending = sizes and sizes[0] > 0 and sizes == sorted(set(sizes))
        require(ascending, "config.global_batch_sizes", sizes, "one size or more, ascending")
        epochs, fix = study.train.num_epochs, "give a number of epochs, or None"
        require(epochs is None or 1e-9 < epochs < 1e9, "config.train.num_epochs", epochs, fix)
        for search in (study.search, *(arm.search for arm in study.arms if arm.search)):
            validate_search(search, "config.search")
    except UserError as error:
        raise EnvironmentProblem(
            f"--workdir: config.json is not that of a study ({error}); restore it"
        ) from error


def _study(
    workdir: pathlib.Path,
    config: Mapping[str, Any],
    summary: Mapping[str, Any],
    rows: Sequence[Row],
    metric: Metric,
) -> Study:
    arms = [arm for arm in summary["arms"] if arm["points"]]
    return Study(config, arms, index_rows(rows), metric, summary["waterfall"], workdir)


def _measured_sections(study: Study, summary: Mapping[str, Any]) -> list[page.Section]:
    """Return what is shown of the cells that were tested; of an unfinished study that may be none."""
    claims = [claim["sentence"] for claim in summary["claims"]]
    findings = page.Section(
        "What was found", items=[text for text in summary["findings"] if text not in claims]
    )
    if not study.arms:
        return [findings]
    header, rows = results_table(study.arms, study.metric, study.cells)
    found = [
        accuracy.section(study),
        findings,
        page.Section("Claims held against these numbers", items=claims) if claims else None,
        precision.section(study),
        accuracy.limits(study),
        training.section(study),
        ablation.section(study),
        target.section(study),
        noise.section(study),
        diffusion.section(study),
        probes.lipschitz(study),
        layers.trust_ratios(study),
        layers.phis(study),
        search.section(study),
        warmup.section(study),
        page.Section("Results", [_UNITS], header=header, rows=rows),
    ]
    return [section for section in found if section is not None]


_UNITS = (
    "Means over the final seeds; std, min and max are of what stands before them. x scaled, x warmup and x decay are multiples of what the arm's rules "
    "give; (edge): at an end of what was searched; (cut): a warmup that would outlast the run. Noise scale and critical batch are in examples, all steps are optimizer steps."
)


def _protocol(
    config: Mapping[str, Any], summary: Mapping[str, Any], metric: Metric
) -> page.Section:
    """Return how the study was done: in words, field by field, and arm by arm."""
    header, rows = arms_table(config)
    paragraphs = [*protocol(config, metric), _DEFAULTS]
    common = definitions(config, summary["arms"])
    return page.Section("Protocol", paragraphs, header=header, rows=rows, definitions=common)


_DEFAULTS = "Fields that are not named here are at their defaults in the version of lbopt named below; config.json beside this page has all of them."


def _all_trials(rows: Sequence[Row], metric: Metric) -> page.Section:
    header, cells = trials_table(rows, metric)
    text = f"{TRIALS} beside this page has them with every number; results.jsonl has their curves and probes too."
    return page.Section(
        "All trials", [text], header=header, rows=cells, folded=f"Show all {len(cells)} trials"
    )
