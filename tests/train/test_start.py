"""A run that starts from another run's or a published network's parameters."""

import errno
import json
import os
import pathlib
import re
import shutil

import jax
import numpy as np
import pytest
from refusal import names_in, refused, run_refused, troubled

from lbopt.cli import load_config, main
from lbopt.config import DataConfig, ModelConfig, TrainConfig
from lbopt.data.text import Vocabulary
from lbopt.data.text._vocabulary import UNCASED
from lbopt.errors import EnvironmentProblem, UserError
from lbopt.interchange import load_safetensors, save_huggingface, save_safetensors
from lbopt.models import make_bert, stack_layers
from lbopt.parallel import Step
from lbopt.recipes import _initial, build_run, make_network, with_averaged_params

PRETRAINED = """
from lbopt.config import *
def get_config(arg=""):
    return TrainConfig(
        name="small bert", num_steps=2, global_batch_size=8, eval_global_batch_size=64,
        log_every_steps=1,
        data=DataConfig("pydoc_mlm", sequence_length=16, max_predictions=2, vocab_size=512),
        model=ModelConfig("bert", size="tiny", max_length=64, scan_layers=arg == "scanned"),
        schedule=ScheduleConfig(0.01, warmup_rule="none"), parallel=ParallelConfig(num_devices=1),
        checkpoint=CheckpointConfig(every_steps=1))
"""


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    file = tmp_path_factory.mktemp("config") / "small.py"
    file.write_text(PRETRAINED)
    return file


@pytest.fixture(scope="module")
def learned(file, tmp_path_factory):
    """Return the workdir of a BERT of two steps."""
    workdir = tmp_path_factory.mktemp("learned") / "run"
    assert main(["train", f"--config={file}", f"--workdir={workdir}"]) == 0
    return workdir


def load(file, place, *overrides):
    return build_run(
        load_config(str(file), [f"--config.init_from={place}", *overrides], TrainConfig)
    )


def start(file, place, *overrides):
    return load(file, place, *overrides).init()


@pytest.fixture(scope="module")
def params(learned):
    return _initial.read(str(learned), ModelConfig("bert", size="tiny"))["params"]


def same(ours, theirs):
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(ours), theirs)


def test_the_newest_parameters_of_a_workdir_and_a_fresh_optimizer(file, learned, params):
    state = start(file, learned)
    same(state.params, params)
    assert int(state.step) == 0
    fresh = build_run(load_config(str(file), [], TrainConfig)).init()
    same(state.opt_state, jax.device_get(fresh.opt_state))
    assert np.any(
        np.asarray(fresh.params["word_embedding"]["embedding"])
        != params["word_embedding"]["embedding"]
    )


def test_an_average_begins_where_the_parameters_do(file, learned, params):
    state = start(file, learned, "--config.optimizer.ema_decay=0.5")
    same(with_averaged_params(state).params, params)


@pytest.mark.parametrize("kind", ["safetensors", "huggingface"])
def test_what_was_exported_is_read_again(kind, file, learned, params, tmp_path):
    output = tmp_path / "out"
    assert main(["export", f"--workdir={learned}", f"--format={kind}", f"--output={output}"]) == 0
    place = output / "model.safetensors" if kind == "safetensors" else output
    same(start(file, place).params, params)
    if kind == "huggingface":
        assert (output / "vocab.txt").read_text() == (learned / "vocab.txt").read_text()


def test_another_activation_is_refused_wherever_it_is_known(file, learned, tmp_path):
    places = [learned]
    for kind in ("safetensors", "huggingface"):
        assert (
            main(
                [
                    "export",
                    f"--workdir={learned}",
                    f"--format={kind}",
                    f"--output={tmp_path / kind}",
                ]
            )
            == 0
        )
        places.append(tmp_path / kind / ("model.safetensors" if kind == "safetensors" else ""))
    for place in places:
        with refused("config.model.activation", "relu", "mismatch"):
            start(file, place, "--config.model.activation=relu")


