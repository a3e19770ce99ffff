"""Norms of every layer, kept in the state, and the metrics that a state of an optimizer holds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from lbopt import masks, stacks, tree, types
from lbopt.transforms import _arguments, _per_path, _precision
from lbopt.transforms._clipping import ClipState
from lbopt.transforms._lans import LansState
from lbopt.transforms._learning_rate import LearningRateState
from lbopt.transforms._module_scale import ModuleScaleState
from lbopt.transforms._noise_scale import LayerNoiseState, NoiseScaleState
from lbopt.transforms._skipping import SkipState
from lbopt.transforms._trust_ratio import TrustRatioState

PER_LAYER = (
    "noise_scale",
    "trust_ratio",
    "weight_norm",
    "update_norm",
    "update_over_weight",
    "stalled",
)
"""First parts of the names in `optimizer_metrics` that have one value per layer."""


def is_per_layer(name: str) -> bool:
    """Return whether a name of `optimizer_metrics` belongs to one layer.

    Args:
      name: Name of a metric, without a prefix such as "train/".

    >>> [is_per_layer(name) for name in ("trust_ratio/w", "trust_ratio_1/w", "learning_rate")]
    [True, True, False]
    """
    return "/" in name and name.startswith(PER_LAYER)


class LayerNormsState(NamedTuple):
    """Norms at the last update, 0 before the first.

    Each is path -> fp32 (or wider) scalar, or an array with a number for each layer of a stack.

    Attributes:
      weight_norm: Norm of the weights before the update.
      update_norm: Norm of the update as it is applied.
      stalled: Share of the weights with a nonzero update that rounding left unchanged; only for
        leaves narrower than fp32.

    >>> import jax.numpy as jnp
    >>> params = {"kernel": jnp.array([[3.0, 4.0]])}
    >>> tx = monitor_layers()
    >>> _, state = tx.update({"kernel": jnp.array([[0.0, 0.5]])}, tx.init(params), params)
    >>> float(state.weight_norm["kernel"]), float(state.update_norm["kernel"])
    (5.0, 0.5)
    """

    weight_norm: dict[str, jax.Array]
    update_norm: dict[str, jax.Array]
    stalled: dict[str, jax.Array] = {}


def monitor_layers(
    stacked: types.Stacked = None,
    *,
    axis_name: types.AxisName = None,
    sharded_mask: types.Mask = None,
) -> optax.GradientTransformation:
    """Keep the weight norm and the update norm of every layer; updates pass unchanged.

    Put it last in the chain.

    Args:
      stacked: Leaves that are stacks of layers (see `scale_by_layerwise_trust_ratio`).
      axis_name: Inside `shard_map`, the axis over which leaves are split; norms are summed over it.
      sharded_mask: Mask of the leaves that are split over `axis_name`; None for all.

    Returns:
      A transform whose state is `LayerNormsState`. `optimizer_metrics` shows both norms and their
      quotient. For bf16 or fp16 parameters it shows `stalled/<path>` too; at 1 no update is large
      enough to move a weight, and the parameters should be kept in fp32.

    >>> import jax.numpy as jnp
    >>> tx = optax.chain(optax.sgd(0.5), monitor_layers())
    >>> params = {"w": jnp.array([3.0, 4.0])}
    >>> _, state = tx.update({"w": jnp.array([0.0, 2.0])}, tx.init(params), params)
    >>> {name: round(float(value), 6) for name, value in optimizer_metrics(state).items()}
    {'weight_norm/w': 5.0, 'update_norm/w': 1.0, 'update_over_weight/w': 0.2}

    Note:
      It reads parameters and updates once more where the compiler cannot fuse that into the pass
      that writes them.
    """
    _arguments.refuse_transformation("monitor_layers", stacked)

    def init_fn(params: types.Params) -> LayerNormsState:
        if _per_path.is_placeholder(params):
            return LayerNormsState(
                _per_path.UNKNOWN_PARAMS, _per_path.UNKNOWN_PARAMS, _per_path.UNKNOWN_PARAMS
            )

        tree.check_inexact(params, "params")
        layers = stacks.resolve_stacked(stacked, params)
        masks.record_choice("stacked", layers)

        def zero(p: jax.Array, axes: stacks.LayerAxes) -> jax.Array:
            return jnp.zeros(axes.layers(p.shape), tree.real_dtype(p.dtype))

        # Arrays of their own for each field, as each is donated to the step.
        def zeros() -> dict[str, jax.Array]:
            return _per_path.collect(params, jax.tree.map(zero, params, layers))

        # Only numbers of fewer than 32 bits are likely to stay equal after an update.
        narrow = [name for name, p in tree.by_name(params).items() if _is_narrow(p)]
        stalled = {name: value for name, value in zeros().items() if name in narrow}
        return LayerNormsState(zeros(), zeros(), stalled)

    def update_fn(
        updates: optax.Updates, state: LayerNormsState, params: types.Params | None = None
    ) -> tuple[optax.Updates, LayerNormsState]:
        del state
        _arguments.require_params(params, "monitor_layers")
        tree.check_updates(updates, params)
        layers = stacks.resolve_stacked(stacked, params)
        split = masks.resolve_split(sharded_mask, axis_name, params)

        def norms(values: types.PyTree) -> dict[str, jax.Array]:
            def norm(
                x: jax.Array, p: jax.Array, axes: stacks.LayerAxes, is_split: bool
            ) -> jax.Array:
                total = tree.l2_norm(x, axes.axes, split.axis_of(is_split))
                return total.reshape(axes.layers(p.shape)).astype(tree.real_dtype(p.dtype))

            by_leaf = jax.tree.map(norm, values, params, layers, split.leaves)
            return _per_path.collect(params, by_leaf)

        def stalled(
            p: jax.Array, u: jax.Array, axes: stacks.LayerAxes, is_split: bool
        ) -> jax.Array | None:
            if not _is_narrow(p):
                return None

            # A mean over each shard would weigh shards alike, so numbers are summed first.
            def number(which: jax.Array) -> jax.Array:
                ones = which.astype(jnp.float32)
                total = tree.square_norm(ones, axes.axes, split.axis_of(is_split))
                return total.reshape(axes.layers(p.shape))

            unchanged = number((u != 0) & (_precision.applied(p, u) == p))
            return unchanged / jnp.maximum(number(u != 0), 1)

        shares = jax.tree.map(stalled, params, updates, layers, split.leaves)
        new_state = LayerNormsState(
            norms(params), norms(updates), _per_path.collect(params, shares)
        )
        return updates, new_state

    return optax.GradientTransformation(init_fn, update_fn)


def _is_narrow(leaf: jax.Array) -> bool:
    return jnp.finfo(leaf.dtype).bits < 32


def optimizer_metrics(opt_state: Any) -> dict[str, jax.Array]:
    """Return the metrics of the last update that the transforms of an optimizer kept, as scalars.

    Args:
      opt_state: State of any chain, `multi_transform`, `masked`, `MultiSteps` or
        `inject_hyperparams` around lbopt's transforms; also as `nnx.state(optimizer)`, or as
        dictionaries that Orbax restored without a target.

    Returns:
      Name -> scalar. The names, where the transform is in the chain, are `learning_rate`,
      `gradient_norm` (global, before the clip), `noise_scale` (examples; of every layer also
      `noise_scale_of_norms` and `noise_scale/<path>`), `skipped/nonfinite`,
      `skipped/spikes`, `skipped/limit_reached`, `agvm_scale/<module>`, `agvm_phi/<module>`, and for
      each parameter path `trust_ratio/<path>`, `weight_norm/<path>`, `update_norm/<path>`,
      `update_over_weight/<path>` and `stalled/<path>`. Layers of a stack are numbered, `<path>[3]`,
      but for the noise scale, which is one number a stack.
      A second value of one name in the same state is called `learning_rate_1`,
      `trust_ratio_1/<path>`, and so on.

    >>> import jax.numpy as jnp, lbopt
    >>> params = {"kernel": jnp.ones((2, 2))}
    >>> tx = lbopt.lamb(0.5)
    >>> _, opt_state = tx.update(params, tx.init(params), params)
    >>> {name: round(float(value), 3) for name, value in optimizer_metrics(opt_state).items()}
    {'trust_ratio/kernel': 1.0, 'learning_rate': 0.5}
    """
    metrics: dict[str, jax.Array] = {}

    def collect(node: Any) -> None:
        node = _per_path.plain_arrays(node)
        for group in _GROUPS[type(node)](node):
            metrics.update(_under_free_names(group, metrics))
        if isinstance(node, (SkipState, TrustRatioState)):
            visit(node.inner)
        elif isinstance(node, LansState):
            visit(node.of_momentum)
            visit(node.of_gradient)

    def visit(state: Any) -> None:
        for node in _per_path.find_states(state, _GROUPS):
            collect(node)

    visit(opt_state)
    return metrics


MetricGroup = dict[str, jax.Array]


def _rate(state: LearningRateState) -> list[MetricGroup]:
    return [{"learning_rate": state.applied_rate}]


def _clip(state: ClipState) -> list[MetricGroup]:
    return [{"gradient_norm": state.global_norm}]


def _skip(state: SkipState) -> list[MetricGroup]:
    names = {
        "nonfinite": state.skipped_nonfinite,
        "spikes": state.skipped_spikes,
        "limit_reached": state.limit_reached,
    }
    return [{f"skipped/{name}": value for name, value in names.items()}]


def _noise(state: NoiseScaleState) -> list[MetricGroup]:
    return [{"noise_scale": state.noise_scale()}]


def _noise_of_layers(state: LayerNoiseState) -> list[MetricGroup]:
    found = {"noise_scale": state.whole.noise_scale()}
    if isinstance(state.norms, NoiseScaleState):
        found["noise_scale_of_norms"] = state.norms.noise_scale()
    layers = {path: layer.noise_scale() for path, layer in state.layers.items()}
    return [found | _per_layer("noise_scale", layers)]


def _scales(state: ModuleScaleState) -> list[MetricGroup]:
    scales = {f"agvm_scale/{module}": value for module, value in state.scale.items()}
    return [scales | {f"agvm_phi/{module}": value for module, value in state.phi.items()}]


def _ratios(state: TrustRatioState) -> list[MetricGroup]:
    return [_per_layer("trust_ratio", state.trust_ratio)]


def _norms(state: LayerNormsState) -> list[MetricGroup]:
    quotient = jax.tree.map(
        lambda u, w: u / jnp.where(w > 0, w, 1), state.update_norm, state.weight_norm
    )
    named = {
        "weight_norm": state.weight_norm,
        "update_norm": state.update_norm,
        "update_over_weight": quotient,
        "stalled": state.stalled,
    }
    return [_per_layer(kind, values) for kind, values in named.items()]


_GROUPS: dict[type, Callable[[Any], list[MetricGroup]]] = {
    LearningRateState: _rate,
    ClipState: _clip,
    SkipState: _skip,
    TrustRatioState: _ratios,
    LayerNormsState: _norms,
    NoiseScaleState: _noise,
    LayerNoiseState: _noise_of_layers,
    ModuleScaleState: _scales,
    # Its two ratios are visited in their order, which a dictionary of its fields would reverse.
    LansState: lambda state: [],
}


def _per_layer(kind: str, values: dict[str, jax.Array]) -> MetricGroup:
    group: MetricGroup = {}
    for path, value in values.items():
        name = f"{kind}/{path}"
        if value.ndim == 0:
            group[name] = value
            continue
        layers = value.reshape(-1)
        group |= {f"{name}[{i}]": layers[i] for i in range(len(layers))}
    return group


def _under_free_names(group: MetricGroup, taken: MetricGroup) -> MetricGroup:
    """Return the group, with `_1`, `_2`, ... after the first part of its names if one is taken."""
    number = 0
    renamed = group
    while renamed.keys() & taken.keys():
        number += 1
        renamed = {}
        for name, value in group.items():
            kind, *path = name.split("/", 1)
            renamed["/".join([f"{kind}_{number}", *path])] = value
    return renamed
