from ._columns import read_columns as read_columns
from ._folders import (
    ImageFiles as ImageFiles,
    LabelledImages as LabelledImages,
    find_images as find_images,
)
from ._labelled import (
    NO_SPLIT as NO_SPLIT,
    PREPARED as PREPARED,
    ChosenRecords as ChosenRecords,
    holds_images as holds_images,
    open_images as open_images,
    prepared_metadata as prepared_metadata,
)
from ._load import (
    TARGETS as TARGETS,
    Columns as Columns,
    OwnData as OwnData,
    describe as describe,
    load_arrays as load_arrays,
    split_rows as split_rows,
)
from ._returned import SourceDataset as SourceDataset, as_splits as as_splits
