"""Every command does what its help says."""

import base64
import csv
import json
import pathlib
import re
import struct
import subprocess
import sys
import tomllib

import pytest
from refusal import refused

from lbopt import workdir
from lbopt.cli import _doctor, call_get_config, config_files
from lbopt.cli._extras import EXTRAS, Packages
from lbopt.errors import MissingPackage

ROOT = pathlib.Path(__file__).parents[2]


def test_doctor_finds_nothing_wrong(lbopt):
    code, out, err = lbopt("doctor")
    assert (code, err) == (0, "")
    lines = [line for line in out.splitlines() if "not installed" not in line]
    assert len(lines) == len(_doctor.CHECKS)
    for name, line in zip(_doctor.CHECKS, lines, strict=True):
        assert re.match(rf"ok    {name} +\S", line)
    assert "4 x cpu" in out
    assert "1024/" in out


def test_doctor_says_what_is_wrong_and_goes_on(lbopt, monkeypatch):
    def broken():
        raise RuntimeError("the rack\nis on fire")

    monkeypatch.setitem(_doctor.CHECKS, "devices", broken)
    code, out, err = lbopt("doctor")
    assert code == 3
    assert re.fullmatch(r"lbopt doctor: checks: 1 of 7 .+\n", err)
    assert re.search(r"^WRONG devices +the rack is on fire$", out, re.MULTILINE)
    assert sum(line.startswith("ok ") for line in out.splitlines()) == 6


def test_doctor_wants_room_on_the_disk(lbopt, monkeypatch):
    monkeypatch.setattr(_doctor, "_ENOUGH_DISK_BYTES", 1 << 80)
    code, out, _ = lbopt("doctor")
    assert code == 3
    assert re.search(r"^WRONG disk .*GiB free", out, re.MULTILINE)


@pytest.mark.parametrize("given", [True, False])
def test_recipes_lists_every_config(lbopt, configs, given, tmp_path, monkeypatch):
    if not given:
        monkeypatch.chdir(tmp_path)
    code, out, err = lbopt("recipes", *([f"--configs={configs}"] if given else []))
    assert (code, err) == (0, "")

    assert max(map(len, out.splitlines())) <= 100
    assert "lbopt recipes --config=FILE:ROW shows a row in full" in out
    listed = []
    for line in out.splitlines():
        if heading := re.match(r"(\S+): \S", line):
            file = heading[1]
        elif row := re.match(r"  ([\w.()-]+) +\d\S* +(\w+)", line):
            listed.append(f"{file}:{row[1]}")

    assert len(set(listed)) == len(listed)
    files = config_files(configs)
    if not given:  # the recipes of lbopt, by their names
        files = [file.relative_to(configs).with_suffix("") for file in files]
    assert list(dict.fromkeys(row.partition(":")[0] for row in listed)) == list(map(str, files))
    for file in files:
        assert f"{file}:smoke" in listed
    assert re.search(r"^  lars-32 +32 +lars +measured$", out, re.MULTILINE)
    assert re.search(r"digits_limit(\.py)?: [^(]+  \(none\) +16\.\.1024 +5 arms +measured\n", out)


def test_recipes_are_found_by_words(lbopt, configs):
    """Each word is in the name, the optimizer, the source or the status."""
    given = [f"--configs={configs}", "--json"]
    everything = json.loads(lbopt("recipes", *given)[1])
    found = json.loads(lbopt("recipes", *given, "--filter=LARS measured")[1])
    assert 0 < len(found) < len(everything)
    expected = [
        recipe
        for recipe in everything
        if recipe["status"] == "measured here"
        and "lars" in f"{recipe['config']}{recipe['optimizer']}{recipe['source']}".lower()
    ]
    assert found == expected
    (limit,) = [one for one in found if one["config"].endswith("digits_resnet.py:lars-1024")]
    assert (limit["batch"], limit["optimizer"]) == ("1024", "lars")


FIELDS = [
    "command",
    "source",
    "batch",
    "optimizer",
    "published result",
    "hardware",
    "time",
    "status",
    "note",
]


@pytest.mark.parametrize(
    ("row", "command", "workdir", "shown"),
    [
        (
            "bert_large_lamb.py:mixed",
            "train",
            "runs/bert_large_lamb-mixed",
            {
                "batch": "65536/32768",
                "optimizer": "lamb, variant albert",
                "hardware": "1024 TPU v3",
            },
        ),
        (
            "mnist.py:adam-50000",
            "train",
            "runs/mnist-adam-50000",
            {"batch": "50000", "optimizer": "adam", "status": "not yet run"},
        ),
        (
            "sweeps/digits_limit.py",
            "sweep",
            "runs/digits_limit",
            {"batch": "16..1024", "optimizer": "5 arms"},
        ),
    ],
)
def test_recipes_shows_a_row_in_full(lbopt, configs, row, command, workdir, shown):
    flag = configs / row
    code, out, err = lbopt("recipes", f"--config={flag}")
    assert (code, err) == (0, "")

    found = {}
    name = ""
    for line in out.splitlines():
        label = line[:18].strip()
        text = line[18:]
        name = label or name
        found[name] = f"{found[name]} {text}" if name in found else text

    assert list(found) == FIELDS
    about = call_get_config(str(flag)).about
    assert found["command"] == f"lbopt {command} --config={flag} --workdir={workdir}"
    said = (
        about.paper,
        about.published_result,
        about.hardware,
        about.time,
        about.status,
        about.note,
    )
    names = ("source", "published result", "hardware", "time", "status", "note")
    assert [found[name] for name in names] == [text or "-" for text in said]
    assert found.items() >= shown.items()


