"""Run one benchmark by name and print its table; `--json=FILE` also writes it.

Each object of FILE also has the command, the device, the versions and the git revision. A benchmark
that fails, or is stopped by Ctrl-C, writes the rows that it has.
"""

import importlib
import importlib.metadata
import json
import os
import pathlib
import platform
import sys

from lbopt import paths
from lbopt.errors import UserError

BENCHMARKS = {
    "step": "images/s of lbopt's training step beside a hand-written jax + flax + optax loop",
    "models": "step time, FLOP utilisation, memory and compile time of whole networks beside plain "
    "Flax on TPU v3 pods, by the TPU compiler",
    "pod": "compute, exchanged bytes, update and compile time of a step on 8 to 2048 cores, "
    "by the TPU compiler",
    "update": "HBM traffic, memory and compile time of one optimizer update beside optax, by the "
    "TPU compiler; CPU time, measured",
    "matrices": "time of Muon's update on pods, replicated and dealt, state of every optimizer, by "
    "the TPU compiler; CPU time beside optax, measured",
    "input": "decoded images/s beside tf.data, tokens/s beside a plain loop, memory of the reader, "
    "and the read rate that each host of a pod needs",
    "arrays": "memory to train on 10 GB of the user's arrays on disk, and time of the identity of "
    "50 GB",
    "restart": "cost of fault tolerance: training time lost to a save, phases of a restart, step "
    "time with a second process",
    "aggregators": "time and sent bytes of every aggregator beside the plain mean, and HBM traffic "
    "of the quantiser, by the TPU compiler",
    "diloco": "bytes between slices with local steps beside the plain step, by the TPU compiler",
    "growth": "stall of the training loop where the batch grows; cost of measuring the critical "
    "batch",
    "sweep": "trials/s of lbopt's sweep beside one process per trial and a hand-written loop; "
    "batched trials on TPU, by the TPU compiler",
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

    # Refuse a file that cannot be written before the benchmark takes its minutes.
    try:
        files = [paths.writable(file, "--json") for file in given]
    except UserError as error:
        print(f"scripts/bench: {error}", file=sys.stderr)
        return 2

    # JAX reads these variables when it is first imported, which the benchmark's module does.
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    if names[0] == "step":
        os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=4")
    if names[0] in ("aggregators", "diloco", "matrices", "models", "pod", "sweep", "update"):
        os.environ["JAX_PLATFORMS"] = "cpu"
        from lbopt.plan import prepare_environment

        prepare_environment()

    sys.path.insert(0, str(pathlib.Path(__file__).parent))
    circumstances = measured_with(names[0])
    rows = []
    try:
        for row in importlib.import_module(f"bench_{names[0]}").run():
            rows.append(row)
            print(f"measured: {row['name']}", file=sys.stderr)
    finally:
        # What was measured is kept, if the benchmark fails or is stopped.
        print_table(rows)
        text = json.dumps([row | circumstances for row in rows], indent=2) + "\n"
        for file in files if rows else ():
            paths.write_text(file, text, "--json")
    return 0


def measured_with(name: str) -> dict:
    """Return what the figures of a benchmark depend on: command, device, versions, revision."""
    from lbopt.workdir import describe_software

    software = describe_software()
    versions = software["versions"]
    try:
        versions["libtpu"] = importlib.metadata.version("libtpu")
    except importlib.metadata.PackageNotFoundError:
        versions["libtpu"] = None
    return {
        "command": f"scripts/bench {name}",
        "device": f"{os.cpu_count()} CPU cores, {platform.machine()}",
        "versions": versions,
        "git_revision": software["git_revision"],
    }


def print_table(rows: list[dict]) -> None:
    """Print each row's name, both figures, their ratio and what is wanted."""
    header = ("name", "unit", "ours", "peer", "ratio", "wanted", "peer is")
    cells = [header]
    for row in rows:
        figures = [
            f"{row[key]:.4g}" if row[key] is not None else "-" for key in ("ours", "peer", "ratio")
        ]
        wanted = "-"
        if row["aim"] is not None:
            of, sign, value = row["aim"]
            wanted = f"{of} {sign} {value:.4g}{'' if row['met'] else ', missed'}"
        cells.append((row["name"], row["unit"], *figures, wanted, row["peer_name"] or "-"))
    widths = [max(len(line[column]) for line in cells) for column in range(len(header))]
    for line in cells:
        print(
            "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
