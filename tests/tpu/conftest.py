"""A checkout, a user's machine with fake gcloud, kubectl, curl and xpk, and the fake cloud."""

import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import time

import pytest

collect_ignore = ["fake"]  # programs, not modules
HERE = pathlib.Path(__file__).parent
REPOSITORY = HERE.parents[1]
SETTINGS = {
    "PROJECT": "my-project",
    "ZONE": "us-central2-b",
    "NAME": "lamb",
    "ACCELERATOR": "v4-16",  # two machines
    "CAPACITY": "spot",
    "BUCKET": "gs://bucket",
    "COMMAND": "python stand_in.py $WORKDIR 40",
    "EXTRAS": "tpu",
    "RETRY_S": 0,
    "POLL_S": 0,
    "RESTART_S": 0,
    "SYNC_S": 3,
    "SSH_S": 60,
    "STOP_S": 30,
    "PREFLIGHT_S": 20,
}
# A Python that creates environments and installs into them instantly; otherwise it is the real one.
PYTHON = """#!/bin/sh
case "$1 $2" in
"-m venv") for last; do :; done; mkdir -p "$last/bin" && cp "$0" "$last/bin/python" && exit ;;
"-m pip")
    fails=$(cat "$FAKE_CLOUD/pip_fails" 2>/dev/null || echo 0)
    [ "$fails" -eq 0 ] || { echo $((fails - 1)) >"$FAKE_CLOUD/pip_fails" && exit 1; }
    echo "$@" >>"$FAKE_CLOUD/pip.txt"
    exit ;;
esac
[ "$1 $2 $3" = "-m lbopt check" ] || exec REAL "$@"
case " $* " in
*bad.py*) echo "ok    config" && echo "WRONG batch     config.global_batch_size = 3" && exit 2 ;;
*missing.py*) echo "WRONG data      it is not there" && exit 3 ;;
esac
"""


# What mounts data: the files are copied, and a file beside the folder marks it.
MOUNTING = {
    "gcsfuse": """
[ "$1 $2 $3 $4 $5" = "--implicit-dirs -o ro -o allow_other" ] || exit 64
shift 5
folder=
[ "$1" != --only-dir ] || { folder=$2 && shift 2; }
cp -r "$FAKE_CLOUD/buckets/$1/$folder/." "$2" && touch "$2.mounted"
""",
    "mount": '[ "$1 $2" = "-o ro,noload" ] && cp -r "$3/." "$4" && touch "$4.mounted"',
    "mountpoint": '[ "$1" = -q ] && [ -f "$2.mounted" ]',
    "umount": 'rm -rf "$1"/* "$1.mounted"',
}


