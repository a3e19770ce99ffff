"""Text for BERT: a token store, and the peer, a loop written with the tokenizers library."""

from __future__ import annotations

import itertools
import pathlib
import random
from collections.abc import Iterator

import numpy as np
import tokenizers

from lbopt.data.text import MaskedLMDataset, StoreWriter, load_pydoc_topics, open_store

NAME = "plain tokenizers loop"
VOCAB_SIZE = 8192
MASKED_FRACTION = 0.15


def write_store(folder: pathlib.Path) -> None:
    """Write the topics of pydoc as a token store."""
    corpus = load_pydoc_topics(VOCAB_SIZE)
    with StoreWriter(folder, corpus.pieces.pieces, "the topics of pydoc") as writer:
        for document in itertools.chain(corpus.train, corpus.validation, corpus.test):
            writer.append(document)


def open_ours(folder: pathlib.Path, length: int, max_predictions: int) -> MaskedLMDataset:
    """Open the store as masked examples of `length` tokens."""
    store = open_store(folder)
    return MaskedLMDataset(store, length, len(store.pieces), max_predictions)


def as_text(dataset: MaskedLMDataset, pieces: tuple[str, ...]) -> list[tuple[str, str]]:
    """Return both segments of every example as text, so that both sides do the same work."""
    batch = dataset.take(np.arange(len(dataset)))

    # Put the masked tokens back.
    ids = batch["input_ids"].copy()
    used = batch["masked_weights"] > 0
    rows = np.broadcast_to(np.arange(len(ids))[:, None], used.shape)
    ids[rows[used], batch["masked_positions"][used]] = batch["masked_labels"][used]

    words = np.asarray(pieces, dtype=object)
    pairs = []
    for tokens, second, real in zip(
        ids, batch["token_type_ids"] > 0, batch["attention_mask"] > 0, strict=True
    ):
        # Without [CLS] and [SEP].
        segments = (tokens[real & ~second][1:-1], tokens[second][:-1])
        pairs.append(tuple(" ".join(words[one]).replace(" ##", "") for one in segments))
    return pairs


def plain_batches(
    pairs: list[tuple[str, str]],
    pieces: tuple[str, ...],
    length: int,
    max_predictions: int,
    batch: int,
) -> Iterator[dict[str, np.ndarray]]:
    """Yield batches without end, made in Python: tokenised pairs of segments with 15 % masked.

    Args:
      pairs: Texts of the segments.
      pieces: Vocabulary.
      length: Tokens in an example, padding included.
      max_predictions: Largest number of masked tokens in an example.
      batch: Examples in a batch.
    """
    vocabulary = {piece: number for number, piece in enumerate(pieces)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordPiece(vocabulary, unk_token="[UNK]"))
    tokenizer.normalizer = tokenizers.normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.BertPreTokenizer()
    cls, sep, mask = (vocabulary[token] for token in ("[CLS]", "[SEP]", "[MASK]"))
    rng = random.Random(0)

    def example() -> dict[str, np.ndarray]:
        first_text, second_text = rng.choice(pairs)
        is_random = rng.random() < 0.5
        if is_random:
            second_text = rng.choice(pairs)[1]

        first = tokenizer.encode(first_text, add_special_tokens=False).ids
        second = tokenizer.encode(second_text, add_special_tokens=False).ids
        while len(first) + len(second) > length - 3:
            (first if len(first) > len(second) else second).pop()
        ids = [cls, *first, sep, *second, sep]
        types = [0] * (len(first) + 2) + [1] * (len(second) + 1)

        # Masking as in BERT: 80 % become [MASK], 10 % a random token, 10 % stay.
        candidates = [place for place, token in enumerate(ids) if token not in (cls, sep)]
        wanted = min(max_predictions, max(1, round(MASKED_FRACTION * len(ids))), len(candidates))
        positions = sorted(rng.sample(candidates, wanted))
        labels = [ids[place] for place in positions]
        for place in positions:
            draw = rng.random()
            if draw < 0.8:
                ids[place] = mask
            elif draw < 0.9:
                ids[place] = rng.randrange(5, len(pieces))

        padding = [0] * (length - len(ids))
        unused = [0] * (max_predictions - wanted)
        return {
            "input_ids": np.asarray(ids + padding, np.int32),
            "token_type_ids": np.asarray(types + padding, np.int32),
            "attention_mask": np.asarray([1] * len(ids) + padding, np.int32),
            "masked_positions": np.asarray(positions + unused, np.int32),
            "masked_labels": np.asarray(labels + unused, np.int32),
            "masked_weights": np.asarray([1.0] * wanted + unused, np.float32),
            "next_sentence_label": np.int32(is_random),
        }

    while True:
        examples = [example() for _ in range(batch)]
        yield {name: np.stack([one[name] for one in examples]) for name in examples[0]}
