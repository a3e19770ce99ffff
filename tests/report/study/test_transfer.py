"""The transfer of warmup steps is judged by search scores, not by the search's layout."""

import math
import random

import numpy as np
import pytest
import synthetic
from synthetic import Truth, diverge, summarize

from lbopt.report.study._claim_warmup import (
    EPOCHS,
    STEPS,
    Warmups,
    compare,
    judge_warmups,
    landing,
    total,
)

FLAT = (0.98, 0.98, 0.98)
WARMUPS = {"warmup_factors": [0.0, 0.25, 0.5, 1.0, 2.0, 4.0]}
BATCHES = (16, 32, 64, 128, 256, 512, 1024)


def found(truths, **options):
    """Return the findings of a study as one text."""
    return " ".join(summarize(*synthetic.make_study(truths, **options))["findings"])


def claims(truths, **options):
    """Return the verdict and the sentence of every claim."""
    summary = summarize(*synthetic.make_study(truths, **options))
    return {claim["claim"]: (claim["verdict"], claim["sentence"]) for claim in summary["claims"]}


@pytest.mark.parametrize("rule", [lambda size: 32, lambda size: 2048 // size])
@pytest.mark.parametrize(
    ("best", "verdict", "slope"),
    [
        (lambda size: 32, "held", "batch^0.00 for a"),
        (lambda size: 2048 // size, "did not hold", "batch^-1.00 for a"),
    ],
)  # fmt: skip
def test_the_right_transfer_is_what_was_planted_whatever_the_rule(rule, best, verdict, slope):
    arm = Truth(FLAT, rule_warmup_steps=rule, best_warmup_steps=best)
    said = claims({"a": arm, "b": arm, "c": arm}, **WARMUPS)["constant_warmup_steps"]
    assert said[0] == verdict
    assert slope in said[1]


def test_warmup_steps_that_grow_with_the_batch_are_not_constant_either():
    arm = Truth(FLAT, rule_warmup_steps=lambda size: 32, best_warmup_steps=lambda size: size / 2)
    verdict, sentence = claims(dict.fromkeys("abc", arm), **WARMUPS)["constant_warmup_steps"]
    assert verdict == "did not hold"
    assert "than as steps in proportion to the batch in 0 of 12 cases and worse in 12" in sentence


def searched(rule, badness, factors=(0.25, 1.0, 4.0)):
    """Return the cells of an arm whose warmup was searched; `badness` takes (batch size, steps)."""
    cells = []
    for size in BATCHES:
        steps = tuple(rule(size) * factor for factor in factors)
        lost = [badness(size, one) for one in steps]
        ranks = tuple(sorted(set(lost)).index(one) for one in lost)
        cells.append(Warmups(size, steps, ranks, lost.index(min(lost))))
    return cells


def lstm_layout(badness):
    """Return two arms with constant steps and one with constant epochs, as in LEGW's study."""
    rules = {"A": lambda size: 8, "B": lambda size: 8, "C": lambda size: 2048 / size}
    return {name: searched(rule, badness) for name, rule in rules.items()}


def valley(wanted, noise=0.0, seed=0):
    """Return a badness that grows with the distance from each batch size's best warmup."""
    draw = random.Random(seed)
    return lambda size, steps: 0.002 * abs(math.log2(steps / wanted(size))) + draw.gauss(0, noise)


@pytest.mark.slow
def test_noise_is_no_evidence_of_any_transfer():
    verdicts = []
    for seed in range(200):
        draw = random.Random(seed)
        verdicts.append(
            judge_warmups(lstm_layout(lambda size, steps, draw=draw: draw.random())).verdict
        )
    # The expected share is 2.5 % for constant steps, and the same for constant epochs and for
    # growing steps.
    assert verdicts.count("held") <= 10
    assert verdicts.count("cannot be told") >= 180


@pytest.mark.parametrize(
    ("wanted", "verdict"), [(lambda size: 8, "held"), (lambda size: 2048 / size, "did not hold")]
)  # fmt: skip
@pytest.mark.parametrize("seed", range(5))
def test_a_transfer_is_found_through_noise(wanted, verdict, seed):
    assert judge_warmups(lstm_layout(valley(wanted, 0.001, seed))).verdict == verdict


def test_warmups_that_should_grow_are_never_taken_for_constant_ones():
    """In these grids few warmups can be transferred so far, so chance is not always excluded."""
    growing = [
        judge_warmups(lstm_layout(valley(lambda size: size / 8, 0.001, seed))) for seed in range(10)
    ]
    assert {claim.verdict for claim in growing} == {"did not hold", "cannot be told"}


@pytest.mark.parametrize("sign", [1, -1])
def test_a_warmup_best_at_the_end_of_what_was_tried_tells_nothing(sign):
    claim = judge_warmups(lstm_layout(lambda size, steps: sign * math.log2(steps) / 100))
    assert claim.verdict == "cannot be told"
    assert (
        "no warmup chosen inside its tried range can be transferred to another batch size"
        in claim.sentence
    )


def test_arms_that_contradict_each_other_are_not_outvoted():
    arms = lstm_layout(valley(lambda size: 8))
    arms["C"] = lstm_layout(valley(lambda size: 2048 / size))["C"]
    claim = judge_warmups(arms)
    assert claim.verdict == "cannot be told"
    assert claim.sentence.endswith("; but the opposite holds for C alone.")
    assert (
        "batch^0.00 for A, batch^0.00 for B, batch^-1.00 for C (0 is constant steps"
        in claim.sentence
    )


def test_perplexities_and_divergence_are_ranked_too():
    arm = Truth((100.0,) * len(BATCHES), rule_warmup_steps=lambda size: 8)
    search = {"warmup_factors": [0.25, 1.0, 4.0]}
    config, rows = synthetic.make_study(
        dict.fromkeys("AB", arm), sizes=BATCHES, perplexity=True, **search
    )
    long = [row["phase"] == "search" and row["warmup_steps"] > 8 for row in rows]
    rows = [diverge(row) if hit else row for row, hit in zip(rows, long, strict=True)]
    (claim,) = summarize(config, rows)["claims"]
    assert (claim["claim"], claim["verdict"]) == ("constant_warmup_steps", "held")


def test_a_search_too_narrow_to_say_otherwise_says_nothing():
    arm = Truth(FLAT, rule_warmup_steps=lambda size: 32, best_warmup_steps=lambda size: 32)
    verdict, sentence = claims({"a": arm}, warmup_factors=[0.7, 1.0, 1.4])["constant_warmup_steps"]
    assert verdict == "cannot be told"
    assert "because no tried warmup is near the transferred ones" in sentence


def test_a_warmup_drawn_together_with_the_learning_rate_is_not_told_apart_from_it():
    search = {"method": "halton", "warmup_range": [0.25, 4.0]}
    verdict, sentence = claims({"a": Truth(FLAT)}, **search)["constant_warmup_steps"]
    assert verdict == "cannot be told"
    assert "warmup and learning rate were sampled together" in sentence


def test_candidates_chosen_by_their_steps_to_a_target_are_not_judged_by_accuracy():
    arm = Truth(FLAT, steps_to_target=(200.0, 100.0, 50.0))
    assert "constant_warmup_steps" not in claims({"a": arm}, stops=True, **WARMUPS)


def test_warmup_that_was_not_searched_is_not_judged():
    assert "constant_warmup_steps" not in claims({"a": Truth(FLAT)})


def test_a_warmup_lands_only_near_one_that_was_tried():
    small, large = (Warmups(size, (0.0, 2.0, 8.0, 32.0), (0, 1, 2, 3), 2) for size in (16, 32))
    assert landing(small, large, STEPS).tolist() == [-1, 1, 2, -1]
    assert landing(small, large, EPOCHS).tolist() == [
        -1,
        -1,
        -1,
        -1,
    ]  # 1 and 4 lie halfway, a factor of 2 off


def test_chance_is_symmetric_and_adds_up():
    cells = [Warmups(size, (2.0, 8.0, 32.0), (1, 0, 2), 1) for size in BATCHES]
    contest = compare(cells, EPOCHS)
    both = total([contest, compare(cells, EPOCHS, 1)])
    low, high = contest.by_chance
    assert abs(low + high) <= 1
    assert 0 < high < contest.lead == 10
    assert (both.lead, both.told[0]) == (20, 20)


def test_chance_of_equal_arms_adds_up_like_noise():
    """With 16 arms it is 4 times as wide as with one, within 5 percent over 2000 shuffles."""
    cells = [Warmups(size, (2.0, 8.0, 32.0), (1, 0, 2), 1) for size in BATCHES]
    one = compare(cells, EPOCHS)
    many = total([compare(cells, EPOCHS, index) for index in range(16)])
    spreads = [np.std((contest.better - contest.worse)[1:]) for contest in (one, many)]
    assert spreads[1] / spreads[0] == pytest.approx(4, rel=0.1)
    low, high = many.by_chance
    assert high - low == pytest.approx(2 * 1.96 * 4 * spreads[0], rel=0.1)
    assert many.lead == 16 * one.lead


def test_what_the_rules_own_warmup_costs_is_said():
    text = found(
        {
            "a": Truth(
                FLAT, rule_warmup_steps=lambda size: 32, best_warmup_steps=lambda size: 2048 // size
            )
        },
        **WARMUPS,
    )
    assert (
        "would have been worse by: a up to 4 points (at batch 256)." in text
    )  # 0.01 for each of 2 doublings, squared


def test_a_rule_that_was_too_short_costs_too():
    arm = Truth(FLAT, rule_warmup_steps=lambda size: 32, best_warmup_steps=lambda size: 64)
    assert "would have been worse by: a up to 1 point (at batch 256)." in found(
        {"a": arm}, **WARMUPS
    )


def test_a_rule_that_was_right_costs_nothing():
    arm = Truth(FLAT, rule_warmup_steps=lambda size: 32, best_warmup_steps=lambda size: 32)
    assert "would have been worse by: a up to 0 points." in found({"a": arm}, **WARMUPS)


def test_a_rule_whose_own_warmup_diverged_is_said_to():
    arm = Truth(
        (100.0,) * 3, rule_warmup_steps=lambda size: 32, best_warmup_steps=lambda size: 2048 // size
    )
    config, rows = synthetic.make_study({"a": arm}, perplexity=True, **WARMUPS)
    own = [row["phase"] == "search" and row["warmup_factor"] == 1 for row in rows]
    rows = [
        diverge(row) if hit and row["global_batch_size"] == 256 else row
        for row, hit in zip(rows, own, strict=True)
    ]
    text = " ".join(summarize(config, rows)["findings"])
    assert (
        "would have been worse by: a up to 4 percent (at batch 16) and diverged at batch 256."
        in text
    )
    rows = [diverge(row) if hit else row for row, hit in zip(rows, own, strict=True)]
    assert "worse by: a diverged at batch 16, 64 and 256." in " ".join(
        summarize(config, rows)["findings"]
    )


def test_a_study_with_a_target_says_nothing_of_the_rules_own_warmup():
    arm = Truth(FLAT, rule_warmup_steps=lambda size: 32, steps_to_target=(200.0, 100.0, 50.0))
    assert "Had every arm kept" not in found({"a": arm}, **WARMUPS)
