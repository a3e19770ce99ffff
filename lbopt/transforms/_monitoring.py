"""Keep, and read back, what an optimizer did."""

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
from lbopt.transforms._noise_scale import NoiseScaleState
from lbopt.transforms._skipping import SkipState
from lbopt.transforms._trust_ratio import TrustRatioState

PER_LAYER = ("trust_ratio", "weight_norm", "update_norm", "update_over_weight", "stalled")
"""The kinds of `optimizer_metrics` that come once per layer."""


def is_per_layer(name: str) -> bool:
    """Return whether a name of `optimizer_metrics` belongs to one layer.

    >>> is_per_layer("trust_ratio/Dense_0/kernel"), is_per_layer("trust_ratio_1/w"), is_per_layer("learning_rate")
    (True, True, False)
    """
    return "/" in name and name.startswith(PER_LAYER)


class LayerNormsState(NamedTuple):
    """Norms at the last update: path -> fp32 (or wider) scalar, or an array with one per layer of a stack; 0 before the first.

    Attributes:
      weight_norm: before the update.
      update_norm: of the update as it is applied.
      stalled: of leaves narrower than fp32: the share of the weights with an update which that update, rounded, left as they were.
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
    """Keep every layer's weight norm and update norm in the state; updates pass unchanged. Put it last in the chain.

    Args:
      stacked: as in `scale_by_layerwise_trust_ratio`.
      axis_name: inside `shard_map`: the axis over which leaves are split; norms are summed over it.
      sharded_mask: with `axis_name`: which leaves are split; None for all.

    Returns:
      A transform whose state is `LayerNormsState`; `optimizer_metrics` shows both norms and their quotient. Where parameters are bf16 or fp16 it
      shows `stalled/<path>` too: at 1 no update is large enough to move a weight, and the parameters should be kept in fp32.

    >>> import jax.numpy as jnp
    >>> tx = optax.chain(optax.sgd(0.5), monitor_layers())
    >>> params = {"w": jnp.array([3.0, 4.0])}
    >>> _, state = tx.update({"w": jnp.array([0.0, 2.0])}, tx.init(params), params)
    >>> {name: round(float(value), 6) for name, value in optimizer_metrics(state).items()}
    {'weight_norm/w': 5.0, 'update_norm/w': 1.0, 'update_over_weight/w': 0.2}

    Note:
      It reads parameters and updates once more where the compiler cannot fuse that into the pass which writes them.
    """

    def init_fn(params: types.Params) -> LayerNormsState:
        if _per_path.is_placeholder(params):
            return LayerNormsState(
                _per_path.UNKNOWN_PARAMS, _per_path.UNKNOWN_PARAMS, _per_path.UNKNOWN_PARAMS
            )
        tree.check_inexact(params, "monitor_layers: the parameter")
        layers = stacks.resolve_stacked(stacked, params)
        masks.record_choice("stacked", layers)

        def zeros() -> dict[str, jax.Array]:
            zero = lambda p, axes: jnp.zeros(axes.layers(p.shape), tree.real_dtype(p.dtype))  # noqa: E731
            return _per_path.collect(params, jax.tree.map(zero, params, layers))

        narrow = [name for name, p in tree.by_name(params).items() if _is_narrow(p)]
        return LayerNormsState(
            zeros(), zeros(), {name: value for name, value in zeros().items() if name in narrow}
        )

    def update_fn(
        updates: optax.Updates, state: LayerNormsState, params: types.Params | None = None
    ) -> tuple[optax.Updates, LayerNormsState]:
        del state
        _arguments.require_params(params, "monitor_layers")
        tree.check_updates(updates, params)
        layers = stacks.resolve_stacked(stacked, params)
        split = masks.resolve_split(sharded_mask, axis_name, params)

        def norms(values: types.PyTree) -> dict[str, jax.Array]:
            def norm(x: jax.Array, p: jax.Array, axes: stacks.LayerAxes, chosen: bool) -> jax.Array:
                total = tree.l2_norm(x, axes.axes, split.axis_of(chosen)).reshape(
                    axes.layers(p.shape)
                )
                return total.astype(tree.real_dtype(p.dtype))

            return _per_path.collect(
                params, jax.tree.map(norm, values, params, layers, split.leaves)
            )

        def stalled(
            p: jax.Array, u: jax.Array, axes: stacks.LayerAxes, chosen: bool
        ) -> jax.Array | None:
            if not _is_narrow(p):
                return None

            def number(which: jax.Array) -> jax.Array:
                return tree.square_norm(
                    which.astype(jnp.float32), axes.axes, split.axis_of(chosen)
                ).reshape(axes.layers(p.shape))

            kept = number((u != 0) & (_precision.applied(p, u) == p))
            return kept / jnp.maximum(number(u != 0), 1)

        shares = _per_path.collect(
            params, jax.tree.map(stalled, params, updates, layers, split.leaves)
        )
        return updates, LayerNormsState(norms(params), norms(updates), shares)

    return optax.GradientTransformation(init_fn, update_fn)


def _is_narrow(leaf: jax.Array) -> bool:
    return jnp.finfo(leaf.dtype).bits < 32


def optimizer_metrics(opt_state: Any) -> dict[str, jax.Array]:
    """Return what the transforms of an optimizer kept of the last update, as scalars.

    Args:
      opt_state: the state of any chain, `multi_transform`, `masked`, `MultiSteps` or `inject_hyperparams` around
        lbopt's transforms; also as `nnx.state(optimizer)` or as dictionaries that Orbax restored without a target.

    Returns:
      `{"learning_rate": scalar, "trust_ratio/<parameter path>": scalar, ...}` and, where the transform is in the chain,
      `gradient_norm` (global, before the clip), `noise_scale` (examples), `skipped/nonfinite`, `skipped/spikes`, `skipped/limit_reached`,
      `weight_norm/<path>`, `update_norm/<path>`, `update_over_weight/<path>`, `stalled/<path>`, `agvm_scale/<module>`, `agvm_phi/<module>`. Layers of a stack are numbered: `<path>[3]`.
      A second value of one name in the same state is called `learning_rate_1`, `trust_ratio_1/<path>`, and so on.

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


