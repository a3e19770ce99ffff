"""A gcloud with the commands and flags that tpu/ uses, and with planned failures."""

import os
import sys
import time

import cloud

WIDE = ("--project", "--zone", "--format", "--filter")
CREATE = (
    *WIDE, "--accelerator-type", "--runtime-version", "--node-id", "--node-count",
    "--node-prefix", "--metadata", "--metadata-from-file", "--scopes", "--valid-until-duration",
    "--service-account", "--network", "--subnetwork", "--data-disk",
)  # fmt: skip
TPU = ("--project", "--zone")


def main(argv):
    """Answer one call."""
    cloud.record("gcloud", argv)
    with cloud.state() as value:
        if value["script"].get("logged_out") and argv[:1] != ["auth"]:
            cloud.fail("(gcloud) You do not currently have an active account selected.")
    for length in (4, 3, 2):
        command = COMMANDS.get(" ".join(argv[:length]))
        if command:
            return command(argv[length:])
    return cloud.refuse("gcloud: unknown command")


# --- queued resources ---------------------------------------------------------------------------


def create(argv):
    """Take a request; the plan of failures says whether it will be granted."""
    (name,), flags = cloud.parse(
        "create",
        argv,
        CREATE,
        ("--spot", "--reserved", "--quiet"),
        (*TPU, "--accelerator-type", "--runtime-version"),
        (1, 1),
    )

    if ("--node-id" in flags) == ("--node-count" in flags) or (
        "--node-prefix" in flags and "--node-count" not in flags
    ):
        cloud.refuse("create: --node-id, or --node-count with --node-prefix")
    if "--spot" in flags and "--reserved" in flags:
        cloud.refuse("create: one of --spot and --reserved")

    metadata = dict(pair.split("=", 1) for pair in flags.get("--metadata", "").split(",") if pair)
    for pair in flags.get("--metadata-from-file", "").split(","):
        key, path = pair.split("=", 1)
        with open(path) as file:
            metadata[key] = file.read()

    with cloud.state() as value:
        if name in value["requests"]:
            cloud.fail(f"(gcloud.compute.tpus.queued-resources.create) ALREADY_EXISTS: {name}")
        grants = value["script"].get("grants", [])
        fate = grants.pop(0) if grants else "granted"
        if fate.startswith("error"):
            cloud.fail(f"(gcloud.compute.tpus.queued-resources.create) {fate[6:]}")

        value["requests"][name] = {
            "state": "ACCEPTED",
            "plan": {"refused": ["FAILED"], "waiting": []}.get(
                fate, ["WAITING_FOR_RESOURCES", "PROVISIONING", "ACTIVE"]
            ),
            "accelerator": flags["--accelerator-type"],
            "count": int(flags.get("--node-count", 1)),
            "node": flags.get("--node-id") or flags.get("--node-prefix", name),
            "metadata": metadata,
            "capacity": "spot"
            if "--spot" in flags
            else "reserved"
            if "--reserved" in flags
            else "on-demand",
        }


def describe(argv):
    """Print the state of a request and advance it by one step."""
    (name,), flags = cloud.parse("describe", argv, WIDE, ("--quiet",), (*TPU, "--format"), (1, 1))
    with cloud.state() as value:
        request = value["requests"].get(name)
        if value["script"].get("unavailable", 0) > 0:
            value["script"]["unavailable"] -= 1
            cloud.fail("(gcloud.compute.tpus.queued-resources.describe) UNAVAILABLE: try again")

        if request is None:
            cloud.fail(
                "(gcloud.compute.tpus.queued-resources.describe) NOT_FOUND: "
                f"Requested entity was not found: {name}"
            )
        if flags["--format"] == "value(state.failedData.error.message)":
            print("There is no more capacity in the zone" if request["state"] == "FAILED" else "")
            return
        if flags["--format"] != "value(state.state)":
            cloud.refuse(f"describe: format {flags['--format']}")

        print(request["state"])
        if request["plan"]:
            request["state"] = request["plan"].pop(0)
            if request["state"] == "ACTIVE":
                cloud.make_nodes(request)


