"""Findings claim only what the records show; test_claims.py has the verdicts on claims."""

import pytest
import synthetic
from synthetic import Truth, diverge, legw, summarize


def found(truths, **options):
    """Return the findings of a study as one text."""
    return " ".join(summarize(*synthetic.make_study(truths, **options))["findings"])


def changed(truths, change, **options):
    """Return the findings of a study as one text, after `change` of every record."""
    config, rows = synthetic.make_study(truths, **options)
    return " ".join(summarize(config, [change(row) for row in rows])["findings"])


MOMENTUM = Truth((0.98, 0.975, 0.9))
FLAT = (0.98, 0.98, 0.98)

# ---- limits


def test_a_limit_is_said_with_its_interval_and_what_failed():
    text = found({"momentum": Truth((0.98, 0.972, 0.9), (1.0, 1.0, 0.93), spread=0.02)})
    assert (
        "momentum stays within 1 point of its score over small batches (97.60 % at 16 and 64) up "
        "to batch 72 (95 % interval 65 to 78); at 256 it has "
        "90.00 % and fails to optimise: test accuracy lost 7.60 points, training accuracy 7.00."
        in text
    )


def test_a_failure_to_generalise_is_said():
    text = found({"momentum": Truth((0.98, 0.98, 0.9), (1.0, 1.0, 0.99))})
    assert "fails to generalise: test accuracy lost 8.00 points, training accuracy 1.00." in text


def test_a_limit_that_was_not_reached_is_said():
    assert (
        "arm stays within 1 point of its score over small batches (98.00 % at 16 and 64) "
        "up to the largest batch, 256: its limit was not reached." in found({"arm": Truth(FLAT)})
    )


def test_a_limit_among_the_small_batches_cannot_be_told_but_what_fails_can():
    text = found({"arm": Truth((0.98, 0.9, 0.85), (1.0, 0.99, 0.98))})
    assert (
        "The limit of arm cannot be told: its score falls by more than 1 point among the small "
        "batches themselves, "
        "of up to 64; smaller ones have to be tried; at 64 it has 90.00 % and fails to generalise: "
        "test accuracy lost 8.00 points, training accuracy 1.00." in text
    )


def test_a_limit_of_too_few_seeds_cannot_be_told():
    sentence = (
        "The limit of arm cannot be told: there are too few seeds; it takes 3 at every batch size."
    )
    assert sentence in found({"arm": MOMENTUM}, seeds=(1, 2))


def test_divergence_is_said():
    assert "at 256 it has 0.00 % and fails to optimise: training diverged." in found(
        {"arm": Truth(FLAT, diverges=(256,))}
    )


@pytest.mark.parametrize("perplexity", [False, True])
def test_divergence_of_some_seeds_is_said_as_such(perplexity):
    def change(row):
        return diverge(row) if (row["seed"], row["global_batch_size"]) == (1, 256) else row

    text = changed(
        {"arm": Truth((100.0,) * 3 if perplexity else FLAT)}, change, perplexity=perplexity
    )
    assert "fails to optimise: training diverged with 1 of 5 seeds." in text


@pytest.mark.parametrize("perplexity", [False, True])
@pytest.mark.parametrize("seeds", [0, 1, 5])
def test_a_seed_that_diverged_at_the_smallest_batch_takes_the_limit_away(perplexity, seeds):
    config, rows = synthetic.make_study(
        {"arm": Truth((100.0,) * 3 if perplexity else FLAT)}, perplexity=perplexity
    )
    for number, row in enumerate(rows):
        if row["seed"] <= seeds and row["global_batch_size"] == 16 and row["phase"] == "final":
            rows[number] = diverge(row)
    summary = summarize(config, rows)
    some = " with 1 of 5 seeds" if seeds == 1 else ""
    sentence = f"The limit of arm cannot be told: it diverged{some} at the smallest batch, 16."
    assert (sentence in summary["findings"]) is (seeds > 0)
    assert (summary["arms"][0]["limit"]["outcome"] == "cannot_tell") is (seeds > 0)


