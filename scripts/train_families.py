"""Train and evaluate the small recipes of each model family; see scripts/families."""

import json
import os
import pathlib
import platform
import resource
import subprocess
import sys

OUTPUT = pathlib.Path("docs/results/families.json")
RECIPES = tuple(
    f"configs/{config}.py:{optimizer}-{batch}"
    for config, optimizers, batches in (
        ("digits_resnet", ("lamb", "lars", "momentum"), (64, 1024)),
        ("digits_lstm", ("lamb", "adamw", "momentum"), (64, 1024)),
        ("digits_efficientnet", ("lamb",), (64, 512)),
        ("pydoc_lstm", ("lamb",), (64, 256)),
        ("pydoc_bert", ("lamb",), (64, 512)),
    )
    for optimizer in optimizers
    for batch in batches
)
PREPARED = ("mnist1d", "fashion_mnist")
"""Data sets that `lbopt prepare` makes or downloads first, unless they exist."""
OF_SEEDS = {
    **{f"configs/mnist1d.py:{row}": (0, 1, 2, 3, 4) for row in ("logistic", "mlp", "gru", "cnn")},
    **{f"configs/fashion_mnist.py:{row}": (0,) for row in ("quarter-adam",)},
}
"""Recipe of `PREPARED` data -> seeds of its runs."""
ALL = (
    *((recipe, None) for recipe in RECIPES),
    *((recipe, seed) for recipe, seeds in OF_SEEDS.items() for seed in seeds),
)
"""Recipe and seed of each run; None for the recipe's own."""


def main(argv: list[str]) -> int:
    """Train and evaluate the recipes whose names contain an argument after the folder.

    The file is written after each run.
    """
    from lbopt.workdir import describe_software

    folder = pathlib.Path(argv[0])
    wanted = [one for one in ALL if not argv[1:] or any(part in one[0] for part in argv[1:])]
    if not wanted:
        print(f"no recipe has {' or '.join(argv[1:])} in its name")
        return 2

    runs = {}
    software = describe_software()
    if OUTPUT.exists():
        before = json.loads(OUTPUT.read_text())
        runs = {(run["config"], run.get("seed")): run for run in before["runs"]}
        if len(wanted) < len(ALL) and before["versions"] != software["versions"]:
            print(f"{OUTPUT} has the scores of other versions; run all recipes")
            return 2

    found = {
        "command": "scripts/families",
        "device": f"{os.cpu_count()} CPU cores, {platform.machine()}",
        "versions": software["versions"],
        "baselines": baselines(),
    }

    for name in PREPARED:
        if any(f"/{name}.py" in recipe for recipe, _ in wanted):
            subprocess.run([sys.executable, "-m", "lbopt", "prepare", name], check=True)
    for recipe, seed in wanted:
        print(f"{recipe} ..." if seed is None else f"{recipe}, seed {seed} ...", flush=True)
        known_seconds = runs.get((recipe, seed), {}).get("cpu_seconds", 0)
        runs[recipe, seed] = trained(recipe, folder, known_seconds, seed)
        found["runs"] = [runs[one] for one in ALL if one in runs]
        OUTPUT.write_text(json.dumps(found, indent=1) + "\n")
    return 0


def trained(recipe: str, folder: pathlib.Path, known_seconds: int, seed: int | None) -> dict:
    """Train a recipe; return the scores of its last checkpoint and the CPU seconds it took.

    Args:
      recipe: FILE:ROW of the recipe.
      folder: Folder of the workdirs.
      known_seconds: CPU seconds that an earlier call recorded; they stand if its workdir is there.
      seed: Seed of the run; None for the recipe's own.
    """
    given = {} if seed is None else {"seed": seed}
    name = recipe.removeprefix("configs/").replace(".py:", "-")
    workdir = folder / "-seed".join([name, *map(str, given.values())])
    earlier = known_seconds if workdir.exists() else 0
    flags = [f"--config={recipe}", f"--workdir={workdir}"]
    flags += [f"--config.seed={one}" for one in given.values()]

    before = _cpu_seconds()
    subprocess.run([sys.executable, "-m", "lbopt", "train", *flags], check=True)
    cpu_seconds = earlier or round(_cpu_seconds() - before)

    command = [sys.executable, "-m", "lbopt", "evaluate", *flags]
    said = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
    scores = json.loads(said.splitlines()[-1])
    print(f"    {cpu_seconds} s of CPU time, {scores}", flush=True)
    revision = json.loads((workdir / "config.json").read_text())["git_revision"]
    made = {"cpu_seconds": cpu_seconds, "git_revision": revision}
    return {"config": recipe, **given, **made, **scores}


def _cpu_seconds() -> float:
    """Return the CPU seconds of all child processes that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def baselines() -> dict[str, float]:
    """Return what counting models reach on the test text, which the text models have to beat."""
    from lbopt.cli import call_get_config
    from lbopt.data import baselines as counting

    masked = call_get_config("configs/pydoc_bert.py:lamb-64").data
    language = call_get_config("configs/pydoc_lstm.py:lamb-64").data
    _, perplexity = counting.pydoc_trigram_perplexity(language)
    return {
        "masked_accuracy": counting.pydoc_unigram_accuracy(masked)[1],
        "perplexity": perplexity,
        "bits_per_character": counting.bits_per_character(perplexity, language.vocab_size),
    }


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
