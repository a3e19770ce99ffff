"""Damaged or edited files of lbopt end the commands that read them in one line."""

import copy
import hashlib
import json
import random
import re
import shutil

import pytest
import synthetic
from refusal import names_in, refused, troubled
from synthetic import Truth, legw

from lbopt.data.text import StoreWriter, open_store
from lbopt.data.text._wordpiece import Document
from lbopt.errors import NO_VALUE, EnvironmentProblem
from lbopt.recipes import _initial
from lbopt.report import _page
from lbopt.sweep import BucketShards, _bucket_shards
from lbopt.sweep._finished_trial import check_record
from lbopt.sweep._results import read_results
from lbopt.train import _seal
from lbopt.train._seal import Seal
from lbopt.workdir import MlperfLog, _bucket, open_workdir, read_config, read_json_lines, write_json

MISSING = object()
VALUES = (
    MISSING,
    None,
    [],
    {},
    "hostile",
    7,
    -1,
    1.5,
    True,
    ["x"],
    {"x": None},
    1e30,
    10**30,
    2**63 - 1,
    float("inf"),
)
DEEP = "[" * 10**5


def places(data, path=()):
    """Yield the path to everything in JSON data; lists contribute their first element."""
    items = (
        data.items()
        if isinstance(data, dict)
        else list(enumerate(data))[:1]
        if isinstance(data, list)
        else ()
    )
    for name, value in items:
        yield (*path, name)
        yield from places(value, (*path, name))


def changed(data, path, value):
    data = copy.deepcopy(data)
    group = data
    for name in path[:-1]:
        group = group[name]
    if value is MISSING:
        del group[path[-1]]
    else:
        group[path[-1]] = value
    return data


@pytest.fixture(
    params=[
        "a sample",
        pytest.param("every case", marks=[pytest.mark.slow, pytest.mark.exhaustive]),
    ]
)
def some(request):
    """Return a function (cases, count) -> that many random cases, or all of them."""

    def choose(cases, count):
        if request.param == "every case":
            return cases
        return random.Random(0).sample(cases, min(len(cases), count))

    return choose


@pytest.fixture
def versions(some):
    """Return a function that yields copies of JSON data, each with a hostile value in one place."""

    def edit(data, skip=()):
        found = [path for path in places(data) if path[: len(skip)] != skip or not skip]
        for path, value in some([(path, value) for path in found for value in VALUES], 150):
            yield path, value, changed(data, path, value)

    return edit


def refusal(read, *arguments):
    """Return the error of one line, or None if the data are accepted."""
    try:
        read(*arguments)
    except (EnvironmentProblem, ValueError) as error:
        assert "\n" not in str(error)  # noqa: PT017 -- it may be none at all
        return error
    return None


@pytest.fixture
def draws_nothing(monkeypatch):
    monkeypatch.setattr(_page, "save_figure", lambda figure, file: "")


@pytest.fixture
def report(lbopt, draws_nothing):
    """Return a function that runs `lbopt report` and checks for a page or a one-line refusal."""

    def run(folder, *case):
        code, _, err = lbopt("report", f"--workdir={folder}")
        assert code in (0, 2, 3), (case, err)
        assert err.count("\n") == (code != 0), (case, err)
        return code, err

    return run


@pytest.fixture(scope="module")
def study(tmp_path_factory):
    """Return the folder of a study that has every kind of field."""
    common = {"growth": 0.5, "noise_scale": (90.0, 100.0, 200.0), "peak_step": lambda size: 4}
    truths = {
        "momentum": Truth(
            (0.98, 0.97, 0.6), (1.0, 1.0, 0.7), steps_to_target=(200.0, 100.0, None), **common
        ),
        "lamb": legw(
            (0.98, 0.98, 0.975), steps_to_target=(150.0, 50.0, 20.0), layers=("a", "b"), **common
        ),
    }
    config, rows = synthetic.make_study(
        truths, waterfall=tuple(truths), warmup_factors=[0.0, 0.5, 1.0, 2.0]
    )
    folder = tmp_path_factory.mktemp("study")
    saved = synthetic.save_study(folder, config, rows)
    write_json(folder / "config.json", {"kind": "sweep", **saved})
    return folder


def check_config_json(folder, report, versions, some, *without):
    """Check that an edit of config.json is accepted, or refused in one line; so is its report."""
    file = folder / "config.json"
    accepted = []
    for path, value, data in versions(json.loads(file.read_text()), *without):
        file.write_text(json.dumps(data))
        if refusal(read_config, folder) is None:
            accepted.append((path, value, data))
    for path, value, data in some(accepted, 3):
        file.write_text(json.dumps(data))
        report(folder, path, value)


def test_config_json_of_a_run(trained, tmp_path, report, versions, some):
    check_config_json(shutil.copytree(trained, tmp_path / "run"), report, versions, some)


