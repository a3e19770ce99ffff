"""Runs, studies and plans from Python: the commands' own, of objects of the program."""

import copy
import functools
import gc
import json
import pickle
import weakref

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pandas
import pytest
from flax import nnx
from refusal import refused

import lbopt
from lbopt import _given
from lbopt.cli import load_config, main
from lbopt.config import OptimizerConfig, ScheduleConfig, SearchConfig, TrainConfig

rng = np.random.default_rng(0)
X = rng.normal(size=(120, 3)).astype(np.float32)
Y = (X[:, 0] > 0).astype(np.int32)


class Net(nn.Module):
    outputs: int
    width: int = 4

    @nn.compact
    def __call__(self, x):
        return nn.Dense(self.outputs)(nn.relu(nn.Dense(self.width)(x)))


def problem(model=Net, **arrays):
    return lbopt.Problem({"x": X, "y": Y, **arrays}, model)


def quietly(**fields):
    return {"num_steps": 6, "global_batch_size": 32, "log_every_steps": 1, **fields}


def test_a_finished_transformation_trains_as_in_a_plain_loop():
    tx = optax.chain(optax.clip(0.3), optax.adam(0.02))
    split = {"x": X, "y": Y}
    data = lbopt.Splits(split, split, split)
    result = lbopt.run_training(lbopt.Problem(data, Net), tx, **quietly(global_batch_size=120))

    # Each batch is the whole training set, so the order of the examples makes no difference.
    def loss_fn(params):
        logits = Net(2).apply({"params": params}, X)
        return optax.softmax_cross_entropy_with_integer_labels(logits, jnp.asarray(Y)).mean()

    fresh = lbopt.run_training(lbopt.Problem(data, Net), optax.sgd(0.0), **quietly(num_steps=1))
    params = fresh.params
    state = tx.init(params)
    losses = []
    for _ in range(6):
        loss, grads = jax.value_and_grad(loss_fn)(params)
        updates, state = tx.update(grads, state, params)
        params = optax.apply_updates(params, updates)
        losses.append(float(loss))
    np.testing.assert_allclose([line["train/loss"] for line in result.metrics], losses, rtol=1e-5)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-4), result.params, params)
    found = result.evaluate("test")
    np.testing.assert_allclose(found["loss"], loss_fn(params), rtol=1e-5)


@pytest.mark.parametrize(
    ("given", "name", "decay", "options"),
    [
        (optax.lion, "optax.lion", 0.0, {}),
        (optax.contrib.muon, "optax.contrib.muon", 0.0, {}),
        (functools.partial(optax.adamw, b1=0.8, weight_decay=0.1), "optax.adamw", 0.1, {"b1": 0.8}),
        (lbopt.lars, "lars", 0.0, {}),
        ("optax.sgd", "optax.sgd", 0.0, {}),
    ],
)
def test_an_optimizer_is_known_by_the_function(given, name, decay, options):
    found = TrainConfig(optimizer=given).optimizer
    assert found == OptimizerConfig(name, weight_decay=decay, options=options)


@pytest.mark.parametrize(
    "given",
    [
        functools.partial(optax.adamw, 0.05, weight_decay=0.5, mask=None),
        functools.partial(optax.adamw, learning_rate=0.05, weight_decay=0.5, mask=None),
        lambda: optax.adamw(0.05, weight_decay=0.5),
    ],
)
def test_what_a_partial_fixes_stays_and_a_rate_inside_is_not_scaled(given):
    fields = quietly(num_steps=3)
    wanted = lbopt.run_training(problem(), optax.adamw(0.05, weight_decay=0.5), **fields)
    found = lbopt.run_training(problem(), given, **fields)
    jax.tree.map(
        functools.partial(np.testing.assert_allclose, rtol=1e-4), found.params, wanted.params
    )


def test_a_schedule_is_a_number_a_function_or_a_rule():
    rate = optax.cosine_decay_schedule(0.1, 10)
    seen = []
    for given, wanted in ((rate, [rate(step) for step in range(6)]), (0.05, [0.05] * 6)):
        result = lbopt.run_training(
            problem(), optax.sgd, given, **quietly(on_metrics=[lambda *line: seen.append(line)])
        )
        lines = result.metrics
        found = [line["train/learning_rate"] for line in lines]
        np.testing.assert_allclose(found, wanted, rtol=1e-6)
    assert [step for step, _ in seen] == [1, 2, 3, 4, 5, 6] * 2
    assert seen[-1][1]["train/loss"] == lines[-1]["train/loss"]


def test_a_table_has_its_columns_as_features():
    table = pandas.DataFrame({"a": X[:, 0], "b": X[:, 1], "label": np.where(Y, "yes", "no")})
    result = lbopt.run_training(lbopt.Problem(table, Net), "adam", 0.01, **quietly())
    assert result.params["Dense_1"]["kernel"].shape == (2, 4)
    assert "<iframe" in result._repr_html_()
    assert {"step", "train/loss", "eval/accuracy"} <= set(pandas.DataFrame(result.metrics).columns)


