"""Every published recipe: the configs against published.json, an independent transcription.

Only values marked "source" or "derived from source" are expected values. A recalled value is
compared with nothing, but the config has to say that it is recalled.
"""

import dataclasses
import functools
import json
import math
import pathlib
import re

import jax
import numpy as np
import pytest
from refusal import refused

from lbopt.cli import _flags, config_files
from lbopt.config import (
    ResolvedSchedule,
    SweepConfig,
    TrainConfig,
    make_schedule,
    resolve_clip,
    resolve_schedule,
)
from lbopt.models import EfficientNet, ResNet
from lbopt.report.study import decision_lines
from lbopt.transforms import VARIANTS

EXPONENTS = {"linear": 1, "sqrt": 0.5, "sde_half_life": 0.5, "none": 0}
"""Exponents of the batch in the learning rate, by scaling rule, the first of several."""
CONFIGS = pathlib.Path(__file__).parents[2] / "configs"
TRANSCRIPTION = json.loads((pathlib.Path(__file__).parent / "published.json").read_text())
PUBLISHED = TRANSCRIPTION["rows"]
SOURCES = TRANSCRIPTION["sources"]
UNCONFIRMED = "source not confirmed: "
CITATION = re.compile(
    rf"(?:{UNCONFIRMED})?"
    r"(?:arXiv:\d{4}\.\d{4,5}v\d+|[\w.-]+/[\w.-]+@[0-9a-f]{40}:\S+)"
    r"(?:, .+)?"
)
"""A paper with its version, or a file at a commit; then, after a comma, a place within it."""
MARK = re.compile(r"(?:derived from )?(?:source|recalled \d\d%)|own arithmetic")
FILES = sorted(
    {row["config"].partition(":")[0] for row in PUBLISHED if row["config"]} | {"configs/cifar10.py"}
)
SOURCED = ("source", "derived from source")
IMAGENET = 1_281_167
_LM_CRITICAL = str(CONFIGS / "sweeps" / "lm_critical.py")
CORPUS_TOKENS = _flags._from_config_file("config", _LM_CRITICAL, lambda file: file.CORPUS_TOKENS)

OWN = {
    "configs/efficientnet.py:b5-lars-65536-single-decay",
    "configs/squad.py:large-adamw",
    "configs/squad.py:base-adamw",
    *(
        f"configs/{file}.py:{name}-32768"
        for file in ("bert_large_lamb", "resnet50_lamb")
        for name in ("adamh", "muonh")
    ),
    *(
        f"configs/cifar10.py:{name}-{batch}"
        for name in ("lamb", "momentum")
        for batch in (512, 4096, 45000)
    ),
}
"""lbopt's own recipes, which nobody published, besides the smoke recipes."""

_TF2_EPS = (
    "lars_optimizer.py takes `epsilon or backend_config.epsilon()`, 1e-7, as the variant does"
)
KNOWN = {
    ("configs/resnet50_mlperf.py:4096", "eps"): _TF2_EPS,
    ("configs/resnet50_mlperf.py:2496", "eps"): _TF2_EPS,
}
"""Fields that cannot have the published value. A test fails when one of them begins to agree."""

ELSEWHERE = {
    "undecayed": "masks of the variants: tests/transforms",
    "gradient_reduction": "bf16 sums are not offered: said in the notes",
    "num_examples": "a property of the data set",
    "layers": "sizes of the models: tests/models",
    "hidden": "sizes of the models: tests/models",
}
SUFFIXES = {"all classes": "all_classes", "other classes": "other_classes"}
STAGES = {
    "inside the optimizer": "accumulated",
    "each replica's local gradient, before the cross-replica sum": "replica",
    "outside the optimizer, per replica before the cross-replica reduction": "replica",
}
METRICS = {
    "top-1 accuracy": "eval/accuracy",
    "test accuracy": "eval/accuracy",
    "masked-LM accuracy": "eval/accuracy",
    "SQuAD v1.1 dev F1": None,  # from another run, which starts from this one
}
BATCH_NORM_EPS = {
    "resnet": ResNet.batch_norm_epsilon,
    "efficientnet": EfficientNet.batch_norm_epsilon,
}


