"""GKE: the manifest fits its schema and restarts the right failures; the image is well formed.

No cluster is needed.
"""

import json
import pathlib
import re
import shutil
import subprocess
import sys

import pytest

GKE = pathlib.Path(__file__).parents[2] / "tpu" / "gke"
SETTINGS = {
    "WORKDIR": "gs://bucket/run",
    "IMAGE": "registry.example.com/lbopt:1",
    "CLUSTER": "cluster",
    "ACCELERATOR": "v5p-32",
    "NUM_SLICES": 2,
    "STOP_S": 300,
}


def _manifest(cloud, *flags, **changes):
    yaml = pytest.importorskip("yaml")
    cloud.set(**SETTINGS | changes)
    done = cloud.tpu("gke/submit", "--dry-run", *flags)
    assert (done.returncode, done.stderr) == (0, "")
    first, *lines, last = done.stdout.splitlines()
    assert (first, last) == ("kubectl apply --filename=- <<'EOF'", "EOF")
    assert "${" not in "\n".join(lines).replace("${X}", "")
    secret, manifest = yaml.safe_load_all("\n".join(lines))
    assert secret == {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {"name": f"{manifest['metadata']['name']}-job"},
        "stringData": {"secret": ""},  # made when it is submitted
    }
    return manifest


def _strictly(model, data, path="jobset"):
    """Check data against a pydantic model, which must know every field of the data."""
    models = pytest.importorskip("kubeflow_trainer_api.models")
    fields = {field.alias or name: field for name, field in model.model_fields.items()}
    for key, value in data.items():
        assert key in fields, f"{path}.{key} is no field"
        kind = str(fields[key].annotation)  # Optional[List[a.b.Model]] and the like
        inner = [
            getattr(models, name)
            for name in re.findall(r"\w+", kind)
            if hasattr(getattr(models, name, None), "model_fields")
        ]
        for number, element in enumerate(value if isinstance(value, list) else [value]):
            if (
                inner and isinstance(element, dict) and "Dict[" not in kind
            ):  # a map may have any keys
                _strictly(inner[0], element, f"{path}.{key}[{number}]")
    assert model.from_dict(data) is not None


@pytest.mark.parametrize("capacity", ["spot", "on-demand", "reserved"])
def test_manifest_fits_the_schema(cloud, capacity):
    models = pytest.importorskip("kubeflow_trainer_api.models")
    manifest = _manifest(cloud, CAPACITY=capacity, RESERVATION="ours")
    _strictly(models.JobsetV1alpha2JobSet, manifest)
    selector = _pod(manifest)["nodeSelector"]
    assert selector.pop("cloud.google.com/gke-tpu-accelerator") == "tpu-v5p-slice"
    assert selector.pop("cloud.google.com/gke-tpu-topology") == "2x2x4"
    expected = {
        "spot": {"cloud.google.com/gke-spot": "true"},
        "reserved": {"cloud.google.com/reservation-name": "ours"},
        "on-demand": {},
    }
    assert selector == expected[capacity]


@pytest.mark.parametrize("data_dir", ["gs://data/tfds", "disk:claim/tfds", ""])
def test_the_data_are_a_volume(cloud, data_dir):
    models = pytest.importorskip("kubeflow_trainer_api.models")
    manifest = _manifest(cloud, DATA_DIR=data_dir)
    _strictly(models.JobsetV1alpha2JobSet, manifest)
    pod = _pod(manifest)
    (container,) = pod["containers"]
    values = {each["name"]: each.get("value") for each in container["env"]}
    if not data_dir:
        assert "volumes" not in pod
        assert "TFDS_DATA_DIR" not in values
        return

    (volume,) = pod["volumes"]
    (mounted,) = container["volumeMounts"]
    assert (mounted["mountPath"], mounted["readOnly"]) == ("/data", True)

    if data_dir.startswith("gs:"):
        attributes = {"bucketName": "data", "mountOptions": "implicit-dirs,only-dir=tfds"}
        assert volume["csi"]["volumeAttributes"] == attributes
        assert values["TFDS_DATA_DIR"] == values["DATA_DIR"] == "/data"
    else:
        assert volume["persistentVolumeClaim"] == {"claimName": "claim", "readOnly": True}
        assert values["TFDS_DATA_DIR"] == "/data/tfds"


@pytest.mark.parametrize(("script", "value"), [("submit", "/data"), ("xpk", "gs://data")])
def test_data_that_pods_do_not_have(cloud, script, value):
    cloud.set(**SETTINGS, DATA_DIR=value)
    done = cloud.tpu(f"gke/{script}")
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "DATA_DIR=" in done.stderr


