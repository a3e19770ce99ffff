"""Data sets in TFDS's format, written by TFDS from a test's own examples."""

import contextlib
import io
import os

import tensorflow_datasets as tfds


def write(folder, name, splits, features, version="1.0.0", supervised=None):
    """Write {split: [record]} as data set `name` under a folder; return its own folder.

    `supervised` names the input and the target that the data set states.
    """

    def info(builder):
        return tfds.core.DatasetInfo(
            builder=builder,
            features=tfds.features.FeaturesDict(features),
            disable_shuffling=True,
            supervised_keys=supervised,
        )

    def generators(builder, manager):
        return {
            split: ((key, record) for key, record in enumerate(records))
            for split, records in splits.items()
        }

    body = {
        "VERSION": tfds.core.Version(version),
        "name": name,
        "_info": info,
        "_split_generators": generators,
        "_generate_examples": lambda builder: None,
    }
    made = type(
        name.title().replace("_", ""),
        (tfds.core.GeneratorBasedBuilder,),
        body,
        skip_registration=True,
    )
    builder = made(data_dir=str(folder), file_format="array_record")
    with (
        open(os.devnull, "w") as silent,
        contextlib.redirect_stdout(silent),
        contextlib.redirect_stderr(silent),
    ):
        builder.download_and_prepare()
    return builder.data_dir


def write_images(
    folder, name, splits, num_classes, shape=(None, None, 3), encoding="jpeg", version="1.0.0"
):
    """Write {split: [(file, label)]} with the features of imagenet2012.

    If a shape is given, the features are those of cifar10 or mnist.
    """
    features = {
        "image": tfds.features.Image(shape=shape, encoding_format=encoding),
        "label": tfds.features.ClassLabel(num_classes=num_classes),
        "file_name": tfds.features.Text(),
    }
    records = {
        split: [
            {"image": io.BytesIO(file), "label": label, "file_name": f"{split}_{number}"}
            for number, (file, label) in enumerate(files)
        ]
        for split, files in splits.items()
    }
    return write(folder, name, records, features, version)
