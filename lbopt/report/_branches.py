"""The critical batch of a run by its branches, beside the noise scale that the run logged.

The line of a measurement stands in the run's folder. A copy in that of a study has the run's name
and noise scales besides, and the arms that it can be compared with.
"""

from __future__ import annotations

import dataclasses
import math
import pathlib
import statistics
from collections.abc import Mapping, Sequence
from typing import Any, NotRequired, TypedDict

from lbopt import _typed_json
from lbopt.report import _page
from lbopt.report._agreement import WITHIN, disagrees
from lbopt.workdir import CRITICAL_FILE, finite_or_none, read_json_lines

_ABOUT = (
    "Branches of lbopt critical continue the run from a checkpoint at larger batches, over the "
    "same examples. The critical batch lies between the largest whose training loss is within the "
    "tolerance, with all smaller ones, and the next one that was tried. The noise scale is the "
    "last one that the run had logged by then."
)
_HEADER = ("step", "examples seen", "rule", "tolerance", "critical batch", "noise scale")
_HEADER_OF_LAYERS = ("of norms alone", "of single parameters, median")
_SCALE = "train/noise_scale"
_Scale = _typed_json.Finite | None
"""A noise scale as it is logged: null if it cannot be told from infinity."""


class _BranchLine(TypedDict):
    """A branch in a line of critical.jsonl."""

    global_batch_size: _typed_json.Size


class _CriticalLine(TypedDict):
    """The fields of a line of critical.jsonl that the section shows."""

    step: _typed_json.Count
    examples_seen: _typed_json.Count
    rule: str
    tolerance: _typed_json.Finite
    branches: list[_BranchLine]
    critical_batch_size: _typed_json.Size


class _LineOfRun(_CriticalLine):
    """A line in the folder of a study."""

    run: str
    arms: list[str]
    noise_scale: NotRequired[_Scale]
    noise_scale_of_norms: NotRequired[_Scale]
    noise_scale_of_parameters: NotRequired[tuple[_Scale, _Scale, _Scale]]


@dataclasses.dataclass(frozen=True)
class Branched:
    """A measurement of the critical batch, and the noise scale of the run at its step.

    Attributes:
      line: Line of the file of the measurements, with `logged_scales`.
    """

    line: Mapping[str, Any]

    @property
    def noise_scale(self) -> float | None:
        """Noise scale in examples; None if the run logged none by then."""
        return _scale(self.line["noise_scale"]) if "noise_scale" in self.line else None

    @property
    def of_layers(self) -> tuple[str, ...]:
        """Columns of the noise scales of norms and of parameters as text; () if not logged."""
        if "noise_scale_of_parameters" not in self.line:
            return ()
        low, middle, high = map(_amount, map(_scale, self.line["noise_scale_of_parameters"]))
        norms = "noise_scale_of_norms"
        of_norms = _amount(_scale(self.line[norms])) if norms in self.line else "none"
        return of_norms, f"{low} to {high}, {middle}"

    @property
    def least(self) -> float:
        """Largest batch within the tolerance; 0 if no batch above the run's own is."""
        # The run's own batch is the reference: it is within the tolerance in any case.
        sizes = self._sizes
        critical = self.line["critical_batch_size"]
        return 0.0 if critical == sizes[0] and len(sizes) > 1 else float(critical)

    @property
    def most(self) -> float:
        """Smallest batch that was tried beyond it; infinite if there is none."""
        critical = self.line["critical_batch_size"]
        return min((float(size) for size in self._sizes if size > critical), default=math.inf)

    @property
    def _sizes(self) -> list[int]:
        return [one["global_batch_size"] for one in self.line["branches"]]

    @property
    def disagrees(self) -> bool:
        """Whether the noise scale is too far from every critical batch between the bounds."""
        return self.noise_scale is not None and disagrees(self.noise_scale, self.least, self.most)

    @property
    def between(self) -> str:
        """The bounds of the critical batch as text."""
        if math.isinf(self.most):
            return f"at least {self.least:.0f}"
        return f"{self.least:.0f} to {self.most:.0f}" if self.least else f"below {self.most:.0f}"

    @property
    def scale_text(self) -> str:
        """The noise scale as text."""
        return "not logged" if self.noise_scale is None else _amount(self.noise_scale)


