"""Gradients of one step, whole or in microsteps."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import jaxpr_as_fun
from jax.interpreters import partial_eval

from lbopt import replicas, tree, types
from lbopt.errors import UserError
from lbopt.parallel import loss_form, reduction

GradientFn = Callable[
    [types.Params, types.ModelState, types.Batch, jax.Array],
    tuple[types.Params, types.ModelState, types.Metrics],
]
"""(params, model_state, batch, rng) -> (mean gradients, new model_state, metrics)."""

MicrostepHook = Callable[[types.Params], tuple[types.Params, types.Metrics]]
"""gradients of a microstep -> (gradients, metrics)."""


def make_gradient_fn(
    loss_fn: types.LossFn,
    num_microsteps: int = 1,
    compute_dtype: Any = None,
    each_microstep: MicrostepHook | None = None,
) -> GradientFn:
    """Build the function that differentiates a loss over one batch.

    Args:
      loss_fn: see `lbopt.types.LossFn`.
      num_microsteps: split the batch into so many parts and run them one after another (`lax.scan`), adding gradients
        up in fp32. Example i belongs to microstep i mod num_microsteps, which keeps every part spread evenly over the
        devices and the same on any number of them.
      compute_dtype: cast floating parameters and inputs to this before the loss; None leaves them alone, for models
        that choose for themselves.
      each_microstep: applied to the gradient of every microstep before it is added up; its metrics join the others.

    Returns:
      A `GradientFn`. Gradients have the dtype of the parameters and belong to the mean over the batch; those of complex parameters
      are the conjugates of `jax.grad`'s, so that the loss falls against them, as Optax's transforms expect. Metrics are sums over the batch. Every microstep starts from the same model_state and their results are averaged, exactly as batch
      statistics of replica groups are. Leaves of model_state that have no mean (integers, bools, random keys) are those of
      the last microstep. All leaves keep the dtype they came with.

    Note:
      Microsteps (and replicas, where they are mapped) count alike. So the mean of their gradients is the gradient of the
      whole batch's loss only if the loss is a mean over examples. A loss that divides by a number found in the batch, such
      as its counted tokens, weights a token by the microstep it falls into: divide by a constant instead, for instance the
      number of examples times the mean number of tokens of one. A warning is given where the weight of the metric `loss`
      depends on what is in the batch.
    """

    def objective(
        params: types.Params, model_state: types.ModelState, batch: types.Batch, rng: jax.Array
    ):
        returned = loss_fn(
            _cast(params, compute_dtype), model_state, _cast(batch, compute_dtype), rng
        )
        return loss_form.checked(returned)

    def whole(params, model_state, batch, rng):
        _check_trainable(params)
        grads, (new_model_state, metrics) = jax.grad(objective, has_aux=True)(
            params, model_state, batch, rng
        )
        grads = jax.tree.map(lambda g: g.conj() if jnp.iscomplexobj(g) else g, grads)
        if each_microstep is not None:
            grads, of_gradient = each_microstep(grads)
            metrics = {**metrics, **of_gradient}
        return grads, _with_dtypes_of(model_state, new_model_state), metrics

    warned: list[bool] = []

    def of_replica(*arguments):
        number = replicas.mapped()
        if number == 1 or warned:
            return whole(*arguments)
        program, like = jax.make_jaxpr(whole, return_shape=True)(*arguments)
        warned.append(True)
        if _weight_depends_on_batch(program.jaxpr, arguments, like):
            _warn_of_weights(f"{number} replicas are mapped", "replicas")
        # The program that was looked at, not the loss again: it would be traced twice.
        results = jax.tree.unflatten(
            jax.tree.structure(like), jaxpr_as_fun(program)(*jax.tree.leaves(arguments))
        )
        return jax.tree.map(
            lambda x, was: x if isinstance(x, jax.Array) else jnp.asarray(x, was.dtype),
            results,
            like,
        )

    def in_parts(params, model_state, batch, rng):
        parts = jax.tree.map(lambda x: _deal(x, num_microsteps), batch)
        keys = jax.vmap(lambda i: jax.random.fold_in(rng, i))(jnp.arange(num_microsteps))
        one = params, model_state, jax.tree.map(lambda x: x[0], parts), rng
        program, first = jax.make_jaxpr(whole, return_shape=True)(*one)
        if not warned and _weight_depends_on_batch(program.jaxpr, one, first):
            warned.append(True)
            _warn_of_weights(f"num_microsteps = {num_microsteps}", "microsteps")
        averaged, _ = _by_mean(first[1])
        zeros = jax.tree.map(
            lambda x: jnp.zeros(x.shape, _accumulator_dtype(x.dtype)),
            (first[0], averaged, first[2]),
        )

        def body(total, part):
            batch_part, key = part
            grads, new_model_state, metrics = whole(params, model_state, batch_part, key)
            averaged, others = _by_mean(new_model_state)
            result = grads, averaged, metrics
            return jax.tree.map(lambda a, b: a + jnp.asarray(b, a.dtype), total, result), others

        (grads, total, metrics), others = jax.lax.scan(body, zeros, (parts, keys))
        mean = lambda total, like: (total / num_microsteps).astype(like.dtype)  # noqa: E731
        last = jax.tree.map(lambda x: x[-1], others)
        new_model_state = _joined(jax.tree.map(mean, total, averaged), last)
        return jax.tree.map(mean, grads, params), new_model_state, metrics

    return of_replica if num_microsteps == 1 else in_parts


def by_rows(gradient_fn: GradientFn, num_rows: int, axis_name: str | None) -> GradientFn:
    """Build the function that takes the gradients of equal parts of the batch one after another, as rows.

    Args:
      gradient_fn: see `make_gradient_fn`.
      num_rows: >= 1; example i belongs to row i // (batch / num_rows).
      axis_name: over which the function is mapped; None if it is not.

    Returns:
      A `GradientFn` whose gradients are [num_rows, ...]. Every row starts from the same model_state and their results are
      averaged (leaves without a mean are those of the first row); metrics are sums. Each has a key of its own, by its
      number among those of all devices.
    """

    def each(
        params: types.Params, model_state: types.ModelState, batch: types.Batch, rng: jax.Array
    ) -> Any:
        first = 0 if axis_name is None else jax.lax.axis_index(axis_name) * num_rows
        keys = jax.vmap(lambda i: jax.random.fold_in(rng, i))(first + jnp.arange(num_rows))
        if num_rows == 1:
            grads, new_model_state, metrics = gradient_fn(params, model_state, batch, keys[0])
            return jax.tree.map(lambda x: x[None], grads), new_model_state, metrics
        parts = jax.tree.map(
            lambda x: x.reshape(num_rows, x.shape[0] // num_rows, *x.shape[1:]), batch
        )
        one = lambda part: gradient_fn(params, model_state, *part)  # noqa: E731
        with replicas.one_after_another(num_rows):
            grads, new_model_state, metrics = jax.lax.map(one, (parts, keys))
        return (
            grads,
            jax.tree.map(_over_rows, new_model_state),
            jax.tree.map(lambda x: x.sum(0), metrics),
        )

    return each


def _weight_depends_on_batch(
    program: Any, arguments: tuple[Any, ...], results: tuple[Any, ...]
) -> bool:
    """Return whether the weight of the metric `loss`, of a gradient function's program, is found in the batch."""
    if "loss" not in results[2]:
        return False
    asked: Any = jax.tree.map(lambda _: False, results)
    asked[2]["loss"] = (False, True)
    _, needed = partial_eval.dce_jaxpr(program, jax.tree.leaves(asked))
    before = len(jax.tree.leaves(arguments[:2]))
    return any(needed[before : before + len(jax.tree.leaves(arguments[2]))])


