"""Wrong input ends in exit code 2 and one line that names it, before anything is compiled."""

import re

import jax
import pytest

from lbopt.cli import _sweep, _train

DIGITS = "digits_cnn.py:lamb-256"
LIMIT = "sweeps/digits_limit.py:smoke"


def train(*overrides, config=DIGITS):
    return ("train", f"--config={{configs}}/{config}", "--workdir={workdir}", *overrides)


def field(name, value):
    return train(f"--config.{name}={value}")


def sweep(*overrides):
    return ("sweep", f"--config={{configs}}/{LIMIT}", "--workdir={workdir}", *overrides)


# Name: the command line, and the field that its message begins with, or what it must contain.
COMMAND_LINES = {
    "unknown command": (("trian",), ["'trian'", "did you mean 'train'?"]),
    "a flag for a command": (("--config=x",), ["--config=x"]),
    "no --config": (("train", "--workdir={workdir}"), "--config"),
    "no --workdir": (train()[:2], "--workdir"),
    "empty --workdir": ((*train()[:2], "--workdir="), "--workdir"),
    "evaluate without --config": (("evaluate", "--workdir={workdir}"), "--config"),
    "report without --workdir": (("report",), "--workdir"),
    "unknown flag": (train("--wrokdir=x"), ["wrokdir"]),
    "flag of another command": (train("--checkpoint=best"), ["checkpoint"]),
    "doctor takes no flag": (("doctor", "--workdir=x"), ["workdir"]),
    "doctor takes no config": (("doctor", "--config.seed=1"), ["config.seed"]),
    "stray argument": (train("extra"), ["'extra'", "not a flag"]),
    "flag without value": (("train", "--config"), ["config"]),
    "recipes of a missing folder": (
        ("recipes", "--configs={workdir}"),
        ["--configs", "no such folder"],
    ),
    "config file missing": (train(config="digits_cn.py"), ["--config", "digits_cn.py", "no file"]),
    "config is a folder": (train(config=""), ["--config", "no file"]),
    "unknown row": (
        train(config="digits_cnn.py:lamp-64"),
        ["row", "'lamp'", "did you mean 'lamb'?"],
    ),
    "row without batch": (train(config="digits_cnn.py:lamb"), ["row", "'lamb'", "lamb-256"]),
    "row with a bad batch": (train(config="digits_cnn.py:lamb-64k"), ["row", "'lamb-64k'"]),
    "row with batch 0": (train(config="digits_cnn.py:lamb-0"), "config.global_batch_size"),
    "a study for train": (train(config=LIMIT), ["SweepConfig", "TrainConfig"]),
    "a run for sweep": (
        ("sweep", f"--config={{configs}}/{DIGITS}", "--workdir={workdir}"),
        ["TrainConfig", "SweepConfig"],
    ),
    "unknown field": (field("num_epoch", 3), "--config.num_epoch"),
    "unknown field below": (field("optimizer.beta1", 0.9), "--config.optimizer.beta1"),
    "field of a number": (field("seed.high", 1), "--config.seed.high"),
    "override without value": (train("--config.seed"), ["--config.seed", "no value"]),
    "override of a whole part": (field("optimizer", "lamb"), "--config.optimizer"),
    "int from text": (field("seed", "abc"), ["seed", "abc"]),
    "int from float": (field("seed", 1.5), ["seed", "1.5"]),
    "float from text": (field("num_epochs", "ten"), ["num_epochs", "ten"]),
    "float from nothing": (field("num_epochs", ""), ["num_epochs"]),
    "bool from number": (field("optimizer.nesterov", 2), ["optimizer.nesterov", "2"]),
    "tuple from text": (field("model.widths", "wide"), ["model.widths", "wide"]),
    "tuple of floats": (field("model.widths", "(1.5,2)"), ["model.widths", "1.5"]),
    "misspelt optimizer": (
        field("optimizer.name", "lambda"),
        "config.optimizer.name",
    ),
    "misspelt model": (field("model.name", "cn"), "config.model.name"),
    "misspelt data set": (
        field("data.name", "digit"),
        "config.data.name",
    ),
    "misspelt backend": (
        field("parallel.backend", "pmpa"),
        "config.parallel.backend",
    ),
    "misspelt scaling": (
        field("schedule.scaling_rule", "sqr"),
        "config.schedule.scaling_rule",
    ),
    "misspelt warmup": (
        field("schedule.warmup_rule", "lewg"),
        "config.schedule.warmup_rule",
    ),
    "misspelt decay": (field("schedule.decay", "cosin"), "config.schedule.decay"),
    "misspelt dtype": (field("model.dtype", "bfloat"), "config.model.dtype"),
    "unknown best metric": (
        field("checkpoint.best_metric", "accuracy"),
        "config.checkpoint.best_metric",
    ),
    "unknown status": (field("about.status", "done"), "config.about.status"),
    "negative seed": (field("seed", -1), "config.seed"),
    "seed of 65 bits": (field("seed", 2**64), "config.seed"),
    "no epochs": (field("num_epochs", 0), "config.num_epochs"),
    "nan epochs": (field("num_epochs", "nan"), "config.num_epochs"),
    "endless epochs": (field("num_epochs", "inf"), "config.num_epochs"),
    "negative rate": (
        field("schedule.base_learning_rate", -0.1),
        "config.schedule.base_learning_rate",
    ),
    "nan rate": (
        field("schedule.base_learning_rate", "nan"),
        "config.schedule.base_learning_rate",
    ),
    "base batch 0": (
        field("schedule.base_batch_size", 0),
        "config.schedule.base_batch_size",
    ),
    "negative warmup": (
        field("schedule.base_warmup_epochs", -1),
        "config.schedule.base_warmup_epochs",
    ),
    "power 0": (field("schedule.power", 0), "config.schedule.power"),
    "nan power": (field("schedule.power", "nan"), "config.schedule.power"),
    "infinite power": (field("schedule.power", "inf"), "config.schedule.power"),
    "end above the peak": (
        field("schedule.end_factor", 1.5),
        "config.schedule.end_factor",
    ),
    "first step 2": (field("schedule.first_step", 2), "config.schedule.first_step"),
    "negative decay": (
        field("optimizer.weight_decay", -0.1),
        "config.optimizer.weight_decay",
    ),
    "b1 of 1": (field("optimizer.b1", 1), "config.optimizer.b1"),
    "nan b2": (field("optimizer.b2", "nan"), "config.optimizer.b2"),
    "negative eps": (field("optimizer.eps", -1e-6), "config.optimizer.eps"),
    "trust coefficient 0": (
        field("optimizer.trust_coefficient", 0),
        "config.optimizer.trust_coefficient",
    ),
    "nan trust coefficient": (
        field("optimizer.trust_coefficient", "nan"),
        ["trust_coefficient", "nan"],
    ),
    "infinite trust coefficient": (
        field("optimizer.trust_coefficient", "inf"),
        ["trust_coefficient", "inf"],
    ),
    "misspelt variant": (
        field("optimizer.variant", "albertt"),
        "config.optimizer.variant",
    ),
    "misspelt stage": (
        field("optimizer.clip_stage", "replicas"),
        "config.optimizer.clip_stage",
    ),
    "a stage of no clip": (
        field("optimizer.clip_stage", "mean"),
        "config.optimizer.clip_stage",
    ),
    "average of 1": (field("optimizer.ema_decay", 1.0), "config.optimizer.ema_decay"),
    "negative limit": (field("optimizer.skip_limit", -1), "config.optimizer.skip_limit"),
    "spikes without a limit": (
        field("optimizer.spike_factor", 5.0),
        "config.optimizer.spike_factor",
    ),
    "spikes behind a clip": (
        train(
            "--config.optimizer.spike_factor=5",
            "--config.optimizer.skip_limit=5",
            "--config.optimizer.clip_stage=mean",
            "--config.optimizer.max_grad_norm=1",
        ),
        "config.optimizer.spike_factor",
    ),
    "integer moments": (
        field("optimizer.mu_dtype", "int8"),
        "config.optimizer.mu_dtype",
    ),
    "one bound": (
        field("optimizer.trust_ratio_bounds", "(1.0,)"),
        "config.optimizer.trust_ratio_bounds",
    ),
    "stairs that go down": (
        field("schedule.stair_epochs", "(3.0,2.0)"),
        "config.schedule.stair_epochs",
    ),
    "ramp of power 0": (
        field("schedule.warmup_power", 0.0),
        "config.schedule.warmup_power",
    ),
    "ramp from below 0": (
        field("schedule.warmup_from", -1.0),
        "config.schedule.warmup_from",
    ),
    "misspelt form": (
        field("optimizer.trust_ratio_clip_mode", "larc"),
        "config.optimizer.trust_ratio_clip_mode",
    ),
    "misspelt origin": (
        field("schedule.decay_from", "begin"),
        "config.schedule.decay_from",
    ),
    "two ends": (
        train("--config.schedule.end_learning_rate=0.1", "--config.schedule.end_factor=0.1"),
        "config.schedule.end_learning_rate",
    ),
    "clipping at 0": (field("optimizer.max_grad_norm", 0), "config.optimizer.max_grad_norm"),
    "clipping at nan": (
        field("optimizer.max_grad_norm", "nan"),
        "config.optimizer.max_grad_norm",
    ),
    "reversed bounds": (
        field("optimizer.trust_ratio_bounds", "(10.0,1.0)"),
        "config.optimizer.trust_ratio_bounds",
    ),
    "three bounds": (
        field("optimizer.trust_ratio_bounds", "(0.0,1.0,2.0)"),
        ["optimizer.trust_ratio_bounds"],
    ),
    "smoothing of 1": (field("loss.label_smoothing", 1), "config.loss.label_smoothing"),
    "hidden 0": (field("model.hidden", 0), "config.model.hidden"),
    "the last step of an int32": (
        field("num_steps", 2**31 - 1),
        ["config.num_steps = 2147483647", "fewer than 2^30"],
    ),
    "epochs beyond counting": (field("num_epochs", "1e308"), "config.num_epochs"),
    "a power beyond fp32": (field("schedule.power", "1e300"), "config.schedule.power"),
    "a ramp beyond fp32": (
        field("schedule.warmup_power", "1e300"),
        "config.schedule.warmup_power",
    ),
    "a trust beyond fp32": (
        field("optimizer.trust_coefficient", "1e300"),
        "config.optimizer.trust_coefficient",
    ),
    "endless warmup": (
        field("schedule.base_warmup_epochs", "1e308"),
        ["base_warmup_epochs", "1e+308"],
    ),
    "huge base batch": (field("schedule.base_batch_size", 10**40), ["base_batch_size"]),
    "infinite bound": (
        field("optimizer.trust_ratio_bounds", "(0.0,inf)"),
        ["trust_ratio_bounds", "inf"],
    ),
    "part of a tuple": (
        field("model.widths[0]", 3),
        ["config.model has no field 'widths[0]'", "'widths'"],
    ),
    "group of fields": (field("model", "None"), "--config.model"),
    "home of nobody": (
        [*field("seed", 0)[:-1], "--workdir=~nobody-of-that-name/run"],
        ["~nobody-of-that-name"],
    ),
    "no widths": (field("model.widths", "()"), "config.model.widths"),
    "width 0": (field("model.widths", "(8,0)"), "config.model.widths"),
    "too many widths": (field("model.widths", "(2,2,2,2,2)"), "config.model.widths"),
    "a mean without its deviation": (
        train("--config.data.pixel_mean=(0.5,)", config="resnet50_lamb.py:smoke"),
        "config.data.pixel_mean",
    ),
    "unknown norm scope": (
        field("model.batch_norm_scope", "galaxy"),
        "config.model.batch_norm_scope",
    ),
    "norm groups that do not divide": (
        field("model.batch_norm_scope", "examples:7"),
        ["groups of 7", "256"],
    ),
    "norm groups of 3 replicas": (
        field("model.batch_norm_scope", "replicas:3"),
        ["groups of 3", "4 replicas"],
    ),
    "norm groups of 0": (
        field("model.batch_norm_scope", "examples:0"),
        "config.model.batch_norm_scope",
    ),
    "batch above the data": (
        field("global_batch_size", 2048),
        "config.global_batch_size",
    ),
    "batch for 4 devices": (
        field("global_batch_size", 254),
        ["global_batch_size", "254", "4 devices"],
    ),
    "batch for microsteps": (field("parallel.num_microsteps", 3), ["256", "3 microsteps"]),
    "no microsteps": (field("parallel.num_microsteps", 0), "config.parallel.num_microsteps"),
    "too many devices": (field("parallel.num_devices", 5), ["num_devices", "5"]),
    "no devices": (field("parallel.num_devices", 0), "config.parallel.num_devices"),
    "warmup of the whole run": (
        field("schedule.base_warmup_epochs", 100),
        ["base_warmup_epochs", "100", "1600"],
    ),
    "evaluation batch 0": (
        field("eval_global_batch_size", 0),
        "config.eval_global_batch_size",
    ),
    "logging never": (field("log_every_steps", 0), "config.log_every_steps"),
    "evaluating never": (field("eval_every_steps", 0), "config.eval_every_steps"),
    "saving never": (field("checkpoint.every_steps", 0), "config.checkpoint.every_steps"),
    "keeping none": (field("checkpoint.keep", 0), "config.checkpoint.keep"),
    "no sizes in a study": (
        sweep("--config.global_batch_sizes=()"),
        "config.global_batch_sizes",
    ),
    "no rates in a study": (
        sweep("--config.search.learning_rate_factors=()"),
        "config.search.learning_rate_factors",
    ),
    "falling factors": (
        sweep("--config.search.learning_rate_factors=(1.0,0.5)"),
        "config.search.learning_rate_factors",
    ),
    "factors that are no numbers": (
        sweep("--config.search.learning_rate_factors=(float('nan'),)"),
        ["learning_rate_factors"],
    ),
    "infinite factors": (
        sweep("--config.search.learning_rate_factors=(1.0,1e999)"),
        ["learning_rate_factors", "inf"],
    ),
    "unknown row of a study": (
        ("sweep", "--config={configs}/sweeps/digits_limit.py:smoek", "--workdir={workdir}"),
        ["row", "'smoek'", "did you mean 'smoke'?"],
    ),
    "no name": (field("name", ""), "config.name"),
    "a study without a name": (sweep("--config.name="), "config.name"),
    "a study of unknown status": (
        sweep("--config.about.status=done"),
        "config.about.status",
    ),
    "a width above all": (
        field("model.widths", "(99999999999999999999,)"),
        "config.model.widths",
    ),
    "a wide layer": (field("model.hidden", 2147483647), "config.model.hidden"),
    "more positions than memory": (
        train("--config.model.max_length=2147483647", config="pydoc_bert.py:smoke"),
        "config.model",
    ),
    "falling sizes": (
        sweep("--config.global_batch_sizes=(64,32)"),
        "config.global_batch_sizes",
    ),
    "a size above the data": (
        sweep("--config.global_batch_sizes=(64,2048)"),
        ["global_batch_sizes", "2048", "1024"],
    ),
    "seeds of search and test": (
        sweep("--config.final_seeds=(0,100)"),
        "config.final_seeds",
    ),
    "a seed twice": (sweep("--config.search.seeds=(3,3)"), "config.search.seeds"),
    "a field of an arm": (
        sweep("--config.arms[1].optimizer.b1=2"),
        "--config.arms[1].optimizer.b1",
    ),
    "no limit": (sweep("--config.limit_points=0"), "config.limit_points"),
    "no trials in a program": (
        sweep("--config.trials_per_program=0"),
        "config.trials_per_program",
    ),
    "unknown batching": (
        sweep("--config.trial_batching=vmpa"),
        "config.trial_batching",
    ),
    "a study's model": (
        sweep("--config.train.model.widths=(2,2,2,2,2)"),
        "config.train.model.widths",
    ),
    "a study's warmup": (
        sweep("--config.train.num_epochs=0.1"),
        ["base_warmup_epochs", "config.arms[0]"],
    ),
}

