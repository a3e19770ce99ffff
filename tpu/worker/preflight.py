"""Check one process of a multi-process job: its peers, a sum over all devices, and the bucket.

It needs only jax. It prints one line, "lbopt NAME preflight ok ..." or "lbopt NAME preflight
failed: ...", and exits with 0 or 3. JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and JAX_PROCESS_ID
name the peers; if they are not set, JAX detects the peers (Cloud TPU, GKE, Slurm).
"""

from __future__ import annotations

import argparse
import os
import socket
import subprocess
import sys

EXIT_ENVIRONMENT = 3
MET = "the processes have met"
"""Line that the inner process prints after it has connected to its peers."""


class FailedCheck(Exception):
    """A failed check; the message has the cause and the fix in one line."""


def main() -> int:
    """Run the checks in an inner process, print the result and return the exit code."""
    arguments = _parse()
    if arguments.inner:
        return _check(arguments)

    # If a peer is missing, JAX may hang or abort the process: only an outer process can report it.
    command = [sys.executable, *sys.argv, "--inner"]
    limit = 3 * arguments.timeout_s + 60
    try:
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=limit)
        out = done.stdout.splitlines()
    except subprocess.TimeoutExpired as error:
        out = (error.stdout or b"").decode().splitlines()

    last = out[-1] if out else ""
    if last.startswith("lbopt "):
        print(last, flush=True)
        return 0 if " preflight ok " in last else EXIT_ENVIRONMENT
    if last == MET:
        problem = "a process died, or hung, in the sum over all devices"
        fix = "look at the other workers' lines"
    else:
        count = f"the {arguments.expect_processes} processes"
        problem = f"{count} did not find each other within {arguments.timeout_s} s"
        fix = "look for the worker that is missing"
    _say(arguments, f"failed: {problem}; {fix}")
    return EXIT_ENVIRONMENT


def _check(arguments: argparse.Namespace) -> int:
    """Run all checks and print their result; return 0, since the printed line has the result."""
    try:
        found = _join(arguments)
        print(MET, flush=True)
        total = _all_reduce()
        if arguments.bucket_dir:
            _check_bucket(arguments.bucket_dir, arguments.name)
        _say(arguments, f"ok {found}, sum {total}")
    except FailedCheck as failed:
        _say(arguments, f"failed: {failed}")
    except Exception as error:
        _say(arguments, f"failed: {type(error).__name__}: {' '.join(str(error).split())[:300]}")
    return 0


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--expect-processes", type=int, required=True)
    parser.add_argument("--expect-devices", type=int, required=True)
    parser.add_argument(
        "--bucket-dir",
        default="",
        help="gs://... or a folder, in which an object is written, read and removed",
    )
    parser.add_argument(
        "--name", default=socket.gethostname(), help="name of this process in its line"
    )
    parser.add_argument(
        "--timeout-s", type=int, default=120, help="seconds to wait for the other processes"
    )
    parser.add_argument("--inner", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


def _say(arguments: argparse.Namespace, text: str) -> None:
    print(f"lbopt {arguments.name} preflight {text}", flush=True)


def _join(arguments: argparse.Namespace) -> str:
    """Connect to the other processes and count them; return the result in words."""
    import jax

    address = os.environ.get("JAX_COORDINATOR_ADDRESS")
    explicit = {}
    if address:
        try:
            explicit = {
                "coordinator_address": address,
                "num_processes": int(os.environ["JAX_NUM_PROCESSES"]),
                "process_id": int(os.environ["JAX_PROCESS_ID"]),
            }
        except (KeyError, ValueError) as error:
            raise FailedCheck(
                f"JAX_COORDINATOR_ADDRESS={address} needs numbers in JAX_NUM_PROCESSES "
                "and JAX_PROCESS_ID"
            ) from error
    if explicit or arguments.expect_processes > 1:
        jax.distributed.initialize(initialization_timeout=arguments.timeout_s, **explicit)

    host = socket.gethostname()
    processes = jax.process_count()
    devices = jax.device_count()
    if (processes, devices) != (arguments.expect_processes, arguments.expect_devices):
        raise FailedCheck(
            f"{host} sees {processes} processes and {devices} devices ({jax.default_backend()}), "
            f"{arguments.expect_processes} and {arguments.expect_devices} were expected; "
            "compare ACCELERATOR and NUM_SLICES with tpu/status"
        )
    kind = jax.local_devices()[0].device_kind
    local = f"{jax.local_device_count()} of {devices} devices, {kind}"
    return f"{host}: process {jax.process_index()} of {processes}, {local}"


def _all_reduce() -> int:
    """Sum one number per device over all devices; every process must get the same sum."""
    import jax
    import numpy as np
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    count = jax.device_count()
    mesh = Mesh(np.array(jax.devices()), ("data",))
    numbers = jax.make_array_from_callback(
        (count,),
        NamedSharding(mesh, PartitionSpec("data")),
        lambda index: np.arange(count, dtype=np.int32)[index],
    )
    everywhere = NamedSharding(mesh, PartitionSpec())
    total = int(jax.jit(lambda x: x.sum(), out_shardings=everywhere)(numbers))

    expected = count * (count - 1) // 2
    if total != expected:
        raise FailedCheck(
            f"the sum over {count} devices is {total} and should be {expected}; "
            "replace the machines"
        )
    return total


def _check_bucket(folder: str, name: str) -> None:
    """Write, read and remove an object in a bucket or folder."""
    path = f"{folder.rstrip('/')}/{name}"
    text = f"written by {name}\n"

    if not folder.startswith("gs://"):
        try:
            os.makedirs(folder, exist_ok=True)
            with open(path, "w") as file:
                file.write(text)
            with open(path) as file:
                read = file.read()
            os.remove(path)
        except OSError as error:
            raise FailedCheck(
                f"{folder} cannot be used: {error}; mount it, or give this user write access"
            ) from error
    else:
        _storage("cp", "-", path, text=text)
        read = _storage("cat", path)
        _storage("rm", path)

    if read != text:
        raise FailedCheck(f"{path} does not have the text that was written; use another bucket")


def _storage(verb: str, *words: str, text: str | None = None) -> str:
    command = ["gcloud", "storage", verb, *words, "--quiet"]
    try:
        done = subprocess.run(command, input=text, capture_output=True, text=True, timeout=120)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise FailedCheck(
            f"gcloud storage {verb} does not work here: {error}; check the CLI and the network"
        ) from error
    if done.returncode:
        lines = done.stderr.strip().splitlines() or ["no reason given"]
        reason = next((line for line in lines if "ERROR" in line), lines[-1])
        raise FailedCheck(
            f"{words[-1]}: {reason[:300]}; "
            "grant the machines' service account roles/storage.objectAdmin"
        )
    return done.stdout


if __name__ == "__main__":
    sys.exit(main())