def branched_for(workdir: pathlib.Path) -> tuple[Branched, ...]:
    """Return the measurements by branches of single runs that were added to a study.

    Args:
      workdir: The study's folder.

    Raises:
      EnvironmentProblem: If a line is damaged.
    """
    return tuple(map(Branched, read_json_lines(workdir / CRITICAL_FILE, _check_line_of_run)))


def logged_scales(
    line: Mapping[str, Any], metrics: Sequence[Mapping[str, Any]]
) -> dict[str, float | list[float | None] | None]:
    """Return the last noise scales that a run had logged at a measurement, for its line.

    Args:
      line: Line of the measurement.
      metrics: Lines of the run's metrics.jsonl.

    Returns:
      "noise_scale", "noise_scale_of_norms" and "noise_scale_of_parameters" (the smallest, the
      median and the largest), those that were logged. None is one that cannot be told from
      infinity.
    """
    logged = [one for one in metrics if _SCALE in one and one["step"] <= line["step"]]
    last = logged[-1] if logged else {}
    of_norms = f"{_SCALE}_of_norms"
    found = {name.removeprefix("train/"): last[name] for name in (_SCALE, of_norms) if name in last}
    scales = [_scale(x) for name, x in last.items() if name.startswith(f"{_SCALE}/")]
    if scales:
        ends = (min(scales), statistics.median(scales), max(scales))
        found["noise_scale_of_parameters"] = [*map(finite_or_none, ends)]
    return found


def critical_section(
    workdir: pathlib.Path, lines: Sequence[Mapping[str, Any]]
) -> list[_page.Section]:
    """Return the section of the critical batch; none if the run was not branched.

    Args:
      workdir: The run's folder.
      lines: Lines of its metrics.jsonl.
    """
    found = [
        Branched({**line, **logged_scales(line, lines)})
        for line in read_json_lines(workdir / CRITICAL_FILE, _check_critical)
    ]
    if not found:
        return []
    more, columns = columns_of_layers(found)
    rows = [[*_row(one), *added] for one, added in zip(found, columns, strict=True)]
    paragraphs = [_ABOUT, _agreement(found)]
    return [_page.Section("Critical batch", paragraphs, header=_HEADER + more, rows=rows)]


def columns_of_layers(
    found: Sequence[Branched | None],
) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Return header and cells of the noise scales of norms and of parameters, for a table.

    Args:
      found: The measurement of each row; None for a row without one.

    Returns:
      The header, and the cells of each row; all are () if no run logged such noise scales.
    """
    cells = [one.of_layers if one else () for one in found]
    if not any(cells):
        return (), cells
    return _HEADER_OF_LAYERS, [each or ("",) * len(_HEADER_OF_LAYERS) for each in cells]


def _check_critical(line: Any, kind: Any = _CriticalLine) -> None:
    """Raise `ValueError` naming the field unless a line is one of `lbopt critical`."""
    if not _typed_json.convert(line, kind)["branches"]:
        raise ValueError("branches is empty")


def _check_line_of_run(line: Any) -> None:
    _check_critical(line, _LineOfRun)


def _scale(logged: float | None) -> float:
    """Return a noise scale from a log, in which null cannot be told from infinity."""
    return math.inf if logged is None else float(logged)


def _amount(scale: float) -> str:
    return "infinite" if math.isinf(scale) else f"{scale:,.4g}"


def _row(one: Branched) -> list[str]:
    line = one.line
    return [
        f"{line['step']}",
        f"{line['examples_seen']:,}",
        line["rule"],
        f"{line['tolerance']:g}",
        one.between,
        one.scale_text,
    ]


def _agreement(found: Sequence[Branched]) -> str:
    """Return a sentence on where the branches and the noise scale disagree."""
    both = [one for one in found if one.noise_scale is not None]
    if not both:
        return "The run logged no noise scale to compare with: optimizer.track_noise_scale logs it."
    apart = [
        f"{one.between} and {one.scale_text} at step {one.line['step']}"
        for one in both
        if one.disagrees
    ]
    if not apart:
        return f"They do not disagree by more than a factor of {WITHIN:g}."
    return (
        f"Critical batch and noise scale disagree by more than a factor of {WITHIN:g}: "
        f"{'; '.join(apart)}."
    )