# Source of a config file, and the field that the message begins with, or what it must contain.
IMPORT = "from lbopt.config import About, Arm, SweepConfig, TrainConfig\n"
CONFIG_FILES = {
    "that leaves": ("import sys\nsys.exit(0)", ["SystemExit"]),
    "syntax error": ("def get_config(arg=''):\n    return (", ["SyntaxError"]),
    "raises": ("def get_config(arg=''):\n    return 1 / 0", ["ZeroDivisionError"]),
    "raises on import": ("import no_such_package_anywhere", ["no_such_package_anywhere"]),
    "no get_config": ("CONFIG = 3", ["get_config"]),
    "get_config without argument": ("def get_config():\n    return 3", ["get_config", "argument"]),
    "another type": ("def get_config(arg=''):\n    return {'seed': 1}", ["dict", "TrainConfig"]),
    "nothing": ("def get_config(arg=''):\n    pass", ["NoneType", "TrainConfig"]),
    "unknown field": (
        f"{IMPORT}def get_config(arg=''):\n    return TrainConfig(sede=1)",
        ["TypeError", "sede"],
    ),
    "text for a number": (
        f"{IMPORT}def get_config(arg=''):\n    return TrainConfig(seed='1')",
        "config.seed",
    ),
    "a part of another type": (
        f"{IMPORT}def get_config(arg=''):\n    return TrainConfig(model='cnn')",
        "config.model",
    ),
}

