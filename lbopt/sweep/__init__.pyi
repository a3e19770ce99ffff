from ._bucket_shards import (
    BucketShards as BucketShards,
    gather_shards as gather_shards,
    shard_folder as shard_folder,
)
from ._example_scores import ExampleScores as ExampleScores, read_examples as read_examples
from ._finished_trial import (
    Diffusion as Diffusion,
    FinishedTrial as FinishedTrial,
    Numbers as Numbers,
    Probes as Probes,
    finished_trial as finished_trial,
    is_learned as is_learned,
    metric_of as metric_of,
    worst_score as worst_score,
)
from ._noise import by_step as by_step, noise_scales as noise_scales
from ._results import read_results as read_results
from ._runner import run_sweep as run_sweep
from ._trials import (
    deal_cells as deal_cells,
    judged_by as judged_by,
    make_cells as make_cells,
    make_problems as make_problems,
    trial_identity as trial_identity,
)
