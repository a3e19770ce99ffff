"""The critical batch of a run by its branches, beside its noise scale."""

import json

import pytest
from refusal import troubled

from lbopt.report._branches import critical_section

METRICS = [
    {"step": 10, "examples_seen": 160, "train/noise_scale": 20.0},
    {"step": 20, "examples_seen": 320, "train/noise_scale": 30.0, "eval/loss": 1.0},
    {"step": 25, "examples_seen": 400, "train/loss": 1.0},
    {"step": 30, "examples_seen": 480, "train/noise_scale": None},
    {"step": 40, "examples_seen": 640, "train/noise_scale": 900.0},
]


def measured(critical, step=25, sizes=(16, 32, 64, 128)):
    return {
        "step": step,
        "examples_seen": 16 * step,
        "rule": "sqrt",
        "tolerance": 0.01,
        "branches": [{"global_batch_size": size, "train_loss": 1.0} for size in sizes],
        "critical_batch_size": critical,
        "is_beyond": critical == sizes[-1],
    }


@pytest.fixture
def section(tmp_path):
    """Return a function from measurements and metrics to the section."""

    def made(*lines, metrics=METRICS):
        text = "".join(json.dumps(line) + "\n" for line in lines)
        (tmp_path / "critical.jsonl").write_text(text)
        (found,) = critical_section(tmp_path, metrics)
        return found

    return made


def test_a_run_without_branches_has_no_section(tmp_path):
    assert critical_section(tmp_path, METRICS) == []


def test_the_noise_scale_beside_a_measurement_is_the_last_before_it(section):
    lines = [measured(64), measured(16), measured(128, 30), measured(32, 40), measured(32, 5)]
    rows = section(*lines).rows
    assert [row[-2:] for row in rows] == [
        ["64 to 128", "30"],
        ["below 32", "30"],
        ["at least 128", "infinite"],
        ["32 to 64", "900"],
        ["32 to 64", "not logged"],
    ]
    assert rows[0][:4] == ["25", "400", "sqrt", "0.01"]


@pytest.mark.parametrize(
    ("line", "apart"),
    [
        (measured(64), False),  # 30 is more than 64 / 4
        (measured(128), True),  # at least 128, more than 4 times 30
        (measured(16), False),  # any batch below 32
        (measured(128, 30), False),  # infinite
        (measured(128, 40), False),  # at least 128 may be 900
        (measured(64, 40), True),  # at most 128, less than 900 / 4
    ],
)
def test_bounds_that_are_all_a_factor_of_four_away_disagree(line, apart, section):
    text = section(line).paragraphs[1]
    assert ("disagree by more than a factor of 4: " in text) is apart
    assert ("do not disagree" in text) is not apart


def test_a_run_without_a_noise_scale_says_how_to_log_it(section):
    text = section(measured(64), metrics=METRICS[2:3]).paragraphs[1]
    assert "optimizer.track_noise_scale" in text


def test_noise_scales_of_layers_stand_beside_that_of_the_run(section):
    more = {
        "train/noise_scale_of_norms": 25.0,
        "train/noise_scale/a": 10.0,
        "train/noise_scale/b": None,
        "train/noise_scale/c": 40.0,
    }
    metrics = [METRICS[0], {**METRICS[1], **more}, *METRICS[2:]]
    found = section(measured(64), measured(64, 5), metrics=metrics)
    assert found.header[-2:] == ("of norms alone", "of single parameters, median")
    assert [row[-2:] for row in found.rows] == [["25", "10 to infinite, 40"], ["", ""]]
    assert len(section(measured(64)).rows[0]) == len(section(measured(64)).header) == 6


@pytest.mark.parametrize("field", ["step", "branches", "critical_batch_size"])
def test_a_damaged_line_is_refused(field, tmp_path):
    file = tmp_path / "critical.jsonl"
    file.write_text(json.dumps({**measured(64), field: "x"}) + "\n")
    with troubled(str(file), code="damaged"):
        critical_section(tmp_path, METRICS)
