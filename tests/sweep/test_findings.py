"""Every verdict can come out either way, and nothing is said that the rows do not say."""

import pytest
import synthetic
from synthetic import Truth, legw

from lbopt.sweep.findings.differences import welch_interval
from lbopt.sweep.findings.summary import summarize


def found(truths, **options):
    """Return the findings of a study as one text."""
    return " ".join(summarize(*synthetic.make_study(truths, **options))["findings"])


def claims(truths, **options):
    """Return the verdict and the sentence of every claim."""
    summary = summarize(*synthetic.make_study(truths, **options))
    for claim in summary["claims"]:
        assert claim["sentence"] in summary["findings"]
    return {claim["claim"]: (claim["verdict"], claim["sentence"]) for claim in summary["claims"]}


MOMENTUM = Truth((0.98, 0.975, 0.9))
FLAT = (0.98, 0.98, 0.98)

# ---- limits


def test_a_limit_is_said_with_its_interval_and_what_failed():
    text = found({"momentum": Truth((0.98, 0.972, 0.9), (1.0, 1.0, 0.93), spread=0.02)})
    assert (
        "momentum (98.00% at batch 16) reaches its limit at batch 64 (95 % interval over seeds 16 to 64); at 256 it has "
        "90.00% and fails to optimise: test accuracy lost 8.00 points, training accuracy 7.00." in text
    )


def test_a_failure_to_generalise_is_said():
    text = found({"momentum": Truth((0.98, 0.98, 0.9), (1.0, 1.0, 0.99))})
    assert "fails to generalise: test accuracy lost 8.00 points, training accuracy 1.00." in text


def test_a_limit_that_was_not_reached_is_said():
    assert (
        "arm (98.00% at batch 16) stays within 1 point up to the largest batch, 256: its limit was not reached."
        in found({"arm": Truth(FLAT)})
    )


def test_divergence_is_said():
    assert "at 256 it has 0.00% and fails to optimise: training diverged." in found(
        {"arm": Truth(FLAT, diverges=(256,))}
    )


def test_divergence_of_some_seeds_is_said_as_such():
    config, rows = synthetic.make_study({"arm": Truth(FLAT)})
    rows = [diverge(row) if (row["seed"], row["global_batch_size"]) == (1, 256) else row for row in rows]
    assert "fails to optimise: training diverged with 1 of 5 seeds." in " ".join(summarize(config, rows)["findings"])


@pytest.mark.parametrize("perplexity", [False, True])
def test_an_arm_that_diverged_at_its_smallest_batch_has_no_limit(perplexity):
    score = (100.0,) * 3 if perplexity else FLAT
    worse = (100.0, 100.0, 120.0) if perplexity else (0.98, 0.98, 0.9)
    truths = {"momentum": Truth(score, diverges=(16,)), "sgd": Truth(worse), "lamb": legw(score)}
    text = found(truths, perplexity=perplexity)
    assert "momentum diverged at its smallest batch, 16: it has no limit." in text
    assert "momentum stays" not in text
    assert "(at most 64) held here: lamb went further" in text


@pytest.mark.parametrize(
    ("perplexity", "seeds", "said"), [(False, 2, False), (False, 3, True), (True, 1, True)]
)  # fmt: skip
def test_half_of_the_seeds_may_take_the_limit_away(perplexity, seeds, said):
    config, rows = synthetic.make_study({"arm": Truth((100.0,) * 3 if perplexity else FLAT)}, perplexity=perplexity)
    rows = [diverge(row) if row["seed"] <= seeds and row["global_batch_size"] == 16 and row["phase"] == "final" else row for row in rows]  # fmt: skip
    summary = summarize(config, rows)
    sentence = f"arm diverged with {seeds} of 5 seeds at its smallest batch, 16: it has no limit."
    assert (sentence in summary["findings"]) is said
    assert (summary["arms"][0]["limit"] is None) is said
    assert (summary["arms"][0]["limit_interval"] is None) is said


def test_an_arm_whose_smallest_batch_is_missing_has_no_result_yet():
    config, rows = synthetic.make_study({"arm": Truth(FLAT, diverges=(64,))})
    text = " ".join(summarize(config, [row for row in rows if row["global_batch_size"] != 16])["findings"])
    assert "arm has no result at the smallest batch yet." in text


def diverge(row):
    """Return the row of a trial that diverged."""
    scores = {name: None for name in row if name.endswith(("_loss", "_accuracy", "_perplexity"))}
    return {**row, **scores, "diverged": True, "divergence_step": 3}


