"""`lbopt export`: a checkpoint's network for other programs."""

import json
import shutil
import types

import jax
import numpy as np
import pytest
import torch
import torch_networks as torch_side
import transformers
from packaging.version import Version
from PIL import Image
from refusal import refused, troubled

import lbopt as lbopt_package
from lbopt.cli import _export, main
from lbopt.cli._train import saved_config
from lbopt.config import (
    CheckpointConfig,
    DataConfig,
    ImageFolderConfig,
    LossConfig,
    ModelConfig,
    TrainConfig,
    config_to_json,
)
from lbopt.data import ArrayDataset, Splits
from lbopt.data.from_config import Source, load_source
from lbopt.data.images import central_box
from lbopt.data.text import NO_VOCABULARY
from lbopt.errors import NO_VALUE
from lbopt.interchange import image_processor, load_safetensors, save_huggingface
from lbopt.models import stack_layers
from lbopt.recipes import build_run, make_network
from lbopt.recipes._classification import make as make_classification
from lbopt.train import Checkpoints
from lbopt.transforms import ema_params
from lbopt.workdir import open_workdir, read_config


@pytest.fixture(scope="session")
def averaged(small, tmp_path_factory):
    """Return the workdir of a run that keeps an average of its parameters and measures noise."""
    workdir = tmp_path_factory.mktemp("averaged") / "run"
    overrides = ["--config.optimizer.ema_decay=0.5", "--config.optimizer.track_noise_scale=True"]
    overrides += ["--config.parallel.num_microsteps=2", "--config.num_epochs=0.4"]
    overrides += ["--config.schedule.warmup_rule=none", "--config.checkpoint.every_steps=2"]
    assert main(["train", *small, *overrides, f"--workdir={workdir}"]) == 0
    return workdir


def started(folder, config, variables=None):
    """Make the workdir of a run with an invented state, because training would take long."""
    config.parallel.num_devices = 1
    rng = np.random.default_rng(0)

    def made_up(leaf):
        wanted = np.issubdtype(leaf.dtype, np.floating)
        return (
            rng.uniform(0.5, 1, leaf.shape).astype(leaf.dtype)
            if wanted
            else np.ones(leaf.shape, leaf.dtype)
        )

    state = jax.tree.map(made_up, jax.eval_shape(build_run(config).init))
    if variables is not None:
        stats = {"batch_stats": variables["batch_stats"]}
        state = state.replace(params=variables["params"], model_state=stats)
    with open_workdir(folder, "train", config_to_json(config), lambda saved: []):
        pass
    with Checkpoints(folder) as checkpoints:
        checkpoints.save(jax.device_put(state), {"eval/accuracy": 0.1})
    return folder


@pytest.fixture(scope="session")
def started_resnet(tmp_path_factory):
    model = ModelConfig("resnet", size="18", width_coefficient=0.125, stem="conv3")
    return started(tmp_path_factory.mktemp("resnet") / "run", TrainConfig(model=model))


PEERS = {
    "resnet": transformers.ResNetForImageClassification,
    "efficientnet": transformers.EfficientNetForImageClassification,
    "bert": transformers.BertForPreTraining,
}
FAMILIES = {
    "resnet": ModelConfig("resnet", size="18", width_coefficient=0.125),
    "efficientnet": ModelConfig(
        "efficientnet", size="b0", width_coefficient=0.25, depth_coefficient=0.1
    ),
    "bert": ModelConfig("bert", size="tiny", max_length=64, scan_layers=True),
}


@pytest.mark.everyday("bert")
@pytest.mark.parametrize("name", FAMILIES)
def test_the_command_writes_what_transformers_reads(name, lbopt, tmp_path):
    data = DataConfig("pydoc_mlm", vocab_size=256) if name == "bert" else DataConfig(image_size=32)
    metric = {"checkpoint": CheckpointConfig(best_metric="eval/accuracy")}
    workdir = started(tmp_path / "run", TrainConfig(model=FAMILIES[name], data=data, **metric))
    out = tmp_path / "out"
    code, said, err = lbopt(
        "export", f"--workdir={workdir}", "--format=huggingface", f"--output={out}"
    )
    assert (code, said.strip(), err) == (0, str(out), "")
    _, variables = lbopt_package.load_huggingface(out)
    state = checkpoint(workdir, 1)
    expected = {"params": state.params, **state.model_state}
    if name == "bert":
        variables = {"params": stack_layers(variables["params"])}
    same(variables, expected)
    _, report = PEERS[name].from_pretrained(out, output_loading_info=True)
    assert (report["missing_keys"], report["unexpected_keys"]) == (set(), set())