Group = dict[str, jax.Array]


def _rate(state: LearningRateState) -> list[Group]:
    return [{"learning_rate": state.applied_rate}]


def _clip(state: ClipState) -> list[Group]:
    return [{"gradient_norm": state.global_norm}]


def _skip(state: SkipState) -> list[Group]:
    names = {
        "nonfinite": state.skipped_nonfinite,
        "spikes": state.skipped_spikes,
        "limit_reached": state.limit_reached,
    }
    return [{f"skipped/{name}": value for name, value in names.items()}]


def _noise(state: NoiseScaleState) -> list[Group]:
    return [{"noise_scale": state.noise_scale()}]


def _scales(state: ModuleScaleState) -> list[Group]:
    named = {"agvm_scale": state.scale, "agvm_phi": state.phi}
    return [
        {
            f"{kind}/{module}": value
            for kind, values in named.items()
            for module, value in values.items()
        }
    ]


def _ratios(state: TrustRatioState) -> list[Group]:
    return [_per_layer("trust_ratio", state.trust_ratio)]


def _norms(state: LayerNormsState) -> list[Group]:
    quotient = jax.tree.map(
        lambda u, w: u / jnp.where(w > 0, w, 1), state.update_norm, state.weight_norm
    )
    named = {
        "weight_norm": state.weight_norm,
        "update_norm": state.update_norm,
        "update_over_weight": quotient,
    }
    named["stalled"] = state.stalled
    return [_per_layer(kind, values) for kind, values in named.items()]


_GROUPS: dict[type, Callable[[Any], list[Group]]] = {
    LearningRateState: _rate,
    ClipState: _clip,
    SkipState: _skip,
    TrustRatioState: _ratios,
    LayerNormsState: _norms,
    NoiseScaleState: _noise,
    ModuleScaleState: _scales,
    LansState: lambda state: [],  # its two ratios in their order, which a dictionary of its fields turns round
}


def _per_layer(kind: str, values: dict[str, jax.Array]) -> Group:
    group: Group = {}
    for path, value in values.items():
        name = f"{kind}/{path}"
        layers = value.reshape(-1)
        group |= (
            {name: value}
            if value.ndim == 0
            else {f"{name}[{i}]": layers[i] for i in range(len(layers))}
        )
    return group


def _under_free_names(group: Group, taken: Group) -> Group:
    """Return the group with `_1`, `_2`, ... behind the first part of its names if any of them is taken."""
    number, renamed = 0, group
    while renamed.keys() & taken.keys():
        number += 1
        renamed = {}
        for name, value in group.items():
            kind, *path = name.split("/", 1)
            renamed["/".join([f"{kind}_{number}", *path])] = value
    return renamed
