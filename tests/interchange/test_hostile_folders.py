"""Folders made to hang a reader or fill its memory are refused quickly, in one line."""

import contextlib
import errno
import json
import os
import re
import resource
import signal
import struct
import time

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import lbopt
from lbopt.errors import EnvironmentProblem, UserError
from lbopt.interchange import _huggingface, load_safetensors
from lbopt.models import Bert, EfficientNet, ResNet

IMAGES = np.zeros((1, 64, 64, 3), np.float32)
TOKENS = {"input_ids": np.zeros((1, 4), np.int32)}
STAGES = EfficientNet().stages[:2]
NETWORKS = {
    "bert": (Bert(20, 2, 8, 2, 16, max_length=16), TOKENS),
    "answers": (Bert(20, 1, 8, 2, 16, max_length=16, head="question_answering"), TOKENS),
    "resnet": (ResNet((2, 1), (8, 16), stem_width=8, num_classes=5), IMAGES),
    "basic": (ResNet((1, 1), (8, 16), False, stem_width=8, num_classes=5), IMAGES),
    "efficientnet": (EfficientNet(0.25, 0.5, stages=STAGES, num_classes=5), IMAGES),
}
LONG = "x\n\x1b" * 10**5
DEEP = 10**5
TEXTS = ("", LONG, "hostile", "[1]", "NaN")
NUMBERS = (
    -1,
    0,
    1.5,
    10**6,
    10**9,
    2**31 - 1,
    2**63,
    -(2**63),
    10**400,
    1e-300,
    1e300,
    float("inf"),
    -float("inf"),
    float("nan"),
)
VALUES = (
    None,
    True,
    False,
    *TEXTS,
    *NUMBERS,
    [],
    {},
    [[]],
    [{}],
    {"x": []},
    [None],
    [LONG],
    [1] * 10**5,
    [4] * 10**5,
)
RATES = ("dropout", "drop_connect", "momentum")


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Return {name: folder}; tests must not change the folders."""
    root = tmp_path_factory.mktemp("saved")
    for name, (module, x) in NETWORKS.items():
        shapes = jax.eval_shape(
            lambda module=module, x=x: module.init(jax.random.key(0), x, train=False)
        )
        variables = jax.tree.map(lambda leaf: np.zeros(leaf.shape, np.float32), shapes)
        _huggingface.save_huggingface(root / name, module, variables, image_size=64)
    return {name: root / name for name in NETWORKS}


@pytest.fixture
def folder(saved, tmp_path):
    """Return a function name -> a copy to damage."""

    def copy(name="bert"):
        (tmp_path / "copy").mkdir()
        for file in saved[name].iterdir():
            (tmp_path / "copy" / file.name).write_bytes(file.read_bytes())
        return tmp_path / "copy"

    return copy


@contextlib.contextmanager
def bounded(seconds=10, megabytes=400):
    """Limit the time and memory of a test."""

    def give_up(*_):
        raise TimeoutError(f"it took more than {seconds} s")

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    before = signal.signal(signal.SIGALRM, give_up)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak < megabytes << 10


def refusal(read, *arguments):
    """Return the error of a refusal, or None if the folder is read."""
    try:
        with bounded():
            read(*arguments)
    except (UserError, EnvironmentProblem) as error:
        line = str(error)
        assert line.isprintable(), line[:2000]
        assert len(line) < 1500, line[:2000]
        return error
    return None


class Recorded(dict):
    """A config.json that records the fields that were read."""

    def __init__(self, fields):
        super().__init__(fields)
        self.asked = {"architectures", "model_type"}

    def get(self, name, default=None):
        self.asked.add(name)
        return super().get(name, default)


def fields_read(config):
    """Return the names of all fields that the family of a config reads."""
    recorded = Recorded(config)
    family = next(
        family
        for family in _huggingface.FAMILIES
        if family.architecture == config["architectures"][0]
    )
    list(family.layers(family.module(recorded), recorded))
    return sorted(recorded.asked | ({"num_labels"} if "id2label" in recorded.asked else set()))


def versions(config, field):
    """Yield configs with hostile values as a field, as the first and as all elements of a list."""
    given = config.get(field)
    if field == "num_labels":
        config = {name: value for name, value in config.items() if name != "id2label"}
    for value in VALUES:
        yield value, config | {field: value}
        if isinstance(given, list) and given:
            yield [value, *given[1:]], config | {field: [value, *given[1:]]}
            yield [value] * len(given), config | {field: [value] * len(given)}
    if isinstance(given, list):
        yield [], config | {field: [*given, *given] * 10**4}
    if field == "id2label":
        yield {}, config | {field: {str(number): "x" for number in range(10**5)}}


def is_harmless(field, value, given):
    """Return whether a value may be accepted: it is unchanged, or changes no shape."""
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if field.endswith("_eps"):
        return is_number and 0 < value <= 1000
    if any(word in field for word in RATES):
        return is_number and 0 <= value < 1
    if field == "depth_coefficient":
        return is_number and 0 < value <= given  # of one block, one is left
    if field == "depthwise_padding":
        return isinstance(value, list) and all(
            isinstance(number, int) and 0 <= number < 2 for number in value
        )
    return value == given or (given is None and value in (False, True))


@pytest.mark.everyday("basic", "answers")
@pytest.mark.parametrize("name", NETWORKS)
def test_every_field_of_config_json(name, folder):
    place = folder(name)
    file = place / "config.json"
    config = json.loads(file.read_text())
    known = fields_read(config)
    assert len(known) > 8
    began = time.monotonic()
    for field in known:
        for value, hostile in versions(config, field):
            file.write_text(json.dumps(hostile))
            error = refusal(lbopt.load_huggingface, place)
            if error is None:
                assert is_harmless(field, value, config.get(field)), (field, str(value)[:100])
            else:
                assert error.field.startswith(f"{place}"), error
                assert re.search(rf"\b{field}\b", str(error)), (field, error)
    assert time.monotonic() - began < 120


TOGETHER = {
    "layers of every kind": (
        "bert",
        {"num_hidden_layers": 10**9, "hidden_size": 2**30, "num_attention_heads": 2**30},
    ),
    "five thousand layers": ("answers", {"num_hidden_layers": 5000}),
    "stages": ("resnet", {"depths": [1] * 10**5, "hidden_sizes": [8] * 10**5}),
    "blocks": ("basic", {"depths": [2**31 - 1, 1]}),
    "scaled blocks": (
        "efficientnet",
        {"num_block_repeats": [2**31 - 1] * 2, "depth_coefficient": 1000},
    ),
    "scaled widths": (
        "efficientnet",
        {"out_channels": [2**31 - 1] * 2, "width_coefficient": 1000, "depth_divisor": 2**31 - 1},
    ),
    "stages of stages": (
        "efficientnet",
        {
            name: [1] * 10**5
            for name in (
                "kernel_sizes",
                "strides",
                "expand_ratios",
                "out_channels",
                "num_block_repeats",
            )
        },
    ),
    "strides": ("efficientnet", {"strides": [2] * 2}),
}


@pytest.mark.parametrize("case", TOGETHER)
def test_fields_together(case, folder):
    name, change = TOGETHER[case]
    place = folder(name)
    config = json.loads((place / "config.json").read_text()) | change
    (place / "config.json").write_text(json.dumps(config))
    error = refusal(lbopt.load_huggingface, place)
    assert (error is None) == (case == "strides"), error


def test_the_refusal_of_missing_layers(folder):
    place = folder()
    config = json.loads((place / "config.json").read_text())
    for count, missing in ((3, "16 of 62"), (10**9, "1000 or more")):
        (place / "config.json").write_text(json.dumps(config | {"num_hidden_layers": count}))
        error = refusal(lbopt.load_huggingface, place)
        assert (error.field, error.code) == (str(place), "missing")
        for text in ("bert.encoder.layer.", missing, f"num_hidden_layers = {count}"):
            assert text in error.reason


def replaced(name, make):
    """Return a function that replaces a file by something else."""

    def damage(place):
        (place / name).unlink(missing_ok=True)
        make(place / name)

    return damage


def config_of(text):
    return replaced(
        "config.json", lambda file: file.write_bytes(text.encode("utf-8", "surrogatepass"))
    )


def index_of(text):
    def damage(place):
        (place / "model.safetensors").rename(place / "whole.safetensors")
        (place / "model.safetensors.index.json").write_text(text)

    return damage


def index(*shards):
    return index_of(
        json.dumps({"weight_map": {f"{number}": name for number, name in enumerate(shards)}})
    )


def raw(header, data=b"", length=None):
    """Write a safetensors file with a given header."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    size = len(text) if length is None else length
    return replaced(
        "model.safetensors", lambda file: file.write_bytes(struct.pack("<Q", size) + text + data)
    )