def _warn_of_weights(why: str, parts: str) -> None:
    warnings.warn(
        f"{why}: the weight of the metric 'loss' depends on what is in the batch, and {parts} count alike; "
        "if the loss divides by that weight (a mean over tokens), its gradient is not that of the whole batch: divide by a constant, "
        "for instance len(batch) times the mean number of tokens of an example",
        stacklevel=2,
    )


def _check_trainable(params: types.Params) -> None:
    """Raise `UserError` naming the first parameter that has no gradient; JAX would name its dtype only."""
    for name, leaf in zip(tree.leaf_names(params), jax.tree.leaves(params), strict=True):
        if not reduction.has_mean(leaf):
            raise UserError(
                f"params/{name}: {leaf.dtype} has no gradient; keep it in the model state, not in the parameters"
            )


def _over_rows(x: jax.Array) -> jax.Array:
    return (
        x.astype(tree.wide_dtype(x.dtype)).mean(0).astype(x.dtype)
        if reduction.has_mean(x)
        else x[0]
    )


def _by_mean(state: types.PyTree) -> tuple[types.PyTree, types.PyTree]:
    """Split a state into the leaves that have a mean and the others, each with None in the place of the rest."""
    averaged = jax.tree.map(lambda x: x if reduction.has_mean(x) else None, state)
    return averaged, jax.tree.map(lambda x: None if reduction.has_mean(x) else x, state)


