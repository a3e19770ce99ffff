"""The page of a study holds everything, asks nobody for anything, and escapes what it shows."""

import html.parser
import json

import pytest

from lbopt.errors import UserError
from lbopt.report import page
from lbopt.sweep import report

PNG = b"\x89PNG\r\n\x1a\n"


class Links(html.parser.HTMLParser):
    """Collect every address a page refers to, and check that tags close."""

    def __init__(self):
        super().__init__()
        self.addresses, self.tags = [], []

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        self.addresses += [value for name, value in attributes if name in ("src", "href", "srcset", "action")]


@pytest.fixture
def written(tmp_path):
    rows = []
    for size, accuracy in ((16, 0.98), (1024, 0.9)):
        common = {
            "arm": "A & <b>",
            "global_batch_size": size,
            "steps": 5,
            "warmup_steps": 1,
            "learning_rate": 0.1,
            "diverged": False,
        }
        scores = {"validation_accuracy": accuracy, "validation_loss": 1.0}
        for factor in (0.5, 1.0):
            rows.append(
                {
                    **common,
                    **scores,
                    "phase": "search",
                    "learning_rate_factor": factor,
                    "seed": 0,
                    "test_accuracy": None,
                }
            )
        for seed in (1, 2):
            rows.append(
                {
                    **common,
                    **scores,
                    "phase": "final",
                    "learning_rate_factor": 1.0,
                    "seed": seed,
                    "test_accuracy": accuracy,
                }
            )
    (tmp_path / "results.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = {
        "name": "study",
        "arms": [{"name": "A & <b>", "optimizer": {"name": "lamb"}, "schedule": {"warmup_rule": "legw"}}],
        "global_batch_sizes": [16, 1024],
        "learning_rate_factors": [0.5, 1.0],
        "search_seeds": [0],
        "final_seeds": [1, 2],
        "limit_points": 1.0,
        "train": {"num_epochs": 2.0},
    }
    saved = {"kind": "sweep", "config": config, "command": "lbopt sweep --config=study.py", "versions": {"jax": "0.0"}}
    saved |= {"git_revision": "abc123", "device_kind": "cpu", "num_devices": 1}
    file, summary = report.write_sweep_report(tmp_path, saved)
    return file, summary


def test_page_is_self_contained(written):
    text = written[0].read_text()
    links = Links()
    links.feed(text)
    assert links.addresses
    assert all(address.startswith("data:") for address in links.addresses)
    assert "script" not in links.tags
    assert "http" not in text


def test_page_escapes_names(written):
    text = written[0].read_text()
    assert "A &amp; &lt;b&gt;" in text
    assert "<b>" not in text


def test_page_says_how_it_was_made(written):
    text = written[0].read_text()
    for part in ("lbopt sweep --config=study.py", "jax 0.0", "abc123", "best mean validation accuracy"):
        assert part in text


def test_figures_are_png_files_too(written):
    folder = written[0].parent
    for name in (report.FIGURE, "learning_rate_search.png"):
        assert (folder / name).read_bytes().startswith(PNG)


def test_summary_file_is_the_summary(written):
    file, summary = written
    assert json.loads((file.parent / "summary.json").read_text()) == json.loads(json.dumps(summary))
    assert summary["arms"][0]["limit"] == 16


def test_terminal_table_shows_means_and_limit(written):
    lines = report.terminal_table(written[1]).splitlines()
    assert lines[1].split() == ["batch", "16", "1024", "limit"]
    assert lines[2].endswith("98.00   90.00      16")


def test_no_finished_trial_is_a_users_error(tmp_path):
    with pytest.raises(UserError, match="no trial is finished yet"):
        report.write_sweep_report(tmp_path, {"config": {}})


def test_empty_sections_are_left_out(tmp_path):
    file = tmp_path / "page.html"
    page.write_page(file, "t", "lead", [page.Section("Only a heading")])
    assert "<table" not in file.read_text()
    assert "<img" not in file.read_text()
