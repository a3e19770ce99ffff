"""Every verdict can come out either way, and nothing is said that the rows do not say."""

import math
import random

import pytest
import synthetic
from synthetic import Truth, legw

from lbopt.sweep.findings.differences import welch_interval
from lbopt.sweep.findings.metric import PERPLEXITY
from lbopt.sweep.findings.summary import summarize
from lbopt.sweep.findings.transfer import constant_warmup_steps
from lbopt.sweep.findings.warmups import EPOCHS, STEPS, Warmups, compare, landing, total


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
        "90.00% and fails to optimise: of the 8.00 points that test accuracy lost, training accuracy lost 7.00." in text
    )


def test_a_failure_to_generalise_is_said():
    text = found({"momentum": Truth((0.98, 0.98, 0.9), (1.0, 1.0, 0.99))})
    assert "fails to generalise: of the 8.00 points that test accuracy lost, training accuracy lost 1.00." in text


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


WARMUPS = {"warmup_factors": [0.0, 0.25, 0.5, 1.0, 2.0, 4.0]}
BATCHES = (16, 32, 64, 128, 256, 512, 1024)


@pytest.mark.parametrize("rule", [lambda size: 32, lambda size: 2048 // size])
@pytest.mark.parametrize(
    ("best", "verdict", "slope"), [(lambda size: 32, "held", "batch^0.00 for a"), (lambda size: 2048 // size, "did not hold", "batch^-1.00 for a")]
)  # fmt: skip
def test_the_right_transfer_is_what_was_planted_whatever_the_rule(rule, best, verdict, slope):
    arm = Truth(FLAT, rule_warmup_steps=rule, best_warmup_steps=best)
    said = claims({"a": arm, "b": arm, "c": arm}, **WARMUPS)["constant_warmup_steps"]
    assert said[0] == verdict
    assert slope in said[1]


def test_warmup_steps_that_grow_with_the_batch_are_not_constant_either():
    arm = Truth(FLAT, rule_warmup_steps=lambda size: 32, best_warmup_steps=lambda size: size / 2)
    verdict, sentence = claims({name: arm for name in "abc"}, **WARMUPS)["constant_warmup_steps"]
    assert verdict == "did not hold"
    assert "than as steps in proportion to the batch in 0 of 12 cases and worse in 12" in sentence


def searched(name, rule, badness, factors=(0.25, 1.0, 4.0), sizes=BATCHES, metric="accuracy"):
    """Return an arm of a summary in which warmup was searched; `badness` of (batch size, warmup steps), None if it diverged."""
    points = []
    for size in sizes:
        steps = {factor: rule(size) * factor for factor in factors}
        lost = {factor: badness(size, one) for factor, one in steps.items()}
        tried = [
            {
                "learning_rate_factor": 1.0,
                "warmup_factor": factor,
                "weight_decay_factor": 1.0,
                "warmup_steps": steps[factor],
                "fidelity": 1.0,
                f"validation_{metric}_mean": one if one is None or metric != "accuracy" else 1 - one,
            }
            for factor, one in lost.items()
        ]
        best = min((one for one in lost if lost[one] is not None), key=lost.__getitem__)
        points.append({"global_batch_size": size, "warmup_factor": best, "target": None, "search": tried})
    return {"arm": name, "points": points}


def lstm_layout(badness, **options):
    """Return two arms around constant steps and one around constant epochs, as `digits_lstm_legw` has."""
    rules = {"A": lambda size: 8, "B": lambda size: 8, "C": lambda size: 2048 / size}
    return [searched(name, rule, badness, **options) for name, rule in rules.items()]


def valley(wanted, noise=0.0, seed=0):
    """Return a badness that grows with the distance from the wanted warmup steps of every batch size."""
    draw = random.Random(seed)
    return lambda size, steps: 0.002 * abs(math.log2(steps / wanted(size))) + draw.gauss(0, noise)


def test_noise_is_no_evidence_of_any_transfer():
    verdicts = []
    for seed in range(200):
        draw = random.Random(seed)
        verdicts.append(constant_warmup_steps(lstm_layout(lambda size, steps, draw=draw: draw.random())).verdict)
    # 2.5 % are expected on the side of constant steps, and as many each for constant epochs and for growing steps.
    assert verdicts.count("held") <= 10
    assert verdicts.count("cannot be told") >= 180


@pytest.mark.parametrize(
    ("wanted", "verdict"), [(lambda size: 8, "held"), (lambda size: 2048 / size, "did not hold"), (lambda size: size / 8, "did not hold")]
)  # fmt: skip
@pytest.mark.parametrize("seed", range(5))
def test_a_transfer_is_found_through_noise(wanted, verdict, seed):
    assert constant_warmup_steps(lstm_layout(valley(wanted, 0.001, seed))).verdict == verdict


@pytest.mark.parametrize("sign", [1, -1])
def test_a_warmup_best_at_the_end_of_what_was_tried_tells_nothing(sign):
    claim = constant_warmup_steps(lstm_layout(lambda size, steps: sign * math.log2(steps) / 100))
    assert claim.verdict == "cannot be told"
    assert "no warmup that was chosen inside of the range tried can be carried to another batch size" in claim.sentence


def test_arms_that_contradict_each_other_are_not_outvoted():
    arms = lstm_layout(valley(lambda size: 8))[:2] + [lstm_layout(valley(lambda size: 2048 / size))[2]]
    claim = constant_warmup_steps(arms)
    assert claim.verdict == "cannot be told"
    assert claim.sentence.endswith("; but C alone says the opposite.")
    assert "batch^0.00 for A, batch^0.00 for B, batch^-1.00 for C (0 is constant steps" in claim.sentence


def test_perplexities_and_divergence_are_ranked_too():
    def badness(size, steps):
        return None if steps > 8 else 100 + abs(math.log2(steps / 8))

    cells = lstm_layout(badness, metric="perplexity")[:2]
    assert constant_warmup_steps(cells, PERPLEXITY).verdict == "held"


def test_a_search_too_narrow_to_say_otherwise_says_nothing():
    arm = Truth(FLAT, rule_warmup_steps=lambda size: 32, best_warmup_steps=lambda size: 32)
    verdict, sentence = claims({"a": arm}, warmup_factors=[0.7, 1.0, 1.4])["constant_warmup_steps"]
    assert verdict == "cannot be told"
    assert "for want of tried ones near these" in sentence


def test_a_warmup_drawn_together_with_the_learning_rate_is_not_told_apart_from_it():
    search = {"method": "halton", "warmup_range": [0.25, 4.0]}
    verdict, sentence = claims({"a": Truth(FLAT)}, **search)["constant_warmup_steps"]
    assert verdict == "cannot be told"
    assert "drawn together with the learning rate" in sentence


def test_candidates_chosen_by_their_steps_to_a_target_are_not_judged_by_accuracy():
    arm = Truth(FLAT, steps_to_target=(200.0, 100.0, 50.0))
    assert "constant_warmup_steps" not in claims({"a": arm}, stops=True, **WARMUPS)


def test_warmup_that_was_not_searched_is_not_judged():
    assert "constant_warmup_steps" not in claims({"a": Truth(FLAT)})


def test_a_warmup_lands_only_near_one_that_was_tried():
    small, large = (Warmups(size, (0.0, 2.0, 8.0, 32.0), (0, 1, 2, 3), 2) for size in (16, 32))
    assert landing(small, large, STEPS).tolist() == [-1, 1, 2, -1]
    assert landing(small, large, EPOCHS).tolist() == [-1, -1, -1, -1]  # 1 and 4 lie halfway, a factor of 2 off


def test_chance_is_symmetric_and_adds_up():
    cells = [Warmups(size, (2.0, 8.0, 32.0), (1, 0, 2), 1) for size in BATCHES]
    contest = compare(cells, EPOCHS)
    both = total([contest, contest])
    low, high = contest.by_chance
    assert abs(low + high) <= 1
    assert 0 < high < contest.lead == 10
    assert (both.lead, both.told[0]) == (20, 20)


def test_what_the_rules_own_warmup_costs_is_said():
    text = found(
        {"a": Truth(FLAT, rule_warmup_steps=lambda size: 32, best_warmup_steps=lambda size: 2048 // size)}, **WARMUPS
    )
    assert "would have been worse by: a up to 4 points (at batch 256)." in text  # 0.01 for each of 2 doublings, squared


def test_a_rule_that_was_too_short_costs_too():
    arm = Truth(FLAT, rule_warmup_steps=lambda size: 32, best_warmup_steps=lambda size: 64)
    assert "would have been worse by: a up to 1 point (at batch 256)." in found({"a": arm}, **WARMUPS)


def test_a_rule_that_was_right_costs_nothing():
    arm = Truth(FLAT, rule_warmup_steps=lambda size: 32, best_warmup_steps=lambda size: 32)
    assert "would have been worse by: a up to 0 points." in found({"a": arm}, **WARMUPS)


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
            "the limit is 2.1 times the noise scale, within a factor of 4 for 1 of 1 arms",
        ),
        ({"a": noisy(300.0, 64)}, "did not hold", "0.21 times the noise scale, within a factor of 4 for 0 of 1 arms"),
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


def test_no_limit_is_claimed_where_runs_stop_at_the_target():
    text = found({"momentum": Truth(FLAT, steps_to_target=(200.0, 100.0, 50.0))}, stops=True)
    assert "limit" not in text


def test_the_waterfall_says_what_is_not_told_apart():
    truths = {"a": Truth((0.9, 0.9, 0.8)), "b": Truth((0.9, 0.9, 0.85)), "c": Truth((0.9, 0.9, 0.8501))}
    text = found(truths, waterfall=("a", "b", "c"))
    assert "At batch 256, from a with 80.00%, in points: b +5.00, c +0.01; not told apart from seed noise: c." in text


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
    assert "The arms did not get the same search: trials at each batch size were a 3, b 2 to 3" in text


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
