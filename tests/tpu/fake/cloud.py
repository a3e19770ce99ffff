"""State of the fake cloud: requests, machines and buckets as folders, and planned failures.

FAKE_CLOUD names the folder of it all. Each worker is a folder with its own environment, in which
commands run as real processes. FAKE_MACHINE in their environment names their machine, so that a
machine can be lost.

These programs run thousands of times, so they import rarely used modules only when needed.
"""

import contextlib
import fcntl
import json
import os
import pathlib
import signal
import sys
import time

ROOT = pathlib.Path(os.environ["FAKE_CLOUD"])
HOSTS = {"v4-8": 1, "v4-16": 2}


@contextlib.contextmanager
def state():
    """Read the state and write it back, in one process at a time."""
    with open(ROOT / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        path = ROOT / "state.json"
        value = json.loads(path.read_text()) if path.exists() else {"requests": {}, "script": {}}
        try:
            yield value
        finally:  # a call that fails has used up its part of the script too
            new = ROOT / f"state.{os.getpid()}"
            new.write_text(json.dumps(value, indent=1))
            new.rename(path)


def record(program, argv):
    """Record a call for the test."""
    with open(ROOT / "calls.jsonl", "a") as calls:
        calls.write(json.dumps([program, *argv]) + "\n")


def refuse(text):
    """End a call that the real command would reject; this fails the test."""
    with open(ROOT / "misuse.txt", "a") as misuse:
        misuse.write(f"{text}: {sys.argv}\n")
    sys.stderr.write(f"ERROR: {text}\n")
    sys.exit(2)


def fail(text, code=1):
    """End a call with an error that the scripts must handle."""
    sys.stderr.write(f"ERROR: {text}\n")
    sys.exit(code)


def parse(program, argv, flags, switches=(), required=(), positional=(0, 0)):
    """Return a call's positional words and flags; refuse those not in the tables."""
    words = []
    found = {}
    for word in argv:
        name, equals, value = word.partition("=")
        if not word.startswith("--") or word == "--":
            words.append(word)
        elif equals and name in flags:
            found[name] = value
        elif not equals and name in switches:
            found[name] = True
        else:
            refuse(f"{program}: unknown flag {word}")
    for name in required:
        if name not in found:
            refuse(f"{program}: {name} is missing")
    if not positional[0] <= len(words) <= positional[1]:
        refuse(f"{program}: {len(words)} words")
    return words, found


def object_path(url):
    """Return the file of gs://BUCKET/OBJECT."""
    return ROOT / "buckets" / url.removeprefix("gs://").rstrip("/")


# --- machines -----------------------------------------------------------------------------------


def nodes_of(request):
    """Return the names of a request's nodes."""
    if request["count"] == 1:
        return [request["node"]]
    return [f"{request['node']}-{index}" for index in range(request["count"])]


def machine(node, worker):
    """Return the folder of a worker."""
    return ROOT / "nodes" / node / str(worker)


def make_nodes(request):
    """Make and boot the folders of all workers of a request that became ACTIVE."""
    import socket

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    nodes = nodes_of(request)
    hosts = HOSTS[request["accelerator"]]
    for index, node in enumerate(nodes):
        for worker in range(hosts):
            folder = machine(node, worker)
            (folder / "metadata").mkdir(parents=True)
            attributes = {
                "preempted": "FALSE",
                "maintenance-event": "NONE",
                "attributes_agent-worker-number": str(worker),
                "attributes_tpu-env": f"ZONE: 'somewhere'\nMEGASCALE_SLICE_ID: '{index}'\n"
                if len(nodes) > 1
                else "ZONE: ''\n",
                **{f"attributes_{key}": value for key, value in request["metadata"].items()},
            }
            for key, value in attributes.items():
                (folder / "metadata" / key).write_text(value)
            environment = {
                "FAKE_MACHINE": f"{node}/{worker}/{os.urandom(16).hex()}",
                "FAKE_FOLDER": str(folder),
                "LBOPT_ROOT": str(folder / "lbopt"),
                "HOME": str(folder),
                "JAX_PLATFORMS": "cpu",
                "JAX_NUM_CPU_DEVICES": "4",
                "JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{port}",
                "JAX_NUM_PROCESSES": str(len(nodes) * hosts),
                "JAX_PROCESS_ID": str(index * hosts + worker),
            }
            (folder / "environment.json").write_text(json.dumps(environment))
            boot(node, worker)


def environment_of(node, worker):
    """Return the environment of a process on a worker."""
    return os.environ | json.loads((machine(node, worker) / "environment.json").read_text())


def boot(node, worker):
    """Run the startup script, as a machine does at every boot."""
    import subprocess

    folder = machine(node, worker)
    environment = json.loads((folder / "environment.json").read_text()) | {
        "BOOT_ID": os.urandom(16).hex()
    }
    (folder / "environment.json").write_text(json.dumps(environment))
    with open(folder / "boot.log", "a") as log:
        subprocess.Popen(
            ["bash", str(folder / "metadata" / "attributes_startup-script")],
            env=environment_of(node, worker), cwd=folder, stdin=subprocess.DEVNULL,
            stdout=log, stderr=log, start_new_session=True,
        )  # fmt: skip


def processes_of(prefix):
    """Return the pids of a machine's processes, or a node's."""
    found = []
    for entry in pathlib.Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                if f"\0FAKE_MACHINE={prefix}".encode() in b"\0" + (entry / "environ").read_bytes():
                    found.append(int(entry.name))
    return found


def power_off(node, worker=None):
    """Lose a worker, or all workers of a node, with all processes."""
    folders = (
        [machine(node, worker)] if worker is not None else sorted((ROOT / "nodes" / node).glob("*"))
    )
    for folder in folders:
        prefix = json.loads((folder / "environment.json").read_text())["FAKE_MACHINE"]
        deadline = time.monotonic() + 20
        while (pids := processes_of(prefix)) and time.monotonic() < deadline:
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.05)


def lose_request(value, name, how="SUSPENDED"):
    """Take away all machines of a request, as a preemption does."""
    import shutil

    request = value["requests"][name]
    for node in nodes_of(request):
        power_off(node)
        shutil.rmtree(ROOT / "nodes" / node, ignore_errors=True)
    request["state"] = how
    request["plan"] = []
