"""People's own files become splits with a task; the values are those of NumPy and pandas."""

import ast
import re

import numpy as np
import pandas as pd
import pytest
from refusal import names_in, refused

from lbopt.data import ArrayDataset, Splits
from lbopt.data.own import _load as load_module, as_splits, describe, load_arrays, read_columns


@pytest.fixture
def frame():
    rng = np.random.default_rng(0)
    return pd.DataFrame(
        {
            "size": rng.normal(50, 9, 40),
            "rooms": rng.integers(1, 6, 40),
            "kind": rng.choice(["flat", "house", "loft"], 40),
        }
    )


@pytest.mark.parametrize("suffix", [".csv", ".tsv", ".parquet", ".feather"])
def test_a_table_gives_the_same_splits_in_every_format(suffix, frame, tmp_path):
    file = tmp_path / f"homes{suffix}"
    write = {
        ".csv": lambda: frame.to_csv(file, index=False),
        ".tsv": lambda: frame.to_csv(file, index=False, sep="\t"),
        ".parquet": lambda: frame.to_parquet(file),
        ".feather": lambda: frame.to_feather(file),
    }
    write[suffix]()
    found = load_arrays(file, target="kind", test_fraction=0.25)

    assert (found.task, found.outputs, found.features) == ("classification", 3, ("features",))
    assert found.class_names == ("flat", "house", "loft")
    assert [len(split) for split in found.splits] == [26, 4, 10]
    train = found.splits.train.arrays
    np.testing.assert_allclose(train["features"].mean(0), 0, atol=1e-5)
    np.testing.assert_allclose(train["features"].std(0), 1, atol=1e-5)

    # Every example is in one split, and keeps its label.
    codes = pd.Categorical(frame["kind"]).codes
    rooms = np.concatenate([split.arrays["features"][:, 1] for split in found.splits])
    labels = np.concatenate([split.arrays["kind"] for split in found.splits])
    scaled = (frame["rooms"] - frame["rooms"].mean()) / frame["rooms"].std()
    order = np.argsort(rooms * 100 + labels, kind="stable")
    wanted = np.argsort(scaled.to_numpy() * 100 + codes, kind="stable")
    assert labels[order].tolist() == codes[wanted].tolist()


def test_a_split_is_drawn_by_its_seed_and_has_equal_shares_of_the_classes(tmp_path):
    labels = np.repeat([0, 1, 2, 3], [40, 30, 20, 10])
    np.savez(tmp_path / "a.npz", x=np.arange(100.0), label=labels)
    found = load_arrays(tmp_path / "a.npz", test_fraction=0.2, normalize=False)
    counts = [np.bincount(split.arrays["label"]).tolist() for split in found.splits]
    assert counts[2] == [8, 6, 4, 2]
    assert np.sum(counts, 0).tolist() == [40, 30, 20, 10]
    # The same on every machine.
    assert found.splits.validation.arrays["x"].tolist() == VALIDATION
    other = load_arrays(tmp_path / "a.npz", split_seed=1, normalize=False)
    assert other.splits.validation.arrays["x"].tolist() != VALIDATION


VALIDATION = [2, 6, 9, 36, 52, 53, 61, 82, 87, 93]


def test_uncompressed_arrays_stay_on_disk_and_are_measured_in_chunks(tmp_path, monkeypatch):
    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, (50, 6, 5, 3), dtype=np.uint8)
    np.savez(tmp_path / "a.npz", image=images, label=np.arange(50) % 5)
    np.savez_compressed(tmp_path / "b.npz", image=images, label=np.arange(50) % 5)
    assert isinstance(read_columns(tmp_path / "a.npz")["image"], np.memmap)
    assert not isinstance(read_columns(tmp_path / "b.npz")["image"], np.memmap)

    monkeypatch.setattr(load_module, "_CHUNK_BYTES", 1000)
    monkeypatch.setattr(load_module, "_LARGEST_IN_MEMORY_BYTES", 1000)
    on_disk = load_arrays(tmp_path / "a.npz").splits
    monkeypatch.setattr(load_module, "_LARGEST_IN_MEMORY_BYTES", 2**31)
    in_memory = load_arrays(tmp_path / "b.npz").splits
    for one, other in zip(on_disk, in_memory, strict=True):
        assert isinstance(one, load_module.MappedArrays)
        assert type(other) is ArrayDataset
        rows = np.arange(len(one))[::-1]
        for name in ("image", "label"):
            np.testing.assert_array_equal(one.take(rows)[name], other.take(rows)[name])
    pixels = np.asarray(in_memory.train.arrays["image"], np.float64)
    np.testing.assert_allclose(pixels.mean((0, 1, 2)), 0, atol=1e-5)
    np.testing.assert_allclose(pixels.std((0, 1, 2)), 1, atol=1e-5)


