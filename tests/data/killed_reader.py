"""Read batches with two processes, say who they are, and wait to be killed: `python killed_reader.py`."""

import pathlib
import time

import numpy as np

from lbopt.data import ArrayDataset, Reading, TrainBatches, read_batches


class Numbers(ArrayDataset):
    """Read by two processes."""

    reading = Reading(1, 2, examples_per_piece=10)


if __name__ == "__main__":
    batches = read_batches(TrainBatches(Numbers({"number": np.arange(1000)}), 0, 100, 400))
    next(batches)
    children = pathlib.Path("/proc/self/task").glob("*/children")
    print(" ".join(file.read_text() for file in children), flush=True)
    time.sleep(100)
