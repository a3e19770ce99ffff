"""What writes data sets: builders of TensorFlow Datasets, its own and those of our sources."""

from __future__ import annotations

import contextlib
import difflib
import functools
import importlib
import io
import logging
import os
import pathlib
import pkgutil
import sys
from collections.abc import Iterator
from typing import Any

from lbopt.data.prepare._source import GeneratedDataset
from lbopt.errors import EnvironmentProblem, UserError

_FORMAT = "array_record"
_NO_CATEGORIES = ("core", "dataset_collections", "datasets", "proto", "scripts", "testing")
_SAY_WHAT_FAILED = ("DownloadError", "NonMatchingChecksumError")
"""Errors of TFDS whose text says which address did not answer, or with what."""


def named(name: str, root: pathlib.Path) -> Any:
    """Return the builder of one of TFDS's own data sets.

    Args:
      name: "name[/config][:version]".
      root: folder of data sets.

    Raises:
      UserError: if there is none of that name, configuration or version, with those that are near.
      EnvironmentProblem: if TFDS is not installed.
    """
    tfds = _tfds()
    plain, _, config = name.partition(":")[0].partition("/")
    kind = _kind(plain)
    if config and config not in kind.builder_configs:
        raise UserError(
            f"DATASET = {name!r}: {plain} has no configuration {config!r}{_near(config, kind.builder_configs)}"
        )
    try:
        with quiet():
            return tfds.builder(name, data_dir=str(root), file_format=_FORMAT)
    except AssertionError as error:  # the only thing left that a name can get wrong
        raise UserError(
            f"DATASET = {name!r}: {plain} can be prepared in version {kind.VERSION}; write that"
        ) from error


def of_source(source: GeneratedDataset, root: pathlib.Path) -> Any:
    """Return a builder that writes a source."""
    tfds = _tfds()

    class Made(tfds.core.GeneratorBasedBuilder, skip_registration=True):  # type: ignore
        name = source.name
        VERSION = tfds.core.Version(source.version)

        def _info(self) -> Any:
            features = tfds.features.FeaturesDict(source.features(tfds.features))
            return tfds.core.DatasetInfo(
                builder=self, description=source.description, features=features
            )

        def _split_generators(self, dl_manager: Any) -> Any:
            return {split: make() for split, make in source.splits.items()}

        def _generate_examples(self, *arguments: Any) -> Any:
            raise NotImplementedError("the splits have their generators")

    with quiet():
        return Made(data_dir=str(root), file_format=_FORMAT)


def config_name(builder: Any) -> str:
    """Return what `config.data.builder` calls a builder's data set: "name", or "name/config"."""
    config = builder.builder_config_name
    return f"{builder.name}/{config}" if config else builder.name


def generate(builder: Any, manual_dir: pathlib.Path) -> None:
    """Download and write a data set; all of it is there afterwards, or nothing.

    Raises:
      EnvironmentProblem: if a package is missing, the network, or room on the disk.
    """
    tfds = _tfds()
    settings = tfds.download.DownloadConfig(manual_dir=str(manual_dir), try_download_gcs=False)
    tfds.display_progress_bar(sys.stderr.isatty())
    try:
        with quiet():
            builder.download_and_prepare(download_config=settings)
    except Exception as error:
        if (problem := _explained(error, config_name(builder))) is None:
            raise
        raise EnvironmentProblem(problem) from error


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Keep what TFDS prints and what is logged below it from the terminal; progress bars stay."""
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
    """Return the class of a name. Where TFDS cannot import one category for want of a package, it forgets all that follow."""
    tfds = _tfds()
    with quiet():
        for find_more in (lambda: None, _import_categories):
            find_more()
            with contextlib.suppress(tfds.core.registered.DatasetNotFoundError):
                return tfds.builder_cls(plain)
        known = tfds.list_builders(with_community_datasets=False)
    raise UserError(
        f"DATASET = {plain!r}: there is no such data set{_near(plain, known)}; lbopt prepare --help lists some"
    )


@functools.cache
def _import_categories() -> None:
    tfds = _tfds()
    for module in pkgutil.iter_modules(tfds.__path__):
        if module.ispkg and module.name not in _NO_CATEGORIES:
            with contextlib.suppress(ImportError):
                importlib.import_module(f"{tfds.__name__}.{module.name}")


def _near(name: str, known: Any) -> str:
    near = difflib.get_close_matches(name, list(known), n=3)
    return f"; did you mean {' or '.join(map(repr, near))}?" if near else ""


def _explained(error: BaseException | None, name: str) -> str | None:
    """Return what is wrong with the machine in one line, None if it is something else."""
    seen: list[BaseException] = []
    while error is not None and error not in seen:
        seen.append(error)
        error = error.__cause__ or error.__context__
    for cause in seen:
        if isinstance(cause, ImportError):
            missing = (cause.name or str(cause)).partition(".")[0]
            return f"{name} is prepared with the package {missing}, which is not installed: pip install {missing}"
    for cause in seen:
        text = " ".join(str(cause).split())
        if type(cause).__name__ in _SAY_WHAT_FAILED or (
            isinstance(cause, OSError) and cause.errno is None
        ):
            return f"{name} cannot be downloaded ({text[:300]}); mend the network or HTTPS_PROXY and run this again"
        if isinstance(cause, OSError):
            place = (
                f" {os.fsdecode(cause.filename)}" if isinstance(cause.filename, str | bytes) else ""
            )
            return f"{name} cannot be prepared ({cause.strerror}{place}); mend that, or give another --data_dir"
    return None


def _tfds() -> Any:
    try:
        import tensorflow_datasets
    except ImportError as error:
        raise EnvironmentProblem(
            f"data sets are prepared by tensorflow-datasets, which is not installed ({error}): pip install 'lbopt[tfds]'"
        ) from error
    return tensorflow_datasets
