"""Import directions, private modules, the places of heavy libraries, and rules of style."""

import ast
import functools
import pathlib
import re
import subprocess
import sys

import pytest

import lbopt

PACKAGE = pathlib.Path(__file__).parents[1] / "lbopt"

LEVELS = {
    0: {
        "errors",
        "types",
        "tree",
        "masks",
        "stacks",
        "replicas",
        "_scalars",
        "_regular",
        "_typed_json",
        "_shown",
        "_bucket_files",
        "paths",
        "_unfinished",
        "_user_code",
        "_given",
        "_installed",
        "_jax_internals",
    },
    1: {"job", "linalg", "transforms", "schedules", "losses", "metrics", "models", "aggregators"},
    2: {"parallel", "config", "data", "interchange"},
    3: {"workdir", "evaluation"},
    4: {"train"},
    5: {"report", "recipes", "sweep", "plan"},
    6: {"cli", "__main__"},
    7: {"api", "__init__"},
}
LEVEL_OF = {package: level for level, packages in LEVELS.items() for package in packages}

# Packages of one level that may not import each other.
STRANGERS = [
    ("parallel", "data"),
    ("data", "models"),
    ("parallel", "interchange"),
    ("data", "interchange"),
    ("parallel", "models"),
    ("recipes", "sweep"),
    ("transforms", "models"),
    ("job", "parallel"),
    ("workdir", "evaluation"),
    ("report", "recipes"),
    ("report", "plan"),
    ("sweep", "report"),  # a report reads the lines that the sweep wrote
    ("sweep", "plan"),
]

# Only these packages may import the library.
CONFINED = {
    "orbax": {"train/_orbax.py"},
    "tensorboardX": {"workdir/_tensorboard.py"},
    "mlflow": {"workdir/_trackers.py"},
    "wandb": {"workdir/_trackers.py"},
    "tqdm": {"train/_progress.py"},
    "grain": {"data/_batches.py"},
    "etils": {"_bucket_files.py", "workdir/_bucket.py"},
    "fsspec": {"_bucket_files.py", "workdir/_bucket.py"},
    "gcsfs": {"_bucket_files.py"},
    "cv2": {"data/images/_crops.py"},
    "equinox": {"models/_equinox.py"},
    "simplejpeg": {"data/images/_decode.py"},
    "PIL": {
        "data/images/_augment.py",
        "data/images/_crops.py",
        "data/images/_decode.py",
        "data/prepare/_generated_images.py",
        "data/prepare/_idx.py",
    },
    "optuna": {"sweep/search/_adaptive.py"},
    "scipy": {
        "data/prepare/_mnist1d.py",
        "plan/_bounds.py",
        "report/study/_limit.py",
        "report/study/_power.py",
        "report/study/_statistics.py",
        "report/study/_three_term_law.py",
        "sweep/_fits.py",
        "sweep/search/_sampled.py",
    },
    "mwparserfromhell": {"data/prepare/_clean_text.py"},
    "tokenizers": {"data/text/_byte_pairs.py", "data/text/_wordpiece.py"},
    "matplotlib": {"report/_axes.py", "report/_page.py", "report/study/_style.py"},
    "ml_collections": {"cli/_flags.py"},
    "absl": {"cli/_flags.py", "data/_batches.py"},
    "msgspec": {"_typed_json.py"},
    "pyarrow": {"data/own/_columns.py", "data/own/_saved.py"},
    "safetensors": {"interchange/_files.py"},
    "tensorflow_datasets": {"data/prepare/_builders.py", "data/_records.py"},
}
VENDORABLE = {
    "linalg",
    "transforms",
    "schedules",
    "losses",
    "metrics",
    "tree",
    "masks",
    "stacks",
    "types",
    "errors",
    "_scalars",
    "_shown",
}
PUBLIC_MODULES = {"data/baselines.py"}
"""A program inside a package; it may be imported from outside."""

FILES = sorted(PACKAGE.rglob("*.py"))
USERS = [
    file
    for folder in ("configs", "scripts", "tpu", "examples")
    for file in sorted((PACKAGE.parent / folder).rglob("*.py"))
]
TESTS = sorted((PACKAGE.parent / "tests").rglob("*.py"))


def package_of(file):
    return file.relative_to(PACKAGE).parts[0].removesuffix(".py")


@functools.cache
def statements(file):
    """Return a file's imports, assignments, classes and functions, also those inside functions."""
    kinds = (
        ast.Import,
        ast.ImportFrom,
        ast.Assign,
        ast.ClassDef,
        ast.FunctionDef,
        ast.AsyncFunctionDef,
    )
    nodes = ast.walk(ast.parse(file.read_text()))
    return [node for node in nodes if isinstance(node, kinds)]


@functools.cache
def imported(file):
    """Return the dotted names that a file imports, also inside functions."""
    names = set()
    for node in statements(file):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}: relative import"
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return names


@functools.cache
def packages_imported(file):
    names = {name.split(".")[1] for name in imported(file) if name.startswith("lbopt.")}
    return {name for name in names if name in LEVEL_OF}


def test_every_package_has_a_level():
    assert {package_of(file) for file in FILES} <= set(LEVEL_OF)


def test_imports_point_down():
    upwards = [
        f"{file}: {package_of(file)} imports {other}"
        for file in FILES
        for other in sorted(packages_imported(file))
        if LEVEL_OF[other] > LEVEL_OF[package_of(file)]
    ]
    assert not upwards, upwards


