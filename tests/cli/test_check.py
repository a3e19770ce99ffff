"""`lbopt check` finds what is wrong with a run before it starts, on devices that are not here."""

import importlib.util
import re

import own_optimizers
import pytest
from refusal import refused

from lbopt.cli import _check, main

CNN = "digits_cnn.py:smoke"
STUDY = "sweeps/digits_limit.py:smoke"


def checked(lbopt, *flags):
    """Return the exit code, and the mark of each line by its name."""
    code, out, _ = lbopt("check", *flags)
    lines = re.findall(r"^(ok|WRONG|--) +(\w+) ", out, re.MULTILINE)
    return code, {name: mark for mark, name in lines}, out


@pytest.mark.parametrize(
    ("file", "flags", "code", "wrong"),
    [
        (CNN, ["--devices=8", "--workers=2"], 0, None),
        (STUDY, ["--devices=8"], 0, None),
        (CNN, ["--topology=v3:2x2", "--memory=false"], 0, None),
        (CNN, ["--devices=3"], 2, "batch"),
        (CNN, ["--devices=8", "--workers=3"], 2, "batch"),
        (CNN, ["--devices=8", "--workers=2", "--config.parallel.num_devices=4"], 2, "batch"),
        (CNN, ["--config.model.name=mlpp"], 2, "config"),
        (CNN, ["--config.schedule.base_warmup_epochs=9"], 2, "schedule"),
        (STUDY, ["--config.train.num_epochs=1"], 2, "schedule"),
        (CNN, ["--config.trackers=('no_such_file.py:f',)"], 2, "packages"),
        (STUDY, ["--devices=3", "--config.trial_devices=all"], 2, "batch"),
        ("resnet50_lamb.py:smoke", ["--config.data.data_dir=nowhere"], 3, "data"),
    ],
)
def test_what_is_wrong_is_named(lbopt, configs, file, flags, code, wrong):
    found, marks, out = checked(lbopt, f"--config={configs / file}", *flags)
    assert found == code, out
    assert [name for name, mark in marks.items() if mark == "WRONG"] == ([wrong] if wrong else [])


def test_tiles_need_a_torus(lbopt, configs):
    flags = (f"--config={configs / CNN}", "--config.parallel.order=torus", "--memory=false")
    assert checked(lbopt, *flags, "--devices=8")[1]["batch"] == "WRONG"
    tiles = "--config.model.batch_norm_scope=tiles:2x2"
    code, marks, out = checked(lbopt, *flags, tiles, "--topology=v3:2x2")
    assert (code, marks["batch"]) == (0, "ok"), out


TWO_PHASES = """
from lbopt.config import PhaseConfig, ScheduleConfig, TrainConfig
def get_config(arg):
    short, other = (ScheduleConfig(0.02, warmup_rule="none", warmup_steps=n) for n in (1.0, WARMUP))
    phase2 = PhaseConfig(num_steps=4, global_batch_size=64, schedule=other)
    return TrainConfig(num_steps=4, global_batch_size=128, schedule=short, phase2=phase2)
"""


def test_the_batches_of_two_phases_are_told_apart(lbopt, tmp_path):
    (tmp_path / "two.py").write_text(TWO_PHASES.replace("WARMUP", "1.0"))
    _, _, out = checked(lbopt, f"--config={tmp_path}/two.py", "--devices=2")
    said = (
        "128 (phase 1), 64 (phase 2) examples over 2 devices: 64 (phase 1), 32 (phase 2) a device"
    )
    assert said in out


GROWS = """
from lbopt.config import BatchScheduleConfig, OptimizerConfig, TrainConfig
def get_config(arg):
    growing = BatchScheduleConfig("noise_scale", final_batch_size=256)
    optimizer = OptimizerConfig(track_noise_scale=True)
    return TrainConfig(global_batch_size=128, optimizer=optimizer, batch_schedule=growing)
"""


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (
            (f"--config={CNN}", "--config.diloco.every=8"),
            "128 examples over 4 devices: 32 a device; 4 workers exchange every 8 steps",
        ),
        (
            (
                f"--config={CNN}",
                "--config.diloco.every=8",
                "--config.aggregator.name=mean",
                "--config.aggregator.replicas_per_device=2",
            ),
            "128 examples over 4 devices: 32 a device; 8 workers exchange every 8 steps",
        ),
        (
            ("--config=grows.py",),
            "128, 256 examples over 4 devices: 32, 64 a device; the noise scale says when",
        ),
    ],
)
def test_the_batch_of_other_kinds_of_run(flags, said, lbopt, configs, tmp_path, monkeypatch):
    (tmp_path / "grows.py").write_text(GROWS)
    monkeypatch.chdir(tmp_path)
    config, *others = (flag.replace(CNN, str(configs / CNN)) for flag in flags)
    assert said in checked(lbopt, config, *others, "--devices=4", "--memory=false")[2]


ODD = """
from lbopt.config import BatchScheduleConfig, TrainConfig
def get_config(arg):
    growing = BatchScheduleConfig(GROWING)
    return TrainConfig(
        data="digits", model="mlp", schedule=0.01, global_batch_size=16, batch_schedule=growing
    )
"""


