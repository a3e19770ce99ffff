"""The protocol of a study in words, made from its config."""

from __future__ import annotations

from collections.abc import Sequence

from lbopt.config import SearchConfig
from lbopt.report.study._limit import COARSEST_FACTOR, FEWEST_SEEDS, REFERENCE_FACTOR
from lbopt.report.study._metric import ACCURACY, PERPLEXITY
from lbopt.report.study._study import Study
from lbopt.report.study._words import say
from lbopt.sweep.search import can_widen

_KNOBS = {"learning_rate": "learning rate", "warmup": "warmup", "weight_decay": "weight decay"}
_OWN = 'The search of {{ names | map("name") | join(", ") }} at every batch size was {{ text }}.'
_OTHERS = """
    {%- if own %}All arms but {{ own | map("name") | join(", ") }}{% else %}Every arm{% endif %}
    got the same search at every batch size: {{ text }}."""
_METHODS = {
    "grid": "the whole grid",
    "log_uniform": "{{ s.num_candidates }} candidates drawn log-uniformly ({{ seed }})",
    "halton": "{{ s.num_candidates }} candidates of a Halton sequence ({{ seed }})",
    "successive_halving": """successive halving from {{ s.num_candidates }} candidates ({{ rungs }},
        {{ seed }})""",
    "hyperband": "Hyperband ({{ rungs }}, {{ seed }})",
    "optuna": """Optuna with {{ s.num_candidates }} candidates (sampler {{ s.sampler }},
        {% if s.pruner == "none" %}no pruner{% else %}pruner {{ s.pruner }}, {{ rungs }}{% endif %},
        {{ s.candidates_at_once }} at once, {{ seed }})""",
}
_WIDENED = """. While a factor of the best candidate lay at an edge of all that was tried, it ran
    again with that factor {{ "a step" if s.method == "grid" else "a tenth" }} of the
    {{ "grid" if s.method == "grid" else "range" }} further, with up to
    {{ s.widen_candidates | count("more candidate") }} in a cell"""
_CHOICE = """The candidate with the
    {% if target %}fewest steps to the target (and, of those that did not reach it, the best mean
    validation {{ by }}){% else %}best mean validation {{ by }}{% endif %} was run again with the
    fresh {{ seeds }}; only those runs were tested, once. No choice looked at the test split. A run
    that diverged counts with {{ worst }}.{{ order }}"""
_ORDER = " Of {}, {} is better."
_WORST = {ACCURACY: "accuracy 0", PERPLEXITY: "an infinite loss"}
_FIDELITY = (
    "A run of lower fidelity is shorter, with the whole schedule rescaled to its length, never one "
    "with a smaller batch. The choice is among candidates run at full length."
)
_TARGET = """The target is {{ train.target_metric | replace("eval/", "validation ") }}
    {{ "%g" % train.target_value }}, checked at every evaluation
    {{- "; a run stops there" if train.stop_at_target }}."""
_LIMIT = """The limit is the largest batch up to which the {{ mean }} stays within {{ near }} of the
    same arm's mean over small batches, those of at most {{ factor }} times the smallest. It is read
    from an isotonic fit of the score against the batch size, which never improves as the batch
    grows, and interpolated in the logarithm of the batch. Its 95 % interval is a bias-corrected
    bootstrap of 2,000 resamples over {% if examples == "all" %}final seeds and test examples
    {%- elif examples == "some" %}final seeds and, for arms that have their scores on every test
    example, over test examples{% else %}final seeds alone, as scores on single test examples were
    not recorded: it ignores the test set's size{% endif %}. It ignores the uncertainty of the
    candidate's choice. No limit is given if no batch size is beyond the small ones, if one has
    fewer than {{ fewest }} seeds, if the score falls among the small batches already, if the batch
    sizes beside the limit differ by more than a factor of {{ coarsest }}, if at the smallest batch
    a seed diverged or none learned, or if the interval spans all batch sizes beyond the small ones.
    """
_NO_LIMIT = "As runs stop at the target, no limit of {} is looked for."
_MEASURED = """Only final runs have {{ kept | listed }}. A search run has its scores on training
    and validation{{ ", the final distance" if measure.distance }}, the steps it took, and the step
    at which it diverged.
    {%- if not measure.num_probes %} Gradients were not probed: there is no noise scale, Lipschitz
    constant or trust ratio.{% endif %}"""