def test_the_schema_check_is_strict(cloud):
    models = pytest.importorskip("kubeflow_trainer_api.models")
    manifest = _manifest(cloud)
    _pod(manifest)["containers"][0]["imagePulPolicy"] = "Always"
    with pytest.raises(AssertionError, match=r"containers\[0\].imagePulPolicy is no field"):
        _strictly(models.JobsetV1alpha2JobSet, manifest)


def test_pods(cloud):
    manifest = _manifest(cloud)
    job = manifest["spec"]["replicatedJobs"][0]

    assert job["replicas"] == 2
    assert (job["template"]["spec"]["parallelism"], job["template"]["spec"]["completions"]) == (
        4,
        4,
    )

    pod = _pod(manifest)
    assert pod["restartPolicy"] == "Never"  # a pod failure policy requires it
    assert pod["terminationGracePeriodSeconds"] == 300

    (container,) = pod["containers"]
    assert container["resources"] == {
        "requests": {"google.com/tpu": 4},
        "limits": {"google.com/tpu": 4},
    }
    assert container["image"] == SETTINGS["IMAGE"]

    assert {
        "name": "JAX_COMPILATION_CACHE_DIR",
        "value": "gs://bucket/lbopt/lamb/compiled",
    } in container["env"]
    reference = {"secretKeyRef": {"name": "lamb-job", "key": "secret"}}
    assert {"name": "LBOPT_JOB_SECRET", "valueFrom": reference} in container["env"]


def test_the_command_arrives_as_it_is(cloud):
    command = (
        'X=1 lbopt train "--config.model.widths=(4,)" --path=a\\b --x=${X} '
        '--note="a: b, # {c} \\n %s \u00e9" --workdir=$WORKDIR'
    )
    manifest = _manifest(cloud, COMMAND=command)
    (container,) = _pod(manifest)["containers"]
    assert {"name": "COMMAND", "value": command} in container["env"]


@pytest.mark.parametrize(("slices", "processes", "topology"), [(1, "4", "v5p:2x2x4"), (2, "8", "")])
def test_a_preflight_is_a_jobset_of_its_own(cloud, slices, processes, topology):
    """It takes the place of COMMAND in every pod, and nothing restarts it."""
    models = pytest.importorskip("kubeflow_trainer_api.models")
    manifest = _manifest(cloud, "--preflight", NAME="n" * 40, NUM_SLICES=slices)
    _strictly(models.JobsetV1alpha2JobSet, manifest)
    assert manifest["metadata"]["name"] == "n" * 30 + "-preflight"
    (container,) = _pod(manifest)["containers"]
    devices = str(16 * slices)
    assert container["args"] == ["tpu/gke/preflight", processes, devices, "20", topology]
    assert "COMMAND" in {each["name"] for each in container["env"]}
    assert manifest["spec"]["failurePolicy"]["maxRestarts"] == 0
    assert manifest["spec"]["replicatedJobs"][0]["template"]["spec"]["backoffLimit"] == 0
    assert "args" not in _pod(_manifest(cloud))["containers"][0]


