"""Figures of a study: every arm is named, means are over all seeds, and labels are readable."""

import dataclasses
import json
import math

import pytest
import synthetic
from synthetic import Truth, legw

from lbopt.cli import main
from lbopt.errors import UserError
from lbopt.report import _page
from lbopt.report.study import _style, read_study, write_study_report
from lbopt.report.study._figure_overview import check_target
from lbopt.report.study._read import mean_curve
from lbopt.sweep import _fits

FLAT = (0.98, 0.98, 0.98)


def figures_of(monkeypatch, workdir, config, rows, target=None):
    """Write a report; return its figures by name."""
    figures = {}
    monkeypatch.setattr(
        _page, "save_figure", lambda figure, file: figures.update({file.stem: figure}) or "QQ=="
    )
    write_study_report(workdir, synthetic.save_study(workdir, config, rows), target)
    return figures


def mixed(**search):
    """Return a study whose arm b has a random search and whose arm a has a grid."""
    config, rows = synthetic.make_study({"a": Truth(FLAT)}, warmup_factors=[0.5, 1.0, 2.0])
    other, more = synthetic.make_study({"b": Truth(FLAT)}, **search)
    config["arms"] += [{**other["arms"][0], "search": other["search"]}]
    return config, rows + more


def tick_names(panel, axis):
    panel.figure.canvas.draw()
    return [label.get_text() for label in getattr(panel, f"get_{axis}ticklabels")()]


def test_every_arm_is_drawn_by_its_own_search(tmp_path, monkeypatch):
    figures = figures_of(monkeypatch, tmp_path, *mixed(method="halton", warmup_range=[0.5, 2.0]))
    grid = figures["learning_rate_and_warmup"].axes
    assert [len(panel.images) for panel in grid[:6]] == [1, 1, 1, 0, 0, 0]
    assert tick_names(grid[0], "y") == ["0.5", "1", "2"]
    lines = [panel.lines[0].get_linewidth() for panel in figures["learning_rate_search"].axes[:2]]
    assert lines == [1, 0]


def test_grids_that_differ_keep_their_own_names(tmp_path, monkeypatch):
    search = {"warmup_factors": [0.0, 0.25, 1.0, 4.0], "learning_rate_factors": [0.25, 1.0, 4.0]}
    grid = figures_of(monkeypatch, tmp_path, *mixed(**search))["learning_rate_and_warmup"].axes
    assert tick_names(grid[0], "y") == ["0.5", "1", "2"]
    assert tick_names(grid[3], "y") == ["0", "0.25", "1", "4"]
    assert tick_names(grid[3], "x") == ["0.25", "1", "4"]


def test_an_arm_without_a_searched_rate_has_no_empty_panel(tmp_path, monkeypatch):
    config, rows = mixed(learning_rate_factors=[1.0])
    figures = figures_of(monkeypatch, tmp_path, config, rows)
    assert [panel.get_title("left") for panel in figures["learning_rate_search"].axes] == ["a"]
    text = (tmp_path / "report.html").read_text()
    assert "Not drawn: 1 arm of which only one learning rate was tried." in text


def test_a_cell_without_results_has_no_empty_panel(tmp_path, monkeypatch):
    config, rows = synthetic.make_study(
        {"a": Truth(FLAT), "b": Truth(FLAT)}, warmup_factors=[0.5, 1.0, 2.0]
    )
    rows = [row for row in rows if (row["arm"], row["global_batch_size"]) != ("b", 256)]
    panels = figures_of(monkeypatch, tmp_path, config, rows)["learning_rate_and_warmup"].axes[:6]
    assert [panel.get_visible() for panel in panels] == [True] * 5 + [False]
    assert [bool(panel.get_xlabel()) for panel in panels] == [False, False, True, True, True, False]


def test_no_line_goes_through_where_the_target_was_not_reached(tmp_path, monkeypatch):
    config, rows = synthetic.make_study(
        {"a": Truth(FLAT, steps_to_target=(200.0, None, 50.0))}, stops=True
    )
    figures = figures_of(monkeypatch, tmp_path, config, rows)
    for panel, ends in zip(
        figures["steps_to_target"].axes, [(200, 50), (3200, 12800)], strict=True
    ):
        first, missed, last = panel.lines[0].get_ydata()
        assert (first, last) == ends
        assert math.isnan(missed)
    assert (
        figures["accuracy_vs_batch_size"].axes[0].get_title("left")
        == "planted: at most 8 epochs at every batch size"
    )


