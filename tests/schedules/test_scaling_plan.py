"""The scaling plan against published tables and its own invariants."""

import math

import pytest
from refusal import refused

import lbopt

IMAGENET = 1_281_167
LAMB_RESNET50 = {
    "base_learning_rate": 4 / (2**3 * 100),
    "base_batch_size": 512,
    "base_warmup_epochs": 0.3125,
}
LARS_RESNET50 = {"base_learning_rate": 4.0, "base_batch_size": 512, "base_warmup_epochs": 10 / 2**6}
ALL = (512, 1024, 2048, 4096, 8192, 16384, 32768)


def test_lamb_resnet50_warms_up_for_782_steps_at_every_batch(capsys):
    rows = lbopt.scaling_plan(ALL, **LAMB_RESNET50, num_examples=IMAGENET, num_epochs=90)
    assert [row.warmup_steps for row in rows] == [782] * 7
    assert [row.warmup_epochs for row in rows] == [0.3125, 0.625, 1.25, 2.5, 5, 10, 20]
    for row, rate in zip(rows[3:], (0.01414, 0.02, 0.02828, 0.04), strict=True):
        assert math.isclose(row.learning_rate, rate, rel_tol=5e-4)
    assert rows[-1].total_steps == 3519

    printed = capsys.readouterr().out.splitlines()
    assert printed[0].split() == [
        "batch",
        "learning",
        "rate",
        "warmup",
        "epochs",
        "warmup",
        "steps",
        "total",
        "steps",
    ]
    assert printed[-1].split() == ["32768", "0.04", "20", "782", "3519"]
    assert len(printed) == 8


def test_lars_resnet50_warms_up_for_391_steps_up_to_16k():
    rows = lbopt.scaling_plan(ALL[:-1], **LARS_RESNET50, num_examples=IMAGENET, num_epochs=90)
    assert [row.warmup_steps for row in rows] == [391] * 6
    assert [row.learning_rate for row in rows] == pytest.approx(
        [2 ** (2 + k / 2) for k in range(6)]
    )
    assert [row.warmup_epochs for row in rows] == [10 / 2**k for k in range(6, 0, -1)]


def test_bert_warms_up_for_one_number_of_steps():
    """Tests only that the number is constant, not the paper's value; an epoch is the whole run."""
    rows = lbopt.scaling_plan(
        ALL, 5 / (2**3 * 1e3), 512, 1 / 320, num_examples=512 * 1_000_000, num_epochs=1
    )
    assert len({row.warmup_steps for row in rows}) == 1


def test_constant_epochs_and_none():
    rows = lbopt.scaling_plan(
        (256, 1024), 0.1, 256, 5.0, 25_600, 50, rule="linear", warmup_rule="epochs"
    )
    assert [
        (row.learning_rate, row.warmup_epochs, row.warmup_steps, row.total_steps) for row in rows
    ] == [
        (0.1, 5.0, 500, 5000),
        (0.4, 5.0, 125, 1250),
    ]
    rows = lbopt.scaling_plan((1024,), 0.1, 256, 5.0, 25_600, 50, rule="none", warmup_rule="none")
    assert (rows[0].learning_rate, rows[0].warmup_steps) == (0.1, 0)


def test_plan_is_what_the_schedule_does():
    [row] = lbopt.scaling_plan((4096,), **LAMB_RESNET50, num_examples=IMAGENET, num_epochs=90)
    schedule = lbopt.legw_schedule(
        **LAMB_RESNET50, global_batch_size=4096, num_examples=IMAGENET, num_epochs=90
    )
    assert math.isclose(schedule(row.warmup_steps), row.learning_rate, rel_tol=1e-6)
    assert schedule(row.warmup_steps - 1) < row.learning_rate
    assert float(schedule(row.total_steps)) == 0 < float(schedule(row.total_steps - 1))


@pytest.mark.parametrize(
    ("changes", "field", "value", "code"),
    [
        ({"global_batch_sizes": (512, 131072)}, "base_warmup_epochs", 0.3125, "conflict"),
        ({"warmup_rule": "lewg"}, "warmup_rule", "lewg", "choice"),
        ({"rule": "cubic"}, "rule", "cubic", "choice"),
        ({"base_warmup_epochs": -1}, "base_warmup_epochs", -1, "value"),
        ({"global_batch_sizes": (0,)}, "global_batch_size", 0, "value"),
        ({"global_batch_sizes": (512.5,)}, "global_batch_size", 512.5, "value"),
        ({"global_batch_sizes": ()}, "global_batch_sizes", (), "value"),
        ({"global_batch_sizes": 512}, "global_batch_sizes", 512, "value"),
        ({"base_learning_rate": -1.0}, "base_learning_rate", -1.0, "value"),
        ({"base_learning_rate": math.nan}, "base_learning_rate", math.nan, "value"),
        ({"num_epochs": math.nan}, "num_epochs", math.nan, "value"),
        ({"num_epochs": math.inf}, "num_epochs", math.inf, "value"),
        ({"num_epochs": 0}, "num_epochs", 0, "value"),
        ({"base_warmup_epochs": math.inf}, "base_warmup_epochs", math.inf, "value"),
        ({"num_examples": 0}, "num_examples", 0, "value"),
    ],
)
def test_refusals(changes, field, value, code):
    good = {
        "global_batch_sizes": (512,),
        **LAMB_RESNET50,
        "num_examples": IMAGENET,
        "num_epochs": 2,
    }
    with refused(field, value, code):
        lbopt.scaling_plan(**{**good, **changes})


PLAN = {"num_examples": IMAGENET, "num_epochs": 90, **LAMB_RESNET50}
MISSPELT = {
    "rule": ("liner", "linear", lambda bad: lbopt.scale_learning_rate(0.1, 8, 16, bad)),
    "warmup_rule": (
        "epoch",
        "epochs",
        lambda bad: lbopt.scaling_plan(ALL, **PLAN, warmup_rule=bad),
    ),
    "decay": ("cosin", "cosine", lambda bad: lbopt.warmup_schedule(0.1, 5, 20, bad)),
    "decay_from": (
        "warmup-end",
        "warmup_end",
        lambda bad: lbopt.warmup_schedule(0.1, 5, 20, decay_from=bad),
    ),
}


@pytest.mark.parametrize("field", MISSPELT)
def test_a_misspelt_choice_is_answered_with_the_nearest(field):
    bad, meant, build = MISSPELT[field]
    with refused(field, bad, "choice") as caught:
        build(bad)
    assert f"{meant!r}?" in caught.value.reason
