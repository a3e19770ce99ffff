"""Flags, config fields, variables and functions that take a path, given the address of a bucket.

Each one uses the bucket, or refuses the address before it reads or writes anything; none takes it
for a folder called `gs:`. The tables come from the parsers, the dataclasses and the signatures, so
a new flag, field or function is tested too or must be listed here.
"""

import ast
import contextlib
import dataclasses
import errno
import functools
import importlib
import inspect
import operator
import os
import pathlib
import re
import runpy
import subprocess
import typing
from unittest import mock

import hostile
import jax
import memory_buckets
import numpy as np
import pytest
from refusal import ANY, names_in, refused, troubled

import lbopt as package
import lbopt.config as config_package
from lbopt import paths
from lbopt.cli import _train, call_get_config
from lbopt.config import DataConfig, TrainConfig, config_from_json
from lbopt.config._data import check_data
from lbopt.data.from_config import _text, load_source
from lbopt.data.text import _pieces
from lbopt.errors import NO_VALUE, EnvironmentProblem, UserError
from lbopt.interchange import save_safetensors
from lbopt.job import _secret
from lbopt.recipes import _initial
from lbopt.workdir import _bucket, _trackers, read_config

ADDRESSES = [
    "gs:/bucket/run",
    str(pathlib.Path("gs://bucket/run")),
    "gs:bucket/run",
    "gs:",
    "s3:",
    "s3://bucket/run",
    "GS://bucket/run",
    "file:///tmp/run",
    "https://host/run",
    "hf://owner/name",
    "/home/me/gs:/bucket",
    "./s3:/bucket",
]
BUCKET = "gs://bucket/run"
FLAGS_OF_BUCKETS = {
    "export": {"output"},
    "plan": {"output"},
    "prepare text": {"folder", "vocab"},
}
"""Flags that take such an address; so do workdirs, see tests/train/test_bucket.py."""
FIELDS_OF_PATHS = ["config.data.data_dir", "config.data.vocab_file", "config.data.path"]
FIELDS_OF_PATHS += ["config.init_from"]
"""Fields that take a path; each takes the address of a bucket."""
FUNCTIONS_OF_BUCKETS = {
    ("lbopt.data._places.readable_store", "data_dir"),
    ("lbopt.data._places.readable_ptb", "data_dir"),
    ("lbopt.data._records.TfdsFolder", "data_dir"),
    ("lbopt.data.own._load.load_arrays", "path"),
    ("lbopt.data.prepare._token_stores.Corpus", "data_dir"),
    ("lbopt.data.prepare._token_stores.Corpus", "folder"),
    ("lbopt.data.squad._examples.read_json", "path"),
    ("lbopt.data.prepare._running_text.folder_corpus", "folder"),
    ("lbopt.data.text._corpora.folder_documents", "folder"),
    ("lbopt.data.text._corpora.text_files", "folder"),
    ("lbopt.data.text._ptb.missing_ptb_files", "folder"),
    ("lbopt.data.text._ptb.load_ptb", "folder"),
    ("lbopt.data.text._tokens.open_store", "folder"),
    ("lbopt.data.text._vocabulary.read_vocabulary", "path"),
    ("lbopt.data.text._vocabulary.decide_normalization", "path"),
    ("lbopt.data.text._vocabulary.stated_normalization", "vocabulary"),
    ("lbopt.data.text._wordpiece.load_wordpiece", "path"),
    ("lbopt.interchange._folders.require_new_folder", "path"),
    ("lbopt.interchange._folders.new_folder", "path"),
    ("lbopt.interchange._huggingface.load_huggingface", "directory"),
    ("lbopt.interchange._huggingface.save_huggingface", "directory"),
    ("lbopt.interchange._native.save_safetensors", "file"),
    ("lbopt.interchange._native.load_safetensors", "file"),
    ("lbopt.interchange._native.read_safetensors_metadata", "file"),
}
"""Functions that use the bucket, and their arguments. All others refuse its address."""
NO_ACCESS = {
    ("lbopt.api._folder.Folder", "workdir"),
    ("lbopt.api._sweep.run_sweep", "workdir"),
    ("lbopt.api._training.run_training", "workdir"),
    ("lbopt.data._records.data_dir_or_bucket", "data_dir"),
    ("lbopt.data.prepare._running_text.folder_origin", "folder"),
    ("lbopt.workdir._bucket.local_workdir", "workdir"),
}
"""Functions that take the address and do not use the client that these tests replace."""
VARIABLES = {
    "LBOPT_BUCKET_CACHE",
    "LBOPT_JOB_SECRET_FILE",
    "TFDS_DATA_DIR",
    "WANDB_DIR",
    "XDG_CACHE_HOME",
    "XDG_CONFIG_HOME",
}
"""Environment variables with a path."""
LIKE_A_PLACE = re.compile(r"(.*_)?(path|dir|directory|file|folder|output)|init_from")
NO_PATHS = {
    "check": ("topology", "devices", "workers", "memory"),
    "config": ("json",),
    "critical": ("checkpoint", "factors", "examples", "tokens", "rule", "tolerance"),
    "evaluate": ("checkpoint",),
    "export": ("checkpoint", "format"),
    "plan": ("topology", "compare", "breakdown", "evaluation"),
    "prepare text": (
        *("for", "lowercase", "max_damaged_records", "name", "preset", "tfds", "vocab_size"),
    ),
    "recipes": ("filter", "json"),
    "scale": ("batch", "rule", "duration", "noise_scale"),
    "suggest": ("batch", "steps"),
    "sweep": ("accept", "checksum", "shard"),
    "train": ("accept", "checksum", "profile"),
}
"""Flags that take no path."""
OF_A_JOB = {
    "coordinator_address",
    "coordinator_bind_address",
    "num_processes",
    "process_id",
    "start_timeout_s",
    "hang_timeout_s",
}
FREE_TEXT = {
    "config.name",
    "config.model.batch_norm_scope",  # of other models
    "config.aggregator.anchor",  # of other aggregators
    "config.data.builder",
    "config.data.train_split",
    "config.data.validation_split",
    "config.data.test_split",
    *(
        f"config.{phase}optimizer.{mask}_{change}"  # regular expressions
        for phase in ("", "phase2.")
        for mask in ("weight_decay", "trust_ratio")
        for change in ("exclude", "include")
    ),
    *(
        f"config.about.{field}"
        for field in ("paper", "published_result", "hardware", "time", "topology", "note")
    ),
}
"""Fields that take any text; the name of a data set is looked up in a folder, by a pattern."""
FOR_MESSAGES = {("load_ptb", "data_dir"), ("prepare_command", "data_dir"), ("hint", "path")}
NOT_OPENED = {
    ("ArraysConfig", "path"),  # a field of the config
    ("ImageFolderConfig", "path"),
    ("is_of_user", "file"),  # the file of an imported module
    ("make_problem", "init_from"),  # a field of the config
    ("naming_errors", "file"),
    ("own_files", "folder"),  # recorded by a run
    ("place_of_data", "folder"),
    ("read_data", "folder"),
    ("split_row", "folder"),  # recorded by a run
    ("source_of", "path"),  # of an operation in a program
}
"""Arguments of functions that are named like a path, and open none."""


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    """Work in an empty folder, and check that it stays empty."""
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    assert list(tmp_path.iterdir()) == []


