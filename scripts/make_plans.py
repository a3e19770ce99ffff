"""Make the plans of all recipes and studies that name a pod; see scripts/plans."""

import json
import pathlib
import subprocess
import sys

FOLDER = pathlib.Path("configs/plans")
STUDIES = pathlib.Path("configs/sweeps")
HEADER = (
    "recipe",
    "pod",
    "GiB of",
    "compute + communication, ms",
    "of peak",
    "steps",
    "projected",
    "published",
)


def main(argv: list[str]) -> int:
    """Plan the recipes and studies whose names contain an argument, or print the table."""
    if argv == ["--table"]:
        print("\n".join(table()))
        return 0

    known = [*recipes(), *studies()]
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
        [sys.executable, "-m", "lbopt", "plan", f"--config={flag}", f"--output={output}"],
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    kept = ("memory", "step", "training", "published") if ":" in flag else ""
    said = [line for line in done.stdout.splitlines() if line.startswith(kept)]
    print("\n".join(f"    {line}" for line in said), flush=True)
    return done.returncode == 0 and json.loads(output.read_text())["fits"]


def table() -> list[str]:
    """Return the table of all plans in Markdown."""
    order = {flag: number for number, flag in enumerate(recipes())}
    plans = [json.loads(file.read_text()) for file in FOLDER.glob("*.json")]
    plans = sorted(
        (found for found in plans if found["recipe"] in order),
        key=lambda found: order[found["recipe"]],
    )
    rows = [HEADER, ("---",) * len(HEADER), *map(_row, plans)]
    return [f"| {' | '.join(row)} |" for row in rows]


def _row(found: dict) -> tuple[str, ...]:
    from lbopt.plan import duration_text

    assert found["fits"], f"{found['recipe']} does not fit: change it, or the pod it names"
    parts = [
        f"{1e3 * phase['compute_seconds_per_step']:.1f} + "
        f"{1e3 * phase['collective_seconds_per_step']:.1f}"
        for phase in found["phases"]
    ]
    held = f"{found['hbm_bytes_per_device'] / 2**30:.1f} of {found['hbm_limit_bytes'] / 2**30:.1f}"
    published = found["published_seconds"]
    source = (found["published_source"] or "").split(":")[-1]
    recalled = " [recalled]" if "recalled" in source else ""
    return (
        f"`{found['recipe'].removeprefix('configs/')}`",
        f"{found['topology']}, {found['num_devices']:,}",
        held,
        "; ".join(parts),
        f"{100 * found['model_flops_utilization']:.1f} %",
        f"{found['steps']:,}",
        duration_text(found["projected_seconds"]),
        "-" if published is None else duration_text(published) + recalled,
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
