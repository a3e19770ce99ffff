"""Tables and lists of the study pages, from the summaries in `configs/sweeps/`."""

import functools
import json
import pathlib
import re

from _site.markdown import table

ROOT = pathlib.Path(__file__).parents[2]
STUDIES = (
    "digits_limit",
    "digits_limit-sse4_2",
    "digits_limit-target",
    "digits_lstm_legw",
    "pydoc_lm_legw",
    "waterfall_digits",
    "waterfall_digits-searched",
    "waterfall_digits-trust-first",
    "diffusion_digits",
    "diffusion_digits-epochs",
    "precision_digits",
    "precision_digits-same",
    "growing_bert",
    "fashion_limit-mlp",
    "fashion_limit-waterfall",
    "fashion_limit-small",
    "fashion_target-mlp",
    "fashion_target-small",
    "rules_transfer",
    "rules_transfer-small",
    "lm_critical-small",
)
"""The summaries that are committed; each one's page is the name up to the first hyphen."""
CLAIMS = {
    "lamb_legw_goes_further": "LAMB with LEGW has a larger limit than the other arms",
    "lamb_legw_goes_further_than_linear_scaling": (
        "LAMB with LEGW has a larger limit than linear scaling"
    ),
    "lars_legw_goes_further": "LARS with LEGW has a larger limit than the other arms",
    "lars_legw_goes_further_than_linear_scaling": (
        "LARS with LEGW has a larger limit than linear scaling"
    ),
    "layerwise_legw_goes_further": (
        "LAMB or LARS with LEGW has a larger limit than the other arms"
    ),
    "layerwise_legw_goes_further_than_linear_scaling": (
        "LAMB or LARS with LEGW has a larger limit than linear scaling"
    ),
    "constant_warmup_steps": (
        "The right warmup for another batch size has the same number of steps (LEGW)"
    ),
    "lipschitz_peak_stays": "The curvature peaks near the same step at every batch size (LEGW)",
    "noise_scale_predicts_limit": (
        "The gradient noise scale at the smallest batch predicts the batch-size limit"
    ),
    "noise_scale_predicts_critical_batch": (
        "The gradient noise scale at the smallest batch predicts the critical batch"
    ),
    "critical_batch_grows": (
        "The critical batch grows with the examples that it takes to reach the target"
    ),
    "diffusion_is_logarithmic": (
        "The distance of the weights from their start grows like the log of the step"
    ),
    "aps_keeps_accuracy": (
        "8-bit gradients with auto-precision scaling (APS) keep the accuracy of 32 bits"
    ),
    "growing_batch_keeps_score_seesaw": (
        "A batch that doubles where the learning rate has halved (Seesaw) keeps the loss of a "
        "constant batch in fewer steps"
    ),
    "growing_batch_keeps_score_steps": (
        "A batch that doubles early keeps the loss of a constant batch in fewer steps"
    ),
    "growing_batch_keeps_score_ramp": (
        "A batch that grows steadily keeps the loss of a constant batch in fewer steps"
    ),
    "muon_goes_further": "Muon or MuonH has a larger limit than Adam",
    "soap_goes_further": "SOAP or Shampoo has a larger limit than Adam",
    "muon_has_larger_critical_batch": "Muon has a larger critical batch than Adam",
    "soap_has_larger_critical_batch": "SOAP or Shampoo has a larger critical batch than Adam",
    "rule_needs_no_search_linear": "AdamW scaled linearly, with no search, stays near a search",
    "rule_needs_no_search_sqrt": (
        "AdamW scaled by the square root, with no search, stays near a search"
    ),
    "rule_needs_no_search_legw": "AdamW scaled by LEGW, with no search, stays near a search",
    "rule_needs_no_search_sde_half_life": (
        "AdamW scaled by the SDE rule, with no search, stays near a search"
    ),
    "rule_needs_no_search_sqrt_token_half_life": (
        "AdamW scaled by the square root and b2's half-life, with no search, stays near a search"
    ),
    "half_life_of_b2_is_better": (
        "A constant half-life of b2 in examples is better than a constant b2"
    ),
}
"""What each claim of a study says."""
SOURCES = {
    "lamb_legw": "LAMB 1904.00962v5, LEGW 1901.08256v1",
    "lars_legw": "LARS 1708.03888v3, LEGW 1901.08256v1",
    "layerwise_legw": "LAMB 1904.00962v5, LEGW 1901.08256v1",
    "constant_warmup_steps": "1901.08256v1",
    "lipschitz_peak_stays": "1901.08256v1 [recalled 80%]",
    "noise_scale_predicts": "1812.06162v1",
    "critical_batch_grows": "1812.06162v1, 2410.21676",
    "diffusion_is_logarithmic": "1705.08741v2; The Limit of the Batch Size, 2006.08517v1, says no",
    "aps_keeps_accuracy": "1911.08907v3",
    "growing_batch_keeps_score_seesaw": "2510.14717",
    "growing_batch_keeps_score": "2505.23971",
    "muon": "2505.02222",
    "soap": "2409.11321",
    "half_life_of_b2_is_better": "2507.07101v2",
    "rule_needs_no_search_linear": "1706.02677v2",
    "rule_needs_no_search_sqrt_token_half_life": "2507.07101v2",
    "rule_needs_no_search_sqrt": "1904.00962v5",
    "rule_needs_no_search_legw": "1901.08256v1",
    "rule_needs_no_search_sde_half_life": "2205.10287v3, in its form with half-lives",
}
"""Papers on arXiv whose claim or rule it is, by the start of a claim's name; the first counts."""
FACTS = (
    "ahead",
    "arm",
    "claim",
    "claims",
    "costs_table",
    "critical_growth_table",
    "diffusion_table",
    "finding",
    "findings",
    "format_table",
    "gain",
    "gained",
    "growth_table",
    "limit",
    "limits_within",
    "number",
    "percent",
    "point",
    "scores",
    "steps_table",
    "study",
    "study_facts",
    "verdicts",
    "waterfall_table",
)


