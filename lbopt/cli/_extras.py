"""The optional packages of lbopt: which extra installs them, and what they are for."""

from __future__ import annotations

import importlib.util
from typing import NamedTuple


class Packages(NamedTuple):
    """The packages of an extra of lbopt.

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
    "demo": Packages(("sklearn", "matplotlib", "jinja2"), "the digits data set, and reports"),
    "text": Packages(("tokenizers",), "text for BERT"),
    "tfds": Packages(("tensorflow_datasets", "array_record"), "prepared data sets of TFDS"),
    "images": Packages(("cv2", "PIL", "simplejpeg"), "photographs: ImageNet, folders of images"),
    "models": Packages(("equinox", "haiku"), "your models in Equinox or Haiku"),
    "tables": Packages(("pyarrow",), "your .csv, .parquet and .feather files"),
    "search": Packages(("optuna",), "studies with search method 'optuna'"),
    "gcs": Packages(("gcsfs",), "files in buckets, gs://..."),
    "wandb": Packages(("wandb",), "metrics to Weights & Biases"),
    "mlflow": Packages(("mlflow", "sqlalchemy", "alembic"), "metrics to MLflow"),
    "plan": Packages(("libtpu",), "lbopt plan, on Linux on x86-64"),
}
"""Extra -> its packages; `data` and `test` combine these, `tpu` and `cuda` install JAX's."""
