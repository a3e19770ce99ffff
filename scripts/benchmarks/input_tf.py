"""The peer for images: `tf.data` with fused decode and crop, as in Google's ResNet code."""

from __future__ import annotations

import pathlib
from collections.abc import Iterator

import numpy as np
import tensorflow as tf

NAME = "tf.data, decode and crop fused"


def one_thread() -> None:
    """Keep TensorFlow on one thread. Call it before any other use of TensorFlow."""
    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(1)


def write(files: list[bytes], path: pathlib.Path, num_classes: int) -> None:
    """Write images and labels as TFRecords, the format that `tf.data` reads fastest."""
    with tf.io.TFRecordWriter(str(path)) as writer:
        for number, file in enumerate(files):
            image = tf.train.Feature(bytes_list=tf.train.BytesList(value=[file]))
            label = tf.train.Feature(int64_list=tf.train.Int64List(value=[number % num_classes]))
            features = tf.train.Features(feature={"image": image, "label": label})
            writer.write(tf.train.Example(features=features).SerializeToString())


def batches(
    path: pathlib.Path, size: int, interpolation: str, training: bool, batch: int
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Iterate without end over uint8 images [batch, size, size, 3] and int32 labels [batch].

    One thread does the work, and nothing is read ahead.

    Args:
      path: File that `write` wrote.
      size: Height and width of the images in pixels.
      interpolation: "bilinear" or "bicubic", by `tf.image.resize` without antialiasing.
      training: Whether to take a random crop and flip it at random; otherwise the crop is the
        central 7/8 of the shorter side.
      batch: Images in a batch.
    """
    fields = {
        "image": tf.io.FixedLenFeature([], tf.string),
        "label": tf.io.FixedLenFeature([], tf.int64),
    }

    def prepare(record):
        example = tf.io.parse_single_example(record, fields)
        shape = tf.io.extract_jpeg_shape(example["image"])
        window = _random(shape) if training else _central(shape)
        image = tf.io.decode_and_crop_jpeg(example["image"], window, channels=3)
        image = tf.image.resize(image, [size, size], interpolation)
        if training:
            image = tf.image.random_flip_left_right(image)
        return tf.saturate_cast(image, tf.uint8), tf.cast(example["label"], tf.int32)

    options = tf.data.Options()
    options.threading.private_threadpool_size = 1
    options.threading.max_intra_op_parallelism = 1
    options.autotune.enabled = False
    dataset = (
        tf.data.TFRecordDataset(str(path)).repeat().map(prepare).batch(batch).with_options(options)
    )
    return iter(dataset.as_numpy_iterator())


def _random(shape):
    begin, size, _ = tf.image.sample_distorted_bounding_box(
        shape,
        tf.zeros([1, 0, 4]),
        min_object_covered=0.1,
        aspect_ratio_range=(3 / 4, 4 / 3),
        area_range=(0.08, 1.0),
        max_attempts=10,
        use_image_if_no_bounding_boxes=True,
    )
    return tf.stack([begin[0], begin[1], size[0], size[1]])


def _central(shape):
    side = tf.cast(0.875 * tf.cast(tf.minimum(shape[0], shape[1]), tf.float32), tf.int32)
    return tf.stack([(shape[0] - side + 1) // 2, (shape[1] - side + 1) // 2, side, side])
