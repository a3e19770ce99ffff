"""Trials over all devices equal the trials on one device."""

import copy
import json

import numpy as np
import pytest
from jobs import start  # noqa: F401  a fixture
from tiny_study import make_config

from lbopt.cli import main
from lbopt.config import MeasureConfig, SearchConfig
from lbopt.sweep import _trials, run_sweep

# Sums over the global batch have another order, and momentum over 24 steps amplifies rounding.
RTOL = 2e-3
MODULES = (("head", "^head/"), ("body", ""))


def study(**changes):
    config = make_config(
        measure=MeasureConfig(num_probes=2, probe_parts=4, probe_part_size=16, phi_modules=MODULES),
        global_batch_sizes=(128,),
        **changes,
    )
    cells = _trials.make_cells(config, _trials.make_problems(config))
    return config, cells


def test_all_devices_find_what_one_finds(tmp_path, capsys):
    rows = []
    for devices in ("all", "one"):
        config, cells = study(trial_devices=devices)
        folder = tmp_path / devices
        folder.mkdir()
        found = run_sweep(config, cells, folder)
        assert "on this machine, as busy as it is now" in capsys.readouterr().err
        rows.append({_trials.trial_identity(row): row for row in found})

    ours, theirs = rows
    assert ours.keys() == theirs.keys()
    assert len(ours) == 2 * (3 + 2)

    for key, row in theirs.items():
        np.testing.assert_allclose(ours[key]["distance"], row["distance"], rtol=RTOL)
        np.testing.assert_allclose(ours[key]["last_epoch_loss"], row["last_epoch_loss"], rtol=RTOL)
        for split in ("validation", "test"):
            if row[f"{split}_loss"] is not None:
                np.testing.assert_allclose(
                    ours[key][f"{split}_loss"], row[f"{split}_loss"], rtol=10 * RTOL
                )

        if row["phase"] == "final":
            assert ours[key]["probes"].keys() == row["probes"].keys()
            np.testing.assert_allclose(
                ours[key]["probes"]["phi"][0], row["probes"]["phi"][0], rtol=1e-3
            )
            for module, _ in MODULES:
                found, expected = (one["probes"]["phi_modules"][module] for one in (ours[key], row))
                np.testing.assert_allclose(found[0], expected[0], rtol=1e-3)
            np.testing.assert_allclose(
                ours[key]["curve"]["train_loss"], row["curve"]["train_loss"], rtol=RTOL
            )


def test_a_batch_that_does_not_split_over_the_devices_is_refused_before_the_workdir_is_taken(
    config_file, tmp_path, capsys
):
    flags = [
        f"--config={config_file}",
        f"--workdir={tmp_path / 'study'}",
        "--config.trial_devices=all",
    ]
    assert main(["sweep", *flags, "--config.global_batch_sizes=(6,128)"]) == 2
    err = capsys.readouterr().err
    assert err.startswith("lbopt sweep: config.global_batch_sizes = 6: ")
    assert "'momentum'" in err
    assert err.count("\n") == 1
    assert not (tmp_path / "study").exists()


@pytest.mark.process
@pytest.mark.slow
def test_two_processes_train_every_trial_together(
    start,  # noqa: F811
    config_file,
    tmp_path,
):
    flags = [
        "--config.train.num_epochs=3.0",
        "--config.trial_devices=all",
        "--config.global_batch_sizes=(128,)",
        "--config.final_seeds=(7,)",
    ]
    rates = "--config.search.learning_rate_factors=(1.0,)"
    command = ["sweep", f"--config={config_file}", f"--workdir={tmp_path / 'study'}", rates, *flags]

    job = start(command, count=2, devices=2)
    assert job.codes(300) == [0, 0], job.said(0)
    assert any("on this machine, as busy as it is now" in line for line in job.said(0))
    rows = [
        json.loads(line) for line in (tmp_path / "study" / "results.jsonl").read_text().splitlines()
    ]
    assert sorted((row["arm"], row["phase"]) for row in rows) == [
        (arm, phase) for arm in ("lamb", "momentum") for phase in ("final", "search")
    ]

    alone = [
        f"--workdir={tmp_path / 'alone'}" if flag.startswith("--workdir") else flag
        for flag in command
    ]
    assert main([*alone, "--config.train.parallel.num_devices=4"]) == 0
    expected = [
        json.loads(line) for line in (tmp_path / "alone" / "results.jsonl").read_text().splitlines()
    ]

    by_key = {_trials.trial_identity(row): row for row in expected}
    for row in rows:
        np.testing.assert_allclose(
            row["validation_loss"],
            by_key[_trials.trial_identity(row)]["validation_loss"],
            rtol=10 * RTOL,
        )


def test_arms_whose_searches_differ_share_a_program(tmp_path):
    """One arm has five candidates at a time and the other one; batching changes no result."""

    rows = []
    for batching in ("none", "vmap"):
        config = make_config(
            global_batch_sizes=(1024,), trial_batching=batching, trials_per_program=64
        )
        other = copy.deepcopy(config.arms[1])
        other.name = "one rate"
        other.search = SearchConfig(learning_rate_factors=(1.0,))
        config.arms = (other, config.arms[1])
        config.search = SearchConfig(
            learning_rate_factors=(0.25, 0.5, 1.0, 2.0, 4.0), widen_candidates=0
        )

        (tmp_path / batching).mkdir()
        cells = _trials.make_cells(config, _trials.make_problems(config))
        found = run_sweep(config, cells, tmp_path / batching)
        rows.append({_trials.trial_identity(row): row for row in found})

    assert rows[0].keys() == rows[1].keys()
    assert len(rows[0]) == (1 + 2) + (5 + 2)
    for key, row in rows[0].items():
        np.testing.assert_allclose(
            rows[1][key]["validation_loss"], row["validation_loss"], rtol=1e-4
        )
