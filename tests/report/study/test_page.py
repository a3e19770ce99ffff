"""A study's page is complete, needs no other server, and escapes what it shows."""

import base64
import csv
import html.parser
import json
import re

import pytest
import synthetic
from refusal import refused
from shared import shared_folder
from synthetic import Truth, legw, summarize

from lbopt.config import config_to_json
from lbopt.report import _page
from lbopt.report.study import _critical_measures, _top, read_study, write_study_report
from lbopt.report.study._figure_scores import FIGURE
from lbopt.report.study._tables import results_table, terminal_table, trials_table
from lbopt.report.study._write import TRIALS
from lbopt.sweep import read_examples

PNG = b"\x89PNG\r\n\x1a\n"
FLAT = (0.98, 0.98, 0.98)
ALWAYS = {FIGURE, "limits.png", "train_and_test.png", "learning_rate_search.png"}


class Page(html.parser.HTMLParser):
    """Collect addresses, tags, headings and images, and check that tags close."""

    VOID = {"meta", "link", "img"}

    def __init__(self, file):
        super().__init__()
        self.addresses = []
        self.tags = []
        self.headings = []
        self.alts = []
        self._open = []
        self.text = file.read_text()
        self.feed(self.text)
        assert not self._open

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        self.addresses += [
            value for name, value in attributes if name in ("src", "href", "srcset", "action")
        ]
        self.alts += [value for name, value in attributes if name == "alt"]
        if tag not in self.VOID:
            self._open.append(tag)

    def handle_endtag(self, tag):
        assert self._open.pop() == tag

    def handle_data(self, data):
        if self._open and self._open[-1] == "h2":
            self.headings.append(data)


def write(workdir, truths, **options):
    """Write the report of a planted study; return its page and the study."""
    config, rows = synthetic.make_study(truths, **options)
    written = write_study_report(workdir, synthetic.save_study(workdir, config, rows))
    return Page(written.file), written.study


def summary_of(workdir):
    return json.loads((workdir / "summary.json").read_text())


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    workdir = tmp_path_factory.mktemp("plain")
    return workdir, *write(workdir, {"A & <b>": legw((0.98, 0.975, 0.9))})


@pytest.fixture(scope="module")
def everything(tmp_path_factory):
    """A study with all measurements, written once in a test run; one arm diverges."""
    common = {"growth": 0.5, "noise_scale": (90.0, 100.0, 200.0), "peak_step": lambda size: 4}
    truths = {
        "momentum": Truth(
            (0.98, 0.97, 0.6), (1.0, 1.0, 0.7), steps_to_target=(200.0, 100.0, None), **common
        ),
        "lamb": legw(
            (0.98, 0.98, 0.975), steps_to_target=(150.0, 50.0, 20.0), layers=("a", "b"), **common
        ),
        "adam": Truth((0.98, 0.98, 0.5), steps_to_target=(150.0, 50.0, None), diverges=(256,)),
    }
    config, rows = synthetic.make_study(
        truths, waterfall=tuple(truths), warmup_factors=[0.0, 0.5, 1.0, 2.0]
    )
    with shared_folder(tmp_path_factory, "everything") as workdir:
        if not (workdir / "report.html").exists():
            write_study_report(workdir, synthetic.save_study(workdir, config, rows))
    study = read_study(config, rows, read_examples(workdir))
    return workdir, Page(workdir / "report.html"), study


def test_page_is_self_contained(everything):
    _, written, _ = everything
    assert written.addresses
    assert all(address.startswith(("data:", "#")) for address in written.addresses)
    assert "script" not in written.tags
    assert "http" not in written.text


LINE = {
    "run": "one run",
    "arms": ["lamb"],
    "step": 25,
    "examples_seen": 400,
    "rule": "sqrt",
    "tolerance": 0.01,
    "branches": [{"global_batch_size": size} for size in (1000, 2000, 4000, 8000)],
}


