"""The gradient of a loss over a batch: at once or in microsteps, on every replica."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import jaxpr_as_fun
from jax.interpreters import partial_eval

from lbopt import replicas, tree, types
from lbopt.errors import UserError
from lbopt.parallel import _leaves, _loss_form


class MicrobatchSquares(NamedTuple):
    """Squared gradient norms of a batch's microbatches, added up for a gradient-noise estimate.

    Attributes:
      total: Sum over microbatches of weight times squared norm, fp32 scalar.
      weight: Sum of the weights, fp32 scalar; each weight is 1 if all microbatches have equal
        weight.
      microbatches: Number of microbatches, fp32 scalar.
      leaves: The same sum as `total` for each leaf, a pytree like the parameters; () if they are
        not measured.
    """

    total: jax.Array
    weight: jax.Array
    microbatches: jax.Array
    leaves: types.PyTree = ()


class Gradients(NamedTuple):
    """The result of differentiating a loss over a batch or a slice of a batch.

    Attributes:
      grads: Gradient of the mean loss, a pytree like the parameters. Several replicas on one device
        have a leading axis [replicas, ...].
      weight: Weight of these examples relative to others, fp32 scalar or [replicas]; None if equal
        numbers of examples have equal weight.
      model_state: The model's state after the batch.
      metrics: Sums over the batch.
      squares: `MicrobatchSquares` if they are measured, else None.
    """

    grads: types.Params
    weight: jax.Array | None
    model_state: types.ModelState
    metrics: types.Metrics
    squares: MicrobatchSquares | None = None


GradientFn = Callable[[types.Params, types.ModelState, types.Batch, jax.Array], Gradients]
"""(params, model_state, batch, rng) -> `Gradients`."""

MicrobatchFn = Callable[[Gradients], Gradients]
"""The treatment of each microstep's gradient before it is added up: a clip, a measurement."""


