"""Builders of TensorFlow Datasets (TFDS), which write data sets: its own, and ours."""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import functools
import importlib
import io
import itertools
import logging
import os
import pathlib
import pkgutil
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from lbopt.data.prepare._generated import Examples, GeneratedDataset
from lbopt.errors import EnvironmentProblem, MissingPackage, UserError

_FORMAT = "array_record"
UNFINISHED = "incomplete."
"""Beginning of the name of a folder that is being written."""
_AT_A_TIME = 256
"""Number of records after which the description of a data set is written again."""
_NO_CATEGORIES = ("core", "dataset_collections", "datasets", "proto", "scripts", "testing")
"""Packages of TFDS that have no data sets."""
_DOWNLOAD_ERRORS = ("DownloadError", "NonMatchingChecksumError")
"""Errors of TFDS about a download. Their text names the address."""


def named(name: str, root: pathlib.Path) -> Any:
    """Return the builder of one of TFDS's own data sets.

    Args:
      name: Name of the data set, "name[/config][:version]".
      root: Folder of data sets.

    Raises:
      UserError: If there is no data set of this name, configuration or version.
      EnvironmentProblem: If TFDS is not installed.
    """
    tfds = _tfds()
    plain, _, config = name.partition(":")[0].partition("/")
    kind = _kind(plain)
    if config and config not in kind.builder_configs:
        near = _near(config, kind.builder_configs)
        fix = f"{plain} has no configuration {config!r}{near or '; leave it out'}"
        raise UserError("name", name, fix, code="choice")
    try:
        with quiet():
            return tfds.builder(name, data_dir=str(root), file_format=_FORMAT)
    except AssertionError as error:  # only the version can be wrong here
        fix = f"{plain} can be prepared in version {kind.VERSION}; use that"
        raise UserError("name", name, fix, code="choice") from error


def of_source(source: GeneratedDataset, root: pathlib.Path) -> Any:
    """Return a builder that writes a generated data set."""
    tfds = _tfds()

    # The class is made here, as its base exists only once TFDS is imported.
    class Made(tfds.core.GeneratorBasedBuilder, skip_registration=True):  # type: ignore
        name = source.name
        VERSION = tfds.core.Version(source.version)

        def _info(self) -> Any:
            return _description(source, self)

        def _split_generators(self, dl_manager: Any) -> Any:
            return {split: make() for split, make in source.splits.items()}

        def _generate_examples(self, *arguments: Any) -> Any:
            raise NotImplementedError("the splits have their generators")

    with quiet():
        return Made(data_dir=str(root), file_format=_FORMAT)


def use_examples(builder: Any, splits: Mapping[str, Callable[[], Examples]]) -> None:
    """Let the builder of one of TFDS's own data sets write given examples in place of a download.

    Args:
      builder: Builder of `named`.
      splits: Split -> function that yields its examples, whose keys and fields are TFDS's own.
    """
    builder._split_generators = lambda dl_manager: {split: make() for split, make in splits.items()}


def _description(source: GeneratedDataset, builder: Any) -> Any:
    """Return TFDS's description of a generated data set, for a builder or the identity of one."""
    tfds = _tfds()
    kept = source.metadata
    return tfds.core.DatasetInfo(
        builder=builder,
        description=source.description,
        features=tfds.features.FeaturesDict(source.features(tfds.features)),
        metadata=None if kept is None else tfds.core.MetadataDict(kept),
    )


def config_name(builder: Any) -> str:
    """Return the name of a builder's data set with its configuration: "name" or "name/config"."""
    config = builder.builder_config_name
    return f"{builder.name}/{config}" if config else builder.name


def generate(builder: Any, manual_dir: pathlib.Path) -> None:
    """Download and write a data set. After an error nothing is left of it.

    Args:
      builder: Builder of TFDS.
      manual_dir: Folder of the files that the user downloaded.

    Raises:
      EnvironmentProblem: If a package, the network or space on the disk is missing.
    """
    tfds = _tfds()
    settings = tfds.download.DownloadConfig(manual_dir=str(manual_dir), try_download_gcs=False)
    with _explaining(builder), _progress_bars(sys.stderr.isatty()), quiet():
        builder.download_and_prepare(download_config=settings)


