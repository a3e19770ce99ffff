"""All scripts: help, dry runs, and one line with an exit code for wrong input."""

import os
import pathlib
import re
import shutil
import subprocess

import pytest

pytestmark = pytest.mark.process

SCRIPTS = (
    "create",
    "setup",
    "preflight",
    "run",
    "babysit",
    "status",
    "logs",
    "stop",
    "delete",
    "gke/submit",
    "gke/xpk",
)
SETTINGS_SH = (pathlib.Path(__file__).parents[2] / "tpu" / "settings.sh").read_text()
IMAGE = {
    "WORKDIR": "gs://bucket/run",
    "IMAGE": "registry.example.com/lbopt:1",
    "CLUSTER": "cluster",
}


@pytest.mark.parametrize("script", SCRIPTS)
def test_help(cloud, script):
    done = cloud.tpu(script, "--help")
    assert done.returncode == 0
    assert done.stdout.startswith(f"tpu/{script}: ")
    assert "--dry-run" in done.stdout
    assert done.stderr == ""


@pytest.mark.parametrize("script", SCRIPTS)
def test_dry_run_prints_commands_and_calls_nothing(cloud, script):
    cloud.set(**IMAGE)
    done = cloud.tpu(script, "--dry-run")
    assert (done.returncode, done.stderr) == (0, "")
    commands = [
        line
        for line in done.stdout.splitlines()
        if line.startswith(("gcloud ", "kubectl ", "xpk ", "git "))
    ]
    assert commands
    assert not (cloud.root / "calls.jsonl").exists()


def test_dry_run_needs_no_gcloud(cloud):
    cloud.environment["PATH"] = _path_without("gcloud", cloud)
    assert cloud.tpu("create", "--dry-run").returncode == 0


def test_dry_run_prints_the_request(cloud):
    cloud.set(
        CAPACITY="reserved",
        NUM_SLICES=3,
        SERVICE_ACCOUNT="a@example.com",
        NETWORK="n",
        SUBNETWORK="s",
    )
    lines = cloud.tpu("create", "--dry-run").stdout.splitlines()
    (line,) = [line for line in lines if " create " in line]
    for flag in (
        "gcloud compute tpus queued-resources create lamb --accelerator-type=v4-16 "
        "--runtime-version=tpu-ubuntu2204-base",
        "--node-count=3 --node-prefix=lamb", "--reserved",
        "--service-account=a@example.com", "--network=n", "--subnetwork=s",
        "--metadata=lbopt-home=gs://bucket/lbopt/lamb", "--valid-until-duration=86400s",
        "--project=my-project --zone=us-central2-b",
    ):  # fmt: skip
        assert flag in line
    assert "--spot" not in line


@pytest.mark.parametrize(("capacity", "flag"), [("spot", True), ("on-demand", False)])
def test_capacity_becomes_a_flag(cloud, capacity, flag):
    cloud.set(CAPACITY=capacity)
    text = cloud.tpu("create", "--dry-run").stdout
    assert ("--spot" in text) == flag
    assert "--reserved" not in text


