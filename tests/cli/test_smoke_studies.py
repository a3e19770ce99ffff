"""The smoke recipe of every study, from the command to the report."""

import json

import pytest

from lbopt.cli import call_get_config, config_files, main

STUDIES = (
    "cifar10_limit",
    "diffusion_digits",
    "digits_limit",
    "digits_lstm_legw",
    "fashion_limit",
    "fashion_target",
    "growing_bert",
    "imagenet_limit",
    "lm_critical",
    "mnist_limit",
    "precision_digits",
    "pydoc_lm_legw",
    "rules_transfer",
    "waterfall_digits",
)
ON_IMAGES = ("cifar10_limit", "imagenet_limit")


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    assert main(["prepare", "generated_images", f"--data_dir={folder}"]) == 0
    return folder


def test_every_study_is_here(configs):
    assert {file.stem for file in config_files(configs / "sweeps")} == set(STUDIES)


@pytest.mark.everyday("diffusion_digits")
@pytest.mark.parametrize("study", STUDIES)
def test_a_smoke_row_goes_the_whole_way(study, configs, data_dir, tmp_path, capsys):
    """Each runs at the larger of its batch sizes, with one seed."""
    flag = f"{configs / 'sweeps' / study}.py:smoke"
    config = call_get_config(flag)
    largest = config.global_batch_sizes[-1]
    seed = config.final_seeds[0]

    flags = [
        f"--config={flag}",
        f"--workdir={tmp_path / 'study'}",
        f"--config.global_batch_sizes=({largest},)",
    ]
    flags.append(f"--config.final_seeds=({seed},)")
    if study in ON_IMAGES:
        flags += [
            f"--config.train.data.data_dir={data_dir}",
            "--config.train.data.reader_threads=2",
        ]

    assert main(["sweep", *flags]) == 0
    out, _ = capsys.readouterr()

    rows = [
        json.loads(line) for line in (tmp_path / "study" / "results.jsonl").read_text().splitlines()
    ]
    final = [row for row in rows if row["phase"] == "final"]
    assert sorted(row["arm"] for row in final) == sorted(arm.name for arm in config.arms)
    assert ("probes" in final[0]) == (config.measure.num_probes > 0)

    summary = json.loads((tmp_path / "study" / "summary.json").read_text())
    assert summary["complete"]
    assert all(finding in out for finding in summary["findings"])
    assert (tmp_path / "study" / "report.html").stat().st_size > 10_000
