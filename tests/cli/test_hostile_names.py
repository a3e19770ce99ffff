"""A hostile string in every place that shows names from outside."""

import ast
import csv
import json
import pathlib
import shlex
import shutil
import subprocess

import jax.numpy as jnp
import pytest
import synthetic
from hostile import HOSTILE, commands, unprintable
from synthetic import legw

from lbopt import lamb, summarize_masks
from lbopt._shown import one_line
from lbopt.cli import _flags
from lbopt.data._records import prepare_command
from lbopt.report import _page
from lbopt.report.study._tables import trials_csv
from lbopt.train import Progress, say
from lbopt.workdir import MetricsWriter, MlperfLog, write_json

CONSTANT = {
    "_shown.py",  # makes text printable
    "train/_progress.py",  # makes text printable too
    "workdir/_mllog.py",  # JSON of ASCII
    "cli/_main.py",  # the line of an error
    "cli/_standard_streams.py",
    "data/baselines.py",  # the line of an error
    "job/_guard.py",
}
"""Files that print directly; all others print by `show`."""
COMMANDS = list(commands())


@pytest.fixture
def study(tmp_path):
    config, rows = synthetic.make_study(
        {HOSTILE: legw((0.98, 0.975, 0.9)), "@b": legw((0.98, 0.9, 0.8))}
    )
    folder = tmp_path / "runs\n$(touch pwned)\x1b[31m"
    folder.mkdir()
    saved = {
        **synthetic.save_study(
            folder, {**config, "name": HOSTILE}, [{**row, "study": HOSTILE} for row in rows]
        )
    }
    write_json(folder / "config.json", {**saved, "command": HOSTILE, "device_kind": HOSTILE})
    return folder


def test_the_report_of_a_study(study, lbopt, monkeypatch):
    monkeypatch.setattr(_page, "save_figure", lambda figure, file: figure.canvas.draw() or "")
    code, out, err = lbopt("report", f"--workdir={study}")
    assert (code, err) == (0, "")
    html = (study / "report.html").read_text()
    assert not unprintable(out) | unprintable(html)
    assert "<script" not in html
    assert out.count("\n") == 5  # the shown name, batch sizes, two arms, and the page's path
    cells = [
        cell for row in csv.reader((study / "trials.csv").read_text().splitlines()) for cell in row
    ]
    assert not any(cell.startswith(("=", "+", "@")) for cell in cells)
    assert {
        "'@b",
        "'"
        + HOSTILE.replace("\x1b", r"\x1b")
        .replace("\n", r"\n")
        .replace("\u202e", r"\u202e")
        .replace("\x07", r"\x07"),
    } <= set(cells)


def test_the_report_of_a_run(trained, tmp_path, lbopt, monkeypatch):
    """Names of parameters, of the run, and of its environment."""
    workdir = shutil.copytree(trained, tmp_path / "run")
    saved = json.loads((workdir / "config.json").read_text())
    saved["config"]["name"] = saved["command"] = saved["device_kind"] = f"{HOSTILE}\udcff"
    write_json(workdir / "config.json", saved)
    with MetricsWriter(workdir, 16) as writer:
        writer.write(
            17, 1, {f"train/trust_ratio/{HOSTILE}{number}\udcff": 1.0 for number in range(3)}
        )
    monkeypatch.setattr(_page, "save_figure", lambda figure, file: figure.canvas.draw() or "")
    code, out, err = lbopt("report", f"--workdir={workdir}")
    assert (code, err) == (0, "")
    html = (workdir / "report.html").read_text()
    assert not unprintable(out) | unprintable(html)
    assert "<script" not in html


def test_lines_of_mlperf(tmp_path, capsys):
    log = MlperfLog(tmp_path, {HOSTILE: HOSTILE}, lambda step: 0.0, 0)
    log.evaluated(1, {HOSTILE: 1.0})
    log.run_ends(1, True)
    lines = capsys.readouterr().out.split("\n")[:-1]
    assert lines == (tmp_path / "mllog.txt").read_text().split("\n")[:-1]
    said = [json.loads(line.removeprefix(":::MLLOG ")) for line in lines]
    assert not unprintable("".join(lines))
    assert {"key": HOSTILE, "value": HOSTILE} in [
        {name: one[name] for name in ("key", "value")} for one in said
    ]
    MlperfLog(tmp_path, {HOSTILE: HOSTILE}, lambda step: 0.0, 1).run_ends(
        1, True
    )  # the command reads its own output again


def test_tables_of_parameters(capsys):
    params = {HOSTILE: {"kernel": jnp.ones((3, 4)), f"bias{HOSTILE}\udcff": jnp.ones(4)}}
    summarize_masks(params, lamb(0.1, weight_decay=0.01))
    header, *lines, total = capsys.readouterr().out.split("\n")[:-1]
    assert not unprintable("".join(lines))
    assert len(lines) == 2
    assert [line[header.index("shape") :].split("  ")[0] for line in lines] == ["(4,)", "(3, 4)"]
    assert total.startswith("2 parameters")