@functools.cache
def load(name: str) -> TrainConfig:
    """Return `configs/FILE.py[:ROW]`, validated."""
    config = _flags.call_get_config(str(CONFIGS.parent / name))
    config.validate()
    return config


def rows_of(file: str) -> list[str]:
    return [f"{file}:{row}" for row in _flags.config_rows(str(CONFIGS.parent / file))]


ALL_ROWS = [name for file in FILES for name in rows_of(file)]


def examples_of(config: TrainConfig) -> int:
    """Return the number of training examples; any number where the schedule is in steps."""
    if config.data.builder == "mnist":
        return {"train": 60000, "train[:50000]": 50000, "train[:55000]": 55000}[
            config.data.train_split
        ]
    if config.data.name == "digits":
        return 1024
    if config.data.builder == "cifar10":
        return {"train": 50000, "train[:45000]": 45000}[config.data.train_split]
    if config.data.builder in CORPUS_TOKENS:
        return CORPUS_TOKENS[config.data.builder] // config.data.sequence_length
    if config.data.builder == "fashion_mnist":
        return {"train[:50000]": 50000}[config.data.train_split]
    return {"imagenet2012": IMAGENET, "generated_images": 96, "squad": 88_000}.get(
        config.data.builder, 1_000_000
    )


def resolved(config: TrainConfig, first_phase_only: bool = True) -> ResolvedSchedule:
    phase = config.phases()[0 if first_phase_only else 1]
    return resolve_schedule(
        phase.schedule,
        phase.global_batch_size,
        examples_of(phase),
        phase.num_epochs,
        num_steps=phase.num_steps,
    )


def make(config: TrainConfig, numbers: ResolvedSchedule):
    return make_schedule(config.schedule, numbers)


# Fields of a recipe: field of published.json -> value of the config, or a message about a mismatch.


def actual(config: TrainConfig, numbers: ResolvedSchedule, field: str):
    """Return a one-phase config's value of a published field that is compared by value."""
    optimizer = config.optimizer
    schedule = config.schedule
    model = config.model
    loss = config.loss
    data = config.data
    options = VARIANTS.get(optimizer.name, {}).get(optimizer.variant)
    options = vars(options.options) if options else {}

    ours = {
        "global_batch_size": config.global_batch_size,
        "num_steps": numbers.num_steps,
        "optimizer": optimizer.name,
        "peak_learning_rate": numbers.learning_rate,
        "warmup_start_step": schedule.start_step,
        "decay": schedule.decay,
        "decay_power": schedule.power,
        "decay_steps": decay_steps(config, numbers),
        "end_learning_rate": numbers.learning_rate * schedule.end_factor
        if schedule.end_learning_rate is None
        else schedule.end_learning_rate,
        "decay_rate": schedule.decay_rate,
        "decay_every_epochs": schedule.stair_epochs[0] if len(schedule.stair_epochs) == 1 else None,
        "staircase": schedule.decay == "exponential",
        "momentum": optimizer.momentum,
        "b1": optimizer.b1,
        "b2": optimizer.b2,
        "eps": _eps(optimizer, options),
        "rmsprop_decay": optimizer.rmsprop_decay,
        "weight_decay": optimizer.weight_decay,
        "trust_coefficient": optimizer.trust_coefficient or options.get("trust_coefficient"),
        "debias": options.get("debias"),
        "max_grad_norm": resolve_clip(optimizer),
        "clip_stage": optimizer.clip_stage,
        "l2_in_loss": loss.l2,
        "label_smoothing": loss.label_smoothing,
        "label_smoothing_rule": loss.label_smoothing_rule,
        "batch_norm_span_examples": model.batch_norm_scope,
        "batch_norm_momentum": model.batch_norm_momentum,
        "batch_norm_eps": BATCH_NORM_EPS.get(model.name),
        "ema_decay": optimizer.ema_decay,
        "dropout": model.dropout_rate,
        "survival_probability": 1 - (model.stochastic_depth_rate or 0),
        "resolution": data.image_size,
        "sequence_length": data.sequence_length,
        "target_metric": config.target_metric,
        "target_value": config.target_value,
    }

    return ours[field]