WRONG = {
    "capacity": (
        {"CAPACITY": "preemptible"},
        "CAPACITY='preemptible' in ENV: write spot, on-demand or reserved",
    ),
    "accelerator": (
        {"ACCELERATOR": "v4-9"},
        "ACCELERATOR='v4-9' in ENV: not in tpu/accelerators.tsv, which has v4-8 v4-16 ",
    ),
    "generation": (
        {"ACCELERATOR": "v99-8"},
        "ACCELERATOR='v99-8' in ENV: not in tpu/accelerators.tsv, which has v2-N v3-N v4-N ",
    ),
    "generation for the accelerator": (
        {"ACCELERATOR": "v5e-64"},
        "ACCELERATOR='v5e-64' in ENV: not in tpu/accelerators.tsv; did you mean v5litepod-64?\n",
    ),
    "topology for the accelerator": (
        {"ACCELERATOR": "v4:2x2x4"},
        "ACCELERATOR='v4:2x2x4' in ENV: not in tpu/accelerators.tsv; did you mean v4-32?\n",
    ),
    "no such size": (
        {"ACCELERATOR": "v5e-65"},
        "ACCELERATOR='v5e-65' in ENV: not in tpu/accelerators.tsv, which has v5litepod-1 ",
    ),
    "missing": (
        {"ZONE": None},
        "ZONE is missing in ENV: add a line ZONE=..., as in tpu/env.example",
    ),
    "empty": ({"COMMAND": ""}, "COMMAND is missing in ENV"),
    "zone": ({"ZONE": "us-central2"}, "ZONE='us-central2' in ENV: write a zone"),
    "project": ({"PROJECT": "My Project"}, "PROJECT='My Project' in ENV: write the project's ID"),
    "name": ({"NAME": "Lamb_32k"}, "NAME='Lamb_32k' in ENV: use up to 40 small letters"),
    "bucket": ({"BUCKET": "s3://bucket"}, "BUCKET='s3://bucket' in ENV: write gs://"),
    "workdir": (
        {"WORKDIR": "runs/lamb"},
        "WORKDIR='runs/lamb' in ENV: write gs://... "
        "or the path of a folder that all workers share",
    ),
    "name of another": (
        {"WORKDIR": "gs://bucket/${COMMAND}"},
        "WORKDIR='gs://bucket/${COMMAND}' in ENV: write gs://",
    ),
    "run in a workdir": (
        {"WORKDIR": "/a$(touch${IFS}b)"},
        "WORKDIR='/a$(touch${IFS}b)' in ENV: write gs://",
    ),
    "control character": (
        {"COMMAND": "lbopt \x1b[31m"},
        "COMMAND='lbopt  [31m' in ENV: one command without",
    ),
    "open quotes": (
        {"COMMAND": 'lbopt "a'},
        "COMMAND='lbopt \"a' in ENV: the shell cannot read it",
    ),
    "option of bash": ({"COMMAND": "-x"}, "COMMAND='-x' in ENV: one command"),
    "slices": ({"NUM_SLICES": "0"}, "NUM_SLICES='0' in ENV: write how many slices"),
    "number": ({"MAX_FAILURES": "some"}, "MAX_FAILURES='some' in ENV: write a whole number"),
    "two commands": (
        {"COMMAND": "lbopt train; rm x"},
        "COMMAND='lbopt train; rm x' in ENV: one command without",
    ),
    "substitution": (
        {"COMMAND": "lbopt $(id)"},
        "COMMAND='lbopt $(id)' in ENV: one command without $(...)",
    ),
    "unknown": (
        {"ZONNE": "x"},
        "ENV line 17: ZONNE is no setting of ours; tpu/env.example has them all",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_wrong_setting(cloud, case):
    changes, message = WRONG[case]
    cloud.set(**changes)
    done = cloud.tpu("create", limit=10)
    assert done.returncode == 2, done
    assert done.stderr.startswith(f"tpu/create: {message.replace('ENV', str(cloud.settings))}"), (
        done.stderr
    )
    assert done.stderr.count("\n") == 1
    assert done.stdout == ""
    assert not cloud.calls("gcloud")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("export ZONE=a\n", "line 1: 'export ZONE=a' is not a setting; write NAME=VALUE"),
        ("NAME=a b\n", "line 1: NAME=a b cannot be read; put single quotes around the value"),
        ("NAME='a\n", "line 1: NAME='a cannot be read"),
    ],
)
def test_settings_that_cannot_be_read(cloud, text, message):
    cloud.settings.write_text(text)
    done = cloud.tpu("status")
    assert done.returncode == 2
    assert message in done.stderr
    assert done.stderr.count("\n") == 1


def test_settings_are_read_and_never_run(cloud):
    cloud.set(RUNTIME='"$(touch ran)`touch ran`"')
    assert "$(touch ran)" in cloud.tpu("create", "--dry-run").stdout
    assert not list(cloud.root.parent.rglob("ran"))


def test_the_example_is_good_and_names_every_setting(cloud):
    example = (cloud.checkout / "tpu/env.example").read_text()
    cloud.settings.write_text(
        re.sub(r"^#([A-Z])", r"\1", example, flags=re.M)
    )  # with explicit defaults
    with_defaults = cloud.tpu("create", "--dry-run")
    assert (with_defaults.returncode, with_defaults.stderr) == (0, "")
    cloud.settings.write_text(example)
    assert _without_temporary(cloud.tpu("create", "--dry-run").stdout) == _without_temporary(
        with_defaults.stdout
    )
    known = (cloud.checkout / "tpu/settings.sh").read_text()
    for name in re.findall(r"\[([A-Z_]+)\]=", known.split("WANTED")[0]):
        assert re.search(rf"^#?{name}=", example, re.MULTILINE)


