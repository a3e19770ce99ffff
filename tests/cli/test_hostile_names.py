"""One hostile string through every place where names from outside are shown."""

import csv
import json
import shlex
import shutil
import subprocess

import pytest
import synthetic
from synthetic import legw

from lbopt.cli import arguments
from lbopt.data.records import prepare_command
from lbopt.report import page
from lbopt.shown import one_line
from lbopt.sweep.report.tables import terminal_table, trials_csv
from lbopt.train import workdir as workdirs
from lbopt.train.progress import Progress, say

HOSTILE = "=1+1<script>alert(1)</script>\x1b[31m\nnext $(touch pwned) $x$ \"q' \u202e\x07"


def unprintable(text):
    return {letter for letter in text if not letter.isprintable()} - {"\n"}


@pytest.fixture
def study(tmp_path):
    config, rows = synthetic.make_study({HOSTILE: legw((0.98, 0.975, 0.9)), "@b": legw((0.98, 0.9, 0.8))})
    folder = tmp_path / "runs\n$(touch pwned)\x1b[31m"
    folder.mkdir()
    saved = {**synthetic.save_study(folder, {**config, "name": HOSTILE}, [{**row, "study": HOSTILE} for row in rows])}
    workdirs.write_json(folder / "config.json", {**saved, "command": HOSTILE, "device_kind": HOSTILE})
    return folder


def test_the_report_of_a_study(study, lbopt, monkeypatch):
    monkeypatch.setattr(page, "save_figure", lambda figure, file: figure.canvas.draw() or "")
    code, out, err = lbopt("report", f"--workdir={study}")
    assert (code, err) == (0, "")
    html = (study / "report.html").read_text()
    assert not unprintable(out) | unprintable(html)
    assert "<script" not in html
    assert out.count("\n") == len(terminal_table(json.loads((study / "summary.json").read_text())).split("\n")) + 1
    cells = [cell for row in csv.reader((study / "trials.csv").read_text().splitlines()) for cell in row]
    assert not any(cell.startswith(("=", "+", "@")) for cell in cells)
    assert {
        "'@b",
        "'"
        + HOSTILE.replace("\x1b", r"\x1b").replace("\n", r"\n").replace("\u202e", r"\u202e").replace("\x07", r"\x07"),
    } <= set(cells)


def test_numbers_of_a_csv_stay_numbers():
    assert trials_csv([{"arm": "+ LEGW", "seed": -1, "distance": -0.5, "diverged": False}]) == (
        "arm,seed,distance,diverged\n'+ LEGW,-1,-0.5,False\n"
    )


@pytest.mark.parametrize("command", ["report", "sweep", HOSTILE])
def test_errors_are_one_line(command, lbopt, tmp_path):
    code, _, err = lbopt(command, f"--workdir={tmp_path / 'nowhere'}{HOSTILE}", f"--config={HOSTILE}.py")
    assert (code, err.count("\n")) == (2, 1)
    assert not unprintable(err)


def test_a_message_has_an_end():
    assert len(one_line("x" * 10**6)) < 5000


def test_progress_and_lines(capsys):
    say(HOSTILE)
    with Progress(3) as progress:
        progress.say(HOSTILE)
        progress.report({HOSTILE: 1.0})
    err = capsys.readouterr().err
    assert err.count("\n") == 3
    assert not unprintable(err)


def test_recipes(config_file, lbopt):
    file = config_file(
        f"""
        from lbopt.config import About, TrainConfig
        def get_config(arg=""):
            return TrainConfig(name={HOSTILE!r}, about=About(paper={HOSTILE!r}, note={HOSTILE!r}, hardware={HOSTILE!r}))
        """
    )
    odd = shutil.copy(file, file.with_name("a\n$(touch pwned)\x1b.py"))
    file.unlink()
    for flag in (f"--configs={odd.parent}", f"--config={odd}"):
        code, out, err = lbopt("recipes", flag)
        assert (code, err) == (0, "")
        assert not unprintable(out)
        assert "\n$(touch" not in out


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
def test_commands_to_copy_mean_what_was_given(tmp_path):
    """And run nothing else, in one line."""
    words = ["train", f"--config={HOSTILE}", "--config.model.widths=(4,)", "--workdir=a b\udcff\u00e9"]
    line = arguments.command_line("train", words[1:])
    assert not unprintable(line)
    assert "\n" not in line
    done = subprocess.run(["bash", "-c", f'printf "%s\\0" {line}'], capture_output=True, cwd=tmp_path, check=True)
    assert done.stdout.split(b"\0")[1:-1] == [word.encode("utf-8", "surrogateescape") for word in words]
    assert not list(tmp_path.iterdir())
    assert prepare_command("mnist", HOSTILE).count("\n") == 0
    assert shlex.split(arguments.command_line("train", ["--workdir=my runs"])) == [
        "lbopt",
        "train",
        "--workdir=my runs",
    ]


@pytest.mark.parametrize(
    "value",
    [
        "",
        HOSTILE,
        "(" * 10**4,
        "(1," * 500,
        "9" * 5000,
        "1e999",
        "nan",
        "{}",
        "\udcff",
        "lambda: 1",
        "__import__('os').abort()",
    ],
)
@pytest.mark.parametrize(
    "field", ["data.crop_area", "model.widths", "num_epochs", "optimizer.b1", "optimizer.name", "seed"]
)
def test_hostile_values_of_flags(field, value, lbopt, configs, tmp_path):
    flags = [
        f"--config={configs / 'digits_cnn.py'}:smoke",
        f"--config.{field}={value}",
        f"--workdir={tmp_path / 'new'}",
    ]
    code, _, err = lbopt("train", *flags)
    assert (code, err.count("\n")) == (2, 1), err
    assert not unprintable(err)
