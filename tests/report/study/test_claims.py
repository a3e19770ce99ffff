"""Every verdict on a claim can be positive or negative, and names its evidence."""

import dataclasses
import operator
import re

import numpy as np
import pytest
import synthetic
from scipy import stats
from synthetic import Truth, diverge, legw, summarize

from lbopt.report.study import read_study
from lbopt.report.study._claim_curvature import judge_peaks
from lbopt.report.study._claim_growth import critical_batch_grows
from lbopt.report.study._claim_noise_scale import noise_scale_predicts_limit
from lbopt.report.study._critical_growth import CriticalGrowth
from lbopt.report.study._statistics import log_slope, rank_test
from lbopt.report.study._study import Peak


def judged(config, rows):
    """Return the verdict and the sentence of every claim."""
    summary = summarize(config, rows)
    for claim in summary["claims"]:
        assert claim["sentence"] in summary["findings"]
    return {claim["claim"]: (claim["verdict"], claim["sentence"]) for claim in summary["claims"]}


def claims(truths, **options):
    return judged(*synthetic.make_study(truths, **options))


MOMENTUM = Truth((0.98, 0.975, 0.9))
FLAT = (0.98, 0.98, 0.98)
FURTHER = "lamb_legw_goes_further"
LARS_FURTHER = "lars_legw_goes_further"

# ---- LAMB and LARS under LEGW go further


@pytest.mark.parametrize(
    ("layerwise", "verdict", "limit", "shares"),
    [
        (FLAT, "held", "beyond 256", "larger in 100.0 % of the resamples"),
        ((0.98, 0.97, 0.9), "did not hold", "70 to 71", "larger in 0.0 %"),
        ((0.98, 0.9, 0.9), "did not hold", "64 at most", "larger in 0.0 %"),
    ],
)  # fmt: skip
def test_findings_favour_nobody(layerwise, verdict, limit, shares):
    """LAMB and LARS are each compared with the others, and not with each other."""
    other = (0.98, 0.9, 0.9) if layerwise == FLAT else FLAT
    for name, optimizers in ((FURTHER, ("lamb", "lars")), (LARS_FURTHER, ("lars", "lamb"))):
        truths = {
            "ours": legw(layerwise, optimizer=optimizers[0]),
            "the other": legw(other, optimizer=optimizers[1]),
        }
        said = claims({"momentum": MOMENTUM, **truths})[name]
        assert said[0] == verdict
        assert f"limit of ours is {limit}, that of momentum is 73 to 74 (95 % inter" in said[1]
        assert shares in said[1]


def test_a_large_limit_from_a_low_start_is_not_further():
    """Nor does it keep another arm from going further; but it can be smaller."""
    low = (0.9, 0.9, 0.9)
    verdict, sentence = claims({"momentum": MOMENTUM, "lamb": legw(low)})[FURTHER]
    assert verdict == "cannot be told"
    assert "the limit of lamb is beyond 256" in sentence
    worse = "its accuracy over small batches is 7.75 points worse than that of momentum"
    assert f"lamb cannot win, as {worse}" in sentence

    verdict, sentence = claims({"momentum": Truth(low), "lamb": legw(MOMENTUM.test)})[FURTHER]
    assert verdict == "cannot be told"
    assert "momentum cannot win, as its accuracy over small batches is 7.75 points" in sentence

    both = {"momentum": MOMENTUM, "low": Truth(low, optimizer="sgd"), "lamb": legw(FLAT)}
    verdict, sentence = claims(both)[FURTHER]
    assert verdict == "held"
    assert "low is left out, as its accuracy over small batches is 8 points worse" in sentence

    both["momentum"] = Truth(FLAT)
    both["lamb"] = legw((0.9, 0.89, 0.8))
    assert claims(both)[FURTHER][0] == "did not hold"


def test_arms_with_another_budget_of_the_search_are_not_compared():
    config, rows = synthetic.make_study({"momentum": MOMENTUM, "lamb": legw(FLAT)})
    assert judged(config, rows)[FURTHER][0] == "held"
    config["arms"][1]["search"] = {**config["search"], "widen_candidates": 9}
    assert FURTHER not in judged(config, rows)
    config["arms"][0]["search"] = {**config["search"], "widen_candidates": 9}
    assert judged(config, rows)[FURTHER][0] == "held"


def test_a_limit_that_is_larger_by_the_luck_of_the_seeds_is_not_further():
    wide = {
        "momentum": Truth((0.98, 0.975, 0.9), spread=0.02),
        "lamb": legw((0.98, 0.978, 0.91), spread=0.02),
    }
    verdict, _ = claims(wide)[FURTHER]
    assert verdict == "cannot be told"
    limits = [float(one["global_batch_size"]) for one in limits_of(wide)]
    assert limits == sorted(limits)


def limits_of(truths):
    return [arm["limit"] for arm in summarize(*synthetic.make_study(truths))["arms"]]


