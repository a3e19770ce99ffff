"""`lbopt plan`: its table, file, comparisons and suggestions; wrong input ends before compiling."""

import importlib.util
import json
import pathlib

import pytest

pytestmark = [
    pytest.mark.tpu_compiler,
    pytest.mark.skipif(
        importlib.util.find_spec("libtpu") is None, reason="libtpu has no wheel for this machine"
    ),
    pytest.mark.usefixtures("cache_afterwards"),
]
PLANNED = pathlib.Path(__file__).parents[1] / "plan" / "planned.py"
CONFIG = f"--config={PLANNED}:cnn"


def test_a_plan_is_printed_and_written(lbopt, tmp_path):
    file = tmp_path / "plan.json"
    code, out, err = lbopt("plan", CONFIG, "--topology=v3:1x1", f"--output={file}", "--breakdown")
    assert code == 0
    assert err.splitlines() == compiled("v3:1x1")
    for said in (
        "fits: needs",
        "of 15.48 a device",
        "all-reduce",
        "gradients",
        "ten costliest",
        "examples/s a host",
        "assumptions",
    ):
        assert said in out
    assert f"{PLANNED}:cnn on v3:1x1: 2 x TPU v3, 1 hosts" in out
    written = json.loads(file.read_text())
    assert written["fits"]
    assert (written["topology"], written["num_devices"], written["steps"]) == ("v3:1x1", 2, 782)
    evaluation = written["phases"][0]["evaluation"]
    assert (evaluation["batches"], evaluation["times"]) == (10, 16)
    seconds = 782 * (written["compute_seconds_per_step"] + written["collective_seconds_per_step"])
    assert written["projected_seconds"] == pytest.approx(
        seconds + 160 * evaluation["seconds_per_batch"], rel=0.01
    )


def compiled(where):
    """Return the lines about the programs of one topology."""
    return [f"compiling the {what} for {where} ..." for what in ("training step", "evaluation")]


@pytest.mark.slow
def test_topologies_and_fields_are_compared(lbopt):
    other = "v5e:1x1 parallel.reduce_dtype=float32"
    code, out, err = lbopt("plan", CONFIG, "--topology=v3:1x1", f"--compare={other}")
    assert code == 0
    assert err.splitlines() == [*compiled("v3:1x1"), *compiled("v5e:1x1")]
    columns = [line for line in out.splitlines() if line.startswith(("v3:1x1", "v5e:1x1"))]
    assert [line.split("  ")[0] for line in columns] == ["v3:1x1", other]


@pytest.mark.slow
def test_a_run_that_does_not_fit_ends_in_suggestions(lbopt):
    code, out, _ = lbopt(
        "plan",
        CONFIG,
        "--topology=v3:1x1",
        "--config.global_batch_size=49152",
        "--config.model.widths=(32,64)",
        "--config.model.dtype=float32",
        "--config.parallel.shard_update=True",
        "--evaluation=false",
    )
    assert code == 0
    assert "DOES NOT FIT: needs 19." in out
    assert "accumulation x2" in out
    assert "--config.parallel.num_microsteps=2" in out


@pytest.mark.parametrize(
    ("flags", "field"),
    [
        (["--topology=v3:3x5"], "--topology = 'v3:3x5': the compiler knows no such slice"),
        (["--topology=v3:0x16"], "--topology = 'v3:0x16': v3 has 2 axes of 1 or more chips"),
        (
            ["--topology=v3:1000x1000"],
            "--topology = 'v3:1000x1000': v3 has 2 axes of 1 or more chips and up to 4,096",
        ),
        (["--topology=v4:4x4"], "--topology = 'v4:4x4': v4 has 3 axes"),
        (
            ["--topology=v6e:2x2x2"],
            "--topology = 'v6e:2x2x2': v6e has 2 axes of 1 or more chips and up to 256",
        ),
        (["--topology=v3:2x2x2x2"], "--topology = 'v3:2x2x2x2': use GENERATION"),
        (["--topology=gpu"], "--topology = 'gpu': use GENERATION"),
        ([], "--topology"),
        (["--config.global_batch_size=60"], "config.global_batch_size = 60"),
        (["--config.parallel.backend=pmap"], "config.parallel.backend = 'pmap'"),
        (["--config.parallel.num_devices=9"], "config.parallel.num_devices = 9"),
        (["--output=/nowhere/plan.json"], "--output = '/nowhere/plan.json'"),
        (["--output=/"], "--output = '/'"),
        (["--breakdown=some"], "--breakdown = 'some'"),
        (["--compare=v3:2x2 v3:4x4"], "--compare = 'v3:2x2 v3:4x4'"),
        (["--compare=v3:4x4, model.rematt=layer"], "--config.model.rematt"),
        (["--compare=v3:4x5"], "--compare = 'v3:4x5'"),
        (
            ["--topology=v3:4x4", "--config.model.batch_norm_scope=tiles:2x2"],
            "config.model.batch_norm_scope = 'tiles:2x2'",
        ),
        (["--config.parallel.reduce_scatter=True"], "config.parallel.reduce_scatter = True"),
        (["--config.parallel.reduce_dtype=float16"], "config.parallel.reduce_dtype = 'float16'"),
    ],
)
def test_what_is_wrong_is_one_line(lbopt, monkeypatch, flags, field):
    from lbopt.plan import _make

    monkeypatch.setattr(_make, "cost_of", lambda *_: pytest.fail("something was compiled"))
    if flags and not flags[0].startswith("--topology"):
        flags = ["--topology=v3:2x2", *flags]
    code, out, err = lbopt("plan", CONFIG, *flags)
    assert code == 2, err
    place, _, rule = field.partition(": ")
    assert err.startswith(f"lbopt plan: {place}: {rule}")
    assert len(err.splitlines()) == 1
    assert out == ""