COMMANDS = list(hostile.commands())


@pytest.mark.parametrize(
    ("words", "flags", "required"), COMMANDS, ids=[" ".join(row[0]) for row in COMMANDS]
)
def test_flags(words, flags, required, configs, refusing):
    given = {
        "config": f"{configs / 'digits_cnn.py'}:smoke",
        "format": "safetensors",
        "images": "pictures",
        "workdir": "run",
        "output": "new",
        "name": "x",
        "batch": "128",
        "rule": "sqrt",
    }
    tried = set(flags) - set(NO_PATHS.get(" ".join(words), ())) - OF_A_JOB
    for flag in tried:
        for address in ADDRESSES:
            others = [f"--{name}={given[name]}" for name in required if name != flag]
            with refused(f"--{flag}", address, "value"):
                refusing(*words, f"--{flag}={address}", *others)

        if flag in ("workdir", "other", "study", "target_study", "pilot"):
            continue
        takes = flag in FLAGS_OF_BUCKETS.get(" ".join(words), ())
        expected = troubled if takes else refused
        with (
            memory_buckets.forbidding() as client,
            expected(f"--{flag}", BUCKET, "resource" if takes else "value"),
        ):
            refusing(*words, f"--{flag}={BUCKET}", *others)
        assert bool(client.method_calls) == takes


