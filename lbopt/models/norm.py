"""Batch normalization whose statistics cross replicas as far as asked, and no further."""

from __future__ import annotations

import dataclasses
import re
from typing import Any, NoReturn

import flax.linen as nn
import jax
import jax.numpy as jnp

from lbopt import replicas, tree
from lbopt.errors import UserError


@dataclasses.dataclass(frozen=True)
class Scope:
    """Which examples share their batch statistics.

    Attributes:
      kind: "global", "local" (one replica), "replicas" or "examples".
      size: replicas or examples in a group; 0 for global and local.
    """

    kind: str
    size: int = 0

    @classmethod
    def parse(cls, text: str) -> Scope:
        """Read `global`, `local`, `replicas:N` or `examples:N`.

        >>> Scope.parse("replicas:4")
        Scope(kind='replicas', size=4)
        """
        if text in ("global", "local"):
            return cls(text)
        match = re.fullmatch(r"(replicas|examples):([1-9]\d*)", text)
        if match is None:
            raise UserError(f"stats_scope = {text!r}: use global, local, replicas:N or examples:N (contiguous groups)")
        return cls(match[1], int(match[2]))

    def num_groups(self, num_replicas: int, num_examples: int) -> int:
        """Return into how many contiguous groups the global batch falls.

        Args:
          num_replicas: replicas that share the global batch.
          num_examples: examples in the global batch (of one microstep).

        Raises:
          UserError: if groups would differ in size, or if one would hold parts of replicas.
        """
        if self.kind == "replicas":
            groups = self._divide(num_replicas, "replicas")
        elif self.kind == "examples":
            groups = self._divide(num_examples, "examples of the batch")
        else:
            groups = num_replicas if self.kind == "local" else 1
        if max(groups, num_replicas) % min(groups, num_replicas):
            self._refuse(
                f"{groups} groups do not line up with {num_replicas} replicas: let a group hold whole replicas or divide one's part"
            )
        if num_examples % groups:
            self._refuse(
                f"{groups} groups do not divide the {num_examples} examples of the batch: choose another batch or group size"
            )
        return groups

    def _divide(self, total: int, what: str) -> int:
        if total % self.size:
            self._refuse(f"groups of {self.size} do not divide the {total} {what}: choose a group size that does")
        return total // self.size

    @property
    def text(self) -> str:
        """What `parse` reads."""
        return f"{self.kind}:{self.size}" if self.size else self.kind

    def _refuse(self, reason: str) -> NoReturn:
        raise UserError(f"stats_scope = {self.text!r}: {reason}")


class BatchNorm(nn.Module):
    r"""Batch normalization over the global batch, groups of it, or each replica's part.

        y = (x - mean) / sqrt(var + epsilon) * scale + bias

    with mean and (biased) variance over every axis but the last, within the example's group. Under `jit` the groups are
    a reshape of the global batch; under `pmap` they are reductions over replica groups: both give the same numbers.
    Statistics are taken in fp32 as E[x], E[x^2] - E[x]^2 (one pass, one reduction). The running statistics are moved by
    the mean over groups of each group's mean and variance.

    `lbopt.make_train_step` states how many replicas there are. In a step of your own, trace under
    `lbopt.replicas.tracing_for(count, axis_name)`; without it there is one replica, and a hand-written `pmap` normalizes
    over each device's part.

    Attributes:
      stats_scope: "global", "local", "replicas:N" or "examples:N"; groups are contiguous in the global batch.
      momentum: of the running statistics: running = momentum * running + (1 - momentum) * batch.
      epsilon: added to the variance.
      use_scale: learn a scale, fp32, [features].
      use_bias: learn a bias, fp32, [features].
      scale_init: initializer of the scale.
      bias_init: initializer of the bias.
      dtype: of the output; None for the input's.

    Raises:
      UserError: for an unknown scope; when applied, if nobody stated the replicas that the scope counts, or if the groups do not divide the replicas or the batch.

    References:
      Ying et al., Image Classification at Supercomputer Scale, arXiv 1811.06992 (distributed batch normalization).
    """

    stats_scope: str = "global"
    momentum: float = 0.9
    epsilon: float = 1e-5
    use_scale: bool = True
    use_bias: bool = True
    scale_init: nn.initializers.Initializer = nn.initializers.ones_init()
    bias_init: nn.initializers.Initializer = nn.initializers.zeros_init()
    dtype: Any = None

    @nn.compact
    def __call__(self, x: jax.Array, use_running_average: bool) -> jax.Array:
        """Normalize `x` [batch, ..., features], by the running statistics if told to."""
        scope = Scope.parse(self.stats_scope)
        shape = (x.shape[-1],)
        running_mean = self.variable("batch_stats", "mean", jnp.zeros, shape, jnp.float32)
        running_var = self.variable("batch_stats", "var", jnp.ones, shape, jnp.float32)
        if use_running_average:
            y = _normalize(x, running_mean.value, running_var.value, self.epsilon)
        elif self.is_initializing():
            y = x.astype(tree.wide_dtype(x.dtype))
        else:
            y, mean, var = _normalize_by_group(x, scope, self.epsilon)
            running_mean.value = self.momentum * running_mean.value + (1 - self.momentum) * mean
            running_var.value = self.momentum * running_var.value + (1 - self.momentum) * var
        if self.use_scale:
            y = y * self.param("scale", self.scale_init, shape, jnp.float32)
        if self.use_bias:
            y = y + self.param("bias", self.bias_init, shape, jnp.float32)
        return y.astype(self.dtype or x.dtype)


def _normalize(x: jax.Array, mean: jax.Array, var: jax.Array, epsilon: float) -> jax.Array:
    return (x - mean) * jax.lax.rsqrt(var + epsilon)


def _normalize_by_group(x: jax.Array, scope: Scope, epsilon: float) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return (normalized x in fp32, mean, variance); the statistics are averaged over the groups this replica sees."""
    here = _replicas(scope)
    seen = here.count if here.axis_name else 1
    groups = scope.num_groups(here.count, seen * x.shape[0])
    groups_here, peers = max(1, groups // seen), max(1, seen // groups)
    grouped = x.reshape(groups_here, x.shape[0] // groups_here, *x.shape[1:]).astype(tree.wide_dtype(x.dtype))
    axes = tuple(range(1, grouped.ndim - 1))
    moments = jnp.stack([jnp.mean(grouped, axes), jnp.mean(jnp.square(grouped), axes)])
    if here.axis_name and peers > 1:
        moments = jax.lax.pmean(moments, here.axis_name, axis_index_groups=_contiguous(seen, peers))
    mean, var = moments[0], jnp.maximum(moments[1] - jnp.square(moments[0]), 0)
    wide = (slice(None),) + (None,) * len(axes)
    y = _normalize(grouped, mean[wide], var[wide], epsilon).reshape(x.shape)
    return y, jnp.mean(mean, 0), jnp.mean(var, 0)


def _replicas(scope: Scope) -> replicas.Replicas:
    here = replicas.current()
    if here is None and scope.kind in ("local", "replicas"):
        raise UserError(
            "stats_scope = "
            f"{scope.text!r}: nobody said how many replicas there are; train by lbopt.make_train_step, or trace your own step "
            "under lbopt.replicas.tracing_for(count, axis_name)"
        )
    return here or replicas.Replicas()


def _contiguous(count: int, size: int) -> list[list[int]] | None:
    """Return the replica groups, or None when one group holds them all."""
    if size == count:
        return None
    return [list(range(start, start + size)) for start in range(0, count, size)]
