"""Studies of planted numbers whose findings are frozen in tests/report/frozen_findings.json."""

import synthetic
from synthetic import Truth, diverge, legw

FLAT = (0.98, 0.98, 0.98)
PROBED = {"growth": 0.5, "noise_scale": (90.0, 100.0, 200.0), "peak_step": lambda size: 4}


def _everything():
    """Return a study of a target, a waterfall, probes and warmups; one arm diverges."""
    truths = {
        "momentum": Truth(
            (0.98, 0.97, 0.6), (1.0, 1.0, 0.7), steps_to_target=(200.0, 100.0, None), **PROBED
        ),
        "lamb": legw(
            (0.98, 0.98, 0.975), steps_to_target=(150.0, 50.0, 20.0), layers=("a", "b"), **PROBED
        ),
        "adam": Truth(FLAT, steps_to_target=(150.0, 50.0, None), diverges=(256,)),
    }
    return synthetic.make_study(
        truths, waterfall=tuple(truths), warmup_factors=[0.0, 0.5, 1.0, 2.0]
    )


def _perplexity():
    """Return a study of language models by Hyperband; some seeds diverge."""
    truths = {
        "sgd": Truth((100.0, 104.0, 130.0), (80.0, 80.0, 92.0), spread=0.05, growth="log"),
        "lamb": legw((100.0, 101.0, 102.0), diverges=(256,)),
        "+ LEGW": legw((99.0, 100.0, 101.0), optimizer="lars", spread=0.03, growth=0.3),
    }
    config, rows = synthetic.make_study(
        truths,
        perplexity=True,
        waterfall=("sgd", "+ LEGW"),
        method="hyperband",
        warmup_range=[0.25, 4.0],
        weight_decay_range=[0.1, 10.0],
    )
    hit = [(row["arm"], row["global_batch_size"], row["seed"]) == ("sgd", 256, 1) for row in rows]
    return config, [diverge(row) if one else row for row, one in zip(rows, hit, strict=True)]


def _target():
    """Return a study whose runs stop at their target."""
    steps = tuple(30 * (1 + 100 / size) for size in synthetic.SIZES)
    truths = {
        "a": Truth(FLAT, steps_to_target=steps, **PROBED),
        "b": Truth(FLAT, steps_to_target=tuple(2 * one for one in steps), **PROBED),
        "c": legw(FLAT, steps_to_target=steps, **PROBED),
        "d": Truth(FLAT, steps_to_target=(200.0, 100.0, None)),
    }
    return synthetic.make_study(truths, stops=True, method="optuna")


def _warmups():
    """Return a study that crosses warmup with the rate, on two models, with close limits."""
    rules = {
        "one": lambda size: 32,
        "two": lambda size: 32,
        "three": lambda size: 2048 // size,
        "four": lambda size: 32,
    }

    truths = {
        name: legw(
            (0.98, 0.973, 0.969, 0.9),
            rule_warmup_steps=rule,
            best_warmup_steps=lambda size: 32,
            spread=0.02,
            noise_scale=(20.0 * len(name),) * 4,
            peak_step=lambda size: 8,
        )
        for name, rule in rules.items()
    }
    truths["linear, no warmup"] = Truth((0.98, 0.975, 0.95, 0.5), spread=0.02)
    truths["adam"] = Truth(
        (0.98, 0.975, 0.97, 0.96), optimizer="adam", scaling_rule="sqrt", spread=0.03
    )

    config, rows = synthetic.make_study(
        truths, sizes=(16, 64, 256, 1024), warmup_factors=[0.0, 0.25, 0.5, 1.0, 2.0, 4.0]
    )

    config["arms"][3]["model"] = {"name": "mlp"}
    config["arms"][4]["search"] = config["search"] | {"learning_rate_factors": [1.0, 2.0, 4.0]}
    return config, rows


def _unfinished():
    """Return the first third of a study; one seed diverged at the smallest batch."""
    config, rows = synthetic.make_study({"a": Truth(FLAT, growth=0.5), "b": Truth(FLAT)})
    rows = [diverge(row) if row["phase"] == "final" and row["seed"] == 1 else row for row in rows]
    return config, rows[:30]


def _precision():
    """Return a study of number formats in which replicas send gradients."""
    forms = {"fp32": None, "e5m2": (5, 2), "e4m3": (4, 3), "e4m3 unshifted": (4, 3)}
    truths = {name: Truth((0.98, 0.97, 0.9 + len(name) / 200)) for name in forms}
    config, rows = synthetic.make_study(truths, method="halton", weight_decay_range=[0.1, 10.0])
    for arm, (name, form) in zip(config["arms"], forms.items(), strict=True):
        arm["aggregator"] = {"name": "mean"}
        if form:
            bits = {"exponent_bits": form[0], "mantissa_bits": form[1]}
            arm["aggregator"] = {"name": "aps", "shift": "unshifted" not in name, **bits}
    return config, rows


STUDIES = {
    "everything": _everything,
    "perplexity": _perplexity,
    "target": _target,
    "warmups": _warmups,
    "unfinished": _unfinished,
    "precision": _precision,
}
