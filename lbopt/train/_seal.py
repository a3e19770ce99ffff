"""What is saved beside the arrays of a checkpoint: their checksums, the metrics, and a digest of these words themselves."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from collections.abc import Mapping
from typing import Any

from lbopt import _typed_json
from lbopt.train import _earlier

BEFORE_AGGREGATORS = -1


@dataclasses.dataclass(frozen=True)
class Seal:
    """What a checkpoint says of itself.

    Attributes:
      step: of the state.
      sums: leaf name -> checksum, from `checksums`.
      metrics: of the evaluation after that step; {} if there was none.
      replicas: of whose memories the state holds a row each (see `lbopt.parallel._aggregation`); None if it holds none,
        `BEFORE_AGGREGATORS` if it was saved when states had no place for any.
      parts: into how many parts each replica's memory of a leaf was cut (see `lbopt.parallel._parts`); None if that was not said yet.
      layout: how the optimizer's state is laid out, `earlier.NESTED` or `earlier.NOW`.
      generator: JAX's name of the generator of its random keys; None if that was not said yet.
    """

    step: int
    sums: dict[str, str]
    metrics: dict[str, float]
    replicas: int | None = BEFORE_AGGREGATORS
    parts: int | None = None
    layout: int = _earlier.NESTED
    generator: str | None = None

    def to_json(self) -> dict[str, Any]:
        """Return JSON data that knows whether it has been changed; a metric that is not finite is NaN or Infinity, as Python writes it."""
        body = json.dumps(dataclasses.asdict(self), sort_keys=True)
        return {"seal": body, "sha256": hashlib.sha256(body.encode()).hexdigest()}


@dataclasses.dataclass
class _Saved:
    """A seal as it is written, by which its types are checked."""

    step: int
    sums: dict[str, str]
    metrics: dict[str, float | None]
    replicas: int | None = BEFORE_AGGREGATORS
    parts: int | None = None
    layout: int = _earlier.NESTED
    generator: str | None = None


def read(data: Any) -> Seal:
    """Return the seal that `to_json` was called on.

    Raises:
      ValueError: if it is none, or has been changed.
    """
    if not isinstance(data, Mapping) or not isinstance(data.get("seal"), str):
        raise ValueError("its seal is missing or damaged")
    body = data["seal"]
    if hashlib.sha256(body.encode()).hexdigest() != data.get("sha256"):
        raise ValueError("its seal is damaged")
    found = _typed_json.convert(_typed_json.decode(body.encode()), _Saved)
    metrics = {name: math.nan if value is None else value for name, value in found.metrics.items()}
    return Seal(**{**vars(found), "metrics": metrics})
