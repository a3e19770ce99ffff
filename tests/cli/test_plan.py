"""`lbopt plan`: its table, file, comparisons and suggestions; wrong input ends before compiling."""

import errno
import importlib.util
import json
import os
import pathlib
import re
import shlex

import pytest
from refusal import names_in, refused, troubled

from lbopt.errors import NO_VALUE

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


GROWS = """
from lbopt.config import BatchScheduleConfig, OptimizerConfig, TrainConfig
def get_config(kind):
    growing = BatchScheduleConfig(kind, final_batch_size=128, every=2.0)
    optimizer = OptimizerConfig(track_noise_scale=kind == "noise_scale")
    return TrainConfig(model="mlp", num_epochs=6.0, global_batch_size=64, eval_every_epochs=1.0,
                       optimizer=optimizer, batch_schedule=growing)
"""


def test_a_plan_of_a_growing_batch_has_each_phase_and_their_sum(lbopt, refusing, tmp_path):
    (tmp_path / "grows.py").write_text(GROWS)
    file = tmp_path / "plan.json"
    config = f"--config={tmp_path / 'grows.py'}"
    code, out, _ = lbopt("plan", f"{config}:doubling", "--topology=v3:1x1", f"--output={file}")
    assert code == 0
    assert "phase 2: 32 steps of 128" in out

    written = json.loads(file.read_text())
    phases = written["phases"]
    # 1,024 examples an epoch: two epochs in steps of 64, four in steps of 128.
    assert [(one["global_batch_size"], one["steps"]) for one in phases] == [(64, 32), (128, 32)]
    assert [one["evaluation"] and one["evaluation"]["times"] for one in phases] == [None, 6]
    assert written["steps"] == 64
    assert written["hbm_bytes_per_device"] == max(one["hbm_bytes_per_device"] for one in phases)
    seconds = sum(one["projected_seconds"] for one in phases)
    assert written["projected_seconds"] == pytest.approx(seconds, rel=0.01)
    with refused("config.batch_schedule.kind", "noise_scale") as caught:
        refusing("plan", f"{config}:noise_scale", "--topology=v3:1x1")
    assert "doubling" in names_in(caught)


def compiled(where):
    """Return the lines about the programs of one topology."""
    return [f"compiling the {what} for {where} ..." for what in ("training step", "evaluation")]


@pytest.mark.slow
def test_the_guide_shows_what_is_printed(lbopt):
    page = pathlib.Path(__file__).parents[2] / "docs" / "guides" / "plans.md"
    (block,) = re.findall(r"```console\n\$ lbopt (plan .*)\n((?s:.*?))```", page.read_text())
    command, shown = block
    code, out, _ = lbopt(*shlex.split(command))
    assert code == 0
    assert [line for line in shown.splitlines() if line not in out.splitlines()] == ["..."]


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
        "--config.model.patch_convolutions=True",  # patches need more memory than convolutions
        "--config.parallel.shard_update=True",
        "--evaluation=false",
    )
    assert code == 0
    assert "DOES NOT FIT: needs 19." in out
    assert "accumulation x2" in out
    assert "--config.parallel.num_microsteps=2" in out