def test_a_study_of_trials_on_one_device_has_no_plan(lbopt, configs):
    code, _, err = lbopt("plan", f"--config={configs}/sweeps/digits_limit.py", "--topology=v3:2x2")
    assert code == 2
    assert "config.trial_devices = 'one'" in err
    assert len(err.splitlines()) == 1


@pytest.mark.slow
def test_a_study_over_a_pod_is_planned_cell_by_cell(lbopt, configs, tmp_path, monkeypatch):
    """The larger of two batch sizes is accumulated; three short runs cost as much as a full one."""
    from lbopt.plan import StepCost, _make

    cost = StepCost(True, 2**30, 1.0, seconds=0.5, flops=1.0)
    monkeypatch.setattr(_make, "cost_of", lambda *_: cost)
    study = "--config=" + str(configs / "sweeps/imagenet_limit.py")
    arms = [
        "--config.global_batch_sizes=(4096,262144)",
        "--config.final_seeds=(7,8)",
        "--config.search.num_candidates=3",
    ]
    flags = [
        "--config.search.min_fidelity=0.333",
        f"--output={tmp_path / 'plan.json'}",
        "--topology=v3:16x32",
    ]
    monkeypatch.setenv("LBOPT_PLAN_CHILD", "1")
    code, out, err = lbopt("plan", study, *arms, *flags)
    assert code == 0, err
    written = json.loads((tmp_path / "plan.json").read_text())
    assert [
        (cell["global_batch_size"], cell["num_microsteps"], cell["run"]["steps"])
        for cell in written["cells"]
    ] == [
        (4096, 1, 27712),
        (262144, 8, 433),
    ] * 3
    for cell in written["cells"]:
        assert (cell["search_trials"], cell["final_runs"]) == (4, 2)
        assert cell["search_full_runs"] == pytest.approx(2, rel=1e-2)
        assert cell["projected_seconds"] == pytest.approx(
            (cell["search_full_runs"] + 2) * cell["run"]["projected_seconds"]
        )
    assert "36 runs" in out.splitlines()[-3]
    assert out.splitlines()[0].split()[:3] == ["arm", "batch", "microsteps"]


def test_a_study_is_not_compared(lbopt, configs):
    code, _, err = lbopt("plan", f"--config={configs}/sweeps/imagenet_limit.py", "--compare=v3:2x2")
    assert code == 2
    assert "--compare" in err


def test_a_corpus_that_is_not_there_needs_steps(lbopt):
    code, _, err = lbopt("plan", f"--config={PLANNED}:bert", "--config.num_steps=None")
    assert code == 2
    assert err.startswith("lbopt plan: config.num_steps = None: ")
    assert "config.data.builder" in err


def test_without_libtpu_the_extra_is_named(lbopt, monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name, *rest: None if name == "libtpu" else find(name, *rest),
    )
    code, _, err = lbopt("plan", CONFIG, "--topology=v3:2x2")
    assert code == 3
    assert "pip install 'lbopt[plan]'" in err
    assert len(err.splitlines()) == 1


def test_a_new_file_is_not_left_behind_by_what_is_wrong(lbopt, tmp_path):
    file = tmp_path / "plan.json"
    assert lbopt("plan", CONFIG, "--topology=v3:3x5", f"--output={file}")[0] == 2
    assert not file.exists()


def test_what_cannot_be_compiled_is_one_line(lbopt, monkeypatch):
    from lbopt.train import Run

    def lower(run):
        raise NotImplementedError("no rule for TPUs")

    monkeypatch.setattr(Run, "lower", lower)
    code, _, err = lbopt("plan", CONFIG, "--topology=v3:2x2")
    assert code == 2
    line = err.splitlines()[-1]
    assert line.startswith("lbopt plan: --config: ")
    assert "no rule for TPUs" in line
    assert len(err.splitlines()) == 2


def test_a_full_disk_is_one_line(lbopt, monkeypatch):
    from lbopt.plan import StepCost, _make

    monkeypatch.setattr(_make, "cost_of", lambda *_: StepCost(True, 1, 0.0, seconds=1.0))
    code, _, err = lbopt(
        "plan", CONFIG, "--topology=v3:2x2", "--evaluation=false", "--output=/dev/full"
    )
    assert code == 3
    assert err.splitlines()[-1].startswith("lbopt plan: --output = '/dev/full': ")
    assert "No space left on device" in err
