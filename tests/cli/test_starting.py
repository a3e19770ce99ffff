"""Inputs of a command at its start: the user's config files, and the environment."""

import os
import signal
import subprocess
import sys
import types

import jax
import pytest
from refusal import refused, troubled

from lbopt import __version__
from lbopt.cli import _main, _recipes, call_get_config, config_files, config_rows

MINE = """
from __future__ import annotations
import dataclasses
import size_beside

@dataclasses.dataclass
class Config:
    size: int = size_beside.SIZE
    other: Config | None = None

ROWS = ("small",)

def get_config(arg: str = ""):
    return dataclasses.replace(Config(), size=Config().size + len(arg))
"""


def test_a_config_imports_what_lies_beside_it_and_has_annotations_of_its_own(tmp_path):
    """Each folder has a module of the same name, and one process reads all of them."""
    for size, name in enumerate(["mine.py", "a:b c/mine.py", "json.py"]):
        file = tmp_path / str(size) / name
        file.parent.mkdir(parents=True)
        file.write_text(MINE)
        (file.parent / "size_beside.py").write_text(f"SIZE = {size}\n")
        assert call_get_config(str(file)).size == size
        assert call_get_config(f"{file}:four").size == size + 4
        assert config_rows(str(file)) == ["small"]


def test_a_config_imports_what_lies_beside_it_and_a_program_keeps_its_own_module(
    tmp_path, monkeypatch
):
    (tmp_path / "mine.py").write_text("import common\ndef get_config(arg): return common.IT\n")
    (tmp_path / "common.py").write_text("IT = 'beside'\n")
    own = types.ModuleType("common")
    monkeypatch.setitem(sys.modules, "common", own)
    for _ in range(2):
        assert call_get_config(str(tmp_path / "mine.py")) == "beside"
        assert sys.modules["common"] is own


def write(folder, files):
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)


RECIPE = "import common\nIT = common.IT\ndef get_config(arg): return IT\n"
STUDY = "import common, recipe\ndef get_config(arg): return common.IT, recipe.IT\n"
LATE_STUDY = "def get_config(arg):\n    import common, recipe\n    return common.IT, recipe.IT\n"


@pytest.mark.parametrize("study", [STUDY, LATE_STUDY])
def test_a_study_imports_recipes_and_their_common_from_the_folder_above(
    study, tmp_path, monkeypatch
):
    write(tmp_path, {"common.py": "IT = 1\n", "recipe.py": RECIPE, "sweeps/study.py": study})
    own = types.ModuleType("common")
    monkeypatch.setitem(sys.modules, "common", own)
    path = list(sys.path)
    for _ in range(2):
        assert call_get_config(str(tmp_path / "sweeps" / "study.py")) == (1, 1)
        assert sys.modules["common"] is own
        assert sys.path == path


def test_the_modules_of_several_folders_are_not_mixed(tmp_path):
    for name in ("a", "b"):
        write(
            tmp_path / name,
            {
                "common.py": f"IT = '{name}'\n",
                "recipe.py": RECIPE,
                "sweeps/study.py": STUDY,
                "other/common.py": f"IT = 'other {name}'\n",
                "other/recipe.py": RECIPE,
                "other/study.py": STUDY,
            },
        )

    for name in ("a", "b", "a", "b"):
        folder = tmp_path / name
        other = f"other {name}"
        assert call_get_config(str(folder / "recipe.py")) == name
        assert call_get_config(str(folder / "sweeps" / "study.py")) == (name, name)
        assert call_get_config(str(folder / "other" / "study.py")) == (other, other)


@pytest.mark.parametrize("files", [{}, {"common.py": "", "mine/common.py": ""}])
def test_a_config_imports_nothing_from_other_folders_above(files, tmp_path):
    """Only a folder without a `common.py` of its own takes one from the folder above."""
    write(tmp_path, {"only_above.py": "", "mine/study.py": "import only_above\n", **files})
    with refused("--config", str(tmp_path / "mine" / "study.py"), "damaged"):
        call_get_config(str(tmp_path / "mine" / "study.py"))


def test_a_config_file_is_one_that_defines_get_config(tmp_path):
    """A file that cannot be read is one too: whoever loads it is told what is wrong."""
    for name, text in {
        "common.py": "import copy\n",
        "mine.py": "def get_config(arg): return 1\n",
        "more/broken.py": "def get_config(\n",
    }.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    found = [file.relative_to(tmp_path).as_posix() for file in config_files(tmp_path)]
    assert found == ["mine.py", "more/broken.py"]


def test_a_config_shares_what_is_installed_in_a_folder_beside_it(tmp_path, monkeypatch):
    """Modules in C, such as NumPy's, cannot be imported a second time."""
    for name, text in {
        "one/.venv/installed_once.py": "IT = object()\n",
        "one/mine.py": "import installed_once\ndef get_config(arg): return installed_once.IT\n",
        "two/mine.py": "import installed_once\ndef get_config(arg): return installed_once.IT\n",
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path / "one/.venv")])
    assert call_get_config(str(tmp_path / "one/mine.py")) is call_get_config(
        str(tmp_path / "two/mine.py")
    )


OWN_FIELD = """
import dataclasses
from lbopt.config import DataConfig, TrainConfig

@dataclasses.dataclass
class Mine(DataConfig):
    extra: int = 3

def get_config(arg: str = ""):
    return TrainConfig(data=Mine())
"""


def test_a_field_that_no_command_could_read_back_is_refused(tmp_path):
    (tmp_path / "own.py").write_text(OWN_FIELD)
    with refused("config.data.extra", 3, "choice"):
        call_get_config(str(tmp_path / "own.py"))