def one(**change):
    return {"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4], **change}}


def of_shape(name, *shape):
    """Replace a tensor by zeros of a given shape that take no disk space."""

    def damage(place):
        arrays = load_file(place / "model.safetensors")
        header = {}
        end = 0
        for key, array in arrays.items():
            there = shape if key == name else array.shape
            size = 4 * int(np.prod(there, dtype=object))
            header[key] = {"dtype": "F32", "shape": there, "data_offsets": [end, end + size]}
            end += size
        text = json.dumps(header).encode()
        with open(place / "model.safetensors", "wb") as stream:
            stream.write(struct.pack("<Q", len(text)) + text)
            stream.truncate(8 + len(text) + end)

    return damage


def added(*tensors):
    """Add tensors by name."""

    def damage(place):
        arrays = load_file(place / "model.safetensors")
        arrays |= {name: np.zeros(8, np.float32) for name in tensors}
        save_file(arrays, place / "model.safetensors")

    return damage


def all_of(*steps):
    def damage(place):
        for step in steps:
            step(place)

    return damage


def larger(place):
    config = json.loads((place / "config.json").read_text())
    (place / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 2**31 - 1}))
    of_shape("bert.embeddings.position_embeddings.weight", 2**31 - 1, 8)(place)


WORDS = "bert.embeddings.word_embeddings.weight"
NORM = "bert.embeddings.LayerNorm"
MANY = {
    f"bert.{number}": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}
    for number in range(70000)
}
TWICE = (
    b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},'
    b'"a":{"dtype":"F32","shape":[1],"data_offsets":[4,8]}}'
)
SHARDS = all_of(
    index("whole.safetensors", "again.safetensors"),
    lambda place: os.link(place / "whole.safetensors", place / "again.safetensors"),
)
FOUR = b"\0" * 4
# Changes of model.safetensors, and the name in the refusal: a size, a field, or the safetensors
# library's word for the fault.
HEADERS = {
    "a header of 2^63 bytes": (raw(one(), FOUR, 2**63), str(2**63)),
    "a header of 2^64 - 1 bytes": (raw(one(), FOUR, 2**64 - 1), str(2**64 - 1)),
    "a header of 1 GB": (raw(one(), FOUR, 10**9), "1000000000"),
    "a header of holes": (
        all_of(
            raw(b"", b"", 1 << 40), lambda place: os.truncate(place / "model.safetensors", 1 << 41)
        ),
        str(1 << 40),
    ),
    "three bytes": (replaced("model.safetensors", lambda file: file.write_bytes(b"abc")), "of 3"),
    "nothing": (replaced("model.safetensors", lambda file: file.touch()), "of 0"),
    "a list": (raw(b"[]"), "got list"),
    "null": (raw(b"null"), "got null"),
    "nesting": (raw(b'{"a":' * DEEP), "64"),
    "closed nesting": (raw(b"[" * DEEP + b"]" * DEEP), "64"),
    "not UTF-8": (raw(b'{"\xff": 1}'), "not JSON"),
    "an unknown dtype": (raw(one(dtype="F99"), FOUR), "F99"),
    "a long dtype": (raw(one(dtype=LONG), FOUR), ""),
    "a dtype that is a list": (raw(one(dtype=["F32"]), FOUR), "a.dtype: "),
    "a shape that is null": (raw(one(shape=None), FOUR), "a.shape: "),
    "a negative shape": (raw(one(shape=[-1]), FOUR), "a.shape[0]: "),
    "a shape of 2^63": (raw(one(shape=[2**63]), FOUR), "a.shape[0]: "),
    "shapes that overflow": (raw(one(shape=[2**40, 2**40]), FOUR), "overflow"),
    "offsets past the end": (
        raw(one(shape=[2**28], data_offsets=[0, 2**30]), FOUR),
        "not fully covered",
    ),
    "offsets backwards": (raw(one(data_offsets=[4, 0]), FOUR), "invalid offset"),
    "offsets of text": (raw(one(data_offsets=["0", "4"]), FOUR), "a.data_offsets[0]: "),
    "one offset": (raw(one(data_offsets=[0]), FOUR), "a.data_offsets: "),
    "no offsets": (raw({"a": {"dtype": "F32", "shape": [1]}}, FOUR), "data_offsets"),
    "offsets that overlap": (
        raw({**one(), "b": one(data_offsets=[2, 6])["a"]}, b"\0" * 6),
        "invalid offset",
    ),
    "one place for two": (raw({**one(), "b": one()["a"]}, FOUR), "invalid offset"),
    "a hole": (raw({**one(), "b": one(data_offsets=[8, 12])["a"]}, b"\0" * 12), "invalid offset"),
    "a name twice": (raw(TWICE, b"\0" * 8), "invalid offset"),
    "metadata that is a list": (raw({"__metadata__": [1], **one()}, FOUR), "got list"),
    "metadata of numbers": (raw({"__metadata__": {"model": 1}, **one()}, FOUR), "model: "),
    "many tensors": (raw(MANY), "70000"),
}
SPECIAL_FILES = {
    "a FIFO": (os.mkfifo, "a FIFO"),
    "a device": (lambda file: file.symlink_to("/dev/zero"), "a device"),
    "a folder": (os.mkdir, os.strerror(errno.EISDIR)),
}
WEIGHT_MAP = "/model.safetensors.index.json: weight_map"
# Changes of the folder; field and kind of the refusal; names in it.
FOLDERS = {
    "nesting": (config_of("[" * DEEP), "/config.json", "damaged", "64"),
    "closed nesting": (config_of("[" * DEEP + "]" * DEEP), "/config.json", "damaged", "64"),
    "nesting in a field": (
        config_of('{"architectures":' * 1000 + "1" + "}" * 1000),
        "/config.json",
        "damaged",
        "64",
    ),
    "text": (config_of('"Bert"'), "/config.json", "damaged", "str"),
    "digits": (
        config_of(f'{{"vocab_size": {"1" * 5000}}}'),
        "/config.json",
        "damaged",
        "not JSON",
    ),
    "half a pair": (
        config_of('{"architectures": ["\ud800"]}'),
        "/config.json",
        "damaged",
        "not JSON",
    ),
    "half a pair in JSON": (
        config_of('{"architectures": ["\\ud800"]}'),
        "/config.json: architectures",
        "choice",
        "",
    ),
    "a large config": (
        replaced("config.json", lambda file: (file.touch(), os.truncate(file, 1 << 40))),
        "/config.json",
        "damaged",
        "67108864",
    ),
    "a loop of links": (
        replaced("config.json", lambda file: file.symlink_to(file)),
        None,
        "missing",
        "config.json",
    ),
    "an index of long names": (index("x" * 5000), WEIGHT_MAP, "damaged", ""),
    "an index of deep names": (index("x/" * 5000), WEIGHT_MAP, "damaged", ""),
    "an index of no names": (index(""), WEIGHT_MAP, "damaged", ""),
    "an index of zeros": (index("\0"), WEIGHT_MAP, "missing", ""),
    "an index of control characters": (index("\n\x1b[31m"), WEIGHT_MAP, "missing", ""),
    "an index of half a pair": (index("\ud800"), WEIGHT_MAP, "missing", ""),
    "an index of the folder above": (index(".."), WEIGHT_MAP, "damaged", ""),
    "an index of itself": (
        index("model.safetensors.index.json"),
        "/model.safetensors.index.json",
        "damaged",
        "",
    ),
    "an index of a list": (index_of('{"weight_map": []}'), WEIGHT_MAP, "damaged", ""),
    "an index of lists": (index_of('{"weight_map": {"a": ["b"]}}'), WEIGHT_MAP, "damaged", ""),
    "an index of nesting": (
        index_of('{"weight_map":' * DEEP),
        "/model.safetensors.index.json",
        "damaged",
        "64",
    ),
    "an index that is text": (
        index_of('"a"'),
        "/model.safetensors.index.json",
        "damaged",
        "str",
    ),
    "an index that is a FIFO": (
        all_of(index_of("{}"), replaced("model.safetensors.index.json", os.mkfifo)),
        "/model.safetensors.index.json",
        "resource",
        "a FIFO",
    ),
    "a shard that is a FIFO": (
        all_of(index("a"), lambda place: os.mkfifo(place / "a")),
        "/a",
        "resource",
        "a FIFO",
    ),
    "a tensor in two shards": (
        SHARDS,
        f"/whole.safetensors: {NORM}.bias",
        "conflict",
        "again.safetensors",
    ),
    "one tensor under two names": (
        added(f"{NORM}.gamma"),
        f"/model.safetensors: {NORM}.weight",
        "conflict",
        f"{NORM}.gamma",
    ),
    "long names": (added(LONG), "", "mismatch", "(1 tensors"),
    "a huge tensor of no bytes": (
        of_shape(WORDS, 0, 2**60),
        "/config.json: vocab_size",
        "mismatch",
        "",
    ),
    "a huge bias of no bytes": (
        of_shape(f"{NORM}.bias", 0, 2**60),
        f"/model.safetensors: shape of {NORM}.bias",
        "mismatch",
        "",
    ),
    "words without axes": (
        of_shape(WORDS),
        f"/model.safetensors: shape of {WORDS}",
        "mismatch",
        "",
    ),
    "a thousand axes": (
        of_shape(WORDS, *[20, 8], *[1] * 1000),
        f"/model.safetensors: shape of {WORDS}",
        "mismatch",
        "",
    ),
    "more than memory": (larger, "", "resource", "69 GB"),
}


