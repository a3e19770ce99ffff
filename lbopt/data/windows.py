"""Text for language models: windows of tokens, and the tokens that follow them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from lbopt.data.arrays import ArrayDataset
from lbopt.data.pieces import SEP
from lbopt.data.text import Document
from lbopt.errors import require


def join_documents(documents: Sequence[Document]) -> np.ndarray:
    """Return the tokens of all documents [tokens] int32, [SEP] before each and after the last."""
    end = np.asarray([SEP], np.int32)
    return np.concatenate([end, *(part for document in documents for part in (document.tokens, end))])


def make_windows(documents: Sequence[Document], sequence_length: int) -> ArrayDataset:
    """Cut text into windows that follow each other; every window is an example of its own.

    No state is carried from one window to the next, so a model sees less of the text before the first tokens of a window.
    Tokens at the end that do not fill a window are left out.

    Returns:
      `tokens` and `next_tokens` [windows, sequence_length] int32.

    Raises:
      UserError: if the text does not fill one window.
    """
    text = join_documents(documents)
    count = (len(text) - 1) // sequence_length
    require(
        count > 0,
        "config.data.sequence_length",
        sequence_length,
        f"a part of the text has {len(text) - 1} tokens; use windows of at most that",
    )
    shape = (count, sequence_length)
    used = count * sequence_length
    return ArrayDataset({"tokens": text[:used].reshape(shape), "next_tokens": text[1 : used + 1].reshape(shape)})
