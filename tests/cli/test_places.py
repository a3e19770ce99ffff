"""Flags, config fields and functions that take a path refuse addresses before they write.

The tables come from the parsers, the dataclasses and the signatures, so a new flag, field or
function is tested too or must be listed here.
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
import numpy as np
import pytest
from refusal import ANY, names_in, refused, troubled

import lbopt as package
from lbopt import paths
from lbopt.cli import _train, call_get_config
from lbopt.config import DataConfig, TrainConfig, config_from_json
from lbopt.data.from_config import _text
from lbopt.data.text import _pieces
from lbopt.errors import NO_VALUE, EnvironmentProblem, UserError
from lbopt.job import _secret
from lbopt.recipes import _initial
from lbopt.workdir import _bucket, read_config

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
NO_PATHS = {
    "evaluate": ("checkpoint",),
    "export": ("checkpoint", "format"),
    "plan": ("topology", "compare", "breakdown", "evaluation"),
    "prepare text": ("lowercase", "name", "tfds", "vocab_size", "max_damaged_records"),
    "sweep": ("accept", "checksum", "shard"),
    "train": ("accept", "checksum"),
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
FOR_MESSAGES = {("load_ptb", "data_dir"), ("prepare_command", "data_dir")}


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
        "workdir": "run",
        "output": "new",
        "name": "x",
    }
    tried = set(flags) - set(NO_PATHS.get(" ".join(words), ())) - OF_A_JOB
    for flag in tried:
        for address in ADDRESSES:
            others = [f"--{name}={given[name]}" for name in required if name != flag]
            with refused(f"--{flag}", address, "value"):
                refusing(*words, f"--{flag}={address}", *others)


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


@pytest.mark.parametrize("address", ["gs:/bucket/run", "s3://bucket/run", "gs:"])
def test_fields(address):
    config = TrainConfig(num_steps=8)
    paths_of_config = []
    for name, node, field in texts(config):
        before = getattr(node, field)
        phase2 = config.phase2
        given = (address,) if isinstance(before, tuple) else address
        setattr(node, field, given)
        config.phase2 = phase2 if name.startswith("config.phase2") else None
        if name not in FREE_TEXT:
            with refused(name, given) as caught:
                config.validate()
            if re.search("give a (path|folder)", caught.value.reason):
                paths_of_config.append(name)
        setattr(node, field, before)
        config.phase2 = phase2

    assert paths_of_config == [
        "config.data.data_dir",
        "config.data.vocab_file",
        "config.data.path",
        "config.init_from",
    ]


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
                        or (argument.arg.endswith("_dir") and "str" in kind)
                    )
                    known = (
                        module in ("lbopt.paths", "lbopt._regular")
                        or (node.name, argument.arg) in FOR_MESSAGES
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
    for address in (pathlib.Path("gs://bucket/run"), "s3://bucket/run"):
        with pytest.raises(UserError) as caught:
            enter(function(**{**{one: stands[one] for one in empty}, argument: address}))
        assert caught.value.field is not None
        assert str(caught.value.value) == str(address)


def test_there_are_functions_that_take_paths():
    assert {
        ("lbopt.interchange._huggingface.load_huggingface", "directory"),
        ("lbopt.workdir._bucket.local_workdir", "workdir"),
    } < set(FUNCTIONS)
    assert len(FUNCTIONS) > 20


def test_variables(refusing, monkeypatch):
    """JAX would also create the folder."""
    monkeypatch.setenv("TFDS_DATA_DIR", "gs:/bucket/run")
    with refused("TFDS_DATA_DIR", "gs:/bucket/run", "value"):
        refusing("prepare", "ptb")
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
    with refused("LBOPT_JOB_SECRET_FILE", "gs:/secret"):
        _secret.find({}, {"LBOPT_JOB_SECRET_FILE": "gs:/secret"})


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
    """The bucket is a folder here; tests/train/test_bucket.py tests the clients of buckets."""
    model = config_from_json(TrainConfig, read_config(trained)["config"]).model
    expected = _initial.read(str(trained), model)
    learned = tmp_path_factory.mktemp("learned")
    (learned / "vocab.txt").write_text("\n".join(_pieces.SPECIAL_TOKENS))
    places = {"gs://bucket/run": trained, "gs://bucket/bert": learned}
    monkeypatch.setattr(_bucket, "bucket_path", lambda address: places[address])
    jax.tree.map(np.testing.assert_array_equal, _initial.read("gs://bucket/run", model), expected)
    words = _text._vocabulary(
        DataConfig(name="squad", builder="squad"),
        functools.partial(_initial.opened_folder, "gs://bucket/bert"),
    )
    assert words.pieces == tuple(_pieces.SPECIAL_TOKENS)
    with refused("init_from", "gs://bucket/bert", "type"):
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