def test_another_factor_of_the_decoder_changes_no_logits(learned, params, tmp_path):
    """A network that takes the numbers of another width has one, and its parameters do not tell."""

    def sized(base_size):
        return ModelConfig("bert", size="tiny", max_length=64, base_size=base_size)

    def logits(model, params):
        inputs = {"input_ids": np.arange(6)[None]}
        outputs = make_network(model, 512).apply({"params": params}, inputs, train=False)
        return outputs["prediction_logits"]

    # The same parameters in three places, as those of a network with a factor of 6.
    places = [tmp_path / name for name in ("file", "folder", "workdir")]
    save_safetensors(places[0], {"params": params}, {"model": '{"base_size": "base"}'})
    save_huggingface(places[1], make_network(sized("base"), 512), {"params": params})
    shutil.copytree(learned, places[2])
    saved = json.loads((places[2] / "config.json").read_text())
    saved["config"]["model"]["base_size"] = "base"
    (places[2] / "config.json").write_text(json.dumps(saved))

    wanted = logits(sized("base"), params)
    for place in places:
        for base_size in ("", "base", "large"):
            model = sized(base_size)
            found = logits(model, _initial.read(str(place), model)["params"])
            np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-5)
    save_safetensors(places[0], {"params": params}, {"model": '{"base_size": "?"}'})
    with refused("init_from", str(places[0]), "damaged"):
        _initial.read(str(places[0]), sized(""))


@pytest.mark.slow
def test_text_that_was_cased_otherwise_is_refused_wherever_it_is_known(file, learned, tmp_path):
    """The data are lowercased; the network's text was not, or that is unknown, or it was too."""
    places = {kind: tmp_path / kind for kind in ("huggingface", "safetensors", "workdir")}

    for kind in ("huggingface", "safetensors"):
        assert (
            main(["export", f"--workdir={learned}", f"--format={kind}", f"--output={places[kind]}"])
            == 0
        )
    shutil.copytree(learned, places["workdir"])
    places["safetensors"] /= "model.safetensors"

    for place in places.values():
        load(file, place).check_initial()

    for kind in ("huggingface", "workdir"):
        settings = places[kind] / "tokenizer_config.json"
        settings.write_text(
            settings.read_text().replace('"do_lower_case": true', '"do_lower_case": false')
        )

    variables, metadata = load_safetensors(places["safetensors"])
    assert json.loads(metadata[_initial.TEXT_NORMALIZATION_KEY]) == UNCASED._asdict()
    metadata[_initial.TEXT_NORMALIZATION_KEY] = json.dumps(
        {"do_lower_case": False, "strip_accents": None, "tokenize_chinese_chars": True}
    )
    save_safetensors(places["safetensors"], variables, metadata)

    for place in places.values():
        with refused("config.init_from", str(place), "mismatch") as caught:
            load(file, place).check_initial()
        assert "do_lower_case" in names_in(caught)

    (places["huggingface"] / "tokenizer_config.json").unlink()
    load(file, places["huggingface"]).check_initial()
    (places["workdir"] / "tokenizer_config.json").unlink()
    load(file, places["workdir"]).check_initial()

    metadata[_initial.TEXT_NORMALIZATION_KEY] = "[]"
    save_safetensors(places["safetensors"], variables, metadata)
    with refused("config.init_from", str(places["safetensors"]), "damaged"):
        load(file, places["safetensors"]).check_initial()


def test_words_with_other_numbers_are_refused(tmp_path):
    (tmp_path / "vocab.txt").write_text("[PAD]\n[unused1]\nthe\nof\n")
    _initial.check_text(str(tmp_path), Vocabulary(("[PAD]", "leukemia", "the", "of", "more")))
    with refused("init_from", str(tmp_path), "mismatch") as caught:
        _initial.check_text(str(tmp_path), Vocabulary(("[PAD]", "[unused1]", "of", "the"), UNCASED))
    for part in ("2", "'the'", "'of'", str(tmp_path / "vocab.txt")):
        assert part in str(caught.value)
    (tmp_path / "vocab.txt").write_text("the\nthe\n")  # of one that is not read nothing is known
    _initial.check_text(str(tmp_path), Vocabulary(("the", "of"), UNCASED))


