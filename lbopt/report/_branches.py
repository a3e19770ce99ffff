"""The critical batch of a run by its branches, beside the noise scale that the run logged."""

from __future__ import annotations

import dataclasses
import math
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any, TypedDict

from lbopt import _typed_json
from lbopt.report import _page
from lbopt.report._agreement import WITHIN, disagrees
from lbopt.workdir import CRITICAL_FILE, read_json_lines

_ABOUT = (
    "Branches of lbopt critical continue the run from a checkpoint at larger batches, over the "
    "same examples. The critical batch lies between the largest whose training loss is within the "
    "tolerance, with all smaller ones, and the next one that was tried. The noise scale is the "
    "last one that the run had logged by then."
)
_HEADER = ("step", "examples seen", "rule", "tolerance", "critical batch", "noise scale")


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


@dataclasses.dataclass(frozen=True)
class _Measured:
    """A measurement of the critical batch, and the noise scale of the run at its step.

    Attributes:
      line: Line of the file of the measurements.
      least: Largest batch within the tolerance; 0 if no batch above the run's own is.
      most: Smallest batch that was tried beyond it; infinite if there is none.
      noise_scale: Noise scale in examples; None if the run logged none by then.
    """

    line: Mapping[str, Any]
    least: float
    most: float
    noise_scale: float | None

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


def critical_section(
    workdir: pathlib.Path, lines: Sequence[Mapping[str, Any]]
) -> list[_page.Section]:
    """Return the section of the critical batch; none if the run was not branched.

    Args:
      workdir: The run's folder.
      lines: Lines of its metrics.jsonl.
    """
    found = [
        _measured(line, lines) for line in read_json_lines(workdir / CRITICAL_FILE, _check_critical)
    ]
    if not found:
        return []
    rows = [_row(one) for one in found]
    return [_page.Section("Critical batch", [_ABOUT, _agreement(found)], header=_HEADER, rows=rows)]


def _check_critical(line: Any) -> None:
    """Raise `ValueError` naming the field unless a line is one of `lbopt critical`."""
    if not _typed_json.convert(line, _CriticalLine)["branches"]:
        raise ValueError("branches is empty")


def _measured(line: Mapping[str, Any], metrics: Sequence[Mapping[str, Any]]) -> _Measured:
    critical = line["critical_batch_size"]
    sizes = [one["global_batch_size"] for one in line["branches"]]
    # The run's own batch is the reference: it is within the tolerance whatever the critical batch.
    alone = critical == sizes[0] and len(sizes) > 1
    most = min((float(size) for size in sizes if size > critical), default=math.inf)

    name = "train/noise_scale"
    logged = [one[name] for one in metrics if name in one and one["step"] <= line["step"]]
    scale = logged[-1] if logged else None
    # Null is a noise scale that cannot be told from infinity.
    noise_scale = None if not logged else math.inf if scale is None else float(scale)
    return _Measured(line, 0.0 if alone else float(critical), most, noise_scale)


def _row(one: _Measured) -> list[str]:
    line = one.line
    return [
        f"{line['step']}",
        f"{line['examples_seen']:,}",
        line["rule"],
        f"{line['tolerance']:g}",
        one.between,
        _scale_text(one),
    ]


def _scale_text(one: _Measured) -> str:
    if one.noise_scale is None:
        return "not logged"
    return "infinite" if math.isinf(one.noise_scale) else f"{one.noise_scale:,.4g}"


def _agreement(found: Sequence[_Measured]) -> str:
    """Return a sentence on where the branches and the noise scale disagree."""
    both = [one for one in found if one.noise_scale is not None]
    if not both:
        return "The run logged no noise scale to compare with: optimizer.track_noise_scale logs it."
    apart = [
        f"{one.between} and {_scale_text(one)} at step {one.line['step']}"
        for one in both
        if one.disagrees
    ]
    if not apart:
        return f"They do not disagree by more than a factor of {WITHIN:g}."
    return (
        f"Critical batch and noise scale disagree by more than a factor of {WITHIN:g}: "
        f"{'; '.join(apart)}."
    )