@pytest.mark.parametrize(
    ("growing", "field"),
    [
        ("'ramp', final_batch_size=18, increment=2", "final_batch_size"),
        ("'steps', changes=((1.0, 18),)", "changes"),
    ],
)
def test_a_later_batch_that_does_not_fit_is_named_as_by_train(growing, field, lbopt, tmp_path):
    (tmp_path / "odd.py").write_text(ODD.replace("GROWING", growing))
    code, marks, out = checked(lbopt, f"--config={tmp_path}/odd.py", "--devices=4")
    assert (code, marks["batch"]) == (2, "WRONG"), out
    assert f"config.batch_schedule.{field} = 18:" in out


CARRIED = """
from lbopt.config import BatchScheduleConfig, OptimizerConfig, ScheduleConfig, TrainConfig
def get_config(arg):
    name, rule, last = arg.split(",")
    return TrainConfig(
        data="digits",
        model="mlp",
        optimizer=OptimizerConfig(
            name, options={"b2": 0.9} if name.endswith(":own") else {}
        ),
        schedule=ScheduleConfig(0.008, scaling_rule=rule, warmup_rule="none"),
        global_batch_size=64,
        batch_schedule=BatchScheduleConfig("doubling", final_batch_size=int(last)),
    )
"""


@pytest.mark.parametrize(
    ("arg", "field"),
    [
        ("muonh,muonh,128", "schedule.scaling_rule"),
        ("adamw,sde,1024", "optimizer.b1"),
        (f"{own_optimizers.PLACE}:own,token_half_life,128", "optimizer.name"),
    ],
    ids=["state", "range", "moments"],
)
def test_a_state_that_no_larger_batch_can_take_is_named(arg, field, lbopt, tmp_path):
    (tmp_path / "carried.py").write_text(CARRIED)
    code, marks, out = checked(lbopt, f"--config={tmp_path}/carried.py:{arg}")
    assert (code, marks["batch"]) == (2, "WRONG"), out
    assert re.search(rf"WRONG batch +config\.{field} = ", out), out


def test_the_schedule_of_the_second_phase_is_a_schedule_too(lbopt, tmp_path):
    (tmp_path / "two.py").write_text(TWO_PHASES.replace("WARMUP", "9.0"))
    _, marks, out = checked(lbopt, f"--config={tmp_path}/two.py", "--devices=2")
    assert marks["schedule"] == "WRONG", out


def test_a_project_of_ones_own(lbopt, tmp_path, monkeypatch):
    """The project of `lbopt new` has its own data, model and loss."""
    assert lbopt("new", tmp_path / "mine")[0] == 0
    monkeypatch.chdir(tmp_path / "mine")
    for config in ("config.py", "study.py"):
        code, _, out = checked(lbopt, f"--config={config}")
        assert code == 0, out


def test_a_batch_that_does_not_fit_the_pod(lbopt, configs, monkeypatch):
    """The plan is made by another process; here it is a file that a plan has written."""
    plan = '{"hbm_bytes_per_device": 34359738368, "hbm_limit_bytes": 17179869184, "fits": false}'

    def planned(command, **options):
        (output,) = [word.partition("=")[2] for word in command if word.startswith("--output=")]
        with open(output, "w") as file:
            file.write(plan)
        return _check.subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(_check.subprocess, "run", planned)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: True)
    code, marks, out = checked(lbopt, f"--config={configs / CNN}", "--topology=v3:2x2")
    assert (code, marks["memory"]) == (2, "WRONG")
    assert "32.0 GiB of 16.0 GiB" in out


@pytest.mark.tpu_compiler
@pytest.mark.process
@pytest.mark.slow
def test_the_plan_is_made_in_another_process(lbopt, configs):
    code, marks, out = checked(lbopt, f"--config={configs / CNN}", "--topology=v4:2x2x1")
    assert (code, marks["memory"]) == (0, "ok"), out


@pytest.mark.parametrize(
    ("flags", "field", "value"),
    [
        (["--devices=0"], "--devices", "0"),
        (["--workers=two"], "--workers", "two"),
        (["--memory=perhaps"], "--memory", "perhaps"),
        (["--devices=4", "--topology=v3:2x2"], "--devices", "4"),
        (["--topology=v9:2x2"], "--topology", "v9:2x2"),
    ],
)
def test_wrong_flags(refusing, configs, flags, field, value):
    with refused(field, value):
        refusing("check", f"--config={configs / CNN}", *flags)


def test_the_batch_is_checked_without_the_data(lbopt, configs):
    flags = (f"--config={configs / 'resnet50_lamb.py:smoke'}", "--config.data.data_dir=nowhere")
    code, marks, out = checked(lbopt, *flags, "--devices=7")
    assert code == 2, out
    assert [name for name, mark in marks.items() if mark == "WRONG"] == ["data", "batch"]


def test_no_config():
    assert main(["check"]) == 2
