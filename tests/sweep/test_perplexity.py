"""A study of a language model: perplexity beside accuracy, and its rate chosen by the loss."""

import math

import pytest

from lbopt.config import (
    Arm,
    DataConfig,
    ModelConfig,
    OptimizerConfig,
    ScheduleConfig,
    SearchConfig,
    SweepConfig,
    TrainConfig,
)
from lbopt.sweep import _drive, make_cells, make_problems, run_sweep


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    """Return the records of two steps at two rates."""
    config = SweepConfig(
        train=TrainConfig(
            num_epochs=0.0035,
            data=DataConfig("pydoc_lm", sequence_length=16, vocab_size=256),
            model=ModelConfig("lstm_lm", size="small", width_coefficient=0.1),
        ),
        arms=(Arm("lamb", OptimizerConfig("lamb"), ScheduleConfig(0.01, warmup_rule="none")),),
        global_batch_sizes=(16,),
        search=SearchConfig(learning_rate_factors=(1.0, 3.0), widen_candidates=0),
        final_seeds=(7,),
    )
    config.validate()
    cells = make_cells(config, make_problems(config))
    assert cells[0].resolved.num_steps == 2
    return run_sweep(config, cells, tmp_path_factory.mktemp("study"))


@pytest.mark.slow
def test_perplexity_is_the_exponential_of_the_loss(rows):
    for row in rows:
        assert row["validation_perplexity"] == pytest.approx(
            math.exp(row["validation_loss"]), rel=1e-6
        )
        assert 20 < row["validation_perplexity"] < 300
    assert [row["test_perplexity"] is not None for row in rows] == [False, False, True]
    assert rows[-1]["test_perplexity"] == pytest.approx(math.exp(rows[-1]["test_loss"]), rel=1e-6)


@pytest.mark.slow
def test_the_rate_is_the_one_with_the_lower_loss(rows):
    *search, final = rows
    best = min(search, key=lambda row: row["validation_loss"])
    assert final["learning_rate_factor"] == best["learning_rate_factor"]


def test_accuracy_does_not_choose_a_language_model():
    def row(factor, accuracy, loss, diverged=False):
        return {
            "phase": "search",
            "fidelity": 1.0,
            "learning_rate_factor": factor,
            "warmup_factor": 1.0,
            "weight_decay_factor": 1.0,
            "validation_accuracy": accuracy,
            "validation_loss": loss,
            "validation_perplexity": None if diverged else math.exp(loss),
            "diverged": diverged,
        }

    rows = [row(1.0, 0.1, 3.0), row(2.0, 0.3, 3.5), row(4.0, 0.5, None, diverged=True)]
    assert _drive.choose(rows).learning_rate == 1.0