def _eps(optimizer, options):
    if optimizer.name != "lars":
        return optimizer.eps
    return options.get("eps") if optimizer.trust_ratio_eps is None else optimizer.trust_ratio_eps


def decay_steps(config: TrainConfig, numbers: ResolvedSchedule) -> float:
    schedule = config.schedule
    if schedule.decay_steps is not None:
        return schedule.decay_steps
    origin = 0 if schedule.decay_from == "start" else schedule.start_step + numbers.warmup_steps
    return numbers.num_steps + schedule.first_step - origin


def translated(field: str, value):
    """Return a published value in the config's terms."""
    words = {"label_smoothing_rule": SUFFIXES, "clip_stage": STAGES, "target_metric": METRICS}
    if field == "batch_norm_span_examples":
        return f"examples:{value}"
    return words[field][value] if field in words else value


def agree(ours, theirs, relative=1e-6) -> bool:
    if isinstance(theirs, list):  # a range over runs
        return theirs[0] <= ours <= theirs[1]
    if (
        isinstance(theirs, (int, float))
        and isinstance(ours, (int, float))
        and not isinstance(theirs, bool)
    ):
        return math.isclose(ours, theirs, rel_tol=relative, abs_tol=0 if theirs else 1e-12)
    return ours == theirs


def mismatch(config: TrainConfig, field: str, entry: dict, row: dict) -> str | None:
    """Compare one field; return a message about a mismatch, or None."""
    phase = config.phases()[int(field[5]) - 1] if field.startswith("phase") else config.phases()[0]
    numbers = resolved(phase)
    kind = field.partition(".")[2] if field.startswith("phase") else field
    theirs = entry["value"]
    if kind in COMPARED_SPECIALLY:
        return COMPARED_SPECIALLY[kind](
            phase if field != kind else config, numbers, theirs, entry, row
        )
    ours = actual(phase, numbers, kind)
    theirs = translated(kind, theirs)
    return None if agree(ours, theirs) else f"{ours!r} here, {theirs!r} published"


def _num_steps(config, numbers, theirs, entry, row):
    ours = sum(resolved(phase).num_steps for phase in config.phases())
    return None if ours == theirs else f"{ours} here, {theirs} published"


def _epochs_in_steps(config, epochs, row):
    """Return the steps of `epochs` epochs, by the recipe's steps per epoch if it gives them."""
    per_epoch = row["values"].get("steps_per_epoch", {"mark": ""})
    return epochs * (
        per_epoch["value"]
        if per_epoch["mark"] in SOURCED
        else examples_of(config) / config.global_batch_size
    )


def _gives(row, field):
    return row["values"].get(field, {"mark": ""})["mark"] in SOURCED


def _num_epochs(config, numbers, theirs, entry, row):
    if config.num_steps is None:
        return (
            None if config.num_epochs == theirs else f"{config.num_epochs} here, {theirs} published"
        )
    unrounded = _epochs_in_steps(config, theirs, row)
    slack = (
        1 if _gives(row, "num_steps") else theirs
    )  # the run rounded up; each epoch rounded up, at most
    fits = 0 <= config.num_steps - unrounded < slack
    return (
        None
        if fits
        else f"{config.num_steps} steps here, {theirs} epochs of {unrounded / theirs:g} published"
    )


def _steps_per_epoch(config, numbers, theirs, entry, row):
    ours = config.num_steps / row["values"]["num_epochs"]["value"]
    return None if ours == theirs else f"{ours} here, {theirs} published"


