"""Wrong input ends in exit code 2 and one line that names it, before anything is compiled."""

import jax
import pytest
from refusal import ANY, refused

from lbopt.cli import _sweep, _train, load_config
from lbopt.config import TrainConfig
from lbopt.errors import NO_VALUE

DIGITS = "digits_cnn.py:lamb-256"
LARS = "digits_cnn.py:lars-256"
LIMIT = "sweeps/digits_limit.py:smoke"


def train(*overrides, config=DIGITS):
    return ("train", f"--config={{configs}}/{config}", "--workdir={workdir}", *overrides)


def field(name, value, config=DIGITS):
    return train(f"--config.{name}={value}", config=config)


def sweep(*overrides):
    return ("sweep", f"--config={{configs}}/{LIMIT}", "--workdir={workdir}", *overrides)


# Name: the command line, the refused field with its value and code, and what else the message must
# name.
COMMAND_LINES = {
    "unknown command": (("trian",), ("command", "trian", "choice"), "'train'"),
    "a flag for a command": (("--config=x",), ("command", "--config=x", "choice")),
    "no --config": (("train", "--workdir={workdir}"), ("--config", NO_VALUE, "missing")),
    "no --workdir": (train()[:2], ("--workdir", NO_VALUE, "missing")),
    "empty --workdir": ((*train()[:2], "--workdir="), ("--workdir", NO_VALUE, "missing")),
    "evaluate of no run": (
        ("evaluate", "--workdir={workdir}"),
        ("--workdir", "{workdir}", "missing"),
    ),
    "diff of no run": (("diff", "{workdir}"), ("--workdir", "{workdir}", "missing")),
    "diff of a third workdir": (("diff", "a", "b", "c"), ("argument", "c", "choice")),
    "diff with a config and a workdir": (
        ("diff", "a", "b", "--config=c.py"),
        ("--config", "c.py", "conflict"),
    ),
    "report without --workdir": (("report",), ("--workdir", NO_VALUE, "missing")),
    "unknown flag": (train("--wrokdir=x"), ("--wrokdir", NO_VALUE, "choice")),
    "flag of another command": (train("--checkpoint=best"), ("--checkpoint", NO_VALUE, "choice")),
    "doctor takes no flag": (("doctor", "--workdir=x"), ("--workdir", NO_VALUE, "choice")),
    "doctor takes no config": (
        ("doctor", "--config.seed=1"),
        ("--config.seed", NO_VALUE, "choice"),
    ),
    "steps of no profile": (train("--profile=9:4"), ("--profile", "9:4", "value")),
    "profile after the end": (train("--profile=9000:9001"), ("--profile", "9000:9001", "value")),
    "unknown tracker": (
        field("trackers", "('wandb', 'mlfow')"),
        ("config.trackers", ("wandb", "mlfow"), "choice"),
        "'mlflow'",
    ),
    "a tracker twice": (
        field("trackers", "('wandb', 'wandb')"),
        ("config.trackers", ("wandb", "wandb"), "value"),
    ),
    "an accuracy in percent": (
        (*field("target_metric", "eval/accuracy"), "--config.target_value=90"),
        ("config.target_value", 90.0, "value"),
    ),
    "an accuracy without a value": (
        field("target_metric", "eval/accuracy"),
        ("config.target_value", 0.0, "value"),
    ),
    "trackers of a study": (
        sweep("--config.train.trackers=('wandb',)"),
        ("config.train.trackers", ("wandb",), "unused"),
    ),
    "stray argument": (train("extra"), ("argument", "extra", "choice")),
    "flag without value": (("train", "--config"), ("flags", NO_VALUE, "value"), "--config"),
    "recipes of a missing folder": (
        ("recipes", "--configs={workdir}"),
        ("--configs", "{workdir}", "missing"),
    ),
    "config file missing": (
        train(config="digits_cn.py"),
        ("--config", "{configs}/digits_cn.py", "missing"),
    ),
    "config is a folder": (train(config=""), ("--config", "{configs}/", "missing")),
    "unknown row": (
        train(config="digits_cnn.py:lamp-64"),
        ("--config row", "lamp", "choice"),
        "'lamb'",
    ),
    "row without batch": (
        train(config="digits_cnn.py:lamb"),
        ("--config row", "lamb", "value"),
        "lamb-256",
    ),
    "row with a bad batch": (
        train(config="digits_cnn.py:lamb-64k"),
        ("--config row", "lamb-64k", "value"),
    ),
    "row with batch 0": (
        train(config="digits_cnn.py:lamb-0"),
        ("config.global_batch_size", 0, "value"),
    ),
    "a study for train": (
        train(config=LIMIT),
        ("--config", f"{{configs}}/{LIMIT}", "type"),
        "SweepConfig",
        "TrainConfig",
    ),
    "a run for sweep": (
        ("sweep", f"--config={{configs}}/{DIGITS}", "--workdir={workdir}"),
        ("--config", f"{{configs}}/{DIGITS}", "type"),
        "TrainConfig",
        "SweepConfig",
    ),
    "unknown field": (field("num_epoch", 3), ("--config.num_epoch", NO_VALUE, "choice")),
    "unknown field below": (
        field("optimizer.beta1", 0.9),
        ("--config.optimizer.beta1", NO_VALUE, "choice"),
    ),
    "field of a number": (field("seed.high", 1), ("--config.seed.high", NO_VALUE, "choice")),
    "override without value": (train("--config.seed"), ("--config.seed", NO_VALUE, "missing")),
    "override of a whole part": (
        field("schedule", "legw"),
        ("--config.schedule", NO_VALUE, "type"),
    ),
    "int from text": (field("seed", "abc"), ("--config.seed", "abc", "type")),
    "int from float": (field("seed", 1.5), ("--config.seed", "1.5", "type")),
    "float from text": (field("num_epochs", "ten"), ("--config.num_epochs", "ten", "type")),
    "float from nothing": (field("num_epochs", ""), ("--config.num_epochs", "", "type")),
    "bool from number": (
        field("optimizer.nesterov", 2),
        ("--config.optimizer.nesterov", "2", "type"),
    ),
    "tuple from text": (field("model.widths", "wide"), ("config.model.widths", ("wide",), "type")),
    "tuple of floats": (
        field("model.widths", "(1.5,2)"),
        ("config.model.widths", (1.5, 2), "type"),
    ),
    "misspelt optimizer": (
        field("optimizer.name", "lambda"),
        ("config.optimizer.name", "lambda", "choice"),
    ),
    "misspelt model": (field("model.name", "cn"), ("config.model.name", "cn", "choice")),
    "misspelt data set": (
        field("data.name", "digit"),
        ("config.data.name", "digit", "choice"),
    ),
    "misspelt backend": (
        field("parallel.backend", "pmpa"),
        ("config.parallel.backend", "pmpa", "choice"),
    ),
    "misspelt scaling": (
        field("schedule.scaling_rule", "sqr"),
        ("config.schedule.scaling_rule", "sqr", "choice"),
    ),
    "misspelt warmup": (
        field("schedule.warmup_rule", "lewg"),
        ("config.schedule.warmup_rule", "lewg", "choice"),
    ),
    "misspelt decay": (
        field("schedule.decay", "cosin"),
        ("config.schedule.decay", "cosin", "choice"),
    ),
    "misspelt dtype": (field("model.dtype", "bfloat"), ("config.model.dtype", "bfloat", "choice")),
    "unknown best metric": (
        field("checkpoint.best_metric", "accuracy"),
        ("config.checkpoint.best_metric", "accuracy", "choice"),
    ),
    "unknown status": (field("about.status", "done"), ("config.about.status", "done", "choice")),
    "negative seed": (field("seed", -1), ("config.seed", -1, "value")),
    "seed of 65 bits": (field("seed", 2**64), ("config.seed", 2**64, "value")),
    "no epochs": (field("num_epochs", 0), ("config.num_epochs", 0.0, "value")),
    "nan epochs": (field("num_epochs", "nan"), ("config.num_epochs", float("nan"), "value")),
    "endless epochs": (field("num_epochs", "inf"), ("config.num_epochs", float("inf"), "value")),
    "negative rate": (
        field("schedule.base_learning_rate", -0.1),
        ("config.schedule.base_learning_rate", -0.1, "value"),
    ),
    "nan rate": (
        field("schedule.base_learning_rate", "nan"),
        ("config.schedule.base_learning_rate", float("nan"), "value"),
    ),
    "base batch 0": (
        field("schedule.base_batch_size", 0),
        ("config.schedule.base_batch_size", 0, "value"),
    ),
    "negative warmup": (
        field("schedule.base_warmup_epochs", -1),
        ("config.schedule.base_warmup_epochs", -1.0, "value"),
    ),
    "power 0": (field("schedule.power", 0), ("config.schedule.power", 0.0, "value")),
    "nan power": (field("schedule.power", "nan"), ("config.schedule.power", float("nan"), "value")),
    "infinite power": (
        field("schedule.power", "inf"),
        ("config.schedule.power", float("inf"), "value"),
    ),
    "end above the peak": (
        field("schedule.end_factor", 1.5),
        ("config.schedule.end_factor", 1.5, "value"),
    ),
    "first step 2": (field("schedule.first_step", 2), ("config.schedule.first_step", 2, "value")),
    "negative decay": (
        field("optimizer.weight_decay", -0.1),
        ("config.optimizer.weight_decay", -0.1, "value"),
    ),
    "b1 of 1": (field("optimizer.b1", 1), ("config.optimizer.b1", 1.0, "value")),
    "nan b2": (field("optimizer.b2", "nan"), ("config.optimizer.b2", float("nan"), "value")),
    "negative eps": (field("optimizer.eps", -1e-6), ("config.optimizer.eps", -1e-06, "value")),
    "trust coefficient 0": (
        field("optimizer.trust_coefficient", 0, LARS),
        ("config.optimizer.trust_coefficient", 0.0, "value"),
    ),
    "nan trust coefficient": (
        field("optimizer.trust_coefficient", "nan", LARS),
        ("config.optimizer.trust_coefficient", float("nan"), "value"),
    ),
    "infinite trust coefficient": (
        field("optimizer.trust_coefficient", "inf", LARS),
        ("config.optimizer.trust_coefficient", float("inf"), "value"),
    ),
    "a trust coefficient for LAMB": (
        field("optimizer.trust_coefficient", 0.1),
        ("config.optimizer.trust_coefficient", 0.1, "unused"),
    ),
    "misspelt variant": (
        field("optimizer.variant", "albertt"),
        ("config.optimizer.variant", "albertt", "choice"),
    ),
    "misspelt stage": (
        field("optimizer.clip_stage", "replicas"),
        ("config.optimizer.clip_stage", "replicas", "choice"),
    ),
    "a stage of no clip": (
        field("optimizer.clip_stage", "mean"),
        ("config.optimizer.clip_stage", "mean", "conflict"),
    ),
    "average of 1": (
        field("optimizer.ema_decay", 1.0),
        ("config.optimizer.ema_decay", 1.0, "value"),
    ),
    "negative limit": (
        field("optimizer.skip_limit", -1),
        ("config.optimizer.skip_limit", -1, "value"),
    ),
    "spikes without a limit": (
        field("optimizer.spike_factor", 5.0),
        ("config.optimizer.spike_factor", 5.0, "unused"),
    ),
    "spikes behind a clip": (
        train(
            "--config.optimizer.spike_factor=5",
            "--config.optimizer.skip_limit=5",
            "--config.optimizer.clip_stage=mean",
            "--config.optimizer.max_grad_norm=1",
        ),
        ("config.optimizer.spike_factor", 5.0, "conflict"),
    ),
    "integer moments": (
        field("optimizer.mu_dtype", "int8"),
        ("config.optimizer.mu_dtype", "int8", "choice"),
    ),
    "one bound": (
        field("optimizer.trust_ratio_bounds", "(1.0,)"),
        ("config.optimizer.trust_ratio_bounds", (1.0,), "type"),
    ),
    "stairs that go down": (
        train("--config.schedule.decay=exponential", "--config.schedule.stair_epochs=(3.0,2.0)"),
        ("config.schedule.stair_epochs", (3.0, 2.0), "value"),
    ),
    "ramp of power 0": (
        field("schedule.warmup_power", 0.0),
        ("config.schedule.warmup_power", 0.0, "value"),
    ),
    "ramp from below 0": (
        field("schedule.warmup_from", -1.0),
        ("config.schedule.warmup_from", -1.0, "value"),
    ),
    "misspelt form": (
        field("optimizer.trust_ratio_clip_mode", "larc", LARS),
        ("config.optimizer.trust_ratio_clip_mode", "larc", "choice"),
    ),
    "misspelt origin": (
        field("schedule.decay_from", "begin"),
        ("config.schedule.decay_from", "begin", "choice"),
    ),
    "two ends": (
        train("--config.schedule.end_learning_rate=0.1", "--config.schedule.end_factor=0.1"),
        ("config.schedule.end_learning_rate", 0.1, "conflict"),
    ),
    "clipping at 0": (
        field("optimizer.max_grad_norm", 0),
        ("config.optimizer.max_grad_norm", 0.0, "value"),
    ),
    "clipping at nan": (
        field("optimizer.max_grad_norm", "nan"),
        ("config.optimizer.max_grad_norm", float("nan"), "value"),
    ),
    "reversed bounds": (
        field("optimizer.trust_ratio_bounds", "(10.0,1.0)"),
        ("config.optimizer.trust_ratio_bounds", (10.0, 1.0), "value"),
    ),
    "three bounds": (
        field("optimizer.trust_ratio_bounds", "(0.0,1.0,2.0)"),
        ("config.optimizer.trust_ratio_bounds", (0.0, 1.0, 2.0), "type"),
    ),
    "smoothing of 1": (
        field("loss.label_smoothing", 1),
        ("config.loss.label_smoothing", 1.0, "value"),
    ),
    "hidden 0": (field("model.hidden", 0), ("config.model.hidden", 0, "value")),
    "the last step of an int32": (
        field("num_steps", 2**31 - 1),
        ("config.num_steps", 2**31 - 1, "value"),
        "2^30",
    ),
    "epochs beyond counting": (field("num_epochs", "1e308"), ("config.num_epochs", 1e308, "value")),
    "a power beyond fp32": (
        field("schedule.power", "1e300"),
        ("config.schedule.power", 1e300, "value"),
    ),
    "a ramp beyond fp32": (
        field("schedule.warmup_power", "1e300"),
        ("config.schedule.warmup_power", 1e300, "value"),
    ),
    "a trust beyond fp32": (
        field("optimizer.trust_coefficient", "1e300", LARS),
        ("config.optimizer.trust_coefficient", 1e300, "value"),
    ),
    "endless warmup": (
        field("schedule.base_warmup_epochs", "1e308"),
        ("config.schedule.base_warmup_epochs", 1e308, "value"),
    ),
    "huge base batch": (
        field("schedule.base_batch_size", 10**40),
        ("config.schedule.base_batch_size", 10**40, "value"),
    ),
    "infinite bound": (
        field("optimizer.trust_ratio_bounds", "(0.0,inf)"),
        ("config.optimizer.trust_ratio_bounds", ("(0.0,inf)",), "type"),
    ),
    "part of a tuple": (
        field("model.widths[0]", 3),
        ("--config.model.widths[0]", NO_VALUE, "choice"),
        "'widths'",
    ),
    "group of fields": (field("model", "None"), ("--config.model", NO_VALUE, "type")),
    "home of nobody": (
        [*field("seed", 0)[:-1], "--workdir=~nobody-of-that-name/run"],
        ("--workdir", "~nobody-of-that-name/run", "value"),
    ),
    "no widths": (field("model.widths", "()"), ("config.model.widths", (), "value")),
    "width 0": (field("model.widths", "(8,0)"), ("config.model.widths", (8, 0), "value")),
    "too many widths": (
        field("model.widths", "(2,2,2,2,2)"),
        ("config.model.widths", NO_VALUE, "mismatch"),
    ),
    "a mean without its deviation": (
        train("--config.data.pixel_mean=(0.5,)", config="resnet50_lamb.py:smoke"),
        ("config.data.pixel_mean", (0.5,), "mismatch"),
    ),
    "unknown norm scope": (
        field("model.batch_norm_scope", "galaxy"),
        ("config.model.batch_norm_scope", "galaxy", "value"),
    ),
    "norm groups that do not divide": (
        field("model.batch_norm_scope", "examples:7"),
        ("config.model.batch_norm_scope", "examples:7", "mismatch"),
        "256",
    ),
    "norm groups of 3 replicas": (
        field("model.batch_norm_scope", "replicas:3"),
        ("config.model.batch_norm_scope", "replicas:3", "mismatch"),
    ),
    "norm groups of 0": (
        field("model.batch_norm_scope", "examples:0"),
        ("config.model.batch_norm_scope", "examples:0", "value"),
    ),
    "batch above the data": (
        field("global_batch_size", 2048),
        ("config.global_batch_size", 2048, "mismatch"),
    ),
    "batch for 4 devices": (
        field("global_batch_size", 254),
        ("config.global_batch_size", 254, "value"),
        "256",
    ),
    "batch for microsteps": (
        field("parallel.num_microsteps", 3),
        ("config.global_batch_size", 256, "value"),
        "252",
    ),
    "no microsteps": (
        field("parallel.num_microsteps", 0),
        ("config.parallel.num_microsteps", 0, "value"),
    ),
    "too many devices": (
        field("parallel.num_devices", 5),
        ("config.parallel.num_devices", 5, "value"),
    ),
    "no devices": (field("parallel.num_devices", 0), ("config.parallel.num_devices", 0, "value")),
    "warmup of the whole run": (
        field("schedule.base_warmup_epochs", 100),
        ("config.schedule.base_warmup_epochs", 100.0, "conflict"),
        "1600",
    ),
    "evaluation batch 0": (
        field("eval_global_batch_size", 0),
        ("config.eval_global_batch_size", 0, "value"),
    ),
    "logging never": (field("log_every_steps", 0), ("config.log_every_steps", 0, "value")),
    "evaluating never": (field("eval_every_steps", 0), ("config.eval_every_steps", 0, "value")),
    "saving never": (
        field("checkpoint.every_steps", 0),
        ("config.checkpoint.every_steps", 0, "value"),
    ),
    "keeping none": (field("checkpoint.keep", 0), ("config.checkpoint.keep", 0, "value")),
    "no sizes in a study": (
        sweep("--config.global_batch_sizes=()"),
        ("config.global_batch_sizes", (), "value"),
    ),
    "no rates in a study": (
        sweep("--config.search.learning_rate_factors=()"),
        ("config.search.learning_rate_factors", (), "value"),
    ),
    "falling factors": (
        sweep("--config.search.learning_rate_factors=(1.0,0.5)"),
        ("config.search.learning_rate_factors", (1.0, 0.5), "value"),
    ),
    "factors that are no numbers": (
        sweep("--config.search.learning_rate_factors=(float('nan'),)"),
        ("config.search.learning_rate_factors", ("(float('nan'),)",), "type"),
    ),
    "infinite factors": (
        sweep("--config.search.learning_rate_factors=(1.0,1e999)"),
        ("config.search.learning_rate_factors", (1.0, float("inf")), "value"),
    ),
    "unknown row of a study": (
        ("sweep", "--config={configs}/sweeps/digits_limit.py:smoek", "--workdir={workdir}"),
        ("--config row", "smoek", "choice"),
        "'smoke'",
    ),
    "no name": (field("name", ""), ("config.name", "", "missing")),
    "a study without a name": (sweep("--config.name="), ("config.name", "", "missing")),
    "a study of unknown status": (
        sweep("--config.about.status=done"),
        ("config.about.status", "done", "choice"),
    ),
    "a width above all": (
        field("model.widths", "(99999999999999999999,)"),
        ("config.model.widths", (99999999999999999999,), "value"),
    ),
    "a wide layer": (
        field("model.hidden", 2147483647),
        ("config.model.hidden", 2**31 - 1, "value"),
    ),
    "more positions than memory": (
        train("--config.model.max_length=2147483647", config="pydoc_bert.py:smoke"),
        ("config.model", NO_VALUE, "resource"),
    ),
    "falling sizes": (
        sweep("--config.global_batch_sizes=(64,32)"),
        ("config.global_batch_sizes", (64, 32), "value"),
    ),
    "a size above the data": (
        sweep("--config.global_batch_sizes=(64,2048)"),
        ("config.global_batch_sizes", (64, 2048), "mismatch"),
        "2048",
        "1024",
    ),
    "seeds of search and test": (
        sweep("--config.final_seeds=(0,100)"),
        ("config.final_seeds", (0, 100), "conflict"),
    ),
    "a seed twice": (
        sweep("--config.search.seeds=(3,3)"),
        ("config.search.seeds", (3, 3), "value"),
    ),
    "a field of an arm": (
        sweep("--config.arms[1].optimizer.b1=2"),
        ("--config.arms[1].optimizer.b1", NO_VALUE, "choice"),
    ),
    "no limit": (sweep("--config.limit_points=0"), ("config.limit_points", 0.0, "value")),
    "no trials in a program": (
        sweep("--config.trials_per_program=0"),
        ("config.trials_per_program", 0, "value"),
    ),
    "unknown batching": (
        sweep("--config.trial_batching=vmpa"),
        ("config.trial_batching", "vmpa", "choice"),
    ),
    "a study's model": (
        sweep("--config.train.model.widths=(2,2,2,2,2)"),
        ("config.train.model.widths", NO_VALUE, "mismatch"),
    ),
    "a study's warmup": (
        sweep("--config.train.num_epochs=0.2"),
        ("config.arms[0].schedule.base_warmup_epochs", 0.25, "conflict"),
    ),
    "a run shorter than a step": (
        field("num_epochs", 0.2),  # of 1,024 examples, at batch 256
        ("config.num_epochs", 0.2, "mismatch"),
        "train for 0.25 epochs at least",
    ),
    "a study shorter than a step of its largest batch": (
        sweep("--config.train.num_epochs=0.9", "--config.global_batch_sizes=(1024,)"),
        ("config.train.num_epochs", 0.9, "mismatch"),
        "batch 1024",
    ),
    "a budget below no candidates": (
        sweep("--config.search.widen_candidates=-1"),
        ("config.search.widen_candidates", -1, "value"),
    ),
    "a study of a target that is no study": (
        ("report", "--workdir={workdir}", "--target_study={workdir}"),
        ("--target_study", "{workdir}", "missing"),
    ),
    "a pilot that is no study": (
        sweep("--pilot={workdir}"),
        ("--pilot", "{workdir}", "missing"),
    ),
}

