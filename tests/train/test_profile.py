"""`--profile` traces the steps that were asked for, once."""

import gzip
import json

import jax
import pytest
from refusal import numbers_in, refused

from lbopt.report import write_training_report
from lbopt.train import ProfiledSteps, _loop
from lbopt.train._profile import StepProfile
from lbopt.workdir import MetricsWriter

SAVED = {
    "versions": {},
    "num_devices": 1,
    "device_kind": "cpu",
    "config": {"name": "a", "global_batch_size": 8, "optimizer": {"name": "lamb"}},
}


def traced(workdir):
    (file,) = workdir.glob("profile/plugins/profile/*/*.trace.json.gz")
    events = json.loads(gzip.decompress(file.read_bytes()))["traceEvents"]
    steps = [event["args"]["step_num"] for event in events if event.get("name") == "train"]
    return sorted(map(int, steps)), file


@pytest.fixture(scope="module")
def profiled(plan_of, tmp_path_factory):
    workdir = tmp_path_factory.mktemp("profiled")
    _loop.train(plan_of(), workdir, profile=ProfiledSteps.parse("6:8"))
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


def test_a_run_that_ends_early_writes_what_was_traced(plan_of, tmp_path):
    def stop(step, metrics):
        if step == 4:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        _loop.train(plan_of(), tmp_path, on_metrics=[stop], profile=ProfiledSteps.parse("50"))
    assert traced(tmp_path)[0] == [3, 4]


def test_another_trace_of_the_process(plan_of, tmp_path):
    with jax.profiler.trace(tmp_path / "other"), refused("profile", code="conflict"):
        _loop.train(plan_of(), tmp_path / "run", profile=ProfiledSteps.parse("1"))


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