def _warmup_epochs(config, numbers, theirs, entry, row):
    unrounded = _epochs_in_steps(config, theirs, row)
    whole_epochs = (
        theirs * math.floor(unrounded / theirs) if theirs else 0
    )  # an epoch's steps rounded down, as TF2's code does
    # If the recipe gives the steps themselves, those are compared exactly.
    exact = _gives(row, "num_steps") and not _gives(row, "warmup_steps")
    allowed = [unrounded] if exact else [unrounded, math.floor(unrounded), whole_epochs]
    fits = any(abs(numbers.warmup_steps - steps) <= 0.5 for steps in allowed)
    return (
        None
        if fits
        else f"{numbers.warmup_steps} steps here, {theirs} epochs or {unrounded:g} steps published"
    )


def _warmup_steps(config, numbers, theirs, entry, row):
    # The source ramps over a fraction of a step; the rule here rounds to the nearest step.
    slack = 0.5 if entry.get("unrounded") else 0
    fits = abs(numbers.warmup_steps - theirs) <= max(slack, 1e-6 * theirs)
    return None if fits else f"{numbers.warmup_steps} here, {theirs} published"


def _warmup_ratio(config, numbers, theirs, entry, row):
    ours = numbers.warmup_steps / numbers.num_steps
    return (
        None if abs(ours - theirs) <= 1 / numbers.num_steps else f"{ours} here, {theirs} published"
    )


def _target_value(config, numbers, theirs, entry, row):
    if METRICS[row["values"]["target_metric"]["value"]] is None:
        shown = f"{theirs:.3f}" in config.about.published_result
        return None if shown else f"{theirs:.3f} published is not in about.published_result"
    return (
        None
        if config.target_value == pytest.approx(theirs)
        else f"{config.target_value} here, {theirs} published"
    )


def _target_metric(config, numbers, theirs, entry, row):
    name = METRICS[theirs] or ""
    return (
        None
        if config.target_metric == name
        else f"{config.target_metric!r} here, {name!r} ({theirs}) published"
    )


def _learning_rate_at(config, numbers, theirs, entry, row):
    schedule = make(config, numbers)
    first = config.schedule.first_step
    # In fp32 the error of 1 - progress is relative to 1, so the rate's is relative to the peak.
    rounding = np.finfo(np.float32).eps * numbers.learning_rate
    for step, rate in theirs:
        ours = float(schedule(step - first))
        if not abs(ours - rate) <= 1e-5 * rate + rounding * bool(rate):
            return f"{ours!r} at step {step} here, {rate!r} published"
    return None


COMPARED_SPECIALLY = {
    "num_steps": _num_steps,
    "num_epochs": _num_epochs,
    "steps_per_epoch": _steps_per_epoch,
    "warmup_epochs": _warmup_epochs,
    "warmup_steps": _warmup_steps,
    "warmup_ratio": _warmup_ratio,
    "target_value": _target_value,
    "target_metric": _target_metric,
    "learning_rate_at": _learning_rate_at,
}


WITH_CONFIG = [row for row in PUBLISHED if row["config"]]


@pytest.mark.parametrize("row", WITH_CONFIG, ids=[row["config"] for row in WITH_CONFIG])
def test_a_row_has_the_published_values(row):
    config = load(row["config"])
    wrong = []
    compared = 0

    for field, entry in row["values"].items():
        if entry["mark"] not in SOURCED or field in ELSEWHERE:
            continue
        compared += 1
        message = mismatch(config, field, entry, row)
        reason = KNOWN.get((row["config"], field))
        if message and not reason:
            wrong.append(f"{field}: {message} ({entry['where']})")
        if reason and not message:
            wrong.append(f"{field}: agrees now; take it out of KNOWN ({reason})")

    if row["first_step"] is not None:
        first = float(make(config, resolved(config))(0))
        theirs = row["first_step"]["value"]
        if first != theirs:
            wrong.append(f"first_step: rate {first} at the first update here, {theirs} published")

    assert not wrong, "\n".join([row["config"], *wrong])
    recalled_row = all("recalled" in entry["mark"] for entry in row["values"].values())
    assert compared or recalled_row, f"{row['config']}: nothing was compared"


