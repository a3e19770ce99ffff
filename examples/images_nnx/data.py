"""Write digits/CLASS/NUMBER.png: 1,797 scans of 8 x 8 pixels, a folder for each digit."""

import pathlib

import numpy as np
from PIL import Image
from sklearn.datasets import load_digits

if __name__ == "__main__":
    digits = load_digits()
    for number, (image, label) in enumerate(zip(digits.images, digits.target, strict=True)):
        folder = pathlib.Path("digits", str(label))
        folder.mkdir(parents=True, exist_ok=True)
        Image.fromarray((image * 15).astype(np.uint8)).save(folder / f"{number}.png")
