"""An unsuitable workdir is refused in one line and left unchanged."""

import fcntl
import json
import os
import pathlib
import shutil
import subprocess
import sys

import pytest

from lbopt.cli import load_config
from lbopt.config import SweepConfig, config_to_json
from lbopt.sweep._results import REQUIRED
from lbopt.workdir import open_workdir


@pytest.fixture
def workdir(trained, tmp_path):
    """Return a copy of a finished run."""
    return shutil.copytree(trained, tmp_path / "run")


@pytest.fixture
def study(configs, tmp_path):
    """Return the flags of a study and a workdir that belongs to it."""
    flag = f"{configs / 'sweeps' / 'digits_limit.py'}:smoke"
    config = load_config(flag, [], SweepConfig)
    with open_workdir(
        tmp_path / "study", "sweep", config_to_json(config), lambda saved: []
    ) as folder:
        pass
    return [f"--config={flag}", "--config.num_workers=1"], folder


@pytest.fixture
def refused(lbopt, fingerprint, tmp_path):
    """Return a function that runs a command, checks its one-line refusal, and returns the line."""

    def run(expected, *arguments):
        before = fingerprint(tmp_path)
        code, out, err = lbopt(*arguments)
        assert code == expected, err
        assert err.startswith(f"lbopt {arguments[0]}: "), err
        assert err.count("\n") == 1, err
        assert "Traceback" not in err
        assert out == ""
        assert fingerprint(tmp_path) == before
        return err

    return run


@pytest.mark.parametrize("command", ["train", "evaluate"])
@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("seed=1", "seed is 0 there and 1 here"),
        ("optimizer.b1=0.8", "optimizer.b1 is 0.9 there and 0.8 here"),
        (
            "optimizer.trust_ratio_bounds=(0.0,9.0)",
            "optimizer.trust_ratio_bounds is None there and [0.0, 9.0] here",
        ),
        ("optimizer.max_grad_norm=1.0", "optimizer.max_grad_norm is None there and 1.0 here"),
    ],
)
def test_a_run_of_another_config(command, override, said, refused, small, workdir):
    err = refused(2, command, *small, f"--config.{override}", f"--workdir={workdir}")
    assert str(workdir) in err
    assert said in err
    assert "use another workdir" in err


def test_a_study_of_another_config(refused, study):
    flags, folder = study
    err = refused(2, "sweep", *flags, "--config.search.seeds=(5,)", f"--workdir={folder}")
    assert "search.seeds is [0] there and [5] here" in err


def test_a_study_whose_candidates_were_drawn_by_another_version(refused, study):
    flags, folder = study
    file = folder / "config.json"
    saved = json.loads(file.read_text())
    saved["config"]["search"]["method"] = "halton"
    saved["versions"]["scipy"] = "1.0.0"
    file.write_text(json.dumps(saved))
    err = refused(2, "sweep", *flags, "--config.search.method=halton", f"--workdir={folder}")
    assert "scipy is 1.0.0 there and " in err
    assert "install 1.0.0" in err


@pytest.mark.parametrize("command", ["sweep", "report"])
def test_lines_of_another_study(command, refused, study):
    flags, folder = study
    values = {**dict.fromkeys(REQUIRED, 1), "arm": "ours", "phase": "search"}
    (folder / "results.jsonl").write_text(json.dumps({"study": "mnist_limit", **values}) + "\n")
    err = refused(2, command, *(flags if command == "sweep" else []), f"--workdir={folder}")
    assert (
        "line 1 of results.jsonl is of the study 'mnist_limit', not of 'digits_limit:smoke'" in err
    )


@pytest.mark.parametrize("command", ["train", "evaluate"])
def test_a_study_is_no_run(command, refused, small, study):
    err = refused(2, command, *small, f"--workdir={study[1]}")
    assert f"'{study[1]}': it holds a sweep, not a training run" in err


def test_a_run_is_no_study(refused, study, workdir):
    err = refused(2, "sweep", *study[0], f"--workdir={workdir}")
    assert f"'{workdir}': it holds a training run, not a sweep" in err