@pytest.mark.parametrize("row", WITH_CONFIG, ids=[row["config"] for row in WITH_CONFIG])
def test_about_says_what_is_published_and_what_is_recalled(row):
    about = load(row["config"]).about
    published = row["published"]

    if published and published["mark"] in SOURCED:
        # Drop repetitions in brackets, and losses.
        result = re.sub(r"\([^)]*\)|, loss.*", "", published["result"])
        for number in re.findall(r"\d*\.?\d+", result):
            assert number in about.published_result, (
                f"{row['config']}: {number} of {published['result']!r} is missing"
            )

    for field in ("hardware", "time"):
        entry = row[field]
        if entry:
            said = getattr(about, field)
            for part in (str(entry["value"]), entry.get("unit", "")):
                assert part in said, f"{row['config']}: {field} {said!r} lacks {part!r}"
            assert ("recalled" in entry["mark"]) == ("[recalled" in said), (
                f"{row['config']}: {field} {said!r}"
            )

    if published and "recalled" in published["mark"]:
        assert f"[{published['mark']}]" in about.published_result, (
            f"{row['config']}: {about.published_result!r}"
        )
    if any("recalled" in entry["mark"] for entry in row["values"].values()):
        assert "recalled" in about.note + about.published_result, (
            f"{row['config']}: nothing is said to be recalled"
        )


def test_every_number_cites_a_known_source_and_says_whether_it_was_read_there():
    used = set()
    for row in PUBLISHED:
        besides = {name: row[name] for name in ("published", "hardware", "time", "first_step")}
        for field, entry in (row["values"] | besides).items():
            if entry is None:
                continue
            said = f"{row['config']}, {field}: {entry}"
            keys = [entry["source"]] if isinstance(entry["source"], str) else entry["source"]
            assert keys, said
            assert entry["where"], said
            assert MARK.fullmatch(entry["mark"]), said
            unread = any(SOURCES[key].startswith(UNCONFIRMED) for key in keys)
            assert unread == ("recalled" in entry["mark"]), said
            used.update(keys)
    assert used == set(SOURCES)
    for key, citation in SOURCES.items():
        assert CITATION.fullmatch(citation), f"{key}: {citation}"


def test_configs_and_the_transcription_have_the_same_rows():
    published = {load(row["config"]).name for row in WITH_CONFIG}  # a bare file is its default row
    ours = {load(name).name: name for name in ALL_ROWS}
    smoke = {f"{file}:smoke" for file in FILES}
    assert smoke <= {*ours.values()}
    assert published - {*ours} == set(), "published, but no config has it"
    assert {name for key, name in ours.items() if key not in published} == OWN | smoke, (
        "a config that nobody published"
    )


def test_every_field_of_the_transcription_is_compared_or_known_to_be_elsewhere():
    config = load("configs/resnet50_mlperf.py:65536")
    for row in WITH_CONFIG:
        for field, entry in row["values"].items():
            kind = re.sub(r"^phase\d\.", "", field)
            if (
                entry["mark"] in SOURCED
                and kind not in COMPARED_SPECIALLY
                and kind not in ELSEWHERE
            ):
                actual(config, resolved(config), kind)
    assert {key for key, _ in KNOWN} <= {row["config"] for row in WITH_CONFIG}


@pytest.mark.parametrize("name", [name for name in ALL_ROWS if "efficientnet" in name])
def test_efficientnets_average_over_replicas_and_updates_as_the_released_code(name):
    """Running statistics use all replicas; the parameters' average has a rising decay rate.

    Source: efficientnet-utils (DistributedBatchNormalization) and efficientnet-main (num_updates).
    """
    config = load(name)
    assert config.model.batch_norm_running_from == "all"
    assert config.optimizer.ema_ramp
    assert config.optimizer.ema_decay == 0.9999 or name.endswith("smoke")


