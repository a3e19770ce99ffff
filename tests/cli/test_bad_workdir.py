"""An unsuitable workdir is refused in one line and left unchanged."""

import fcntl
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys

import pytest
import scipy
from refusal import names_in, numbers_in, refused, troubled

from lbopt.cli import load_config
from lbopt.cli._evaluate import UNUSED_BY_EVALUATION
from lbopt.cli._train import comparison
from lbopt.config import SweepConfig, TrainConfig, config_to_json
from lbopt.errors import NO_VALUE
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
def refusing(refusing, fingerprint, tmp_path):
    """Return a function that runs a refused command, and checks that it leaves all files alone."""

    def run(*arguments):
        before = fingerprint(tmp_path)
        try:
            refusing(*arguments)
        finally:
            assert fingerprint(tmp_path) == before

    return run


@pytest.mark.parametrize("command", ["train", "evaluate"])
@pytest.mark.parametrize(
    ("override", "field", "there", "here"),
    [
        ("seed=1", "seed", "0", "1"),
        ("optimizer.b1=0.8", "optimizer.b1", "0.9", "0.8"),
        (
            "optimizer.trust_ratio_bounds=(0.0,9.0)",
            "optimizer.trust_ratio_bounds",
            "None",
            "[0.0, 9.0]",
        ),
        ("optimizer.max_grad_norm=1.0", "optimizer.max_grad_norm", "None", "1.0"),
    ],
)
def test_a_run_of_another_config(command, override, field, there, here, refusing, small, workdir):
    with refused("--workdir", str(workdir), "exists") as caught:
        refusing(command, *small, f"--config.{override}", f"--workdir={workdir}")
    assert_differs(caught, field, there, here)


def assert_differs(caught, field, there, here):
    """Check that a refusal has a field, and then its values there and here."""
    parts = (rf"\b{re.escape(field)}", re.escape(there), re.escape(here))
    assert re.search(r" .*?".join(parts), caught.value.reason), caught.value


def test_a_study_of_another_config(refusing, study):
    flags, folder = study
    with refused("--workdir", str(folder), "exists") as caught:
        refusing("sweep", *flags, "--config.search.seeds=(5,)", f"--workdir={folder}")
    assert_differs(caught, "search.seeds", "[0]", "[5]")


def test_a_study_whose_candidates_were_drawn_by_another_version(refusing, study):
    flags, folder = study
    file = folder / "config.json"
    saved = json.loads(file.read_text())
    saved["config"]["search"]["method"] = "halton"
    saved["versions"]["scipy"] = "1.0.0"
    file.write_text(json.dumps(saved))
    with refused("--workdir", str(folder), "exists") as caught:
        refusing("sweep", *flags, "--config.search.method=halton", f"--workdir={folder}")
    assert_differs(caught, "scipy", "1.0.0", scipy.__version__)
    assert caught.value.reason.count("1.0.0") == 2  # there, and to install


@pytest.mark.parametrize("command", ["sweep", "report"])
def test_lines_of_another_study(command, refusing, study):
    flags, folder = study
    values = {**dict.fromkeys(REQUIRED, 1), "arm": "ours", "phase": "search"}
    (folder / "results.jsonl").write_text(json.dumps({"study": "mnist_limit", **values}) + "\n")
    with refused("--workdir", str(folder), "exists") as caught:
        refusing(command, *(flags if command == "sweep" else []), f"--workdir={folder}")
    assert numbers_in(caught) == [1]
    assert {"results.jsonl", "mnist_limit", "digits_limit"} <= names_in(caught)


@pytest.mark.parametrize("command", ["train", "evaluate"])
def test_a_study_is_no_run(command, refusing, small, study):
    with refused("--workdir", str(study[1]), "mismatch"):
        refusing(command, *small, f"--workdir={study[1]}")


def test_a_run_is_no_study(refusing, study, workdir):
    with refused("--workdir", str(workdir), "mismatch"):
        refusing("sweep", *study[0], f"--workdir={workdir}")