def texts(node, prefix="config"):
    """Yield (name, dataclass, field) of every field of a config that may be a string.

    A group that is None is replaced by its defaults.
    """
    hints = typing.get_type_hints(type(node))
    for field in dataclasses.fields(node):
        name = f"{prefix}.{field.name}"
        kinds = (hints[field.name], *typing.get_args(hints[field.name]))
        for kind in filter(dataclasses.is_dataclass, kinds):
            if getattr(node, field.name) is None:
                setattr(node, field.name, kind())
            yield from texts(getattr(node, field.name), name)
        if str in kinds:
            yield name, node, field.name


@pytest.mark.parametrize("address", ["gs:/bucket/run", "s3://bucket/run", "gs:", BUCKET])
def test_fields(address):
    config = TrainConfig(num_steps=8)
    paths_of_config = []
    for name, node, field in texts(config):
        before = getattr(node, field)
        phase2 = config.phase2
        growing = config.batch_schedule
        given = (address,) if isinstance(before, tuple) else address
        setattr(node, field, given)
        config.phase2 = phase2 if name.startswith("config.phase2") else None
        config.batch_schedule = growing if name.startswith("config.batch_schedule") else None
        if name in FIELDS_OF_PATHS and address == BUCKET:
            paths_of_config.append(name)  # see test_fields_use_the_bucket
        elif name not in FREE_TEXT:
            with refused(name, given) as caught:
                config.validate()
            if re.search("give a (path|folder)", caught.value.reason):
                paths_of_config.append(name)
        setattr(node, field, before)
        config.phase2 = phase2
        config.batch_schedule = growing

    assert paths_of_config == FIELDS_OF_PATHS


def test_every_field_named_like_a_place_is_in_the_table():
    """Also those that are no strings, and those of studies."""
    found = set()
    for file in pathlib.Path(config_package.__file__).parent.glob("_[a-z]*.py"):
        for kind in vars(importlib.import_module(f"lbopt.config.{file.stem}")).values():
            if isinstance(kind, type) and dataclasses.is_dataclass(kind):
                names = [field.name for field in dataclasses.fields(kind)]
                found |= {(kind, name) for name in names if LIKE_A_PLACE.fullmatch(name)}
    owners = {"data": DataConfig, "config": TrainConfig}
    listed = {tuple(name.split(".")[-2:]) for name in FIELDS_OF_PATHS}
    assert found == {(owners[owner], name) for owner, name in listed}


@pytest.mark.parametrize(
    ("field", "config"),
    [
        ("data.path", DataConfig("arrays", path=BUCKET)),
        ("data.path", DataConfig("image_folder", path=BUCKET)),
        ("data.data_dir", DataConfig("images", builder="x", data_dir=BUCKET)),
        ("data.data_dir", DataConfig("text_mlm", builder="x", data_dir=BUCKET)),
        ("data.data_dir", DataConfig("ptb", data_dir=BUCKET)),
        ("data.vocab_file", DataConfig("squad", builder="x", vocab_file=BUCKET)),
    ],
    ids=lambda value: getattr(value, "name", value),
)
def test_fields_use_the_bucket(field, config):
    check_data(config)
    with memory_buckets.forbidding(), troubled(field, ANY, "resource") as caught:
        load_source(config)
    assert caught.value.value.startswith(BUCKET)


def test_initial_values_use_the_bucket():
    TrainConfig(num_steps=8, init_from=BUCKET).validate()
    with memory_buckets.forbidding(), troubled("init_from", BUCKET, "resource"):
        _initial.read(BUCKET, TrainConfig().model)


@pytest.mark.parametrize(
    "field", ["train.data.data_dir", "train.init_from", "arms[0].data.data_dir"]
)
def test_fields_of_a_study(field, configs):
    config = call_get_config(f"{configs / 'sweeps' / 'digits_limit.py'}:smoke")
    config.arms[0].data = DataConfig()
    owner, _, last = field.rpartition(".")
    root = config.arms[0] if "arms" in owner else config
    setattr(operator.attrgetter(owner.removeprefix("arms[0]."))(root), last, "gs:/bucket/run")
    with refused(f"config.{field}", "gs:/bucket/run"):
        config.validate()