def test_splits_are_stated_by_files_or_by_a_column(frame, tmp_path):
    for name, rows in {"train": slice(0, 20), "val": slice(20, 30), "test": slice(30, 40)}.items():
        frame[rows].to_csv(tmp_path / f"{name}.csv", index=False)
    by_files = load_arrays(tmp_path, target="kind").splits
    frame["part"] = ["train"] * 20 + ["validation"] * 10 + ["test"] * 10
    frame.to_csv(tmp_path / "all.csv", index=False)
    by_column = load_arrays(tmp_path / "all.csv", target="kind", split_column="part").splits
    assert [len(split) for split in by_files] == [20, 10, 10]
    for one, other in zip(by_files, by_column, strict=True):
        np.testing.assert_array_equal(one.arrays["features"], other.arrays["features"])


@pytest.mark.parametrize(
    ("arrays", "task", "outputs"),
    [
        ({"y": np.arange(20) % 3}, "classification", 3),
        ({"y": np.linspace(0, 1, 20)}, "regression", 1),
        ({"y": np.zeros((20, 2))}, "regression", 2),
        ({"y": np.arange(80).reshape(20, 4) % 2}, "multi_label", 4),
    ],
)
def test_the_target_tells_the_task(arrays, task, outputs, tmp_path):
    np.savez(tmp_path / "a.npz", x=np.zeros((20, 3)), **arrays)
    found = load_arrays(tmp_path / "a.npz")
    assert (found.task, found.outputs) == (task, outputs)


def test_text_columns_are_named_together_with_the_columns_to_use(tmp_path):
    file = tmp_path / "a.csv"
    days = "k1,2026-01-31,Rome,30,1.5,0\nk2,2026-02-01,Oslo,40,2.5,1\n"
    file.write_text("id,day,city,age,income,label\n" + days * 20)
    with refused("features", (), "type") as caught:
        load_arrays(file)
    assert names_in(caught) >= {"id", "day", "city"}
    assert "<U" not in str(caught.value)
    flag = re.search('features="(.*)"', str(caught.value))[1]
    assert flag == "('age', 'income')"
    for data in (file, pd.read_csv(file, parse_dates=["day"])):
        found = load_arrays(data, features=ast.literal_eval(flag), matrix=False)
        assert found.features == ("age", "income")
    with refused("features", ("age", "city"), "type"):
        load_arrays(file, features=("age", "city"))


def test_a_wrong_number_of_a_table_is_named_by_its_column(tmp_path):
    file = tmp_path / "a.csv"
    file.write_text("one,two,y\n1,2,0\n1,inf,1\n" + "1,2,0\n" * 20)
    with refused("features", "two", "value"):
        load_arrays(file)
    file.write_text("one,y\n" + "1,0\n" * 20 + "1,-1\n")
    with refused("target", "y", "value") as caught:
        load_arrays(file)
    assert "below 0" in str(caught.value)


def test_a_language_model_has_tokens_alone(tmp_path):
    np.savez(tmp_path / "a.npz", tokens=np.arange(200).reshape(20, 10) % 17)
    found = load_arrays(tmp_path / "a.npz")
    assert (found.task, found.target, found.features, found.outputs) == (
        "language_model",
        "",
        ("tokens",),
        17,
    )
    assert found.splits.train.arrays["tokens"].dtype == np.int32


X = np.ones((20, 2))
Y = np.arange(20) % 2


@pytest.mark.parametrize(
    ("arrays", "options", "field", "code"),
    [
        ({"x": X, "label": Y[:19]}, {}, "path", "mismatch"),
        ({"x": np.where(np.eye(20, 2) > 0, np.nan, X), "label": Y}, {}, "features", "value"),
        ({"x": X, "label": Y - 1}, {}, "target", "value"),
        ({"x": X, "label": Y}, {"outputs": 1}, "target", "value"),
        ({"x": X, "label": Y + 0.5}, {"task": "classification"}, "target", "type"),
        ({"x": X, "label": Y + 0.0}, {}, "target", "type"),
        ({"x": X, "y": np.where(Y, "a", "")}, {}, "target", "value"),
        ({"x": X, "label": Y}, {"target": "price"}, "target", "choice"),
        ({"x": X, "other": Y}, {}, "target", "missing"),
        ({"x": X, "label": Y}, {"features": ("z",)}, "features", "choice"),
        ({"label": Y}, {}, "features", "missing"),
        ({"x": X, "label": Y}, {"test_fraction": 0.001}, "test_fraction", "value"),
        ({"x": X, "label": 2 * np.stack([Y, Y], 1)}, {}, "target", "value"),
        ({"x": X.astype(object), "label": Y}, {}, "path", "damaged"),
        ({"x": X + 2**40, "label": Y * 2**40}, {}, "target", "value"),
    ],
)
def test_arrays_that_fit_no_task_are_refused(arrays, options, field, code, tmp_path):
    np.savez(tmp_path / "a.npz", **arrays)
    with refused(field, code=code):
        load_arrays(tmp_path / "a.npz", **options)


