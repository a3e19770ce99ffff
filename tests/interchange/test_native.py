"""lbopt's own safetensors format."""

import jax
import jax.numpy as jnp
import numpy as np
from refusal import refused, troubled
from safetensors import safe_open
from safetensors.numpy import save_file

from lbopt.errors import NO_VALUE
from lbopt.interchange import load_safetensors, save_safetensors

VARIABLES = {
    "params": {
        "stage0_block0": {"conv1": {"kernel": jnp.arange(24.0).reshape(1, 2, 3, 4)}},
        "half": jnp.asarray([1.5, -0.0], jnp.bfloat16),
    },
    "batch_stats": {"norm": {"mean": np.float32(3.0), "count": np.arange(3)}},
}


def test_names_arrays_and_metadata_come_back(tmp_path):
    file = tmp_path / "model.safetensors"
    save_safetensors(file, VARIABLES, {"recipe": "x"})
    variables, metadata = load_safetensors(file)
    assert metadata == {"format": "lbopt", "recipe": "x"}
    assert jax.tree.structure(variables) == jax.tree.structure(VARIABLES)
    jax.tree.map(np.testing.assert_array_equal, variables, VARIABLES)
    assert variables["params"]["half"].dtype == jnp.bfloat16
    assert [entry.name for entry in tmp_path.iterdir()] == ["model.safetensors"]
    (tmp_path / "other").touch()
    assert file.stat().st_mode == (tmp_path / "other").stat().st_mode


def test_keys_are_our_path_names(tmp_path):
    save_safetensors(tmp_path / "model.safetensors", VARIABLES)
    with safe_open(tmp_path / "model.safetensors", "np") as handle:
        assert sorted(handle.keys()) == [
            "batch_stats/norm/count",
            "batch_stats/norm/mean",
            "params/half",
            "params/stage0_block0/conv1/kernel",
        ]


def test_refusals(tmp_path):
    with refused("file", str(tmp_path / "none.safetensors"), "missing"):
        load_safetensors(tmp_path / "none.safetensors")
    save_file({"a": np.zeros(2, np.float32)}, tmp_path / "other.safetensors", {"format": "pt"})
    with refused(f"{tmp_path / 'other.safetensors'}: format", "pt", "type") as caught:
        load_safetensors(tmp_path / "other.safetensors")
    assert "load_huggingface" in caught.value.reason
    (tmp_path / "broken.safetensors").write_bytes(b"version https://")
    with refused(str(tmp_path / "broken.safetensors"), NO_VALUE, "damaged"):
        load_safetensors(tmp_path / "broken.safetensors")
    with troubled("file", str(tmp_path / "missing" / "model.safetensors"), "resource"):
        save_safetensors(tmp_path / "missing" / "model.safetensors", VARIABLES)