def functions():
    """Yield (function, argument) for each path from outside, found by annotation and name."""
    root = pathlib.Path(package.__file__).parent
    for file in sorted(root.rglob("*.py")):
        module = ".".join(("lbopt", *file.relative_to(root).with_suffix("").parts))

        for node in ast.parse(file.read_text()).body:
            inits = [
                part
                for part in getattr(node, "body", ())
                if getattr(part, "name", "") == "__init__"
            ]

            for function in [node] if isinstance(node, ast.FunctionDef) else inits:
                for argument in (*function.args.args, *function.args.kwonlyargs):
                    kind = ast.unparse(argument.annotation) if argument.annotation else ""
                    takes = (
                        "GivenPath" in kind
                        or "PathLike" in kind
                        or (LIKE_A_PLACE.fullmatch(argument.arg) and kind.startswith("str"))
                    )
                    known = (
                        module in ("lbopt.paths", "lbopt._regular")
                        or (node.name, argument.arg) in FOR_MESSAGES | NOT_OPENED
                    )

                    if takes and not known and not node.name.startswith("_"):
                        yield f"{module}.{node.name}", argument.arg


def enter(made):
    with made if hasattr(made, "__enter__") else contextlib.nullcontext():
        pass


FUNCTIONS = list(functions())


@pytest.mark.parametrize(("name", "argument"), FUNCTIONS, ids=["-".join(row) for row in FUNCTIONS])
def test_functions(name, argument):
    """`pathlib` turns gs://bucket/run into `gs:/bucket/run`."""
    module, _, last = name.rpartition(".")
    function = getattr(importlib.import_module(module), last)
    empty = [
        one.name
        for one in inspect.signature(function).parameters.values()
        if one.default is inspect.Parameter.empty
    ]
    stands = {
        "name": "x",
        "builder": "x",
        **{one: mock.MagicMock() for one in empty if one not in ("name", "builder")},
    }
    given = {one: stands[one] for one in empty}
    for address in (pathlib.Path("gs://bucket/run"), "s3://bucket/run"):
        with pytest.raises(UserError) as caught:
            enter(function(**{**given, argument: address}))
        assert caught.value.field is not None
        assert str(caught.value.value) == str(address)

    if (name, argument) in NO_ACCESS:
        return
    takes = (name, argument) in FUNCTIONS_OF_BUCKETS
    with memory_buckets.forbidding() as client:
        with pytest.raises(EnvironmentProblem if takes else UserError) as caught:
            enter(function(**{**given, argument: BUCKET}))
        assert caught.value.field is not None
        assert str(caught.value.value).startswith(BUCKET)
        assert bool(client.method_calls) == takes


def test_there_are_functions_that_take_paths():
    assert {
        ("lbopt.interchange._huggingface.load_huggingface", "directory"),
        ("lbopt.workdir._bucket.local_workdir", "workdir"),
    } < set(FUNCTIONS)
    assert set(FUNCTIONS) > FUNCTIONS_OF_BUCKETS | NO_ACCESS
    assert len(FUNCTIONS) > 20


def test_there_are_no_other_variables_with_paths():
    """JAX's variables are checked in the config of JAX, by the names of its fields."""
    pattern = re.compile(r"""["']([A-Z0-9]+_[A-Z_]*(?:DIR|FILE|FOLDER|HOME|CACHE|PATH))["']""")
    root = pathlib.Path(package.__file__).parent
    found = {name for file in root.rglob("*.py") for name in pattern.findall(file.read_text())}
    assert found == VARIABLES