def test_the_workdir_is_the_runs_folder_of_the_bucket(cloud):
    cloud.set(WORKDIR=None, BUCKET="gs://bucket/", NAME="lamb")
    shell = f"source tpu/settings.sh; ENV_FILE={cloud.settings} TPU=tpu; load_settings"
    done = subprocess.run(
        ["bash", "-c", f"{shell}; echo $WORKDIR"],
        cwd=cloud.checkout,
        capture_output=True,
        text=True,
    )
    assert done.stdout == "gs://bucket/runs/lamb\n"


def test_missing_settings_file(cloud):
    cloud.settings.unlink()
    done = cloud.tpu("run")
    assert done.returncode == 2
    assert done.stderr.endswith(
        "there is no such file; cp tpu/env.example tpu/env and fill it in\n"
    )


@pytest.mark.parametrize("flag", ["--forse", "status", "--lines=5", "--force=yes"])
def test_unknown_option(cloud, flag):
    done = cloud.tpu("delete", flag)
    assert done.returncode == 2
    assert done.stderr == f"tpu/delete: '{flag}' is not an option; tpu/delete --help has them\n"


@pytest.mark.parametrize(
    ("flag", "message"),
    [("--lines=x", "--lines=x: write a whole"), ("--worker=7", "--worker=7: there are 2 workers")],
)
def test_wrong_option_of_logs(cloud, flag, message):
    done = cloud.tpu("logs", flag)
    assert done.returncode == 2
    assert message in done.stderr


@pytest.mark.parametrize("script", [script for script in SCRIPTS if not script.startswith("gke/")])
def test_gcloud_is_missing(cloud, script):
    cloud.environment["PATH"] = _path_without("gcloud", cloud)
    done = cloud.tpu(script)
    assert done.returncode == 3
    assert done.stderr.startswith(
        f"tpu/{script}: gcloud is not on PATH; install the Google Cloud CLI"
    )
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize(("script", "program"), [("submit", "kubectl"), ("xpk", "xpk")])
def test_a_program_of_gke_is_missing(cloud, script, program):
    cloud.set(**IMAGE)
    cloud.environment["PATH"] = _path_without(program, cloud)
    done = cloud.tpu(f"gke/{script}")
    assert done.returncode == 3
    assert done.stderr.startswith(f"tpu/gke/{script}: {program} is not on PATH; install it")
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("script", ["create", "preflight"])
def test_bucket_without_permission(cloud, script):
    cloud.script(forbidden=["user cp"])
    done = cloud.tpu(script)
    assert done.returncode == 3
    assert done.stderr == (
        f"tpu/{script}: BUCKET=gs://bucket: ERROR: (gcloud.storage.cp) "
        "HTTPError 403: user@example.com does not have storage access.; "
        "create the bucket, or grant this account roles/storage.objectAdmin on it\n"
    )


@pytest.mark.slow
def test_a_wish_that_cannot_be_read_is_not_taken_for_none(cloud):
    cloud.ready()
    bucket = cloud.root / "buckets/bucket/lbopt/lamb"
    (bucket / "workers").mkdir()
    (bucket / "workers/log").write_text("of the run that is going on")
    (bucket / "wanted").write_text("COMMAND='x'")
    before = {file: file.read_bytes() for file in bucket.rglob("*") if file.is_file()}
    cloud.script(busy={"user cat": 99})
    for script in ("run", "stop", "setup"):
        done = cloud.tpu(script)
        assert done.returncode == 3, done
        assert done.stderr == (
            f"tpu/{script}: PROJECT=my-project BUCKET=gs://bucket: "
            "whether a run is wanted cannot be read: ERROR: (gcloud.storage.cat) "
            "HTTPError 503: try again; run this again, "
            "or grant this account roles/storage.objectAdmin on the bucket\n"
        )
        assert {file: file.read_bytes() for file in bucket.rglob("*") if file.is_file()} == before


def test_nobody_is_logged_in(cloud):
    cloud.script(logged_out=True)
    done = cloud.tpu("preflight")
    assert done.returncode == 3
    assert done.stderr == "tpu/preflight: gcloud: no account is logged in; gcloud auth login\n"
    done = cloud.tpu("run")
    assert done.returncode == 3
    assert "gcloud auth login" in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("script", ["run", "setup"])
def test_no_machines(cloud, script):
    done = cloud.tpu(script)
    assert done.returncode == 3
    assert (
        done.stderr
        == f"tpu/{script}: NAME=lamb: there is no such queued resource; tpu/create makes it\n"
    )