def test_nothing_is_printed_as_it_is():
    root = pathlib.Path(_page.__file__).parents[1]
    found = set()
    for file in root.rglob("*.py"):
        names = (
            ast.unparse(node.func)
            for node in ast.walk(ast.parse(file.read_text()))
            if isinstance(node, ast.Call)
        )
        if {"print", "sys.stdout.write", "sys.stderr.write"} & set(names):
            found.add(file.relative_to(root).as_posix())
    assert found == CONSTANT


@pytest.mark.parametrize(
    ("words", "flags", "required"), COMMANDS, ids=[" ".join(row[0]) for row in COMMANDS]
)
def test_flags(words, flags, required, configs, lbopt, tmp_path, monkeypatch):
    """Each flag of each command, and an unknown flag, is refused in one printable line."""
    monkeypatch.chdir(tmp_path)
    # A data set that this machine has would be there already.
    monkeypatch.setenv("TFDS_DATA_DIR", str(tmp_path / "data"))
    study = f"{configs / 'sweeps' / 'digits_limit.py'}:smoke"
    given = {
        "config": study if words == ["sweep"] else f"{configs / 'digits_cnn.py'}:smoke",
        "format": "safetensors",
    }

    made = {
        "new": "folder",
        "prepare": "data_dir",
        "sweep": "workdir",
        "tpu": "copy",
        "train": "workdir",
    }
    taken = {made.get(words[0])}

    for flag in (
        {*flags, HOSTILE} - taken - {"job_secret_file"}
    ):  # a single process does not use one
        others = [f"--{name}={given.get(name, 'nowhere')}" for name in required if name != flag]
        code, out, err = lbopt(*words, f"--{flag}={HOSTILE}", *others)
        assert code in (2, 3), flag
        assert (out, err.count("\n")) == ("", 1), flag
        assert not unprintable(err)
    assert list(tmp_path.iterdir()) == []


def test_help_and_classes(lbopt, capsys, config_file):
    with pytest.raises(SystemExit):
        lbopt("prepare", HOSTILE, "--help")
    assert not unprintable(capsys.readouterr().out)
    file = config_file(f"get_config = lambda arg='': type({HOSTILE!r}, (), {{}})()")
    code, _, err = lbopt("train", f"--config={file}", "--workdir=run")
    assert (code, err.count("\n")) == (2, 1)
    assert not unprintable(err)


def test_numbers_of_a_csv_stay_numbers():
    assert trials_csv([{"arm": "+ LEGW", "seed": -1, "distance": -0.5, "diverged": False}]) == (
        "arm,seed,distance,diverged\n'+ LEGW,-1,-0.5,False\n"
    )


@pytest.mark.parametrize("command", ["report", "sweep", HOSTILE])
def test_errors_are_one_line(command, lbopt, tmp_path):
    code, _, err = lbopt(
        command, f"--workdir={tmp_path / 'nowhere'}{HOSTILE}", f"--config={HOSTILE}.py"
    )
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
            about = About(paper={HOSTILE!r}, note={HOSTILE!r}, hardware={HOSTILE!r})
            return TrainConfig(name={HOSTILE!r}, about=about)
        """
    )
    odd = shutil.copy(file, file.with_name("a\n$(touch pwned)\x1b.py"))
    file.unlink()
    for flag in (f"--configs={odd.parent}", f"--config={odd}"):
        code, out, err = lbopt("recipes", flag)
        assert (code, err) == (0, "")
        assert not unprintable(out)
        assert "\n$(touch" not in out


@pytest.mark.process
@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
def test_commands_to_copy_mean_what_was_given(tmp_path):
    """A copied command runs nothing else and stays on one line."""
    words = [
        "train",
        f"--config={HOSTILE}",
        "--config.model.widths=(4,)",
        "--workdir=a b\udcff\u00e9",
    ]

    line = _flags.command_line("train", words[1:])
    assert not unprintable(line)
    assert "\n" not in line

    done = subprocess.run(
        ["bash", "-c", f'printf "%s\\0" {line}'], capture_output=True, cwd=tmp_path, check=True
    )
    assert done.stdout.split(b"\0")[1:-1] == [
        word.encode("utf-8", "surrogateescape") for word in words
    ]
    assert not list(tmp_path.iterdir())

    assert prepare_command("mnist", HOSTILE).count("\n") == 0
    assert shlex.split(_flags.command_line("train", ["--workdir=my runs"])) == [
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
    "field",
    ["data.crop_area", "model.widths", "num_epochs", "optimizer.b1", "optimizer.name", "seed"],
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