def test_the_waterfall_stays_between_none_and_all_right(tmp_path, monkeypatch):
    truths = {"a": Truth((0.9, 0.9, 0.05), spread=0.1), "b": Truth((0.9, 0.9, 0.99), spread=0.1)}
    config, rows = synthetic.make_study(truths, waterfall=tuple(truths))
    low, high = figures_of(monkeypatch, tmp_path, config, rows)["waterfall"].axes[0].get_xlim()
    assert (low, high) == (0.0, 100.5)


def test_no_warmup_is_seen_on_a_logarithmic_axis(tmp_path, monkeypatch):
    config, rows = synthetic.make_study(
        {"a": Truth(FLAT)}, method="halton", warmup_range=[0.5, 2.0]
    )
    rows = [
        {**row, "warmup_factor": 0.0, "warmup_steps": 0.0} if row["warmup_factor"] == 1 else row
        for row in rows
    ]
    panel = figures_of(monkeypatch, tmp_path, config, rows)["learning_rate_and_warmup"].axes[0]
    dots = panel.collections[-1].get_offsets()
    assert len(dots) == 17
    assert min(dots[:, 1]) > panel.get_ylim()[0] > 0
    assert tick_names(panel, "y")[0] == "0"
    assert panel.get_yticks()[0] == pytest.approx(min(dots[:, 1]))


# ---- names


EVERYTHING = {
    "growth": 0.5,
    "noise_scale": (90.0, 100.0, 200.0),
    "peak_step": lambda size: 4,
    "layers": ("_a", "$b$"),
}


def everything(*names):
    """Return a study in which every figure is drawn."""
    times = {"steps_to_target": (150.0, 50.0, 20.0)}
    truths = {name: legw((0.98, 0.98, 0.6), **times, **EVERYTHING) for name in names}
    config, rows = synthetic.make_study(truths, waterfall=names, warmup_factors=[0.5, 1.0, 2.0])
    return config | {"name": "study of $x^$ and $y"}, rows


@pytest.mark.slow
def test_mathematics_in_a_name_does_not_stop_the_report(tmp_path):
    config, rows = everything("rate $x^$", "costs $2 $3", "_base")
    written = write_study_report(tmp_path, synthetic.save_study(tmp_path, config, rows))
    assert "rate $x^$" in written.file.read_text()


def texts_of(figure):
    """Return all visible texts of a figure."""
    import matplotlib.text

    figure.draw_without_rendering()
    found = [text for text in figure.findobj(matplotlib.text.Text) if text.get_text()]
    return [text._preprocess_math(text.get_text()) for text in found]


@pytest.mark.slow
def test_every_name_is_seen_letter_by_letter_in_every_figure(tmp_path, monkeypatch):
    names = ("_rate $x^$", "costs $2 $3")
    figures = figures_of(monkeypatch, tmp_path, *everything(*names))
    assert len(figures) == 14
    for stem, figure in figures.items():
        texts = texts_of(figure)
        assert not any(mathematics for _, mathematics in texts), stem
        for name in names:
            assert any(name in text for text, _ in texts), (stem, name)


def test_a_legend_has_as_many_columns_as_fit(tmp_path, monkeypatch):
    names = ("an optimizer with a very long name + LEGW + polynomial decay", "b")
    figures = figures_of(
        monkeypatch, tmp_path, *synthetic.make_study({name: Truth(FLAT) for name in names})
    )
    figure = figures["accuracy_vs_batch_size"]
    figure.draw_without_rendering()
    (legend,) = figure.legends
    assert legend._ncols == 1
    box = legend.get_window_extent()
    assert 0 <= box.x0 < box.x1 <= figure.bbox.width


# ---- means


def test_a_mean_is_of_all_seeds_or_not_drawn():
    series = [
        ([1, 2, 4], [1.0, 2.0, None]),
        ([1, 2, 4, 8], [3.0, 4.0, 9.0, 10.0]),
        ([1, 2, 4, 8], None),
    ]
    assert mean_curve(series) == ((1, 2.0), (2, 3.0))
    assert mean_curve([]) == ()


def stopping(rows):
    """Return records of seeds that end at different steps, with curves and probes up to there."""
    found = []
    for place, row in enumerate(rows):
        if row["phase"] == "final":
            end = row["steps"] - 7 * (place % 5)
            steps = [step for step in _fits.log_spaced_steps(row["steps"], 64) if step < end] + [
                end
            ]
            # Seeds differ, so a mean over a changing set of seeds would jump.
            distance = [(1 + place % 5) * step**0.5 for step in steps]
            row = {**row, "steps_run": end, "curve": {"step": steps, "distance": distance}}
        found.append(row)
    return found


