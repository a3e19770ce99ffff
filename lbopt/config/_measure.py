"""What a study measures beside losses and accuracies."""

# No `from __future__ import annotations` here: the flags read the fields' types.
import dataclasses

from lbopt.config._checks import at_least
from lbopt.errors import require


@dataclasses.dataclass
class MeasureConfig:
    """What a study measures beside losses and accuracies.

    Attributes:
      distance: ||w_t - w_0|| at every step of every trial.
      num_probes: log-spaced steps of every final trial at which gradients are probed: noise scale, phi, local Lipschitz
        constant and trust ratios; 0 for none.
      probe_parts: equal parts of the probed examples, an even number: the noise scale compares the gradients of parts
        with that of all, phi those of the two halves.
      probe_part_size: examples of a part; all parts together have at most those of the training set.
      phi_modules: (name, regular expression) of each module of the model whose phi is probed, as AGVM takes them; the first that is found
        in a parameter's path. Of each parameter it is probed anyway.
    """

    distance: bool = True
    num_probes: int = 0
    probe_parts: int = 16
    probe_part_size: int = 32
    phi_modules: tuple[tuple[str, str], ...] = ()


def validate_measure(measure: MeasureConfig, prefix: str) -> None:
    """Check the fields of what is measured.

    Args:
      measure: the fields, of their declared types.
      prefix: what the message calls them, for instance "config.measure".

    Raises:
      UserError: naming the field, its value and the fix.
    """
    at_least(f"{prefix}.num_probes", measure.num_probes, 0)
    at_least(f"{prefix}.probe_parts", measure.probe_parts, 2)
    require(
        measure.probe_parts % 2 == 0,
        f"{prefix}.probe_parts",
        measure.probe_parts,
        "phi compares two halves of the parts; give an even number",
    )
    at_least(f"{prefix}.probe_part_size", measure.probe_part_size, 1)
    names = [name for name, _ in measure.phi_modules]
    fix = "give each module one name, and 1 probe or more (num_probes)"
    fits = len(set(names)) == len(names) and (measure.num_probes > 0 or not names)
    require(fits, f"{prefix}.phi_modules", measure.phi_modules, fix)