@pytest.mark.everyday(
    "mine|0.0.0.0/0|all-0.0.0.0/0", "mine|::/0|tcp-::/0", "mine|203.0.113.0/24|all-None"
)
@pytest.mark.parametrize(
    ("rule", "range_"),
    [
        ("mine|0.0.0.0/0|all", "0.0.0.0/0"),
        ("mine|10.0.0.0/8,0.0.0.0/0|tcp:22,tcp:8000-9000", "0.0.0.0/0"),
        ("mine|::/0|tcp", "::/0"),
        ("mine|128.0.0.0/1|tcp:8483", "128.0.0.0/1"),
        ("mine|10.0.0.0/8,192.168.0.0/16,172.16.0.0/12,100.64.0.0/10,fd00::/8|all", None),
        ("mine|0.0.0.0/0|tcp:22,tcp:9000-9999,udp,icmp", None),
        ("mine|203.0.113.0/24|all", None),  # somebody's own
        ("mine|203.0.113.7,2001:db8::7|all", None),  # single addresses
        ("mine||all", None),  # by tags
    ],
)
def test_a_firewall_that_lets_the_world_in(cloud, rule, range_):
    cloud.script(firewall=[rule])
    cloud.set(NETWORK="projects/host-project/global/networks/mine")
    done = cloud.tpu("create")

    ((*_, project, rules, _, _),) = cloud.calls("gcloud", "compute", "firewall-rules")
    assert (project, rules) == (
        "--project=host-project",
        "--filter=network ~ /mine$ AND direction=INGRESS AND disabled=false",
    )

    assert done.returncode == (3 if range_ else 0), done
    assert bool(cloud.calls("gcloud", "compute", "tpus")) == (range_ is None)
    assert range_ or not done.stderr

    if range_:
        assert done.stderr.count("\n") == 1
        said = (
            f"tpu/create: NETWORK=mine: firewall rule mine lets {range_} reach "
            "the machines' ports 8080 8471 8476 8482 8483"
        )
        assert done.stderr.startswith(said)
        cloud.set(FIREWALL="skip")
        assert cloud.tpu("create").returncode == 0


def test_a_firewall_that_cannot_be_read_is_said_and_no_reason_to_stop(cloud):
    cloud.script(firewall_error="Required 'compute.firewalls.list' permission")
    done = cloud.tpu("create")
    assert done.returncode == 0
    assert (
        "the firewall rules of network default cannot be read, "
        "so they are not checked: ERROR: Required" in done.stdout
    )


def test_the_secret_of_a_job_is_made_once_and_shown_nowhere(cloud):
    cloud.set(COMMAND="python stand_in.py $WORKDIR 3")
    cloud.ready()
    path = cloud.root / "buckets/bucket/lbopt/lamb/secret"
    said = []
    for _ in range(2):
        done = cloud.tpu("run")
        assert done.returncode == 0
        cloud.until(lambda: cloud.said(0).startswith("done") and cloud.said(1).startswith("done"))
        said.append(path.read_text())
        assert (
            said[-1].strip()
            not in done.stdout + done.stderr + (cloud.root / "calls.jsonl").read_text()
        )
    assert said[0] == said[1]
    assert re.fullmatch("[0-9a-f]{64}\n", said[0])
    for worker in range(2):
        file = cloud.worker(worker) / "lbopt/run/secret"
        assert file.read_text() == said[0]
        assert file.stat().st_mode & 0o777 == 0o600


@pytest.mark.slow
def test_uncommitted_changes_are_sent_only_when_asked(cloud):
    file = cloud.checkout / "new_file.py"
    file.write_text("print('new')\n")
    try:
        done = cloud.tpu("create")
        assert done.returncode == 2
        assert done.stderr.endswith("and commit the rest, or send it too: --dirty\n")
        assert cloud.tpu("create", "--dirty").returncode == 0
        assert cloud.tpu("setup", "--keep-source").returncode == 0
        assert (cloud.worker(0) / "lbopt/source/new_file.py").exists()
    finally:
        file.unlink()