@pytest.mark.parametrize(
    ("loss", "outputs", "learns"),
    [
        (0.96, 0, False),
        (1.1, 0, False),
        (0.94, 0, True),
        (0.94, 10, True),
        (0.68, 2, False),
        (0.65, 2, True),
    ],
)
def test_an_arm_that_never_learned_has_no_limit(loss, outputs, learns):
    """The first step has loss 1, a uniform guess of two classes 0.69.

    Without this rule an accuracy of 8 % with ten classes at every batch size would be a limit.
    """
    config, rows = synthetic.make_study({"arm": Truth((0.08, 0.08, 0.08), growth=0.5)})
    summary = summarize(
        config, [{**row, "last_epoch_loss": loss, "outputs": outputs} for row in rows]
    )
    sentence = "The limit of arm cannot be told: it did not learn at the smallest batch, 16."
    assert (sentence in summary["findings"]) is not learns
    assert (summary["arms"][0]["limit"]["outcome"] == "cannot_tell") is not learns


def test_an_arm_whose_smallest_batch_is_missing_has_no_result_yet():
    config, rows = synthetic.make_study({"arm": Truth(FLAT, diverges=(64,))})
    text = " ".join(
        summarize(config, [row for row in rows if row["global_batch_size"] != 16])["findings"]
    )
    assert "arm has no result at the smallest batch yet." in text


def test_perplexities_are_said_as_such():
    text = found(
        {"arm": Truth((100.0, 101.0, 120.0), (80.0, 80.0, 81.0), spread=0.0)}, perplexity=True
    )
    assert (
        "arm stays within 5 percent of its score over small batches (100.50 at 16 and 64) up to "
        "batch 91 "
        "(95 % interval 91 to 91); at 256 it has 120.00 and fails to generalise" in text
    )


def test_an_unfinished_study_says_so_and_judges_nothing():
    config, rows = synthetic.make_study({"momentum": MOMENTUM, "lamb": legw(FLAT)})
    findings = summarize(config, rows[:9])["findings"]
    assert (
        "not complete: 1 of 6 cells (arm and batch size) have all their final trials, with 9 "
        "trials so far" in findings[0]
    )
    assert "That " not in " ".join(findings)
    assert (
        "The limit of momentum cannot be told: no batch of more than 4 times the smallest has a "
        "result." in findings
    )


def test_a_study_without_a_tested_cell_says_only_that():
    config, rows = synthetic.make_study({"momentum": MOMENTUM})
    assert len(summarize(config, rows[:2])["findings"]) == 1


# ---- the largest batch


def test_the_difference_at_the_largest_batch_has_an_interval():
    text = found({"momentum": MOMENTUM, "lamb": legw((0.98, 0.98, 0.95))})
    assert (
        "At batch 256: lamb 95.00 %, momentum 90.00 %; the seeds tell lamb apart from momentum "
        "(+4.88 to +5.12 points)" in text
    )


@pytest.mark.parametrize(("spread", "known"), [(0.02, True), (0.15, False)])
def test_an_interval_that_cannot_be_is_not_printed(spread, known):
    """Three seeds between 82.5 and 97.5 % give an interval whose end stands for 109 %."""
    truths = {"a": legw((0.98,) * 3), "b": Truth((0.98, 0.98, 0.9), spread=spread)}
    config, rows = synthetic.make_study(truths, seeds=(1, 2, 3), waterfall=("b", "a"))
    summary = summarize(config, rows)
    said = "apart from b (too few seeds for an interval)"
    assert (said in " ".join(summary["findings"])) is not known
    gain = summary["waterfall"]["steps"][1]
    assert (gain["gain_low"] is not None) is known
    assert gain["told_apart"] is known


def test_a_difference_within_the_noise_is_not_told_apart():
    text = found({"momentum": Truth((0.98, 0.975, 0.9)), "lamb": legw((0.98, 0.98, 0.9005))})
    assert (
        "the seeds do not tell lamb apart from momentum (-0.07 to +0.17 points), its 95 % interval"
        in text
    )


