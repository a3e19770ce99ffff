"""Write the report of a study: figures, page, summary and CSV."""

from __future__ import annotations

import dataclasses
import json
import pathlib
from collections.abc import Mapping
from typing import Any

from lbopt import _typed_json
from lbopt.config import SweepConfig
from lbopt.errors import EnvironmentProblem, UserError
from lbopt.report import _page
from lbopt.report._branches import branched_for
from lbopt.report.study import (
    _critical_measures,
    _figure_diffusion,
    _figure_gradient,
    _figure_growth,
    _figure_overview,
    _figure_precision,
    _figure_scores,
    _figure_search,
    _figure_target,
    _figure_waterfall,
    _style,
    _top,
)
from lbopt.report.study._findings import claims_of, findings_of
from lbopt.report.study._how_measured import protocol
from lbopt.report.study._read import read_study
from lbopt.report.study._setup import arms_table, definitions
from lbopt.report.study._study import Study
from lbopt.report.study._summary import summary_of
from lbopt.report.study._tables import results_table, terminal_table, trials_csv, trials_table
from lbopt.report.study._words import Claim
from lbopt.sweep import read_examples, read_results
from lbopt.workdir import machine_text, write_json, write_text

TRIALS = "trials.csv"
_FIELDS = ("global_batch_sizes", "search", "final_seeds", "limit_points", "train")
_ARM_FIELDS = ("name", "optimizer", "schedule")
_UNITS = (
    "Means over the final seeds; std, min and max belong to the column on their left. x scaled, x "
    "warmup and x decay are multiples of the values that the arm's rules give; (edge): at an end "
    "of the searched range; (cut): a warmup that would outlast the run. Noise scale and critical "
    "batch are in examples, all steps are optimizer steps."
)
_NAMES = "LEGW is linear-epoch gradual warmup: the same number of warmup steps at every batch size."
_DEFAULTS = (
    "Fields that are not named here are at their defaults in the version of lbopt named below; "
    "config.json beside this page has all of them."
)


@dataclasses.dataclass(frozen=True, slots=True)
class StudyReport:
    """A written report.

    Attributes:
      file: Path of report.html.
      study: The study that it shows.
      table: Test scores and limits, for the terminal.
      findings: Findings, a sentence each.
    """

    file: pathlib.Path
    study: Study
    table: str
    findings: list[str]


def write_study_report(
    workdir: pathlib.Path, saved: Mapping[str, Any], target: Study | None = None
) -> StudyReport:
    """Write summary.json, trials.csv, the figures and report.html.

    Args:
      workdir: The study's folder.
      saved: JSON data of the study's `config.json`.
      target: A study with a target, whose steps are drawn beneath the scores of this one.

    Raises:
      UserError: Naming `workdir`, if no trial is finished yet, or one is of another study; or
        naming `--target_study`, if `target` does not fit.
      EnvironmentProblem: If a file of the study is damaged or cannot be written, or matplotlib or
        jinja2 is not installed.
    """
    records = read_results(workdir, saved["config"]["name"])
    if not records:
        fix = "no trial is finished yet; run lbopt sweep first"
        raise UserError("workdir", str(workdir), fix, code="missing")
    _check_saved(saved["config"])

    study = read_study(saved["config"], records, read_examples(workdir))
    if target is not None:
        _figure_overview.check_target(study, target)
    study = dataclasses.replace(study, branched=branched_for(workdir))
    claims = claims_of(study)
    findings = findings_of(study, claims)
    command = saved.get("command", "")

    # The numbers first: drawing fails if matplotlib is missing.
    made = {"command": command, "versions": saved["versions"], "machine": machine_text(saved)}
    summary = summary_of(study, claims, findings) | made
    csv = trials_csv(records)
    write_json(workdir / "summary.json", summary)
    write_text(workdir / TRIALS, csv)

    top, measured = _measured_sections(study, workdir, claims, findings)
    if target is not None and top is not None:
        picture = _figure_overview.overview(study, target, workdir)
        top = top._replace(pictures=(picture, *top.pictures))
    sections = [
        *measured,
        _protocol(study),
        _all_trials(study),
        _page.Section("How it was made", code=_page.environment_text(saved, command)),
    ]
    files = [
        _page.DataFile.of("summary.json", json.dumps(summary, indent=1, allow_nan=False)),
        _page.DataFile.of(TRIALS, csv),
    ]
    file = workdir / "report.html"
    _page.write_page(file, study.config.name, _top.lead(study), sections, top, files)
    return StudyReport(file, study, terminal_table(study), findings)