def checkpoint(workdir, step):
    """Return the state at a step, using `build`."""
    config = saved_config(read_config(workdir, "train"), str(workdir))
    plan = build_run(config)
    with Checkpoints(workdir, read_only=True) as checkpoints:
        return checkpoints.restore(plan.shapes(), step)


def same(a, b):
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(a), jax.device_get(b))


def test_our_layout(lbopt, trained, tmp_path):
    out = tmp_path / "deep" / "out"
    code, said, _ = lbopt(
        "export", f"--workdir={trained}", "--format=safetensors", f"--output={out}"
    )
    assert (code, said.strip()) == (0, str(out))
    variables, metadata = load_safetensors(out / "model.safetensors")
    state = checkpoint(trained, int(metadata["step"]))
    same(variables, {"params": state.params, **state.model_state})
    assert metadata["step"] == max(
        (entry.name for entry in (trained / "checkpoints").iterdir()), key=int
    )
    assert metadata["averaged_params"] == "false"
    assert json.loads(metadata["model"])["widths"] == [4]
    assert [entry.name for entry in out.parent.iterdir()] == ["out"]


def test_a_step_and_averaged_parameters(lbopt, averaged, tmp_path):
    arguments = [
        f"--workdir={averaged}",
        "--format=safetensors",
        "--checkpoint=2",
        f"--output={tmp_path}/out",
    ]
    assert lbopt("export", *arguments)[0] == 0
    variables, metadata = load_safetensors(tmp_path / "out" / "model.safetensors")
    assert (metadata["step"], metadata["averaged_params"]) == ("2", "true")
    state = checkpoint(averaged, 2)
    same(variables["params"], ema_params(state.opt_state, like=state.params))
    same(variables["batch_stats"], state.model_state["batch_stats"])
    kernels = [params["Dense_0"]["kernel"] for params in (variables["params"], state.params)]
    assert not np.array_equal(*kernels)


@pytest.mark.slow
def test_a_resnet(lbopt, started_resnet, tmp_path):
    assert (
        lbopt(
            "export",
            f"--workdir={started_resnet}",
            "--format=safetensors",
            f"--output={tmp_path}/out",
        )[0]
        == 0
    )
    variables, _ = load_safetensors(tmp_path / "out" / "model.safetensors")
    assert _export.outputs_and_head(variables["params"]) == (10, "pretraining")
    config = saved_config(read_config(started_resnet, "train"), str(started_resnet))
    logits = make_network(config.model, 10).apply(variables, np.ones((2, 8, 8)), train=False)
    assert logits.shape == (2, 10)


def test_it_needs_no_devices_of_the_run(lbopt, trained, tmp_path):
    """A run on many devices with grouped batch norm is exported on one."""
    workdir = tmp_path / "run"
    shutil.copytree(trained, workdir)
    saved = json.loads((workdir / "config.json").read_text())
    saved["config"]["parallel"]["num_devices"] = 64
    saved["config"]["model"]["batch_norm_scope"] = "replicas:32"
    (workdir / "config.json").write_text(json.dumps(saved))
    assert (
        lbopt("export", f"--workdir={workdir}", "--format=safetensors", f"--output={tmp_path}/out")[
            0
        ]
        == 0
    )