def test_variables(refusing, monkeypatch):
    """JAX would also create the folder."""
    monkeypatch.setenv("TFDS_DATA_DIR", "gs:/bucket/run")
    with refused("TFDS_DATA_DIR", "gs:/bucket/run", "value"):
        refusing("prepare", "ptb")
    monkeypatch.setenv("TFDS_DATA_DIR", BUCKET)
    for name in ("ptb", "mnist", "generated_images"):  # written only on this machine
        with refused("TFDS_DATA_DIR", BUCKET, "value"):
            refusing("prepare", name)
    with memory_buckets.forbidding(), troubled("TFDS_DATA_DIR", f"{BUCKET}/ptb", "resource"):
        load_source(DataConfig("ptb"))
    monkeypatch.setenv("WANDB_DIR", BUCKET)
    with refused("WANDB_DIR", BUCKET, "value"):
        _trackers._WandbRun(pathlib.Path("run"), {}, None)
    monkeypatch.setenv("LBOPT_BUCKET_CACHE", BUCKET)
    with refused("LBOPT_BUCKET_CACHE", BUCKET, "value"):
        paths.readable(BUCKET, "path")

    before = jax.config.values["jax_compilation_cache_dir"]
    jax.config.update("jax_compilation_cache_dir", "gs:/bucket/run")
    try:
        with troubled("JAX_COMPILATION_CACHE_DIR", "gs:/bucket/run", "value"):
            refusing("doctor")
    finally:
        jax.config.update("jax_compilation_cache_dir", before)


