"""MNIST's and Fashion-MNIST's files: small ones of the same form, with checksums of their own."""

import gzip
import hashlib
import io
import types

import numpy as np
import pytest
import tensorflow_datasets as tfds
from PIL import Image
from refusal import names_in, refused

from lbopt.config import DataConfig
from lbopt.data.from_config import load_source
from lbopt.data.prepare import _idx, prepare_named

SIZES = {"train": 12, "test": 5}
NAMES = [*_idx.BYTES]


def idx(array):
    """Return an array in the IDX format: 0, 0, 8 for uint8, the number of axes, their sizes."""
    sizes = b"".join(size.to_bytes(4, "big") for size in array.shape)
    return bytes([0, 0, 8, array.ndim]) + sizes + array.tobytes()


def made(seed):
    """Return {split: (images, labels)}."""
    rng = np.random.default_rng(seed)
    return {
        split: (
            rng.integers(0, 256, (size, 28, 28), dtype=np.uint8),
            rng.integers(0, 10, size, dtype=np.uint8),
        )
        for split, size in SIZES.items()
    }


def files_of(arrays):
    return {
        name: idx(array)
        for split, pair in arrays.items()
        for name, array in zip(_idx.PARTS[split][:2], pair, strict=True)
    }


ARRAYS = {"fashion_mnist": made(0), "mnist": made(1)}
FILES = {name: files_of(arrays) for name, arrays in ARRAYS.items()}


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """Let the two data sets have few examples."""
    parts = {split: part._replace(size=SIZES[split]) for split, part in _idx.PARTS.items()}
    monkeypatch.setattr(_idx, "PARTS", parts)
    monkeypatch.setattr(_idx, "BYTES", {name: len(FILES["mnist"][name]) for name in NAMES})
    for name, files in FILES.items():
        digests = {file: hashlib.sha256(data).hexdigest() for file, data in files.items()}
        monkeypatch.setitem(_idx.CHECKSUMS, name, digests)


def write(folder, files, packed=True):
    folder.mkdir()
    for name, data in files.items():
        place = folder / (f"{name}.gz" if packed else name)
        place.write_bytes(gzip.compress(data) if packed else data)
    return str(folder)


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("name", FILES)
def test_a_config_reads_what_is_made(name, packed, tmp_path):
    source = write(tmp_path / "files", FILES[name], packed)
    prepared = prepare_named(name, str(tmp_path), None, idx_dir=source)
    assert (prepared.name, prepared.made) == (name, True)
    assert dict(prepared.folder.num_examples) == SIZES

    opened = load_source(
        DataConfig(
            "images",
            builder=name,
            data_dir=str(tmp_path),
            train_split="train[:8]",
            validation_split="train[8:]",
            test_split="test",
            train_crop="none",
            pixel_mean=(0.0,),
            pixel_std=(1.0,),
        )
    )
    assert len(opened.class_names) == 10
    found = {"train": [], "test": []}
    for split, part in zip(("train", "train", "test"), opened.splits, strict=True):
        batch = part.take(np.arange(len(part)))
        found[split] += [
            (image.tobytes(), int(label))
            for image, label in zip(batch["image"], batch["label"], strict=True)
        ]
    for split, (images, labels) in ARRAYS[name].items():
        pairs = zip(images, labels, strict=True)
        wanted = [(image.tobytes(), int(label)) for image, label in pairs]
        assert sorted(found[split]) == sorted(wanted)


