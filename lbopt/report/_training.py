"""The report of a training run."""

from __future__ import annotations

import pathlib
from typing import Any

from lbopt._shown import shell_line
from lbopt.errors import UserError
from lbopt.report import _page
from lbopt.workdir import PROFILE_FOLDER, broken_losses, checkpoint_root, read_json_lines

_FEW = 20
"""Largest number of points of a curve that are drawn with markers."""
_MANY = 4
"""Largest number of names in a legend inside the axes."""
_MOST_NAMED = 20
"""Largest number of curves that a legend names."""
_OF_A_TASK = {
    "answers": ("Answers, percent", ("eval/exact_match", "eval/f1")),
    "perplexity": ("Perplexity", ("train/perplexity", "eval/perplexity")),
    "masked_lm_loss": ("Loss of masked tokens", ("train/masked_lm_loss", "eval/masked_lm_loss")),
    "top_5_accuracy": ("Top-5 accuracy", ("train/top_5_accuracy", "eval/top_5_accuracy")),
}
_IF_LOGGED = {
    "trust_ratio": ("Trust ratio of each layer", "trust_ratio"),
    "update_over_weight": ("Update over weight, norms of each layer", "update_over_weight/"),
    "gradient_norm": ("Global gradient norm before the clip", "gradient_norm"),
    "noise_scale": ("Gradient noise scale, examples", "noise_scale"),
}


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

    sections = [*_drawn(workdir, lines), *_profile(workdir), _how(saved)]
    file = workdir / "report.html"
    _page.write_page(file, saved["config"]["name"], _lead(lines, saved["config"]), sections)
    return file


def _drawn(workdir: pathlib.Path, lines: list[dict[str, Any]]) -> list[_page.Section]:
    """Return a section for each figure that the metrics allow."""
    names = sorted({name for line in lines for name in line})
    sections = [
        _page.Section(
            "Loss", png=_draw(workdir, "loss", lines, ["train/loss", "eval/loss"], log=True)
        ),
        _page.Section(
            "Accuracy", png=_draw(workdir, "accuracy", lines, ["train/accuracy", "eval/accuracy"])
        ),
        _page.Section(
            "Learning rate", png=_draw(workdir, "learning_rate", lines, ["train/learning_rate"])
        ),
    ]

    for stem, (title, measures) in _OF_A_TASK.items():
        found = [name for name in measures if name in names]
        if found:
            sections.append(_page.Section(title, png=_draw(workdir, stem, lines, found)))
    for stem, (title, prefix) in _IF_LOGGED.items():
        found = [name for name in names if name.startswith(f"train/{prefix}")]
        if found:
            sections.append(_page.Section(title, png=_draw(workdir, stem, lines, found, log=True)))
    return sections


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


def _how(saved: dict[str, Any]) -> _page.Section:
    text = _page.environment_text(saved, saved.get("command", ""))
    return _page.Section("How it was made", code=text)


def _lead(lines: list[dict[str, Any]], config: dict[str, Any]) -> str:
    """Return the page's first paragraph: progress, batch size, optimizer, target, broken losses."""
    last = lines[-1]
    phases = [config, config["phase2"]] if config.get("phase2") else [config]
    batches = " then ".join(str(phase["global_batch_size"]) for phase in phases)
    lead = (
        f"Step {last['step']}, {last['examples_seen']:,} examples seen, global batch {batches}, "
        f"optimizer {config['optimizer']['name']}."
    )

    reached = next((line for line in lines if line.get("target/seconds") is not None), None)
    if reached and config.get("target_value") is not None:
        lead += (
            f" The target, {config['target_metric']} {config['target_value']:g}, was reached "
            f"after {reached['target/steps']} steps and {reached['target/seconds']:.0f} s."
        )
    return lead + _of_broken_losses(lines)


def _of_broken_losses(lines: list[dict[str, Any]]) -> str:
    """Return a sentence about losses that were not finite, "" if all were finite."""
    broken = [line["step"] for line in lines if broken_losses(line)]
    if not broken:
        return ""
    return (
        f" The loss was not finite in {len(broken)} of {len(lines)} logged steps, "
        f"first at step {broken[0]}: figures leave those steps out."
    )


def _draw(
    workdir: pathlib.Path,
    stem: str,
    lines: list[dict[str, Any]],
    names: list[str],
    log: bool = False,
) -> str:
    """Draw metrics against steps in STEM.png; return the PNG in base64."""
    curves = {}
    for name in names:
        points = [(line["step"], line[name]) for line in lines if line.get(name) is not None]
        if points:
            curves[name] = points
    named = _named(curves)
    unnamed = [name for name in curves if name not in named]

    # Named curves are drawn last, above the others. A curve of one point needs a marker to be seen.
    figure, axes = _page.new_figure(8, 3.6)
    for name in [*unnamed, *named]:
        marker = "o" if len(curves[name]) <= _FEW else None
        look = {"label": _page.plain_label(name)} if name in named else {"color": "#cccccc"}
        axes.plot(
            *zip(*curves[name], strict=True), linewidth=1.5, marker=marker, markersize=4, **look
        )

    if unnamed:
        axes.set_title(
            f"{len(curves)} layers; named: the highest and the lowest at the end",
            fontsize=8,
            loc="left",
        )
    if log:
        axes.set_yscale("log")
    axes.set_xlabel("optimizer step")

    # A long legend would cover the curves: it stands beside them. A run of NaN losses has no curve.
    if len(named) > _MANY:
        axes.legend(frameon=False, fontsize=6, loc="center left", bbox_to_anchor=(1.0, 0.5))
    elif axes.lines:
        axes.legend(frameon=False, fontsize=8)
    return _page.save_figure(figure, workdir / f"{stem}.png")


def _named(curves: dict[str, list[tuple[int, float]]]) -> list[str]:
    """Return the curves that the legend names.

    Those are all curves or, if there are too many, the highest and the lowest at the last step.
    """
    if len(curves) <= _MOST_NAMED:
        return list(curves)
    ranked = sorted(curves, key=lambda name: curves[name][-1][1])
    return ranked[: -_MOST_NAMED // 2 - 1 : -1] + ranked[: _MOST_NAMED // 2][::-1]
