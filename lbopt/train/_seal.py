"""The seal of a checkpoint: checksums and metrics, protected by a digest."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from collections.abc import Mapping
from typing import Any

from lbopt import _typed_json
from lbopt.train import _earlier
from lbopt.train._on_disk import SEAL

BEFORE_AGGREGATORS = -1
"""Number of replicas in the seal of an earlier version, whose states had no place for memory."""


@dataclasses.dataclass(frozen=True)
class Seal:
    """The data that are saved beside the arrays of a checkpoint, under the names of these fields.

    Attributes:
      step: The step of the state.
      sums: Checksums of the leaves by name, from `checksums`.
      metrics: Metrics of the evaluation after that step; {} if there was none.
      replicas: Number of replicas whose memory an aggregator keeps in the state; None for no such
        memory, `BEFORE_AGGREGATORS` for a state of an earlier version.
      parts: Number of slices that each replica's memory of a leaf is cut into; None if an earlier
        version did not say.
      layout: Layout of the optimizer's state: `_earlier.NESTED` or `_earlier.NOW`.
      generator: JAX's name of the generator of the random keys; None if an earlier version did not
        say.
    """

    step: int
    sums: dict[str, str]
    metrics: dict[str, float]
    replicas: int | None = BEFORE_AGGREGATORS
    parts: int | None = None
    layout: int = _earlier.NESTED
    generator: str | None = None

    def to_json(self) -> dict[str, Any]:
        """Return JSON data with a digest of the seal.

        A metric that is not finite is NaN or Infinity, as Python writes it.
        """
        body = json.dumps(dataclasses.asdict(self), sort_keys=True)
        return {"seal": body, "sha256": hashlib.sha256(body.encode()).hexdigest()}


@dataclasses.dataclass
class _SavedSeal:
    """A seal as it is written; reading checks these types."""

    step: int
    sums: dict[str, str]
    metrics: dict[str, float | None]
    replicas: int | None = BEFORE_AGGREGATORS
    parts: int | None = None
    layout: int = _earlier.NESTED
    generator: str | None = None


def read(data: Any) -> Seal:
    """Return the seal whose `to_json` made the data.

    Raises:
      ValueError: If it is no seal, or was changed.
    """
    if not isinstance(data, Mapping) or not isinstance(data.get("seal"), str):
        raise ValueError("its seal is missing or damaged")
    body = data["seal"]
    if hashlib.sha256(body.encode()).hexdigest() != data.get("sha256"):
        raise ValueError("its seal is damaged")
    found = _typed_json.convert(_typed_json.decode(body.encode()), _SavedSeal)
    metrics = {name: math.nan if value is None else value for name, value in found.metrics.items()}
    return Seal(**{**vars(found), "metrics": metrics})


def read_seal(folder: Any, step: int) -> Seal:
    """Return the seal of a checkpoint in a folder of checkpoints.

    Raises:
      OSError, ValueError: If it is missing or damaged.
    """
    seal = read(_typed_json.read_file(folder / str(step) / SEAL / "metadata"))
    if seal.step != step:
        raise ValueError(f"it was saved at step {seal.step}")
    return seal