def with_branches(workdir, truths, *lines):
    """Write the report of a planted study with branches; return its page and the study."""
    text = "".join(json.dumps({**LINE, **line}) + "\n" for line in lines)
    (workdir / "critical.jsonl").write_text(text)
    return write(workdir, truths)


@pytest.mark.parametrize("steps", [(150.0, 50.0, 20.0), (None, None, None)])
def test_branches_of_a_run_stand_beside_the_study_and_say_where_they_differ(steps, tmp_path):
    layers = {"noise_scale_of_norms": 25.0, "noise_scale_of_parameters": [10.0, 40.0, None]}
    truths = {
        "lamb": legw((0.98, 0.98, 0.975), steps_to_target=steps),
        "momentum": Truth((0.98, 0.97, 0.6), steps_to_target=steps),
    }
    written, study = with_branches(
        tmp_path,
        truths,
        {"critical_batch_size": 2000, "noise_scale": 30.0, **layers},
        {"critical_batch_size": 8000, "noise_scale": None},
    )
    assert "Critical batch" in written.headings
    plain = re.sub(r"<td[^>]*>", "<td>", written.text)
    assert "<td>one run at step 25</td>" in plain
    assert "<td>25</td><td>10 to infinite, 40</td>" in re.sub(r"\s*(<td>)", r"\1", plain)

    lamb, momentum = study.measured
    has_fit = lamb.critical_batch is not None
    assert has_fit == (steps[0] is not None) == (momentum.critical_batch is not None)
    others = ["its noise scale of 30"]
    if has_fit:  # far below 2,000; an arm of another kind is not compared
        others.insert(0, f"{lamb.critical_batch.critical_batch_size:,.0f} of lamb")
    found = _critical_measures.branches_apart(study)
    assert found[0] == f"2000 to 4000 of one run at step 25 and {' and '.join(others)}"
    assert len(found) == 1 + has_fit  # an infinite noise scale agrees with any batch
    assert any(found[0] in finding for finding in summary_of(tmp_path)["findings"])


def test_branches_of_a_study_without_a_target_are_a_finding_too(tmp_path):
    line = {"critical_batch_size": 2000, "noise_scale": 30.0}
    with_branches(tmp_path, {"lamb": legw((0.98, 0.98, 0.975))}, line)
    assert any("its noise scale of 30" in each for each in summary_of(tmp_path)["findings"])


@pytest.mark.parametrize(
    ("more", "said"), [({}, "nothing to compare"), ({"noise_scale": 3000.0}, "None is off by")]
)
def test_branches_that_differ_from_nothing(more, said, tmp_path):
    line = {"critical_batch_size": 2000, **more}
    written, _ = with_branches(tmp_path, {"lamb": legw((0.98, 0.98, 0.975))}, line)
    assert said in written.text


def test_a_critical_batch_is_fitted_where_the_batch_stays_alone(tmp_path):
    growing = {"kind": "doubling", "every": 1.0, "final_batch_size": 4096}
    steps = (150.0, 50.0, 20.0)
    truths = {
        "constant": legw((0.98, 0.98, 0.975), steps_to_target=steps),
        "growing": legw((0.98, 0.98, 0.975), steps_to_target=steps, batch_schedule=growing),
    }
    written, study = write(tmp_path, truths)
    assert [arm.critical_batch is not None for arm in study.measured] == [True, False]
    until = [arm.scaling.perfect_until for arm in study.measured]
    assert [one is not None for one in until] == [True, False]
    assert "not told, the batch grows" in written.text

    # The steps of each batch size have their intervals all the same.
    constant, growing = (arm["scaling"] for arm in summary_of(tmp_path)["arms"])
    sizes = [[point["global_batch_size"] for point in one["points"]] for one in (constant, growing)]
    assert sizes[0] == sizes[1] != []
    assert (growing["savings"], growing["perfect_until"]) == ([], None)


