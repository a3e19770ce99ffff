"""How a study was done, in words made from its config."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lbopt.sweep.findings.limits import has_limits
from lbopt.sweep.findings.metric import Metric
from lbopt.sweep.findings.names import quoted

Config = Mapping[str, Any]
_KNOBS = {"learning_rate": "learning rate", "warmup": "warmup", "weight_decay": "weight decay"}


def protocol(config: Config, metric: Metric) -> list[str]:
    """Return the protocol, a paragraph each: search, choice, fidelity, target, limit, what was measured, and what the study cannot tell.

    Args:
      config: the study's config as JSON data.
      metric: what the study is judged by.
    """
    return [
        _search(config),
        _choice(config, metric),
        *_fidelity(
            [config["search"], *(arm["search"] for arm in config["arms"] if arm.get("search"))]
        ),
        *_target(config["train"]),
        *_limit(config, metric),
        *_measured(config),
        _BY_HAND,
        _shares(config),
    ]


_BY_HAND = (
    "Base learning rates, base warmups and all other fields that the search does not vary were set by hand before the study. That tuning is "
    "outside the equal budget of the search, and not counted here."
)


def _search(config: Config) -> str:
    own = [quoted(arm["name"]) for arm in config["arms"] if arm.get("search")]
    others = "Every arm" if not own else f"All arms but {', '.join(own)}"
    if len(own) == len(config["arms"]):
        return _own_searches(config)
    text = f"{others} got the same search at every batch size: {_described(config['search'])}."
    return f"{text} {_own_searches(config)}".strip()


def _own_searches(config: Config) -> str:
    """Say how the arms were searched that had a search of their own; equal ones together."""
    by_text: dict[str, list[str]] = {}
    for arm in config["arms"]:
        if arm.get("search"):
            by_text.setdefault(_described(arm["search"]), []).append(quoted(arm["name"]))
    return " ".join(
        f"{', '.join(names)} got at every batch size: {text}." for text, names in by_text.items()
    )


def _described(search: Config) -> str:
    where = ", ".join(_tried(search, knob, name) for knob, name in _KNOBS.items())
    seeds = _seeds(search["seeds"])
    return f"{_method(search)} over multiples of what the arm's rules give there ({where}), each candidate with {seeds}"


def _method(search: Config) -> str:
    count = f"{search['num_candidates']} candidates"
    rungs = f"eta {search['eta']}, shortest run {search['min_fidelity']:.3g} of the full length"
    seed = f"search seed {search['seed']}"
    pruner = "no pruner" if search["pruner"] == "none" else f"pruner {search['pruner']}, {rungs}"
    return {
        "grid": "the whole grid",
        "log_uniform": f"{count} drawn log-uniformly ({seed})",
        "halton": f"{count} of a Halton sequence ({seed})",
        "successive_halving": f"successive halving from {count} ({rungs}, {seed})",
        "hyperband": f"Hyperband ({rungs}, {seed})",
        "optuna": f"Optuna with {count} (sampler {search['sampler']}, {pruner}, {search['candidates_at_once']} at once, {seed})",
    }[search["method"]]


def _tried(search: Config, knob: str, name: str) -> str:
    if search["method"] == "grid":
        factors = search[f"{knob}_factors"]
        return (
            f"{name} {', '.join(f'{factor:g}' for factor in factors)}"
            if len(factors) > 1
            else f"{name} {factors[0]:g}"
        )
    low, high = search[f"{knob}_range"]
    return f"{name} {low:g} to {high:g}" if low < high else f"{name} {low:g}"


def _seeds(seeds: Sequence[int]) -> str:
    return f"seed{'s' * (len(seeds) > 1)} {', '.join(map(str, seeds))}"


def _choice(config: Config, metric: Metric) -> str:
    by = f"best mean validation {'loss' if metric.name == 'perplexity' else 'accuracy'}"
    if config["train"].get("target_metric"):
        by = f"fewest steps to the target (and, of those that did not reach it, the {by})"
    fresh = _seeds(config["final_seeds"])
    diverged = f"A run that diverged counts with {'an infinite loss' if metric.name == 'perplexity' else 'accuracy 0'}."
    return f"The candidate with the {by} was run again with the fresh {fresh}; only those runs were tested, once. No choice looked at the test split. {diverged}"


def _has_rungs(search: Config) -> bool:
    halving = search["method"] in ("successive_halving", "hyperband")
    return halving or (search["method"] == "optuna" and search["pruner"] != "none")


def _fidelity(searches: Sequence[Config]) -> list[str]:
    if not any(map(_has_rungs, searches)):
        return []
    return [
        "A run of lower fidelity is shorter, with the whole schedule rescaled to its length, never one with a smaller batch. The choice is among candidates run at full length."
    ]


def _target(train: Config) -> list[str]:
    if not train.get("target_metric"):
        return []
    name = train["target_metric"].replace("eval/", "validation ")
    stops = "; a run stops there" if train.get("stop_at_target") else ""
    return [
        f"The target is {name} {train['target_value']:g}, looked for at every evaluation{stops}."
    ]


def _limit(config: Config, metric: Metric) -> list[str]:
    if not has_limits(config):
        return ["As runs stop at the target, no limit of accuracy is looked for."]
    near = metric.amount(config["limit_points"])
    mean = (
        "mean test accuracy"
        if metric.name == "accuracy"
        else "test perplexity (the exponential of the mean loss over seeds)"
    )
    return [
        f"The limit is the largest batch up to which the {mean} stays within {near} of the same arm's at the smallest batch. "
        "Its 95 % interval is of percentiles over 2,000 draws: each batch's final seeds are drawn with replacement and the limit is found again; "
        "it knows of the spread over seeds, not of the choice of candidates nor of the test set's size. "
        "An arm of which a final seed diverged at the smallest batch has no limit: there is no result to stay near to."
    ]


def _measured(config: Config) -> list[str]:
    """Say which runs were measured for what."""
    measure = config.get("measure")
    if measure is None:
        return []
    kept = ["the curve of the training loss"]
    kept += (
        ["the curve of the distance from the start with its fits"] if measure["distance"] else []
    )
    kept += ["probes of the gradient"] if measure["num_probes"] else []
    end = ", the final distance" if measure["distance"] else ""
    text = (
        f"Only final runs have {' and '.join([', '.join(kept[:-1]), kept[-1]][-len(kept) :])}. A search run has its scores on training and validation{end}, "
        "the steps it took, and the step at which it diverged."
    )
    if not measure["num_probes"]:
        return [
            f"{text} Gradients were not probed: there is no noise scale, Lipschitz constant or trust ratio."
        ]
    return [text]


def _shares(config: Config) -> str:
    told = ", but where the ablation takes it apart" if config.get("waterfall") else ""
    shared = not any(arm.get(part) for arm in config["arms"] for part in ("data", "model"))
    one = " Data set and model are one each: others may give another order." if shared else ""
    return f"An arm is an optimizer together with its scaling and warmup rule; the study does not tell their shares apart{told}.{one}"