def write_in_order(builder: Any, source: GeneratedDataset) -> None:
    """Write a generated data set in the order of its records. After an error nothing is left of it.

    Args:
      builder: Builder of `of_source`.
      source: The data set, with `records_per_shard`.

    Raises:
      EnvironmentProblem: If space on the disk is missing, or a file that it is made from.
    """
    tfds = _tfds()
    whole = pathlib.Path(os.fspath(builder.data_path))
    partial = whole.with_name(f"{UNFINISHED}lbopt_{whole.name}")
    try:
        with _explaining(builder):
            partial.mkdir()
            identity = tfds.core.DatasetIdentity.from_builder(builder)
            info = _description(source, dataclasses.replace(identity, data_dir=str(partial)))
            size = source.records_per_shard
            writer = tfds.core.SequentialWriter(info, size, file_format=_FORMAT)
            writer.initialize_splits(list(source.splits))
            for split, make in source.splits.items():
                records = (record for _, record in make())
                while several := list(itertools.islice(records, _AT_A_TIME)):
                    writer.add_examples({split: several})
            writer.close_all()
            partial.rename(whole)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


@contextlib.contextmanager
def _explaining(builder: Any) -> Iterator[None]:
    """Turn errors that the machine caused into `EnvironmentProblem`."""
    try:
        yield
    except Exception as error:
        problem = _explained(error, config_name(builder))
        if problem is None:
            raise
        raise problem from error


@contextlib.contextmanager
def _progress_bars(shown: bool) -> Iterator[None]:
    """Let TFDS show progress bars or none, and restore its setting at the end."""
    tfds = _tfds()
    # TFDS has no function that returns the setting: without bars it makes empty ones.
    bar = tfds.core.utils.tqdm(disable=True)
    before = not isinstance(bar, tfds.core.utils.EmptyTqdm)
    tfds.display_progress_bar(shown)
    try:
        yield
    finally:
        tfds.display_progress_bar(before)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Hide what TFDS prints, and the log of its libraries. Progress bars stay visible.

    Until the end, standard output of all threads is hidden, and log levels change for the whole
    process.
    """
    loggers = [logging.getLogger(name) for name in ("absl", "urllib3")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL)
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


def _kind(plain: str) -> Any:
    """Return the builder class of a data set's name."""
    tfds = _tfds()
    with quiet():
        with contextlib.suppress(tfds.core.registered.DatasetNotFoundError):
            return tfds.builder_cls(plain)
        # If a category needs a package that is missing, TFDS skips the categories after it, too.
        _import_categories()
        with contextlib.suppress(tfds.core.registered.DatasetNotFoundError):
            return tfds.builder_cls(plain)
        known = tfds.list_builders(with_community_datasets=False)
    fix = f"there is no such data set{_near(plain, known)}; lbopt prepare --help lists some"
    raise UserError("name", plain, fix, code="choice")


@functools.cache
def _import_categories() -> None:
    """Import each category of TFDS by itself."""
    tfds = _tfds()
    for module in pkgutil.iter_modules(tfds.__path__):
        if module.ispkg and module.name not in _NO_CATEGORIES:
            with contextlib.suppress(ImportError):
                importlib.import_module(f"{tfds.__name__}.{module.name}")


def _near(name: str, known: Any) -> str:
    """Return a question with the known names that are similar; "" if there are none."""
    near = difflib.get_close_matches(name, list(known), n=3)
    return f"; did you mean {' or '.join(map(repr, near))}?" if near else ""


def _explained(error: BaseException, name: str) -> EnvironmentProblem | None:
    """Return the problem of the machine that caused an error; None if it has another cause."""
    causes: list[BaseException] = []
    cause: BaseException | None = error
    while cause is not None and cause not in causes:
        causes.append(cause)
        cause = cause.__cause__ or cause.__context__

    # A missing package first: it can explain other errors of the same chain, not the reverse.
    for cause in causes:
        if isinstance(cause, ImportError):
            missing = (cause.name or str(cause)).partition(".")[0]
            fix = f"it is needed to prepare {name}, and is not installed: pip install {missing}"
            return MissingPackage(missing, reason=fix)
    for cause in causes:
        text = " ".join(str(cause).split())
        from_network = isinstance(cause, OSError) and cause.errno is None
        if type(cause).__name__ in _DOWNLOAD_ERRORS or from_network:
            fix = (
                f"it cannot be downloaded ({text[:300]}); repair the network or HTTPS_PROXY and "
                "run this again"
            )
            return EnvironmentProblem("name", name, fix, code="resource")
        if isinstance(cause, OSError):
            file = cause.filename
            place = f" {os.fsdecode(file)}" if isinstance(file, str | bytes) else ""
            fix = (
                f"it cannot be prepared ({cause.strerror}{place}); repair that, or give another "
                "{data_dir}"
            )
            also = ["data_dir"]
            return EnvironmentProblem("name", name, fix, code="resource", also=also)
    return None


def _tfds() -> Any:
    try:
        import tensorflow_datasets
    except ImportError as error:
        fix = f"it prepares data sets, and is not installed ({error}): pip install 'lbopt[tfds]'"
        raise MissingPackage("tensorflow-datasets", reason=fix) from error
    return tensorflow_datasets
