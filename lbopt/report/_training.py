"""The report of a training run."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from lbopt._shown import shell_line
from lbopt.errors import UserError
from lbopt.report import _colours, _page
from lbopt.report._branches import critical_section
from lbopt.report._curves import draw, points_of
from lbopt.report._run_words import batch_words, csv_of, scores, settings, spent
from lbopt.workdir import PROFILE_FOLDER, broken_losses, checkpoint_root, read_json_lines

_MOST_LETTERS = 4_000_000
"""Size of metrics.csv, in letters, up to which the page contains it."""


class _Drawn(NamedTuple):
    """A figure of a run: its file, its title, its curves' names without the split, and its axis."""

    stem: str
    title: str
    measures: tuple[str, ...]
    axis: str
    log: bool = False


_LOSS = _Drawn("loss", "Loss", ("loss",), "loss", log=True)
_OF_A_TASK = (
    _Drawn("accuracy", "Accuracy", ("accuracy",), "accuracy"),
    _Drawn("answers", "Answers", ("exact_match", "f1"), "answers, %"),
    _Drawn("perplexity", "Perplexity", ("perplexity",), "perplexity", log=True),
    _Drawn("masked_lm_loss", "Loss of masked tokens", ("masked_lm_loss",), "loss"),
    _Drawn("top_5_accuracy", "Top-5 accuracy", ("top_5_accuracy",), "top-5 accuracy"),
)
_IF_LOGGED = (
    _Drawn("trust_ratio", "Trust ratio of each layer", ("trust_ratio",), "trust ratio"),
    _Drawn(
        "update_over_weight",
        "Update over weight, norms of each layer",
        ("update_over_weight/",),
        "norm of the update / norm of the weight",
    ),
    _Drawn(
        "gradient_norm", "Global gradient norm before the clip", ("gradient_norm",), "gradient norm"
    ),
    _Drawn("noise_scale", "Gradient noise scale", ("noise_scale",), "noise scale, examples"),
)


def write_training_report(workdir: pathlib.Path, saved: dict[str, Any]) -> pathlib.Path:
    """Draw the metrics of a run and write its page.

    Args:
      workdir: The run's folder.
      saved: The run's `config.json`.

    Returns:
      The page's file.

    Raises:
      UserError: If the run has no metrics yet.
    """
    lines = read_json_lines(workdir / "metrics.jsonl")
    if not lines:
        fix = "it has no metrics yet; run lbopt train first"
        raise UserError("workdir", str(workdir), fix, code="missing")

    config = saved["config"]
    optimizer = config["optimizer"]
    files = _files(lines, saved)
    look = _colours.optimizer_look(optimizer["name"], bool(optimizer.get("nesterov")))
    top, measured = _measured(workdir, lines, look)
    sections = [
        _time(workdir, lines, saved, look),
        *critical_section(workdir, lines),
        _page.Section("Settings", definitions=settings(config)),
        *measured,
        *_profile(workdir),
        _how(saved, "metrics.csv" in [file.name for file in files]),
    ]

    file = workdir / "report.html"
    _page.write_page(file, config["name"], _lead(lines, config), sections, top, files)
    return file


def _files(lines: Sequence[Mapping[str, Any]], saved: Mapping[str, Any]) -> list[_page.DataFile]:
    """Return the run's metrics, if they are not too long for a page, and its config."""
    text = csv_of(lines)
    files = [("metrics.csv", text)] if len(text) <= _MOST_LETTERS else []
    files.append(("config.json", json.dumps(saved, indent=1, ensure_ascii=True)))
    return [_page.DataFile.of(name, text) for name, text in files]


def _measured(
    workdir: pathlib.Path, lines: list[dict[str, Any]], look: _colours.Look
) -> tuple[_page.Section, list[_page.Section]]:
    """Return the top, with the task's first metric or else the loss, and the other sections."""
    names = sorted({name for line in lines for name in line})
    found = [
        (one, kept)
        for one in (_LOSS, *_OF_A_TASK)
        if (kept := [f"{split}/{name}" for name in one.measures for split in ("train", "eval")])
        and any(points_of(lines, name) for name in kept)
    ]
    pictures = [
        (one.title, _picture(workdir, one, lines, [name for name in kept if name in names], look))
        for one, kept in found
    ]
    shown = min(1, len(pictures) - 1)
    header, rows = scores(lines)
    top = _page.Section(
        "Scores",
        header=header,
        rows=rows,
        note="Training scores are those of the logged steps; the best is by the evaluation.",
        pictures=[picture for _, picture in pictures[shown : shown + 1]],
    )

    folded = pictures[:shown] + pictures[shown + 1 :]
    sections = [_page.Section(title, pictures=[picture]) for title, picture in folded]
    rate = _Drawn("learning_rate", "Learning rate", ("learning_rate",), "learning rate")
    for one in (rate, *_IF_LOGGED):
        kept = [name for name in names if name.startswith(f"train/{one.measures[0]}")]
        if kept:
            log = one._replace(log=one is not rate)
            drawn = _picture(workdir, log, lines, kept, look)
            sections.append(_page.Section(one.title, pictures=[drawn]))
    return top, sections