def test_page_escapes_names(plain):
    _, written, _ = plain
    assert "A &amp; &lt;b&gt;" in written.text
    assert "<b>" not in written.text


def test_page_says_how_it_was_made(plain):
    for part in (
        "lbopt sweep --config=study.py",
        "jax 0.0",
        "git abc123",
        "1 x cpu",
        "best mean validation accuracy",
    ):
        assert part in plain[1].text


def test_what_was_not_measured_has_no_section(plain):
    workdir, written, _ = plain
    assert {file.name for file in workdir.glob("*.png")} == ALWAYS
    for heading in (
        "Steps to the target",
        "Critical batch",
        "Ablation",
        "Diffusion",
        "Trust ratios",
        "Learning rate and warmup",
    ):
        assert heading not in written.headings


def test_what_was_measured_has_one(everything):
    workdir, written, _ = everything
    measured = {
        "waterfall",
        "steps_to_target",
        "noise_scale",
        "phi",
        "diffusion",
        "lipschitz",
        "trust_ratios",
        "phi_layers",
    }
    measured.add("noise_scale_over_steps")

    names = {file.name for file in workdir.glob("*.png")}
    assert names == ALWAYS | {f"{name}.png" for name in {*measured, "learning_rate_and_warmup"}}
    assert len(written.alts) == len(names)
    assert all((workdir / name).read_bytes().startswith(PNG) for name in names)

    headings = [
        "Ablation",
        "Steps to the target",
        "Critical batch",
        "Diffusion",
        "Trust ratios",
        "Learning rate and warmup",
        "Results",
        "Protocol",
    ]
    assert [heading for heading in written.headings if heading in headings] == headings


def test_findings_and_claims_are_each_said_once(everything):
    workdir, written, _ = everything
    summary = summary_of(workdir)
    assert summary["claims"]
    text = written.text.replace("&#39;", "'").replace("&gt;", ">").replace("&lt;", "<")
    for finding in summary["findings"]:
        assert text.count(finding) == 1, finding


def test_summary_file_is_the_summary(everything):
    workdir, _, study = everything
    rows = [json.loads(line) for line in (workdir / "results.jsonl").read_text().splitlines()]
    made = {
        "command": "lbopt sweep --config=study.py",
        "versions": {"jax": "0.0"},
        "machine": "1 x cpu",
    }
    summary = summarize(config_to_json(study.config), rows) | made
    assert summary_of(workdir) == json.loads(json.dumps(summary))
    assert "NaN" not in (workdir / "summary.json").read_text()


def test_trials_are_written_as_csv(everything):
    workdir, _, study = everything
    with open(workdir / TRIALS, newline="") as stream:
        lines = list(csv.DictReader(stream))
    assert len(lines) == len(study.runs) == 3 * 3 * (3 * 4 + 5)
    final = [line for line in lines if line["phase"] == "final" and line["arm"] == "lamb"]
    assert float(final[0]["test_accuracy"]) == pytest.approx(0.979)
    assert "probes" not in final[0]


def test_all_sections_but_the_findings_are_folded(everything):
    _, written, study = everything
    folded = written.text.split("<details")[1:]
    assert [part.startswith(" open") for part in folded] == [True] + [False] * (len(folded) - 1)
    assert len(folded) == len(written.headings)
    (trials,) = (part for part in folded if f"<h2>All {len(study.runs)} trials</h2>" in part)
    assert trials.count("<tr>") == len(study.runs) + 1


def test_the_contents_name_every_section(everything):
    _, written, _ = everything
    anchors = [address[1:] for address in written.addresses if address.startswith("#")]
    assert len(anchors) == len(written.headings)
    assert all(written.text.count(f' id="{anchor}"') == 1 for anchor in anchors)