def test_a_config_that_is_not_python_is_refused(tmp_path):
    (tmp_path / "junk.so").write_bytes(b"\x7fELF")
    with refused("--config", str(tmp_path / "junk.so"), "value"):
        call_get_config(str(tmp_path / "junk.so"))


def test_a_config_that_fails_is_refused_in_one_line(tmp_path):
    (tmp_path / "bad.py").write_text("import not_there_at_all\n")
    flag = f"{tmp_path / 'bad.py'}:row"
    with refused("--config", flag, "damaged") as caught:
        call_get_config(flag)
    assert "not_there_at_all" in caught.value.reason  # Python's message
    flag = f"{tmp_path / 'none.py'}:row"
    with refused("--config", flag, "missing"):
        call_get_config(flag)


def test_an_interrupt_while_libraries_are_imported_ends_the_process(monkeypatch):
    """NumPy would raise an ImportError with a traceback, and absl would abort."""
    handlers = []
    monkeypatch.setattr(_main._standard_streams, "outlive_readers", lambda: None)
    monkeypatch.setattr(
        _main, "_check_folder", lambda: handlers.append(signal.getsignal(signal.SIGINT))
    )
    monkeypatch.setattr(
        _recipes, "run", lambda argv: handlers.append(signal.getsignal(signal.SIGINT))
    )
    monkeypatch.setattr(sys, "argv", ["lbopt", "recipes"])
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(SystemExit):
            _main.run()
    finally:
        signal.signal(signal.SIGINT, before)
    assert handlers == [signal.SIG_DFL, signal.default_int_handler]


def test_version(capsys):
    assert _main.main(["--version"]) == 0
    assert capsys.readouterr().out == f"lbopt {__version__}\n"


@pytest.mark.process
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("JAX_ENABLE_X64", "maybe"),
        ("JAX_DEFAULT_PRNG_IMPL", "nope"),
        ("JAX_NUM_CPU_DEVICES", "abc"),
        ("JAX_NO_EXECUTION", "1"),
        ("XLA_FLAGS", "--xla_force_host_platform_device_count=2 --xla_nope=1"),
    ],
)
def test_a_setting_that_jax_does_not_take_is_named(name, value):
    command = [sys.executable, "-m", "lbopt", "doctor"]
    ended = subprocess.run(
        command, env={**os.environ, name: value}, capture_output=True, text=True, timeout=60
    )
    assert ended.returncode == 3
    (line,) = ended.stderr.splitlines()
    assert line.startswith(f"lbopt doctor: {name} ")
    assert "unset" in line


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("CHECK_VMA", "nope", "invalid truth value 'nope' for environment 'CHECK_VMA'"),
        ("JAX_SERIALIZATION_VERSION", "nope", "invalid literal for int() with base 10: 'nope'"),
        (
            "JAX_DEFAULT_DEVICE",
            "nope",
            "jax.default_device must be passed either a Device object ... got: 'nope'",
        ),
    ],
)
def test_a_setting_is_known_by_what_jax_says(name, value, said, monkeypatch):
    monkeypatch.setenv(name, value)
    assert [one for one in os.environ if _main._names(said, one)] == [name]


@pytest.mark.parametrize(
    ("name", "value", "code"),
    [
        ("jax_dump_ir_to", "/dev/null/dumped", "resource"),
        ("jax_dump_ir_to", "gs:/one/slash", "value"),
        ("jax_random_seed_offset", 3, "conflict"),
        ("jax_transfer_guard", "disallow_explicit", "conflict"),
    ],
)
def test_a_setting_with_which_nothing_would_run_is_named(name, value, code):
    before = jax.config.values[name]
    jax.config.update(name, value)
    try:
        with troubled(name.upper(), value, code):
            _main._check_jax()
    finally:
        jax.config.update(name, before)


def test_jax_may_dump_into_a_bucket():
    before = jax.config.values["jax_dump_ir_to"]
    jax.config.update("jax_dump_ir_to", "gs://bucket/dumped")
    try:
        _main._check_jax()
    finally:
        jax.config.update("jax_dump_ir_to", before)


def test_a_process_that_is_alone_uses_the_devices_that_it_is_given(lbopt, monkeypatch):
    """JAX reads the variable only where processes are connected."""
    monkeypatch.setenv("JAX_LOCAL_DEVICE_IDS", "4,5")
    names = ("jax_cuda_visible_devices", "jax_rocm_visible_devices")
    before = {name: jax.config.values[name] for name in names}
    try:
        assert lbopt("suggest")[0] == 2  # without its flags
        assert {jax.config.values[name] for name in names} == {"4,5"}
    finally:
        for name in names:
            jax.config.update(name, before[name])


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("--xla_nope=1 --xla_neither", "Unknown flags in XLA_FLAGS: --xla_nope=1 --xla_neither"),
        (
            "--xla_cpu_enable_fast_math=maybe",
            "Couldn't interpret value maybe for flag xla_cpu_enable_fast_math",
        ),
        ("nowhere.txt", 'Could not open file "nowhere.txt"'),
    ],
)
def test_flags_that_xla_does_not_take_are_named_before_it_ends_the_process(
    flags, said, monkeypatch
):
    monkeypatch.setenv("XLA_FLAGS", flags)
    with troubled("XLA_FLAGS", flags, "value") as caught:
        _main._check_xla_flags()
    assert said in caught.value.reason  # XLA's message


def test_flags_that_xla_takes_are_left_alone(monkeypatch):
    for flags in (
        "",
        "--xla_force_host_platform_device_count=4",
        "--xla_cpu_enable_fast_math=false",
    ):
        monkeypatch.setenv("XLA_FLAGS", flags)
        _main._check_xla_flags()