STUDY = """
from lbopt.config import Arm, OptimizerConfig, ScheduleConfig, SearchConfig, SweepConfig
def get_config(arg=""):
    return SweepConfig(arms={arms}, global_batch_sizes=(64, 128))
"""
# Arms of a study, and the field that the message begins with.
ARMS = {
    "no arms": ("()", "config.arms"),
    "two of one name": ("(Arm('a'), Arm('b'), Arm('a'))", "config.arms"),
    "not an arm": ("(Arm('a'), 'b')", "config.arms"),
    "an arm without a name": ("(Arm('a'), Arm(''))", "config.arms[1].name"),
    "bad optimizer": (
        "(Arm('a'), Arm('b', OptimizerConfig(b1=2)))",
        "config.arms[1].optimizer.b1",
    ),
    "misspelt rule": (
        "(Arm('a', schedule=ScheduleConfig(scaling_rule='sqr')),)",
        "config.arms[0].schedule.scaling_rule",
    ),
    "text in an arm": (
        "(Arm('a', OptimizerConfig(eps='1')),)",
        "config.arms[0].optimizer.eps",
    ),
    "warmup of the whole run": (
        "(Arm('a'), Arm('b', schedule=ScheduleConfig(base_warmup_epochs=100)))",
        "config.arms[1].schedule.base_warmup_epochs",
    ),
    "a search of a warmup that is none": (
        "(Arm('a', schedule=ScheduleConfig(warmup_rule='none'), "
        "search=SearchConfig(warmup_factors=(1.0, 2.0))),)",
        "config.arms[0].schedule.warmup_rule",
    ),
    "skipped updates": (
        "(Arm('a', OptimizerConfig(skip_limit=3)),)",
        "config.arms[0].optimizer.skip_limit",
    ),
    "a search of a weight decay that is none": (
        "(Arm('a'), Arm('b', OptimizerConfig('adam'), "
        "search=SearchConfig('halton', weight_decay_range=(0.5, 2.0))))",
        "config.arms[1].optimizer.weight_decay",
    ),
}