@functools.cache
def study(name):
    """Return the summary of a study in `configs/sweeps/`."""
    return json.loads((ROOT / "configs" / "sweeps" / f"{name}.json").read_text())


def percent(share, digits=1):
    """Return a share as a percentage, without the sign."""
    return f"{100 * share:.{digits}f}"


def number(value, digits=0):
    """Return a number with separators of thousands."""
    return f"{value:,.{digits}f}"


def arm(name, label):
    """Return an arm of a study by its label."""
    (found,) = (one for one in study(name)["arms"] if one["arm"] == label)
    return found


def point(name, label, size=None):
    """Return an arm's results at a batch size; at the largest without one."""
    points = arm(name, label)["points"]
    (found,) = (
        one
        for one in points
        if one["global_batch_size"] == (size or points[-1]["global_batch_size"])
    )
    return found


def limit(name, label):
    """Return an arm's limit with its interval in words: "357 (278 to 612)"."""
    return limit_text(arm(name, label)["limit"])


def limit_text(found):
    """Return a limit with its 95 % interval in words."""
    if found is None:
        return "-"
    if found["outcome"] == "cannot_tell":
        return "unknown"

    low = "?" if found.get("low") is None else f"{found['low']:,.0f}"
    high = "beyond" if found.get("high") is None else f"{found['high']:,.0f}"
    if found["outcome"] == "not_reached":
        return "not reached" if found.get("low") is None else f"not reached ({low} to beyond)"
    return f"{found['global_batch_size']:,.0f} ({low} to {high})"


def _unbroken(text):
    """Return a limit that breaks its line before the interval only."""
    value, bracket, interval = text.partition(" (")
    return value + bracket + interval.replace(" ", "\N{NO-BREAK SPACE}")


def limits_within(name, other):
    """Return whether each study's limits lie in the intervals of the other one."""
    pairs = [(one, arm(other, one["arm"])) for one in study(name)["arms"]]
    return all(
        low["limit"]["low"] <= value["limit"]["global_batch_size"] <= low["limit"]["high"]
        for one, two in pairs
        for low, value in ((one, two), (two, one))
    )