def test_the_mean_distance_does_not_jump_where_seeds_end(tmp_path, monkeypatch):
    config, rows = synthetic.make_study({"a": Truth(FLAT, growth=0.5)})
    figures = figures_of(monkeypatch, tmp_path, config, stopping(rows))
    line = figures["diffusion"].axes[1].lines[0]
    steps, heights = line.get_data()
    assert len(steps) > 20
    assert steps[-1] < 512
    assert heights == pytest.approx([3 * step**0.5 for step in steps])


# ---- two studies in one figure


def pair():
    """Return a study of limits, its config and records, and a study with a target."""
    truths = {"a": legw((0.98, 0.98, 0.9)), "b": Truth((0.98, 0.975, 0.9))}
    config, rows = synthetic.make_study(truths)
    reached = {
        "a": Truth(FLAT, steps_to_target=(200.0, 100.0, 50.0)),
        "b": Truth(FLAT, steps_to_target=(200.0, 150.0, None)),
    }
    return config, rows, read_study(*synthetic.make_study(reached, stops=True))


def test_steps_to_a_target_stand_beneath_the_limits(tmp_path, monkeypatch):
    config, rows, target = pair()
    figures = figures_of(monkeypatch, tmp_path, config, rows, target)
    scores, limits, steps = figures["limits_and_steps"].axes
    study = read_study(config, rows)

    (first,) = (line for line in scores.lines if line.get_label().startswith("a (limit"))
    means = [cell.test.mean for cell in study.arms[0].cells]
    assert first.get_ydata() == pytest.approx([100 * (1 - mean) for mean in means])
    assert tick_names(limits, "y") == ["b", "a"]  # the larger limit is above
    assert limits.lines[1].get_xydata()[0] == pytest.approx(
        [study.arms[1].limit.global_batch_size, 0]
    )
    assert steps.lines[0].get_ydata().tolist() == [200, 100, 50]
    assert {axes.get_xlim() for axes in (scores, limits, steps)} == {scores.get_xlim()}
    assert "limits_and_steps" not in figures_of(monkeypatch, tmp_path, config, rows)

    # An arm looks the same in both, also where one of them leaves out other arms of its optimizer.
    momentum = {name: Truth((0.98, 0.975, 0.9)) for name in ("other", "b", "a")}
    others = synthetic.make_study({**momentum, "LAMB": legw(FLAT)})
    axes = figures_of(monkeypatch, tmp_path, *others, target)["limits_and_steps"].axes
    above = {line.get_label().split(" (")[0]: line for line in axes[0].lines}
    for name in ("a", "b"):
        (below,) = (line for line in axes[2].lines if line.get_label() == name)
        assert above[name].get_marker() == below.get_marker()
        assert above[name].get_color() == below.get_color()


def test_an_arm_from_a_lower_start_has_a_hollow_limit(tmp_path, monkeypatch):
    _, _, target = pair()
    truths = {"a": Truth((0.98, 0.975, 0.9)), "b": Truth((0.93, 0.925, 0.85))}
    planted = synthetic.make_study(truths)
    axes = figures_of(monkeypatch, tmp_path, *planted, target)["limits_and_steps"].axes
    names = tick_names(axes[1], "y")
    fills = [line.get_markerfacecolor() for line in axes[1].lines[1::2]]
    assert [name for name, fill in zip(names, fills, strict=True) if fill == "none"] == ["b"]
    titles = [one.get_title(loc="left") for one in axes]
    assert titles[1].endswith("; hollow: worse there")
    assert titles[2].endswith("; hollow: missed")


def test_the_command_draws_both_studies(tmp_path, capsys):
    config, rows, _ = pair()
    sizes = (16, 64, 128)
    truth = Truth(FLAT, steps_to_target=(200.0, 100.0, 50.0))
    target = synthetic.make_study({"a": truth}, sizes=sizes, stops=True)
    for name, study in {"limits": (config, rows), "target": target}.items():
        folder = tmp_path / name
        folder.mkdir()
        saved = synthetic.save_study(folder, *study)
        (folder / "config.json").write_text(json.dumps(saved))
    flags = [f"--workdir={tmp_path / 'limits'}", f"--target_study={tmp_path / 'target'}"]
    assert main(["report", *flags]) == 0
    assert capsys.readouterr().out.endswith("report.html\n")
    assert (tmp_path / "limits" / "limits_and_steps.png").stat().st_size > 10_000
    assert "the steps to a target" in (tmp_path / "limits" / "report.html").read_text()