def test_the_resamples_of_two_arms_are_independent():
    """Of two equal arms, each goes further than the other in half of the resamples."""
    edge = (0.98, 0.97, 0.9)
    _, sentence = claims({"momentum": Truth(edge, spread=0.02), "lamb": legw(edge, spread=0.02)})[
        FURTHER
    ]
    share = float(sentence.split("larger in ")[1].split(" %")[0])
    assert 40 < share < 60


@pytest.mark.parametrize(
    ("lamb", "verdict", "part"),
    [
        (
            FLAT,
            "cannot be told",
            "in 100.0 % of them both lie beyond the largest batch, and which is larger is not "
            "known.",
        ),
        ((0.98, 0.98, 0.9), "did not hold", "larger in 0.0 % of the resamples."),
    ],
)
def test_how_far_an_arm_goes_beyond_the_largest_batch_is_not_known(lamb, verdict, part):
    said = claims({"momentum": Truth(FLAT), "lamb": legw(lamb)})[FURTHER]
    assert said[0] == verdict
    assert said[1].endswith(part)


def test_where_nobody_gets_past_the_small_batches_nobody_goes_further():
    worse = (0.98, 0.9, 0.9)
    verdict, sentence = claims({"momentum": Truth(worse), "lamb": legw(worse)})[FURTHER]
    assert verdict == "cannot be told"
    assert sentence.endswith("no arm holds it beyond the small batches, of up to 64.")


def test_linear_scaling_is_compared_apart_from_the_others():
    adam = Truth(FLAT, optimizer="adam", scaling_rule="sqrt")
    said = claims({"momentum": MOMENTUM, "adam": adam, "lamb": legw(FLAT)})
    assert said[FURTHER][0] == "cannot be told"
    verdict, sentence = said[f"{FURTHER}_than_linear_scaling"]
    assert verdict == "held"
    assert (
        "than the arms with linear scaling held here: the limit of lamb is beyond 256" in sentence
    )


def test_linear_scaling_can_win():
    adam = Truth((0.98, 0.9, 0.9), optimizer="adam", scaling_rule="sqrt")
    said = claims({"momentum": MOMENTUM, "adam": adam, "lamb": legw((0.98, 0.9, 0.9))})
    assert said[f"{FURTHER}_than_linear_scaling"][0] == "did not hold"


def test_legw_is_square_root_scaling_too():
    said = claims(
        {
            "momentum": MOMENTUM,
            "lamb": legw(FLAT),
            "linear lamb": legw(MOMENTUM.test, scaling_rule="linear"),
        }
    )
    assert "that of momentum and linear lamb is 73 to 74" in said[FURTHER][1]
    assert FURTHER not in claims({"momentum": MOMENTUM, "lamb": legw(FLAT, scaling_rule="linear")})


@pytest.mark.parametrize("truths", [{"momentum": MOMENTUM}, {"lamb": legw(FLAT)}])
def test_what_was_not_compared_is_not_judged(truths):
    assert FURTHER not in claims(truths)


def test_all_others_with_linear_scaling_are_judged_once():
    assert f"{FURTHER}_than_linear_scaling" not in claims(
        {"momentum": MOMENTUM, "lamb": legw(FLAT)}
    )


def of_seeds(arm, seeds):
    """Return a change that makes an arm's first `seeds` seeds diverge at the smallest batch."""

    def change(row):
        hit = (row["arm"], row["global_batch_size"], row["phase"]) == (arm, 16, "final") and row[
            "seed"
        ] <= seeds
        return diverge(row) if hit else row

    return change


@pytest.mark.parametrize(
    ("names", "verdict"),
    [(("momentum", "lamb"), "cannot be told"), (("momentum", "sgd", "lamb"), "held")],
)
def test_an_arm_without_a_limit_is_named_and_not_compared(names, verdict):
    truths = {name: legw(FLAT) if name == "lamb" else MOMENTUM for name in names}
    config, rows = synthetic.make_study(truths)
    said = judged(config, [of_seeds("momentum", 1)(row) for row in rows])[FURTHER]
    assert said[0] == verdict
    assert said[1].endswith(
        "the limit of momentum cannot be told: it diverged with 1 of 5 seeds at the smallest "
        "batch, 16."
    )


def with_models(config, models):
    """Give every arm of a study a different model."""
    for arm, model in zip(config["arms"], models, strict=True):
        arm["model"] = model and {"name": model}
    return config


def test_only_arms_that_train_the_same_thing_are_compared():
    truths = {"momentum": MOMENTUM, "far": Truth(FLAT), "lamb": legw(FLAT)}
    config, rows = synthetic.make_study(truths)
    config["train"]["model"] = {"name": "cnn"}
    verdict, sentence = judged(with_models(config, (None, "mlp", "cnn")), rows)[FURTHER]
    assert verdict == "held"
    assert "far" not in sentence
    assert sentence.endswith(
        "; compared are only arms with the same data, model, loss and budget of the search."
    )
    assert FURTHER not in judged(with_models(config, ("mlp", "mlp", "cnn")), rows)