def delete(argv):
    """Remove a request; with --force, its machines too."""
    (name,), flags = cloud.parse(
        "delete", argv, TPU, ("--force", "--quiet"), (*TPU, "--quiet"), (1, 1)
    )
    with cloud.state() as value:
        if name not in value["requests"]:
            cloud.fail(
                "(gcloud.compute.tpus.queued-resources.delete) NOT_FOUND: "
                "Requested entity was not found."
            )
        if value["requests"][name]["state"] == "ACTIVE" and "--force" not in flags:
            cloud.fail(
                "(gcloud.compute.tpus.queued-resources.delete) FAILED_PRECONDITION: has nodes"
            )
        if value["script"].get("undeletable", 0) > 0:
            value["script"]["undeletable"] -= 1
            cloud.fail("(gcloud.compute.tpus.queued-resources.delete) UNAVAILABLE: try again")

        cloud.lose_request(value, name)
        del value["requests"][name]
        value["script"].pop("node_state", None)
        value["script"]["unavailable"] = value["script"].pop("unavailable_after_delete", 0)


# --- machines -----------------------------------------------------------------------------------


def describe_node(argv):
    """Print the state of a node."""
    (name,), flags = cloud.parse(
        "tpu-vm describe", argv, WIDE, ("--quiet",), (*TPU, "--format"), (1, 1)
    )
    if not (cloud.ROOT / "nodes" / name).exists():
        cloud.fail(
            "(gcloud.compute.tpus.tpu-vm.describe) NOT_FOUND: Requested entity was not found."
        )
    with cloud.state() as value:
        ready = value["script"].get("node_state", "READY")
    print(
        "\t".join(
            {"state": ready, "health": "HEALTHY"}[key] for key in flags["--format"][6:-1].split(",")
        )
    )