def make_gradient_fn(
    loss_fn: types.LossFn,
    num_microsteps: int = 1,
    compute_dtype: Any = None,
    each_microbatch: MicrobatchFn = lambda gradients: gradients,
) -> GradientFn:
    """Build the function that differentiates a loss over one batch.

    For slices j of a batch, whose losses are (sum s_j, weight w_j), the result is

        sum_j grad s_j / sum_j w_j

    which is the gradient of the whole batch's mean, however the batch is split. A loss that returns
    only its mean has w_j = 1 for every slice.

    Args:
      loss_fn: The loss, a `lbopt.types.LossFn`.
      num_microsteps: Number of equal slices of the batch, run sequentially (`lax.scan`); gradients
        are summed in fp32. Example i belongs to microstep i mod num_microsteps, which spreads every
        slice evenly over the devices and keeps it the same on any number of them.
      compute_dtype: Dtype to which floating parameters and inputs are cast before the loss; None
        casts nothing, for models that choose for themselves.
      each_microbatch: Function applied to the `Gradients` of every microstep before their
        sum.

    Returns:
      A `GradientFn`. Gradients have the dtype of the parameters; gradients of complex parameters
      are the conjugates of `jax.grad`'s, so that the loss falls against them, as Optax's transforms
      expect. Metrics are sums over the batch. Every microstep starts from the same model_state, and
      the resulting states are averaged, as batch statistics of replica groups are. Leaves of
      model_state without a mean (integers, bools, random keys) come from the last microstep. All
      leaves keep their dtypes.

    Raises:
      UserError: Raised by the returned function, for a loss of another form, or if the batch is
        split and the weight of the loss's mean depends on the batch (`lbopt.types.LossFn`).
    """

    def whole(params, model_state, batch, rng) -> Gradients:
        def objective(params):
            arguments = _cast(params, compute_dtype), model_state, _cast(batch, compute_dtype), rng
            loss = _loss_form.checked(loss_fn(*arguments))
            return loss.mean, loss

        _check_trainable(params)
        grads, loss = jax.grad(objective, has_aux=True)(params)
        grads = jax.tree.map(lambda g: g.conj() if jnp.iscomplexobj(g) else g, grads)
        new_state = _leaves.with_dtypes_of(model_state, loss.model_state)
        return each_microbatch(Gradients(grads, loss.weight, new_state, loss.metrics))

    # The form of the loss is checked when it is first traced; other shapes do not change it.
    checked: list[bool] = []

    def at_once(*arguments) -> Gradients:
        number = replicas.mapped()
        if number == 1 or checked:
            return whole(*arguments)

        # The checked program itself runs, so the loss is traced once.
        program, like = jax.make_jaxpr(whole, return_shape=True)(*arguments)
        _check_weight(program.jaxpr, arguments, like, f"{number} replicas")
        checked.append(True)
        results = jaxpr_as_fun(program)(*jax.tree.leaves(arguments))
        found = jax.tree.unflatten(jax.tree.structure(like), results)
        return jax.tree.map(_as_array, found, like)

    def in_microsteps(params, model_state, batch, rng) -> Gradients:
        microbatches = jax.tree.map(lambda x: _deal(x, num_microsteps), batch)
        keys = jax.vmap(lambda i: jax.random.fold_in(rng, i))(jnp.arange(num_microsteps))

        # One microstep's shapes make the accumulators.
        first = params, model_state, jax.tree.map(lambda x: x[0], microbatches), rng
        program, like = jax.make_jaxpr(whole, return_shape=True)(*first)
        if not checked:
            _check_weight(program.jaxpr, first, like, f"{num_microsteps} microsteps")
            checked.append(True)
        averaged, _ = _leaves.by_mean(like.model_state)
        sums = jax.tree.map(_accumulator, like._replace(model_state=averaged))

        def microstep(sums: Gradients, given: Any) -> tuple[Gradients, types.PyTree]:
            microbatch, key = given
            found = whole(params, model_state, microbatch, key)
            averaged, others = _leaves.by_mean(found.model_state)
            # Weighted sums, divided once at the end, give the same gradient for any split.
            grads = _times(found.grads, found.weight)
            found = found._replace(grads=grads, model_state=averaged)
            return jax.tree.map(lambda a, b: a + jnp.asarray(b, a.dtype), sums, found), others

        sums, others = jax.lax.scan(microstep, sums, (microbatches, keys))

        # Sums become means; leaves without a mean come from the last microstep.
        total = num_microsteps if sums.weight is None else _divisor(sums.weight)
        mean = lambda x, like: (x / num_microsteps).astype(like.dtype)  # noqa: E731
        last = jax.tree.map(lambda x: x[-1], others)
        new_state = _leaves.joined(jax.tree.map(mean, sums.model_state, averaged), last)
        grads = jax.tree.map(lambda g, p: (g / total).astype(p.dtype), sums.grads, params)
        return sums._replace(grads=grads, model_state=new_state)

    return at_once if num_microsteps == 1 else in_microsteps


