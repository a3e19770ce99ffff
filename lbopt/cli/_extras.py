"""The optional packages of lbopt: which extra installs them, and what they are for."""

from __future__ import annotations

import importlib.util
from typing import NamedTuple


class Extra(NamedTuple):
    """An extra of lbopt.

    Attributes:
      modules: Modules of the packages that it installs.
      purpose: What these are for.
    """

    modules: tuple[str, ...]
    purpose: str

    def missing(self) -> list[str]:
        """Return the modules that are not installed; nothing is imported."""
        return [name for name in self.modules if importlib.util.find_spec(name) is None]


EXTRAS = {
    "demo": Extra(("sklearn", "matplotlib", "jinja2"), "the digits data set, and reports"),
    "text": Extra(("tokenizers",), "text for BERT"),
    "tfds": Extra(("tensorflow_datasets", "array_record"), "prepared data sets of TFDS"),
    "images": Extra(("cv2", "PIL", "simplejpeg"), "photographs: ImageNet, folders of images"),
    "models": Extra(("equinox", "haiku"), "your models in Equinox or Haiku"),
    "tables": Extra(("pyarrow",), "your .csv, .parquet and .feather files"),
    "search": Extra(("optuna",), "studies with search method 'optuna'"),
    "gcs": Extra(("gcsfs",), "files in buckets, gs://..."),
    "wandb": Extra(("wandb",), "metrics to Weights & Biases"),
    "mlflow": Extra(("mlflow", "sqlalchemy", "alembic"), "metrics to MLflow"),
    "plan": Extra(("libtpu",), "lbopt plan, on Linux on x86-64"),
}
"""Extra -> its packages; `data` and `test` combine these, `tpu` and `cuda` install JAX's."""