def test_a_run_does_not_go_on_with_another_vocabulary(file, learned, tmp_path, capsys):
    workdir = shutil.copytree(learned, tmp_path / "run")
    for name in ("tokenizer_config.json", "vocab.txt"):
        before = (workdir / name).read_text()
        (workdir / name).write_text(before + "\n")
        capsys.readouterr()
        assert main(["train", f"--config={file}", f"--workdir={workdir}"]) == 2
        assert re.match(f"lbopt train: --workdir = '{workdir}': .*{name}", capsys.readouterr().err)
        if name == "vocab.txt":
            for command in (
                ["evaluate", f"--config={file}"],
                ["export", "--format=huggingface", f"--output={tmp_path}/out"],
            ):
                assert main([*command, f"--workdir={workdir}"]) == 2
                err = capsys.readouterr().err
                assert re.match(f"lbopt {command[0]}: --workdir = '{workdir}': .*vocab.txt", err)
        (workdir / name).unlink()  # as if an earlier version had begun
        assert main(["train", f"--config={file}", f"--workdir={workdir}"]) == 0
        assert (workdir / name).read_text() == before


def test_layers_are_stacked_where_the_model_scans_them(file, learned, params):
    state = start(f"{file}:scanned", learned)
    for layer in range(2):
        jax.tree.map(
            lambda ours, theirs: np.testing.assert_array_equal(ours[layer], theirs),  # noqa: B023
            jax.device_get(state.params["layers"]),
            params[f"layer{layer}"],
        )


def test_a_head_that_is_missing_starts_fresh(learned, params, tmp_path):
    kept = {name: value for name, value in params.items() if name != "span"}
    ours = jax.eval_shape(lambda: {**params, "span": {"kernel": np.zeros((128, 2), np.float32)}})
    merged, fresh = _initial.merged(ours, kept, ModelConfig("bert", size="tiny"), "there")
    assert fresh == ["span/kernel"]
    assert merged["span"]["kernel"] is None
    same({name: merged[name] for name in kept}, kept)