@pytest.fixture
def nothing_starts(monkeypatch):
    """Fail if a run starts or compiles a program (other than the tiny one of a random key)."""
    started = []

    def watch(event, seconds, fun_name="", **rest):
        if event.endswith("backend_compile_duration") and fun_name != "jit(_threefry_seed)":
            started.append(fun_name)

    monkeypatch.setattr(_train, "train", lambda *arguments: started.append("training"))
    monkeypatch.setattr(_sweep, "run_sweep", lambda *arguments: started.append("study"))
    jax.monitoring.register_event_duration_secs_listener(watch)
    yield started
    jax.monitoring.unregister_event_duration_listener(watch)


@pytest.mark.parametrize("name", COMMAND_LINES)
def test_it_is_refused_in_one_line(name, lbopt, configs, tmp_path, nothing_starts):
    arguments, named = COMMAND_LINES[name]
    workdir = tmp_path / "run"
    arguments = [
        argument.replace("{configs}", str(configs)).replace("{workdir}", str(workdir))
        for argument in arguments
    ]
    code, out, err = lbopt(*arguments)
    refused(arguments[0], code, out, err, named)
    assert not workdir.exists()
    assert nothing_starts == []


@pytest.mark.parametrize("name", CONFIG_FILES)
def test_a_bad_config_file_is_refused_in_one_line(
    name, lbopt, config_file, tmp_path, nothing_starts
):
    source, named = CONFIG_FILES[name]
    file = config_file(source)
    code, out, err = lbopt("train", f"--config={file}", f"--workdir={tmp_path / 'run'}")
    refused("train", code, out, err, named if isinstance(named, str) else [str(file), *named])
    assert not (tmp_path / "run").exists()
    assert nothing_starts == []