def _picture(
    workdir: pathlib.Path,
    one: _Drawn,
    lines: list[dict[str, Any]],
    names: list[str],
    look: _colours.Look,
) -> _page.Picture:
    svg, wide = draw(workdir, one.stem, lines, names, one.axis, look, one.log)
    return _page.Picture(svg, f"{one.title} over the optimizer steps", wide=wide)


def _time(
    workdir: pathlib.Path,
    lines: list[dict[str, Any]],
    saved: Mapping[str, Any],
    look: _colours.Look,
) -> _page.Section:
    """Return the time that the run took, and its throughput."""
    name = "perf/examples_per_s"
    pictures = []
    if points_of(lines, name):
        one = _Drawn("throughput", "Throughput", (name,), "examples per second")
        pictures.append(_picture(workdir, one, lines, [name], look))
    return _page.Section("Time and throughput", definitions=spent(lines, saved), pictures=pictures)


def _profile(workdir: pathlib.Path) -> list[_page.Section]:
    """Return the section that links the trace of `lbopt train --profile`; none without a trace."""
    root = checkpoint_root(workdir)
    files = sorted((root / PROFILE_FOLDER).glob("plugins/profile/*/*"))
    if not files:
        return []
    about = (
        "xprof shows the trace in a browser, by the commands below. https://ui.perfetto.dev opens "
        "the file that ends in .trace.json.gz."
    )
    links = [(file.name, str(file.relative_to(root))) for file in files]
    how = f"pip install xprof\n{shell_line(['xprof', f'--logdir={root / PROFILE_FOLDER}'])}"
    return [_page.Section("Profile of some steps", [about], links=links, code=how)]


def _how(saved: dict[str, Any], contained: bool) -> _page.Section:
    """Return the command and versions, and where the metrics are if the page lacks them."""
    text = _page.environment_text(saved, saved.get("command", ""))
    about = [] if contained else ["The metrics are too long for this page; see metrics.jsonl."]
    return _page.Section("How it was made", about, code=text)


def _lead(lines: list[dict[str, Any]], config: dict[str, Any]) -> str:
    """Return the page's first paragraph: what was trained on what, and what came out."""
    last = lines[-1]
    lead = (
        f"The model {config['model']['name']} was trained on {config['data']['name']} with "
        f"{config['optimizer']['name']} at global batch {batch_words(config, ' then ')}"
    )
    step = last["step"]
    length = f"{step:,} step{'s' * (step != 1)} ({last['examples_seen']:,} examples)"
    told = _came_out(lines)
    lead += f". After {length} {told}." if told else f" for {length}."

    reached = next((line for line in lines if line.get("target/seconds") is not None), None)
    if reached and config.get("target_value") is not None:
        lead += (
            f" The target, {config['target_metric']} {config['target_value']:g}, was reached "
            f"after {reached['target/steps']} steps and {reached['target/seconds']:.0f} s."
        )
    return lead + _of_broken_losses(lines)


def _came_out(lines: list[dict[str, Any]]) -> str:
    """Return the last scores of the evaluation, or of training without one, as a clause."""
    _, rows = scores(lines)
    for column, where in ((2, "the last evaluation has"), (1, "training ended with")):
        told = [
            f"{row[0].replace(', %', '')} {row[column]}{' %' * row[0].endswith('%')}"
            for row in rows
            if row[column]
        ]
        if told:
            return f"{where} {' and '.join(told[:1] + told[1:][-1:])}"
    return ""


def _of_broken_losses(lines: list[dict[str, Any]]) -> str:
    """Return a sentence about losses that were not finite, "" if all were finite."""
    broken = [line["step"] for line in lines if broken_losses(line)]
    if not broken:
        return ""
    return (
        f" The loss was not finite in {len(broken)} of {len(lines)} logged steps, "
        f"first at step {broken[0]}: figures leave those steps out."
    )
