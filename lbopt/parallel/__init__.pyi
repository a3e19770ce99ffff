from ._aggregation import WITHIN_AXIS as WITHIN_AXIS, Aggregation as Aggregation
from ._backends import (
    compile_step as compile_step,
    make_eval_step as make_eval_step,
    make_train_step as make_train_step,
)
from ._clip import CLIP_STAGES as CLIP_STAGES, GradientClip as GradientClip
from ._compiled import Step as Step
from ._diloco import (
    EMPTY_EXCHANGES as EMPTY_EXCHANGES,
    Diloco as Diloco,
    LocalState as LocalState,
    diloco as diloco,
    exchange_metrics as exchange_metrics,
    first_worker as first_worker,
    leave_out as leave_out,
    rebuilt_workers as rebuilt_workers,
    take_fragment as take_fragment,
)
from ._loss_form import mean_and_weight as mean_and_weight
from ._mesh import (
    DATA_AXIS as DATA_AXIS,
    ORDERS as ORDERS,
    available_devices as available_devices,
    batch_sharding as batch_sharding,
    check_divisible as check_divisible,
    check_mesh_request as check_mesh_request,
    local_parts as local_parts,
    make_mesh as make_mesh,
    put_batch as put_batch,
    put_replicated as put_replicated,
    replicated_sharding as replicated_sharding,
    splits_evenly as splits_evenly,
    torus_grid as torus_grid,
)
from ._options import BACKENDS as BACKENDS, StepOptions as StepOptions
from ._parts import (
    leaf_as_rows as leaf_as_rows,
    leaf_from_rows as leaf_from_rows,
    shape_of_rows as shape_of_rows,
)
from ._processes import connect_processes as connect_processes
from ._reduction import (
    Aggregate as Aggregate,
    AllReduce as AllReduce,
    ReduceScatter as ReduceScatter,
    Reduction as Reduction,
    on_one_device as on_one_device,
)
from ._rounds import (
    EXCHANGE as EXCHANGE,
    LEFT_OUT as LEFT_OUT,
    LocalSteps as LocalSteps,
    devices_per_worker as devices_per_worker,
)
from ._shard_matrices import (
    deal_matrices as deal_matrices,
    shard_matrices as shard_matrices,
)
from ._shards import split_sharding as split_sharding, with_shardings as with_shardings
from ._state import TrainState as TrainState, split_seed as split_seed
from ._step import step_on_one_device as step_on_one_device