def ahead(name):
    """Return (best arm, next arm, lead) at the largest batch.

    The lead is in points of accuracy, or in percent of the best arm's perplexity.
    """
    what = _metric(name)
    lower = study(name)["metric"] != "accuracy"
    ordered = sorted(
        ((one["points"][-1][what], one["arm"]) for one in study(name)["arms"]), reverse=not lower
    )
    (best, first), (other, second) = ordered[:2]
    lead = 100 * (other / best - 1) if lower else 100 * (best - other)
    return first, second, lead


def claim(name, of):
    """Return a claim of a study: a dict with `verdict` and `sentence`."""
    (found,) = (one for one in study(of)["claims"] if one["claim"] == name)
    return found


def finding(name, begins):
    """Return the finding of a study that begins with a text."""
    (found,) = (text for text in study(name)["findings"] if text.startswith(begins))
    return found


def gain(name, label):
    """Return a step of a waterfall: its mean accuracy and its gain over the step before."""
    (found,) = (one for one in study(name)["waterfall"]["steps"] if one["arm"] == label)
    return found


def gained(name, label):
    """Return the points that an arm of a waterfall has more than its first arm."""
    return 100 * (gain(name, label)["mean"] - study(name)["waterfall"]["steps"][0]["mean"])


def study_facts(name):
    """Return the command of a study, and a table of how it was run."""
    found = study(name)
    sizes = [one["global_batch_size"] for one in found["arms"][0]["points"]]
    versions = found["versions"]
    limited = any(one["limit"] for one in found["arms"])
    rows = [
        ("arms", "; ".join(one["arm"] for one in found["arms"])),
        ("batch sizes", ", ".join(f"{size:,}" for size in sizes)),
        ("trials", _trials(found)),
        ("score", f"test {found['metric']}" + (f"; {_drop(found)}" if limited else "")),
        ("versions", f"Python {versions['python']}, JAX {versions['jax']}"),
        *([("machine", found["machine"])] if "machine" in found else []),
        ("all numbers", f"`configs/sweeps/{name}.json`"),
    ]
    shown = table(("study", f"`{name.replace('-', ':', 1)}`"), rows)
    return f"```sh\n{_command(name)}\n```\n\n{shown}"


def _command(name):
    config, _, row = name.partition("-")
    if row == "sse4_2":
        return "XLA_FLAGS=--xla_cpu_max_isa=SSE4_2 scripts/quickstart runs/sse"
    flag = f"sweeps/{config}" + (f":{row}" if row else "")
    return f"lbopt sweep --config={flag} --workdir=runs/{name}"


def _trials(found):
    seeds = sorted({one["seeds"] for arm_ in found["arms"] for one in arm_["points"]})
    several = " to ".join(str(count) for count in {seeds[0]: 0, seeds[-1]: 0})
    cells = len(found["arms"]) * len(found["arms"][0]["points"])
    return f"{found['num_trials']:,} in {cells} cells; {several} final seeds per cell"


def _drop(found):
    share = f"{found['limit_points']:g}"
    if found["metric"] != "accuracy":
        return f"the limit allows a rise of {share} percent"
    return f"the limit allows a loss of {share} point{'' if share == '1' else 's'}"


def scores(name):
    """Return the table of arm x batch size: mean test score, best in bold, and the limit."""
    found = study(name)
    what = _metric(name)
    best_of = max if found["metric"] == "accuracy" else min
    sizes = [one["global_batch_size"] for one in found["arms"][0]["points"]]
    shown = [[_score(one, what) for one in arm_["points"]] for arm_ in found["arms"]]
    best = [best_of(column, key=float) for column in zip(*shown, strict=True)]

    limited = any(arm_["limit"] is not None for arm_ in found["arms"])
    rows = []
    for arm_, values in zip(found["arms"], shown, strict=True):
        cells = [f"**{v}**" if v == top else v for v, top in zip(values, best, strict=True)]
        last = [_unbroken(limit_text(arm_["limit"]))] if limited else []
        rows.append((arm_["arm"], *cells, *last))
    title = f"test {found['metric']}" + (", %" if best_of is max else "")
    header = (title, *(f"{size:,}" for size in sizes), *(["limit"] if limited else []))
    return table(header, rows)