def _check_saved(config: Mapping[str, Any]) -> None:
    """Refuse a config.json that was edited so that no study can have written it.

    Raises:
      KeyError: If a field is missing.
      EnvironmentProblem: If a field has an impossible value.
    """
    # Every version wrote these fields, so a missing one was removed: its default may not have run.
    for owner, fields in ((config, _FIELDS), *((arm, _ARM_FIELDS) for arm in config["arms"])):
        for field in fields:
            owner[field]

    study = _typed_json.convert(config, SweepConfig)
    try:
        study.check_cells()
    except UserError as error:
        fix = f"config.json is not that of a study ({error}); restore it"
        raise EnvironmentProblem("workdir", reason=fix, code="damaged") from error


def _measured_sections(
    study: Study, workdir: pathlib.Path, claims: list[Claim], findings: list[str]
) -> tuple[_page.Section | None, list[_page.Section]]:
    """Return the top and the sections of the tested cells; an unfinished study may have none."""
    # The findings repeat the claims, which have a section of their own on the page.
    sentences = [claim.sentence for claim in claims]
    others = [text for text in findings if text not in sentences]
    found = _page.Section("What was found", items=others, shown=True)
    if not study.measured:
        return None, [found]

    header, lines = results_table(study)
    # The first of them is the study's own question, whose figure goes to the top.
    asked = [
        _figure_precision.precision(study, workdir),
        _figure_waterfall.waterfall(study, workdir),
        None if study.has_limits else _figure_target.target(study, workdir),
        _figure_scores.scores(study, workdir),
        _figure_target.target(study, workdir) if study.has_limits else None,
    ]
    first, *rest = [section for section in asked if section is not None]
    top = _top.table(study)._replace(pictures=first.pictures)
    first = first._replace(pictures=())

    sections = [
        found,
        _page.Section("Claims of papers", [_NAMES], items=sentences) if claims else None,
        first if first.paragraphs or first.rows else None,
        *rest,
        _critical_measures.critical(study),
        _figure_growth.growth(study, workdir),
        _figure_scores.limits(study, workdir),
        _figure_scores.training(study, workdir),
        _figure_gradient.noise(study, workdir),
        _figure_diffusion.diffusion(study, workdir),
        _figure_gradient.lipschitz(study, workdir),
        _figure_gradient.trust_ratios(study, workdir),
        _figure_gradient.phis(study, workdir),
        _figure_search.learning_rates(study, workdir),
        _figure_search.warmups(study, workdir),
        _page.Section("Results", [_UNITS], header, lines, colours=_style.colours(study.measured)),
    ]
    return top, [section for section in sections if section is not None]


def _protocol(study: Study) -> _page.Section:
    """Return the protocol of the study in words, its fields, and its arms."""
    header, lines = arms_table(study.config)
    paragraphs = [*protocol(study), _DEFAULTS]
    terms = definitions(study)
    return _page.Section(
        "Protocol",
        paragraphs,
        header=header,
        rows=lines,
        definitions=terms,
        colours=_style.colours(study.arms),
    )


def _all_trials(study: Study) -> _page.Section:
    header, lines = trials_table(study)
    text = f"{TRIALS} has them with every number; results.jsonl has their curves and probes too."
    return _page.Section(f"All {len(lines)} trials", [text], header, lines)
