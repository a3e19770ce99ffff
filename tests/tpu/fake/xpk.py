"""An xpk that checks the flags of `workload create` (as of xpk 1.16)."""

import sys

import cloud

FLAGS = (
    "--workload", "--cluster", "--project", "--zone", "--tpu-type", "--num-slices", "--reservation", "--docker-image", "--env",
    "--command", "--max-restarts", "--restart-on-exit-codes", "--termination-grace-period-seconds",
)  # fmt: skip


def main(argv):
    """Take a workload."""
    cloud.record("xpk", argv)
    if argv[:2] != ["workload", "create"]:
        cloud.refuse("xpk: unknown command")
    cloud.parse(
        "xpk", argv[2:], FLAGS, ("--spot", "--on-demand"), ("--workload", "--cluster", "--tpu-type", "--command")
    )


if __name__ == "__main__":
    main(sys.argv[1:])