@pytest.mark.parametrize("name", ALL_ROWS)
def test_every_row_is_valid_named_after_itself_and_has_a_schedule(name):
    config = load(name)
    assert config.name == name.removeprefix("configs/").replace(".py", "")
    for number in (1, 2)[: len(config.phases())]:
        phase = config.phases()[number - 1]
        numbers = resolved(config, number == 1)
        schedule = make(phase, numbers)
        last = numbers.num_steps - 1
        counts = np.unique([0, min(last, round(numbers.warmup_steps)), last // 2, last])
        rates = np.asarray(jax.vmap(schedule)(counts))
        assert np.all(np.isfinite(rates)), f"{name}, phase {number}: {rates}"
        assert np.all(rates >= 0), f"{name}, phase {number}: {rates}"
        assert np.max(rates) <= numbers.learning_rate * (1 + 1e-6), (
            f"{name}, phase {number}: {rates}"
        )
        assert np.max(rates) > 0, f"{name}, phase {number}: {rates}"


# Every recipe of every file in closed form, in float64, from the fields alone, by the docstring of
# warmup_schedule.

EVERY_ROW = [
    name
    for file in config_files(CONFIGS)
    for name in rows_of(str(file.relative_to(CONFIGS.parent)))
]


def runs_of(name: str) -> list[TrainConfig]:
    """Return the phases of a run, or one run of every arm and batch of a study."""
    config = load(name)
    if isinstance(config, TrainConfig):
        return config.phases()
    return [
        dataclasses.replace(config.train, global_batch_size=size, schedule=arm.schedule)
        for arm in config.arms
        for size in config.global_batch_sizes
    ]


def closed_form(config: TrainConfig, examples: int):
    """Return peak, warmup steps, length, and a function count of updates -> learning rate."""
    rule = config.schedule
    batch = config.global_batch_size
    peak = (
        rule.base_learning_rate
        * (batch / rule.base_batch_size) ** EXPONENTS[rule.scaling_rule.partition("+")[0]]
    )
    walked = {"legw": rule.base_batch_size, "epochs": batch, "none": math.inf}[rule.warmup_rule]
    warmup = (
        round(rule.base_warmup_epochs * examples / walked)
        if rule.warmup_steps is None
        else rule.warmup_steps
    )
    total = (
        math.ceil(config.num_epochs * examples / batch - 3e-9)
        if config.num_steps is None
        else config.num_steps
    )
    origin = 0 if rule.decay_from == "start" else rule.start_step + warmup
    length = total + rule.first_step - origin if rule.decay_steps is None else rule.decay_steps
    end = peak * rule.end_factor if rule.end_learning_rate is None else rule.end_learning_rate
    stairs = [epoch * examples / batch for epoch in rule.stair_epochs]

    def rate(count: int) -> float:
        t = count + rule.first_step
        if t - rule.start_step < warmup:
            climbed = ((t - rule.start_step) / warmup) ** rule.warmup_power
            return rule.warmup_from + (peak - rule.warmup_from) * climbed
        since = t - origin
        progress = min(max(since / length, 0.0), 1.0)
        return {
            "constant": lambda: peak,
            "polynomial": lambda: end + (peak - end) * (1 - progress) ** rule.power,
            "cosine": lambda: end + (peak - end) * (1 + math.cos(math.pi * progress)) / 2,
            "exponential": lambda: peak * rule.decay_rate ** math.floor(since / stairs[0]),
            "step": lambda: peak * rule.decay_rate ** sum(since >= stair for stair in stairs),
        }[rule.decay]()

    return peak, warmup, total, rate


def steepness(schedule, part):
    """Return the slope of (1 - progress) ** power where the rate is `part` of the peak; >= 1."""
    if schedule.decay != "polynomial" or schedule.power >= 1:
        return 1.0
    return np.maximum(1.0, schedule.power * np.maximum(part, 1e-6) ** (1 - 1 / schedule.power))


@pytest.mark.parametrize("name", EVERY_ROW)
def test_the_schedule_of_a_row_is_its_closed_form(name):
    for number, config in enumerate(runs_of(name)):
        peak, warmup, total, rate = closed_form(config, examples_of(config))
        numbers = resolved(config)
        said = f"{name}, phase or run {number}"
        assert numbers.learning_rate == pytest.approx(peak, rel=1e-12), said
        assert (numbers.warmup_steps, numbers.num_steps) == (warmup, total), said
        after = math.ceil(config.schedule.start_step + warmup) - config.schedule.first_step
        counts = sorted({0, after - 1, after, total // 2, total - 1} & {*range(total)})
        assert {0, total - 1} <= {*counts}, said
        assert after in counts or after < 0, said
        built = np.asarray(jax.vmap(make(config, numbers))(np.asarray(counts)), np.float64)
        expected = np.asarray([rate(count) for count in counts])
        # In fp32 the error of 1 - progress is relative to 1, so the rate's is relative to the peak.
        slack = 1e-5 * np.abs(expected) + np.finfo(np.float32).eps * peak * steepness(
            config.schedule, expected / peak
        )
        assert np.all(np.abs(built - expected) <= slack), (
            f"{said}: {built} at {counts} built, {expected} by hand"
        )


def test_the_closed_form_knows_the_rates_that_are_published():
    """Compare the closed form with transcribed rates whose inputs are all sourced."""
    compared = 0
    for row in WITH_CONFIG:
        entry = row["values"].get("learning_rate_at")
        if entry and entry["mark"] in SOURCED:
            config = load(row["config"])
            *_, rate = closed_form(config, examples_of(config))
            for step, theirs in entry["value"]:
                assert rate(step - config.schedule.first_step) == pytest.approx(theirs, rel=1e-9), (
                    row["config"]
                )
                compared += 1
    assert compared > 20


@pytest.mark.parametrize("file", FILES)
def test_the_file_lists_its_rows_and_refuses_others(file):
    module = _flags._from_config_file(file, str(CONFIGS.parent / file), lambda module: module)
    for row in module.ROWS:
        assert re.search(rf"^    {re.escape(row)}\s", module.__doc__, re.MULTILINE), (
            f"{file}: {row} is not in its table"
        )
    assert load(file).name == module.get_config().name
    with refused("--config row", "nothing", "choice"):
        module.get_config("nothing")
    assert load(f"{file}:{module.ROWS[0]}") is not module.get_config(module.ROWS[0])
    assert module.get_config("smoke") == module.get_config("smoke"), (
        f"{file}: a row changed another one"
    )


STUDIES = [
    f"configs/sweeps/{name}.py"
    for name in (
        "cifar10_limit",
        "fashion_limit",
        "fashion_target",
        "imagenet_limit",
        "lm_critical",
        "mnist_limit",
        "rules_transfer",
    )
]
"""Studies of data that no package ships; tests/recipes builds the others."""


@pytest.mark.parametrize("name", [row for file in STUDIES for row in (file, *rows_of(file))])
def test_every_arm_of_a_study_has_a_schedule_at_every_batch_size(name):
    """The warmup ends before training, and the file's head names the row."""
    config = load(name)
    assert isinstance(config, SweepConfig)
    file, _, row = name.partition(":")
    head = (CONFIGS.parent / file).read_text().partition("\nimport")[0]
    assert not row or re.search(rf"^    {re.escape(row)}\s|`{re.escape(row)}`", head, re.MULTILINE)
    for index in range(len(config.arms)):
        for size in config.global_batch_sizes:
            train = config.cell_train(index, size, 1)
            resolve_schedule(
                train.schedule, size, examples_of(train), train.num_epochs, train.num_steps
            )


@pytest.mark.parametrize(
    ("name", "metric", "told"),
    [
        ("fashion_limit.py:mlp", "accuracy", {"by 1 point": "one point", "0.371 points": ""}),
        ("fashion_limit.py:small", "accuracy", {"by 1.32 points": "1.32"}),
        ("fashion_limit.py:waterfall", "accuracy", {"by 0.613 points": "0.613"}),
        ("fashion_target.py:mlp", "accuracy", {"factor of 1.5": "", "vary by 15 %": ""}),
        (
            "lm_critical.py:brown-250k",
            "loss",
            {"by 3 percent": "of 3 %", "to be 1 %": "vary by 1 %"},
        ),
    ],
)
def test_the_power_in_the_head_of_a_study_is_what_lbopt_check_prints(name, metric, told):
    file, _, _ = name.partition(":")
    head = " ".join((CONFIGS / "sweeps" / file).read_text().partition("\nimport")[0].split())
    lines = " ".join(decision_lines(load(f"configs/sweeps/{name}"), metric, 10_000))
    for printed, stated in told.items():
        assert printed in lines
        assert (stated or printed) in head


def test_a_phase_of_bert_goes_on_where_the_first_ended():
    for batch, total in ((512, 1_000_000), (4096, 125_000), (32768, 15625)):
        config = load(f"configs/bert_large_lamb.py:{batch}")
        first, second = (make(phase, resolved(phase)) for phase in config.phases())
        steps = config.num_steps
        peak = resolved(config).learning_rate
        assert steps + config.phase2.num_steps == total
        assert float(second(0)) == pytest.approx(peak * (1 - steps / total), rel=1e-5)
        assert float(first(steps)) == pytest.approx(float(second(0)), rel=1e-4)
        assert float(second(config.phase2.num_steps)) == 0


# Invariants of the published recipes: arithmetic on sourced values of several recipes.


def numbers_of(name: str) -> ResolvedSchedule:
    return resolved(load(name))


def test_lamb_warms_up_for_782_steps_at_every_batch():
    for batch in (512, 1024, 2048, 4096, 8192, 16384, 32768):
        assert numbers_of(f"configs/resnet50_lamb.py:{batch}").warmup_steps == 782, batch


def test_lars_warms_up_for_391_steps_but_at_32768():
    for batch in (512, 1024, 4096, 8192, 16384):
        assert numbers_of(f"configs/resnet50_lars.py:{batch}").warmup_steps == 391, batch
    assert numbers_of("configs/resnet50_lars.py:32768").warmup_steps == round(14 * IMAGENET / 32768)


@pytest.mark.parametrize(
    ("small", "large"),
    [
        ("resnet50_lamb.py:512", "resnet50_lamb.py:32768"),
        ("resnet50_lars.py:512", "resnet50_lars.py:16384"),
        ("lstm_legw.py:mnist-128", "lstm_legw.py:mnist-8192"),
        ("lstm_legw.py:ptb-small-20", "lstm_legw.py:ptb-small-640"),
        ("lstm_legw.py:ptb-large-20", "lstm_legw.py:ptb-large-640"),
    ],
)
def test_legw_scales_the_rate_by_the_root_and_keeps_the_warmup_steps(small, large):
    before, after = (load(f"configs/{name}") for name in (small, large))
    k = after.global_batch_size / before.global_batch_size
    assert resolved(after).learning_rate == pytest.approx(
        resolved(before).learning_rate * math.sqrt(k)
    )
    assert resolved(after).warmup_steps == resolved(before).warmup_steps > 0
    assert after.num_epochs == before.num_epochs


def test_ninety_epochs_at_32768_are_3519_steps():
    assert numbers_of("configs/resnet50_lamb.py:32768").num_steps == 3519
    assert numbers_of("configs/resnet50_lamb.py:you-32768").num_steps == 3519


def test_mlperf_rounds_epochs_up_in_loops_of_four():
    for row, epochs, per_epoch in (("32768", 64, 39.25), ("65536", 92, 19.75)):
        assert numbers_of(f"configs/resnet50_mlperf.py:{row}").num_steps == epochs * per_epoch


def test_the_mixed_batch_run_has_8599_steps():
    assert (
        sum(
            resolved(phase).num_steps for phase in load("configs/bert_large_lamb.py:mixed").phases()
        )
        == 8599
    )
