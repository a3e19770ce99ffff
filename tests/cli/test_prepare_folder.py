"""`lbopt prepare folder`, and training on what it wrote."""

import pytest
from PIL import Image
from refusal import names_in, refused, troubled

from lbopt.config import ImageFolderConfig, TrainConfig
from lbopt.data.from_config import load_source


@pytest.fixture
def pets(tmp_path):
    """Make images of two classes, dark and bright."""
    root = tmp_path / "My pets"
    for split, count in (("train", 16), ("test", 4)):
        for name, grey in (("cat", 40), ("dog", 200)):
            folder = root / split / name
            folder.mkdir(parents=True)
            for number in range(count):
                Image.new("RGB", (8, 8), (grey + number,) * 3).save(folder / f"{number}.jpg")
    return root


def test_a_folder_is_prepared_once_and_trains(lbopt, pets, tmp_path, fingerprint):
    flags = (f"--images={pets}", f"--data_dir={tmp_path / 'data'}")
    code, out, err = lbopt("prepare", "folder", *flags)
    assert code == 0
    folder = tmp_path / "data" / "my_pets" / "1.0.0"
    said = [f"config.data.path = '{folder}'", "test: 8 images", "train: 32 images"]
    assert out.splitlines() == [str(folder), *said]

    # The line of the config can be pasted.
    config = TrainConfig(data=ImageFolderConfig("photos", image_size=8))
    exec(said[0], {"config": config})
    assert len(load_source(config.data).splits.train) == 32 - 4
    assert "writing images" in err
    before = fingerprint(tmp_path)
    code, out, err = lbopt("prepare", "folder", *flags)
    assert (code, out.splitlines()) == (0, [f"{folder} is there already", *said])
    assert (err, fingerprint(tmp_path)) == ("", before)

    file = tmp_path / "conf.py"
    file.write_text(
        "import jax\n"
        "from flax import nnx\n"
        "from lbopt.config import *\n"
        "class Net(nnx.Module):\n"
        "    def __init__(self, outputs, rngs):\n"
        "        self.head = nnx.Linear(192, outputs, rngs=rngs)\n"
        "    def __call__(self, x):\n"
        "        return self.head(x.reshape(len(x), -1))\n"
        "def get_config(arg):\n"
        "    return TrainConfig(model='conf.py:Net', num_steps=10, global_batch_size=12)\n"
    )
    rate = "--config.schedule.base_learning_rate=0.02"
    given = [f"--config={file}", f"--config.data={folder}", rate]
    code, out, err = lbopt("train", *given, f"--workdir={tmp_path / 'run'}")
    assert code == 0, err
    code, out, err = lbopt("evaluate", *given, f"--workdir={tmp_path / 'run'}")
    assert code == 0
    assert "test/accuracy" in out
    accuracy = [line for line in out.splitlines() if "test/accuracy" in line]
    assert "1" in accuracy[0].split()[-1]


def test_wrong_flags_are_refused(refusing, pets, tmp_path):
    data = f"--data_dir={tmp_path / 'data'}"
    with refused("--images", code="missing"):
        refusing("prepare", "folder", data)
    with refused("--images", code="missing"):
        refusing("prepare", "folder", f"--images={tmp_path / 'absent'}", data)
    with refused("--name", "9 lives", "value"):
        refusing("prepare", "folder", f"--images={pets}", "--name=9 lives", data)
    (tmp_path / "data" / "pets" / "1.0.0").mkdir(parents=True)
    with troubled("--name", "pets", "exists"):
        refusing("prepare", "folder", f"--images={pets}", "--name=pets", data)
    assert not list((tmp_path / "data" / "pets" / "1.0.0").iterdir())


def test_a_prepared_folder_whose_shard_is_gone_is_named(lbopt, pets, tmp_path):
    lbopt("prepare", "folder", f"--images={pets}", f"--data_dir={tmp_path}", "--name=pets")
    folder = tmp_path / "pets" / "1.0.0"
    next(folder.glob("*train*")).unlink()
    with troubled("data.path", str(folder), "damaged") as caught:
        load_source(ImageFolderConfig(str(folder), image_size=8))
    assert "opening" in names_in(caught)