def test_the_best_is_compared_with_every_other_arm_not_the_next_alone():
    wide = Truth((0.98, 0.98, 0.94), spread=0.3)
    text = found(
        {"a": Truth((0.98, 0.98, 0.95)), "b": Truth((0.98, 0.98, 0.94)), "c": wide, "d": MOMENTUM}
    )
    assert "the seeds do not tell a apart from c (" in text
    assert "the seeds tell a apart from b and d, the nearest of them b (" in text
    assert (
        "intervals by Welch at Holm's levels, 95 % for the 3 comparisons together; to see" in text
    )


def test_many_comparisons_need_more_each():
    """p is 0.03 for the difference: significant as one comparison, not as one of four."""
    best = Truth((0.98, 0.98, 0.9506), spread=0.001)
    other = Truth((0.98, 0.98, 0.95), spread=0.0007)
    assert "the seeds tell a apart from b (" in found({"a": best, "b": other})
    assert "the seeds do not tell a apart from b (" in found(
        {"a": best, **dict.fromkeys("bcde", other)}
    )


def test_only_arms_that_train_the_same_thing_are_compared():
    config, rows = synthetic.make_study({"a": Truth(FLAT), "b": MOMENTUM, "c": MOMENTUM})
    config["arms"][1]["model"] = {"name": "other"}
    (sentence,) = (
        text for text in summarize(config, rows)["findings"] if text.startswith("At batch 256: ")
    )
    assert "a 98.00 %, b 90.00 %, c 90.00 %; the seeds tell a apart from c (" in sentence
    assert sentence.endswith("; compared are only arms with the same data, model and loss.")


def test_one_seed_tells_no_difference():
    assert "whether b and a differ cannot be told from these seeds" in found(
        {"a": MOMENTUM, "b": Truth(FLAT)}, seeds=(1,)
    )


def test_the_lower_perplexity_is_the_better():
    text = found({"a": Truth((100.0,) * 3), "b": Truth((100.0, 100.0, 90.0))}, perplexity=True)
    assert (
        "At batch 256: b 90.00, a 100.00; the seeds tell b apart from a (+9.90 to +10.10 percent)"
        in text
    )


def test_an_arm_that_diverged_is_not_compared():
    truths = {"a": Truth((100.0,) * 3), "b": Truth((100.0,) * 3, diverges=(256,))}
    assert "At batch 256: a 100.00, b diverged." in found(truths, perplexity=True)


def test_seeds_that_diverged_are_counted():
    def change(row):
        last = (row["arm"], row["global_batch_size"], row["phase"]) == ("b", 256, "final")
        return diverge(row) if last and row["seed"] < 3 else row

    text = changed({"a": Truth((100.0,) * 3), "b": Truth((100.0,) * 3)}, change, perplexity=True)
    assert "At batch 256: a 100.00, b diverged with 2 of 5 seeds." in text
    text = changed({"a": Truth(FLAT), "b": Truth(FLAT)}, change)
    assert "a 98.00 %, b 58.83 % (2 of 5 seeds diverged and count as 0); the seeds" in text
    # What a diverged seed adds to the spread is no ground for a number of seeds.
    assert "with power 0.8" not in text
    assert "with power 0.8" in changed({"a": Truth(FLAT), "b": Truth(FLAT)}, lambda row: row)


# ---- target, waterfall, search


def test_targets_are_said_reached_or_not():
    steps = tuple(30 * (1 + 100 / size) for size in synthetic.SIZES)
    text = found(
        {
            "a": Truth(FLAT, steps_to_target=steps),
            "b": Truth(FLAT, steps_to_target=(200.0, 100.0, None)),
            "c": Truth(FLAT, steps_to_target=(None,) * 3),
        }
    )

    assert (
        "To the target need, by the fit of steps against batch: a at least 30 steps and 3,000 "
        "examples, so a critical batch of 100 (95 % interval 100 to 100)." in text
    )
    assert (
        "By that fit 20 % more examples than at the smallest batch are needed at: batch 39 "
        "(95 % interval 39 to 39) for a." in text
    )
    assert (
        "The median run did not reach the target: b at 256; c at any batch size, so that it has no "
        "steps to compare." in text
    )
    assert (
        "cannot be told (the median run did not reach the target at every batch up to there) for c."
    ) in text