def modules():
    """Return the dotted names of modules below packages, without the packages themselves."""
    files = [file for file in FILES if file.stem not in ("__init__", "__main__")]
    return {".".join(file.relative_to(PACKAGE.parent).with_suffix("").parts) for file in files}


def is_public(module):
    path = module.removeprefix("lbopt.").replace(".", "/")
    return any(f"{path}.py" == one or path.startswith(f"{one}/") for one in PUBLIC_MODULES)


def test_packages_have_faces():
    """A package exports by `__init__`; the names of its other modules begin with an underscore."""
    named = {module: module.rpartition(".") for module in modules()}
    wrong = {
        module
        for module, (package, _, last) in named.items()
        if not (package == "lbopt" or last.startswith("_") or is_public(module))
    }
    assert not wrong


def test_private_modules_are_known_below_their_own_package_only():
    known = modules()
    wrong = []
    for file in [*FILES, *USERS]:
        folder = ".".join((*file.relative_to(PACKAGE.parent).parent.parts, ""))
        for node in statements(file):
            if not isinstance(node, ast.ImportFrom) or node.module.split(".")[0] != "lbopt":
                continue
            names = {f"{node.module}.{alias.name}": alias.asname for alias in node.names}
            for module in known & {node.module, *names}:
                package, _, last = module.rpartition(".")
                if last.startswith("_") and not folder.startswith(f"{package}."):
                    wrong.append(f"{file}:{node.lineno} imports {module}")
                if names.get(module) is not None and not is_public(module):
                    wrong.append(f"{file}:{node.lineno} renames {module}")
    assert not wrong, wrong


def assigns_several_values(node, lines):
    """Only swaps, and the unpacking of one value, may have several names on their left."""
    if not (isinstance(node, ast.Assign) and isinstance(node.value, ast.Tuple | ast.List)):
        return False
    values = sorted(map(ast.unparse, node.value.elts))
    names = [sorted(map(ast.unparse, getattr(target, "elts", ()))) for target in node.targets]
    return any(of_one not in ([], values) for of_one in names)


def lacks_paragraphs(node, lines):
    """A function of three statements and 20 lines must have a blank line between its stages."""
    if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        return False
    body = node.body[ast.get_docstring(node) is not None :]
    if len(body) < 3:
        return False
    own = lines[body[0].lineno - 1 : node.end_lineno]
    return len(own) >= 20 and all(line.strip() for line in own)


@pytest.mark.parametrize("breaks_rule", [assigns_several_values, lacks_paragraphs])
def test_style(breaks_rule):
    wrong = [
        f"{file}:{node.lineno}"
        for file in [*FILES, *USERS, *TESTS]
        for lines in [file.read_text().splitlines()]
        for node in statements(file)
        if breaks_rule(node, lines)
    ]
    assert not wrong, wrong


def test_a_class_name_has_one_meaning():
    """No two classes have one name; a leading underscore makes no difference."""
    places = {}
    for file in FILES:
        for node in statements(file):
            if isinstance(node, ast.ClassDef):
                places.setdefault(node.name.lstrip("_"), []).append(f"{file}:{node.lineno}")
    assert not {name: found for name, found in places.items() if len(found) > 1}


def test_strangers_do_not_know_each_other():
    acquainted = [
        f"{file}: {one} imports {other}"
        for file in FILES
        for one, other in STRANGERS
        if package_of(file) == one and other in packages_imported(file)
    ]
    assert not acquainted, acquainted


def test_libraries_stay_in_their_package():
    users = {library: set() for library in CONFINED}
    for file in FILES:
        for library in users.keys() & {name.split(".")[0] for name in imported(file)}:
            users[library].add(str(file.relative_to(PACKAGE)))
    outside = {library: found - CONFINED[library] for library, found in users.items()}
    assert not any(outside.values()), outside
    unused = [library for library, found in users.items() if not found]
    assert not unused, f"nothing imports {unused}: take them out of the table"


def test_private_modules_of_jax_are_used_in_one_file():
    """Programs that tests keep as text count too."""
    users = {
        file.relative_to(PACKAGE.parent).as_posix()
        for file in [*FILES, *USERS, *TESTS]
        if re.search(r"^\s*(from|import) jax(lib)?\._\w+", file.read_text(), re.MULTILINE)
    }
    assert users == {"lbopt/_jax_internals.py", "tests/oracles/jax_internals.py"}


def test_the_core_can_be_vendored_alone():
    heavy = {"flax", "orbax", "grain", "tqdm", "absl", "ml_collections"}
    needed = {
        str(file): (packages_imported(file) - VENDORABLE)
        | ({name.split(".")[0] for name in imported(file)} & heavy)
        for file in FILES
        if package_of(file) in VENDORABLE
    }
    assert not any(needed.values()), {file: names for file, names in needed.items() if names}


@pytest.mark.process
def test_public_names_are_imported_when_they_are_used():
    assert all(callable(getattr(lbopt, name)) for name in lbopt.__all__)
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            "import sys, lbopt; from lbopt.cli import main; main; "
            "print('jax' in sys.modules, 'lamb' in dir(lbopt))",
        ],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == "False True\n"


@pytest.mark.process
def test_a_start_waits_for_no_library_that_it_does_not_need():
    """Importing scikit-learn, which ships the digits, or PyTorch by tensorboardX takes seconds."""
    program = (
        "import sys; from lbopt.cli import _process, _train; from lbopt.data import load_digits; "
        "_process.import_tensorboard_writer(); load_digits(); "
        "print(sorted({'sklearn', 'torch', 'transformers', 'matplotlib', 'tensorflow'} "
        "& set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout == "[]\n"