@pytest.mark.parametrize("command", ["train", "sweep"])
def test_a_folder_of_something_else(command, refused, small, study, tmp_path):
    folder = tmp_path / "home"
    folder.mkdir()
    (folder / "diary.txt").write_text("mine")
    flags = small if command == "train" else study[0]
    assert "is not empty and holds no config.json" in refused(
        2, command, *flags, f"--workdir={folder}"
    )


@pytest.mark.parametrize(
    "content",
    ["", "{", "[]", "3", "{}", '{"kind": "train"}'],
)
@pytest.mark.parametrize("command", ["train", "evaluate", "report"])
def test_a_damaged_config_json(command, content, refused, small, workdir):
    (workdir / "config.json").write_text(content)
    flags = [] if command == "report" else small
    assert "config.json" in refused(3, command, *flags, f"--workdir={workdir}")


def test_a_report_of_an_unknown_kind_of_workdir(refused, workdir):
    (workdir / "config.json").write_text('{"kind": "dream", "config": {}}')
    assert "config.json" in refused(3, "report", f"--workdir={workdir}")


def test_a_config_json_that_is_not_text(refused, small, workdir):
    (workdir / "config.json").write_bytes(b"\xff\xfe\x00")
    assert "config.json" in refused(3, "train", *small, f"--workdir={workdir}")


@pytest.mark.parametrize("content", ["not json\n", '{"loss": 1}\n', "\x00\x00\x00\n"])
@pytest.mark.parametrize("command", ["train", "report"])
def test_damaged_metrics(command, content, refused, small, workdir):
    """After a power failure, for instance, a whole line may be damaged."""
    with open(workdir / "metrics.jsonl", "a") as stream:
        stream.write(content)
    flags = [] if command == "report" else small
    assert "metrics.jsonl" in refused(3, command, *flags, f"--workdir={workdir}")


def below_a_file(tmp_path):
    (tmp_path / "file").write_text("a file")
    return tmp_path / "file" / "run"


def a_file(tmp_path):
    (tmp_path / "file").write_text("a file")
    return tmp_path / "file"


def nowhere(tmp_path):
    if not sys.platform.startswith("linux"):
        pytest.skip("needs /proc")
    return pathlib.Path("/proc/lbopt-nowhere")


@pytest.mark.parametrize("command", ["train", "sweep"])
@pytest.mark.parametrize("place", [below_a_file, a_file, nowhere])
def test_a_place_where_nothing_can_be_written(command, place, refused, small, study, tmp_path):
    folder = place(tmp_path)
    flags = small if command == "train" else study[0]
    err = refused(3, command, *flags, f"--workdir={folder}")
    assert f"'{folder}': cannot be written" in err


@pytest.mark.parametrize("command", ["evaluate", "report"])
@pytest.mark.parametrize("place", ["missing", "empty"])
def test_no_run_there(command, place, refused, small, tmp_path):
    (tmp_path / "empty").mkdir()
    flags = [] if command == "report" else small
    err = refused(2, command, *flags, f"--workdir={tmp_path / place}")
    assert str(tmp_path / place) in err
    assert "run lbopt train" in err


def test_a_report_of_a_run_that_has_not_logged(refused, workdir):
    (workdir / "metrics.jsonl").unlink()
    assert "no metrics yet" in refused(2, "report", f"--workdir={workdir}")


def test_a_report_of_a_study_without_results(refused, study):
    assert str(study[1]) in refused(2, "report", f"--workdir={study[1]}")


@pytest.mark.parametrize(
    "which",
    [
        "newest",
        "3",
        "-8",
        "1e1",
        "\u00b2",
    ],
)
def test_an_unknown_checkpoint(which, refused, small, workdir):
    err = refused(2, "evaluate", *small, f"--workdir={workdir}", f"--checkpoint={which}")
    assert f"--checkpoint = '{which}'" in err


@pytest.mark.parametrize("command", ["train", "evaluate"])
def test_unreadable_checkpoints(command, refused, small, workdir):
    newest = workdir / "checkpoints" / "16"
    for file in workdir.rglob("checkpoints/*/default/d/*"):
        file.write_bytes(b"")
    err = refused(3, command, *small, f"--workdir={workdir}")
    assert f"{newest}: this checkpoint cannot be read" in err
    assert "remove that folder to resume at step 12" in err