def ssh(argv):
    """Run the command on all workers at once, each in its folder; report lost connections."""
    import subprocess
    import threading

    (name,), flags = cloud.parse(
        "ssh",
        argv,
        (*TPU, "--worker", "--command"),
        ("--quiet",),
        (*TPU, "--worker", "--command"),
        (1, 1),
    )
    folder = cloud.ROOT / "nodes" / name
    if not folder.exists():
        cloud.fail("(gcloud.compute.tpus.tpu-vm.ssh) NOT_FOUND: Requested entity was not found.")
    workers = sorted(int(path.name) for path in folder.iterdir())
    if flags["--worker"] != "all":
        workers = [int(flags["--worker"])]
    codes = {}
    with cloud.state() as value:
        unreachable = [
            worker
            for worker in workers
            if f"{name}/{worker}" in value["script"].get("unreachable", [])
        ]

    def one(worker):
        if worker in unreachable or not cloud.machine(name, worker).exists():
            print(
                f"ssh: connect to host 10.0.0.{worker} port 22: Connection timed out",
                file=sys.stderr,
            )
            codes[worker] = 255
            return
        done = subprocess.run(
            ["bash", "-c", flags["--command"]],
            env=cloud.environment_of(name, worker),
            cwd=cloud.machine(name, worker),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE
            if len(workers) > 1
            else None,  # of one worker as it comes, of several one after the other
            text=True,
        )
        sys.stdout.write(done.stdout or "")
        codes[worker] = done.returncode

    threads = [threading.Thread(target=one, args=(worker,)) for worker in workers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    with cloud.state() as value:
        looks = value["script"].pop("lost_after_ssh", 0)  # number of calls before the loss
        if looks == 1:
            cloud.lose_request(value, name)
        elif looks:
            value["script"]["lost_after_ssh"] = looks - 1
    sys.exit(max(codes.values(), default=0))


# --- the bucket ---------------------------------------------------------------------------------


def _may(verb):
    with cloud.state() as value:
        who = "worker" if os.environ.get("FAKE_MACHINE") else "user"
        busy = value["script"].get("busy", {})
        if busy.get(f"{who} {verb}", 0) > 0:
            busy[f"{who} {verb}"] -= 1
            cloud.fail(f"(gcloud.storage.{verb}) HTTPError 503: try again")
        if f"{who} {verb}" in value["script"].get("forbidden", []):
            cloud.fail(
                f"(gcloud.storage.{verb}) HTTPError 403: "
                f"{who}@example.com does not have storage access."
            )


def _slowness():
    """Return the seconds until an object that is written now exists."""
    with cloud.state() as value:
        return value["script"].pop("slow_s", 0)


def copy(argv):
    """Copy files to or from a bucket."""
    words, _ = cloud.parse("cp", argv, (), ("--quiet",), (), (2, 9))
    _may("cp")
    *sources, target = words
    if len(sources) > 1 and not target.endswith("/"):
        cloud.refuse("cp: several sources need a folder")

    for source in sources:
        if source.startswith("gs://") and not cloud.object_path(source).is_file():
            cloud.fail(
                f"(gcloud.storage.cp) The following URLs matched no objects or files:\n{source}"
            )
        if not source.startswith("gs://") and not target.startswith("gs://"):
            cloud.refuse("cp: no bucket")

        path = (
            cloud.object_path(target) if target.startswith("gs://") else cloud.pathlib.Path(target)
        )
        if target.endswith("/"):
            path = path / os.path.basename(source)

        path.parent.mkdir(parents=True, exist_ok=True)
        new_path = path.parent / f".{os.getpid()}.{os.path.basename(path)}"
        with open(new_path, "wb") as new:
            if source == "-":
                new.write(sys.stdin.buffer.read())
            else:
                with open(
                    cloud.object_path(source) if source.startswith("gs://") else source, "rb"
                ) as old:
                    new.write(old.read())
                if source.endswith("/state"):
                    time.sleep(_slowness())
        os.rename(new_path, path)


def cat(argv):
    """Print an object."""
    words, flags = cloud.parse("cat", argv, ("--range",), ("--quiet",), (), (1, 9))
    _may("cat")
    for url in words:
        if "*" in url:
            paths = sorted(cloud.ROOT.glob(f"buckets/{url.removeprefix('gs://')}"))
            sys.stdout.write("".join(path.read_text() for path in paths))
            if paths:
                continue
        path = cloud.object_path(url)
        if not path.is_file():
            cloud.fail(
                f"(gcloud.storage.cat) The following URLs matched no objects or files:\n{url}"
            )
        sys.stdout.write(path.read_text()[int(flags.get("--range", 0)) :])


def remove(argv):
    """Remove an object, or all objects below it with --recursive."""
    (url,), flags = cloud.parse("rm", argv, (), ("--quiet", "--recursive"), (), (1, 1))
    _may("rm")
    path = cloud.object_path(url)
    if "*" in url:
        found = list(cloud.ROOT.glob(f"buckets/{url.removeprefix('gs://')}"))
        for path in found:
            path.unlink()
        return (
            None
            if found
            else cloud.fail("(gcloud.storage.rm) The following URLs matched no objects or files")
        )
    if not path.exists() or (path.is_dir() and "--recursive" not in flags):
        cloud.fail(f"(gcloud.storage.rm) The following URLs matched no objects or files:\n{url}")
    if path.is_dir():
        import shutil

        shutil.rmtree(path)
    else:
        path.unlink()


def accounts(argv):
    """List the accounts that are logged in."""
    cloud.parse("auth list", argv, ("--filter", "--format"), ("--quiet",), ("--filter", "--format"))
    with cloud.state() as value:
        print("" if value["script"].get("logged_out") else "user@example.com")


def firewall_rules(argv):
    """List the planned rules; Google's default network has these four."""
    _, flags = cloud.parse(
        "firewall-rules list",
        argv,
        ("--project", "--filter", "--format"),
        ("--quiet",),
        ("--project", "--filter", "--format"),
    )

    if (
        flags["--format"] != 'csv[no-heading,separator="|"]'
        "(name,sourceRanges.list(),allowed[].map().firewall_rule().list())"
    ):
        cloud.refuse(f"firewall-rules: format {flags['--format']}")
    if not flags["--filter"].endswith("$ AND direction=INGRESS AND disabled=false"):
        cloud.refuse(f"firewall-rules: filter {flags['--filter']}")

    own = [
        "default-allow-icmp|0.0.0.0/0|icmp",
        '"default-allow-internal"|10.128.0.0/9|"tcp:0-65535,udp:0-65535,icmp"',
        "default-allow-rdp|0.0.0.0/0|tcp:3389",
        "default-allow-ssh|0.0.0.0/0|tcp:22",
    ]

    with cloud.state() as value:
        if value["script"].get("firewall_error"):
            cloud.fail(value["script"]["firewall_error"])
        print("\n".join([*own, *value["script"].get("firewall", [])]))


COMMANDS = {
    "compute firewall-rules list": firewall_rules,
    "compute tpus queued-resources create": create,
    "compute tpus queued-resources describe": describe,
    "compute tpus queued-resources delete": delete,
    "compute tpus tpu-vm describe": describe_node,
    "compute tpus tpu-vm ssh": ssh,
    "storage cp": copy,
    "storage cat": cat,
    "storage rm": remove,
    "auth list": accounts,
}

if __name__ == "__main__":
    main(sys.argv[1:])