@pytest.mark.parametrize(
    ("scale", "said"), [(26.0, ""), (24.0, "100 and 24 for a"), (401.0, "100 and 401 for a")]
)
def test_a_noise_scale_beyond_a_factor_of_four_disagrees_with_the_critical_batch(scale, said):
    steps = tuple(30 * (1 + 100 / size) for size in synthetic.SIZES)
    text = found({"a": Truth(FLAT, steps_to_target=steps, noise_scale=(scale,) * 3)})
    opening = "Critical batch and noise scale disagree by more than a factor of 4"
    assert f"{opening}: {said}." in text if said else opening not in text


def test_a_study_without_a_target_says_nothing_of_one():
    assert "target" not in found({"a": Truth(FLAT)})


def test_where_runs_stop_at_the_target_steps_are_compared_and_no_limit_is_claimed():
    steps = {"a": (200.0, 100.0, 50.0), "b": (200.0, 100.0, None), "c": (90.0, 60.0, 1040.0)}
    text = found(
        {name: Truth(FLAT, steps_to_target=one) for name, one in steps.items()}, stops=True
    )
    assert "limit" not in text
    assert "98.00 %" not in text
    assert "Median steps to the target at batch 256: a 50, c 1,040, b not reached." in text


def test_the_waterfall_says_what_is_not_told_apart():
    truths = {
        "a": Truth((0.9, 0.9, 0.8)),
        "b": Truth((0.9, 0.9, 0.85)),
        "c": Truth((0.9, 0.9, 0.8501)),
    }
    text = found(truths, waterfall=("a", "b", "c"))
    assert (
        "At batch 256, from a with 80.00 %, in points: b +5.00, c +0.01; not told apart from seed "
        "noise: c (95 % interval of each gain)." in text
    )


def test_names_that_would_not_be_seen_as_such_are_quoted():
    truths = {"momentum, linear": Truth((0.9, 0.9, 0.8)), "+ LEGW": Truth((0.9, 0.9, 0.85))}
    text = found(truths, waterfall=tuple(truths))
    assert 'from "momentum, linear" with 80.00 %, in points: "+ LEGW" +5.00' in text
    assert '"+ LEGW" stays within 1 point of its score' in text
    assert "gives: 1 for every arm." in text


def test_one_seed_tells_no_gain_apart():
    truths = {"a": Truth((0.9, 0.9, 0.8)), "b": Truth((0.9, 0.9, 0.85))}
    text = found(truths, waterfall=("a", "b"), seeds=(1,))
    assert "+5.00; cannot be told from these seeds: b." in text
    assert "told apart from seed noise" not in text


def test_a_waterfall_of_clear_steps_says_so():
    truths = {"a": Truth((0.9, 0.9, 0.8)), "b": Truth((0.9, 0.9, 0.75))}
    assert "b -5.00; each is told apart from seed noise (95 % interval of each gain)." in found(
        truths, waterfall=("a", "b")
    )


def test_the_same_search_is_counted_from_the_rows():
    assert "Every arm got the same search: 6 trials at each batch size." in found(
        {"a": Truth(FLAT), "b": Truth(FLAT)}, search_seeds=(0, 10)
    )


def test_another_search_is_said():
    config, rows = synthetic.make_study({"a": Truth(FLAT), "b": Truth(FLAT)})
    first = next(place for place, row in enumerate(rows) if row["arm"] == "b")
    text = " ".join(summarize(config, rows[:first] + rows[first + 1 :])["findings"])
    assert (
        "The arms did not get the same search: trials at each batch size were 3 for a; 2 to 3 for "
        "b; they are worth from" in text
    )