# Source of a config file, the refused field with its value and code, and what else the message must
# name.
IMPORT = "from lbopt.config import About, Arm, SweepConfig, TrainConfig\n"
CONFIG_FILES = {
    "that leaves": ("import sys\nsys.exit(0)", ("--config", "{file}", "damaged"), "SystemExit"),
    "syntax error": (
        "def get_config(arg=''):\n    return (",
        ("--config", "{file}", "damaged"),
        "SyntaxError",
    ),
    "raises": (
        "def get_config(arg=''):\n    return 1 / 0",
        ("--config", "{file}", "damaged"),
        "ZeroDivisionError",
    ),
    "raises on import": (
        "import no_such_package_anywhere",
        ("--config", "{file}", "damaged"),
        "no_such_package_anywhere",
    ),
    "no get_config": ("CONFIG = 3", ("--config", "{file}", "missing"), "get_config"),
    "get_config without argument": (
        "def get_config():\n    return 3",
        ("--config", "{file}", "type"),
        "int",
        "TrainConfig",
    ),
    "get_config of two arguments": (
        "def get_config(row, size):\n    return 3",
        ("--config", "{file}", "damaged"),
        "TypeError",
        "'size'",
    ),
    "another type": (
        "def get_config(arg=''):\n    return {'seed': 1}",
        ("--config", "{file}", "type"),
        "dict",
        "TrainConfig",
    ),
    "nothing": (
        "def get_config(arg=''):\n    pass",
        ("--config", "{file}", "type"),
        "NoneType",
        "TrainConfig",
    ),
    "unknown field": (
        f"{IMPORT}def get_config(arg=''):\n    return TrainConfig(sede=1)",
        ("--config", "{file}", "damaged"),
        "TypeError",
        "'sede'",
    ),
    "text for a number": (
        f"{IMPORT}def get_config(arg=''):\n    return TrainConfig(seed='1')",
        ("config.seed", "1", "type"),
    ),
    "a part of another type": (
        f"{IMPORT}def get_config(arg=''):\n    return TrainConfig(schedule='legw')",
        ("config.schedule", "legw", "type"),
    ),
}