_BY_HAND = (
    "Base learning rates, base warmups and all other fields that the search does not vary were set "
    "by hand before the study. That tuning is outside the equal budget of the search, and not "
    "counted here."
)
_SHARES = """An arm is an optimizer together with its scaling and warmup rule; the study does not
    tell their effects apart{{ ", except in the ablation" if waterfall }}.
    {%- if shared %} It has one data set and one model; with others the arms may rank
    differently.{% endif %}"""


def protocol(study: Study) -> list[str]:
    """Return search, choice, fidelity, target, limit and measures, a paragraph each."""
    config = study.config
    metric = study.metric
    text = metric.text
    known = metric in (ACCURACY, PERPLEXITY)
    searches = [config.search, *(arm.search for arm in config.arms if arm.search)]
    better = "lower" if metric.lower_is_better else "higher"
    by_loss = metric is PERPLEXITY
    mean = "mean test loss, the logarithm of the perplexity," if by_loss else f"mean test {text}"

    found = [
        _search(study),
        say(
            _CHOICE,
            target=study.has_target,
            by="loss" if by_loss else text,
            worst=_WORST.get(metric, "the worst score"),
            order="" if known else _ORDER.format(text, better),
            seeds=_seeds(config.final_seeds),
        ),
        _FIDELITY if any(search.has_rungs for search in searches) else "",
        say(_TARGET, train=config.train) if study.has_target else "",
        say(
            _LIMIT,
            mean=mean,
            near=metric.amount(config.limit_points),
            factor=f"{REFERENCE_FACTOR:g}",
            fewest=FEWEST_SEEDS,
            coarsest=f"{COARSEST_FACTOR:g}",
            examples=_resampled_examples(study),
        )
        if study.has_limits
        else _NO_LIMIT.format("accuracy" if known else text),
        _measured(study),
        _BY_HAND,
        say(
            _SHARES,
            waterfall=config.waterfall,
            shared=not any(arm.data or arm.model for arm in config.arms),
        ),
    ]

    return [paragraph for paragraph in found if paragraph]


def _resampled_examples(study: Study) -> str:
    """Return whether the bootstrap resamples test examples for "all", "some" or "none" of the arms.

    Only arms with a fit count.
    """
    found = {arm.limit_over_examples for arm in study.arms if arm.limit and arm.limit.fit}
    return "some" if len(found) == 2 else "all" if found == {True} else "none"


def _search(study: Study) -> str:
    """Return a description of the searches; arms with equal searches are named together."""
    own: dict[str, list[str]] = {}
    for arm in study.config.arms:
        if arm.search:
            own.setdefault(_described(arm.search), []).append(arm.name)
    names = [name for found in own.values() for name in found]
    found = [say(_OWN, names=names, text=text) for text, names in own.items()]
    if len(names) < len(study.config.arms):
        found.insert(0, say(_OTHERS, own=names, text=_described(study.config.search)))
    return " ".join(found)


def _described(search: SearchConfig) -> str:
    rungs = f"eta {search.eta}, shortest run {search.min_fidelity:.3g} of the full length"
    method = say(_METHODS[search.method], s=search, rungs=rungs, seed=f"search seed {search.seed}")
    tried = ", ".join(_tried(search, knob, name) for knob, name in _KNOBS.items())
    widened = say(_WIDENED, s=search) if can_widen(search) else ""
    return (
        f"{method} over multiples of the values that the arm's rules give there ({tried}), each "
        f"candidate with {_seeds(search.seeds)}{widened}"
    )


def _tried(search: SearchConfig, knob: str, name: str) -> str:
    if search.method == "grid":
        factors = getattr(search, f"{knob}_factors")
        return f"{name} {', '.join(f'{factor:g}' for factor in factors)}"
    low, high = getattr(search, f"{knob}_range")
    return f"{name} {low:g} to {high:g}" if low < high else f"{name} {low:g}"


def _seeds(seeds: Sequence[int]) -> str:
    return f"seed{'s' * (len(seeds) > 1)} {', '.join(map(str, seeds))}"


def _measured(study: Study) -> str:
    """Return a description of the measurements and of the runs in which they were made."""
    measure = study.config.measure
    kept = ["the curve of the training loss"]
    kept += ["the curve of the distance from the start with its fits"] * measure.distance
    kept += ["probes of the gradient"] * bool(measure.num_probes)
    return say(_MEASURED, kept=kept, measure=measure)
