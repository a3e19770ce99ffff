"""Groups of fields that one text, or an object of the program, can stand for."""

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import optax

from lbopt import _user_code
from lbopt.config._data import ArraysConfig, DataConfig, data_of_text
from lbopt.config._foreign import DECAY, FILLED, LIBRARY, named, names_of_optax
from lbopt.config._loss import LossConfig
from lbopt.config._model import ModelConfig
from lbopt.config._optimizer import OptimizerConfig
from lbopt.config._schedule import ScheduleConfig
from lbopt.errors import require
from lbopt.transforms import lamb, lans, lars

_OURS = {lamb: "lamb", lans: "lans", lars: "lars"}
_PLAIN = (bool, int, float, str, type(None))


OF_TEXT: dict[str, Callable[[str], Any]] = {
    "data": data_of_text,
    "model": ModelConfig,
    "loss": lambda text: LossConfig(name=text),
    "optimizer": OptimizerConfig,
}
"""Groups of fields that one text can stand for, and the functions that read it."""


def _data_of_object(given: Any) -> DataConfig | None:
    """Return the config of a function, of splits, of arrays by name, or of a table of pandas."""
    is_three = isinstance(given, tuple) and len(given) == 3
    if inspect.isroutine(given) or isinstance(given, functools.partial) or is_three:
        return DataConfig(_user_code.place_of(given, "data"))
    if isinstance(given, Mapping) or (hasattr(given, "to_numpy") and hasattr(given, "columns")):
        return ArraysConfig(_user_code.place_of(given, "data"))
    return None


def _model_of_object(given: Any) -> ModelConfig | None:
    is_model = callable(given) or (hasattr(given, "init") and hasattr(given, "apply"))
    return ModelConfig(_user_code.place_of(given, "model")) if is_model else None


def _loss_of_object(given: Any) -> LossConfig | None:
    return LossConfig(name=_user_code.place_of(given, "loss")) if callable(given) else None


def _optimizer_of_object(given: Any) -> OptimizerConfig | None:
    """Return the config of one of our optimizers, of Optax's, or of the user's."""
    if isinstance(given, optax.GradientTransformation):
        return OptimizerConfig(_user_code.place_of(given, "optimizer"))
    if not callable(given):
        return None
    name = getattr(given, "__name__", "")
    fix = "its updates have no learning rate and no sign; chain it with optax.scale(-1.0)"
    require(not name.startswith("scale_by_"), "optimizer", name, fix, code="type")
    if given in _OURS:
        return OptimizerConfig(_OURS[given])
    options = dict(given.keywords) if isinstance(given, functools.partial) else {}
    function = given.func if options and not given.args else given
    names = {named(name): name for name in (*LIBRARY, *names_of_optax())}
    decay = options.pop(DECAY, 0.0)
    simple = all(isinstance(value, _PLAIN) for value in (*options.values(), decay))
    if function in names and simple and not options.keys() & {*FILLED}:
        return OptimizerConfig(names[function], weight_decay=decay, options=options)
    return OptimizerConfig(_user_code.place_of(given, "optimizer"))


def _schedule_of_object(given: Any) -> ScheduleConfig | None:
    """Return the config of a constant, or of a function: number of updates so far -> rate.

    The same rate at every batch size.
    """
    plain = functools.partial(ScheduleConfig, scaling_rule="none", warmup_rule="none")
    if isinstance(given, float | int) and not isinstance(given, bool):
        return plain(float(given), decay="constant")
    if not callable(given):
        return None
    return plain(1.0, decay=_user_code.place_of(given, "schedule"), first_step=0)


_OF_OBJECT: dict[str, tuple[type, Callable[[Any], Any]]] = {
    "data": (DataConfig, _data_of_object),
    "model": (ModelConfig, _model_of_object),
    "loss": (LossConfig, _loss_of_object),
    "optimizer": (OptimizerConfig, _optimizer_of_object),
    "schedule": (ScheduleConfig, _schedule_of_object),
}
"""Groups of fields: their class, and the function of an object that returns one, or None."""


class FromText:
    """A config whose groups can also be given as one text, or as the object itself.

    `config.model = "net.py:make"` is `config.model = ModelConfig("net.py:make")`, and so is
    `config.model = make`. An object that is not in a file has a place in this program only.

    >>> from lbopt.config import ModelConfig, TrainConfig
    >>> TrainConfig(model="cnn").model == TrainConfig(model=ModelConfig("cnn")).model
    True
    """

    def __setattr__(self, name: str, value: Any) -> None:
        if isinstance(value, str) and name in OF_TEXT:
            value = OF_TEXT[name](value)
        elif name in _OF_OBJECT and not isinstance(value, (_OF_OBJECT[name][0], type(None))):
            found = _OF_OBJECT[name][1](value)
            value = value if found is None else found
        object.__setattr__(self, name, value)