STUDY = """
from lbopt.config import Arm, OptimizerConfig, ScheduleConfig, SearchConfig, SweepConfig
def get_config(arg=""):
    return SweepConfig(arms={arms}, global_batch_sizes=(64, 128))
"""
# Arms of a study, and the refused field with its value and code.
ARMS = {
    "no arms": ("()", ("config.arms", [], "missing")),
    "two of one name": (
        "(Arm('a'), Arm('b'), Arm('a'))",
        ("config.arms", ["a", "b", "a"], "value"),
    ),
    "not an arm": ("(Arm('a'), 'b')", ("config.arms", ANY, "type")),
    "an arm without a name": ("(Arm('a'), Arm(''))", ("config.arms[1].name", "", "missing")),
    "bad optimizer": (
        "(Arm('a'), Arm('b', OptimizerConfig(b1=2)))",
        ("config.arms[1].optimizer.b1", 2, "value"),
    ),
    "misspelt rule": (
        "(Arm('a', schedule=ScheduleConfig(scaling_rule='sqr')),)",
        ("config.arms[0].schedule.scaling_rule", "sqr", "choice"),
    ),
    "text in an arm": (
        "(Arm('a', OptimizerConfig(eps='1')),)",
        ("config.arms[0].optimizer.eps", "1", "type"),
    ),
    "warmup of the whole run": (
        "(Arm('a'), Arm('b', schedule=ScheduleConfig(base_warmup_epochs=100)))",
        ("config.arms[1].schedule.base_warmup_epochs", 100, "conflict"),
    ),
    "a search of a warmup that is none": (
        "(Arm('a', schedule=ScheduleConfig(warmup_rule='none'), "
        "search=SearchConfig(warmup_factors=(1.0, 2.0))),)",
        ("config.arms[0].schedule.warmup_rule", "none", "conflict"),
    ),
    "skipped updates": (
        "(Arm('a', OptimizerConfig(skip_limit=3)),)",
        ("config.arms[0].optimizer.skip_limit", 3, "conflict"),
    ),
    "a search of a weight decay that is none": (
        "(Arm('a'), Arm('b', OptimizerConfig('adam'), "
        "search=SearchConfig('halton', weight_decay_range=(0.5, 2.0))))",
        ("config.arms[1].optimizer.weight_decay", 0.0, "conflict"),
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
def test_it_is_refused_in_one_line(name, refusing, configs, tmp_path, nothing_starts):
    arguments, fault, *named = COMMAND_LINES[name]
    workdir = tmp_path / "run"
    places = {"{configs}": configs, "{workdir}": workdir}
    with refused(*map(placed(places), fault)) as caught:
        refusing(*map(placed(places), arguments))
    names_all(named, caught.value)
    assert not workdir.exists()
    assert nothing_starts == []


@pytest.mark.parametrize("name", CONFIG_FILES)
def test_a_bad_config_file_is_refused_in_one_line(
    name, refusing, config_file, tmp_path, nothing_starts
):
    source, fault, *named = CONFIG_FILES[name]
    file = config_file(source)
    with refused(*map(placed({"{file}": file}), fault)) as caught:
        refusing("train", f"--config={file}", f"--workdir={tmp_path / 'run'}")
    names_all(named, caught.value)
    assert not (tmp_path / "run").exists()
    assert nothing_starts == []


def test_a_file_whose_get_config_takes_nothing_has_no_rows(refusing, config_file, tmp_path):
    file = config_file(f"{IMPORT}def get_config():\n    return TrainConfig(seed=3)")
    assert load_config(str(file), ["--config.num_steps=4"], TrainConfig).seed == 3
    with refused("--config", f"{file}:lamb"):
        refusing("train", f"--config={file}:lamb", f"--workdir={tmp_path / 'run'}")


@pytest.mark.parametrize("name", ARMS)
def test_a_bad_arm_is_refused_in_one_line(name, refusing, config_file, tmp_path, nothing_starts):
    arms, fault = ARMS[name]
    file = config_file(STUDY.format(arms=arms))
    with refused(*fault):
        refusing("sweep", f"--config={file}", f"--workdir={tmp_path / 'run'}")
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


def test_the_line_has_the_field_its_value_and_the_fix(lbopt, configs, tmp_path):
    flags = [f"--config={configs / 'digits_cnn.py'}", "--config.model.name=cn"]
    code, out, err = lbopt("train", *flags, f"--workdir={tmp_path / 'run'}")
    choices = (
        "bert, cnn, decoder_lm, efficientnet, lstm, lstm_lm, mlp, resnet, simple_cnn "
        "(did you mean 'cnn'?)"
    )
    assert (code, out) == (2, "")
    assert err == f"lbopt train: config.model.name = 'cn': use one of {choices}\n"


def placed(places):
    """Return a function that puts paths into a text, and leaves other values as they are."""

    def put(value):
        if isinstance(value, str):
            for name, path in places.items():
                value = value.replace(name, str(path))
        return value

    return put


def names_all(named, error):
    for part in named:
        assert part in str(error)


def test_no_command_prints_the_commands(lbopt):
    code, out, err = lbopt()
    assert (code, err) == (2, "")
    assert out.startswith("usage: lbopt COMMAND")


# Source of a config file in the folder given to `lbopt recipes`, the refused field with its value
# and code, and what else the message must name.
LISTED = {
    "another type": (
        "def get_config(arg=''):\n    return {'seed': 1}",
        ("{file}", NO_VALUE, "type"),
        "dict",
        "TrainConfig",
    ),
    "a study without sizes": (
        f"{IMPORT}def get_config(arg=''):\n    return SweepConfig(arms=(Arm(),))",
        ("{file}: config.global_batch_sizes", (), "value"),
    ),
    "no paper": (
        f"{IMPORT}def get_config(arg=''):\n    return TrainConfig(about=About(paper=None))",
        ("{file}: config.about.paper", None, "type"),
    ),
    "rows that are no list": (
        f"{IMPORT}ROWS = 3\ndef get_config(arg=''):\n    return TrainConfig()",
        ("--config", "{file}", "damaged"),
        "TypeError",
    ),
}


@pytest.mark.parametrize("case", LISTED)
def test_recipes_names_a_config_that_cannot_be_listed(case, refusing, tmp_path):
    source, fault, *named = LISTED[case]
    file = tmp_path / "mine.py"
    file.write_text(source)
    with refused(*map(placed({"{file}": file}), fault)) as caught:
        refusing("recipes", f"--configs={tmp_path}")
    names_all(named, caught.value)