def test_what_may_change_between_two_starts(lbopt, small, workdir):
    before = json.loads((workdir / "config.json").read_text())
    changes = ["--config.parallel.num_devices=2", "--config.about.status=measured here"]
    code, _, err = lbopt("train", *small, *changes, f"--workdir={workdir}")
    assert code == 0, err
    assert "complete at step 16 of 16" in err
    after = json.loads((workdir / "config.json").read_text())
    assert [start["num_devices"] for start in after.pop("resumed")] == [2]
    assert after == before


@pytest.mark.process
@pytest.mark.parametrize("command", ["train", "sweep"])
def test_a_workdir_in_which_another_process_is_at_work(command, refused, small, workdir, study):
    flags, folder = (small, workdir) if command == "train" else study
    holder = "import fcntl, os, sys; folder = os.open(sys.argv[1], os.O_RDONLY);"
    holder += "fcntl.flock(folder, fcntl.LOCK_EX); print(flush=True); input()"
    with subprocess.Popen(
        [sys.executable, "-c", holder, str(folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as other:
        other.stdout.readline()
        assert "another process is at work there" in refused(
            2, command, *flags, f"--workdir={folder}"
        )
        other.stdin.write(b"\n")


def test_a_folder_where_the_metrics_should_be(refused, workdir):
    (workdir / "metrics.jsonl").unlink()
    (workdir / "metrics.jsonl").mkdir()
    assert "metrics.jsonl" in refused(3, "report", f"--workdir={workdir}")


def test_a_folder_where_the_page_should_be(lbopt, workdir):
    (workdir / "report.html").unlink(missing_ok=True)  # an earlier test of `lbopt report` wrote it
    (workdir / "report.html").mkdir()
    code, _, err = lbopt("report", f"--workdir={workdir}")
    assert (code, err.count("\n")) == (3, 1)
    assert "report.html: cannot be written" in err


def test_metrics_that_are_gone_from_a_finished_run(lbopt, small, workdir):
    (workdir / "metrics.jsonl").unlink()
    code, _, err = lbopt("train", *small, f"--workdir={workdir}")
    assert (code, err.count("Traceback")) == (0, 0)


def test_other_microsteps_are_another_run(refused, small, workdir):
    flag = "--config.parallel.num_microsteps=2"
    assert "num_microsteps is 1 there and 2 here" in refused(
        2, "train", *small, flag, f"--workdir={workdir}"
    )


def test_evaluation_writes_nothing(lbopt, small, workdir, fingerprint, tmp_path):
    before = fingerprint(tmp_path)
    assert lbopt("evaluate", *small, f"--workdir={workdir}")[0] == 0
    assert fingerprint(tmp_path) == before


def test_evaluation_before_the_first_checkpoint(refused, small, workdir):
    shutil.rmtree(workdir / "checkpoints")
    assert "no checkpoint is there yet" in refused(2, "evaluate", *small, f"--workdir={workdir}")


DAMAGE = {
    "no devices": lambda saved: saved.pop("num_devices"),
    "an empty restart": lambda saved: saved.update(resumed=[{}]),
    "restarts of another type": lambda saved: saved.update(resumed=[3]),
    "no versions": lambda saved: saved.update(versions={}),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_config_json_that_somebody_edited(damage, refused, workdir):
    saved = json.loads((workdir / "config.json").read_text())
    DAMAGE[damage](saved)
    (workdir / "config.json").write_text(json.dumps(saved))
    assert "is not a config.json of lbopt" in refused(3, "report", f"--workdir={workdir}")


@pytest.mark.parametrize("command", ["train", "evaluate"])
def test_a_workdir_whose_name_is_no_text(command, refused, small, tmp_path):
    assert "not UTF-8" in refused(2, command, *small, f"--workdir={tmp_path}/run\udcff")


def test_a_current_folder_that_is_gone(lbopt, small, tmp_path, monkeypatch):
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    code, _, err = lbopt("train", *small, "--workdir=run")
    assert (code, err.count("\n")) == (3, 1)
    assert "current folder" in err


@pytest.mark.process
@pytest.mark.everyday("train-foo")
@pytest.mark.parametrize("platform", ["foo", "cuda"])
@pytest.mark.parametrize("command", ["train", "evaluate", "sweep"])
def test_a_platform_that_is_not_there(command, platform, study, small, tmp_path):
    flags = study[0] if command == "sweep" else small
    done = subprocess.run(
        [sys.executable, "-m", "lbopt", command, *map(str, flags), f"--workdir={tmp_path / 'new'}"],
        env={**os.environ, "JAX_PLATFORMS": platform},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 3, done.stderr
    refusal = f"lbopt {command}: JAX_PLATFORMS = {platform!r}: "
    assert done.stderr.splitlines()[-1].startswith(refusal)
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "new").exists()


def test_a_study_may_go_on_where_its_data_lie_elsewhere(lbopt, study):
    """The workdir keeps the study's whole config."""
    from lbopt.cli import _sweep

    config = config_to_json(load_config(study[0][0].removeprefix("--config="), [], SweepConfig))
    before = config_to_json(load_config(study[0][0].removeprefix("--config="), [], SweepConfig))
    moved = {
        **config,
        "train": {**config["train"], "data": {**config["train"]["data"], "data_dir": "/elsewhere"}},
    }
    assert _sweep._core(config) == _sweep._core(moved)
    assert config == before


def test_studies_that_differ_say_where_in_short(refused, study, configs):
    flags, folder = study
    err = refused(
        2,
        "sweep",
        *flags,
        "--config.train.model.hidden=8",
        "--config.limit_points=2.0",
        f"--workdir={folder}",
    )
    assert (
        "limit_points is 1.0 there and 2.0 here; train.model.hidden is 64 there and 8 here" in err
    )
    other = [f"--config={configs / 'sweeps' / 'diffusion_digits.py'}:smoke"]
    err = refused(2, "sweep", *other, f"--workdir={folder}")
    assert "name is 'digits_limit:smoke' there and 'diffusion_digits:smoke' here" in err
    assert len(err) < 600


@pytest.mark.parametrize(
    "name",
    [
        "config.json",
        "metrics.jsonl",
        "checkpoints/16/seal/metadata",
        "checkpoints/16/default/_METADATA",
        "checkpoints/16/_CHECKPOINT_METADATA",
    ],
)
def test_a_fifo_in_the_place_of_a_file(name, refused, lbopt, small, workdir):
    """Opening a FIFO to read would wait forever for a writer."""
    (workdir / name).unlink()
    os.mkfifo(workdir / name)
    if "/" in name:
        code, _, err = lbopt("evaluate", *small, f"--workdir={workdir}")
        assert code == 0, err
        assert "a FIFO, not a regular file" in err
        assert "going back to step 12" in err
    else:
        assert "a FIFO, not a regular file" in refused(3, "report", f"--workdir={workdir}")


def test_what_killed_processes_have_left_is_removed(lbopt, small, workdir):
    """Files in use, young files, and users' files of similar names stay."""
    ours = [".summary.json.99", ".config.json.1", ".loss.png.4194304", f".seen-by-all-{'0' * 32}"]
    others = [".held.json.7", ".notes.txt.bak", ".env.12", "summary.json.99", ".profile"]
    for name in [*ours, *others]:
        (workdir / name).write_text("{")
        os.utime(workdir / name, (0, 0))
    (workdir / ".young.json.5").write_text("{")
    with open(workdir / ".held.json.7") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        assert lbopt("train", *small, f"--workdir={workdir}")[0] == 0
        assert [name for name in ours if (workdir / name).exists()] == []
        assert [name for name in [*others, ".young.json.5"] if not (workdir / name).exists()] == []
    os.utime(workdir / ".young.json.5", (0, 0))
    assert lbopt("report", f"--workdir={workdir}")[0] == 0
    assert not (workdir / ".young.json.5").exists()