def test_each_group_that_has_both_sides_is_judged():
    truths = {"a": MOMENTUM, "b": legw(FLAT), "c": MOMENTUM, "d": legw((0.98, 0.9, 0.9))}
    config, rows = synthetic.make_study(truths)
    said = judged(with_models(config, ("mlp", "mlp", "cnn", "cnn")), rows)
    assert said[FURTHER][0] == "held"
    assert "the limit of b is beyond 256, that of a is 73 to 74" in said[FURTHER][1]
    assert said[f"{FURTHER}_2"][0] == "did not hold"
    assert "the limit of d is 64 at most, that of c is 73 to 74" in said[f"{FURTHER}_2"][1]


# ---- LEGW's explanation


def peaked(name, steps, edge=False, sizes=(16, 64, 256, 1024)):
    """Return name and cells of an arm; `steps` has the curvature peaks by batch size."""
    truth = legw((0.98,) * len(sizes), rule_warmup_steps=lambda size: 4)
    cells = read_study(*synthetic.make_study({name: truth}, sizes=sizes)).arms[0].cells
    peaks = [tuple(Peak(step, edge) for step in steps(size)) for size in sizes]
    return name, [
        dataclasses.replace(cell, peaks=one) for cell, one in zip(cells, peaks, strict=True)
    ]


def same(size):
    return [8, 16, 8, 8, 4]