def _metric(name):
    return f"test_{study(name)['metric']}_mean"


def _score(found, what):
    value = found[what]
    return percent(value, 2) if what == "test_accuracy_mean" else f"{value:.2f}"


def findings(name):
    """Return the findings of a study as a list, without those that state a claim."""
    found = study(name)
    sentences = {one["sentence"] for one in found["claims"]}
    return "\n".join(f"- {text}" for text in found["findings"] if text not in sentences)


def claims(name):
    """Return the claims that a study judges, each with its verdict and the sentence."""
    return "\n".join(
        f"- *{CLAIMS[one['claim']]}*: **{one['verdict']}**. {one['sentence']}"
        for one in study(name)["claims"]
    )


_NOTHING = re.compile(r"there is no cell to judge by|to judge by, and there are none")
"""A claim of a study in which nothing judges it."""


def verdicts():
    """Return each claim, and the table of its verdict and numbers in every study that has any."""
    parts = []
    for key, text in CLAIMS.items():
        rows = [
            (_page_link(name), f"**{one['verdict']}**", short(one["sentence"]))
            for name in STUDIES
            for one in study(name)["claims"]
            if one["claim"] == key and not _NOTHING.search(one["sentence"])
        ]
        if not rows:  # no study that was run judges it
            continue
        source = next(paper for start, paper in SOURCES.items() if key.startswith(start))
        parts += [
            f"**{text}** (arXiv: {source})",
            table(("study", "verdict", "what was measured"), rows),
        ]
    return "\n\n".join(parts)


def short(sentence):
    """Return the numbers of a claim's sentence: two clauses behind the verdict, no brackets."""
    told = re.split(r"\bhere: ", sentence, maxsplit=1)[1]
    while "(" in told:
        told = re.sub(r"\s*\([^()]*\)", "", told)
    return "; ".join(told.rstrip(".").split("; ")[:2])


def page_of(name):
    """Return the page of a study, without `.md`."""
    return name.partition("-")[0]


def _page_link(name):
    return f"[{name.replace('-', ':', 1)}](studies/{page_of(name)}.md)"


def steps_table(name):
    """Return the table of arm x batch size: median steps to the target, and the critical batch.

    The critical batch has its 95 % interval if the summary has one; the last column is the batch
    that needs 20 % more examples than the smallest.
    """
    found = study(name)
    sizes = [one["global_batch_size"] for one in found["arms"][0]["points"]]
    rows = []
    for arm_ in found["arms"]:
        steps = [
            "not reached" if one["steps"] is None else f"{one['steps']:,g}"
            for one in arm_["scaling"]["points"]
        ]
        fit = arm_["critical_batch"]
        overhead = "-" if fit is None else f"{fit['overhead_batch_size']:,.0f}"
        rows.append((arm_["arm"], *steps, _critical_text(fit), overhead))
    columns = (f"{size:,}" for size in sizes)
    return table(("median steps", *columns, "critical batch", "20 % more examples"), rows)


def critical_growth_table(name):
    """Return the table of arm x milestone: critical batches, and the exponent of the examples."""
    rows = []
    for arm_ in study(name)["arms"]:
        growth = arm_["critical_growth"]
        if growth is None:
            continue
        sizes = {
            one["share"]: f"{one['critical_batch']['critical_batch_size']:,.0f} at "
            f"{one['examples']:,.0f}"
            for one in growth["milestones"]
        }
        low, high = growth["interval"]
        low_text = "-infinity" if low is None else f"{low:.2f}"
        high_text = "infinity" if high is None else f"{high:.2f}"
        told = f"{growth['exponent']:.2f} ({low_text} to {high_text})"
        rows.append(
            (arm_["arm"], *(sizes.get(share, "-") for share in (1 / 8, 1 / 4, 1 / 2, 1)), told)
        )
    return table(("arm", "1/8", "1/4", "1/2", "whole", "exponent"), rows)


