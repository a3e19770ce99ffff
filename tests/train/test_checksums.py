"""Checksums of arrays equal NumPy's for any layout, and detect every flipped bit."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from refusal import raised

from lbopt.parallel import make_mesh
from lbopt.train import _seal
from lbopt.train._checksums import checksums, differing
from lbopt.train._seal import Seal

RNG = np.random.default_rng(0)
ARRAYS = {
    "float32": RNG.normal(size=(8, 5)).astype(np.float32),
    "bfloat16": RNG.normal(size=(4, 3, 2)).astype(ml_dtypes.bfloat16),
    "int32": RNG.integers(-9, 9, 12).astype(np.int32),
    "uint32": RNG.integers(0, 2**32, 7, dtype=np.uint32),
    "bool": RNG.random(16) < 0.5,
    "uint8": RNG.integers(0, 256, (2, 3), dtype=np.uint8),
    "scalar": np.float32(1.5),
    "nothing": np.zeros((0, 3), np.float32),
    "not a number": np.array([np.nan, np.inf, -0.0], np.float32),
}


def in_numpy(array):
    """Compute the same sums in Python's integers."""
    raw = np.ascontiguousarray(array)
    words = raw.view({1: np.uint8, 2: np.uint16, 4: np.uint32}[raw.dtype.itemsize]).ravel()
    first = second = 0
    for place, word in enumerate(int(word) for word in words):
        first += word * ((place + 1) * 0x9E3779B1 % 2**32 | 1)
        mixed = (place + 1) * 0x85EBCA6B % 2**32
        second += word * ((mixed ^ mixed >> 15) * 0xC2B2AE35 % 2**32 | 1)
    return f"{first % 2**32:08x}{second % 2**32:08x}"


@pytest.mark.parametrize("name", ARRAYS)
def test_they_are_what_numpy_says(name):
    assert checksums({name: ARRAYS[name]}) == {name: in_numpy(ARRAYS[name])}


@pytest.mark.parametrize("spec", [PartitionSpec(), PartitionSpec("data")])
def test_they_do_not_depend_on_the_layout(spec):
    mesh = make_mesh(4)
    whole = {name: ARRAYS[name] for name in ("float32", "bfloat16", "int32", "bool")}
    laid_out = jax.device_put(whole, NamedSharding(mesh, spec))
    assert checksums(laid_out) == {name: in_numpy(array) for name, array in whole.items()}


def test_every_flipped_bit_is_seen():
    array = ARRAYS["float32"][:2]
    for bit in range(array.nbytes * 8):
        data = bytearray(array.tobytes())
        data[bit // 8] ^= 1 << bit % 8
        assert in_numpy(np.frombuffer(data, np.float32)) != in_numpy(array)


def test_exchanged_elements_are_seen():
    array = jnp.arange(1000, dtype=jnp.int32)
    for other in (
        array[::-1],
        jnp.roll(array, 1),
        array.at[jnp.array([3, 500])].set(array[jnp.array([500, 3])]),
    ):
        assert all(
            a != b
            for a, b in zip(
                *(halves(checksums([each])["0"]) for each in (array, other)), strict=True
            )
        )


def halves(checksum):
    return checksum[:8], checksum[8:]


def test_what_differs_is_named():
    assert differing({"a": "1", "b": "2", "c": "3"}, {"a": "1", "b": "9", "d": "4"}) == [
        "b",
        "c",
        "d",
    ]


def test_a_seal_knows_whether_it_was_changed():
    seal = Seal(7, {"a": "00"}, {"eval/accuracy": 0.5, "eval/loss": float("inf")}, 3, 2, 5)
    data = seal.to_json()
    assert _seal.read(data) == seal
    for changed in (
        {**data, "seal": data["seal"].replace("0.5", "0.6")},
        {**data, "sha256": "0" * 64},
        {"seal": data["seal"]},
        {},
        [],
        None,
        {**data, "seal": 3},
    ):
        with raised(ValueError, names={"seal"}):
            _seal.read(changed)
