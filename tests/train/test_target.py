"""Targets, evaluation intervals in epochs, and MLPerf's log lines."""

import json
import re

import numpy as np
import pytest
from refusal import refused

from lbopt.train import Target

EVERY = ("--config.eval_every_epochs=0.3", "--config.target_metric=eval/accuracy")
LOW = "--config.target_value=0.05"
NEVER = "--config.target_value=1.0"
STEPS_PER_EPOCH = 16


def lines(workdir):
    return [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]


def test_evaluation_comes_every_so_many_epochs(train, tmp_path):
    assert train(tmp_path, *EVERY, NEVER) == 0
    seen = [line["step"] for line in lines(tmp_path) if "eval/accuracy" in line]
    every = 0.3 * STEPS_PER_EPOCH
    assert seen == [*(int(np.ceil(every * k)) for k in range(1, 5))]
    assert not any("target/steps" in line for line in lines(tmp_path))


def test_the_first_evaluation_that_reaches_the_target_says_after_how_much(train, tmp_path):
    assert train(tmp_path, *EVERY, LOW) == 0
    (found,) = [line for line in lines(tmp_path) if "target/steps" in line]
    first = next(line for line in lines(tmp_path) if line.get("eval/accuracy", 0) >= 0.05)
    assert found == first
    assert found["target/steps"] == found["step"]
    assert found["target/examples"] == found["examples_seen"] == 64 * found["step"]
    assert 0 < found["target/seconds"] <= found["perf/elapsed_s"]
    assert lines(tmp_path)[-1]["step"] == 20


STOPPING = (*EVERY, LOW, "--config.stop_at_target=True")


def test_a_run_may_end_at_its_target(train, tmp_path, capsys):
    assert train(tmp_path, *STOPPING) == 0
    last = lines(tmp_path)[-1]
    assert last["step"] == last["target/steps"] < 20
    assert train(tmp_path, *STOPPING) == 0
    assert f"complete at step {last['step']} of 20" in capsys.readouterr().err
    assert lines(tmp_path)[-1] == last


def test_time_goes_on_after_a_restart(train, tmp_path):
    class Killed(BaseException):
        pass

    def kill(step, state, batch):
        if step == 10:
            raise Killed

    with pytest.raises(Killed):
        train(tmp_path, *EVERY, NEVER, before=kill)
    before = lines(tmp_path)[-1]["perf/elapsed_s"]
    assert train(tmp_path, *EVERY, NEVER) == 0
    elapsed = [line["perf/elapsed_s"] for line in lines(tmp_path)]
    assert elapsed == sorted(elapsed)
    assert elapsed[-1] > before
    resumed = [line for line in lines(tmp_path) if line["step"] == 10]
    assert resumed[0]["perf/elapsed_s"] > max(
        line["perf/elapsed_s"] for line in lines(tmp_path) if line["step"] == 9
    )


@pytest.mark.parametrize(
    ("metric", "value", "reached"),
    [
        ("eval/accuracy", 0.5, True),
        ("eval/accuracy", 0.51, False),
        ("eval/loss", 1.0, True),
        ("eval/loss", 0.9, False),
        ("eval/perplexity", 3.0, True),
        ("eval/perplexity", 2.0, False),
    ],
)
def test_more_accuracy_is_better_and_less_loss(metric, value, reached):
    scores = {"eval/accuracy": 0.5, "eval/loss": 1.0, "eval/perplexity": 2.7}
    assert Target(metric, value).reached(scores) is reached


def test_a_metric_that_is_not_there_is_named():
    with refused("target_metric", "eval/exactness", "choice"):
        Target("eval/exactness", 0.5).reached({"eval/accuracy": 0.5})


def test_mlperf_lines_tell_the_run(train, tmp_path, capsys):
    assert train(tmp_path, *STOPPING, "--config.mllog=True") == 0
    printed = [
        line for line in capsys.readouterr().out.splitlines() if line.startswith(":::MLLOG ")
    ]
    assert (tmp_path / "mllog.txt").read_text().splitlines() == printed

    said = [json.loads(re.sub("^:::MLLOG ", "", line)) for line in printed]
    for line in said:
        assert set(line) == {"namespace", "time_ms", "event_type", "key", "value", "metadata"}

    keys = [line["key"] for line in said]
    assert keys[0] == "init_start"
    assert keys[-1] == "run_stop"
    assert said[-1]["metadata"]["status"] == "success"

    values = {line["key"]: line["value"] for line in said}
    assert values["global_batch_size"] == 64
    assert values["opt_name"] == "lamb"
    assert values["train_samples"] == 1024
    assert values["eval_samples"] == 386

    started = [line["key"] for line in said if line["event_type"] == "INTERVAL_START"]
    ended = [line["key"] for line in said if line["event_type"] == "INTERVAL_END"]
    for stem in ("init", "run", "block", "eval"):
        assert started.count(f"{stem}_start") == ended.count(f"{stem}_stop") >= 1
    assert (
        started.count("eval_start") == ended.count("eval_stop") == keys.count("eval_accuracy") >= 1
    )

    assert (
        keys.index("init_stop")
        < keys.index("run_start")
        < keys.index("block_start")
        < keys.index("eval_start")
    )

    times = [line["time_ms"] for line in said]
    assert times == sorted(times)

    accuracy = next(line for line in said if line["key"] == "eval_accuracy")
    first = next(line for line in lines(tmp_path) if "eval/accuracy" in line)
    assert accuracy["value"] == pytest.approx(first["eval/accuracy"])
    assert accuracy["metadata"]["epoch_num"] == first["step"] / STEPS_PER_EPOCH


def test_without_the_option_nothing_is_said(train, tmp_path, capsys):
    assert train(tmp_path, *STOPPING) == 0
    assert ":::MLLOG" not in capsys.readouterr().out
    assert not (tmp_path / "mllog.txt").exists()


def test_a_resumed_run_says_everything_once(train, tmp_path):
    class Killed(BaseException):
        pass

    def kill(step, state, batch):
        if step == 12:
            raise Killed

    logged = (*EVERY, NEVER, "--config.mllog=True")
    with pytest.raises(Killed):
        train(tmp_path, *logged, before=kill)
    before = [
        json.loads(line[9:])["key"] for line in (tmp_path / "mllog.txt").read_text().splitlines()
    ]
    assert before.count("eval_stop") == 2  # at steps 5 and 10; the run resumes at 10, its best
    assert train(tmp_path, *logged) == 0
    assert train(tmp_path, *logged) == 0
    said = [json.loads(line[9:]) for line in (tmp_path / "mllog.txt").read_text().splitlines()]
    keys = [line["key"] for line in said]
    assert [keys.count(key) for key in ("init_start", "run_start", "run_stop")] == [1, 1, 1]
    evaluated = [line["metadata"]["step"] for line in said if line["key"] == "eval_accuracy"]
    assert evaluated == [5, 10, 15, 20]
    for stem in ("block", "eval"):
        assert keys.count(f"{stem}_start") == keys.count(f"{stem}_stop") == 4
    assert said[-1]["metadata"] == {"step": 20, "epoch_num": 1.25, "status": "aborted"}
