"""A workdir like that of a study of about 5,000 trials, with planted curves and probes."""

import pathlib
import sys

sys.path.append(str(pathlib.Path(__file__).parents[2] / "tests" / "oracles"))
import synthetic
from synthetic import Truth, legw

SIZES = (4, 8, 16, 32, 64, 128, 256)


def save(workdir: pathlib.Path) -> tuple[dict, int]:
    """Write the workdir; return its config.json and the number of trials."""
    fine = (0.98,) * 7
    falling = (0.98, 0.98, 0.975, 0.97, 0.95, 0.9, 0.6)
    measured = {"growth": 0.5, "peak_step": lambda size: 10, "noise_scale": (80.0,) * 7}
    arms = {
        "momentum": Truth(falling, **measured),
        "adam": Truth(falling, optimizer="adam", **measured),
        "adamw": Truth(falling, optimizer="adamw", **measured),
        "lars": legw(fine, optimizer="lars", layers=("a", "b", "c"), **measured),
        "lamb": legw(fine, layers=("a", "b", "c"), **measured),
    }
    search = {
        "learning_rate_factors": [2.0**power for power in range(-6, 7)],
        "warmup_factors": [0.5, 1.0, 2.0, 4.0, 8.0],
        "search_seeds": (0, 10),
    }
    config, rows = synthetic.make_study(arms, sizes=SIZES, seeds=range(100, 113), **search)
    return synthetic.save_study(workdir, config, rows), len(rows)