def _pod(manifest):
    return manifest["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]


def _outcome(manifest, exit_code=None, condition=None, failed_before=0):
    """Return the reaction to a failed pod.

    The job's first matching rule decides; it counts failures that match no rule. Then the set's
    rules decide.
    """

    job = manifest["spec"]["replicatedJobs"][0]["template"]["spec"]
    reason = "BackoffLimitExceeded"
    message = "Job has reached the specified backoff limit"

    for index, rule in enumerate(job["podFailurePolicy"]["rules"]):
        assert rule["action"] == "FailJob"
        codes = rule.get("onExitCodes", {"values": []})
        if condition in [pattern["type"] for pattern in rule.get("onPodConditions", [])]:
            reason = "PodFailurePolicy"
            message = (
                f"Pod default/a-0 has condition {condition} matching FailJob rule at index {index}"
            )
            break
        if (
            exit_code
            and codes["values"]
            and (exit_code in codes["values"]) == (codes["operator"] == "In")
        ):
            assert codes["containerName"] == "lbopt"
            message = (
                f"Container lbopt for pod default/a-0 failed with exit code {exit_code} "
                f"matching FailJob rule at index {index}"
            )
            reason = "PodFailurePolicy"
            break

    if reason == "BackoffLimitExceeded" and failed_before < job["backoffLimit"]:
        return "a new pod in its place"
    for rule in manifest["spec"]["failurePolicy"]["rules"]:
        patterns = rule.get("onJobFailureMessagePatterns", [""])
        if reason in rule["onJobFailureReasons"] and any(
            re.search(pattern, message) for pattern in patterns
        ):
            return rule["action"]
    return "RestartJobSet"


@pytest.mark.parametrize(
    ("how", "action"),
    [
        ({"exit_code": 75}, "RestartJobSetAndIgnoreMaxRestarts"),
        ({"condition": "DisruptionTarget"}, "RestartJobSetAndIgnoreMaxRestarts"),
        ({"exit_code": 2}, "FailJobSet"),
        ({"exit_code": 1}, "RestartJobSet"),
        ({"exit_code": 137}, "RestartJobSet"),
        # A node vanishes: its 3 peers end first; Kubernetes notices the node later.
        ({"exit_code": 3, "failed_before": 2}, "a new pod in its place"),
        (
            {"condition": "DisruptionTarget", "failed_before": 3},
            "RestartJobSetAndIgnoreMaxRestarts",
        ),
        # The bucket is read-only: all 4 workers end, and the 8th failure ends the job.
        ({"exit_code": 3, "failed_before": 4 * 7 - 1}, "a new pod in its place"),
        ({"exit_code": 3, "failed_before": 4 * 7}, "FailJobSet"),
    ],
)
def test_restarts(cloud, how, action):
    manifest = _manifest(cloud, MAX_FAILURES=5, MAX_LOST_PEERS=7)
    assert manifest["spec"]["failurePolicy"]["maxRestarts"] == 5
    assert _outcome(manifest, **how) == action


def test_submit_applies_once(cloud):
    cloud.set(**SETTINGS)
    done = cloud.tpu("gke/submit")
    assert done.returncode == 0, done
    made = re.findall(r'secret: "([0-9a-f]{64})"', (cloud.root / "jobset.lamb").read_text())
    assert len(made) == 1
    assert made[0] not in (cloud.root / "calls.jsonl").read_text() + done.stdout + done.stderr
    done = cloud.tpu("gke/submit")
    assert done.returncode == 2
    assert done.stderr.startswith(
        "tpu/gke/submit: NAME=lamb: this JobSet is there already; kubectl delete jobset lamb"
    )
    cloud.script(kubectl_error="Unable to connect to the server")
    done = cloud.tpu("gke/submit")
    assert done.returncode == 3
    assert done.stderr.startswith(
        "tpu/gke/submit: kubectl: ERROR: Unable to connect to the server; check kubectl config"
    )


@pytest.mark.parametrize(
    ("script", "changes", "message"),
    [
        ("submit", {"IMAGE": None}, "IMAGE is missing in"),
        ("submit", {"CAPACITY": "reserved"}, "RESERVATION is missing in"),
        ("submit", {"ACCELERATOR": "v2-8"}, "ACCELERATOR=v2-8 in"),
        ("xpk", {"CLUSTER": None}, "CLUSTER is missing in"),
    ],
)
def test_wrong_settings(cloud, script, changes, message):
    cloud.set(**SETTINGS | changes)
    done = cloud.tpu(f"gke/{script}")
    assert done.returncode == 2
    assert done.stderr.startswith(f"tpu/gke/{script}: {message}")
    assert done.stderr.count("\n") == 1


def test_xpk(cloud):
    cloud.set(**SETTINGS)
    assert cloud.tpu("gke/xpk").returncode == 0

    ((_, _, _, *flags),) = cloud.calls("xpk")
    environment = json.loads((cloud.root / "xpk.json").read_text())
    secret = environment.pop("LBOPT_JOB_SECRET")
    assert re.fullmatch("[0-9a-f]{64}", secret)
    assert secret not in (cloud.root / "calls.jsonl").read_text()

    assert environment == {
        "WORKDIR": "gs://bucket/run",
        "JAX_COMPILATION_CACHE_DIR": "gs://bucket/lbopt/lamb/compiled",
        "LBOPT_START_TIMEOUT_S": "900",
    }

    for flag in (
        "--restart-on-exit-codes=3,75",
        "--max-restarts=100",
        "--tpu-type=v5p-32",
        "--num-slices=2",
        "--spot",
    ):
        assert flag in flags
    assert "--command=cd /opt/lbopt && exec env python stand_in.py $WORKDIR 40" in flags


def test_a_preflight_by_xpk(cloud):
    cloud.set(**SETTINGS)
    assert cloud.tpu("gke/xpk", "--preflight").returncode == 0
    ((_, _, _, *flags),) = cloud.calls("xpk")
    assert "--workload=lamb-preflight" in flags
    assert "--command=cd /opt/lbopt && exec tpu/gke/preflight 8 32 20 ''" in flags
    assert "--max-restarts=0" in flags
    environment = json.loads((cloud.root / "xpk.json").read_text())
    assert environment["COMMAND"] == "python stand_in.py $WORKDIR 40"


# --- the image ----------------------------------------------------------------------------------


@pytest.mark.process
@pytest.mark.parametrize("arguments", [["bash", "-c", "kill -TERM $$; sleep 9"], []])
def test_the_entry_point_becomes_the_program(arguments):
    """Kubernetes sends SIGTERM to process 1, so the program must replace the shell."""
    command = f"{sys.executable} -c 'import os; print(os.getpid())' " if not arguments else ""
    process = subprocess.Popen(
        [GKE / "entrypoint", *arguments],
        env={"COMMAND": command, "PATH": "/usr/bin:/bin"},
        stdout=subprocess.PIPE,
        text=True,
    )
    out, _ = process.communicate(timeout=20)
    if arguments:
        assert process.returncode == -15
    else:
        assert (process.returncode, int(out)) == (0, process.pid)


@pytest.mark.process
@pytest.mark.parametrize(
    ("command", "code", "said"),
    [
        ("lbopt train --config=digits_cnn:smoke", 0, ", config ok"),
        ("lbopt train --config=digits_cnn:smkoe", 2, " preflight wrong: "),
        ("python stand_in.py", 0, ", sum 0"),
    ],
)
def test_a_pod_checks_its_devices_and_its_config(tmp_path, command, code, said):
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "set").touch()
    path = f"{pathlib.Path(sys.executable).parent}:/usr/bin:/bin"
    environment = {"COMMAND": command, "PATH": path, "DATA_DIR": str(tmp_path / "data")}
    done = subprocess.run(
        [GKE / "entrypoint", GKE / "preflight", "1", "1", "20", ""],
        env={**environment, "JAX_PLATFORMS": "cpu", "HOME": str(tmp_path)},
        cwd=GKE.parents[1],
        capture_output=True,
        text=True,
    )
    assert done.returncode == code, done
    (line,) = done.stdout.splitlines()
    assert said in line