@pytest.mark.parametrize("command", ["train", "evaluate", "export", "report"])
@pytest.mark.parametrize(
    "content", ["null", "[]", DEEP, '{"kind": "train", "config": null}', "\x00", "\ud800"]
)
def test_config_json_that_is_none(command, content, trained, small, tmp_path, refusing):
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.json").write_bytes(content.encode("utf-8", "surrogatepass"))
    shutil.copy(trained / "metrics.jsonl", run)
    flags = {"report": [], "export": ["--format=safetensors", f"--output={tmp_path / 'out'}"]}.get(
        command, small
    )
    with troubled("--workdir", NO_VALUE, "damaged") as caught:
        refusing(command, *flags, f"--workdir={run}")
    assert str(run / "config.json") in names_in(caught)


def test_config_json_of_a_study(study, tmp_path, report, versions, some):
    folder = shutil.copytree(study, tmp_path / "study")
    check_config_json(folder, report, versions, some, ("config", "train", "about"))


@pytest.mark.parametrize(
    ("path", "value", "field"),
    [
        (("config", "arms"), [], "--workdir"),
        (("config", "global_batch_sizes"), [], "--workdir"),
        (("config", "search", "method"), "hostile", "--workdir"),
        (("config", "train", "num_epochs"), float("nan"), "--workdir"),
        (("config", "search", "learning_rate_factors"), [], "--workdir"),
        (("config", "arms", 0, "schedule"), MISSING, "{file}: config: arms[0]"),
        (("config", "final_seeds"), MISSING, "{file}: config"),
    ],
)
@pytest.mark.usefixtures("draws_nothing")
def test_a_config_json_that_no_study_began_with(path, value, field, study, tmp_path, refusing):
    folder = shutil.copytree(study, tmp_path / "study")
    file = folder / "config.json"
    file.write_text(json.dumps(changed(json.loads(file.read_text()), path, value)))
    with troubled(field.format(file=file), NO_VALUE, "damaged") as caught:
        refusing("report", f"--workdir={folder}")
    assert "config.json" in str(caught.value)
    assert path[-1] in str(caught.value)


def assert_damaged(error, file, number, field):
    """Check that an error is about a line of a file, by its number, and names its field."""
    assert (error.field, error.code) == (str(file), "damaged")
    assert re.search(rf"\b{number}\b", error.reason)
    assert field in error.reason


def rows_of(folder):
    rows = [json.loads(line) for line in (folder / "results.jsonl").read_text().splitlines()]
    final = max((row for row in rows if row["phase"] == "final"), key=lambda row: len(row))
    return rows, [final, next(row for row in rows if row["phase"] == "search")]


def test_results(study, tmp_path, report, versions, some):
    folder = shutil.copytree(study, tmp_path / "study")
    file = folder / "results.jsonl"
    rows, chosen = rows_of(folder)
    accepted = []
    for row in chosen:
        for path, value, data in versions(row):
            file.write_text(json.dumps(data) + "\n")
            error = refusal(read_results, folder, row.get("study"))
            if error is None:
                accepted.append((path, value, [data if one is row else one for one in rows]))
            else:
                assert_damaged(error, file, 1, path[0])
    for path, value, edited in some(accepted, 3):
        file.write_text("".join(json.dumps(row) + "\n" for row in edited))
        report(folder, path, value)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("steps", float("inf")),
        ("test_accuracy", 2**63 - 1),
        ("distance", 1e300),
        ("validation_loss", None),
    ],
)
def test_numbers_with_which_no_study_goes_on(field, value, study):
    with pytest.raises(ValueError, match=rf"\b{field}\b"):
        check_record({**rows_of(study)[1][0], field: value})


def test_metrics(trained, tmp_path, report, versions, some):
    run = shutil.copytree(trained, tmp_path / "run")
    file = run / "metrics.jsonl"
    before = file.read_text().splitlines()[:-1]
    line = json.loads(file.read_text().splitlines()[-1])
    line |= {"target/steps": 3, "target/seconds": 1.0}
    accepted = []
    for path, value, data in versions(line):
        file.write_text("\n".join([*before, json.dumps(data)]) + "\n")
        error = refusal(read_json_lines, file)
        if error is None:
            accepted.append((path, value, data))
        else:
            assert_damaged(error, file, len(before) + 1, path[0])
    for path, value, data in some(accepted, 3):
        file.write_text("\n".join([*before, json.dumps(data)]) + "\n")
        report(run, path, value)


@pytest.mark.parametrize("content", [DEEP, "null", '{"a": 1', "\ud800", '"text"'])
@pytest.mark.parametrize("name", ["metrics.jsonl", "results.jsonl"])
def test_lines_that_are_none(name, content, tmp_path):
    (tmp_path / name).write_bytes(f"{content}\n".encode("utf-8", "surrogatepass"))
    with troubled(str(tmp_path / name), NO_VALUE, "damaged"):
        read_json_lines(tmp_path / name) if name == "metrics.jsonl" else read_results(tmp_path)


def sealed(body):
    return {"seal": body, "sha256": hashlib.sha256(body.encode()).hexdigest()}