def test_folders_of_the_user(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    for given in ("gs:/bucket/run", "s3://bucket", "relative", ""):
        found = paths.of_user({"XDG_CACHE_HOME": given}, "XDG_CACHE_HOME", ".cache")
        assert found == tmp_path / ".cache"
    monkeypatch.setattr(paths.os.path, "expanduser", lambda path: path)
    with pytest.raises(FileNotFoundError):
        paths.of_user({}, "XDG_CACHE_HOME", ".cache")
    with troubled(ANY, ANY, "resource"):
        _secret.find({}, {})
    for given in ("gs:/secret", BUCKET):
        with refused("LBOPT_JOB_SECRET_FILE", given):
            _secret.find({}, {"LBOPT_JOB_SECRET_FILE": given})


def test_what_is_no_address_is_taken(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    for path in ("runs/12:30", "a:b/c", "gs/run/", "recipe.py:row", "/x/batch:8/", "."):
        assert paths.local(path, "--workdir") == pathlib.Path(path)
    assert paths.local("~/run/", "--workdir") == tmp_path / "run"
    twice = paths.local(paths.local("./~/run", "--workdir"), "--workdir")
    assert twice == pathlib.Path.cwd() / "~" / "run"
    assert paths.local("n" * 255 + f"/{'d' * 31}" * 120, "--workdir").parts[-1] == "d" * 31
    assert paths.local_or_bucket("gs://bucket/run//", "--workdir") == "gs://bucket/run"


@pytest.mark.parametrize(
    ("path", "named"),
    [
        ("d/" * 600, "folders"),
        ("n" * 256, "bytes"),
        ("a/" + "\u00e9" * 128, "bytes"),  # in bytes
        (("n" * 250 + "/") * 17, "bytes"),
        ("~nobody-here/run", "home"),
        ("a\0b", "null"),
    ],
)
def test_paths_that_no_system_takes_are_refused(path, named):
    with refused("--workdir", path, "value") as caught:
        paths.local(path, "--workdir")
    assert named in names_in(caught)


@pytest.mark.parametrize(
    "path",
    [
        "gs://bucket/run[1]",  # Orbax would take it for a pattern
        "gs://bucket/run*",
        "gs://bucket//run",
        "gs://bucket/./run",
        "gs://bucket/..",
    ],
)
def test_addresses_that_name_no_folder_of_a_bucket_are_refused(path):
    with refused("--workdir", path):
        paths.local_or_bucket(path, "--workdir")


@pytest.mark.parametrize("command", ["train", "recipes", "plan", "prepare"])
def test_a_folder_that_may_not_be_entered(command, refusing, monkeypatch, configs):
    """The error is planted, because root may enter every folder."""

    def refuse(path, **_):
        if "locked" in str(path):
            met.append(str(path))
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return stat(path, **_)

    met = []
    stat = pathlib.Path.stat
    monkeypatch.setattr(pathlib.Path, "stat", refuse)
    flags = {"recipes": ["--configs=locked/a"], "prepare": ["ptb", "--data_dir=locked/a"]}
    flags["train"] = [f"--config={configs / 'digits_cnn.py'}:smoke", "--workdir=locked/a"]
    with pytest.raises(EnvironmentProblem) as caught:
        refusing(command, *flags.get(command, ["--config=locked/a.py"]))
    assert (caught.value.field, caught.value.code) == (met[-1], "resource")
    assert os.strerror(errno.EACCES) in caught.value.reason


@pytest.mark.parametrize(
    ("error", "field"),
    [
        (MemoryError("std::bad_alloc"), "memory"),
        (
            jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 9 B.\nMore"),
            "device memory",
        ),
    ],
)
def test_memory_that_does_not_suffice_is_one_line(error, field, refusing, monkeypatch, configs):
    monkeypatch.setattr(_train, "run", mock.Mock(side_effect=error))
    with troubled(field, NO_VALUE, "resource") as caught:
        refusing("train", f"--config={configs / 'digits_cnn.py'}:smoke", "--workdir=run")
    assert str(error).splitlines()[0] in str(caught.value)


def test_what_a_link_leads_to_is_looked_at_and_left_as_it_was(tmp_path_factory):
    folder = tmp_path_factory.mktemp("places")
    (folder / "link").symlink_to("missing")
    assert paths.writable(folder / "link", "--output") == folder / "link"
    assert [entry.name for entry in folder.iterdir()] == ["link"]


def test_files_for_folders_and_folders_for_files(refusing, tmp_path_factory, configs):
    """A file in a missing folder is refused too."""
    folder = tmp_path_factory.mktemp("places")
    (folder / "file").write_text("a file")
    config = f"--config={configs / 'digits_cnn.py'}:smoke"
    text = ["prepare", "text", "--name=x", f"--data_dir={folder}"]

    for code, flags in (
        ("resource", ["plan", config, f"--output={folder}"]),
        ("resource", ["plan", config, f"--output={folder / 'missing' / 'plan.json'}"]),
        (
            "exists",
            ["export", "--workdir=run", "--format=safetensors", f"--output={folder / 'file'}"],
        ),
        ("missing", [*text, f"--folder={folder / 'file'}"]),
        ("damaged", [*text, f"--folder={folder}", f"--vocab={folder}"]),
        ("missing", ["recipes", f"--configs={folder / 'file'}"]),
        ("missing", ["recipes", f"--config={folder}"]),
    ):
        flag, _, given = flags[-1].partition("=")
        with refused(flag, given, code):
            refusing(*flags)

    assert [entry.name for entry in folder.iterdir()] == ["file"]


def test_a_run_starts_from_a_workdir_in_a_bucket(trained, tmp_path_factory, monkeypatch):
    """Orbax reads the workdir from a folder here; tests/train/test_bucket.py tests the clients."""
    model = config_from_json(TrainConfig, read_config(trained)["config"]).model
    expected = _initial.read(str(trained), model)
    learned = tmp_path_factory.mktemp("learned")
    (learned / "vocab.txt").write_text("\n".join(_pieces.SPECIAL_TOKENS))
    exported = tmp_path_factory.mktemp("exported")
    save_safetensors(exported / "model.safetensors", expected)

    monkeypatch.setattr(_bucket, "bucket_path", {BUCKET: trained}.__getitem__)
    with memory_buckets.serving() as buckets:
        buckets.fill(BUCKET, trained)
        buckets.fill("gs://bucket/bert", learned)
        buckets.fill("gs://bucket/exported", exported)
        for place in (BUCKET, "gs://bucket/exported/model.safetensors"):
            jax.tree.map(np.testing.assert_array_equal, _initial.read(place, model), expected)
        assert [name for name in buckets.copied if name.startswith("/bucket/run/")] == []
        words = _text._vocabulary(
            DataConfig(name="squad", builder="squad"),
            functools.partial(_initial.opened_folder, "gs://bucket/bert"),
        )
        assert words.pieces == tuple(_pieces.SPECIAL_TOKENS)
        with refused("init_from", "gs://bucket/bert", "missing"):
            _initial.read("gs://bucket/bert", model)


@pytest.mark.process
def test_scripts(capsys):
    root = pathlib.Path(package.__file__).parents[1]
    bench = runpy.run_path(str(root / "scripts" / "benchmarks" / "run.py"))["main"]
    for place in ("gs:/bucket/run.json", "missing/run.json"):
        assert bench(["step", f"--json={place}"]) == 2
        err = capsys.readouterr().err
        assert re.fullmatch(f"scripts/bench: --json = '{place}': .+\n", err)
    done = subprocess.run(
        [root / "scripts" / "studies", "gs://bucket/run"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert re.fullmatch("FOLDER = gs://bucket/run: .+\n", done.stderr)