class Cloud:
    """The handle of a test on the fake cloud.

    Attributes:
      root: the fakes' folder.
      checkout: a git checkout with tpu/ and the stand-in for a training program.
      workdir: a folder that every worker shares.
    """

    def __init__(self, folder, checkout):
        """Lay out the folders."""
        self.root = folder / "cloud"
        self.checkout = checkout
        self.workdir = folder / "workdir"
        self.root.mkdir()
        self.started = []
        self.settings = folder / "env"
        self.environment = os.environ | {
            "PATH": f"{_programs(folder / 'bin')}:{os.environ['PATH']}",
            "FAKE_CLOUD": str(self.root),
            "FETCH_PAUSE_S": "0",
        }
        for name in (
            "PYTHONPATH",
            "JAX_COORDINATOR_ADDRESS",
            "XLA_FLAGS",
        ):  # XLA_FLAGS: the tests' own number of devices
            self.environment.pop(name, None)
        self.set()

    def set(self, **changes):
        """Write the settings file; a value of None leaves the line out."""
        values = SETTINGS | {"WORKDIR": self.workdir} | changes
        self.settings.write_text(
            "".join(f"{name}='{value}'\n" for name, value in values.items() if value is not None)
        )

    def script(self, **script):
        """Plan the failures to come."""
        self.play(f"with cloud.state() as value:\n    value['script'] = {script!r}")

    def start(self, name, *flags, out=subprocess.PIPE):
        """Start tpu/NAME in its own process group, as in a terminal, and return the process."""
        process = subprocess.Popen(
            [self.checkout / "tpu" / name, f"--env={self.settings}", *flags],
            env=self.environment,
            cwd=self.root.parent,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.PIPE,
            text=True,
            process_group=0,
        )
        self.started.append(process)
        return process

    def finish(self, process, limit=60):
        """Wait for a process that `start` returned."""
        try:
            out, err = process.communicate(timeout=limit)
        except subprocess.TimeoutExpired:
            process.kill()
            raise AssertionError(
                f"no end within {limit} s: {process.communicate()}\n{self.everything()}"
            ) from None
        return subprocess.CompletedProcess(process.args, process.returncode, out, err)

    def tpu(self, name, *flags, limit=60):
        """Run tpu/NAME to its end."""
        return self.finish(self.start(name, *flags), limit)

    def calls(self, program, *words):
        """Return the calls that begin with these words."""
        path = self.root / "calls.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        return [
            call for call in map(json.loads, lines) if call[: 1 + len(words)] == [program, *words]
        ]

    def worker(self, index, node="lamb"):
        """Return the folder of a worker."""
        return self.root / "nodes" / node / str(index)

    def said(self, index):
        """Return the bucket's record of a worker's state."""
        path = self.root / f"buckets/bucket/lbopt/lamb/workers/0-{index}/state"
        return path.read_text() if path.exists() else ""

    def go(self):
        """Let programs continue that hold at a step."""
        (self.workdir / "go").touch()

    def metrics(self):
        """Return the lines of metrics.jsonl."""
        path = self.workdir / "metrics.jsonl"
        return path.read_text().splitlines() if path.exists() else []

    def ready(self):
        """Request the machines and wait until lbopt is installed on them."""
        for name in ("create", "setup"):
            done = self.tpu(name, *(["--keep-source"] if name == "setup" else []))
            assert done.returncode == 0, f"{done}\n{self.everything()}"

    def hold(self, **changes):
        """Request the machines and run the stand-in up to the step at which it holds."""
        self.set(COMMAND="python stand_in.py $WORKDIR 40 --sleep=0.01 --hold-at=12", **changes)
        self.ready()
        assert self.tpu("run").returncode == 0
        self.until(lambda: len(self.metrics()) >= 10)

    def until(self, condition, limit=40):
        """Wait for a condition."""
        deadline = time.monotonic() + limit
        while not condition():
            assert time.monotonic() < deadline, self.everything()
            time.sleep(0.05)

    def everything(self):
        """Return all files of the fake cloud, to explain a failure."""
        files = [
            *self.root.glob("nodes/*/*/boot.log"),
            *self.root.glob("nodes/*/*/lbopt/run/*log"),
            *self.root.glob("misuse.txt"),
        ]
        told = [f"--- {file}\n{file.read_text()[-2000:]}" for file in files]
        workers = [path.parent.name for path in self.root.glob("nodes/lamb/*/environment.json")]
        pids = [pid for worker in workers for pid in self.processes_of(worker)]
        commands = subprocess.run(
            ["ps", "-o", "pid,ppid,etimes,args", "-p", ",".join(pids)],
            capture_output=True,
            text=True,
        )
        return "\n".join([*told, commands.stdout])

    def play(self, code):
        """Run Python with the fakes' module, for example to lose a machine."""
        subprocess.run(
            [sys.executable, "-S", "-c", f"import cloud\n{code}"],
            env=self.environment | {"PYTHONPATH": str(HERE / "fake")},
            check=True,
        )

    def processes_of(self, index):
        """Return the pids of a worker's processes."""
        machine = json.loads((self.worker(index) / "environment.json").read_text())["FAKE_MACHINE"]
        code = f"import cloud\nprint(*cloud.processes_of({machine!r}))"
        environment = self.environment | {"PYTHONPATH": str(HERE / "fake")}
        done = subprocess.run(
            [sys.executable, "-S", "-c", code],
            env=environment,
            check=True,
            capture_output=True,
            text=True,
        )
        return done.stdout.split()

    def terminate_keep(self, index):
        """Signal a worker's keep as a machine does at shutdown, and wait for its end."""
        run = self.worker(index) / "lbopt/run"
        os.kill(int((run / "pid").read_text()), signal.SIGTERM)
        self.until(lambda: (run / "state").read_text() == "stopped\n")
        self.until(lambda: not self.processes_of(index))

    def preempt(self):
        """Preempt all machines of the request."""
        self.play("with cloud.state() as value:\n    cloud.lose_request(value, 'lamb')")

    def close(self):
        """End all processes of machines and user, and check that no command was misused."""
        for process in self.started:
            if process.poll() is None:
                process.kill()
                process.wait()
        self.play("for node in (cloud.ROOT / 'nodes').glob('*'):\n    cloud.power_off(node.name)")
        misuse = self.root / "misuse.txt"
        assert not misuse.exists(), misuse.read_text()


def _programs(folder):
    folder.mkdir()
    for file in (HERE / "fake").glob("*.py"):
        if file.stem != "cloud":
            # Imported modules are compiled once.
            code = (
                f'import sys; sys.path.insert(0, \\"{file.parent}\\"); '
                f"import {file.stem}; {file.stem}.main(sys.argv[1:])"
            )
            _program(
                folder / file.stem, f'#!/bin/sh\nexec {sys.executable} -S -E -c "{code}" "$@"\n'
            )
    _program(folder / "sudo", '#!/bin/sh\n[ "$1" = -n ] && shift\nexec "$@"\n')
    _program(folder / "apt-get", '#!/bin/sh\necho "$@" >>"$FAKE_CLOUD/apt.txt"\nexit 100\n')
    for name, text in MOUNTING.items():
        _program(folder / name, f"#!/usr/bin/env bash\nset -e\n{text}")
    _program(folder / "python3.11", PYTHON.replace("REAL", sys.executable))
    return folder


def _program(path, text):
    path.write_text(text)
    path.chmod(0o755)


@pytest.fixture(scope="session")
def checkout(tmp_path_factory):
    """Return a small git checkout with the files that tpu/ needs."""
    folder = tmp_path_factory.mktemp("checkout")
    shutil.copytree(
        REPOSITORY / "tpu", folder / "tpu", ignore=shutil.ignore_patterns("__pycache__", "env")
    )
    (folder / "scripts").mkdir()
    for name in ("pyproject.toml", "scripts/constraints.txt"):
        shutil.copy(REPOSITORY / name, folder / name)
    shutil.copy(HERE / "stand_in.py", folder)
    for command in (
        ["init", "--quiet"],
        ["add", "."],
        ["-c", "user.name=t", "-c", "user.email=t@example.com", "commit", "-qm", "."],
    ):
        subprocess.run(["git", *command], cwd=folder, check=True)
    return folder


@pytest.fixture
def cloud(tmp_path, checkout):
    """Return an empty fake cloud; end all its processes afterwards."""
    cloud = Cloud(tmp_path, checkout)
    yield cloud
    cloud.close()
