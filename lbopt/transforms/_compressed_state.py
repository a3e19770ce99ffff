"""Optimizer state in 8 bits, or in bfloat16 rounded by chance, for any optimizer."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
import optax

from lbopt import _scalars, tree, types
from lbopt.errors import UserError, require_choice
from lbopt.transforms import _arguments, _eight_bit, _per_path, _rounding

StateFormat = Literal["8bit_dynamic", "8bit_linear", "bf16_stochastic"]


class CompressedState(NamedTuple):
    """The state of an optimizer in few bits.

    Attributes:
      inner: State of the optimizer; chosen arrays are uint8 codes, or bfloat16, of the same shapes.
      largest: Path of each array of codes in `inner` -> largest magnitude of each block, fp32.
      compression_count: int32 scalar, number of updates so far, of which the noise is made; None
        for 8 bits.
    """

    inner: Any
    largest: dict[str, jax.Array]
    compression_count: jax.Array | None = None


def compress_state(
    inner: optax.GradientTransformation,
    format: StateFormat = "8bit_dynamic",
    *,
    signed: Sequence[str] = ("mu", "momentum", "trace"),
    unsigned: Sequence[str] = ("nu",),
    block_size: int = 4096,
    min_size: int = 4096,
    min_length: int = 64,
    seed: int | jax.Array = 0,
) -> optax.GradientTransformationExtraArgs:
    r"""Keep an optimizer's moments in 8 bits, or in bfloat16 rounded by chance.

    Between updates, moments of fp32 are kept as

        8 bits:   code(x / s), s the largest magnitude of its block   1 byte a number, 4 a block
        bfloat16: the number below or above x, with mean x            2 bytes a number

    Each update reads them, computes in fp32, and writes them again; the step itself is that of the
    moments before they are written. The dynamic map has seven decades, and suits moments; the
    linear one has the same distance everywhere, and makes small second moments 0.

    Args:
      inner: Any optimizer: `lbopt.lamb`, `lbopt.adamh`, `lbopt.muon`, `optax.adamw`.
      format: "8bit_dynamic", "8bit_linear" or "bf16_stochastic".
      signed: Names of fields of the inner state whose arrays are kept so.
      unsigned: Names of further fields, whose numbers are never negative: 8 bits then have no sign.
      block_size: Longest block, along the last axis of an array; a shorter axis is one block. Where
        the axis is a multiple of it, blocks are those of bitsandbytes.
      min_size: Smallest size of an array that is compressed.
      min_length: Shortest last axis of an array that is compressed.
      seed: Seed of the noise of "bf16_stochastic".

    Returns:
      A transform whose state is `CompressedState`.

    Raises:
      UserError: For an argument that is out of range, or names that no field of the state has.

    >>> import jax.numpy as jnp, lbopt
    >>> params = {"kernel": jnp.ones((64, 256))}
    >>> tx = compress_state(lbopt.lamb(1e-3))
    >>> sum(leaf.nbytes for leaf in jax.tree.leaves(lbopt.lamb(1e-3).init(params)))
    131088
    >>> sum(leaf.nbytes for leaf in jax.tree.leaves(tx.init(params)))
    33296

    References:
      Dettmers et al., 8-bit Optimizers via Block-wise Quantization, arXiv:2110.02861.
      bitsandbytes-foundation/bitsandbytes@95f9af30: maps and rounding are equal bit for bit to
      quantize_blockwise of its PyTorch backend.

    Note:
      LAMB8bit of bitsandbytes is Adam: its blockwise update has no trust ratio. Around `lbopt.lamb`
      this is LAMB (layerwise adaptive moments). A number that is not finite spoils its block.
    """
    _arguments.require_transformation("inner", inner)
    require_choice("format", format, get_args(StateFormat))
    with_sign = _names("signed", signed)
    without = _names("unsigned", unsigned)
    block_size = _scalars.whole("block_size", block_size, low=64)
    min_size = _scalars.whole("min_size", min_size, low=0)
    min_length = _scalars.whole("min_length", min_length)
    seed = _scalars.seed("seed", seed)
    through = optax.with_extra_args_support(inner)
    in_codes = format != "bf16_stochastic"
    map_name: Any = format.removeprefix("8bit_")

    def is_long(leaf: Any) -> bool:
        shape = jnp.shape(leaf)
        long = bool(shape) and math.prod(shape) >= min_size and shape[-1] >= min_length
        return long and _is_moment(leaf)

    def treatments(state: Any) -> Iterator[tuple[str, Any, bool | None]]:
        """Yield (path, leaf, whether it has a sign; None for a leaf that is left alone)."""
        paths = jax.tree_util.tree_leaves_with_path(state)
        for name, (path, leaf) in zip(_per_path.keys(state), paths, strict=True):
            fields = {key.name for key in path if isinstance(key, jax.tree_util.GetAttrKey)}
            has_sign = True if fields & with_sign else False if fields & without else None
            yield name, leaf, has_sign if is_long(leaf) else None

    def kept(state: Any, count: jax.Array | None) -> CompressedState:
        noise = _rounding.noise_of(seed, count) if count is not None else iter(())
        leaves = []
        largest = {}
        for name, leaf, has_sign in treatments(state):
            if has_sign is None:
                leaves.append(leaf)
            elif in_codes:
                wide = leaf.astype(jnp.float32)
                codes, largest[name] = _eight_bit.encode(wide, map_name, has_sign, block_size)
                leaves.append(codes)
            else:
                wide = leaf.astype(jnp.float32)
                rounded = _rounding.rounded_by_chance(wide, jnp.bfloat16, next(noise))
                leaves.append(rounded.astype(jnp.bfloat16))
        return CompressedState(
            jax.tree.unflatten(jax.tree.structure(state), leaves), largest, count
        )

    def wide(state: CompressedState) -> Any:
        leaves = []
        for name, leaf, has_sign in treatments(state.inner):
            if has_sign is None:
                leaves.append(leaf)
            elif in_codes:
                if name not in state.largest:
                    fix = f"it has nothing for {name!r}; give the state of this optimizer"
                    raise UserError("opt_state", reason=fix, code="type")
                largest = state.largest[name]
                leaves.append(_eight_bit.decode(leaf, largest, map_name, has_sign, block_size))
            else:
                leaves.append(leaf.astype(jnp.float32))
        return jax.tree.unflatten(jax.tree.structure(state.inner), leaves)

    def init_fn(params: types.Params) -> CompressedState:
        state = inner.init(params)
        count = None if in_codes else jnp.zeros((), jnp.int32)
        if _per_path.is_placeholder(params):
            return CompressedState(state, _per_path.UNKNOWN_PARAMS, count)
        _require_fields(state, with_sign | without)
        return kept(state, count)

    def update_fn(
        updates: optax.Updates,
        state: CompressedState,
        params: types.Params | None = None,
        **extra_args: Any,
    ) -> tuple[optax.Updates, CompressedState]:
        _arguments.require_state(state, CompressedState)
        updates, inner_state = through.update(updates, wide(state), params, **extra_args)
        count = state.compression_count
        return updates, kept(inner_state, None if count is None else optax.safe_increment(count))

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def _names(argument: str, names: Any) -> frozenset[str]:
    if isinstance(names, str) or not all(isinstance(name, str) for name in names):
        raise UserError(argument, names, 'give names of fields, ("mu",) for instance', code="type")
    return frozenset(names)


def _is_moment(leaf: Any) -> bool:
    """Return whether a leaf is a moment of at most fp32, or what is kept of one."""
    return leaf.dtype == jnp.uint8 or (
        jnp.issubdtype(leaf.dtype, jnp.floating) and jnp.finfo(leaf.dtype).bits <= 32
    )


def _require_fields(state: Any, names: frozenset[str]) -> None:
    """Raise `UserError` if no array of a state lies in a field of one of these names."""
    found: dict[str, None] = {}
    for path, _ in jax.tree_util.tree_leaves_with_path(state):
        for key in path:
            if isinstance(key, jax.tree_util.GetAttrKey):
                found[key.name] = None
    if not names & set(found):
        fix = f"the state has {tree.some(list(found)) or 'no fields'}; name those to compress"
        raise UserError("signed", sorted(names), fix, code="missing")