@pytest.mark.process
def test_the_entry_point_needs_a_command():
    done = subprocess.run(
        [GKE / "entrypoint"], env={"PATH": "/usr/bin:/bin"}, capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (
        2,
        "entrypoint: COMMAND is missing; set it, or give the command as arguments\n",
    )


def test_dockerfile():
    text = (GKE / "Dockerfile").read_text()
    assert re.search(r"^FROM python:3\.11\.\d+-slim-\w+$", text, re.M), "a pinned tag"
    assert "USER 1000" in text
    assert json.loads(re.search(r"^ENTRYPOINT (.*)$", text, re.M)[1]) == [
        "/opt/lbopt/tpu/gke/entrypoint"
    ]
    assert "tpu/env" in (GKE / "Dockerfile.dockerignore").read_text().splitlines()


@pytest.mark.process
def test_hadolint():
    program = _tool("hadolint")
    done = subprocess.run(
        [program, "--failure-threshold=info", GKE / "Dockerfile"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout


@pytest.mark.process
def test_yamllint():
    program = _tool("yamllint")
    rules = (
        "{extends: default, "
        "rules: {line-length: {max: 140}, document-start: disable, braces: disable}}"
    )
    done = subprocess.run(
        [program, "--strict", "-d", rules, GKE / "jobset.yaml"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout


@pytest.mark.process
@pytest.mark.slow
def test_shellcheck():
    program = _tool("shellcheck")
    root = GKE.parents[1]
    files = [file for file in sorted(GKE.parent.rglob("*")) if file.is_file() and _is_shell(file)]
    assert len(files) >= 22
    done = subprocess.run(
        [program, "--external-sources", *(file.relative_to(root) for file in files)],
        cwd=root,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout


def _is_shell(file):
    return file.suffix == ".sh" or (
        not file.suffix and file.read_bytes().startswith(b"#!/usr/bin/env bash")
    )


def _tool(name):
    found = shutil.which(
        name, path=f"{pathlib.Path(sys.executable).parent}:/usr/local/bin:/usr/bin"
    )
    return found or pytest.skip(f"{name} is not installed; scripts/check has it")