def _critical_text(fit):
    if fit is None:
        return "-"
    text = f"{fit['critical_batch_size']:,.0f}"
    if not fit.get("intervals"):
        return text
    low, high = fit["intervals"]["critical_batch_size"]
    if high is None and round(low) == 0:
        return "cannot be told"
    end = "infinity" if high is None else f"{high:,.0f}"
    return _unbroken(f"{text} ({low:,.0f} to {end})")


def diffusion_table(name):
    """Return the table of arm x batch size: the exponent of t, and both fits' R^2."""
    rows = [
        (
            arm_["arm"],
            f"{one['global_batch_size']:,}",
            f"{one['diffusion']['log_r2']:.3f}",
            f"{one['diffusion']['power_r2']:.3f}",
            f"{one['diffusion']['exponent']:.2f}",
        )
        for arm_ in study(name)["arms"]
        for one in arm_["points"]
    ]
    return table(("arm", "batch", "R² of log t", "R² of t^p", "p"), rows)


def costs_table(name):
    """Return the table of rule x batch size: points of accuracy less than the best search has."""
    found = {one["arm"]: one["points"] for one in study(name)["arms"]}
    searched = [points for label, points in found.items() if label.endswith("searched")]
    best = [
        max(one["test_accuracy_mean"] for one in cells) for cells in zip(*searched, strict=True)
    ]
    rows = [
        (
            label,
            *(
                f"{100 * (top - one['test_accuracy_mean']):.2f}"
                for top, one in zip(best, points, strict=True)
            ),
        )
        for label, points in found.items()
        if not label.endswith("searched")
    ]
    sizes = [f"batch {one['global_batch_size']:,}" for one in searched[0]]
    return table(("points less than the best search", *sizes), rows)


def waterfall_table(name):
    """Return the table of a waterfall: accuracy after each step, and its gain."""
    rows = []
    for one in study(name)["waterfall"]["steps"]:
        gained = told = "-"
        if one["gain"] is not None:
            gained = f"{one['gain']:+.2f} ({one['gain_low']:+.2f} to {one['gain_high']:+.2f})"
            told = "yes" if one["told_apart"] else "no"
        rows.append((one["arm"], percent(one["mean"], 2), gained, told))
    header = ("arm", "test accuracy, %", "gain, points (95 % interval)", "told apart from noise")
    return table(header, rows)


def growth_table(name):
    """Return the table of a study of growing batches: steps and test loss beside the constant."""
    points = {one["arm"]: one["points"][0] for one in study(name)["arms"]}
    constant, *_ = points.values()
    rows = [
        (
            label,
            f"{one['steps']:,.0f}",
            f"{100 * (1 - one['steps'] / constant['steps']):.0f} %",
            f"{one['test_loss_mean']:.3f} ± {one['test_loss_std']:.3f}",
            f"{100 * (one['test_loss_mean'] / constant['test_loss_mean'] - 1):+.2f} %",
            f"{one['learning_rate']:g}",
        )
        for label, one in points.items()
    ]
    header = ("arm", "steps", "fewer steps", "test loss", "beside constant", "learning rate")
    return table(header, rows)


def format_table(name):
    """Return the table of format x batch size, with APS and without it."""
    found = {one["arm"]: one["points"] for one in study(name)["arms"]}
    sizes = [one["global_batch_size"] for one in next(iter(found.values()))]
    rows = []
    for label, points in found.items():
        if label.endswith(", APS"):
            continue
        with_aps = found.get(f"{label}, APS")
        cells = []
        for place, _ in enumerate(sizes):
            bare = percent(points[place]["test_accuracy_mean"], 2)
            shifted = percent(with_aps[place]["test_accuracy_mean"], 2) if with_aps else "-"
            cells += [shifted, bare]
        rows.append((label, *cells))
    header = [text for size in sizes for text in (f"{size:,}, APS", f"{size:,}")]
    return table(("test accuracy, %", *header), rows)
