"""Make the plans of all recipes and studies that name a pod; see scripts/plans.

The site shows them: docs/results/plans.md.
"""

import json
import pathlib
import subprocess
import sys

FOLDER = pathlib.Path("configs/plans")
STUDIES = pathlib.Path("configs/sweeps")
SMALL = {
    "configs/digits_cnn.py:lamb-1024": "v5e:2x2",
    "configs/lstm_legw.py:mnist-8192": "v3:2x2",
}
"""Recipes of families without a published pod, and the pods on which they are planned."""


def main(argv: list[str]) -> int:
    """Plan the recipes and studies whose names contain an argument."""
    known = [*recipes(), *SMALL, *studies()]
    wanted = [flag for flag in known if not argv or any(text in flag for text in argv)]
    if not wanted:
        texts = " or ".join(map(repr, argv))
        print(f"no plan has {texts} in its name; give a part of: {', '.join(known)}")
        return 2

    failed = []
    for flag in wanted:
        print(f"{flag} ...", flush=True)
        if not plan(flag):
            failed.append(flag)
    print(f"not planned: {', '.join(failed) or 'none'}")
    return 1 if failed else 0


def recipes() -> list[str]:
    """Return FILE:ROW of every recipe that names a pod."""
    from lbopt.cli import call_get_config, config_files, config_rows
    from lbopt.config import TrainConfig

    found = []
    for file in config_files(pathlib.Path("configs")):
        for row in config_rows(str(file)):
            config = call_get_config(f"{file}:{row}")
            if isinstance(config, TrainConfig) and config.about.topology:
                found.append(f"{file}:{row}")
    return found


def studies() -> list[str]:
    """Return FILE of every study over a pod."""
    from lbopt.cli import call_get_config, config_files
    from lbopt.config import SweepConfig

    configs = {str(file): call_get_config(str(file)) for file in config_files(STUDIES)}
    return [
        file
        for file, config in configs.items()
        if isinstance(config, SweepConfig) and config.about.topology
    ]


def plan_file(flag: str) -> pathlib.Path:
    """Return where the plan of a recipe, FILE:ROW, or of a study, FILE, is kept."""
    file, _, row = flag.partition(":")
    stem = pathlib.Path(file).stem
    return FOLDER / f"{stem}-{row}.json" if row else STUDIES / f"{stem}-plan.json"


def plan(flag: str) -> bool:
    """Plan one recipe or study in a new process; return whether it fits."""
    output = plan_file(flag)
    output.parent.mkdir(exist_ok=True)
    done = subprocess.run(
        [
            *(sys.executable, "-m", "lbopt", "plan", f"--config={flag}", f"--output={output}"),
            *([f"--topology={SMALL[flag]}"] if flag in SMALL else []),
        ],
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    kept = ("memory", "step", "training", "published") if ":" in flag else ""
    said = [line for line in done.stdout.splitlines() if line.startswith(kept)]
    print("\n".join(f"    {line}" for line in said), flush=True)
    return done.returncode == 0 and json.loads(output.read_text())["fits"]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
