from ._columns import read_columns as read_columns
from ._load import OwnData as OwnData, describe as describe, load_arrays as load_arrays
from ._returned import SourceDataset as SourceDataset, as_splits as as_splits
