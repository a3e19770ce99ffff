"""MNIST-1D against the package of its authors, and as a config reads it."""

import numpy as np
import pytest

from lbopt.config import DataConfig
from lbopt.data.from_config import load_source
from lbopt.data.prepare import MNIST1D, prepare_source


@pytest.mark.slow  # the package takes 5 s
def test_signals_are_those_of_the_package(tmp_path):
    """In their order, so that the validation split is of training signals."""
    from mnist1d.data import get_dataset_args, make_dataset  # it takes a second to import

    theirs = make_dataset(get_dataset_args())
    prepare_source(MNIST1D, str(tmp_path))
    source = load_source(
        DataConfig(
            "tfds",
            builder="mnist1d",
            data_dir=str(tmp_path),
            train_split="train[:3600]",
            validation_split="train[3600:]",
            normalize=False,
        )
    )
    assert (source.task, source.features, source.outputs) == ("classification", ("signal",), 10)
    parts = [part.take(np.arange(len(part))) for part in source.splits]
    assert [len(part["label"]) for part in parts] == [3600, 400, 1000]
    for name, ending in (("signal", "x"), ("label", "y")):
        found = np.concatenate([part[name] for part in parts])
        wanted = np.concatenate([theirs[ending], theirs[f"{ending}_test"]])
        np.testing.assert_allclose(found, wanted, rtol=1e-6, atol=1e-6)