@pytest.mark.parametrize("case", HEADERS)
def test_damaged_headers(case, folder):
    damage, named = HEADERS[case]
    place = folder()
    damage(place)
    file = place / "model.safetensors"
    for error in (refusal(lbopt.load_huggingface, place), refusal(load_safetensors, file)):
        assert isinstance(error, UserError)
        assert (error.field, error.code) == (str(file), "damaged")
        assert named in error.reason


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
@pytest.mark.parametrize("case", SPECIAL_FILES)
def test_special_files(case, name, folder):
    make, named = SPECIAL_FILES[case]
    place = folder()
    replaced(name, make)(place)
    errors = [refusal(lbopt.load_huggingface, place)]
    if name == "model.safetensors":
        errors.append(refusal(load_safetensors, place / name))
    for error in errors:
        assert isinstance(error, EnvironmentProblem)
        assert (error.field, error.code) == (str(place / name), "resource")
        assert named in error.reason


@pytest.mark.parametrize("case", FOLDERS)
def test_damaged_folders(case, folder, monkeypatch):
    damage, about, code, named = FOLDERS[case]
    monkeypatch.setattr(os, "sysconf", {"SC_PAGE_SIZE": 4096, "SC_PHYS_PAGES": 1 << 23}.__getitem__)
    place = folder()
    damage(place)
    error = refusal(lbopt.load_huggingface, place)
    assert (error.field, error.code) == ("directory" if about is None else f"{place}{about}", code)
    assert str(place) in str(error)
    assert named in error.reason


