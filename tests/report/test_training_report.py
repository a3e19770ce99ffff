"""A training run's curves are visible even with few points."""

import warnings

import matplotlib.axes
import pytest

from lbopt.report import _curves, _training
from lbopt.report._colours import optimizer_look

LOOK = optimizer_look("muon")


@pytest.fixture
def drawn(monkeypatch):
    """Return (number of points, marker) of every line in a figure."""
    seen = []
    plot = matplotlib.axes.Axes.plot

    def spy(self, *arguments, **options):
        lines = plot(self, *arguments, **options)
        seen.extend((len(line.get_xdata()), line.get_marker()) for line in lines)
        return lines

    monkeypatch.setattr(matplotlib.axes.Axes, "plot", spy)
    return seen


@pytest.mark.parametrize(("count", "marked"), [(1, True), (20, True), (21, False)])
def test_few_points_are_marked(count, marked, drawn, tmp_path):
    lines = [
        {"step": step, "examples_seen": step, "eval/loss": 1.0} for step in range(1, count + 1)
    ]
    _curves.draw(tmp_path, "loss", lines, ["eval/loss", "train/loss"], "loss", LOOK)
    assert [(points, marker == LOOK.marker) for points, marker in drawn] == [(count, marked)]
    assert (tmp_path / "loss.png").stat().st_size > 1000


@pytest.mark.parametrize("count", [20, 21, 300])
def test_a_legend_of_many_layers_fits_beside_the_curves(count, drawn, tmp_path, monkeypatch):
    """Of 300 layers, the ten with the highest and the lowest final values are named, in order."""
    legends = []
    monkeypatch.setattr(
        _curves._page, "save_figure", lambda figure, file: legends.append(figure) or ""
    )

    names = [f"train/trust_ratio/stage0_block{number}/conv1/kernel" for number in range(count)]
    lines = [
        {"step": step, **{name: 1.0 + step * i for i, name in enumerate(names)}}
        for step in range(3)
    ]

    _curves.draw(tmp_path, "trust_ratio", lines, names, "ratio", LOOK, log=True)
    (figure,) = legends
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        figure.savefig(tmp_path / "trust_ratio.png")

    (axes,) = figure.axes
    said = [text.get_text() for text in axes.get_legend().get_texts()]
    assert said == (names if count == 20 else [*names[:-11:-1], *names[9::-1]])
    assert len(drawn) == count

    box = axes.get_legend().get_window_extent()
    assert 0 <= box.y0 < box.y1 <= figure.bbox.height
    assert axes.get_window_extent().width > figure.bbox.width / 3


@pytest.mark.parametrize(
    ("scores", "said"),
    [
        (
            {"train/loss": 0.5, "eval/loss": 0.25, "eval/accuracy": 0.9604},
            "lamb at global batch 1024. After 20 steps (20,480 examples) the last evaluation has "
            "accuracy 96.04 % and loss 0.25.",
        ),
        ({}, "lamb at global batch 1024 for 20 steps (20,480 examples)."),
    ],
)
def test_the_page_opens_with_what_was_trained_and_what_came_out(scores, said):
    config = {"global_batch_size": 1024}
    config |= {"model": {"name": "cnn"}, "data": {"name": "digits"}, "optimizer": {"name": "lamb"}}
    found = _training._lead([{"step": 20, "examples_seen": 20480, **scores}], config)
    assert found == f"The model cnn was trained on digits with {said}"