def test_a_run_resumes_and_a_changed_object_is_refused(tmp_path):
    def made(width):
        class Own(Net):
            scale: int = width

        return Own

    fields = quietly(workdir=tmp_path)
    whole = lbopt.run_training(problem(Net(2)), "lamb", **fields)
    again = lbopt.run_training(problem(Net(2)), "lamb", **fields)
    jax.tree.map(np.testing.assert_array_equal, whole.state, again.state)
    assert whole.metrics == again.metrics
    for changed, name in ((problem(made(3)), "model.name"), (problem(x=X + 1), "data.path")):
        with refused("workdir", code="exists") as caught:
            lbopt.run_training(changed, "lamb", **fields)
        assert f"{name} is 'given:" in str(caught.value)


def test_arrays_are_freed_with_what_was_made_of_them():
    arrays = {"x": X + 7, "y": np.array(Y)}
    kept = weakref.ref(arrays["x"])
    result = lbopt.run_training(lbopt.Problem(arrays, Net(2)), "lamb", **quietly())
    copied = copy.deepcopy(result.config)
    del arrays
    assert kept() is not None
    assert _given.find(copied.data.path)["x"] is kept()
    assert pickle.loads(pickle.dumps(copied)).data == copied.data
    del result, copied
    gc.collect()
    assert kept() is None


def test_an_object_of_another_program_is_not_there():
    with refused("model.name", "given:Net_00000000", "missing"):
        lbopt.run_training(lbopt.Problem("digits", "given:Net_00000000"), **quietly())


CONFIG = """
import numpy as np, optax
import flax.linen as nn
from lbopt.config import Arm, ScheduleConfig, SearchConfig, SweepConfig, TrainConfig

class Net(nn.Module):
    outputs: int

    @nn.compact
    def __call__(self, x):
        return nn.Dense(self.outputs)(x)

def get_config(row=""):
    return SweepConfig(
        name="one",
        train=TrainConfig(name="one", data="data.npz", model=Net, num_epochs=2),
        arms=(
            Arm("LAMB", "lamb", ScheduleConfig(0.1)),
            Arm("lion", optax.lion, ScheduleConfig(0.01)),
        ),
        global_batch_sizes=(16, 48),
        search=SearchConfig(learning_rate_factors=(1.0, 2.0), widen_candidates=0),
        final_seeds=(7, 8),
        num_workers=1,
    )
"""


def test_a_sweep_equals_the_commands_line_for_line(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "study.py").write_text(CONFIG)
    np.savez(tmp_path / "data.npz", x=X, y=Y)
    assert main(["sweep", "--config=study.py", "--workdir=runs"]) == 0
    study = lbopt.run_sweep(
        lbopt.Problem("data.npz", load_config("study.py", [], object).train.model),
        {"LAMB": ("lamb", ScheduleConfig(0.1)), "lion": (optax.lion, ScheduleConfig(0.01))},
        (16, 48),
        name="one",
        num_epochs=2,
        search=SearchConfig(learning_rate_factors=(1.0, 2.0), widen_candidates=0),
        final_seeds=(7, 8),
        num_workers=1,
    )

    def without_time(record):
        return {name: value for name, value in record.items() if name != "seconds"}

    lines = [json.loads(line) for line in (tmp_path / "runs/results.jsonl").open()]
    assert list(map(without_time, study.records)) == list(map(without_time, lines))
    assert len(lines) == 2 * 2 * 4
    printed = capsys.readouterr().out
    assert str(study).strip() in printed
    page = study.report(tmp_path / "study.html")
    assert page.read_text().count("<img") == study._repr_html_().count("&lt;img") > 2
    assert len(pandas.DataFrame(study.records)) == len(lines)


def wide(step):
    return step * jnp.ones(2)