WRONG = {
    "a wider model": (
        ["--config.model.size=base"],
        ["embedding_norm/bias", "(128,)", "(768,)"],
    ),
    "more positions": (
        ["--config.model.max_length=128"],
        ["position_embedding/embedding", "(64, 128)", "give config.model.max_length = 64"],
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_another_model_is_refused_before_it_is_compiled(
    name, file, learned, tmp_path, capsys, monkeypatch
):
    overrides, named = WRONG[name]
    monkeypatch.setattr(Step, "lower", lambda *arguments: pytest.fail("compiled"))
    flags = [
        f"--config={file}",
        f"--workdir={tmp_path / 'run'}",
        f"--config.init_from={learned}",
        *overrides,
    ]
    assert main(["train", *flags]) == 2
    error = capsys.readouterr().err
    assert error.startswith("lbopt train: config.init_from = ")
    assert len(error.splitlines()) == 1
    for part in named:
        assert part in error
    assert not (tmp_path / "run").exists()


HOSTILE = {
    "a thousand million layers": {"num_hidden_layers": 10**9},
    "lists in the place of names": {"architectures": [["BertForPreTraining"], {}]},
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_folders_are_refused_in_one_line(name, file, params, tmp_path, capsys):
    place = tmp_path / "theirs"
    save_huggingface(place, make_bert("tiny", vocab_size=512, max_length=64), {"params": params})
    config = json.loads((place / "config.json").read_text()) | HOSTILE[name]
    (place / "config.json").write_text(json.dumps(config))
    flags = [f"--config={file}", f"--workdir={tmp_path / 'run'}", f"--config.init_from={place}"]
    assert main(["train", *flags]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert error.startswith(f"lbopt train: config.init_from = '{place}': {place}")
    assert next(iter(HOSTILE[name])) in error


LAYER = {"kernel": np.zeros((2, 2), np.float32)}
OTHER_NETWORKS = {
    "no layers": ({"head": LAYER}, None),
    "fewer layers": ({"layer0": LAYER}, 1),
    "more layers": ({f"layer{i}": LAYER for i in range(3)}, 3),
    "a gap": ({"layer0": LAYER, "layer2": LAYER}, 1),
    "a layer of another spelling": ({"layer0": LAYER, "layer1": LAYER, "layer01": LAYER}, None),
    "layers that differ": ({"layer0": LAYER, "layer1": {"bias": np.zeros(2, np.float32)}}, None),
    "layers that are arrays": ({"layer0": np.zeros(2), "layer1": np.zeros(2)}, None),
    "other stacks": ({"layers": {"a": np.zeros((3, 2)), "b": np.zeros((2, 2))}}, None),
    "a stack of many": ({"layers": {"a": np.zeros((2**40, 0), np.float32)}}, 2**40),
    "a stack without axes": ({"layers": np.float32(3)}, None),
}
"""Content of a file, and the number of layers in the message if that is the fault."""


@pytest.mark.parametrize("case", OTHER_NETWORKS)
def test_files_of_other_networks_than_bert(case, params, tmp_path):
    given, num_layers = OTHER_NETWORKS[case]
    save_safetensors(tmp_path / "file", {"params": given})
    model = ModelConfig("bert", size="tiny", scan_layers="stack" not in case)
    ours = stack_layers(params) if model.scan_layers else params
    known = num_layers is not None
    field, value = ("model.size", "tiny") if known else ("init_from", "there")
    with refused(field, value, "mismatch") as caught:
        _initial.merged(
            ours, _initial.read(str(tmp_path / "file"), model)["params"], model, "there"
        )
    if known:
        assert re.search(
            rf" 2 .*{re.escape(str(tmp_path / 'file'))}.* {num_layers}\b", str(caught.value)
        )


@pytest.mark.parametrize("place", ["x" * 5000, "x/" * 5000, "\0", "~nobody/x"])
def test_places_that_cannot_be(place, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with refused("init_from", place) as caught:
        _initial.read(place, ModelConfig("bert", size="tiny"))
    assert len(str(caught.value)) < 700


def test_a_place_that_may_not_be_read(tmp_path, monkeypatch):
    def refuse(path):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    monkeypatch.setattr(pathlib.Path, "is_dir", refuse)
    with troubled("init_from", str(tmp_path), "resource"):
        _initial.read(str(tmp_path), ModelConfig("bert", size="tiny"))


def test_a_file_without_parameters(tmp_path):
    save_safetensors(tmp_path / "file", {"batch_stats": LAYER})
    with refused("init_from", str(tmp_path / "file"), "missing"):
        _initial.read(str(tmp_path / "file"), ModelConfig("cnn"))


NO_CHECKPOINT = {
    "nothing": (UserError, "missing", "lbopt train"),
    "an empty folder": (UserError, "missing", "lbopt train"),
    "a text": (UserError, "damaged", "safetensors"),
    "a workdir without a checkpoint": (UserError, "missing", "checkpoint"),
    "a workdir of a sweep": (UserError, "mismatch", "sweep"),
    "a workdir with a bad config.json": (EnvironmentProblem, "damaged", "config.json"),
    "a checkpoint without arrays": (EnvironmentProblem, "damaged", "checkpoint 2 "),
    "a checkpoint without a description": (EnvironmentProblem, "damaged", "checkpoint 2 "),
    "a checkpoint that is cut short": (EnvironmentProblem, "damaged", "checkpoint 2 "),
    "a checkpoint with an array cut short": (EnvironmentProblem, "damaged", "checkpoint 2 "),
    "an empty checkpoint": (EnvironmentProblem, "damaged", "checkpoint 2 "),
    "a folder of Transformers with a bad config.json": (UserError, "damaged", "JSON"),
}
"""What `config.init_from` names: kind and code of the refusal, and what it must name."""


@pytest.mark.parametrize("what", NO_CHECKPOINT)
def test_what_is_no_checkpoint_is_one_line(what, file, learned, tmp_path, capsys, monkeypatch):
    place = tmp_path / "there"
    make(what, place, learned)
    kind, code, named = NO_CHECKPOINT[what]
    monkeypatch.setattr(Step, "lower", lambda *arguments: pytest.fail("compiled"))
    flags = [f"--config={file}", f"--workdir={tmp_path / 'run'}", f"--config.init_from={place}"]
    with refused("config.init_from", str(place), code, kind) as caught:
        run_refused(capsys, "train", *flags)
    error = str(caught.value)
    assert named in error
    assert error.count("config.init_from") == 1
    for wrong in ("--workdir", "remove", "attribute", "NoneType"):
        assert wrong not in error


def make(what, place, learned):
    """Put something that is not a checkpoint into a place."""
    if "workdir" in what or "checkpoint" in what:
        shutil.copytree(learned, place)
    elif "folder" in what:
        place.mkdir()

    config = place / "config.json"
    step = place / "checkpoints" / "2" / "default"

    if what == "a text":
        place.write_text("text")
    elif what == "a workdir without a checkpoint":
        shutil.rmtree(place / "checkpoints")
        (place / "checkpoints").mkdir()
    elif what == "a workdir of a sweep":
        config.write_text(json.dumps({**json.loads(config.read_text()), "kind": "sweep"}))
    elif what.endswith("bad config.json"):
        config.write_text("{")
    elif what == "a checkpoint without arrays":
        shutil.rmtree(step / "d")
        shutil.rmtree(step / "ocdbt.process_0")
    elif what == "a checkpoint without a description":
        (step / "_METADATA").unlink()
    elif what == "a checkpoint that is cut short":
        for part in step.rglob("*"):
            if part.is_file():
                part.write_bytes(part.read_bytes()[: part.stat().st_size // 2])
    elif what == "a checkpoint with an array cut short":
        largest = max(
            (step / "ocdbt.process_0" / "d").iterdir(), key=lambda part: part.stat().st_size
        )
        largest.write_bytes(largest.read_bytes()[:100])
    elif what == "an empty checkpoint":
        shutil.rmtree(step)


@pytest.mark.slow
def test_a_run_goes_on_where_its_start_is_gone(file, learned, tmp_path, capsys):
    start_from = shutil.copytree(learned, tmp_path / "start")
    flags = [
        f"--config={file}",
        f"--workdir={tmp_path / 'run'}",
        f"--config.init_from={start_from}",
    ]
    assert main(["train", *flags]) == 0
    shutil.rmtree(start_from)
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "2")
    assert main(["train", *flags]) == 0
    assert "resuming at step 1 of 2" in capsys.readouterr().err
    assert main(["evaluate", *flags]) == 0
    assert json.loads(capsys.readouterr().out)["step"] == 2


def test_batch_statistics_are_taken_too(tmp_path):
    model = ModelConfig("cnn", widths=(4,), hidden=8)
    config = TrainConfig(num_steps=1, global_batch_size=64, data=DataConfig("digits"), model=model)
    config.schedule.warmup_rule = "none"
    run = build_run(config)
    state = run.init()
    moved = jax.device_get(
        jax.tree.map(lambda x: x + 0.5, {"params": state.params, **state.model_state})
    )
    save_safetensors(tmp_path / "model.safetensors", moved)
    config.init_from = str(tmp_path / "model.safetensors")
    again = build_run(config).init()
    same({"params": again.params, **again.model_state}, moved)


@pytest.mark.slow
def test_a_run_that_kept_an_average_hands_that_on(file, tmp_path):
    workdir = tmp_path / "averaged"
    flags = [f"--config={file}", "--config.optimizer.ema_decay=0.5"]
    assert main(["train", *flags, f"--workdir={workdir}"]) == 0
    output = tmp_path / "exported"
    assert (
        main(["export", f"--workdir={workdir}", "--format=safetensors", f"--output={output}"]) == 0
    )
    exported = load_safetensors(output / "model.safetensors")[0]["params"]
    same(start(file, workdir).params, jax.device_get(exported))