def with_epochs(size):
    return [8192 // size * step for step in (1, 2, 1, 1, 2)]


@pytest.mark.parametrize(
    ("steps", "verdict"),
    [
        ((same, same), "held"),
        ((with_epochs, with_epochs), "did not hold"),
        ((same, with_epochs), "cannot be told"),
        ((lambda size: [round(2048 / size**0.5)] * 5, same), "cannot be told"),
    ],
)
def test_where_the_lipschitz_constant_peaks(steps, verdict):
    assert (
        judge_peaks([peaked(str(place), one) for place, one in enumerate(steps)]).verdict == verdict
    )


def test_the_slope_of_every_arm_is_said_with_what_it_rests_on():
    claim = judge_peaks(
        [peaked("a", same), peaked("b", lambda size: [8192 // size] * 2, edge=True)]
    )
    assert claim.verdict == "cannot be told"
    assert "batch^0.00 for a (95 % interval over seeds -0." in claim.sentence
    assert (
        "0 of 20 peaks at the first or last probe; warmup of 4 steps), batch^-1.00 for b (95 % "
        "interval over seeds -1.00 to -1.00; 8 of 8 peaks" in claim.sentence
    )


def test_peaks_where_probing_began_or_ended_tell_nothing():
    for peak in (lambda size: 1, lambda size: 8192 // size):
        said = claims({"a": legw(FLAT, peak_step=peak)})["lipschitz_peak_stays"]
        assert said[0] == "cannot be told"
        assert "15 of 15 peaks at the first or last probe" in said[1]


def test_only_arms_with_legws_warmup_are_judged():
    moving = {"peak_step": lambda size: 2048 // size}
    assert "lipschitz_peak_stays" not in claims({"a": Truth(FLAT, warmup_rule="epochs", **moving)})
    said = claims(
        {
            "a": Truth(FLAT, warmup_rule="epochs", **moving),
            "b": legw(FLAT, peak_step=lambda size: 8),
        }
    )
    assert said["lipschitz_peak_stays"][0] == "held"
    assert " for a " not in said["lipschitz_peak_stays"][1]


def test_a_constant_that_was_not_probed_is_not_judged():
    assert "lipschitz_peak_stays" not in claims({"a": legw(FLAT)})


def test_a_slope_over_batch_sizes_is_that_of_least_squares():
    sizes = [16, 64, 256, 1024]
    steps = [70, 30, 9, 5]
    slope = log_slope([(size, [step]) for size, step in zip(sizes, steps, strict=True)])
    expected = stats.linregress(np.log(sizes), np.log(steps))
    half = stats.t.ppf(0.975, 2) * expected.stderr
    assert (slope.slope, slope.low, slope.high) == pytest.approx(
        (expected.slope, expected.slope - half, expected.slope + half), abs=1e-8
    )
    assert slope.over == "batch sizes"
    alone = log_slope([(16, [8]), (64, [2])])
    assert (alone.low, alone.high) == (None, None)


def test_a_slope_over_seeds_is_as_uncertain_as_these():
    """Seeds lie a factor of 2 on both sides of a line; the means give the standard error."""
    draw = np.random.default_rng(0)
    groups = [(size, 100 * 2 ** draw.normal(size=40)) for size in (16, 64, 256, 1024)]
    slope = log_slope(groups)
    apart = np.log([16, 64, 256, 1024]) - np.log([16, 64, 256, 1024]).mean()
    errors = np.array([np.log(values).std() / 40**0.5 for _, values in groups])
    expected = 2 * 1.96 * (apart**2 @ errors**2) ** 0.5 / (apart @ apart)
    assert slope.high - slope.low == pytest.approx(expected, rel=0.1)


# ---- noise scale


def noisy(scale, limit, **changes):
    """Return an arm with a given noise scale at the smallest batch, and a given limit."""
    test = {
        16: (0.98, 0.9, 0.9, 0.9),
        64: (0.98, 0.98, 0.9, 0.9),
        256: (0.98, 0.98, 0.98, 0.9),
        1024: (0.98,) * 4,
    }[limit]
    return Truth(test, noise_scale=(scale, 2 * scale, 4 * scale, 8 * scale), **changes)


def of_noise(*arms):
    """Return verdict and sentence on the limit, for arms of (noise scale, limit)."""
    truths = {chr(ord("a") + place): noisy(*arm) for place, arm in enumerate(arms)}
    return claims(truths, sizes=(16, 64, 256, 1024))["noise_scale_predicts_limit"]


@pytest.mark.parametrize(
    ("arms", "verdict", "part"),
    [
        (
            [(30.0, 64), (100.0, 64), (90.0, 256)],
            "held",
            "within a factor of 4 of the limit for 3 of 3 arms; the limit is 0.761 to 3.38 times "
            "the noise scale; whether the ranks agree cannot be told from so few",
        ),
        (
            [(320.0, 64), (8.0, 64), (90.0, 256)],
            "did not hold",
            "within a factor of 4 of the limit for 1 of 3 arms; the limit is 0.238 to 9.51 times",
        ),
        (
            [(30.0, 64), (100.0, 256)],
            "cannot be told",
            "it takes 3 arms to judge by, and there are 2; the limit is 2.54 to 3.04 times",
        ),
        (
            [(30.0, 64), (31.0, 64), (90.0, 256), (91.0, 256), (92.0, 256)],
            "held",
            "the rank correlation is 0.87 (one-sided p 0.10 over all orders)",
        ),
        (
            [(90.0, 64), (91.0, 64), (80.0, 256), (81.0, 256), (82.0, 256)],
            "cannot be told",
            "5 of 5 arms; the limit is 0.836 to 3.81 times the noise scale; the rank correlation "
            "is -0.87",
        ),
        (
            [(90.0, 64), (91.0, 64), (80.0, 256), (300.0, 256)],
            "held",
            "whether the ranks agree cannot be told",
        ),
        ([(320.0, 64), (320.0, 64), (90.0, 256), (90.0, 256)], "cannot be told", "for 2 of 4 arms"),
    ],
)
def test_whether_the_noise_scale_predicts_the_limit(arms, verdict, part):
    said = of_noise(*arms)
    assert said[0] == verdict
    assert part in said[1]


def test_what_the_noise_scale_is_said_with_its_range():
    _, sentence = of_noise((30.0, 64), (100.0, 64), (90.0, 256))
    assert (
        "(tr(Sigma) / |G|^2 at the smallest batch, the median over the probes of a run)" in sentence
    )
    assert (
        "over the run the noise scale goes from 0.117 to 25,600" in sentence
    )  # a factor of 4^4 both ways


def test_a_limit_that_was_not_reached_is_a_miss_only_if_the_largest_batch_is_too_far():
    fits = [(30.0, 64), (40.0, 64), (90.0, 256)]
    verdict, sentence = of_noise(*fits, (300.0, 1024))
    assert verdict == "held"
    assert "for 3 of 3 arms" in sentence
    assert (
        "1 arm left out, as each may be a hit or a miss: d held up to the largest batch, 1024"
        in sentence
    )
    verdict, sentence = of_noise(*fits, *[(200.0, 1024)] * 4)
    assert verdict == "did not hold"
    assert "for 3 of 7 arms" in sentence
    assert "d held up to the largest batch, 1024, a miss" in sentence


def test_a_limit_among_the_small_batches_is_a_miss_only_if_all_of_them_are_too_far():
    fits = [(30.0, 64), (40.0, 64), (90.0, 256)]
    for scale in (5.0, 100.0, 250.0):
        _, sentence = of_noise(*fits, (scale, 16))
        assert "for 3 of 3 arms" in sentence
        assert (
            "1 arm left out, as each may be a hit or a miss: the limit of d lies between 16 and 64"
            in sentence
        )
    for scale in (3.0, 260.0):
        _, sentence = of_noise(*fits, (scale, 16))
        assert "for 3 of 4 arms" in sentence
        assert "the limit of d lies between 16 and 64, a miss" in sentence


def test_an_arm_without_a_limit_is_named_beside_the_noise_scale():
    config, rows = synthetic.make_study(
        {"a": noisy(30.0, 64), "b": noisy(30.0, 64)}, sizes=(16, 64, 256, 1024)
    )
    said = judged(config, [of_seeds("b", 2)(row) for row in rows])["noise_scale_predicts_limit"]
    assert said[0] == "cannot be told"
    assert "it takes 3 arms to judge by, and there is 1" in said[1]
    assert said[1].endswith(
        "; the limit of b cannot be told: it diverged with 2 of 5 seeds at the smallest batch, 16."
    )


def test_a_noise_scale_that_is_not_told_from_infinity_judges_nothing():
    config, rows = synthetic.make_study({"a": noisy(30.0, 64)}, sizes=(16, 64, 256, 1024))
    for row in rows:
        if row["phase"] == "final":
            traces = row["probes"]["noise_trace"]
            row["probes"]["noise_trace"] = [3.0] * len(traces)
            row["probes"]["gradient_square_norm"] = [1.0] + [-1.0] * (len(traces) - 1)
    claim = noise_scale_predicts_limit(read_study(config, rows))
    assert claim.verdict == "cannot be told"
    assert (
        "over the run the noise scale goes from 3 to infinity; 1 arm left out, as the noise scale "
        "cannot be told from infinity: a." in claim.sentence
    )


def test_a_noise_scale_that_was_not_measured_is_not_judged():
    assert "noise_scale_predicts_limit" not in claims({"a": MOMENTUM})


@pytest.mark.parametrize(("scale", "verdict"), [(90.0, "held"), (900.0, "did not hold")])
def test_whether_the_noise_scale_predicts_the_critical_batch(scale, verdict):
    steps = tuple(30 * (1 + 100 / size) for size in synthetic.SIZES)
    arm = Truth(FLAT, noise_scale=(scale,) * 3, steps_to_target=steps)
    said = claims({"a": arm, "b": arm, "c": arm}, stops=True)
    assert said["noise_scale_predicts_critical_batch"][0] == verdict
    assert "noise_scale_predicts_limit" not in said
    assert (
        claims({"a": arm}, stops=True)["noise_scale_predicts_critical_batch"][0] == "cannot be told"
    )


def test_what_was_not_fitted_is_not_judged():
    arm = Truth(FLAT, noise_scale=(90.0,) * 3, steps_to_target=(200.0, 100.0, None))
    assert "noise_scale_predicts_critical_batch" not in claims({"a": arm}, stops=True)


@pytest.mark.parametrize(
    ("intervals", "verdict"),
    [
        ([(0.2, 0.6), (0.1, 0.9), (-0.1, 0.3)], "held"),
        ([(0.2, 0.6), (-0.1, 0.9)], "cannot be told"),
        ([(0.2, 0.6), (0.1, 0.9), (-0.4, -0.1)], "cannot be told"),
        ([(-0.5, -0.1), (-0.6, 0.0), (0.1, 0.3)], "did not hold"),
    ],
)
def test_whether_the_critical_batch_grows(intervals, verdict):
    """A further arm, without a growth, is named and does not count."""
    steps = tuple(30 * (1 + 100 / size) for size in synthetic.SIZES)
    names = [*"abcd"[: len(intervals)], "without"]
    truths = {name: Truth(FLAT, steps_to_target=steps) for name in names}
    study = read_study(*synthetic.make_study(truths, stops=True))
    grown = [
        dataclasses.replace(arm, growth=CriticalGrowth((), sum(ends) / 2, ends))
        for arm, ends in zip(study.arms, intervals, strict=False)
    ]
    claim = critical_batch_grows(dataclasses.replace(study, arms=(*grown, study.arms[-1])))
    assert claim.verdict == verdict
    low, high = intervals[0]
    assert f"({low:.2f} to {high:.2f}) for a" in claim.sentence
    assert "not fitted for without" in claim.sentence
    assert critical_batch_grows(study) is None


def test_the_p_of_a_rank_correlation_counts_orders():
    pairs = [(1, 2), (2, 1), (3, 3), (4, 4), (5, 6), (6, 5), (7, 7)]
    test = rank_test(pairs)
    firsts, seconds = map(np.array, zip(*pairs, strict=True))
    expected = stats.spearmanr(firsts, seconds)
    exact = stats.permutation_test(
        (firsts,),
        lambda x, axis: np.sum(x * seconds, axis),  # of ranks, it orders as their correlation
        vectorized=True,
        permutation_type="pairings",
        alternative="greater",
        n_resamples=np.inf,
    )
    assert test.correlation == pytest.approx(expected.statistic)
    assert test.p == pytest.approx(exact.pvalue)
    assert test.least_p == pytest.approx(1 / 5040)


def test_three_arms_can_never_agree_by_rank():
    assert rank_test([(1, 1), (2, 2), (3, 3)]).least_p == pytest.approx(1 / 6)


def test_many_arms_are_ranked_against_a_sample_of_orders():
    pairs = [(place, place + 3 * (place % 2)) for place in range(10)]
    assert rank_test(pairs).p < 0.01
    assert rank_test([(x, -y) for x, y in pairs]).p > 0.99


# ---- diffusion


@pytest.mark.parametrize(
    ("growths", "verdict", "part"),
    [
        (("log", "log", "log", 0.6), "held", "in 9 of 12 cells, a power of t in 3"),
        (("log", "log", "log", 0.6), "held", "; but for 3 it is a power of t"),
        (("log", "log", 0.6), "cannot be told", "; but for 2 it is a power of t"),
        (("log", 0.6, 0.6, 0.6), "did not hold", "; but for 0 it is log t"),
        (
            ("log", 0.6),
            "cannot be told",
            "neither fits most cells: log t is the better fit, with R^2 of at least 0.95, in 3 of "
            "6 cells",
        ),
        ((0.6, 0.6, 0.6), "did not hold", "median exponent 0.60"),
    ],
)
def test_whether_diffusion_is_logarithmic(growths, verdict, part):
    truths = {str(place): Truth(FLAT, growth=growth) for place, growth in enumerate(growths)}
    said = claims(truths)["diffusion_is_logarithmic"]
    assert said[0] == verdict
    assert part in said[1]


def test_the_better_of_two_bad_fits_describes_nothing():
    config, rows = synthetic.make_study({"a": Truth(FLAT, growth="log")})
    for row in rows:
        if row["phase"] == "final":
            row["diffusion"]["log"]["r2"] = 0.94
            row["diffusion"]["power"]["r2"] = 0.5
    verdict, sentence = judged(config, rows)["diffusion_is_logarithmic"]
    assert verdict == "cannot be told"
    assert (
        "neither fits most cells: log t is the better fit, with R^2 of at least 0.95, in 0 of 3 "
        "cells" in sentence
    )


def test_runs_that_do_not_train_tell_nothing_of_diffusion():
    truths = {
        "a": Truth(FLAT, (1.0, 1.0, 0.8), growth="log"),
        "b": Truth(FLAT, growth=0.5, diverges=(16, 64)),
    }
    said = claims(truths)["diffusion_is_logarithmic"]
    assert said[0] == "cannot be told"
    assert "in 2 of 3 cells" in said[1]
    assert said[1].endswith(
        "; 2 cells left out, as a seed diverged; 1 cell left out, as training accuracy stayed "
        "under 90 %."
    )
    said = claims({"a": Truth(FLAT, (0.5,) * 3, growth="log")})["diffusion_is_logarithmic"]
    assert (said[0], "there is no cell to judge by; 3 cells" in said[1]) == ("cannot be told", True)


def test_one_arm_of_three_does_not_speak_for_all():
    """The others stay below 90 % of training accuracy."""
    untrained = {str(place): Truth(FLAT, (0.5,) * 3, growth="log") for place in range(2)}
    said = claims({"a": Truth(FLAT, growth=0.5), **untrained})["diffusion_is_logarithmic"]
    assert said[0] == "cannot be told"
    assert "to judge by are the cells of a alone, of 3 arms" in said[1]
    del untrained["1"]
    said = claims({"a": Truth(FLAT, growth=0.5), **untrained})["diffusion_is_logarithmic"]
    assert said[0] == "did not hold"


def test_a_language_model_need_not_guess_nine_of_ten_words():
    said = claims({"a": Truth((100.0,) * 3, growth="log")}, perplexity=True)[
        "diffusion_is_logarithmic"
    ]
    assert (said[0], "left out" in said[1]) == ("held", False)


def test_arms_whose_rate_falls_are_counted_and_not_judged():
    config, rows = synthetic.make_study(
        {"a": Truth(FLAT, growth="log"), "b": Truth(FLAT, growth=0.5)}
    )
    config["arms"][1]["schedule"]["decay"] = "cosine"
    said = judged(config, rows)["diffusion_is_logarithmic"]
    assert said[0] == "held"
    assert said[1].endswith("; 1 arm not judged, as the rate falls.")


def test_diffusion_that_was_not_measured_is_not_judged():
    assert "diffusion_is_logarithmic" not in claims({"a": Truth(FLAT)})


# ---- 8 bits with APS are enough


@pytest.mark.parametrize(
    ("short", "spread", "verdict"),
    [
        ((0.98, 0.979, 0.975), 0.002, "held"),
        ((0.98, 0.98, 0.96), 0.002, "did not hold"),
        ((0.98, 0.98, 0.975), 0.02, "cannot be told"),
        ((0.98, 0.98, 0.975), 0.0, "cannot be told"),
    ],
)
def test_a_format_of_eight_bits_is_held_to_the_tolerance_of_the_limit(short, spread, verdict):
    aps = {"name": "aps", "exponent_bits": 4, "mantissa_bits": 3}
    arms = {
        "32 bits": Truth(FLAT, spread=spread, aggregator={"name": "mean"}),
        "e4m3": Truth(short, spread=spread, aggregator=aps),
        "unshifted": Truth((0.5, 0.5, 0.5), aggregator={**aps, "shift": False}),
    }
    config, rows = synthetic.make_study(arms)
    found, sentence = judged(config, rows)["aps_keeps_accuracy"]
    assert found == verdict
    assert "1 point of the accuracy of 32 bits" in sentence
    assert "unshifted" not in sentence
    assert "aps_keeps_accuracy" not in claims({"32 bits": arms["32 bits"]})

    if not spread:
        assert "the seeds are too few for an interval of e4m3 at 256" in sentence
        return
    cell = operator.itemgetter("arm", "phase", "global_batch_size")
    ours, theirs = (
        [100 * row["test_accuracy"] for row in rows if cell(row) == (name, "final", 256)]
        for name in ("e4m3", "32 bits")
    )
    low, high = stats.ttest_ind(ours, theirs, equal_var=False).confidence_interval(1 - 0.05 / 3)
    assert (
        f"at batch 256 the difference of e4m3 to 32 bits is {low:+.2f} to {high:+.2f}" in sentence
    )


def test_a_seed_that_diverged_is_no_ground_for_a_number_of_seeds():
    aps = {"name": "aps", "exponent_bits": 4, "mantissa_bits": 3}
    arms = {
        "32 bits": Truth((0.9, 0.9, 0.9), spread=0.1, aggregator={"name": "mean"}),
        "e4m3": Truth((0.9, 0.9, 0.9), spread=0.1, aggregator=aps),
    }
    config, rows = synthetic.make_study(arms, seeds=tuple(range(1, 41)))
    needed = []
    for change in (dict, synthetic.diverge):
        *others, last = [row for row in rows if row["arm"] == "e4m3"]
        rest = [row for row in rows if row["arm"] != "e4m3"]
        found, sentence = judged(config, [*rest, *others, change(last)])["aps_keeps_accuracy"]
        assert found == "cannot be told"
        needed.append(int(re.search(r"takes (\d+) seeds", sentence)[1]))
    assert needed[1] <= needed[0]


# ---- a batch that grows keeps the score


@pytest.mark.parametrize(
    ("grown", "verdict"),
    [
        ((0.98, 0.979, 0.975), "held"),
        ((0.98, 0.98, 0.96), "did not hold"),
    ],
)
def test_a_growing_batch_is_held_to_the_same_arm_without_it(grown, verdict):
    growing = {"kind": "seesaw", "final_batch_size": 1024}
    arms = {
        "constant": Truth(FLAT),
        "seesaw": Truth(grown, batch_schedule=growing),
        "other": Truth((0.5, 0.5, 0.5), scaling_rule="sqrt"),
    }

    config, rows = synthetic.make_study(arms)
    for row in rows:
        if row["arm"] == "seesaw":
            row["steps"] = row["steps"] * 3 / 4
    found, sentence = judged(config, rows)["growing_batch_keeps_score_seesaw"]
    assert found == verdict
    assert "(seesaw)" in sentence
    assert "seesaw takes 384 steps and constant 512: 25 % fewer" in sentence
    # Without the arm that differs in the batch schedule alone nothing is judged.
    assert not [
        name
        for name in claims({"other": arms["other"], "seesaw": arms["seesaw"]})
        if name.startswith("growing")
    ]


def test_an_arm_with_the_batch_schedule_of_the_study_is_not_a_constant_batch():
    seesaw = {"kind": "seesaw", "final_batch_size": 1024}
    config, rows = synthetic.make_study(
        {"study's": Truth(FLAT), "seesaw": Truth(FLAT, batch_schedule=seesaw)}
    )
    config["train"]["batch_schedule"] = {"kind": "doubling", "final_batch_size": 1024}
    assert not [name for name in judged(config, rows) if name.startswith("growing")]


# ---- rules that need no search


@pytest.mark.parametrize(
    ("kept", "verdict", "cost"),
    [
        (FLAT, "held", "the same"),
        ((0.98, 0.98, 0.9), "did not hold", "8 points worse"),
        ((0.98, 0.98, 0.971), "cannot be told", "0.9 points worse"),
        ((0.98, 0.98, 0.99), "held", "1 point better"),
    ],
)
def test_a_rule_needs_no_search_where_one_would_gain_nothing(kept, verdict, cost):
    truths = {
        "searched": legw(FLAT),
        "as it is": legw(kept, kept=True),
        "another optimizer": Truth((0.9, 0.9, 0.9)),
    }
    said = claims(truths)
    assert said["rule_needs_no_search_legw"][0] == verdict
    assert f"{cost} at batch 256" in said["rule_needs_no_search_legw"][1]


def test_each_rule_has_a_claim_of_its_own_and_needs_an_arm_with_a_search():
    kept = Truth(FLAT, kept=True)
    names = [name for name in claims({"a": kept, "b": kept, "c": Truth(FLAT)}) if "search" in name]
    assert names == ["rule_needs_no_search_linear", "rule_needs_no_search_linear_2"]
    assert not any("search" in name for name in claims({"a": kept, "b": kept}))


def test_a_rule_is_not_compared_with_an_arm_that_differs_in_more_than_the_rule():
    kept = Truth(FLAT, kept=True)
    other = Truth(FLAT, batch_schedule={"kind": "seesaw", "final_batch_size": 1024})
    assert not any("search" in name for name in claims({"a": kept, "b": other}))
    assert not any(
        "search" in name for name in claims({"a": kept, "b": Truth(FLAT, optimizer="lamb")})
    )


def test_a_rule_is_not_judged_by_the_scores_of_runs_that_stop_at_a_target():
    truths = {
        "a": Truth(FLAT, kept=True, steps_to_target=(400, 300, 250)),
        "b": Truth(FLAT, steps_to_target=(200, 100, 80)),
    }
    assert not any("search" in name for name in claims(truths, stops=True))


def test_of_two_arms_with_a_search_a_rule_is_compared_with_that_of_its_warmup():
    truths = {
        "epochs": Truth((0.9, 0.9, 0.9), scaling_rule="sqrt", warmup_rule="epochs"),
        "legw": Truth(FLAT, scaling_rule="sqrt", warmup_rule="legw"),
        "as it is": Truth(FLAT, scaling_rule="sqrt", warmup_rule="legw", kept=True),
    }
    verdict, sentence = claims(truths)["rule_needs_no_search_legw"]
    assert verdict == "held"
    assert "beside that of legw" in sentence


# ---- a half-life of b2


@pytest.mark.parametrize(
    ("scores", "verdict", "part"),
    [
        ((0.98, 0.98, 0.99), "held", "at batch 256 b is 0."),
        ((0.98, 0.98, 0.97), "did not hold", "points worse than a"),
        ((0.99, 0.98, 0.97), "cannot be told", "points worse than a"),
        (FLAT, "cannot be told", "the seeds tell b and a apart at no batch size"),
    ],
)
def test_whether_a_half_life_of_b2_is_better_than_b2(scores, verdict, part):
    truths = {
        "a": Truth(FLAT, optimizer="adamw", scaling_rule="sqrt"),
        "b": Truth(scores, optimizer="adamw", scaling_rule="sqrt+token_half_life"),
        "other": Truth((0.5, 0.5, 0.5), optimizer="lamb", scaling_rule="sqrt"),
    }
    found, sentence = claims(truths)["half_life_of_b2_is_better"]
    assert found == verdict
    assert part in sentence
    assert "all 3 comparisons" in sentence
    del truths["a"]
    assert "half_life_of_b2_is_better" not in claims(truths)


# ---- matrix optimizers use larger batches


ADAM = Truth((0.98, 0.975, 0.9), optimizer="adamw")


@pytest.mark.parametrize(
    ("matrix", "verdict"), [(FLAT, "held"), ((0.98, 0.96, 0.9), "did not hold")]
)
@pytest.mark.parametrize(("optimizer", "family"), [("muonh", "muon"), ("shampoo", "soap")])
def test_a_matrix_optimizer_goes_further_than_adam_if_its_limit_is_larger(
    matrix, verdict, optimizer, family
):
    truths = {"ours": Truth(matrix, optimizer=optimizer), "Adam": ADAM, "momentum": Truth(FLAT)}
    said = claims(truths)
    assert said[f"{family}_goes_further"][0] == verdict
    assert "momentum" not in said[f"{family}_goes_further"][1]
    assert not any("critical_batch" in name and family in name for name in said)


def steps(critical):
    return tuple(100 * (1 + critical / size) for size in synthetic.SIZES)


def compared(ours, adam, **options):
    """Return the verdict and sentence on the critical batch of Muon, by steps at each batch."""
    truths = {
        "ours": Truth(FLAT, optimizer="muon", steps_to_target=ours),
        "Adam": Truth(FLAT, optimizer="adamw", steps_to_target=adam),
    }
    return claims(truths, stops=True, **options)["muon_has_larger_critical_batch"]


@pytest.mark.parametrize(("ours", "verdict"), [(400, "held"), (20, "did not hold")])
def test_the_critical_batch_of_muon_is_compared_with_that_of_adam(ours, verdict):
    said = compared(steps(ours), steps(100))
    assert said[0] == verdict
    assert f"ours is {ours:,}" in said[1]


def test_equal_critical_batches_are_not_told_apart():
    assert compared(steps(100), steps(100))[0] == "cannot be told"


def test_two_seeds_are_too_few_to_compare_critical_batches():
    verdict, sentence = compared(steps(400), steps(100), seeds=(1, 2))
    assert verdict == "cannot be told"
    assert "fewer than 3 seeds" in sentence


def test_an_optimizer_that_misses_the_target_at_a_large_batch_does_not_win():
    sizes = (16, 64, 256, 1024)
    truth = tuple(100 * (1 + 400 / size) for size in sizes[:3])
    flat = (0.98,) * 4
    truths = {
        "ours": Truth(flat, optimizer="muon", steps_to_target=(*truth, None)),
        "Adam": Truth(
            flat, optimizer="adamw", steps_to_target=tuple(100 * (1 + 50 / b) for b in sizes)
        ),
    }
    said = claims(truths, sizes=sizes, stops=True)["muon_has_larger_critical_batch"]
    assert said[0] == "cannot be told"
    assert "missed the target at 1024" in said[1]


def test_an_optimizer_that_never_reaches_the_target_has_no_known_critical_batch():
    verdict, sentence = compared((200, None, None), steps(100))
    assert verdict == "cannot be told"
    assert "ours has no fit" in sentence


def test_an_optimizer_that_is_worse_at_small_batches_does_not_go_further():
    verdict, sentence = claims({"ours": Truth((0.9, 0.9, 0.9), optimizer="muon"), "Adam": ADAM})[
        "muon_goes_further"
    ]
    assert verdict == "cannot be told"
    assert "ours cannot win, as its accuracy over small batches is" in sentence
