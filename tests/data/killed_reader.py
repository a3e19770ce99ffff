"""Program that reads with two processes, prints their ids, and waits to be killed."""

import pathlib
import time

import numpy as np

from lbopt.data import ArrayDataset, Reading, TrainBatches, read_batches


class Numbers(ArrayDataset):
    """Data set that is read by two processes."""

    reading = Reading(1, 2, examples_per_slice=10)


if __name__ == "__main__":
    batches = read_batches(TrainBatches(Numbers({"number": np.arange(1000)}), 0, 100, 400))
    next(batches)
    children = pathlib.Path("/proc/self/task").glob("*/children")
    print(" ".join(file.read_text() for file in children), flush=True)
    time.sleep(100)
