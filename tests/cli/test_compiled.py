"""The folder that keeps compiled programs from one start to the next."""

import jax
import pytest
from jax_internals import compilation_cache

from lbopt.cli import _compilation_cache, main

NAMES = ("jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs")


@pytest.fixture
def unset(monkeypatch):
    """Remove JAX's cache settings, as if the user had set none."""
    before = {name: getattr(jax.config, name) for name in NAMES}
    jax.config.update("jax_compilation_cache_dir", None)
    monkeypatch.delenv("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", raising=False)
    yield
    for name, value in before.items():
        jax.config.update(name, value)


@pytest.mark.usefixtures("unset")
def test_they_are_kept_at_home(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    _compilation_cache.keep()
    assert jax.config.jax_compilation_cache_dir == str(tmp_path / "lbopt" / "compiled")
    assert (tmp_path / "lbopt" / "compiled").is_dir()
    assert jax.config.jax_persistent_cache_min_compile_time_secs == _compilation_cache.MIN_COMPILE_S


@pytest.mark.usefixtures("unset")
def test_what_a_kill_has_cut_short_is_removed(monkeypatch, tmp_path):
    """JAX would otherwise warn of the file at every start."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folder = tmp_path / "lbopt" / "compiled"
    _compilation_cache.keep()
    whole = compilation_cache.compress_executable(b"program " * 100)
    (folder / "whole-cache").write_bytes(whole)
    (folder / "torn-cache").write_bytes(whole[:20])
    jax.config.update("jax_compilation_cache_dir", None)
    _compilation_cache.keep()
    assert [file.name for file in folder.glob("*-cache")] == ["whole-cache"]


@pytest.mark.usefixtures("unset")
def test_without_a_home_nothing_is_kept(monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    _compilation_cache.keep()
    assert jax.config.jax_compilation_cache_dir is None


def test_what_the_user_has_said_stays(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    before = jax.config.jax_compilation_cache_dir
    assert before is not None, "the tests have said so"
    _compilation_cache.keep()
    assert jax.config.jax_compilation_cache_dir == before
    assert not (tmp_path / "lbopt").exists()


@pytest.mark.parametrize(
    ("command", "kept"), [("train", 1), ("sweep", 1), ("evaluate", 1), ("plan", 0)]
)
def test_who_compiles_for_devices_that_are_here_keeps(command, kept, monkeypatch):
    """A plan's programs are for absent devices, and JAX cannot keep those."""
    asked = []
    monkeypatch.setattr(_compilation_cache, "keep", lambda: asked.append(True))
    assert main([command, "--config=nowhere.py", "--workdir=nowhere"]) == 2
    assert len(asked) == kept
