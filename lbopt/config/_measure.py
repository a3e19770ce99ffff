"""The configuration of a study's measurements other than losses and accuracies."""

# No `from __future__ import annotations` here: the flags read the fields' types.
import dataclasses

from lbopt import errors
from lbopt.aggregators import require_halves
from lbopt.config._checks import at_least
from lbopt.config._fields import NOT_ZERO, only
from lbopt.transforms import module_patterns


@dataclasses.dataclass
class MeasureConfig:
    """Measurements of a study other than losses and accuracies.

    Attributes:
      distance: Whether ||w_t - w_0|| is recorded at every step of every trial.
      num_probes: Number of log-spaced steps of every final trial at which gradients are probed
        (noise scale, phi, local Lipschitz constant and trust ratios); 0 for none.
      probe_parts: Number of equal slices of the probed examples, even: the noise scale compares
        their gradients with that of all, phi compares the two halves.
      probe_part_size: Examples in a slice; all slices together have at most those of the training
        set.
      phi_modules: (name, regular expression) of each module of the model whose phi is probed, in
        the form that AGVM takes; the first expression found in a parameter's path counts. Phi of
        each parameter is probed in any case.

    >>> measure = MeasureConfig(num_probes=12, probe_parts=8)
    >>> measure.probe_part_size
    32
    """

    distance: bool = True
    num_probes: int = 0
    probe_parts: int = only(16, num_probes=NOT_ZERO)
    probe_part_size: int = only(32, num_probes=NOT_ZERO)
    phi_modules: tuple[tuple[str, str], ...] = only((), num_probes=NOT_ZERO)


def check_measure(measure: MeasureConfig) -> None:
    """Raise `UserError` for a value that no measurement takes."""
    at_least("num_probes", measure.num_probes, 0)
    require_halves("probe_parts", measure.probe_parts)
    at_least("probe_part_size", measure.probe_part_size, 1)
    if measure.phi_modules:
        with errors.under("", modules="phi_modules"):
            module_patterns(measure.phi_modules)