def test_the_page_contains_its_data(everything):
    workdir, written, _ = everything
    links = re.findall(r'download="([^"]*)" href="data:[^;]*;base64,([^"]*)"', written.text)
    files = {name: base64.b64decode(content).decode() for name, content in links}
    assert files[TRIALS] == (workdir / TRIALS).read_text()
    assert json.loads(files["summary.json"]) == summary_of(workdir)


def test_the_top_has_one_table_with_the_best_in_bold(plain, everything):
    table = plain[1].text.split("<table>")[1].split("</table>")[0]
    assert re.findall(r">([^<]+)</th>", table) == ["arm", "16", "64", "256", "limit"]
    assert "<strong>" not in table.split("limit")[0]
    table = everything[1].text.split("<table>")[1].split("</table>")[0]
    lines = [re.sub("<[^>]*>", "", line) for line in table.split("<tr>")[2:]]
    assert [line.split()[0][:4] for line in lines] == ["mome", "lamb", "adam"]
    lamb = table.split("<tr>")[3]
    assert "<strong>97.50</strong>" in lamb  # at batch 256
    assert "<strong>60.00</strong>" not in table


def test_no_limit_is_the_largest_while_another_is_unknown():
    """Arms fall between 64 and 256; a seed of "wild" diverges at the smallest batch."""
    truths = {"lamb": Truth((0.98, 0.98, 0.9)), "wild": Truth(FLAT, diverges=(16,))}
    study = read_study(*synthetic.make_study(truths))
    assert [line.split()[-1] for line in terminal_table(study).splitlines()[2:]] == [
        "76",
        "unknown",
    ]
    table = _top.table(study)
    assert table.rows[1][-1] == "unknown"
    assert '"unknown" cannot be told' in table.note
    assert (0, 4) not in table.best
    said = r"the limit is batch 76 \(95 % interval .* to .*\) for lamb and unknown for wild;"
    assert re.search(said, _top.lead(study))


def test_the_largest_limit_is_named_where_all_are_known():
    truths = {"lamb": Truth((0.98, 0.98, 0.9)), "sgd": Truth((0.98, 0.98, 0.8))}
    study = read_study(*synthetic.make_study(truths))
    assert re.search(r"the largest limit, batch 76 \(.*\), is that of lamb;", _top.lead(study))
    assert (0, 4) in _top.table(study).best
    assert "unknown" not in _top.table(study).note


def test_of_many_arms_the_known_limits_are_counted():
    truths = {f"arm{i}": Truth((0.98, 0.98, 0.9 - i / 100)) for i in range(6)}
    study = read_study(*synthetic.make_study(truths | {"wild": Truth(FLAT, diverges=(16,))}))
    assert "the limits of 6 of 7 arms are known, batch" in _top.lead(study)


def test_the_table_of_results_has_what_was_measured(everything, plain):
    _, _, study = everything
    header, rows = results_table(study)
    assert len(rows) == 9

    row = dict(zip(header, rows[2], strict=True))
    assert (row["arm"], row["batch"], row["train %"], row["test %"], row["diverged"]) == (
        "momentum",
        "256",
        "70.00",
        "60.00",
        "0/5",
    )
    assert (row["noise scale"], row["exponent"], row["limit"]) == ("200", "0.5", "65")
    assert (row["fails to"], row["weight decay"], row["R^2 of t^p"]) == ("optimise", "0.01", "1")
    assert (row["Lipschitz peak"], row["peak at step"], row["last phi"]) == ("10", "4", "0.5")
    assert dict(zip(header, rows[1], strict=True))["fails to"] == ""

    assert float(dict(zip(header, rows[3], strict=True))["critical batch"]) > 0
    diverged = dict(zip(header, rows[-1], strict=True))
    assert (diverged["diverged"], diverged["diverged at step"], diverged["steps to target"]) == (
        "5/5",
        "3",
        "",
    )
    assert (diverged["train %"], diverged["train loss"]) == ("", "")

    assert "noise scale" not in results_table(plain[2])[0]


