"""Studies with known truth: config and records as `lbopt sweep` writes them, made from a plan."""

import dataclasses
import json
import math
import random
from collections.abc import Callable

from lbopt.report.study import _findings, _summary, read_study
from lbopt.sweep import _fits

SIZES = (16, 64, 256)
SEEDS = (1, 2, 3, 4, 5)
NUM_EXAMPLES = 1024
NUM_EPOCHS = 8.0
ONE_CANDIDATE = {"learning_rate_factors": [1.0]}


@dataclasses.dataclass(frozen=True)
class Truth:
    """The planted values of an arm; tuples have one number per batch size.

    Attributes:
      test: mean test accuracy, or perplexity for a language model.
      train: training accuracy, or loss for a language model; None means perfect accuracy.
      optimizer: optimizer's name.
      scaling_rule: scaling rule of the learning rate.
      warmup_rule: "legw", "epochs" or "none".
      rule_warmup_steps: batch size -> warmup steps of the rule.
      best_warmup_steps: batch size -> warmup steps with the best validation score.
      best_factor: best factor of the learning rate.
      warmup_matters: accuracy lost per squared doubling away from the best warmup.
      noise_scale: gradient noise scale, median over the run; it grows fourfold per probe.
      growth: exponent of the distance from the start, "log" for log t; None if not measured.
      peak_step: batch size -> step at which the Lipschitz constant peaks; None if not probed.
      steps_to_target: steps per batch size; None for a batch size that misses the target.
      spread: difference between the best and the worst final seed.
      layers: names of the layers with a trust ratio and a phi.
      diverges: batch sizes at which the final trials diverge.
      aggregator: fields of the arm's aggregator; None for no field of its own.
      batch_schedule: fields of the arm's batch schedule; None for a constant batch.
      kept: whether the arm runs as its rule says, without a search.
    """

    test: tuple[float, ...]
    train: tuple[float, ...] | None = None
    optimizer: str = "momentum"
    scaling_rule: str = "linear"
    warmup_rule: str = "none"
    rule_warmup_steps: Callable[[int], float] = lambda size: 8
    best_warmup_steps: Callable[[int], float] = lambda size: 8
    best_factor: float = 1.0
    warmup_matters: float = 0.01
    noise_scale: tuple[float, ...] | None = None
    growth: float | str | None = None
    peak_step: Callable[[int], int] | None = None
    steps_to_target: tuple[float | None, ...] | None = None
    spread: float = 0.002
    layers: tuple[str, ...] = ()
    diverges: tuple[int, ...] = ()
    aggregator: dict | None = None
    batch_schedule: dict | None = None
    kept: bool = False


def legw(test, train=None, **changes):
    """Return the truth of a layerwise arm under LEGW."""
    return Truth(
        test,
        train,
        **{"optimizer": "lamb", "scaling_rule": "sqrt", "warmup_rule": "legw", **changes},
    )


def make_study(
    truths,
    sizes=SIZES,
    seeds=SEEDS,
    perplexity=False,
    waterfall=(),
    search_seeds=(0,),
    stops=False,
    **search,
):
    """Return the config and the records of a complete study."""
    config = {
        "name": "planted",
        "arms": [_arm(name, truth) for name, truth in truths.items()],
        "global_batch_sizes": list(sizes),
        "search": {**_search(), "seeds": list(search_seeds), **search},
        "final_seeds": list(seeds),
        "limit_points": 5.0 if perplexity else 1.0,
        "waterfall": list(waterfall),
        "train": {
            "num_epochs": NUM_EPOCHS,
            "num_steps": None,
            "target_metric": "",
            "target_value": 0.0,
        },
    }

    if any(truth.steps_to_target for truth in truths.values()):
        config["train"] |= {
            "target_metric": "eval/accuracy",
            "target_value": 0.9,
            "stop_at_target": stops,
        }

    rows = []
    for name, truth in truths.items():
        for place, size in enumerate(sizes):
            cell = _Cell(config, name, truth, place, size, perplexity)
            rows += [*cell.search(), *cell.final()]

    return config, rows


def summarize(config, rows):
    """Return the content of the study's `summary.json`."""
    study = read_study(config, rows)
    claims = _findings.claims_of(study)
    return _summary.summary_of(study, claims, _findings.findings_of(study, claims))


def save_study(workdir, config, rows):
    """Write `results.jsonl` and return the content of `config.json`."""
    (workdir / "results.jsonl").write_text(
        "".join(json.dumps(row, allow_nan=False) + "\n" for row in rows)
    )
    saved = {
        "kind": "sweep",
        "config": config,
        "command": "lbopt sweep --config=study.py",
        "versions": {"jax": "0.0"},
    }
    return saved | {"git_revision": "abc123", "device_kind": "cpu", "num_devices": 1}


