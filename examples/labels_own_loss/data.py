"""Write digits/*.npy: images of digits, and for each: even, prime, with a loop, above 4."""

import pathlib

import numpy as np
from sklearn.datasets import load_digits

if __name__ == "__main__":
    digits = load_digits()
    of_digit = [[d % 2 == 0, d in (2, 3, 5, 7), d in (0, 6, 8, 9), d > 4] for d in range(10)]
    pathlib.Path("digits").mkdir(exist_ok=True)
    np.save("digits/pixels.npy", digits.data.astype(np.float32))
    np.save("digits/labels.npy", np.array(of_digit, np.int32)[digits.target])