@pytest.mark.parametrize(
    ("flags", "fault", "named"),
    [
        (["--topology=v3:3x5"], ("--topology", "v3:3x5", "choice"), '"v3:3x5"'),
        (["--topology=v3:0x16"], ("--topology", "v3:0x16", "value"), "4,096"),
        (["--topology=v3:1000x1000"], ("--topology", "v3:1000x1000", "value"), "4,096"),
        (["--topology=v4:4x4"], ("--topology", "v4:4x4", "value"), "4,096"),
        (["--topology=v6e:2x2x2"], ("--topology", "v6e:2x2x2", "value"), "256"),
        (["--topology=v3:2x2x2x2"], ("--topology", "v3:2x2x2x2", "value"), "GENERATION"),
        (["--topology=gpu"], ("--topology", "gpu", "value"), "GENERATION"),
        ([], ("--topology", NO_VALUE, "missing"), "--topology="),
        (["--config.global_batch_size=60"], ("config.global_batch_size", 60, "value"), "64"),
        (
            ["--config.parallel.backend=pmap"],
            ("config.parallel.backend", "pmap", "value"),
            "'jit'",
        ),
        (["--config.parallel.num_devices=9"], ("config.parallel.num_devices", 9, "value"), "8"),
        (["--output=/nowhere/plan.json"], ("--output", "/nowhere/plan.json", "resource"), ""),
        (["--output=/"], ("--output", "/", "resource"), ""),
        (["--breakdown=some"], ("--breakdown", "some", "value"), ""),
        (["--compare=v3:2x2 v3:4x4"], ("--compare", "v3:2x2 v3:4x4", "value"), ""),
        (
            ["--compare=v3:4x4, model.rematt=layer"],
            ("--config.model.rematt", NO_VALUE, "choice"),
            "'remat'",
        ),
        (["--compare=v3:4x5"], ("--compare", "v3:4x5", "choice"), '"v3:4x5"'),
        (
            ["--topology=v3:4x4", "--config.model.batch_norm_scope=tiles:2x2"],
            ("config.model.batch_norm_scope", "tiles:2x2", "mismatch"),
            "",
        ),
        (
            ["--config.parallel.reduce_scatter=True"],
            ("config.parallel.reduce_scatter", True, "unused"),
            "config.parallel.shard_update",
        ),
        (
            ["--config.parallel.reduce_dtype=float16"],
            ("config.parallel.reduce_dtype", "float16", "choice"),
            "",
        ),
    ],
)
def test_what_is_wrong_is_one_line(refusing, monkeypatch, flags, fault, named):
    from lbopt.plan import _make

    monkeypatch.setattr(_make, "cost_of", lambda *_: pytest.fail("something was compiled"))
    if flags and not flags[0].startswith("--topology"):
        flags = ["--topology=v3:2x2", *flags]
    with refused(*fault) as caught:
        refusing("plan", CONFIG, *flags)
    assert named in str(caught.value)
    assert ("GENERATION" in names_in(caught)) == (named == "GENERATION")


def test_a_study_of_trials_on_one_device_has_no_plan(refusing, configs):
    with refused("config.trial_devices", "one", "conflict"):
        refusing("plan", f"--config={configs}/sweeps/digits_limit.py", "--topology=v3:2x2")


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


def test_a_study_is_not_compared(refusing, configs):
    with refused("--compare", "v3:2x2", "unused"):
        refusing("plan", f"--config={configs}/sweeps/imagenet_limit.py", "--compare=v3:2x2")


def test_a_corpus_that_is_not_there_needs_steps(refusing):
    with refused("config.num_steps", None, "missing") as caught:
        refusing("plan", f"--config={PLANNED}:bert", "--config.num_steps=None")
    assert "config.data.builder" in names_in(caught)


def test_without_libtpu_the_extra_is_named(refusing, monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name, *rest: None if name == "libtpu" else find(name, *rest),
    )
    with troubled("libtpu", NO_VALUE, "installation") as caught:
        refusing("plan", CONFIG, "--topology=v3:2x2")
    assert "pip install 'lbopt[plan]'" in str(caught.value)  # a command to type


def test_a_new_file_is_not_left_behind_by_what_is_wrong(lbopt, tmp_path):
    file = tmp_path / "plan.json"
    assert lbopt("plan", CONFIG, "--topology=v3:3x5", f"--output={file}")[0] == 2
    assert not file.exists()


def test_what_cannot_be_compiled_is_one_line(refusing, monkeypatch):
    from lbopt.train import Run

    def lower(run):
        raise NotImplementedError("no rule for TPUs")

    monkeypatch.setattr(Run, "lower", lower)
    with refused("config", NO_VALUE, "installation") as caught:
        refusing("plan", CONFIG, "--topology=v3:2x2", lines=2)
    assert "no rule for TPUs" in str(caught.value)  # the compiler's words


def test_a_full_disk_is_one_line(lbopt, monkeypatch):
    from lbopt.plan import StepCost, _make

    monkeypatch.setattr(_make, "cost_of", lambda *_: StepCost(True, 1, 0.0, seconds=1.0))
    flags = ("--topology=v3:2x2", "--evaluation=false", "--output=/dev/full")
    code, _, err = lbopt("plan", CONFIG, *flags)
    assert code == 3
    assert err.splitlines()[-1].startswith("lbopt plan: --output = '/dev/full': ")
    assert os.strerror(errno.ENOSPC) in err
