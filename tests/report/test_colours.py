"""Colours of the reports are seen on both backgrounds, and an optimizer keeps its own."""

import re

import pytest
import synthetic
from synthetic import Truth

from lbopt.config._optimizer import OPTIMIZERS
from lbopt.report import _axes, _colours, _page, _template
from lbopt.report._colours import DARK_PAPER, PAPER, optimizer_look
from lbopt.report.study import _style, read_study, write_study_report


def luminance(colour):
    """Return the relative luminance of WCAG 2.2."""
    channels = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return sum(weight * one for weight, one in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def contrast(one, other):
    high, low = sorted([luminance(one), luminance(other)], reverse=True)
    return (high + 0.05) / (low + 0.05)


def test_contrast_is_that_of_wcag():
    assert contrast("#000000", "#ffffff") == pytest.approx(21)
    assert contrast("#767676", "#ffffff") == pytest.approx(4.54, abs=0.01)


LINES = [*_colours.all_optimizer_colours(), _colours.GREY, _colours.BETTER, _colours.WORSE]


@pytest.mark.parametrize("colour", LINES)
def test_lines_are_seen_on_white_and_on_dark(colour):
    assert contrast(colour, PAPER) >= 3
    assert contrast(colour, DARK_PAPER) >= 3


def test_texts_are_read_on_white_and_on_dark():
    dark = _colours.dark_colours()
    for ink in (_colours.INK, _colours.SOFT_INK):
        assert contrast(ink, PAPER) >= 4.5
        assert contrast(dark[ink], DARK_PAPER) >= 4.5
    # The page and its figures have one background.
    assert re.findall(r"--paper: (#\w{6})", _template.STYLE) == [PAPER, DARK_PAPER]


@pytest.mark.parametrize("count", [1, 2, 7, 12])
def test_the_largest_batch_has_the_strongest_colour(count):
    light = [_colours.shade(place, count) for place in range(count)]
    dark = [_colours.dark_colours()[colour] for colour in light]
    for colours, paper in ((light, PAPER), (dark, DARK_PAPER)):
        strengths = [contrast(colour, paper) for colour in colours]
        assert strengths == sorted(strengths)
        assert len(set(strengths)) == count
        assert strengths[0] >= 3.0


def test_known_optimizers_have_colours_and_markers_of_their_own():
    looks = [optimizer_look(name) for name in (*OPTIMIZERS, "nesterov", "muon", "lion")]
    assert len({look.colour for look in looks}) == len(looks)
    assert len({look.marker for look in looks}) == len(looks)
    assert optimizer_look("momentum", nesterov=True) == optimizer_look("nesterov")
    assert optimizer_look("optax.contrib.muon") == optimizer_look("muon")


def test_the_colour_of_an_own_optimizer_depends_on_its_name_alone():
    assert optimizer_look("mine.py:make_it") == optimizer_look("other/place.py:make_it")
    own = {optimizer_look(f"own_{number}") for number in range(200)}
    assert len(own) == len(_colours._OWN_COLOURS) * len(_colours._OWN_MARKERS)


def test_arms_of_one_optimizer_have_its_colour_and_other_markers():
    arms = {f"arm {place}": Truth((0.9, 0.9, 0.9)) for place in range(4)}
    config, records = synthetic.make_study(arms)
    config["arms"][3]["optimizer"]["name"] = "lars"
    *same, other = (_style.look(arm) for arm in read_study(config, records).arms)
    assert {look["color"] for look in same} == {optimizer_look("momentum").colour}
    assert other["color"] == optimizer_look("lars").colour
    assert len({look["marker"] for look in same}) == 3
    assert len({look["linestyle"] for look in same}) == 3

    # Without another optimizer, colours tell them apart.
    alone = read_study(*synthetic.make_study(dict(list(arms.items())[:3])))
    assert len({_style.look(arm)["color"] for arm in alone.arms}) == 3


def test_a_figure_exchanges_its_colours_in_dark_mode(tmp_path, monkeypatch):
    figure, axes = _page.new_figure(4, 3)
    axes.plot([1, 2], [1, 2], color=_colours.shade(1, 2))
    axes.text(1, 1, "black")
    drawn = []
    monkeypatch.setattr(_page, "with_dark_mode", lambda svg: drawn.append(svg) or svg)
    _page.save_figure(figure, tmp_path / "one.png")
    monkeypatch.undo()

    used = set(re.findall(r"(?:fill|stroke): (#\w{6})", drawn[0]))
    told = _page.with_dark_mode(drawn[0]).split("</style>")[0]
    exchanged = set(re.findall(r'"(?:fill|stroke): (#\w{6})"', told))
    kept = used - exchanged
    assert all(contrast(colour, DARK_PAPER) >= 3 for colour in kept), kept
    assert "#000000" not in drawn[0]


# ---- axes


def test_an_axis_that_saturates_tells_the_best_apart():
    _, axes = _page.new_figure(4, 3)
    axes.plot([1, 2, 3, 4], [100, 99, 98, 60])
    _axes.error_axis(axes, 60, 100, 2.5)
    height = axes.transData.transform([(1, one) for one in (60, 98, 99, 100)])[:, 1]
    share = (height - height[0]) / (height[-1] - height[0])
    assert list(share) == sorted(share)
    assert share[1] < 0.75  # on a linear axis it is 0.95
    assert {"100", "98", "90"} <= {text.get_text() for text in axes.get_yticklabels()}


def test_one_bad_seed_does_not_set_the_axis(tmp_path, monkeypatch):
    figures = {}
    monkeypatch.setattr(
        _page, "save_figure", lambda figure, file: figures.update({file.stem: figure}) or "QQ=="
    )
    config, rows = synthetic.make_study({"a": Truth((0.98, 0.98, 0.975))})
    last = [row for row in rows if row["phase"] == "final" and row["global_batch_size"] == 256]
    last[0]["test_accuracy"] = 0.5
    write_study_report(tmp_path, synthetic.save_study(tmp_path, config, rows))
    (band,) = figures["accuracy_vs_batch_size"].axes[0].collections
    assert min(band.get_paths()[0].vertices[:, 1]) > 90
