"""Python's help topics as tokens; as a program it writes the text and learns a tokenizer."""

import pathlib

import numpy as np
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from lbopt import Splits

HERE = pathlib.Path(__file__).parent


def load(text="topics.txt", tokenizer="tokenizer.json", length=32):
    known = Tokenizer.from_file(str(HERE / tokenizer))
    ids = np.array(known.encode((HERE / text).read_text()).ids)
    windows = ids[: len(ids) // (length + 1) * (length + 1)].reshape(-1, length + 1)
    parts = np.split(windows, [len(windows) * 8 // 10, len(windows) * 9 // 10])
    return Splits(*({"tokens": part} for part in parts))


if __name__ == "__main__":
    from pydoc_data.topics import topics

    pathlib.Path("topics.txt").write_text("\n\n".join(topics[name] for name in sorted(topics)))
    learned = Tokenizer(models.BPE())
    learned.pre_tokenizer = pre_tokenizers.ByteLevel()
    learned.train(["topics.txt"], trainers.BpeTrainer(vocab_size=512, show_progress=False))
    learned.save("tokenizer.json")