def test_the_measures_of_the_critical_batch_stand_side_by_side(everything):
    _, _, study = everything
    section = _critical_measures.critical(study)
    rows = {row[0]: row[1:] for row in section.rows}
    assert rows["lamb"] == ["203", "203 to 203", "60", "60 to 60", "90", "2.25"]
    assert rows["momentum"] == ["not told", "", "", "", "90", ""]
    assert rows["adam"] == ["not told", "", "", "", "", ""]
    assert "agree within a factor of 4" in section.paragraphs[1]


def test_no_score_is_shown_of_outputs_that_are_not_numbers():
    """argmax over NaN outputs gives the first class: an accuracy of 0.09 that nothing reached."""
    config, rows = synthetic.make_study({"a": Truth(FLAT, diverges=(256,))})
    rows = [{**row, "train_accuracy": 0.09} if row["diverged"] else row for row in rows]
    study = read_study(config, rows)
    header, cells = trials_table(study)
    shown = [dict(zip(header, cell, strict=True)) for cell in cells]
    assert {row["train accuracy"] for row in shown if row["diverged at"]} == {""}
    assert {row["train accuracy"] for row in shown if not row["diverged at"]} == {"1"}
    header, cells = results_table(study)
    assert [cell[header.index("train %")] for cell in cells] == ["100.00", "100.00", ""]


def test_terminal_table_shows_means_and_limit(plain):
    lines = terminal_table(plain[2]).splitlines()
    assert lines[0].startswith("test accuracy, %")
    assert lines[1].split() == ["batch", "16", "64", "256", "limit"]
    assert lines[2].endswith("98.00   97.50   90.00        74")


def test_a_language_model_is_shown_by_its_perplexity(tmp_path):
    truths = {
        "sgd": Truth((100.0, 101.0, 300.0), (80.0, 80.0, 290.0)),
        "lamb": legw((100.0,) * 3, diverges=(256,)),
    }
    written, study = write(
        tmp_path, truths, perplexity=True, method="hyperband", warmup_range=[0.25, 4.0]
    )
    assert "Mean test perplexity, over 5 seeds" in written.text
    assert "(100.50 at 16 and 64) up to batch 68" in written.text
    lines = terminal_table(study).splitlines()
    assert lines[0].startswith("test perplexity")
    assert lines[2].split() == ["sgd", "100.00", "101.00", "300.00", "68"]
    assert lines[3].split() == ["lamb", "100.00", "100.00", "div.", "66"]


def test_a_target_study_reports_what_was_not_reached(tmp_path):
    arm = Truth(FLAT, steps_to_target=(None, None, None))
    written, _ = write(tmp_path, {"a": arm}, stops=True)
    assert "The median run did not reach the target: a at any batch size" in written.text
    assert "The limit of every arm" not in written.headings
    assert "fewest steps to the target" in written.text


def test_the_terminal_shows_that_a_limit_cannot_be_told():
    study = read_study(*synthetic.make_study({"a": Truth(FLAT, diverges=(16,))}, seeds=(1,)))
    assert terminal_table(study).splitlines()[2].split() == [
        "a",
        "0.00",
        "97.90",
        "97.90",
        "unknown",
    ]


def test_the_terminal_shows_steps_where_runs_stop_at_the_target():
    arm = Truth(FLAT, steps_to_target=(64.0, 16.0, None))
    study = read_study(*synthetic.make_study({"a": arm}, stops=True))
    lines = terminal_table(study).splitlines()
    assert lines[1].split() == ["batch", "16", "64", "256", "perfect", "to"]
    assert lines[2].split() == ["a", "64", "16", "never", "74"]


def test_the_figure_of_training_says_what_was_scored(tmp_path):
    config, rows = synthetic.make_study({"a": Truth(FLAT)})
    file = write_study_report(tmp_path, synthetic.save_study(tmp_path, config, rows)).file
    scored = "the whole training set, or a fixed random part of one that is much larger than"
    assert f"training score ({scored}" in file.read_text()