@pytest.mark.parametrize("command", ["train", "sweep"])
def test_a_folder_of_something_else(command, refusing, small, study, tmp_path):
    folder = tmp_path / "home"
    folder.mkdir()
    (folder / "diary.txt").write_text("mine")
    flags = small if command == "train" else study[0]
    with refused("--workdir", str(folder), "exists") as caught:
        refusing(command, *flags, f"--workdir={folder}")
    assert "config.json" in names_in(caught)


@pytest.mark.parametrize(
    "content",
    ["", "{", "[]", "3", "{}", '{"kind": "train"}'],
)
@pytest.mark.parametrize("command", ["train", "evaluate", "report"])
def test_a_damaged_config_json(command, content, refusing, small, workdir):
    (workdir / "config.json").write_text(content)
    flags = [] if command == "report" else small
    with troubled("--workdir", NO_VALUE, "damaged") as caught:
        refusing(command, *flags, f"--workdir={workdir}")
    assert str(workdir / "config.json") in names_in(caught)


def test_a_report_of_an_unknown_kind_of_workdir(refusing, workdir):
    (workdir / "config.json").write_text('{"kind": "dream", "config": {}}')
    with troubled("--workdir", NO_VALUE, "damaged") as caught:
        refusing("report", f"--workdir={workdir}")
    assert str(workdir / "config.json") in names_in(caught)


def test_a_config_json_that_is_not_text(refusing, small, workdir):
    (workdir / "config.json").write_bytes(b"\xff\xfe\x00")
    with troubled("--workdir", NO_VALUE, "damaged") as caught:
        refusing("train", *small, f"--workdir={workdir}")
    assert str(workdir / "config.json") in names_in(caught)


@pytest.mark.parametrize("content", ["not json\n", '{"loss": 1}\n', "\x00\x00\x00\n"])
@pytest.mark.parametrize("command", ["train", "report"])
def test_damaged_metrics(command, content, refusing, small, workdir):
    """After a power failure, for instance, a whole line may be damaged."""
    with open(workdir / "metrics.jsonl", "a") as stream:
        stream.write(content)
    flags = [] if command == "report" else small
    with troubled(str(workdir / "metrics.jsonl"), NO_VALUE, "damaged"):
        refusing(command, *flags, f"--workdir={workdir}")


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
def test_a_place_where_nothing_can_be_written(command, place, refusing, small, study, tmp_path):
    folder = place(tmp_path)
    flags = small if command == "train" else study[0]
    with troubled("--workdir", str(folder), "resource"):
        refusing(command, *flags, f"--workdir={folder}")


@pytest.mark.parametrize("command", ["evaluate", "report"])
@pytest.mark.parametrize("place", ["missing", "empty"])
def test_no_run_there(command, place, refusing, small, tmp_path):
    (tmp_path / "empty").mkdir()
    flags = [] if command == "report" else small
    with refused("--workdir", str(tmp_path / place), "missing") as caught:
        refusing(command, *flags, f"--workdir={tmp_path / place}")
    assert "lbopt train" in caught.value.reason  # a command to type


def test_a_report_of_a_run_that_has_not_logged(refusing, workdir):
    (workdir / "metrics.jsonl").unlink()
    with refused("--workdir", str(workdir), "missing") as caught:
        refusing("report", f"--workdir={workdir}")
    assert "metrics" in names_in(caught)


def test_a_report_of_a_study_without_results(refusing, study):
    with refused("--workdir", str(study[1]), "missing"):
        refusing("report", f"--workdir={study[1]}")


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
def test_an_unknown_checkpoint(which, refusing, small, workdir):
    with refused("--checkpoint", which, "missing"):
        refusing("evaluate", *small, f"--workdir={workdir}", f"--checkpoint={which}")


