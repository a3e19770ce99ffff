"""The page's description of a study's procedure: in words, by field and by arm."""

import pytest
import synthetic
from synthetic import Truth
from tiny_study import make_config

from lbopt.config import (
    Arm,
    LossConfig,
    MeasureConfig,
    ModelConfig,
    OptimizerConfig,
    ScheduleConfig,
    SearchConfig,
    config_to_json,
)
from lbopt.report.study import read_study, write_study_report
from lbopt.report.study._how_measured import protocol
from lbopt.report.study._setup import arms_table, definitions, examples_of, training_examples

FLAT = (0.98, 0.98, 0.98)


@pytest.mark.parametrize(
    ("search", "parts"),
    [
        ({}, ["the whole grid", "learning rate 0.5, 1, 2", "warmup 1", "seed 0"]),
        (
            {"method": "log_uniform"},
            ["16 candidates drawn log-uniformly", "learning rate 0.1 to 10"],
        ),
        ({"method": "halton", "num_candidates": 9}, ["9 candidates of a Halton sequence"]),
        (
            {"method": "successive_halving"},
            [
                "successive halving from 16 candidates (eta 3, shortest run 0.037",
                "rescaled to its length",
            ],
        ),
        ({"method": "hyperband"}, ["Hyperband (eta 3", "never one with a smaller batch"]),
        ({"method": "optuna"}, ["sampler tpe, no pruner, 4 at once"]),
        (
            {"method": "optuna", "pruner": "median"},
            ["pruner median, eta 3", "rescaled to its length"],
        ),
    ],
)
def test_the_protocol_says_how_it_was_searched(search, parts):
    study = read_study(*synthetic.make_study({"a": Truth(FLAT)}, **search))
    text = " ".join(protocol(study))
    for part in [
        *parts,
        "fresh seeds 1, 2, 3, 4, 5",
        "only those runs were tested, once",
        "within 1 point",
    ]:
        assert part in text
    assert ("lower fidelity" in text) == (
        "rescaled to its length" in parts or search.get("method") == "hyperband"
    )


def test_the_protocol_of_a_language_model_speaks_of_loss_and_percent():
    study = read_study(*synthetic.make_study({"a": Truth((100.0,) * 3)}, perplexity=True))
    text = " ".join(protocol(study))
    assert "best mean validation loss" in text
    assert "within 5 percent" in text


@pytest.mark.parametrize(
    ("measure", "parts"),
    [
        (
            MeasureConfig(num_probes=4),
            [
                "the curve of the distance from the start with its fits and probes of the "
                "gradient.",
                "the final distance",
            ],
        ),
        (
            MeasureConfig(distance=False),
            ["Only final runs have the curve of the training loss.", "Gradients were not probed"],
        ),
    ],
)
def test_the_protocol_says_which_runs_were_measured(measure, parts):
    text = " ".join(protocol(read_study(config_to_json(make_config(measure=measure)), [])))
    for part in [
        *parts,
        "the step at which it diverged",
        "set by hand before the study",
        "outside the equal budget",
    ]:
        assert part in text


# ---- field by field


def test_all_that_trials_have_in_common_is_said():
    config = make_config(
        measure=MeasureConfig(num_probes=4, probe_parts=2, probe_part_size=8), microstep_size=512
    )
    config.train.loss = LossConfig(label_smoothing=0.1)
    config.train.data.image_size = 16
    config.train.data.data_dir = "/here/only"

    found = dict(definitions(read_study(config_to_json(config), [])))
    assert found == {
        "data": "digits (image_size=16)",
        "model": "mlp (widths=(16,))",
        "loss": "label_smoothing=0.1",
        "length of a run": "3 epochs at every batch size",
        "global batch sizes": "128, 1024",
        "search seeds": "0",
        "final seeds": "7, 8",
        "probes of the gradient": (
            "4 log-spaced steps of every final run, 2 parts of 8 training examples each"
        ),
        "devices of a trial": "one, at most 512 examples at a time on each",
    }


def test_a_target_study_says_how_often_it_was_looked_for():
    config = make_config()
    config.train.target_metric = "eval/accuracy"
    config.train.eval_every_epochs = 0.25
    found = dict(definitions(read_study(config_to_json(config), [])))
    assert found["evaluations for the target"] == "every 0.25 epochs"


def test_the_steps_of_epochs_tell_the_size_of_the_training_set():
    config, rows = synthetic.make_study({"a": Truth(FLAT)})
    assert training_examples(read_study(config, rows)) == (1023, 1024)
    # 4267 examples in 6 epochs of batch 16, 64 and 1024; 4268 and 4269 give the same steps.
    assert examples_of([(16, 1601), (64, 401), (1024, 26)], 6.0) == (4267, 4269)
    config["train"]["num_steps"] = 9
    assert training_examples(read_study(config, rows)) is None


def test_every_arm_is_given_by_what_its_rules_start_from():
    arms = (
        Arm(
            "one",
            OptimizerConfig("lars", weight_decay=1e-4, nesterov=True),
            ScheduleConfig(
                4.0, scaling_rule="sqrt", warmup_power=2.0, base_warmup_epochs=0.25, power=2.0
            ),
        ),
        Arm(
            "two",
            OptimizerConfig("adam"),
            ScheduleConfig(
                0.008,
                base_batch_size=32,
                scaling_rule="linear",
                warmup_rule="none",
                decay="constant",
            ),
            model=ModelConfig("cnn", (8,)),
            search=SearchConfig(learning_rate_factors=(1.0,)),
        ),
    )

    header, rows = arms_table(make_config(arms=arms))
    one, two = (dict(zip(header, row, strict=True)) for row in rows)
    assert one == {
        "arm": "one",
        "optimizer": "lars (weight_decay=0.0001, nesterov=True)",
        "base learning rate": "4",
        "at batch": "64",
        "scaling": "sqrt",
        "warmup": "legw (warmup_power=2)",
        "base warmup, epochs": "0.25",
        "decay": "polynomial (power=2)",
        "its own": "",
    }

    assert (two["base learning rate"], two["at batch"], two["warmup"], two["decay"]) == (
        "0.008",
        "32",
        "none",
        "constant",
    )
    assert two["base warmup, epochs"] == ""
    assert two["its own"] == "model: cnn (widths=(8,)); a search of its own"
    assert "its own" not in arms_table(make_config())[0]


def test_a_polynomial_is_never_without_its_power():
    header, rows = arms_table(make_config())
    assert {row[header.index("decay")] for row in rows} == {"polynomial (power=1)"}


def test_the_page_has_them(tmp_path):
    config, rows = synthetic.make_study({"a": Truth(FLAT)})
    config["train"] |= {
        "model": config_to_json(ModelConfig("cnn", (8,))),
        "data": {"name": "digits"},
    }
    written = write_study_report(tmp_path, synthetic.save_study(tmp_path, config, rows))
    text = written.file.read_text()
    assert "<dt>model</dt><dd>cnn (widths=(8,))</dd>" in text
    assert (
        "<dt>data</dt><dd>digits; 1023 to 1024 training examples, from the number of "
        "steps</dd>" in text
    )
    assert ">base learning rate</th>" in text