def test_perplexities_are_said_as_such():
    text = found({"arm": Truth((100.0, 101.0, 120.0), (80.0, 80.0, 81.0), spread=0.0)}, perplexity=True)
    assert (
        "arm (100.00 at batch 16) reaches its limit at batch 64; at 256 it has 120.00 and fails to generalise" in text
    )


def test_an_unfinished_study_says_so_and_judges_nothing():
    config, rows = synthetic.make_study({"momentum": MOMENTUM, "lamb": legw(FLAT)})
    findings = summarize(config, rows[:9])["findings"]
    assert (
        "not complete: 1 of 6 cells (arm and batch size) have all their final trials, with 9 trials so far"
        in findings[0]
    )
    assert "That " not in " ".join(findings)
    assert "momentum (98.00% at batch 16) stays within 1 point at every batch measured so far, up to 16." in findings


def test_a_study_without_a_tested_cell_says_only_that():
    config, rows = synthetic.make_study({"momentum": MOMENTUM})
    assert len(summarize(config, rows[:2])["findings"]) == 1


# ---- layerwise adaptation under LEGW goes further


@pytest.mark.parametrize(
    ("lamb", "lars", "verdict", "sentence"),
    [
        (FLAT, FLAT, "held", "(at most 64) held here: lamb and lars went further."),
        (FLAT, (0.98, 0.9, 0.9), "held", "(at most 64) held here: lamb went further, lars fell short."),
        ((0.98, 0.97, 0.9), (0.98, 0.9, 0.9), "did not hold", "(at most 64) did not hold here: lamb went as far, lars fell short."),
    ],
)  # fmt: skip
def test_findings_favour_nobody(lamb, lars, verdict, sentence):
    said = claims({"momentum": MOMENTUM, "lamb": legw(lamb), "lars": legw(lars, optimizer="lars")})
    assert said["layerwise_legw_goes_further"][0] == verdict
    assert sentence in said["layerwise_legw_goes_further"][1]


def test_no_verdict_when_another_arm_reaches_the_largest_batch():
    verdict, sentence = claims({"momentum": Truth(FLAT), "lamb": legw(FLAT)})["layerwise_legw_goes_further"]
    assert verdict == "cannot be told"
    assert sentence.endswith("cannot be told here: another arm reached the largest batch too.")


def test_overlapping_intervals_are_said():
    wide = {"momentum": Truth((0.98, 0.972, 0.9), spread=0.02), "lamb": legw((0.98, 0.98, 0.971), spread=0.02)}
    assert (
        "the 95 % interval of each reaches down to that of momentum" in claims(wide)["layerwise_legw_goes_further"][1]
    )


def test_linear_scaling_is_compared_apart_from_the_others():
    adam = Truth(FLAT, optimizer="adam", scaling_rule="sqrt")
    said = claims({"momentum": MOMENTUM, "adam": adam, "lamb": legw(FLAT)})
    assert said["layerwise_legw_goes_further"][0] == "cannot be told"
    verdict, sentence = said["layerwise_legw_goes_further_than_linear_scaling"]
    assert verdict == "held"
    assert "than the arms with linear scaling (at most 64) held here: lamb went further." in sentence


def test_linear_scaling_can_win():
    adam = Truth((0.98, 0.9, 0.9), optimizer="adam", scaling_rule="sqrt")
    said = claims({"momentum": MOMENTUM, "adam": adam, "lamb": legw((0.98, 0.9, 0.9))})
    assert said["layerwise_legw_goes_further_than_linear_scaling"][0] == "did not hold"


@pytest.mark.parametrize("truths", [{"momentum": MOMENTUM}, {"lamb": legw(FLAT)}])
def test_what_was_not_compared_is_not_judged(truths):
    assert "layerwise_legw_goes_further" not in claims(truths)


def test_all_others_with_linear_scaling_are_judged_once():
    assert "layerwise_legw_goes_further_than_linear_scaling" not in claims({"momentum": MOMENTUM, "lamb": legw(FLAT)})


# ---- the largest batch


def test_the_difference_at_the_largest_batch_has_an_interval():
    text = found({"momentum": MOMENTUM, "lamb": legw((0.98, 0.98, 0.95))})
    assert "At batch 256: lamb 95.00%, momentum 90.00%; lamb and momentum are told apart" in text
    assert "is +4.88 to +5.12 points." in text


