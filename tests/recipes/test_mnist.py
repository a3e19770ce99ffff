"""The shipped full-batch recipes of MNIST, on the digits in mnist's schema."""

import importlib.util
import io
import json
import pathlib

import jax
import numpy as np
import pytest
from PIL import Image
from refusal import refused, run_refused
from tfds_sets import write_images

from lbopt.cli import call_get_config, main
from lbopt.data import load_digits
from lbopt.data.from_config import known_source, load_source
from lbopt.plan import open_topology, prepare_environment
from lbopt.recipes import build_run
from lbopt.sweep import make_cells, make_problems, run_sweep

FILE = pathlib.Path(__file__).parents[2] / "configs" / "mnist.py"
NUM_TRAIN = 1024
NUM_TEST = 387


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory):
    """Return a folder with mnist: digits scaled to 28 x 28, as grey PNGs."""
    folder = tmp_path_factory.mktemp("data")
    splits = load_digits()

    def files(split):
        whole = split.take(np.arange(len(split)))
        for image, label in zip(whole["image"], whole["label"], strict=True):
            picture = Image.fromarray((image * 255).astype(np.uint8)).resize(
                (28, 28), Image.NEAREST
            )
            stream = io.BytesIO()
            picture.save(stream, "PNG")
            yield stream.getvalue(), int(label)

    sets = {"train": list(files(splits.train)), "test": list(files(splits.test))}
    write_images(folder, "mnist", sets, 10, shape=(28, 28, 1), encoding="png", version="3.0.1")
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("row", ["lamb-60000", "adam-50000"])
def test_a_full_batch_learns(row, data_dir, tmp_path, capsys):
    """The batch is the whole training set: 1,024 here."""
    size = NUM_TRAIN if row.endswith("60000") else 1000
    flags = [
        f"--config={FILE}:{row}",
        f"--workdir={tmp_path / 'run'}",
        f"--config.data.data_dir={data_dir}",
        f"--config.global_batch_size={size}",
        f"--config.data.train_split={'train' if size == NUM_TRAIN else 'train[:1000]'}",
        "--config.model.widths=(4,)",
        "--config.model.hidden=16",
        "--config.parallel.num_devices=1",
    ]

    assert main(["train", *flags]) == 0
    lines = [
        json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    ]

    steps = 35 if row.startswith("lamb") else 30
    assert lines[-1]["step"] == steps
    assert lines[-1]["examples_seen"] == steps * size
    assert lines[0]["train/learning_rate"] == 0.0
    assert lines[-1]["eval/accuracy"] > 0.75

    capsys.readouterr()
    assert main(["evaluate", *flags]) == 0
    scores = json.loads(capsys.readouterr().out)
    assert (
        scores["test/accuracy"]
        == scores["validation/accuracy"]
        == pytest.approx(lines[-1]["eval/accuracy"])
    )


@pytest.mark.slow
@pytest.mark.tpu_compiler
@pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None, reason="libtpu has no wheel for this machine"
)
@pytest.mark.parametrize("row", ["lamb-60000", "momentum-60000"])
def test_a_plan_lowers_what_train_does(row, data_dir):
    """A run on this data and four devices lowers to the same StableHLO as a planned one.

    The plan knows only mnist's shapes and has four TPU v3 cores. The recipes cover replicas that
    are mapped, whose gradients are clipped one by one, and replicas that are not. Patch
    convolutions are off because lbopt writes them differently for CPUs (tests/plan/test_make.py).
    """
    prepare_environment()
    config = call_get_config(f"{FILE}:{row}")
    config.data.data_dir = str(data_dir)
    config.global_batch_size = NUM_TRAIN
    config.model.widths = (4,)
    config.model.hidden = 16
    config.model.patch_convolutions = False
    pod = open_topology("v3:1x2")
    texts = []
    for devices, load in ((None, load_source), (pod.devices, known_source)):
        run = build_run(config, devices, load)
        jax.clear_caches()  # the numbers in names of functions depend on earlier traces
        texts.append(run.lower().as_text())
    assert run.mesh.size == 4
    assert texts[0] == texts[1]


# A change, the refused field with its value and code, and what else the message must name.
BAD = {
    "a size that these images do not have": (
        "image_size=32",
        ("config.data.image_size", 32, "mismatch"),
        "28 x 28",
    ),
    "three means for grey images": (
        "pixel_mean=(0.1, 0.2, 0.3); pixel_std=(1.0, 1.0, 1.0)",
        ("config.data.pixel_mean", (0.1, 0.2, 0.3), "mismatch"),
    ),
    "colours of grey images": (
        "augmentation=autoaugment",
        ("config.data.augmentation", "autoaugment", "mismatch"),
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_what_grey_images_cannot_have_is_one_line(name, data_dir, tmp_path, capsys):
    override, fault, *named = BAD[name]
    overrides = [f"--config.data.{one}" for one in override.split("; ")]
    flags = [f"--config={FILE}", f"--config.data.data_dir={data_dir}", *overrides]
    with refused(*fault) as caught:
        run_refused(capsys, "train", *flags, f"--workdir={tmp_path / 'run'}")
    for part in named:
        assert part in str(caught.value)


@pytest.mark.slow
def test_the_study_goes_to_the_whole_training_set(data_dir, tmp_path):
    """The shipped `mnist_limit` at a small size.

    Its images come from the records, half of the test set is used for selection, and the full batch
    is accumulated.
    """
    config = call_get_config(str(FILE.parent / "sweeps" / "mnist_limit.py"))
    data = config.train.data
    model = config.train.model

    data.data_dir = str(data_dir)
    data.validation_split = "test[:200]"
    data.test_split = "test[200:]"
    model.widths = (4,)
    model.hidden = 16

    config.global_batch_sizes = (NUM_TRAIN,)
    config.microstep_size = 300
    config.final_seeds = (100,)
    config.search.num_candidates = 1
    config.measure.probe_parts = 2
    config.measure.num_probes = 1
    for arm in config.arms:
        arm.schedule.base_batch_size = NUM_TRAIN
    config.validate()

    cells = make_cells(config, make_problems(config))
    assert {cell.train.parallel.num_microsteps for cell in cells} == {4}

    rows = run_sweep(config, cells, tmp_path)
    assert [row["steps"] for row in rows] == [35] * 8
    best = {row["arm"]: row["test_accuracy"] for row in rows if row["phase"] == "final"}
    assert best["LAMB + LEGW"] > 0.75