IMAGES = {"image": np.zeros((1, 64, 64, 3), np.float32)}
MODELS = {
    "resnet": (
        ModelConfig("resnet", size="18", width_coefficient=0.125),
        IMAGES["image"],
        10,
        "pretraining",
    ),
    "efficientnet": (
        ModelConfig("efficientnet", size="b0", width_coefficient=0.25, depth_coefficient=0.1),
        IMAGES["image"],
        10,
        "pretraining",
    ),
    "bert": (
        ModelConfig("bert", size="tiny", max_length=8, scan_layers=True),
        {"input_ids": np.zeros((1, 4), int)},
        30,
        "question_answering",
    ),
    "decoder_lm": (
        ModelConfig("decoder_lm", size="0.5m", max_length=8, scan_layers=True, tied=False),
        {"tokens": np.zeros((1, 4), int)},
        30,
        "pretraining",
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_a_folder_for_transformers(name, tmp_path):
    """The command exports such a folder after a run on data that are not embedded."""
    model, inputs, outputs, head = MODELS[name]
    variables = torch_side.randomized_variables(make_network(model, outputs, head), inputs)
    plan = types.SimpleNamespace(vocabulary=NO_VOCABULARY)
    source = Source(Splits(*[ArrayDataset(IMAGES)] * 3), outputs)
    _export._save_huggingface(
        tmp_path / "out", TrainConfig(model=model), plan, source, variables, {"recipe": "x"}
    )
    loaded, back = lbopt_package.load_huggingface(tmp_path / "out")
    assert _export.outputs_and_head(back["params"]) == (outputs, head)
    if model.scan_layers:
        back = {"params": stack_layers(back["params"])}
    same(back, variables)
    if name == "efficientnet":
        assert loaded.symmetric_blocks == ()
        assert json.loads((tmp_path / "out" / "config.json").read_text())["image_size"] == 64


SIDES = {"cat": (90, 122), "dog": (64, 48), "fox": (80, 80)}
"""Class -> height and width of its images. Their central squares leave an even number of pixels."""


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    """Make three classes of smooth images with stated splits, of several shapes."""
    root = tmp_path_factory.mktemp("photos")
    rng = np.random.default_rng(0)
    for split, count in (("train", 4), ("validation", 1), ("test", 1)):
        for name, (height, width) in SIDES.items():
            (root / split / name).mkdir(parents=True)
            for number in range(count):
                small = Image.fromarray(rng.integers(0, 256, (9, 9, 3), np.uint8))
                picture = small.resize((width, height), Image.Resampling.BICUBIC)
                picture.save(root / split / name / f"{number}.png")
    return root


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "fields"),
    [("resnet", {"space_to_depth": True}), ("efficientnet", {"eval_fraction": 0.8})],
)
def test_transformers_sees_a_file_as_the_evaluation_does(family, fields, photos, lbopt, tmp_path):
    data = ImageFolderConfig(str(photos), image_size=32, **fields)
    config = TrainConfig(model=FAMILIES[family], data=data, global_batch_size=6)
    network = make_network(config.model, 3)
    variables = calibrated(network, torch_side.images(32, batch=8))
    workdir = started(tmp_path / "run", config, variables)
    out = tmp_path / "out"
    flags = (f"--workdir={workdir}", "--format=huggingface", f"--output={out}")
    assert lbopt("export", *flags)[0] == 0
    theirs = PEERS[family].from_pretrained(out).eval()
    assert theirs.config.id2label == dict(enumerate(SIDES))
    assert theirs.config.label2id == {name: number for number, name in enumerate(SIDES)}

    source = load_source(data)
    batch = source.splits.test.take(np.arange(3))
    inputs = make_classification(None, source, LossConfig()).inputs(batch)
    if "space_to_depth" in fields:
        network = network.clone(stem="space_to_depth")
    ours = np.asarray(network.apply(variables, inputs, train=False))
    assert torch_side.spread(ours) > 0.02
    prepare = processor(out)
    for number, name in enumerate(SIDES):
        assert batch["label"][number] == number
        picture = Image.open(photos / "test" / name / "0.png")
        with torch.no_grad():
            logits = theirs(**prepare(picture, return_tensors="pt")).logits[0].numpy()
        np.testing.assert_allclose(logits, ours[number], rtol=0, atol=1e-4)


def calibrated(network, images):
    """Return random variables whose running statistics fit random images, so that none vanish."""
    variables = torch_side.randomized_variables(network, images)
    at_once = network.clone(batch_norm_momentum=0.0)
    rngs = dict.fromkeys(("dropout", "example"), jax.random.key(0))
    _, updated = at_once.apply(variables, images, train=True, mutable=["batch_stats"], rngs=rngs)
    return {**variables, **jax.device_get(updated)}


def processor(folder):
    """Return the preparation of images in an exported folder."""
    try:
        return transformers.AutoImageProcessor.from_pretrained(folder, backend="pil")
    except ImportError:
        if Version(transformers.__version__) >= Version("5.23"):
            raise
        pytest.skip("older versions of transformers need torchvision for it")


def prepared(folder, image, *of_pixels):
    """Return the pixels [channels, side, side] that the exported file makes of an image."""
    (folder / "preprocessor_config.json").write_text(image_processor(*of_pixels))
    prepare = processor(folder)
    return prepare(image, return_tensors="np")["pixel_values"][0]