def test_a_difference_within_the_noise_is_not_told_apart():
    text = found({"momentum": Truth((0.98, 0.975, 0.9)), "lamb": legw((0.98, 0.98, 0.9005))})
    assert "lamb and momentum are not told apart from seed noise" in text


def test_one_seed_tells_no_difference():
    assert "differ cannot be told from these seeds" in found({"a": MOMENTUM, "b": Truth(FLAT)}, seeds=(1,))


def test_the_lower_perplexity_is_the_better():
    text = found({"a": Truth((100.0,) * 3), "b": Truth((100.0, 100.0, 90.0))}, perplexity=True)
    assert "At batch 256: b 90.00, a 100.00; b and a are told apart" in text


def test_welch_agrees_with_scipy():
    from scipy import stats

    ours, theirs = [1.0, 2.0, 4.0, 3.5], [0.5, 1.5, 0.7]
    interval = stats.ttest_ind(ours, theirs, equal_var=False).confidence_interval(0.9)
    assert welch_interval(ours, theirs, 0.9) == pytest.approx(tuple(interval), rel=1e-9)


# ---- LEGW


@pytest.mark.parametrize(
    ("peak", "verdict"), [(lambda size: 8, "held"), (lambda size: 2048 // size, "did not hold"), (lambda size: 1, "cannot be told")]
)  # fmt: skip
def test_where_the_lipschitz_constant_peaks(peak, verdict):
    assert claims({"a": Truth(FLAT, peak_step=peak)})["lipschitz_peak_stays"][0] == verdict


def test_a_constant_that_was_not_probed_is_not_judged():
    assert "lipschitz_peak_stays" not in claims({"a": Truth(FLAT)})


# ---- noise scale


def noisy(scale, limit, **changes):
    """Return an arm with a noise scale at the smallest batch, and a limit."""
    test = {16: (0.98, 0.9, 0.9), 64: (0.98, 0.98, 0.9), 256: FLAT}[limit]
    return Truth(test, noise_scale=(scale, 2 * scale, 4 * scale), **changes)


@pytest.mark.parametrize(
    ("truths", "verdict", "part"),
    [
        (
            {"a": noisy(30.0, 64)},
            "held",
            "the limit is 2.13 times the noise scale, within a factor of 4 for 1 of 1 arms",
        ),
        ({"a": noisy(300.0, 64)}, "did not hold", "0.213 times the noise scale, within a factor of 4 for 0 of 1 arms"),
        (
            {"a": noisy(30.0, 16), "b": noisy(31.0, 16), "c": noisy(60.0, 64)},
            "held",
            "3 of 3 arms, rank correlation 0.87",
        ),
        ({"a": noisy(60.0, 16), "b": noisy(50.0, 16), "c": noisy(40.0, 64)}, "did not hold", "rank correlation -0.87"),
        ({"a": noisy(30.0, 256)}, "cannot be told", "no arm with a measured noise scale reached its limit"),
    ],
)
def test_whether_the_noise_scale_predicts_the_limit(truths, verdict, part):
    said = claims(truths)["noise_scale_predicts_limit"]
    assert said[0] == verdict
    assert part in said[1]


def test_a_noise_scale_that_was_not_measured_is_not_judged():
    assert "noise_scale_predicts_limit" not in claims({"a": MOMENTUM})


@pytest.mark.parametrize(("scale", "verdict"), [(90.0, "held"), (900.0, "did not hold")])
def test_whether_the_noise_scale_predicts_the_critical_batch(scale, verdict):
    steps = tuple(30 * (1 + 100 / size) for size in synthetic.SIZES)
    arm = Truth(FLAT, noise_scale=(scale,) * 3, steps_to_target=steps)
    assert claims({"a": arm}, stops=True)["noise_scale_predicts_critical_batch"][0] == verdict


# ---- diffusion


@pytest.mark.parametrize(
    ("growths", "verdict", "part"),
    [
        (("log", "log", 0.6), "held", "in 6 of 9 cells"),
        (("log", 0.6, 0.6), "did not hold", "in 3 of 9 cells"),
        (("log", 0.6), "cannot be told", "in 3 of 6 cells"),
        ((0.6, 0.6, 0.6), "did not hold", "median exponent 0.60"),
    ],
)
def test_whether_diffusion_is_logarithmic(growths, verdict, part):
    truths = {str(place): Truth(FLAT, growth=growth) for place, growth in enumerate(growths)}
    said = claims(truths)["diffusion_is_logarithmic"]
    assert said[0] == verdict
    assert part in said[1]


def test_diffusion_that_was_not_measured_is_not_judged():
    assert "diffusion_is_logarithmic" not in claims({"a": Truth(FLAT)})


# ---- target, waterfall, search


def test_targets_are_said_reached_or_not():
    steps = tuple(30 * (1 + 100 / size) for size in synthetic.SIZES)
    text = found({"a": Truth(FLAT, steps_to_target=steps), "b": Truth(FLAT, steps_to_target=(200.0, 100.0, None))})
    assert (
        "To the target need, by the fit of steps against batch: a at least 30 steps and 3,000 examples, so a critical batch of 100."
        in text
    )
    assert "The median run did not reach the target: b at 256." in text


def test_a_study_without_a_target_says_nothing_of_one():
    assert "target" not in found({"a": Truth(FLAT)})


def test_where_runs_stop_at_the_target_steps_are_compared_and_no_limit_is_claimed():
    steps = {"a": (200.0, 100.0, 50.0), "b": (200.0, 100.0, None), "c": (90.0, 60.0, 1040.0)}
    text = found({name: Truth(FLAT, steps_to_target=one) for name, one in steps.items()}, stops=True)
    assert "limit" not in text
    assert "98.00%" not in text
    assert "Median steps to the target at batch 256: a 50, c 1,040, b not reached." in text


def test_the_waterfall_says_what_is_not_told_apart():
    truths = {"a": Truth((0.9, 0.9, 0.8)), "b": Truth((0.9, 0.9, 0.85)), "c": Truth((0.9, 0.9, 0.8501))}
    text = found(truths, waterfall=("a", "b", "c"))
    assert "At batch 256, from a with 80.00%, in points: b +5.00, c +0.01; not told apart from seed noise: c." in text


def test_names_that_would_not_be_seen_as_such_are_quoted():
    truths = {"momentum, linear": Truth((0.9, 0.9, 0.8)), "+ LEGW": Truth((0.9, 0.9, 0.85))}
    text = found(truths, waterfall=tuple(truths))
    assert 'from "momentum, linear" with 80.00%, in points: "+ LEGW" +5.00' in text
    assert '"+ LEGW" (90.00% at batch 16) reaches its limit' in text
    assert "gives: 1 for every arm." in text


def test_one_seed_tells_no_gain_apart():
    truths = {"a": Truth((0.9, 0.9, 0.8)), "b": Truth((0.9, 0.9, 0.85))}
    text = found(truths, waterfall=("a", "b"), seeds=(1,))
    assert "+5.00; one seed tells nothing of the noise." in text
    assert "told apart from seed noise:" not in text


def test_a_waterfall_of_clear_steps_says_so():
    truths = {"a": Truth((0.9, 0.9, 0.8)), "b": Truth((0.9, 0.9, 0.75))}
    assert "b -5.00; each is more than its seed spread." in found(truths, waterfall=("a", "b"))


def test_the_same_search_is_counted_from_the_rows():
    assert "Every arm got the same search: 6 trials at each batch size." in found({"a": Truth(FLAT), "b": Truth(FLAT)}, search_seeds=(0, 10))  # fmt: skip


def test_another_search_is_said():
    config, rows = synthetic.make_study({"a": Truth(FLAT), "b": Truth(FLAT)})
    first = next(place for place, row in enumerate(rows) if row["arm"] == "b")
    text = " ".join(summarize(config, rows[:first] + rows[first + 1 :])["findings"])
    assert (
        "The arms did not get the same search: trials at each batch size were 3 for a; 2 to 3 for b; they are worth from"
        in text
    )


def test_the_edges_of_the_search_are_named():
    arms = {"a": Truth(FLAT, best_factor=2.0), "b": Truth(FLAT)}
    assert "lies at the edge of the search for a at 16, 64, 256: a wider one" in found(arms)
    assert "edge" not in found({"b": Truth(FLAT)})


def test_findings_say_how_far_the_scaling_rule_was_off():
    config, rows = synthetic.make_study({"a": Truth(FLAT)})
    rows = [
        {**row, "learning_rate_factor": 0.5} if (row["phase"], row["global_batch_size"]) == ("final", 256) else row
        for row in rows
    ]
    assert "the one the scaling rule gives: 0.5 to 1 for a." in " ".join(summarize(config, rows)["findings"])
