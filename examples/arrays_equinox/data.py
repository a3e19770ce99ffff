"""Write digits.npz: 1,797 scans of 8 x 8 pixels."""

import numpy as np
from sklearn.datasets import load_digits

if __name__ == "__main__":
    digits = load_digits()
    images = digits.images[..., None].astype(np.float32)
    np.savez("digits.npz", image=images, label=digits.target)
