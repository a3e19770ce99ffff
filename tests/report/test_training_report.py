"""The curves of a training run can be seen, however few their points are."""

import matplotlib.axes
import pytest

from lbopt.report import training


@pytest.fixture
def drawn(monkeypatch):
    """Return the list of (number of points, marker) of every line that is drawn."""
    seen, plot = [], matplotlib.axes.Axes.plot

    def spy(self, *arguments, **options):
        lines = plot(self, *arguments, **options)
        seen.extend((len(line.get_xdata()), line.get_marker()) for line in lines)
        return lines

    monkeypatch.setattr(matplotlib.axes.Axes, "plot", spy)
    return seen


@pytest.mark.parametrize(("count", "marked"), [(1, True), (20, True), (21, False)])
def test_few_points_are_marked(count, marked, drawn, tmp_path):
    lines = [{"step": step, "examples_seen": step, "eval/loss": 1.0} for step in range(1, count + 1)]
    training._draw(tmp_path, "loss", lines, ["eval/loss", "train/loss"])
    assert [(points, marker == "o") for points, marker in drawn] == [(count, marked)]
    assert (tmp_path / "loss.png").stat().st_size > 1000
