"""The shipped ImageNet recipe, on a data set with imagenet2012's schema and damaged records."""

import dataclasses
import io
import json
import pathlib
import re

import jax
import numpy as np
import pytest
import tensorflow_datasets as tfds
from PIL import Image
from refusal import names_in, numbers_in, refused, run_refused, troubled
from tfds_sets import write, write_images
from watched_step import WatchedStep

from lbopt import losses
from lbopt.cli import _train, load_config, main
from lbopt.config import TrainConfig
from lbopt.data import train_iterator
from lbopt.data.from_config import _images
from lbopt.errors import EnvironmentProblem
from lbopt.models import from_linen
from lbopt.parallel import Step
from lbopt.recipes import build_run, make_network
from lbopt.train import Checkpoints

FILE = pathlib.Path(__file__).parents[2] / "configs" / "resnet50_lamb.py"
NUM_TRAIN = 30
NUM_VALIDATION = 21
SMALL = (
    "--config.model.size=18",
    "--config.model.width_coefficient=0.125",
    "--config.model.stem=space_to_depth",
    "--config.data.space_to_depth=True",
    "--config.model.dtype=float32",
    "--config.model.batch_norm_scope=global",
    "--config.data.image_size=32",
    "--config.global_batch_size=8",
    "--config.schedule.warmup_steps=2.0",
    "--config.num_steps=6",
    "--config.eval_global_batch_size=8",
    "--config.eval_every_epochs=0.8",
    "--config.log_every_steps=1",
    "--config.checkpoint.every_steps=2",
    "--config.checkpoint.keep=9",
    "--config.data.reader_threads=2",
)
"""Flags for a small run; loss, optimizer, scaling rule and preparation are the recipe's."""
BAD_TRAIN = {3, 17}
BAD_VALIDATION = {0, 20}


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory):
    """Return a folder with imagenet2012: JPEGs, one grey, one CMYK, four damaged."""
    folder = tmp_path_factory.mktemp("data")

    def split(count, seed, bad):
        files = []
        for number in range(count):
            mode = {5: "L", 6: "CMYK"}.get(number, "RGB")
            file = jpeg((40 + number, 60, seed + number), mode)
            damaged = number in bad
            file = file[: len(file) // 2] if damaged and number % 2 else file
            label = -1 if damaged and number % 2 == 0 else number * 37 % 1000
            files.append((file, label))
        return files

    splits = {
        "train": split(NUM_TRAIN, 0, BAD_TRAIN),
        "validation": split(NUM_VALIDATION, 100, BAD_VALIDATION),
    }
    write_images(folder, "imagenet2012", splits, 1000, version="5.1.0")
    return folder


def jpeg(what, mode):
    height, width, seed = what
    pixels = np.random.default_rng(seed).integers(0, 256, (6, 6, 3), dtype=np.uint8)
    stream = io.BytesIO()
    Image.fromarray(pixels).resize((width, height)).convert(mode).save(stream, "JPEG", quality=90)
    return stream.getvalue()


@pytest.fixture(scope="module")
def flags(data_dir):
    """Return a function (limit of damaged records, row) -> flags of the run."""
    return lambda limit=2, row="512": [
        f"--config={FILE}:{row}",
        *SMALL,
        f"--config.data.data_dir={data_dir}",
        f"--config.data.max_damaged_records={limit}",
    ]


@pytest.fixture(scope="module")
def run(flags):
    file, *overrides = flags()
    return build_run(load_config(file.removeprefix("--config="), overrides, TrainConfig))


class Killed(BaseException):
    """Ends a run the way a kill does."""


@pytest.fixture(scope="module")
def train(run, flags):
    """Return a function (workdir, step) -> exit code of a run with that step."""

    def start(workdir, step):
        with pytest.MonkeyPatch.context() as patch:
            changed = dataclasses.replace(run, train_step=step)
            patch.setattr(_train, "build_run", lambda config, **_: changed)
            return main(["train", *flags(), f"--workdir={workdir}"])

    return start


@pytest.fixture(scope="module")
def trained(run, train, tmp_path_factory):
    """Return the workdir of an undisturbed run."""
    workdir = tmp_path_factory.mktemp("straight") / "run"
    assert train(workdir, run.train_step) == 0
    return workdir


def lines(workdir):
    whole = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
    return [
        {name: value for name, value in line.items() if not name.startswith(("perf/", "data/"))}
        for line in whole
    ]


def restored(run, workdir):
    with Checkpoints(workdir, keep=100, read_only=True) as checkpoints:
        return checkpoints.restore(run.shapes(), 6)


@pytest.mark.slow
def test_a_resumed_run_ends_where_an_uninterrupted_one_does(run, train, trained, tmp_path):
    def before(state, batch):
        if int(state.step) == 3:
            raise Killed

    resumed = tmp_path / "run"
    with pytest.raises(Killed):
        train(resumed, WatchedStep(run.train_step, before))
    assert train(resumed, run.train_step) == 0

    assert lines(resumed) == lines(trained)
    jax.tree.map(
        np.testing.assert_array_equal,
        *(jax.device_get(restored(run, workdir)) for workdir in (resumed, trained)),
    )


def test_damaged_records_are_counted_in_the_log(trained):
    last = json.loads((trained / "metrics.jsonl").read_text().splitlines()[-1])
    assert last["data/damaged_train_records"] == len(BAD_TRAIN)  # 48 examples: more than an epoch
    assert last["data/damaged_validation_records"] == len(BAD_VALIDATION)


def test_every_good_image_is_evaluated_once(run, trained, flags):
    """Compare with a plain loop over the files, one at a time, with float64 sums of the logits."""
    state = restored(run, trained)
    found = run.evaluate(state)

    file, *overrides = flags()
    config = load_config(file.removeprefix("--config="), overrides, TrainConfig)
    dataset = _images.load_images(config.data)[0].validation
    network = from_linen(make_network(config.model, 1000))

    scores = {"loss": [], "accuracy": [], "top_5_accuracy": []}
    forward = jax.jit(lambda params, stats, x: network.apply(params, stats, x, train=False)[0])
    params, stats = jax.device_get((state.params, state.model_state))
    mean, std = (
        np.asarray(part * 4, np.float32) for part in (config.data.pixel_mean, config.data.pixel_std)
    )

    for number in range(NUM_VALIDATION):
        one = dataset.take(np.asarray([number]))
        assert bool(one["mask"][0]) == (number not in BAD_VALIDATION)
        if one["mask"][0]:
            logits = np.asarray(
                forward(params, stats, (one["image"] / np.float32(255) - mean) / std), np.float64
            )
            label = int(one["label"][0])
            scores["loss"].append(float(losses.softmax_cross_entropy(logits, one["label"])[0]))
            rank = int(np.sum(logits[0] > logits[0, label]))
            scores["accuracy"].append(rank == 0)
            scores["top_5_accuracy"].append(rank < 5)

    assert len(scores["loss"]) == NUM_VALIDATION - len(BAD_VALIDATION)
    assert found["accuracy"] == np.mean(scores["accuracy"])
    assert found["top_5_accuracy"] == np.mean(scores["top_5_accuracy"])
    assert found["loss"] == pytest.approx(np.mean(scores["loss"]), rel=1e-5)


def test_one_damaged_record_too_many_ends_the_run(flags):
    file, *overrides = flags(limit=1)
    run = build_run(load_config(file.removeprefix("--config="), overrides, TrainConfig))
    with troubled("data.max_damaged_records", 1, "damaged") as caught:
        list(train_iterator(run.batches))
    assert {3, 17} & set(numbers_in(caught))
    assert {"imagenet2012", "train"} <= names_in(caught)


# A change, the refused field with its value and code, and what else the message must name.
BAD = {
    "no such data set": (
        ["--config.data.builder=imagenet"],
        ("config.data.builder", "imagenet", "missing", EnvironmentProblem),
        "lbopt prepare imagenet --data_dir={data_dir}",
    ),
    "no such split": (
        ["--config.data.train_split=training"],
        ("config.data.train_split", "training", "choice"),
    ),
    "nothing in a split": (
        ["--config.data.train_split=train[:0]"],
        ("config.data.train_split", "train[:0]", "choice"),
    ),
    "an odd size to fold": (
        ["--config.data.space_to_depth=True", "--config.data.image_size=33"],
        ("config.data.space_to_depth", True, "conflict"),
        "config.data.image_size",
    ),
    "a stem that does not fold": (
        ["--config.data.space_to_depth=True", "--config.model.stem=conv7"],
        ("config.data.space_to_depth", True, "conflict"),
        "config.model.stem",
    ),
    "no crop for images of all sizes": (
        ["--config.data.train_crop=padded"],
        ("config.data.train_crop", "padded", "mismatch"),
    ),
    "a smaller image than the network takes": (
        ["--config.data.image_size=8"],
        ("config.data.image_size", (8, 8), "mismatch"),
    ),
    "a batch of more than there is": (
        ["--config.global_batch_size=32"],
        ("config.global_batch_size", 32, "mismatch"),
    ),
    "another version": (
        ["--config.data.builder=imagenet2012:5.0.0"],
        ("config.data.builder", "imagenet2012:5.0.0", "missing", EnvironmentProblem),
        "lbopt prepare imagenet2012:5.0.0",
    ),
    "a name that is none": (
        ["--config.data.builder=image net"],
        ("config.data.builder", "image net", "value"),
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_what_cannot_be_is_one_line_before_anything_is_compiled(
    name, flags, data_dir, tmp_path, capsys, monkeypatch
):
    overrides, fault, *named = BAD[name]
    monkeypatch.setattr(Step, "lower", lambda *arguments: pytest.fail("lowered"))
    with refused(*fault) as caught:
        # Padded crops have no reader threads, and fold no pixels.
        unused = ("reader_threads", "data.space_to_depth")
        kept = [flag for flag in flags() if not any(name in flag for name in unused)]
        run_refused(capsys, "train", *kept, *overrides, f"--workdir={tmp_path / 'run'}")
    for part in named:
        assert part.format(data_dir=data_dir) in str(caught.value)


def test_records_of_another_kind_are_refused(tmp_path, flags, capsys):
    write(tmp_path / "data", "other", {"train": [{"text": "a"}]}, {"text": tfds.features.Text()})
    override = ["--config.data.builder=other", f"--config.data.data_dir={tmp_path / 'data'}"]
    assert main(["train", *flags(), *override, f"--workdir={tmp_path / 'run'}"]) == 2
    err = capsys.readouterr().err
    assert err.startswith("lbopt train: config.data.builder = 'other': ")
    assert err.count("\n") == 1
    assert {"text", "image", "label"} <= set(re.findall(r"\w+", err))