def test_studies_that_do_not_fit_into_one_figure(tmp_path):
    config, rows, target = pair()
    study = read_study(config, rows)
    started = dataclasses.replace(target, arms=())
    for first, second, reason in (
        (target, target, "it goes beneath limits, and planted has none"),
        (study, study, "that study has no target"),
        (study, started, "no batch size of that study has a final run yet"),
    ):
        with pytest.raises(UserError, match=reason):
            check_target(first, second)


# ---- single figures


def test_open_markers_are_at_the_planned_length(tmp_path, monkeypatch):
    config, rows = synthetic.make_study(
        {"a": Truth(FLAT, steps_to_target=(200.0, 100.0, None), diverges=(256,))}
    )
    steps, _ = figures_of(monkeypatch, tmp_path, config, rows)["steps_to_target"].axes
    missed = steps.lines[1].get_xydata().tolist()
    assert missed == [[256, 32]]


def test_training_lines_are_broken_where_a_seed_diverged(tmp_path, monkeypatch):
    config, rows = synthetic.make_study({"a": Truth(FLAT, diverges=(64,))})
    rows = [{**row, "train_accuracy": 0.09} if row["diverged"] else row for row in rows]
    accuracy, loss = figures_of(monkeypatch, tmp_path, config, rows)["train_and_test"].axes
    for panel, first in ((accuracy, 100.0), (loss, 0.01)):
        heights = panel.lines[0].get_ydata()
        assert heights[[0, 2]] == pytest.approx([first, first])
        assert math.isnan(heights[1])


def test_the_noise_scale_is_drawn_over_the_steps_too(tmp_path, monkeypatch):
    config, rows = synthetic.make_study(
        {"a": Truth(FLAT, noise_scale=(90.0, 100.0, 200.0)), "b": Truth(FLAT)}
    )
    for row in rows:
        if row.get("probes"):
            steps = row["probes"]["step"]
            norms = [1 / step for step in steps[:-1]] + [-1.0]
            row["probes"] |= {"noise_trace": [6.0] * len(steps), "gradient_square_norm": norms}
    figure = figures_of(monkeypatch, tmp_path, config, rows)["noise_scale_over_steps"]
    (panel,) = figure.axes
    assert (panel.get_xscale(), panel.get_yscale()) == ("log", "log")
    assert (panel.get_xlabel(), figure.get_supylabel()) == (
        "optimizer step",
        "noise scale, examples",
    )
    assert [line.get_xdata()[-1] for line in panel.lines] == [512, 128, 32]
    steps, scales = panel.lines[0].get_data()
    assert scales[:-1] == pytest.approx([6.0 * step for step in steps[:-1]])
    assert math.isnan(scales[-1])


def test_one_arm_that_runs_away_does_not_flatten_the_others(tmp_path, monkeypatch):
    config, rows = synthetic.make_study({"a": Truth(FLAT, growth=0.5)})
    for row in rows:
        if row["phase"] == "final" and row["global_batch_size"] == 256:
            row["curve"]["distance"] = [1e4 * distance for distance in row["curve"]["distance"]]
    left, right = figures_of(monkeypatch, tmp_path, config, rows)["diffusion"].axes
    assert left.get_ylim()[1] == pytest.approx(1.2 * 0.1 * 512**0.5)
    assert left.texts[0].get_text().splitlines() == [
        "R² of log t: 0.87 to 0.95",
        "batch 256 reaches 5,657",
    ]
    assert right.get_ylim()[1] > 5e3


def test_fits_of_the_diffusion_are_drawn_with_their_r2(tmp_path, monkeypatch):
    truths = {"power": Truth(FLAT, growth=0.5), "log": Truth(FLAT, growth="log")}
    panels = figures_of(monkeypatch, tmp_path, *synthetic.make_study(truths))["diffusion"].axes
    dashed = [[line for line in panel.lines if line.get_linestyle() == "--"] for panel in panels]
    assert [len(lines) for lines in dashed] == [3] * 4
    steps, distances = dashed[1][0].get_data()
    assert (steps[0], steps[-1]) == pytest.approx((1, 512))
    assert distances == pytest.approx([0.1 * step**0.5 for step in steps], rel=1e-6)
    steps, distances = dashed[2][0].get_data()
    assert distances == pytest.approx([1 + 0.5 * math.log(step) for step in steps], rel=1e-6)
    said = [panel.texts[-1].get_text() for panel in panels]
    assert said[1:3] == ["R² of t^p: 1.00", "R² of log t: 1.00"]


def test_names_are_broken_into_lines():
    assert _style.label("an arm with a long name", 12) == "an arm with\na long name"
    assert _style.label("a$b$c") == r"a\$b\$c"