def _joined(averaged: types.PyTree, others: types.PyTree) -> types.PyTree:
    """Undo `_by_mean`."""
    return jax.tree.map(
        lambda a, b: b if a is None else a, averaged, others, is_leaf=lambda x: x is None
    )


def _with_dtypes_of(old: types.PyTree, new: types.PyTree) -> types.PyTree:
    """Return the new state in the old one's containers and dtypes, so that a step takes what it returned without a second compilation.

    Only between dtypes of one kind: what a loss turned from an integer into a float stays one. There may be leaves that were not there.

    Raises:
      UserError: for a leaf that the new state lacks, or that has another shape there.
    """
    before, after = tree.by_name(old), tree.by_name(new)
    for name, was in before.items():
        if name not in after:
            raise UserError(
                f"model_state/{name}: not in the state that the loss returns; return every leaf, changed or not"
            )
        if jnp.shape(after[name]) != was.shape:
            raise UserError(
                f"model_state/{name}: shape {was.shape}, but {jnp.shape(after[name])} in the state that the loss returns; keep the shape"
            )
    leaves = [_like(before.get(name), jnp.asarray(now)) for name, now in after.items()]
    return jax.tree.unflatten(
        jax.tree.structure(old if before.keys() == after.keys() else new), leaves
    )


def _like(was: Any, now: jax.Array) -> jax.Array:
    return now.astype(was.dtype if was is not None and _alike(was, now) else now.dtype)


def _alike(one: jax.Array, other: jax.Array) -> bool:
    kinds = jnp.floating, jnp.complexfloating, jnp.signedinteger, jnp.unsignedinteger
    return any(
        jnp.issubdtype(one.dtype, kind) and jnp.issubdtype(other.dtype, kind) for kind in kinds
    )


def _deal(x: jax.Array, num_parts: int) -> jax.Array:
    """Deal examples out to parts like cards: [batch, ...] -> [parts, batch / parts, ...]."""
    return jnp.moveaxis(x.reshape(x.shape[0] // num_parts, num_parts, *x.shape[1:]), 1, 0)


def _accumulator_dtype(dtype: Any) -> Any:
    return tree.wide_dtype(dtype) if jnp.issubdtype(dtype, jnp.floating) else dtype


def _cast(arrays: types.PyTree, dtype: Any) -> types.PyTree:
    if dtype is None:
        return arrays
    return jax.tree.map(
        lambda x: x.astype(dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x, arrays
    )
