"""Optimizer metrics in the log, and the end of a run whose gradients are all broken."""

import contextlib
import re
import types

import jax
import numpy as np
import pytest
from refusal import refused

from lbopt.errors import NO_VALUE
from lbopt.report import write_training_report
from lbopt.train import Run
from lbopt.train._loop import Status, _PhaseLoop
from lbopt.workdir import read_config

GUARDED = ("--config.optimizer.skip_limit=2",)
WATCHED = (
    "--config.optimizer.monitor_layers=True",
    "--config.optimizer.track_noise_scale=True",
    "--config.optimizer.max_grad_norm=0.5",
    "--config.optimizer.clip_stage=replica",
    "--config.parallel.num_microsteps=2",
)


def broken(batch):
    return {**batch, "image": batch["image"] * np.nan}


def test_a_run_of_broken_gradients_stops_with_one_line(train, tmp_path, capsys, saved_state, bits):
    folder = tmp_path / "run"
    spoilt = {}

    def before(step, state, batch):
        if step >= 5:
            batch.update(broken(jax.device_get(batch)))
        if step == 5:
            spoilt["params"] = bits(state.params)

    assert train(folder, *GUARDED, before=before) == 2
    err = capsys.readouterr().err
    line = err.splitlines()[-1]
    assert line.startswith("lbopt train: config.optimizer.skip_limit: ")
    assert re.findall(r"\d+", line)[:2] == ["7", "3"]
    assert "config.schedule.base_learning_rate" in err
    assert "Traceback" not in err
    assert bits(saved_state(folder, *GUARDED, step=6).params) == spoilt["params"]


def test_a_few_broken_gradients_are_skipped(train, tmp_path, logged):
    def before(step, state, batch):
        if step in (5, 6, 9):
            batch.update(broken(jax.device_get(batch)))

    assert train(tmp_path / "run", *GUARDED, before=before) == 0
    lines = logged(tmp_path / "run")
    assert [line["train/skipped/nonfinite"] for line in lines][3:10] == [0, 1, 2, 2, 2, 3, 3]
    assert np.isfinite(lines[-1]["train/loss"])


def test_what_is_watched_is_logged_and_drawn(train, tmp_path, logged):
    folder = tmp_path / "run"
    assert train(folder, *WATCHED) == 0
    last = logged(folder)[-1]
    assert {"train/gradient_norm/replica", "train/noise_scale"} <= set(last)
    kinds = {name.split("/")[1] for name in last if name.startswith("train/")}
    assert {"trust_ratio", "weight_norm", "update_norm", "update_over_weight"} <= kinds
    page = write_training_report(folder, read_config(folder)).read_text()
    for title in (
        "Trust ratio of each layer",
        "Update over weight",
        "Global gradient norm",
        "Gradient noise scale",
    ):
        assert title in page


def test_stalled_weights_are_told_of_once():
    said = []
    loop = types.SimpleNamespace(status=Status(), progress=types.SimpleNamespace(say=said.append))
    for step, share in ((1, 0.4), (2, 0.97), (3, 0.99)):
        _PhaseLoop._warn_of_stalled(
            loop, step, {"stalled/a/kernel": share, "stalled/b[2]": 0.1, "learning_rate": 1.0}
        )
    (line,) = said
    assert line.startswith(
        "warning: at step 2 the update left 97% of the weights of a/kernel as they were"
    )


def test_exchanges_without_any_worker_are_counted_and_told_of_once(train, tmp_path, logged, capsys):
    def before(step, state, batch):
        if step in (5, 9):
            batch.update(broken(jax.device_get(batch)))

    assert train(tmp_path / "run", "--config.diloco.every=4", before=before) == 0
    for name in ("left_out_workers", "without_workers"):
        counts = [line[f"train/exchange/{name}"] for line in logged(tmp_path / "run")]
        assert counts == [0.0] * 7 + [1.0] * 4 + [2.0] * 9
    told = [line for line in capsys.readouterr().err.splitlines() if "finite worker" in line]
    assert len(told) == 1
    assert "warning: exchanges without any finite worker by step 8: 1" in told[0]


@pytest.mark.parametrize(
    ("stats", "too_large"),
    [(None, False), ({"bytes_limit": 2**50}, False), ({"bytes_limit": 2**20}, True)],
)
def test_a_state_has_to_fit_the_memory_of_a_device_that_says_it(stats, too_large):
    """A device that reports no memory may have more than the host."""
    device = types.SimpleNamespace(platform="gpu", memory_stats=lambda: stats)
    whole = jax.ShapeDtypeStruct(
        (2**40,), "float32", sharding=jax.sharding.SingleDeviceSharding(jax.devices()[0])
    )
    state = {
        "w": whole
        if stats is None
        else jax.ShapeDtypeStruct((2**20,), "float32", sharding=whole.sharding)
    }
    run = types.SimpleNamespace(
        shapes=lambda: state, mesh=types.SimpleNamespace(local_devices=[device] * 8)
    )
    with refused("model", NO_VALUE, "resource") if too_large else contextlib.nullcontext():
        Run.check_memory(run)
