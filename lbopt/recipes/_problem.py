"""Data, model and loss of a config."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from lbopt import errors, losses, masks, tree, types
from lbopt._user_code import is_place
from lbopt.config import BATCH_NORMED, TASKS, DataConfig, LossConfig, ModelConfig
from lbopt.data import DAMAGED, Dataset, Splits
from lbopt.data.from_config import Learned, Source, load_source
from lbopt.data.text import NO_VOCABULARY, Vocabulary
from lbopt.errors import EnvironmentProblem, require, require_choice
from lbopt.evaluation import means_of
from lbopt.models import Model, StatsScope, check_fold_examples, from_linen
from lbopt.recipes import (
    _classification,
    _initial,
    _language_model,
    _masked_lm,
    _networks,
    _question_answering,
    _supervised,
)
from lbopt.recipes._task import Task
from lbopt.replicas import Replicas
from lbopt.transforms import Transfer

_TASKS = {
    "classification": _classification,
    "language_model": _language_model,
    "masked_lm": _masked_lm,
    "question_answering": _question_answering,
}
_MAKERS = {
    **{task: module.make for task, module in _TASKS.items()},
    "multi_label": _supervised.make_multi_label,
    "regression": _supervised.make_regression,
}
Load = Callable[[DataConfig, int, Learned | None], Source]
"""(data, global batch size, function that opens the folder of `init_from`) -> `Source`."""


class LoadedProblem(NamedTuple):
    """The data, model and loss of a run, without its optimizer.

    Attributes:
      init: key -> (params, model_state).
      params: Shapes and dtypes of the parameters.
      loss_fn: The training loss, a `lbopt.types.LossFn`.
      metric_fn: The metrics of evaluation, a `lbopt.types.MetricFn`.
      splits: Training, validation and test sets.
      stacked: Parameters that are stacks of layers, as `lbopt.lamb` takes them.
      evaluator: (mesh, backend) -> the evaluation; None in a task means the mean of `metric_fn`.
      metric_names: Names of the metrics of evaluation.
      vocabulary: The vocabulary of text.
      outputs: Number of classes or tokens that the model tells apart; 0 if unknown.
      main_metric: Name of the metric by which a study judges a model.
      trivial_loss: Loss of outputs that do not look at the input; None if unknown.
      known_roles: Roles of parameters that the types of the model's layers tell; None for none.
      transfer: The narrower network whose numbers the model takes; None for none.
      activations: (params, model_state, batch) -> the results of all modules by path, without
        training; None for a model of the user's own.
    """

    init: Any
    params: types.Params
    loss_fn: types.LossFn
    metric_fn: types.MetricFn
    splits: Splits
    stacked: types.Stacked = None
    evaluator: Any = None
    metric_names: tuple[str, ...] = ()
    vocabulary: Vocabulary = NO_VOCABULARY
    outputs: int = 0
    main_metric: str = "loss"
    trivial_loss: float | None = None
    known_roles: types.PyTree = None
    transfer: Transfer | None = None
    activations: Callable[..., dict[str, jax.Array]] | None = None

    def check_metric(self, field: str, name: str) -> None:
        """Raise `UserError` unless `name` is a metric of the evaluation, "eval/loss" for instance.

        Args:
          field: The field that names the metric.
          name: Name of the metric.
        """
        require_choice(field, name, [f"eval/{known}" for known in self.metric_names])


def make_problem(
    data: DataConfig,
    model: ModelConfig,
    loss: LossConfig | None = None,
    global_batch_size: int = 1,
    init_from: str | None = None,
    load: Load = load_source,
) -> LoadedProblem:
    """Load the data and build the model and the loss that belong to them.

    Args:
      data: Config of the data, validated.
      model: Config of the model, validated.
      loss: Config of the loss; None for the default.
      global_batch_size: Examples per step of the run, by which streams of text are laid out.
      init_from: Place of the initial values, whose vocabulary is used; None for fresh ones.
      load: Function that loads the data; `known_source` for a program without data.

    Raises:
      UserError: If the model cannot take these examples.
      EnvironmentProblem: If the data cannot be read.
    """
    learned = None if init_from is None else functools.partial(_initial.opened_folder, init_from)
    source = load(data, global_batch_size, learned)
    kind = source.task or TASKS[data.name]
    network = _network(model, source, kind)
    loss = loss or LossConfig()
    task = _MAKERS[kind](network, source, loss)
    one = source.splits.train.take(np.arange(1))
    example = task.inputs(one)
    transfer = _transfer(model, source, kind, example)

    def init(key: jax.Array) -> tuple[types.Params, types.ModelState]:
        params, model_state = network.init(key, example)
        if transfer is not None:
            params = transfer.scaled(params)
        return params, {**model_state, **(task.first_state(params) if task.first_state else {})}

    # The model is traced, not initialised: it is refused before anything is allocated.
    own = is_place(model.name)
    with contextlib.nullcontext() if own else _naming_model(), _naming_promotion(model):
        shapes = jax.eval_shape(lambda: init(jax.random.key(0)))
    if own or source.task:
        evaluated = functools.partial(network.apply, inputs=example, train=False)
        outputs = jax.eval_shape(evaluated, *shapes)[0]
        if loss.name:
            task = _supervised.with_own_loss(task, network, loss, source, outputs)
        else:
            _supervised.check_outputs(source, outputs, model.name)
    elif loss.name:
        task = _supervised.with_own_loss(task, network, loss)
    if own or loss.name:  # code of the user is traced before anything is compiled
        jax.eval_shape(task.loss_fn, *shapes, _without_damaged(one), jax.random.key(0))
    loss_fn = _with_l2(task.loss_fn, loss.l2) if loss.l2 else task.loss_fn
    names = task.metric_names or _metric_names(task, shapes, source.splits.validation)
    evaluator = task.evaluator or means_of(task.metric_fn)
    stacked = _networks.stacked(model, shapes[0])
    module = network.module
    return LoadedProblem(
        init,
        shapes[0],
        loss_fn,
        task.metric_fn,
        source.splits,
        stacked,
        evaluator,
        names,
        source.vocabulary,
        source.outputs,
        task.main_metric,
        task.trivial_loss,
        known_roles=None if module is None else masks.module_roles(module, stacked),
        transfer=transfer,
        activations=None if own else functools.partial(_activations, model, source, kind, task),
    )


def _activations(
    model: ModelConfig,
    source: Source,
    kind: str,
    task: Task,
    params: types.Params,
    model_state: types.ModelState,
    batch: types.Batch,
) -> dict[str, jax.Array]:
    """Return the results of all modules for a batch: "output" is that of the network."""
    variables = {"params": params, **model_state}
    options = {"capture_intermediates": True, "mutable": ["intermediates"]}
    module = _linen(model, source, kind)
    _, kept = module.apply(variables, task.inputs(batch), train=False, **options)

    # A module's path ends with "__call__" and the number of the call.
    named = tree.by_name(kept["intermediates"])
    tidy = {
        name.replace("/__call__/0", "").replace("__call__/0", "output"): x
        for name, x in named.items()
    }
    return {name: x for name, x in tidy.items() if jnp.issubdtype(x.dtype, jnp.floating)}


def _transfer(model: ModelConfig, source: Source, kind: str, example: Any) -> Transfer | None:
    """Return the narrower network whose numbers a config takes; None if it takes none."""
    narrow = _networks.base_model(model)
    if narrow is None:
        return None
    base = _network(narrow, source, kind)
    shapes = jax.eval_shape(lambda: base.init(jax.random.key(0), example))[0]
    return _networks.transfer_of(model, shapes, _networks.stacked(model, shapes))


def _network(model: ModelConfig, source: Source, task: str) -> Model:
    if is_place(model.name):
        return _networks.own_model(model, source.outputs)
    several = len(source.features) > 1
    fix = f"{model.name} takes one array, and {{features}} are {source.features}; name one"
    also = {"features": "data.features"}
    require(not several, "model.name", model.name, fix, code="conflict", also=also)
    return from_linen(_linen(model, source, task))


def _linen(model: ModelConfig, source: Source, task: str) -> nn.Module:
    head = "question_answering" if task == "question_answering" else "pretraining"
    return _networks.make_network(model, source.outputs, head)


def _metric_names(task: Task, shapes: Any, dataset: Dataset) -> tuple[str, ...]:
    one = _without_damaged({**dataset.take(np.arange(1)), "mask": np.ones(1, bool)})
    return tuple(jax.eval_shape(task.metric_fn, *shapes, one))


def _without_damaged(batch: types.Batch) -> types.Batch:
    return {name: array for name, array in batch.items() if name != DAMAGED}


def _with_l2(plain: types.LossFn, weight: float) -> types.LossFn:
    """Add the penalty to the loss that is minimised; the metrics are those of the plain loss."""

    def loss_fn(params, model_state, batch, rng):
        loss, rest = plain(params, model_state, batch, rng)
        penalty = losses.l2_penalty(params, weight)
        if isinstance(loss, tuple):
            total, count = loss
            return (total + count * penalty, count), rest
        return loss + penalty, rest

    return loss_fn


def check_size(problem: LoadedProblem, global_batch_size: int) -> None:
    """Raise `UserError` if a batch has more examples than the training set."""
    examples = len(problem.splits.train)
    fix = f"the training set has {examples} examples; use at most that"
    fits = global_batch_size <= examples
    require(fits, "global_batch_size", global_batch_size, fix, code="mismatch")


def check_batch(model: ModelConfig, here: Replicas, num_examples: int) -> None:
    """Raise `UserError` if folds or batch norm's groups do not fit the replicas or a microstep."""
    if model.name not in BATCH_NORMED:
        return
    folded = (model.fold_examples or 1) if model.name == "efficientnet" else 1
    with _naming_model():
        with errors.about("fold_examples", folded, "fold_examples", code="mismatch"):
            check_fold_examples(folded, num_examples // here.count)
        StatsScope.parse(model.batch_norm_scope).view(here, num_examples, folded)


def _naming_model() -> contextlib.AbstractContextManager[None]:
    """Let errors of a network name the fields of the config."""
    return errors.under(
        "model",
        None,
        image_size="data.image_size",
        order="parallel.order",
        scan="model.scan_layers",
        sequence_length="data.sequence_length",
        stats_scope="model.batch_norm_scope",
    )


@contextlib.contextmanager
def _naming_promotion(model: ModelConfig) -> Iterator[None]:
    """Name the variable in errors if it forbids the two precisions that a network computes in."""
    try:
        yield
    except ValueError as error:
        if type(error).__name__ != "TypePromotionError":  # not public in JAX 0.8
            raise
        fix = f"{model.name} computes in two precisions; unset it"
        variable = "$JAX_NUMPY_DTYPE_PROMOTION"
        raise EnvironmentProblem(variable, "strict", fix, code="conflict") from error