def test_records_have_the_order_of_tfds(tmp_path, monkeypatch):
    """TFDS's own builder reads unpacked files. It opens them and encodes images by TensorFlow,
    which is replaced, as it takes long to import."""
    files = write(tmp_path / "files", FILES["fashion_mnist"], packed=False)
    ours = prepare_named("fashion_mnist", str(tmp_path / "ours"), None, idx_dir=files)

    from tensorflow_datasets.image_classification import mnist

    def png(self, image):
        stream = io.BytesIO()
        Image.fromarray(image[..., 0]).save(stream, "PNG")
        return stream.getvalue()

    gfile = types.SimpleNamespace(GFile=open)
    monkeypatch.setattr(mnist, "tf", types.SimpleNamespace(io=types.SimpleNamespace(gfile=gfile)))
    monkeypatch.setattr(mnist, "_TRAIN_EXAMPLES", SIZES["train"])
    monkeypatch.setattr(mnist, "_TEST_EXAMPLES", SIZES["test"])
    monkeypatch.setattr(tfds.core.features.image_feature._ImageEncoder, "_encode_image", png)
    monkeypatch.setattr(
        tfds.download.DownloadManager,
        "download_and_extract",
        lambda self, urls: {
            key: f"{files}/{url.rpartition('/')[2].removesuffix('.gz')}"
            for key, url in urls.items()
        },
    )
    place = tmp_path / "theirs"
    builder = tfds.builder("fashion_mnist", data_dir=place, file_format="array_record")
    builder.download_and_prepare()
    assert builder.info.features.to_json() == ours.folder.features.to_json()
    assert builder.info.supervised_keys == ours.folder.supervised_keys
    for split in SIZES:
        pairs = zip(builder.as_data_source(split), ours.folder.open(split, "split"), strict=True)
        for theirs, record in pairs:
            np.testing.assert_array_equal(theirs["image"], record["image"])
            assert theirs["label"] == record["label"]


def test_one_that_exists_is_opened_and_its_files_are_not_read(tmp_path):
    source = write(tmp_path / "files", FILES["mnist"])
    prepare_named("mnist", str(tmp_path), None, idx_dir=source)
    again = prepare_named("mnist", str(tmp_path), None, idx_dir=str(tmp_path / "gone"))
    assert (again.made, dict(again.folder.num_examples)) == (False, SIZES)


IMAGES = "train-images-idx3-ubyte"
PACKED = gzip.compress(FILES["fashion_mnist"][IMAGES])
TEST_IMAGES = "t10k-images-idx3-ubyte"
DAMAGES = {
    "another data set": (gzip.compress(FILES["mnist"][IMAGES]), "mismatch", {"mnist"}),
    "another split": (
        gzip.compress(FILES["fashion_mnist"][TEST_IMAGES]),
        "mismatch",
        {TEST_IMAGES, IMAGES},
    ),
    "cut short": (PACKED[: len(PACKED) // 2], "damaged", set()),
    "cut short before it was packed": (
        gzip.compress(FILES["fashion_mnist"][IMAGES][:-9]),
        "damaged",
        {str(16 + 12 * 784 - 9), str(16 + 12 * 784)},
    ),
    "too long": (gzip.compress(FILES["fashion_mnist"][IMAGES] + b"0"), "damaged", set()),
    "one other pixel": (
        gzip.compress(FILES["fashion_mnist"][IMAGES][:-1] + b"0"),
        "damaged",
        {"fashion_mnist"},
    ),
    "no gzip": (b"<html>Not found</html>", "damaged", set()),
    "a damaged stream": (PACKED[:20] + b"00000000" + PACKED[28:], "damaged", set()),
    "empty": (b"", "damaged", {"0", str(16 + 12 * 784)}),
}


@pytest.mark.parametrize("case", DAMAGES)
def test_a_file_that_is_not_the_right_one_is_named(case, tmp_path):
    data, code, named = DAMAGES[case]
    source = write(tmp_path / "files", FILES["fashion_mnist"])
    file = tmp_path / "files" / f"{IMAGES}.gz"
    file.write_bytes(data)
    with refused(str(file), code=code) as caught:
        prepare_named("fashion_mnist", str(tmp_path / "data"), None, idx_dir=source)
    assert named <= names_in(caught)
    assert not (tmp_path / "data").exists()


def test_missing_files_are_listed(tmp_path):
    source = write(tmp_path / "files", FILES["fashion_mnist"])
    for name in NAMES[:2]:
        (tmp_path / "files" / f"{name}.gz").unlink()
    with refused("idx_dir", source, "missing") as caught:
        prepare_named("fashion_mnist", str(tmp_path / "data"), None, idx_dir=source)
    assert {f"{name}.gz" for name in NAMES[:2]} <= names_in(caught)
    assert f"{NAMES[2]}.gz" not in names_in(caught)


def test_no_folder_and_a_data_set_without_such_files(tmp_path):
    with refused("idx_dir", str(tmp_path / "no"), "missing"):
        prepare_named("mnist", str(tmp_path), None, idx_dir=str(tmp_path / "no"))
    with refused("idx_dir", str(tmp_path), "unused"):
        prepare_named("cifar10", str(tmp_path), None, idx_dir=str(tmp_path))
