"""Run one benchmark by name and print its table; `--json=FILE` also writes it."""

import importlib
import json
import os
import pathlib
import sys

from lbopt import paths
from lbopt.errors import UserError

BENCHMARKS = {
    "step": "images/s of lbopt's training step beside a hand-written jax + flax + optax loop",
    "models": "step time, FLOP utilisation, memory and compile time of whole networks on TPU v3 pods beside plain Flax, by the TPU compiler",
    "pod": "a step's compute, exchanged bytes, update and compile time from 8 to 2048 cores, by the TPU compiler",
    "update": "HBM traffic, memory, compile time and CPU time of one optimizer update beside optax (TPU figures by its compiler)",
    "input": "decoded images/s beside tf.data, tokens/s beside a plain loop, memory of reading, and what hosts of a pod need",
    "restart": "what staying up costs: how long a save stops training, what a restart is made of, what a second process adds",
    "aggregators": "time and sent bytes of every aggregator beside the plain mean, and the quantiser's traffic, by the TPU compiler",
    "sweep": "trials/s of lbopt's sweep beside one process per trial and a hand-written loop; batched trials on TPU by its compiler",
}


def main(argv: list[str]) -> int:
    """Parse `NAME [--json=FILE]` and run."""
    given = [
        argument.removeprefix("--json=") for argument in argv if argument.startswith("--json=")
    ]
    names = [argument for argument in argv if not argument.startswith("--json=")]
    if len(names) != 1 or names[0] not in BENCHMARKS:
        print(
            "usage: scripts/bench NAME [--json=FILE]\n"
            + "\n".join(f"  {name:<12}{text}" for name, text in BENCHMARKS.items()),
            file=sys.stderr,
        )
        return 2
    try:
        files = [paths.writable(file, "--json") for file in given]
    except UserError as error:
        print(f"scripts/bench: {error}", file=sys.stderr)
        return 2
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    if names[0] == "step":
        os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=4")
    if names[0] in ("aggregators", "models", "pod", "sweep", "update"):
        os.environ["JAX_PLATFORMS"] = "cpu"
        from lbopt.plan import prepare_environment

        prepare_environment()
    sys.path.insert(0, str(pathlib.Path(__file__).parent))
    rows = importlib.import_module(f"bench_{names[0]}").run()
    print_table(rows)
    for file in files:
        file.write_text(json.dumps(rows, indent=2) + "\n")
    return 0


def print_table(rows: list[dict]) -> None:
    """Print name, both figures, their ratio and the limit it is held against."""
    header = ("name", "unit", "ours", "peer", "ratio", "limit", "peer is")
    cells = [header]
    for row in rows:
        figures = [
            f"{row[key]:.4g}" if row[key] is not None else "-"
            for key in ("ours", "peer", "ratio", "limit")
        ]
        cells.append((row["name"], row["unit"], *figures, row["peer_name"] or "-"))
    widths = [max(len(line[column]) for line in cells) for column in range(len(header))]
    for line in cells:
        print(
            "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