@pytest.mark.parametrize(
    ("flags", "fault"),
    [
        (["--config={mnist}", "--config.seed=1"], ("--config.seed", "1", "unused")),
        (["--config.seed=1"], ("--config.seed", "1", "unused")),
        (["--config={mnist}", "--configs=configs"], ("--configs", "configs", "conflict")),
        (["--config={mnist}", "--filter=lamb"], ("--filter", "lamb", "conflict")),
        (["--configs={mnist.parent}/sweeps", "--filter=Xyz"], ("--filter", "Xyz", "choice")),
        (["--config={mnist}:nothing"], ("--config row", "nothing", "choice")),
        (["--config=nowhere.py"], ("--config", "nowhere.py", "missing")),
    ],
)
def test_recipes_refuses_what_it_cannot_show(refusing, configs, flags, fault):
    with refused(*fault):
        refusing("recipes", *(flag.format(mnist=configs / "mnist.py") for flag in flags))


TOGETHER = [
    "coordinator_address",
    "coordinator_bind_address",
    "num_processes",
    "process_id",
    "start_timeout_s",
    "hang_timeout_s",
    "job_secret_file",
]


@pytest.mark.parametrize("flag", ["--help", "-h"])
@pytest.mark.parametrize(
    ("command", "flags"),
    [
        ("train", ["config", "workdir", "profile", "accept", "checksum", *TOGETHER]),
        ("evaluate", ["config", "workdir", "checkpoint", *TOGETHER]),
        ("sweep", ["config", "workdir", "shard", "pilot", "accept", "checksum", *TOGETHER]),
        ("diff", ["workdir", "other", "config"]),
        ("check", ["config", "topology", "devices", "workers", "pilot", "memory"]),
        ("report", ["workdir", "target_study"]),
        ("recipes", ["config", "configs", "filter", "json"]),
        ("config", ["config", "json"]),
        ("doctor", [*TOGETHER]),
    ],
)
def test_every_command_has_help(lbopt, capsys, command, flags, flag):
    with pytest.raises(SystemExit) as caught:
        lbopt(command, flag)
    assert caught.value.code == 0
    out = capsys.readouterr().out
    assert out.startswith(f"usage: lbopt {command}")
    assert re.findall(r"^  --(\S+)", out, re.MULTILINE) == flags


@pytest.mark.process
def test_the_module_runs_as_a_program():
    done = subprocess.run(
        [sys.executable, "-m", "lbopt", "--help"], capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stderr) == (0, "")
    for command in ("train", "evaluate", "sweep", "report", "recipes", "doctor"):
        assert re.search(rf"^  {command} +\S", done.stdout, re.MULTILINE)


def metrics_of(workdir):
    return {
        line["step"]: line
        for line in map(json.loads, (workdir / "metrics.jsonl").read_text().splitlines())
    }


def test_train_leaves_what_it_says(trained):
    saved = json.loads((trained / "config.json").read_text())
    assert saved["kind"] == "train"
    assert saved["command"].startswith("lbopt train --config=")
    assert saved["config"]["model"]["widths"] == [4]
    assert (saved["num_devices"], saved["device_kind"]) == (1, "cpu")
    assert saved["versions"].keys() >= {"python", "jax", "lbopt", "optax"}
    assert sorted(metrics_of(trained)) == list(range(2, 17, 2))
    assert (trained / "checkpoints" / "16").is_dir()
    assert list((trained / "tensorboard").iterdir())


def evaluated(lbopt, small, trained, *flags):
    code, out, err = lbopt("evaluate", *small, f"--workdir={trained}", *flags)
    assert code == 0, err
    assert out.count("\n") == 1
    return json.loads(out)


@pytest.mark.parametrize(
    ("flags", "step"), [((), 16), (("--checkpoint=latest",), 16), (("--checkpoint=8",), 8)]
)
def test_evaluate_agrees_with_training(lbopt, small, trained, flags, step):
    scores = evaluated(lbopt, small, trained, *flags)
    assert scores["step"] == step
    for name in ("accuracy", "loss"):
        assert scores[f"validation/{name}"] == metrics_of(trained)[step][f"eval/{name}"]
        assert scores[f"test/{name}"] != scores[f"validation/{name}"]
    assert 0 <= scores["test/accuracy"] <= 1


