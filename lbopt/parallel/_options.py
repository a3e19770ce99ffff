"""The options of a training step, and the checks that they go together."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

import numpy as np
from jax.sharding import Mesh

from lbopt import _scalars
from lbopt.aggregators import Aggregator
from lbopt.errors import UserError, require, require_choice
from lbopt.parallel._clip import PER_LAYER, GradientClip
from lbopt.parallel._mesh import check_mesh
from lbopt.parallel._reduction import Aggregate, ReduceScatter, Reduction, require_floating

Backend = Literal["jit", "pjit", "pmap"]
BACKENDS = ("jit", "pjit", "pmap")


@dataclasses.dataclass(frozen=True)
class StepOptions:
    """The options of `make_train_step`, which documents them.

    Raises:
      UserError: If an option has another type or does not go with the others; the error names it.
    """

    backend: Backend = "jit"
    num_microsteps: int = 1
    compute_dtype: Any = None
    clip: GradientClip | None = None
    reduction: Reduction | None = None
    shard_update: bool = False
    measure_noise: bool | Literal["layers"] = False
    key_per_replica: bool = True
    donate: bool = True

    def __post_init__(self) -> None:
        if isinstance(self.reduction, Aggregator):
            object.__setattr__(self, "reduction", Aggregate(self.reduction))
        object.__setattr__(self, "num_microsteps", _scalars.known(self.num_microsteps))
        self._check_types()
        self._check_clip()
        self._check_shards()
        self._check_aggregator()

    @property
    def pmapped(self) -> bool:
        """Whether "pmap" maps the whole step."""
        return self.backend == "pmap"

    @property
    def mapped(self) -> bool:
        """Whether each replica differentiates its own slice of the batch, under either backend."""
        by_clip = self.clip is not None and self.clip.stage == "replica"
        by_noise = bool(self.measure_noise) and self.num_microsteps == 1
        return self.pmapped or self.reduction is not None or by_clip or by_noise

    @property
    def sharded(self) -> bool:
        """Whether each device updates its shard of the parameters."""
        return self.shard_update or isinstance(self.reduction, ReduceScatter)

    @property
    def replicas_per_device(self) -> int:
        """Number of replicas that each device runs sequentially."""
        found = self.reduction
        return found.replicas_per_device if isinstance(found, Aggregate) else 1

    def check_mesh(self, mesh: Mesh) -> None:
        """Raise `UserError` unless the step can run on these devices."""
        check_mesh(mesh, self.mapped or self.sharded, not self.pmapped)
        self.check_parts(mesh.size * self.replicas_per_device)

    def check_parts(self, num_replicas: int) -> None:
        """Raise `UserError` unless there are the microbatches that a noise measurement compares."""
        after_mean = self.clip is not None and self.clip.stage == "mean"
        num_microbatches = self.num_microsteps * (1 if after_mean else num_replicas)
        fix = "it compares gradients of microbatches, and there is one; use {num_microsteps} >= 2"
        one = num_microbatches == 1
        require(
            not (self.measure_noise and one),
            "measure_noise",
            self.measure_noise,
            fix,
            code="conflict",
            also=["num_microsteps"],
        )

    def _check_types(self) -> None:
        require_choice("backend", self.backend, BACKENDS)
        number = self.num_microsteps
        counts = isinstance(number, int) and not isinstance(number, bool)
        require(counts and number >= 1, "num_microsteps", number, "give a number >= 1")
        require_floating("compute_dtype", self.compute_dtype)
        for field in ("shard_update", "measure_noise", "key_per_replica", "donate"):
            value = getattr(self, field)
            is_flag = isinstance(value, bool | np.bool_ | int) and value in (0, 1)
            is_flag = is_flag or (field == "measure_noise" and value == PER_LAYER)
            fix = "give True or False" + (f", or {PER_LAYER!r}" if field == "measure_noise" else "")
            require(is_flag, field, value, fix, code="type")
        is_clip = self.clip is None or isinstance(self.clip, GradientClip)
        require(is_clip, "clip", self.clip, "give a lbopt.GradientClip, or None", code="type")
        known = self.reduction is None or isinstance(self.reduction, Reduction)
        fix = "give lbopt.AllReduce(), ReduceScatter(), Aggregate(...), an aggregator, or None"
        require(known, "reduction", self.reduction, fix, code="type")

    def _check_clip(self) -> None:
        if self.clip is None or self.clip.stage != "mean":
            return
        if isinstance(self.reduction, ReduceScatter | Aggregate):
            kind = type(self.reduction).__name__
            fix = f"{kind} reduces once a step; use 'accumulated' or 'replica'"
            raise UserError("clip.stage", "mean", fix, code="conflict")

    def _check_shards(self) -> None:
        if not (self.sharded and self.pmapped):
            return
        field = "shard_update" if self.shard_update else "reduction"
        fix = "under pmap every replica holds the whole state; use {backend}='jit'"
        raise UserError(field, getattr(self, field), fix, code="conflict", also=["backend"])

    def _check_aggregator(self) -> None:
        if not isinstance(self.reduction, Aggregate):
            return
        aggregator = self.reduction.aggregator
        if self.shard_update and aggregator.needs_second_moment:
            fix = f"{aggregator.name} needs the optimizer's second moment whole; leave it False"
            raise UserError("shard_update", True, fix, code="conflict")

        if not self.pmapped:
            return
        for field, plain in (("replicas_per_device", 1), ("over", "replicas")):
            value = getattr(self.reduction, field)
            fix = "under pmap each device is one replica; use {backend}='jit'"
            require(
                value == plain,
                f"reduction.{field}",
                value,
                fix,
                code="conflict",
                also=["backend"],
            )