@pytest.mark.parametrize("place", ["x" * 5000, "x/" * 5000, "\0", "\ud800", "~nobody/x", ""])
def test_paths(place, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert refusal(lbopt.load_huggingface, place) is not None
    assert refusal(load_safetensors, place) is not None


INSIDE = {
    "an array inside of another": (["params/a", "params/a/b"], "params/a/b"),
    "parameters that are an array": (["params", "params/a"], "params/a"),
    "depth": (["params" + "/x" * 10**5], "params" + "/x" * 10**5),
}


@pytest.mark.parametrize("case", INSIDE)
def test_names_of_ours(case, tmp_path):
    keys, wrong = INSIDE[case]
    save_file(
        {key: np.zeros(1, np.float32) for key in keys}, tmp_path / "file", {"format": "lbopt"}
    )
    error = refusal(load_safetensors, tmp_path / "file")
    assert (error.field, error.value) == (f"{tmp_path / 'file'}: name of an array", wrong)


@pytest.mark.parametrize(
    ("dtype", "shape"), [("F8_E4M3", [4]), ("F32", [0, 2**63 - 1]), ("F32", [1] * 100)]
)
def test_arrays_that_numpy_has_not(dtype, shape, tmp_path):
    size = 0 if 0 in shape else 4
    tensor = {
        "params/a": {"dtype": dtype, "shape": shape, "data_offsets": [0, size]},
        "__metadata__": {"format": "lbopt"},
    }
    raw(tensor, b"\0" * size)(tmp_path)
    file = tmp_path / "model.safetensors"
    error = refusal(load_safetensors, file)
    assert (error.field, error.code) == (f"{file}: params/a", "type")
