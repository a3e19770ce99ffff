"""An xpk that checks the flags of `workload create` (as of xpk 1.16)."""

import json
import os
import sys

import cloud

FLAGS = (
    "--workload", "--cluster", "--project", "--zone", "--tpu-type", "--num-slices",
    "--reservation", "--docker-image", "--env-file",
    "--command", "--max-restarts", "--restart-on-exit-codes", "--termination-grace-period-seconds",
)  # fmt: skip


def main(argv):
    """Take a workload."""
    cloud.record("xpk", argv)
    if argv[:2] != ["workload", "create"]:
        cloud.refuse("xpk: unknown command")
    _, flags = cloud.parse(
        "xpk",
        argv[2:],
        FLAGS,
        ("--spot", "--on-demand"),
        ("--workload", "--cluster", "--tpu-type", "--command"),
    )
    with open(flags["--env-file"]) as file:
        lines = [line.partition("=") for line in file.read().splitlines()]
    environment = {name: value if equals else os.environ[name] for name, equals, value in lines}
    (cloud.ROOT / "xpk.json").write_text(json.dumps(environment))


if __name__ == "__main__":
    main(sys.argv[1:])