@pytest.mark.parametrize(
    ("name", "text", "code"),
    [
        ("a.csv", "x,x,label\n1,2,0\n", "damaged"),
        ("a.csv", "x,label\n1,0\n,1\n", "damaged"),
        ("a.parquet", "no parquet", "damaged"),
        ("a.npz", "no zip", "damaged"),
        ("a.xlsx", "", "choice"),
        ("", "", "missing"),
    ],
)
def test_files_that_cannot_be_read_are_refused(name, text, code, tmp_path):
    file = tmp_path / (name or "nothing.csv")
    if name:
        file.write_text(text)
    with refused("path", str(file), code):
        read_columns(file)


class Squares:
    """A random-access source."""

    def __len__(self):
        return 12

    def __getitem__(self, index):
        return {"x": np.float32(index), "y": np.float32(index**2)}


class Drawn:
    """A data set with `take` alone."""

    def __len__(self):
        return 12

    def take(self, indices):
        return {"x": indices.astype(np.float32), "y": np.float32(indices**2)}


class WithoutNames(Drawn):
    """A data set whose batches are no mapping."""

    def take(self, indices):
        return [indices]


class Tuples(Squares):
    """A source whose records have no names."""

    def __getitem__(self, index):
        return np.float32(index), np.float32(index**2)


class AtMostTwo(Drawn):
    """A data set that forgets examples of larger batches."""

    def take(self, indices):
        return super().take(indices[:2])


class Wider(Drawn):
    """A data set whose dtype depends on the batch."""

    def take(self, indices):
        return {"x": indices.astype("f8" if len(indices) > 2 else "f4")}


@pytest.mark.parametrize(
    "split", [Squares(), Drawn(), {"x": np.arange(12.0), "y": np.arange(12.0) ** 2}]
)
def test_a_function_may_return_arrays_records_or_data_sets(split):
    found = describe(as_splits((split, split, split), "name", "data.py:load"))
    assert (found.task, found.target, found.outputs) == ("regression", "y", 1)
    batch = found.splits.train.draw(np.array([3, 1]), np.zeros(2, int), 0)
    assert batch["y"].tolist() == [9, 1]
    assert found.splits.train.reading.threads > 0


@pytest.mark.parametrize(
    ("found", "code"),
    [
        (3, "type"),
        (Splits(1, 2, 3), "type"),
        (Splits(Drawn(), Drawn(), {"x": np.zeros(3)}), "mismatch"),
        (Splits(*3 * [{"x": np.zeros(3), "y": np.zeros(2)}]), "mismatch"),
        (Splits(*3 * [{"x": 1.0, "y": 2.0}]), "mismatch"),
        (Splits(*3 * [WithoutNames()]), "type"),
        (Splits(*3 * [Tuples()]), "type"),
        (Splits(*3 * [AtMostTwo()]), "mismatch"),
        (Splits(*3 * [Wider()]), "mismatch"),
    ],
)
def test_what_is_no_data_is_refused(found, code):
    with refused("name", "data.py:load", code):
        as_splits(found, "name", "data.py:load")


class Source:
    """A random-access source of the examples of some arrays."""

    def __init__(self, arrays):
        self.arrays = arrays

    def __len__(self):
        return 20

    def __getitem__(self, index):
        return {name: array[index] for name, array in self.arrays.items()}


@pytest.mark.parametrize("kind", [dict, Source])
@pytest.mark.parametrize(
    ("wrong", "good", "field"),
    [
        ({"x": X, "y": np.where(Y, np.nan, 1)}, {"x": X, "y": Y + 0.0}, "target"),
        ({"x": np.where(X, np.inf, 0), "y": Y}, {"x": X, "y": Y}, "features"),
        ({"x": X, "y": Y + 1}, {"x": X, "y": Y}, "target"),
        ({"x": X, "y": 2 * X.astype(int)}, {"x": X, "y": X.astype(int)}, "target"),
    ],
)
def test_values_that_a_function_returns_are_checked(wrong, good, field, kind):
    """Of a source, the first examples of each split."""
    splits = as_splits((kind(good), kind(wrong), kind(good)), "name", "data.py:load")
    is_class = good["y"].ndim == 1 and good["y"].dtype.kind == "i"
    with refused(field, code="value"):
        describe(splits, outputs=2 if is_class else None)


def test_arrays_of_stated_splits_stay_on_disk(tmp_path, monkeypatch):
    monkeypatch.setattr(load_module, "_LARGEST_IN_MEMORY_BYTES", 0)
    for place, (split, count) in enumerate((("train", 6), ("validation", 3), ("test", 2))):
        (tmp_path / split).mkdir()
        np.save(tmp_path / split / "x.npy", 10 * place + np.arange(count * 2.0).reshape(count, 2))
        np.save(tmp_path / split / "y.npy", np.arange(count) % 2)
    found = load_arrays(tmp_path, normalize=False)
    assert not isinstance(found.splits.test.arrays["x"], np.ndarray)
    assert found.splits.validation.take(np.asarray([2, 0]))["x"].tolist() == [[14, 15], [10, 11]]
    assert found.splits.train.take(np.arange(6))["y"].tolist() == [0, 1, 0, 1, 0, 1]