def test_seals(versions):
    """The editor may also have renewed the seal."""
    body = json.loads(
        Seal(12, {"a": "00"}, {"eval/accuracy": 0.5, "eval/loss": None}, 2, 1).to_json()["seal"]
    )
    bodies = [json.dumps(data) for _, _, data in versions(body)] + [DEEP, "null", "[]", ""]
    for data in (*map(sealed, bodies), None, [], {"seal": None}, {"seal": "{}", "sha256": None}):
        if refusal(_seal.read, data) is None:
            seal = _seal.read(data)
            assert all(isinstance(value, float) for value in seal.metrics.values())
            assert all(isinstance(value, str) for value in seal.sums.values())


def test_checkpoints_whose_seals_are_hostile(trained, small, tmp_path, lbopt):
    run = shutil.copytree(trained, tmp_path / "run")
    newest, next_one = sorted((run / "checkpoints").iterdir(), key=lambda folder: int(folder.name))[
        -2:
    ][::-1]
    file = newest / "seal" / "metadata"
    body = json.loads(json.loads(file.read_text())["seal"])
    file.write_text(json.dumps(sealed(json.dumps({**body, "metrics": {"eval/accuracy": "high"}}))))
    (next_one / "seal" / "metadata").write_text(DEEP)
    code, _, err = lbopt("evaluate", *small, f"--workdir={run}")
    assert (code, err.count("Traceback")) == (0, 0) or (code, err.count("\n")) == (3, 1), err
    assert "metrics[...]" in err


@pytest.mark.parametrize(
    "line", ["3", "{}", DEEP, '{"metadata": null}', '{"metadata": {"step": null}}', "x", "\ud800"]
)
def test_mllog(line, tmp_path):
    (tmp_path / "mllog.txt").write_bytes(f":::MLLOG {line}}}\n".encode("utf-8", "surrogatepass"))
    with troubled(str(tmp_path / "mllog.txt"), NO_VALUE, "damaged"):
        MlperfLog(tmp_path, {}, lambda step: 0.0, 4)


@pytest.mark.parametrize(
    "content", ["null", "[]", DEEP, "{}", '{"renewed": null}', '{"renewed": "x"}', "\x00", "3"]
)
def test_leases(content, tmp_path):
    (tmp_path / ".lease.json").write_text(content)
    assert not _bucket.is_folder_held(tmp_path)


def test_stores(tmp_path, versions):
    import numpy as np

    with StoreWriter(tmp_path / "store", ("a", "b"), "letters") as writer:
        writer.append(Document(np.array([0, 1, 0], np.int32), np.array([0])))
    file = tmp_path / "store" / "store.json"
    texts = [json.dumps(data) for _, _, data in versions(json.loads(file.read_text()))]
    for text in (*texts, "null", "[]", DEEP, '{"format": [1]}'):
        file.write_text(text)
        refusal(open_store, tmp_path / "store")


@pytest.mark.parametrize("model", ["null", "[]", DEEP, '{"activation": []}', "\x00"])
def test_what_an_export_says_of_its_model(model):
    with refused("init_from", "x", "damaged"):
        _initial._exported_model(model, "x")


@pytest.mark.parametrize(
    ("content", "field"),
    [
        ("null", "workdir"),
        (DEEP, "workdir"),
        ('{"config": null}', "workdir"),
        ('{"config": {"arms": 3}}', "workdir"),
        ('{"config": {}}', "{file}: config"),
    ],
)
def test_the_config_of_another_shard(content, field, tmp_path, monkeypatch):
    monkeypatch.setattr(_bucket_shards, "bucket_path", lambda named: tmp_path)
    file = tmp_path / "shards" / "1-of-2" / "config.json"
    file.parent.mkdir(parents=True)
    file.write_text(content)
    others = BucketShards("gs://bucket/study", tmp_path / "mirror")
    with troubled(field.format(file=file), NO_VALUE, "damaged") as caught:
        others.refuse_others(None, lambda saved: [str(saved["config"]["name"])])
    assert "config.json" in str(caught.value)


def test_a_study_goes_on_only_where_its_lines_are_ours(configs, study, tmp_path, refusing):
    """A `weight_decay` of null or a list of accuracies would mislead the search."""
    from lbopt.cli import load_config
    from lbopt.config import SweepConfig, config_to_json

    flag = f"{configs / 'sweeps' / 'digits_limit.py'}:smoke"
    config = load_config(flag, [], SweepConfig)
    folder = tmp_path / "new"
    with open_workdir(folder, "sweep", config_to_json(config), lambda saved: []):
        pass
    _, (_, search) = rows_of(study)
    for field, value in {
        "validation_accuracy": [0.5],
        "weight_decay": None,
        "curve": "flat",
        "diverged": {},
    }.items():
        (folder / "results.jsonl").write_text(
            json.dumps({**search, "study": config.name, field: value}) + "\n"
        )
        flags = (f"--config={flag}", "--config.num_workers=1", f"--workdir={folder}")
        with troubled(str(folder / "results.jsonl"), NO_VALUE, "damaged") as caught:
            refusing("sweep", *flags, lines=None)
        assert {"1", field} <= names_in(caught)  # the line and its field