def _arm(name, truth):
    schedule = {
        "scaling_rule": truth.scaling_rule,
        "warmup_rule": truth.warmup_rule,
        "base_learning_rate": 0.1,
        "decay": "constant",
    }
    arm = {"name": name, "optimizer": {"name": truth.optimizer}, "schedule": schedule}
    own = {"aggregator": truth.aggregator, "batch_schedule": truth.batch_schedule}
    own["search"] = {**_search(), "seeds": [0], **ONE_CANDIDATE} if truth.kept else None
    return arm | {name: value for name, value in own.items() if value}


def _search():
    return {
        "method": "grid",
        "learning_rate_factors": [0.5, 1.0, 2.0],
        "warmup_factors": [1.0],
        "weight_decay_factors": [1.0],
        "learning_rate_range": [0.1, 10.0],
        "warmup_range": [1.0, 1.0],
        "weight_decay_range": [1.0, 1.0],
        "num_candidates": 16,
        "eta": 3,
        "min_fidelity": 1 / 27,
        "sampler": "tpe",
        "pruner": "none",
        "candidates_at_once": 4,
        "seed": 0,
    }


@dataclasses.dataclass(frozen=True)
class _Cell:
    """One arm at one batch size."""

    config: dict
    name: str
    truth: Truth
    place: int
    size: int
    perplexity: bool

    @property
    def steps(self):
        return max(1, round(NUM_EPOCHS * NUM_EXAMPLES / self.size))

    @property
    def candidates(self):
        """Return (learning rate, warmup, weight decay) factors and fidelity."""
        search = self.config["search"] | (ONE_CANDIDATE if self.truth.kept else {})

        if search["method"] == "grid":
            factors = [
                search[f"{name}_factors"] for name in ("learning_rate", "warmup", "weight_decay")
            ]
            return [
                ((rate, warmup, decay), 1.0)
                for rate in factors[0]
                for warmup in factors[1]
                for decay in factors[2]
            ]

        draw = random.Random(self.size)
        ranges = [search[f"{name}_range"] for name in ("learning_rate", "warmup", "weight_decay")]
        drawn = [
            tuple(low * (high / low) ** draw.random() for low, high in ranges)
            for _ in range(search["num_candidates"])
        ]

        fidelities = (
            [1.0, 1 / 3, 1 / 9]
            if search["method"] in ("hyperband", "successive_halving")
            else [1.0]
        )

        return [
            (factors, fidelities[place % len(fidelities)])
            for place, factors in enumerate([(1.0, 1.0, 1.0), *drawn])
        ]

    def badness(self, factors):
        """Return the accuracy that a candidate loses against the best possible one."""
        rate, warmup, _ = factors
        steps = self.truth.rule_warmup_steps(self.size) * warmup
        off = math.log2(steps / self.truth.best_warmup_steps(self.size)) if steps else 5.0
        return (
            0.01 * math.log2(rate / self.truth.best_factor) ** 2
            + self.truth.warmup_matters * off**2
        )

    @property
    def chosen(self):
        return min(
            (factors for factors, fidelity in self.candidates if fidelity == 1), key=self.badness
        )

    def search(self):
        """Return the cell's search records."""
        rows = []
        for factors, fidelity in self.candidates:
            for seed in self.config["search"]["seeds"]:
                lost = self.badness(factors) + 0.02 * (1 - fidelity)
                rows.append(self.row("search", factors, seed, fidelity, self.score(-lost), None))
        return rows

    def final(self):
        """Return the cell's final records, with seeds evenly spread around the truth."""
        seeds = self.config["final_seeds"]
        rows = []
        for place, seed in enumerate(seeds):
            shift = self.truth.spread * (place / max(1, len(seeds) - 1) - 0.5)
            row = self.row("final", self.chosen, seed, 1.0, self.score(0), self.score(shift))
            rows.append(row | self.measured(place) | self.target())
        return rows

    def score(self, shift):
        best = self.truth.test[self.place]
        return best * (1 - shift) if self.perplexity else min(1.0, max(0.0, best + shift))

    def row(self, phase, factors, seed, fidelity, validation, test):
        rate, warmup, decay = factors
        steps = max(1, round(self.steps * fidelity))
        diverged = phase == "final" and self.size in self.truth.diverges

        return {
            "arm": self.name,
            "optimizer": self.truth.optimizer,
            "scaling_rule": self.truth.scaling_rule,
            "warmup_rule": self.truth.warmup_rule,
            "global_batch_size": self.size,
            "phase": phase,
            "fidelity": fidelity,
            "learning_rate": 0.1 * rate,
            "learning_rate_factor": rate,
            "warmup_steps": self.truth.rule_warmup_steps(self.size) * warmup * fidelity,
            "warmup_factor": warmup,
            "weight_decay": 0.01 * decay,
            "weight_decay_factor": decay,
            "seed": seed,
            "steps": steps,
            "steps_run": min(3, steps) if diverged else steps,
            "examples_seen": (min(3, steps) if diverged else steps) * self.size,
            "last_epoch_loss": None if diverged else 0.1,
            **self.scores("train", None if diverged else self.train()),
            **self.scores("validation", None if diverged else validation),
            **self.scores("test", None if diverged else test),
            **(diverged_accuracies() if diverged else {}),
            "diverged": diverged,
            "divergence_step": min(3, steps) if diverged else None,
            "distance": None,
            "seconds": 0.5,
        }

    def train(self):
        if self.truth.train is None:
            return self.truth.test[self.place] if self.perplexity else 1.0
        return self.truth.train[self.place]

    def scores(self, split, value):
        """Return mutually consistent loss, accuracy and perplexity of a split."""
        if not self.perplexity:
            return {
                f"{split}_accuracy": value,
                f"{split}_loss": None if value is None else 1.01 - value,
            }
        loss = None if value is None else math.log(value)
        accuracy = None if value is None else 1 / value
        return {f"{split}_perplexity": value, f"{split}_loss": loss, f"{split}_accuracy": accuracy}

    def target(self):
        if self.truth.steps_to_target is None:
            return {}
        steps = self.truth.steps_to_target[self.place]
        return {"steps_to_target": steps, "examples_to_target": steps and steps * self.size}

    def measured(self, place):
        """Return curves, fits and probes of one final seed."""
        found = {"curve": None, "diffusion": None, "probes": None, "noise_scale": None}
        if self.perplexity:
            found["outputs"] = 1000
        if self.truth.growth is not None:
            steps = _fits.log_spaced_steps(self.steps, 64)
            distance = [_distance(self.truth.growth, step) for step in steps]
            fit = _fits.fit_diffusion(steps, distance, 1)
            curve = {
                "step": list(steps),
                "train_loss": [1 / step for step in steps],
                "distance": distance,
            }
            found |= {
                "curve": curve,
                "diffusion": fit and dataclasses.asdict(fit),
                "distance": distance[-1],
            }
        probes = self.probes(place)
        return found | ({"probes": probes} if len(probes) > 1 else {})

    def probes(self, seed_place):
        truth = self.truth
        steps = _fits.log_spaced_steps(self.steps, 9)
        probes = {"step": list(steps)}

        if truth.noise_scale is not None:
            # A single seed's |G|^2 is off by more than its own size; only sums over seeds are
            # accurate.
            seeds = len(self.config["final_seeds"])
            share = 1.0 if seeds == 1 else 3 * seed_place / (seeds - 1) - 0.5
            scales = [
                truth.noise_scale[self.place] * 4.0 ** (place - (len(steps) - 1) / 2)
                for place in range(len(steps))
            ]
            probes["gradient_square_norm"] = [share / scale for scale in scales]
            probes["noise_trace"] = [1.0] * len(steps)
            probes["phi"] = [0.5] * len(steps)

        if truth.peak_step is not None:
            peak = truth.peak_step(self.size)
            probes["lipschitz"] = [10 / (1 + math.log2(step / peak) ** 2) for step in steps]

        if truth.layers:
            probes["trust_ratio"] = {
                layer: [(place + 1) * (1 + step / self.steps) for step in steps]
                for place, layer in enumerate(truth.layers)
            }
            probes["phi_layers"] = {
                layer: [0.1 * (place + 1)] * len(steps) for place, layer in enumerate(truth.layers)
            }

        return probes


def diverged_accuracies():
    """Return a diverged trial's accuracies: argmax over NaN outputs is the first class."""
    return {f"{split}_accuracy": 0.1 for split in ("train", "validation", "test")}


def diverge(row):
    """Return the record of the same trial, diverged at step 3."""
    lost = {name: None for name in row if name.endswith(("_loss", "_perplexity"))}
    kept = {name: value for name, value in diverged_accuracies().items() if row[name] is not None}
    told = {
        "diverged": True,
        "divergence_step": 3,
        "steps_run": 3,
        "distance": None,
        "diffusion": None,
    }
    return {**row, **lost, **kept, **{name: value for name, value in told.items() if name in row}}


def _distance(growth, step):
    return 1 + 0.5 * math.log(step) if growth == "log" else 0.1 * step**growth