@pytest.mark.parametrize("name", ARMS)
def test_a_bad_arm_is_refused_in_one_line(name, lbopt, config_file, tmp_path, nothing_starts):
    arms, named = ARMS[name]
    file = config_file(STUDY.format(arms=arms))
    code, out, err = lbopt("sweep", f"--config={file}", f"--workdir={tmp_path / 'run'}")
    refused("sweep", code, out, err, named)
    assert not (tmp_path / "run").exists()
    assert nothing_starts == []


def test_a_run_that_is_not_refused_would_be_seen(lbopt, configs, tmp_path, nothing_starts):
    code, _, err = lbopt(
        "train", f"--config={configs / 'digits_cnn.py'}:smoke", f"--workdir={tmp_path / 'run'}"
    )
    assert code == 0, err
    jax.jit(lambda x: x + 1)(1.0)
    assert nothing_starts[0] == "training"
    assert len(nothing_starts) > 1


@pytest.mark.parametrize("scope", ["examples:7", "replicas:3"])
def test_norm_groups_that_do_not_fit_name_their_field(scope, lbopt, configs, tmp_path):
    flags = [f"--config={configs / 'digits_cnn.py'}", f"--config.model.batch_norm_scope={scope}"]
    _, _, err = lbopt("train", *flags, f"--workdir={tmp_path / 'run'}")
    assert f"config.model.batch_norm_scope = '{scope}'" in err