def for_replicas_in_turn(
    gradient_fn: GradientFn, num_replicas: int, axis_name: str | None
) -> GradientFn:
    """Build the function that runs several replicas of a device sequentially.

    Args:
      gradient_fn: Gradient of one replica's examples, from `make_gradient_fn`.
      num_replicas: Number of replicas on each device, >= 1. Example i of a device belongs to its
        replica i // (batch / num_replicas).
      axis_name: Axis over which the function is mapped; None if it is not mapped.

    Returns:
      A `GradientFn` whose gradients are [num_replicas, ...]. Every replica starts from the same
      model_state and the resulting states are averaged (leaves without a mean come from the first
      replica); metrics are sums. Each replica has its own key, by its index among the replicas of
      all devices.
    """

    def each(params, model_state, batch, rng) -> Gradients:
        first = 0 if axis_name is None else jax.lax.axis_index(axis_name) * num_replicas
        keys = jax.vmap(lambda i: jax.random.fold_in(rng, i))(first + jnp.arange(num_replicas))
        if num_replicas == 1:
            found = gradient_fn(params, model_state, batch, keys[0])
            grads, weight = jax.tree.map(lambda x: x[None], (found.grads, found.weight))
            return found._replace(grads=grads, weight=weight)

        shape = lambda x: (num_replicas, x.shape[0] // num_replicas, *x.shape[1:])  # noqa: E731
        batches = jax.tree.map(lambda x: x.reshape(shape(x)), batch)
        with replicas.one_after_another(num_replicas):
            found = jax.lax.map(
                lambda given: gradient_fn(params, model_state, *given), (batches, keys)
            )
        metrics, squares = jax.tree.map(lambda x: x.sum(0), (found.metrics, found.squares))
        new_state = jax.tree.map(_leaves.mean_of_rows, found.model_state)
        return found._replace(model_state=new_state, metrics=metrics, squares=squares)

    return each


def weighed(
    grads: types.Params, weight: jax.Array | None, axis_name: str | None = None
) -> types.Params:
    """Scale the replicas' mean gradients so that their plain mean is the mean over all examples.

    With n replicas of weights w_i, replica i's gradient is multiplied by n w_i / sum_k w_k. Every
    reduction and every aggregator can then compute or approximate a plain mean.

    Args:
      grads: A replica's gradients, or [replicas, ...] if the weight is [replicas].
      weight: fp32 scalar or [replicas]; None if all replicas have equal weight.
      axis_name: Axis over which the function is mapped; None if it is not mapped.

    Returns:
      Gradients of the same shapes and dtypes.
    """
    if weight is None:
        return grads
    count = weight.size
    total = jnp.sum(weight)
    if axis_name is not None:
        count *= jax.lax.axis_size(axis_name)
        total = jax.lax.psum(total, axis_name)
    return _times(grads, weight * count / _divisor(total))


def _times(grads: types.Params, factor: jax.Array | None) -> types.Params:
    """Multiply gradients by a scalar, or each of [replicas, ...] by its own, in fp32 or wider."""
    if factor is None:
        return grads

    def one(g: jax.Array) -> jax.Array:
        wide = g.astype(tree.wide_dtype(g.dtype))
        return (wide * factor.reshape(factor.shape + (1,) * (g.ndim - factor.ndim))).astype(g.dtype)

    return jax.tree.map(one, grads)


def _divisor(weight: jax.Array) -> jax.Array:
    """Return a weight to divide by: 1 for 0, since a sum over nothing is 0 already."""
    return jnp.where(weight == 0, jnp.ones_like(weight), weight)


def _check_weight(program: Any, arguments: tuple[Any, ...], results: Gradients, parts: str) -> None:
    """Raise `UserError` if the loss is a mean and the metric `loss` has a weight from the batch.

    Microbatches of such a batch may have unequal weights: the mean of their means is not the
    batch's.
    """
    if results.weight is not None or "loss" not in results.metrics:
        return
    asked: Any = jax.tree.map(lambda _: False, results)
    asked.metrics["loss"] = (False, True)
    _, needed = partial_eval.dce_jaxpr(program, jax.tree.leaves(asked))
    before = len(jax.tree.leaves(arguments[:2]))
    if any(needed[before : before + len(jax.tree.leaves(arguments[2]))]):
        raise UserError(
            "loss_fn",
            reason=f"it returns a mean, the batch is split into {parts}, and the weight of the "
            "metric 'loss' depends on the batch; return (sum, weight) as the loss",
            code="mismatch",
        )


def _check_trainable(params: types.Params) -> None:
    """Name the first parameter that has no gradient; JAX would name its dtype only."""
    for name, leaf in zip(tree.leaf_names(params), jax.tree.leaves(params), strict=True):
        if not _leaves.has_mean(leaf):
            reason = f"{leaf.dtype} has no gradient; keep it in the model state"
            raise UserError(f"params/{name}", reason=reason, code="type")


def _as_array(x: Any, like: Any) -> jax.Array:
    return x if isinstance(x, jax.Array) else jnp.asarray(x, like.dtype)


def _deal(x: jax.Array, number: int) -> jax.Array:
    """Put example i in microbatch i mod number: [batch, ...] -> [number, batch / number, ...]."""
    return jnp.moveaxis(x.reshape(x.shape[0] // number, number, *x.shape[1:]), 1, 0)


def _accumulator(x: Any) -> jax.Array:
    wide = tree.wide_dtype(x.dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x.dtype
    return jnp.zeros(x.shape, wide)


def _cast(arrays: types.PyTree, dtype: Any) -> types.PyTree:
    if dtype is None:
        return arrays
    floating = lambda x: jnp.issubdtype(x.dtype, jnp.floating)  # noqa: E731
    return jax.tree.map(lambda x: x.astype(dtype) if floating(x) else x, arrays)
