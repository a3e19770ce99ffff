from ._arrays import (
    ArrayDataset as ArrayDataset,
    Dataset as Dataset,
    Reading as Reading,
    Splits as Splits,
)
from ._batches import (
    EvalBatches as EvalBatches,
    TrainBatches as TrainBatches,
    eval_batches as eval_batches,
    read_batches as read_batches,
    rows_of as rows_of,
    train_iterator as train_iterator,
)
from ._damaged import DAMAGED as DAMAGED, DamagedCount as DamagedCount
from ._digits import load_digits as load_digits
from ._order import example_indices as example_indices
from ._places import ptb_folder as ptb_folder, store_folder as store_folder
from ._records import (
    TfdsFolder as TfdsFolder,
    data_dir_or_bucket as data_dir_or_bucket,
    default_data_dir as default_data_dir,
)
