"""metrics.jsonl and TensorBoard's event files: the same scalars, under fixed names."""

import dataclasses
import json
import struct

import jax
import numpy as np
import pytest
from hostile import HOSTILE, unprintable
from tensorboardX import crc32c
from tensorboardX.proto import event_pb2

from lbopt.config import make_schedule, resolve_schedule
from lbopt.workdir import MetricsWriter, read_json_lines
from lbopt.workdir._jsonl import drop_lines_after

CONTRACT = {
    "step",
    "examples_seen",
    "train/loss",
    "train/learning_rate",
    "eval/accuracy",
    "perf/examples_per_s",
}


def masked(data):
    """Return the checksum that the record format stores."""
    crc = crc32c.crc32c(data)
    return (((crc >> 15) | (crc << 17)) + 0xA282EAD8) & 0xFFFFFFFF


def events(folder):
    """Read all events in the order of writing; each is length, checksum, data, checksum."""
    found = []
    for file in sorted(folder.iterdir()):
        content = file.read_bytes()
        while content:
            (length,) = struct.unpack("<Q", content[:8])
            data = content[12 : 12 + length]
            assert struct.unpack("<I", content[8:12]) == (masked(content[:8]),)
            assert struct.unpack("<I", content[12 + length : 16 + length]) == (masked(data),)
            found.append(event_pb2.Event.FromString(data))
            content = content[16 + length :]
    return found


def scalars(folder):
    return {
        (event.step, value.tag): value.simple_value
        for event in events(folder)
        for value in event.summary.value
        if value.HasField("simple_value")
    }


@pytest.fixture(scope="module")
def lines(reference):
    return read_json_lines(reference() / "metrics.jsonl")


def test_the_last_line_holds_the_contract(lines):
    assert lines[-1].keys() >= CONTRACT
    assert (lines[-1]["step"], lines[-1]["examples_seen"]) == (20, 1280)
    assert all(np.isfinite(value) for value in lines[-1].values())


def test_every_line_says_where_it_belongs(lines):
    assert [line["step"] for line in lines] == list(range(1, 21))
    assert all(line["examples_seen"] == 64 * line["step"] for line in lines)
    assert [line["step"] for line in lines if "eval/accuracy" in line] == [6, 12, 18, 20]
    assert all(line["perf/examples_per_s"] > 0 for line in lines)
    assert all(0 <= line["train/accuracy"] <= 1 for line in lines)


def test_lines_come_at_the_cadence_and_at_the_end(train, tmp_path):
    cadence = (
        "--config.log_every_steps=3",
        "--config.eval_every_steps=5",
        "--config.num_epochs=0.85",
    )
    assert train(tmp_path, *cadence, "--config.schedule.warmup_rule=none") == 0
    lines = read_json_lines(tmp_path / "metrics.jsonl")
    assert [line["step"] for line in lines] == [3, 5, 6, 9, 10, 12, 14]
    assert [line["step"] for line in lines if "train/loss" in line] == [3, 6, 9, 12, 14]
    assert [line["step"] for line in lines if "eval/accuracy" in line] == [5, 10, 14]


def test_the_rate_logged_is_the_rate_of_the_step(lines, config_of):
    config = config_of()
    resolved = resolve_schedule(config.schedule, 64, 1024, config.num_epochs)
    schedule = make_schedule(config.schedule, dataclasses.replace(resolved, num_steps=20))
    expected = [float(schedule(step)) for step in range(20)]
    np.testing.assert_allclose([line["train/learning_rate"] for line in lines], expected, rtol=1e-6)
    assert expected[3] == pytest.approx(0.02)  # 0.25 epochs of warmup at batch 64 are 4 steps


def test_every_layer_of_lamb_has_a_trust_ratio(lines, plan_of):
    kernels = {
        f"train/trust_ratio/{layer}/kernel"
        for layer in jax.eval_shape(plan_of().init).params
        if "Norm" not in layer
    }
    assert len(kernels) == 3
    for line in lines:
        assert {name for name in line if "trust_ratio" in name} == kernels
        assert all(line[name] > 0 for name in kernels)


def test_the_event_file_holds_the_same_scalars(reference, lines):
    expected = {
        (line["step"], name): value
        for line in lines
        for name, value in line.items()
        if name not in ("step", "examples_seen")
    }
    found = scalars(reference() / "tensorboard")
    assert found.keys() == expected.keys()
    for at, value in found.items():
        assert value == np.float32(expected[at])


def test_a_resumed_run_purges_the_events_it_writes_again(tmp_path):
    for resumed in (0, 3):
        with MetricsWriter(tmp_path, resumed) as writer:
            for step in range(resumed + 1, 6):
                writer.write(step, 2 * step, {"train/loss": step + resumed / 10})
    starts = [event for event in events(tmp_path / "tensorboard") if event.HasField("session_log")]
    assert [(event.session_log.status, event.step) for event in starts][-1] == (
        event_pb2.SessionLog.START,
        4,
    )
    assert [line["train/loss"] for line in read_json_lines(tmp_path / "metrics.jsonl")] == [
        1,
        2,
        3,
        4.3,
        5.3,
    ]


@pytest.mark.parametrize(("step", "left"), [(0, 0), (2, 2), (4, 4), (9, 4)])
def test_lines_after_a_step_are_dropped(tmp_path, step, left):
    file = tmp_path / "metrics.jsonl"
    lines = [
        json.dumps({"step": number, "examples_seen": 2 * number, "train/loss": 1 / number}) + "\n"
        for number in range(1, 5)
    ]
    file.write_text("".join(lines) + '{"step": 5, "tr')
    drop_lines_after(file, step)
    assert file.read_text() == "".join(lines[:left])
    assert list(tmp_path.iterdir()) == [file]


def test_a_torn_line_is_no_line(tmp_path):
    file = tmp_path / "metrics.jsonl"
    assert read_json_lines(file) == []
    drop_lines_after(file, 3)
    assert not file.exists()
    file.write_text('{"step": 1, "examples_seen": 2}\n{"step": 2}')
    assert read_json_lines(file) == [{"step": 1, "examples_seen": 2}]


def test_hostile_names(tmp_path):
    """The names are TensorBoard's tags, and the keys in lines of metrics.jsonl."""
    name = f"train/trust_ratio/{HOSTILE}\udcff"
    with MetricsWriter(tmp_path) as writer:
        writer.write(1, 8, {name: 1.0})
    (tag,) = [
        value.tag for event in events(tmp_path / "tensorboard") for value in event.summary.value
    ]
    assert not unprintable(tag)
    assert "<" not in tag
    assert (tmp_path / "metrics.jsonl").read_text().count("\n") == 1
    assert [set(line) for line in read_json_lines(tmp_path / "metrics.jsonl")] == [
        {"step", "examples_seen", name.replace("\udcff", "\\udcff")}
    ]