def test_an_unfinished_study_is_shown_as_far_as_it_is(tmp_path):
    config, rows = synthetic.make_study({"a": Truth(FLAT), "b": Truth(FLAT)})
    for count in (1, 4, 9, 30):
        saved = synthetic.save_study(tmp_path, config, rows[:count])
        written = write_study_report(tmp_path, saved)
        assert f"{count} trials so far" in Page(written.file).text
        assert written.table


def test_one_arm_one_batch_one_candidate_is_a_study_too(tmp_path):
    written, _ = write(
        tmp_path,
        {"a": Truth((0.9,), growth=0.5)},
        sizes=(64,),
        seeds=(1,),
        learning_rate_factors=[1.0],
    )
    assert "cannot be told" in written.text


@pytest.mark.everyday("unseen")
@pytest.mark.parametrize("drawn", [False, True], ids=["unseen", "drawn"])
def test_many_arms_and_batches_are_thinned_and_it_is_said(tmp_path, monkeypatch, drawn):
    if not drawn:  # the figures are made, but not turned into pixels
        monkeypatch.setattr(_page, "save_figure", lambda figure, file: "QQ==")
    sizes = tuple(2**power for power in range(10))
    arms = {f"arm {place}": Truth((0.9,) * 10, growth=0.5) for place in range(9)}
    written, _ = write(
        tmp_path,
        arms,
        sizes=sizes,
        seeds=(1,),
        warmup_factors=[0.5, 1.0],
        learning_rate_factors=[1.0],
    )
    assert "Drawn for 8 of 9 arms" in written.text
    assert "Drawn for 32 of 90 cells" in written.text


def test_no_finished_trial_is_a_users_error(tmp_path):
    with refused("workdir", str(tmp_path), "missing"):
        write_study_report(tmp_path, {"config": {"name": "planted"}})


@pytest.mark.slow
def test_five_thousand_trials_take_seconds(tmp_path):
    arms = {
        f"arm {place}": Truth(
            (0.9,) * 7, growth=0.5, noise_scale=(9.0,) * 7, peak_step=lambda size: 4
        )
        for place in range(5)
    }
    factors = [2.0**power for power in range(-6, 7)]
    search = {
        "learning_rate_factors": factors,
        "warmup_factors": [0.5, 1.0, 2.0, 4.0, 8.0],
        "search_seeds": (0, 10),
    }
    config, rows = synthetic.make_study(
        arms, sizes=(4, 8, 16, 32, 64, 128, 256), seeds=range(100, 113), **search
    )
    assert len(rows) == 5005
    saved = synthetic.save_study(tmp_path, config, rows)
    file = write_study_report(tmp_path, saved).file
    assert file.stat().st_size < 10e6


# ---- the page


def test_empty_sections_are_left_out(tmp_path):
    file = tmp_path / "page.html"
    _page.write_page(file, "t", "lead", [_page.Section("Only a heading")])
    text = file.read_text()
    for tag in ("<table", "<img", "<ul", "<figure", "<pre", "<nav", "<dl"):
        assert tag not in text


def test_pictures_are_numbered_by_nothing_but_their_caption(tmp_path):
    file = tmp_path / "page.html"
    pictures = [
        _page.Picture("QQ==", 'a "quoted" alt', "caption <1>"),
        _page.Picture("QQ==", "other", wide=True),
    ]
    _page.write_page(
        file, "t", "lead", [_page.Section("s", pictures=pictures, items=["one & two"])]
    )
    text = file.read_text()
    assert 'alt="a &#34;quoted&#34; alt"' in text
    assert "caption &lt;1&gt;" in text
    assert "<li>one &amp; two</li>" in text
    assert len(re.findall("<figcaption>", text)) == 1
    assert len(re.findall('class="panels"', text)) == 1