def test_searches_of_as_many_trials_are_not_the_same_if_their_candidates_differ():
    config, rows = synthetic.make_study({"a": Truth(FLAT), "b": Truth(FLAT)})
    config["arms"][1]["search"] = config["search"] | {"learning_rate_factors": [1.0, 2.0, 4.0]}
    text = " ".join(summarize(config, rows)["findings"])
    assert "Every arm got the same search" not in text
    assert (
        "The arms did not get the same search: each got 3 trials at each batch size, but of "
        "different candidates (learning_rate_factors differs)." in text
    )


def test_a_search_of_its_own_that_is_the_same_is_the_same():
    config, rows = synthetic.make_study({"a": Truth(FLAT), "b": Truth(FLAT)})
    config["arms"][1]["search"] = dict(config["search"])
    assert "Every arm got the same search: 3 trials" in " ".join(
        summarize(config, rows)["findings"]
    )


def test_what_was_spent_beyond_an_edge_and_what_is_still_at_one_are_told():
    """Cells that stop at different numbers of candidates have had the same search."""
    arms = {"a": Truth(FLAT, best_factor=2.0), "b": Truth(FLAT)}
    config, rows = synthetic.make_study(arms, widen_candidates=2)
    beyond = [
        {**row, "learning_rate_factor": 4.0, "validation_accuracy": 0.1}
        for row in rows
        if (row["arm"], row["phase"], row["learning_rate_factor"]) == ("a", "search", 2.0)
        and row["global_batch_size"] > 16
    ]

    summary = summarize(config, rows + beyond)
    text = " ".join(summary["findings"])
    assert (
        "Every arm got the same search: 3 trials at each batch size, and up to 2 candidates" in text
    )
    assert "more beyond an edge (used by a, 1 at 64, 1 at 256)." in text
    assert "for a at 16, even after the search beyond it, of up to 2 candidates a cell" in text
    assert [point["search_beyond_edges"] for point in summary["arms"][0]["points"]] == [0, 1, 1]
    assert [point["at_edge_of_grid"] for point in summary["arms"][0]["points"]] == [
        True,
        False,
        False,
    ]
    assert "none was needed" in " ".join(
        summarize(*synthetic.make_study({"b": Truth(FLAT)}, widen_candidates=2))["findings"]
    )


def test_the_edges_of_the_search_are_named():
    arms = {"a": Truth(FLAT, best_factor=2.0), "b": Truth(FLAT)}
    assert "lies at the edge of the search for a at 16, 64, 256: a wider one" in found(arms)
    assert "edge" not in found({"b": Truth(FLAT)})


def test_edges_of_the_warmup_and_the_weight_decay_are_named_too():
    arms = {"a": Truth(FLAT, best_warmup_steps=lambda size: 16), "b": Truth(FLAT)}
    text = found(arms, warmup_factors=[0.5, 1.0, 2.0])
    assert (
        "The best warmup lies at the edge of the search for a at 16, 64, 256: a wider one" in text
    )
    assert "learning rate lies at the edge" not in text
    text = found(
        {"a": Truth(FLAT)}, weight_decay_factors=[1.0, 3.0]
    )  # all are equal, so the first is chosen
    assert (
        "The best weight decay lies at the edge of the search for a at 16, 64, 256: a wider one"
        in text
    )


def test_no_warmup_at_all_is_no_edge():
    arm = Truth(FLAT, rule_warmup_steps=lambda size: 0)
    assert "edge" not in found({"a": arm}, warmup_factors=[0.5, 1.0, 2.0])


def test_findings_say_how_far_the_scaling_rule_was_off():
    config, rows = synthetic.make_study({"a": Truth(FLAT)})
    rows = [
        {**row, "learning_rate_factor": 0.5}
        if (row["phase"], row["global_batch_size"]) == ("final", 256)
        else row
        for row in rows
    ]
    assert "the one the scaling rule gives: 0.5 to 1 for a." in " ".join(
        summarize(config, rows)["findings"]
    )