def refused(command, code, out, err, named):
    """Check that a refusal is one line that begins with `named`, or has all parts of that list."""
    assert code == 2, err
    assert err.startswith(f"lbopt {command}: "), err
    if isinstance(named, str):
        assert re.match(rf"lbopt {command}: {re.escape(named)}( = |: )", err), err
        named = ()
    assert err.count("\n") == 1, err
    assert err.endswith("\n")
    assert "Traceback" not in err
    for part in named:
        assert part in err
    assert out == ""


def test_no_command_prints_the_commands(lbopt):
    code, out, err = lbopt()
    assert (code, err) == (2, "")
    assert out.startswith("usage: lbopt COMMAND")


# Source of a config file in the folder given to `lbopt recipes`, and what the message must contain.
LISTED = {
    "another type": ("def get_config(arg=''):\n    return {'seed': 1}", ["dict", "TrainConfig"]),
    "a study without sizes": (
        f"{IMPORT}def get_config(arg=''):\n    return SweepConfig(arms=(Arm(),))",
        ["config.global_batch_sizes"],
    ),
    "no paper": (
        f"{IMPORT}def get_config(arg=''):\n    return TrainConfig(about=About(paper=None))",
        ["config.about.paper", "None"],
    ),
    "rows that are no list": (
        f"{IMPORT}ROWS = 3\ndef get_config(arg=''):\n    return TrainConfig()",
        ["TypeError"],
    ),
}


@pytest.mark.parametrize("case", LISTED)
def test_recipes_names_a_config_that_cannot_be_listed(case, lbopt, tmp_path):
    source, parts = LISTED[case]
    (tmp_path / "mine.py").write_text(source)
    code, out, err = lbopt("recipes", f"--configs={tmp_path}")
    assert (code, out, err.count("\n")) == (2, "", 1)
    for part in ("mine.py", *parts):
        assert part in err
