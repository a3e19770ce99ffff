"""`--profile` traces the steps that were asked for, once."""

import gzip
import json

import pytest
from refusal import numbers_in, refused

from lbopt.report import write_training_report
from lbopt.train import ProfiledSteps
from lbopt.train._profile import StepProfile
from lbopt.workdir import MetricsWriter

SAVED = {
    "versions": {},
    "num_devices": 1,
    "device_kind": "cpu",
    "config": {
        "name": "a",
        "global_batch_size": 8,
        "data": {"name": "digits"},
        "model": {"name": "mlp"},
        "optimizer": {"name": "lamb"},
    },
}


def traced(workdir):
    (file,) = workdir.glob("profile/plugins/profile/*/*.trace.json.gz")
    events = json.loads(gzip.decompress(file.read_bytes()))["traceEvents"]
    steps = [event["args"]["step_num"] for event in events if event.get("name") == "train"]
    return sorted(map(int, steps)), file


@pytest.fixture(scope="module")
def profiled(command, start_process, tmp_path_factory):
    # A process of its own: XLA's profiler crashes where the compiler for TPUs is loaded.
    workdir = tmp_path_factory.mktemp("profiled")
    process = start_process("-m", "lbopt", *command(workdir), "--profile=6:8")
    _, stderr = process.communicate(timeout=120)
    assert process.returncode == 0, stderr
    return workdir


def test_the_steps_that_were_asked_for(profiled):
    assert traced(profiled)[0] == [6, 7, 8]


def test_the_report_links_the_trace(profiled):
    page = write_training_report(profiled, SAVED).read_text()
    assert f'<a href="{traced(profiled)[1].relative_to(profiled)}">' in page


def test_a_report_without_a_trace(tmp_path):
    with MetricsWriter(tmp_path) as writer:
        writer.write(1, 8, {"train/loss": 1.0})
    assert 'href="profile' not in write_training_report(tmp_path, SAVED).read_text()


def test_a_trace_is_made_once(profiled):
    said = []
    again = StepProfile(ProfiledSteps.parse("6:8"), profiled, 0, said.append)
    again.step(6, {})
    again.end(8, {})
    assert len(said) == 1
    assert str(profiled / "profile") in said[0]
    assert traced(profiled)[0] == [6, 7, 8]


STOPPING = """
def make(workdir, config):
    def stop(step, metrics):
        if step == 4:
            raise KeyboardInterrupt
    return stop
"""


@pytest.mark.process
def test_a_run_that_ends_early_writes_what_was_traced(command, start_process, tmp_path):
    (tmp_path / "stopping.py").write_text(STOPPING)
    hook = f"--config.trackers=('{tmp_path}/stopping.py:make',)"
    process = start_process("-m", "lbopt", *command(tmp_path / "run", hook), "--profile=50")
    process.communicate(timeout=120)
    assert process.returncode == 130
    assert traced(tmp_path / "run")[0] == [3, 4]


TRACED = """
import sys
import jax
from lbopt.cli import main

with jax.profiler.trace(sys.argv[1]):
    sys.exit(main(sys.argv[2:]))
"""


@pytest.mark.slow
@pytest.mark.process
def test_another_trace_of_the_process(command, start_process, tmp_path):
    (tmp_path / "traced.py").write_text(TRACED)
    words = [*command(tmp_path / "run"), "--profile=1"]
    process = start_process(tmp_path / "traced.py", tmp_path / "other", *words)
    _, stderr = process.communicate(timeout=120)
    assert process.returncode == 2
    assert "--profile" in stderr.splitlines()[-1]


@pytest.mark.parametrize(
    ("text", "start", "steps"),
    [
        ("2", 0, [3, 4]),
        ("2", 7, [10, 11]),
        ("3:3", 0, [3]),
        ("5:9", 4, [7, 8, 9]),  # two steps compile
        ("5:9", 9, []),
    ],
)
def test_a_start_compiles_first(text, start, steps):
    assert list(ProfiledSteps.parse(text).range_after(start)) == steps


@pytest.mark.parametrize(
    "text", ["", "x", "0", "-3", "2:9", "9:4", "5:", ":5", "1:2:3", "4.5", "٣"]
)
def test_bad_steps(text):
    with refused("profile", text, "value"):
        ProfiledSteps.parse(text)


def test_steps_after_the_end_of_the_run():
    ProfiledSteps.parse("20:30").check(20)
    for text, total in (("21:30", 20), ("5", 2)):
        with refused("profile", text, "value") as error:
            ProfiledSteps.parse(text).check(total)
        assert numbers_in(error) == [total, 2]