@pytest.mark.slow
def test_setup_brings_new_source_but_not_under_a_run(cloud):
    cloud.set(COMMAND="python stand_in.py $WORKDIR 400 --sleep=0.1")
    cloud.ready()
    file = cloud.checkout / "new_file.py"
    file.write_text("print('new')\n")
    try:
        assert cloud.tpu("setup", "--dirty").returncode == 0
        assert (cloud.worker(1) / "lbopt/source/new_file.py").exists()
        cloud.tpu("run")
        file.write_text("print('newer')\n")
        done = cloud.tpu("setup", "--dirty")
        assert done.returncode == 2
        assert (
            done.stderr == "tpu/setup: NAME=lamb: a run is wanted, "
            "with the source it began with; tpu/stop first\n"
        )
        assert "newer" not in (cloud.worker(1) / "lbopt/source/new_file.py").read_text()
    finally:
        file.unlink()


def _path_without(program, cloud):
    """Return a PATH with links to all programs that the scripts need, except this one."""
    folder = cloud.root / "links"
    folder.mkdir()
    programs = (
        "bash sh env dirname basename grep sed tail head cut tr mktemp rm cat sleep timeout "
        "git tar gzip printf"
    )
    for name in programs.split():
        (folder / name).symlink_to(shutil.which(name))
    assert program not in os.listdir(folder)
    return str(folder)


def _without_temporary(text):
    return re.sub(r"/tmp/[^ ]*/", "", text)


HOSTILE = '=<script>\x1b[31m "q" $(touch pwned) $x ${COMMAND} \\n: {a: b} # \u00e9'
NAMES = [
    *re.findall(r"\[([A-Z_]+)\]=", SETTINGS_SH),
    *re.search(r"REQUIRED=\((.*)\)", SETTINGS_SH)[1].split(),
]


@pytest.mark.parametrize("script", ["create", "gke/submit", "gke/xpk"])
def test_hostile_settings(cloud, script):
    """Each is refused in one line, or stays one word of a command and one value of the manifest.

    The shell runs none of it.
    """
    of_gke = {"IMAGE", "CLUSTER", "RESERVATION"}
    asked = (
        set(NAMES) - of_gke if script == "create" else of_gke | {"WORKDIR", "COMMAND", "RUNTIME"}
    )

    taken = set()
    for name in asked:
        cloud.set(**IMAGE | {name: HOSTILE})
        done = cloud.tpu(script, "--dry-run")
        assert not {letter for letter in done.stdout + done.stderr if not letter.isprintable()} - {
            "\n"
        }

        if done.returncode == 0:
            taken.add(name)
            (line,) = [line for line in done.stdout.splitlines() if " create " in line] or [""]
            words = subprocess.run(
                ["bash", "-c", f'printf "%s\\0" {line}'], stdout=subprocess.PIPE, cwd=cloud.root
            ).stdout
            assert script != "create" or any(
                word.endswith(f"={HOSTILE}".encode()) for word in words.split(b"\0")
            )
        else:
            assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1), done
            assert done.stderr.startswith(f"tpu/{script}: {name}=")

    assert taken == (
        {"RUNTIME", "SERVICE_ACCOUNT", "NETWORK", "SUBNETWORK"}
        if script == "create"
        else {"RUNTIME"}
    )
    assert not list(cloud.root.parent.rglob("pwned"))


def test_what_the_cloud_says_does_not_command_the_terminal(cloud):
    cloud.script(grants=["error PERMISSION_DENIED \x1b[31m\x07"])
    done = cloud.tpu("create", "--dirty")
    assert (done.returncode, done.stderr.count("\n")) == (3, 1)
    assert "PERMISSION_DENIED" in done.stderr
    log = cloud.root / "buckets/bucket/lbopt/lamb/workers/0-0/log"
    log.parent.mkdir(parents=True)
    log.write_text("step 1\t\x1b[2J\x9b31m\n")
    shown = cloud.tpu("logs", "--worker=0")
    assert "0-0| step 1" in shown.stdout
    for text in (done.stdout, done.stderr, shown.stdout, shown.stderr):
        assert not {letter for letter in text if not letter.isprintable()} - {"\n"}


@pytest.mark.slow
def test_the_words_of_a_command_arrive_as_they_are(cloud):
    words = ["a b", "*", "$x", 'q"q', "\u00e9", "-e"]
    show = r"print(*map(\"[{}]\".format, __import__(\"sys\").argv[1:]), sep=\"\\n\")"
    cloud.set(COMMAND=rf'python -c "{show}" "a b" "*" "\$x" "q\"q" é -e')
    cloud.ready()
    assert cloud.tpu("run").returncode == 0
    cloud.until(lambda: cloud.said(0).startswith("done"))
    log = (cloud.worker(0) / "lbopt/run/log").read_text().splitlines()
    assert [line for line in log if line.startswith("[")] == [f"[{word}]" for word in words]