def test_evaluate_takes_the_best(lbopt, small, trained):
    accuracy = {
        step: line["eval/accuracy"]
        for step, line in metrics_of(trained).items()
        if "eval/accuracy" in line
    }
    best = max(accuracy, key=lambda step: (accuracy[step], step))
    scores = evaluated(lbopt, small, trained, "--checkpoint=best")
    assert (scores["step"], scores["validation/accuracy"]) == (best, accuracy[best])


def test_report_is_one_page_with_everything_in_it(lbopt, trained):
    code, out, err = lbopt("report", f"--workdir={trained}")
    assert (code, err) == (0, "")
    assert out == f"{trained / 'report.html'}\n"
    page = (trained / "report.html").read_text()
    assert re.findall(r"https?://|<script|<link[^>]+stylesheet|@import|url\(", page) == []
    sources = re.findall(r"(?:src|href)=\"([^\"]*)", page)
    assert len([source for source in sources if source.startswith("data:image/svg+xml")]) == 5
    assert all(source.startswith(("data:", "#")) for source in sources)
    for name in ("loss", "accuracy", "learning_rate", "trust_ratio", "throughput"):
        content = (trained / f"{name}.png").read_bytes()
        assert content.startswith(b"\x89PNG\r\n")
        width, height = struct.unpack(">II", content[16:24])
        assert min(width, height) > 400
    assert "digits_cnn:lamb-128" in page
    assert "lbopt train --config=" in page

    links = re.findall(r'download="([^"]*)" href="data:[^;]*;base64,([^"]*)"', page)
    files = {name: base64.b64decode(content).decode() for name, content in links}
    assert json.loads(files["config.json"]) == json.loads((trained / "config.json").read_text())
    steps = [int(line["step"]) for line in csv.DictReader(files["metrics.csv"].splitlines())]
    assert steps == list(metrics_of(trained))


def test_the_spaced_form_and_four_devices_by_pmap(lbopt, configs, trained, tmp_path):
    """The same batches on more devices give equal rates and nearly equal losses."""
    flags = [
        "--config.model.widths=(4,)",
        "--config.model.hidden=8",
        "--config.parallel.backend=pmap",
    ]
    config = f"{configs / 'digits_cnn.py'}:smoke"
    code, out, err = lbopt("train", "--config", config, "--workdir", tmp_path / "run", *flags)
    assert code == 0, err
    assert "starting at step 0 of 16, global batch 128, 4 devices" in err
    assert out.splitlines()[-1] == str(tmp_path / "run" / "metrics.jsonl")
    ours = metrics_of(tmp_path / "run")
    theirs = metrics_of(trained)
    assert ours.keys() == theirs.keys()
    for step, line in ours.items():
        assert line["train/learning_rate"] == theirs[step]["train/learning_rate"]
        assert line["train/loss"] == pytest.approx(theirs[step]["train/loss"], rel=1e-4)


def test_of_two_overrides_of_a_field_the_last_counts(refusing, configs, tmp_path):
    """`cnn` limits the number of widths; its refusal shows which value was understood."""
    twice = ["--config.model.hidden=0", "--config.model.hidden=8", "--config.model.widths=(4,)"]
    config = f"--config={configs / 'digits_cnn.py'}:smoke"
    flags = (*twice, "--config.model.widths=(0,)", f"--workdir={tmp_path / 'run'}")
    with refused("config.model.widths", (0,), "value"):
        refusing("train", config, *flags)


@pytest.mark.parametrize("name", ["optuna", "scipy"])
def test_doctor_wants_the_packages_that_lbopt_itself_needs(lbopt, monkeypatch, name):
    versions = workdir.package_versions()
    monkeypatch.setattr(workdir, "package_versions", lambda: {**versions, name: None})
    code, out, _ = lbopt("doctor")
    (line,) = [line for line in out.splitlines() if "versions" in line]
    if name == "optuna":
        assert (code, line.startswith("ok"), name in line) == (0, True, False)
    else:
        assert (code, "scipy: not installed" in line) == (3, True)


def test_doctor_lists_the_extras_that_are_not_installed(lbopt, monkeypatch):
    """Their packages are optional, also those with which a check fails."""
    absent = Packages(("no_such_module",), "figures of another kind")
    monkeypatch.setattr(_doctor, "EXTRAS", {"demo": absent})

    def without_matplotlib():
        raise MissingPackage("matplotlib", reason="pip install 'lbopt[demo]'")

    monkeypatch.setitem(_doctor.CHECKS, "figures", without_matplotlib)
    code, out, err = lbopt("doctor")
    assert (code, err) == (0, "")
    assert re.search(r"^--    figures +optional, matplotlib: pip install", out, re.MULTILINE)
    assert re.search(r"^--    demo +optional, not installed: figures of", out, re.MULTILINE)


def test_every_extra_has_a_purpose():
    """`lbopt doctor` lists the extras of pyproject.toml, but for those that combine others."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    combined = {"data", "test", "bench", "dev", "docs"}
    assert {*EXTRAS, "tpu", "cuda"} == project["optional-dependencies"].keys() - combined
