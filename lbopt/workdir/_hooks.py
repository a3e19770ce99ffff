"""Functions of the user that get the metrics of a run as they are written."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from typing import Any

from lbopt._user_code import naming_errors
from lbopt.errors import require

MetricsHook = Callable[[int, dict[str, float]], Any]
"""Function (step, metrics): the optimizer step, and the scalars of that line of metrics.jsonl."""


def metrics_hook(given: Any, field: str, value: str) -> MetricsHook:
    """Return a hook whose errors name the file and the line of the user.

    Args:
      given: Function (step, metrics), or a writer with a method `write_scalars(step, metrics)` like
        those of `clu.metric_writers`.
      field: Argument or field that holds it, for errors.
      value: Its value, for errors.

    Raises:
      UserError: If it is neither.
    """
    function = getattr(given, "write_scalars", given)
    fix = "give a function (step, metrics), or a writer with write_scalars(step, metrics)"
    require(callable(function), field, value, fix, code="type")
    file = defined_in(function)

    def hook(step: int, metrics: dict[str, float]) -> None:
        with naming_errors(field, value, file):
            function(step, metrics)

    return hook


def metrics_hooks(on_metrics: Iterable[Any]) -> list[MetricsHook]:
    """Return the hooks of the argument `on_metrics`."""
    return [metrics_hook(given, "on_metrics", name_of(given)) for given in on_metrics]


def name_of(function: Any) -> str:
    """Return the name of a function, or the class of another object."""
    return str(getattr(function, "__name__", type(function).__name__))


def defined_in(function: Any) -> str:
    """Return the file that defines a function or the class of a callable; its name without one."""
    for one in (inspect.unwrap(function), type(function).__call__):
        code = getattr(getattr(one, "__func__", one), "__code__", None)
        if code is not None:
            return str(code.co_filename)
    return name_of(function)