@pytest.mark.parametrize("command", ["train", "evaluate"])
def test_unreadable_checkpoints(command, refusing, small, workdir):
    newest = workdir / "checkpoints" / "16"
    for file in workdir.rglob("checkpoints/*/default/d/*"):
        file.write_bytes(b"")
    with troubled(str(newest), NO_VALUE, "damaged") as caught:
        refusing(command, *small, f"--workdir={workdir}")
    assert numbers_in(caught)[-1] == 12  # the step before


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
def test_a_workdir_in_which_another_process_is_at_work(command, refusing, small, workdir, study):
    flags, folder = (small, workdir) if command == "train" else study
    holder = "import fcntl, os, sys; folder = os.open(sys.argv[1], os.O_RDONLY);"
    holder += "fcntl.flock(folder, fcntl.LOCK_EX); print(flush=True); input()"
    with subprocess.Popen(
        [sys.executable, "-c", holder, str(folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as other:
        other.stdout.readline()
        with refused("--workdir", str(folder), "conflict"):
            refusing(command, *flags, f"--workdir={folder}")
        other.stdin.write(b"\n")


def test_a_folder_where_the_metrics_should_be(refusing, workdir):
    (workdir / "metrics.jsonl").unlink()
    (workdir / "metrics.jsonl").mkdir()
    with troubled(str(workdir / "metrics.jsonl"), NO_VALUE, "resource"):
        refusing("report", f"--workdir={workdir}")


def test_a_folder_where_the_page_should_be(lbopt, workdir):
    (workdir / "report.html").unlink(missing_ok=True)  # an earlier test of `lbopt report` wrote it
    (workdir / "report.html").mkdir()
    code, _, err = lbopt("report", f"--workdir={workdir}")
    assert (code, err.count("\n")) == (3, 1)
    assert err.startswith(f"lbopt report: {workdir / 'report.html'}: ")


def test_metrics_that_are_gone_from_a_finished_run(lbopt, small, workdir):
    (workdir / "metrics.jsonl").unlink()
    code, _, err = lbopt("train", *small, f"--workdir={workdir}")
    assert (code, err.count("Traceback")) == (0, 0)


def test_other_microsteps_are_another_run(refusing, small, workdir):
    flag = "--config.parallel.num_microsteps=2"
    with refused("--workdir", str(workdir), "exists") as caught:
        refusing("train", *small, flag, f"--workdir={workdir}")
    assert_differs(caught, "parallel.num_microsteps", "1", "2")


def test_evaluation_writes_nothing(lbopt, small, workdir, fingerprint, tmp_path):
    before = fingerprint(tmp_path)
    assert lbopt("evaluate", *small, f"--workdir={workdir}")[0] == 0
    assert fingerprint(tmp_path) == before


def test_evaluation_before_the_first_checkpoint(refusing, small, workdir):
    shutil.rmtree(workdir / "checkpoints")
    with refused("--workdir", str(workdir), "missing") as caught:
        refusing("evaluate", *small, f"--workdir={workdir}")
    assert "checkpoint" in names_in(caught)


# Damage of config.json, and the place that the refusal names.
DAMAGE = {
    "no devices": (lambda saved: saved.pop("num_devices"), "num_devices"),
    "an empty restart": (lambda saved: saved.update(resumed=[{}]), "resumed[0]"),
    "restarts of another type": (lambda saved: saved.update(resumed=[3]), "resumed[0]"),
    "no versions": (lambda saved: saved.update(versions={}), "versions"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_config_json_that_somebody_edited(damage, refusing, workdir):
    change, place = DAMAGE[damage]
    saved = json.loads((workdir / "config.json").read_text())
    change(saved)
    (workdir / "config.json").write_text(json.dumps(saved))
    with troubled("--workdir", NO_VALUE, "damaged") as caught:
        refusing("report", f"--workdir={workdir}")
    assert str(workdir / "config.json") in names_in(caught)
    assert place in caught.value.reason


@pytest.mark.parametrize("command", ["train", "evaluate"])
def test_a_workdir_whose_name_is_no_text(command, refusing, small, tmp_path):
    with refused("--workdir", f"{tmp_path}/run\udcff", "value"):
        refusing(command, *small, f"--workdir={tmp_path}/run\udcff")


def test_a_current_folder_that_is_gone(refusing, small, tmp_path, monkeypatch):
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    with troubled("current folder", NO_VALUE, "missing"):
        refusing("train", *small, "--workdir=run")


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


def test_a_study_of_single_candidates_may_go_on_with_any_budget_beyond_its_edges(configs):
    """Studies of earlier versions have no budget; a search of one candidate has no use for it."""
    from lbopt.cli import _sweep

    flag = f"{configs / 'sweeps' / 'waterfall_digits.py'}"
    config = load_config(flag, [], SweepConfig)
    saved = {"config": config_to_json(config), "versions": {}}
    as_it_is = [arm["search"] for arm in saved["config"]["arms"] if arm["search"]]
    assert {search.pop("widen_candidates") for search in as_it_is} == {4}
    assert _sweep.study_differences(config, saved) == []
    saved["config"]["search"]["widen_candidates"] = 3
    as_it_is[0]["learning_rate_factors"] = [2.0]
    assert _sweep.study_differences(config, saved) == [
        "arms[0].search.learning_rate_factors is [2.0] there and [1.0] here",
        "search.widen_candidates is 3 there and 0 here",
    ]


def test_studies_that_differ_say_where_in_short(refusing, study, configs):
    flags, folder = study
    changes = ["--config.train.model.hidden=8", "--config.limit_points=2.0"]
    with refused("--workdir", str(folder), "exists") as caught:
        refusing("sweep", *flags, *changes, f"--workdir={folder}")
    assert_differs(caught, "limit_points", "1.0", "2.0")
    assert_differs(caught, "train.model.hidden", "64", "8")
    other = [f"--config={configs / 'sweeps' / 'diffusion_digits.py'}:smoke"]
    with refused("--workdir", str(folder), "exists") as caught:
        refusing("sweep", *other, f"--workdir={folder}")
    assert_differs(caught, "name", "'digits_limit:smoke'", "'diffusion_digits:smoke'")
    assert len(str(caught.value)) < 600


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
def test_a_fifo_in_the_place_of_a_file(name, refusing, lbopt, small, workdir):
    """Opening a FIFO to read would wait forever for a writer."""
    (workdir / name).unlink()
    os.mkfifo(workdir / name)
    if "/" in name:
        code, _, err = lbopt("evaluate", *small, f"--workdir={workdir}")
        assert code == 0, err
        assert "FIFO" in err
        assert "going back to step 12" in err
    else:
        field = "--workdir" if name == "config.json" else str(workdir / name)
        with troubled(field, NO_VALUE, "resource") as caught:
            refusing("report", f"--workdir={workdir}")
        assert "FIFO" in names_in(caught)
        assert str(workdir / name) in str(caught.value)


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


def test_an_evaluation_may_have_other_groups_of_batch_norm(configs):
    """With one group, the running statistics have no first one to come from."""
    saved, ours = (
        load_config(
            f"{configs / 'resnet50_lamb.py'}:32768",
            [f"--config.model.{field}" for field in fields],
            TrainConfig,
        )
        for fields in (
            ("batch_norm_scope=local", "batch_norm_running_from=first"),
            ("batch_norm_scope=global",),
        )
    )
    saved = {"config": config_to_json(saved)}
    assert comparison(ours, UNUSED_BY_EVALUATION)(saved) == []
    assert comparison(ours)(saved) != []


OVER = "aggregator.over=slices"
LOCAL = "diloco.every=8"


@pytest.mark.parametrize(
    ("fields", "may_differ"),
    [
        ((), True),
        ((LOCAL,), True),
        ((LOCAL, OVER, "aggregator.name=mean"), True),
        ((LOCAL, OVER, "aggregator.name=powersgd"), True),
        ((LOCAL, OVER, "aggregator.name=ef"), False),
        ((LOCAL, "aggregator.over=2", "aggregator.name=ef"), True),
        (("model.name=mine.py:Net",), True),
        (("model.name=mine.py:Net", "aggregator.name=mean"), False),
        (("model.name=mine.py:Net", LOCAL), False),
    ],
    ids=lambda value: ",".join(value) if isinstance(value, tuple) else "",
)
def test_the_number_of_devices_stays_where_updates_depend_on_it(configs, fields, may_differ):
    flags = [f"--config.{field}" for field in fields]
    config = load_config(f"{configs / 'digits_cnn.py'}:adam-64", flags, TrainConfig)
    saved = {"config": config_to_json(config), "num_devices": 4}
    assert comparison(config, num_devices=4)(saved) == []
    assert (comparison(config, num_devices=8)(saved) == []) == may_differ