@pytest.mark.parametrize(
    ("call", "field", "words"),
    [
        (lambda: lbopt.run_training(problem(), "lamb", num_epoch=3), "argument", "num_epochs"),
        (lambda: lbopt.run_training(Net, "lamb"), "problem", "lbopt.Problem"),
        (lambda: lbopt.run_training(problem(), on_metrics=3), "on_metrics", "list"),
        (lambda: lbopt.run_training(problem(), optax.scale_by_adam), "optimizer", "sign"),
        (lambda: lbopt.run_training(problem("numpy:zeros_like")), "model.options", "needs a"),
        (lambda: lbopt.run_training(problem("numpy:eye")), "model.options", "needs N"),
        (lambda: lbopt.run_training(problem(), 3), "optimizer", "OptimizerConfig"),
        (lambda: lbopt.run_training(problem(model=3)), "model", "a function that makes one"),
        (lambda: lbopt.run_training(problem(y=Y[1:])), "data.path", "numbers of examples"),
        (lambda: lbopt.run_training(problem(), num_steps=0), "num_steps", ">= 1"),
        (lambda: lbopt.run_training(problem(Net(3))), "model.name", "the 2 classes"),
        (
            lambda: lbopt.run_training(problem(), "lamb", lambda s: s * jnp.ones(2)),
            "schedule.decay",
            "one step",
        ),
        (
            lambda: lbopt.run_sweep(problem(), {"a": optax.lion}, (16, 8)),
            "global_batch_sizes",
            "asc",
        ),
        (lambda: lbopt.run_sweep(problem(), {"a": optax.lion}, 16), "batch_sizes", "list"),
        (lambda: lbopt.run_sweep(problem(), {"a": 3}, (8,)), "arms[0].optimizer", "Optimizer"),
        (lambda: lbopt.run_sweep(problem(), [optax.lion], (8,)), "arms", "dict"),
    ],
)
def test_wrong_calls_end_in_a_line_that_names_the_argument(call, field, words):
    with refused(field) as caught:
        call()
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ({"x": X}, {"x": X.copy()}, True),
        ({"x": X}, {"x": X + 1}, False),
        ({"x": X}, {"z": X}, False),
        (Net(2), Net(2), True),
        (Net(2), Net(3), False),
        (functools.partial(Net, width=2), functools.partial(Net, width=3), False),
        (np.zeros((3000, 3000)), np.zeros((3000, 3000)), True),
        (optax.adam(0.1), optax.adam(0.1), True),
        (optax.adam(0.1), optax.adam(0.2), False),
        (lbopt.Splits({"x": X}, {}, {}), lbopt.Splits({"x": X}, {}, {"x": X}), False),
        ([{"x": X}, X, Y], [{"x": X}, Y, X], False),
        ([X, Y, X], [X, Y, Y], False),
        (jax.random.key(0), jax.random.key(1), False),
        (np.array([X, None], object), np.array([X + 1, None], object), False),
        (nnx.Linear(2, 3, rngs=nnx.Rngs(0)), nnx.Linear(2, 3, rngs=nnx.Rngs(0)), True),
        (nnx.Linear(2, 3, rngs=nnx.Rngs(0)), nnx.Linear(2, 3, rngs=nnx.Rngs(1)), False),
    ],
)
def test_digests_tell_objects_apart(one, other, same):
    assert (_given.digest(one) == _given.digest(other)) is same


def test_every_column_of_a_table_counts():
    columns = {f"x{i}": np.full(50, i) for i in range(6)}
    changed = [pandas.DataFrame({**columns, name: columns[name] + 9}) for name in columns]
    found = [_given.digest(each) for each in (pandas.DataFrame(columns), *changed)]
    assert len({*found}) == 7
    assert found[0] == _given.digest(pandas.DataFrame(columns))


CELLS = {
    "width": "width = 3",
    "Base": "class Base(nn.Module):\n    def act(self, x): return nn.relu(x)",
    "Net": """class Net(Base):
    @nn.compact
    def __call__(self, x):
        return self.act(nn.Dense(width)(x))""",
    "scale": "def scale(x): return 2 * x",
    "loss": "def loss(outputs, batch): return scale(outputs.sum(-1))",
    "traced": "traced = jax.jit(lambda x: 2 * x)",
    "method": """class Own:
    def __init__(self): self.k = 2
    def f(self): return self.k
method = Own().f""",
}


def places_of_cells(cells):
    variables = {"__name__": "__main__", "nn": nn, "jax": jax}
    for cell in cells.values():
        exec(cell, variables)
    return {
        name: _given.keep(variables[name], name) for name in ("Net", "loss", "traced", "method")
    }


@pytest.mark.parametrize(
    ("cell", "old", "new", "changed"),
    [
        ("width", "3", "5", "Net"),
        ("Base", "relu", "tanh", "Net"),
        ("Net", "Dense(width)", "Dense(2 * width)", "Net"),
        ("scale", "2", "4", "loss"),
        ("loss", "sum", "max", "loss"),
        ("traced", "2", "4", "traced"),
        ("method", "2", "4", "method"),
    ],
)
def test_a_cell_that_runs_again_keeps_the_places_that_do_not_use_a_change(cell, old, new, changed):
    first = places_of_cells(CELLS)
    assert places_of_cells(CELLS) == first
    again = places_of_cells({**CELLS, cell: CELLS[cell].replace(old, new)})
    assert [name for name in first if first[name] != again[name]] == [changed]


def test_two_functions_of_one_source_have_places_of_their_own():
    def made(width):
        return lambda outputs: Net(outputs, width)

    one = made(3)
    assert _given.keep(one, "model") == _given.keep(one, "model") != _given.keep(made(4), "model")

    # Objects of which nothing is known but their class are never taken for each other.
    blank = type("Blank", (), {})
    two = [blank(), blank()]
    assert len(set(map(_given.digest, two))) == 1
    assert [_given.find(_given.keep(each, "model")) for each in two] == two