def test_the_crop_is_one_pixel_beside_ours_if_the_rest_is_odd(tmp_path):
    pixels = np.random.default_rng(0).integers(0, 256, (81, 96, 3), np.uint8)
    side = 70  # of 81 rows 11 are left out, of 96 columns 26
    for top, rows in ((5, 81), (5, 80)):  # ours begins at (81 - 70 + 1) // 2, or (80 - 70) // 2
        image = Image.fromarray(pixels[:rows])
        crop = image.crop((13, top, 13 + side, top + side))
        expected = np.asarray(crop.resize((32, 32), Image.Resampling.BICUBIC))
        found = prepared(tmp_path, image, 32, (0.0,), (1.0,), 0.875)
        np.testing.assert_allclose(found * 255, expected.transpose(2, 0, 1), atol=1e-3)
    assert central_box(81, 96)[:3] == (6, 13, side)
    assert central_box(80, 96)[:3] == (5, 13, side)


def test_grey_images_of_one_size_are_neither_cropped_nor_resized(tmp_path):
    pixels = np.random.default_rng(0).integers(0, 256, (28, 28), np.uint8)
    found = prepared(tmp_path, Image.fromarray(pixels), 28, (0.1,), (0.3,), None, 1)
    np.testing.assert_allclose(found, (pixels[None] / 255 - 0.1) / 0.3, rtol=1e-5, atol=1e-5)


def test_names_that_do_not_fit_the_classes_are_refused(tmp_path):
    model, inputs, outputs, head = MODELS["resnet"]
    network = make_network(model, outputs, head)
    variables = torch_side.randomized_variables(network, inputs)
    names = ("cat", "dog")
    with refused("class_names", list(names), "mismatch"):
        save_huggingface(tmp_path / "out", network, variables, class_names=names)


# Arguments, the refused field with its value and code, and what else the message must name.
REFUSALS = {
    "no format": (["--workdir={run}", "--output={new}"], ("--format", NO_VALUE, "missing")),
    "no output": (
        ["--workdir={run}", "--format=safetensors"],
        ("--output", NO_VALUE, "missing"),
    ),
    "another format": (
        ["--workdir={run}", "--format=onnx", "--output={new}"],
        ("--format", "onnx", "choice"),
        "safetensors",
    ),
    "a full folder": (
        ["--workdir={run}", "--format=safetensors", "--output={run}"],
        ("--output", "{run}", "exists"),
    ),
    "no run": (
        ["--workdir={new}", "--format=safetensors", "--output={new}"],
        ("--workdir", "{new}", "missing"),
    ),
    "no such step": (
        ["--workdir={run}", "--format=safetensors", "--output={new}", "--checkpoint=3"],
        ("--checkpoint", "3", "missing"),
    ),
    "no such network there": (
        ["--workdir={run}", "--format=huggingface", "--output={new}"],
        ("config.model.name", "cnn", "value"),
        "--format=safetensors",
    ),
    "a small stem": (
        ["--workdir={resnet}", "--format=huggingface", "--output={new}"],
        ("config.model.stem", "conv3", "choice"),
        "safetensors",
    ),
    "a field of another version": (
        ["--workdir={newer}", "--format=safetensors", "--output={new}"],
        ("config.model.heads", 2, "choice"),
        "lbopt 9.9",
    ),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_refusals(case, refusing, trained, started_resnet, tmp_path, fingerprint):
    arguments, (field, value, code), *named = REFUSALS[case]
    newer = tmp_path / "newer"
    newer.mkdir()
    saved = json.loads((trained / "config.json").read_text())
    saved["config"]["model"]["heads"] = 2
    saved["versions"]["lbopt"] = "9.9"
    (newer / "config.json").write_text(json.dumps(saved))
    places = {"run": trained, "resnet": started_resnet, "newer": newer, "new": tmp_path / "new"}
    before = fingerprint(tmp_path), fingerprint(trained)
    value = value.format(**places) if isinstance(value, str) else value
    with refused(field, value, code) as caught:
        refusing("export", *(argument.format(**places) for argument in arguments))
    for part in named:
        assert part in str(caught.value)
    assert (fingerprint(tmp_path), fingerprint(trained)) == before


def test_a_place_where_nothing_can_be_written(refusing, trained, tmp_path):
    (tmp_path / "file").write_text("")
    output = f"{tmp_path}/file/out"
    flags = (f"--workdir={trained}", "--format=safetensors", f"--output={output}")
    with troubled("--output", output, "resource"):
        refusing("export", *flags)
