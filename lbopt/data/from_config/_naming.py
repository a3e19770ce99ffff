"""Names of the config's fields in errors."""

from __future__ import annotations

import contextlib

from lbopt.config import DataConfig, naming


def naming_data() -> contextlib.AbstractContextManager[None]:
    """Put "data." before the fields of errors that are raised inside.

    Readers name their own parameters. Most are called as the fields of `DataConfig`.
    """
    return naming(
        "data",
        DataConfig,
        documents="data.builder",
        expected_vocab_size="data.vocab_size",
        num_streams="global_batch_size",
        questions="data.builder",
        text="data.name",
        vocabulary="data.vocab_file",
    )
